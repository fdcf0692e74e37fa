# SPDX-License-Identifier: Apache-2.0
"""`python -m lightning_3d.cli`."""

import sys

from lightning_3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
