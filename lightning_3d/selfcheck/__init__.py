# SPDX-License-Identifier: Apache-2.0
"""Proof that an installation computes what one process computes: `python -m lightning_3d.selfcheck --world 8`."""
