"""The command ``loongforge``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; errors a user can act on become one line and an exit code."""
    from loongforge.cli import run

    sys.exit(run())


if __name__ == "__main__":
    main()
