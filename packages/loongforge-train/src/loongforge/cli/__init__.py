"""The command line: data on standard output, logs on standard error, exit codes that mean something.

Exit codes: 0 done, 1 failed, 2 wrong setting, 65 bad data (not finite, spike), 66 no data or a data set that
cannot be read, 69 something is not there (pillar, process), 74 a file cannot be written or read, 75 hung, 76
ranks disagree or one was lost, 130 SIGINT, 143 SIGTERM.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Sequence

log = logging.getLogger("loongforge")
PILLAR_ERRORS = {
    "loongforge_data": (66, "`loongforge-data validate DIR` lists every problem of a data set at once"),
    "loongforge_comm": (76, "look at the logs of the other ranks; the newest complete checkpoint resumes"),
    "loongforge_mem": (69, "`--mem off` uses torch's own memory"),
    "loongforge_fuse": (69, "`--fuse off --no-graph --no-fused-ops` runs without fusion"),
}
"""Package of an exception -> (exit code, what to do)."""
MEMORY_HINT = "lower --batch-size (and raise --accumulation), use --precision bf16, or see --mem"
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what a user can act on becomes one line and a hint."""
    from loongforge.cli.app import app
    from loongforge.errors import LoongForgeError

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
    except LoongForgeError as error:
        return _tell(error, error.exit_code)
    except Exception as error:
        # Typer carries its parser's exceptions in a private copy of click: known by what they can do.
        show, exit_code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if callable(show) and isinstance(exit_code, int):
            show(sys.stderr)
            return exit_code
        known = explain(error)
        if known is None:
            raise
        return _tell(error, *known)
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0


def explain(error: Exception) -> tuple[int, str] | None:
    """Return exit code and hint of an error that is not ours but that a user can act on, or None."""
    package = type(error).__module__.split(".", 1)[0]
    if package in PILLAR_ERRORS:
        return PILLAR_ERRORS[package]
    if type(error).__name__ == "OutOfMemoryError":
        return 1, MEMORY_HINT
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return (
            74,
            "free space, lower --keep-last, or choose another --output; complete checkpoints are intact",
        )
    if isinstance(error, OSError) and error.filename is not None:
        return 74, "check the path and its permissions, or choose another --output"
    return None


def _tell(error: Exception, exit_code: int, hint: str | None = None) -> int:
    log.debug("the error in full", exc_info=error)
    sys.stderr.write(f"error: {error}\n")
    if hint is not None:
        sys.stderr.write(f"hint: {hint}\n")
    return exit_code
