"""The command line: data on standard output, logs on standard error, exit codes that mean something.

Exit codes: 0 done, 1 failed, 2 wrong setting, 65 bad data (not finite, spike), 66 no data, 69 something is
not there (pillar, process), 74 checkpoint cannot be written or read, 75 hung, 76 ranks disagree, 130 SIGINT,
143 SIGTERM.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from loongforge.cli.app import app
    from loongforge.errors import LoongForgeError

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except LoongForgeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except Exception as error:
        # Typer carries its parser's exceptions in a private copy of click: known by what they can do.
        show, exit_code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if callable(show) and isinstance(exit_code, int):
            show(sys.stderr)
            return exit_code
        raise
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0
