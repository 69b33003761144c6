"""Command line: ``python -m loongforge_fuse kernels build|list|check``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loongforge_fuse.kernels import command


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="loongforge-fuse", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command.add_parser(commands)
    chosen = parser.parse_args(arguments)
    return int(chosen.run(chosen))


if __name__ == "__main__":
    sys.exit(main())
