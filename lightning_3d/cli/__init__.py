# SPDX-License-Identifier: Apache-2.0
"""The command line: `lightning-3d plan`, `explain`, `models`, `gpus`; with torch `convert`, `check`, `fit`, ..."""

import sys
from collections.abc import Sequence

from lightning_3d.cli.arguments import build_parser
from lightning_3d.cli.commands import COMMANDS
from lightning_3d.cli.run import RUNS, run
from lightning_3d.errors import Lightning3DError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; those of the process if None.

    Returns:
        The exit status: 0, or 2 with one line on stderr if the arguments make no plan.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and arguments[0] in RUNS:
        return run(argv)
    options = build_parser().parse_args(arguments)
    try:
        return COMMANDS[options.subcommand](options[options.subcommand])
    except Lightning3DError as error:
        print(f"lightning-3d {options.subcommand}: {error}", file=sys.stderr)
        return 2
