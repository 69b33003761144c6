"""How good a policy is without a robot: open-loop action error, validation loss, plots.

Names are imported when they are first used, so that the command line can name its commands without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loongforge.evaluation.openloop import EpisodeTrace, OpenLoopReport, evaluate_open_loop
    from loongforge.evaluation.validation import Validation

__all__ = ["EpisodeTrace", "OpenLoopReport", "Validation", "evaluate_open_loop"]

_HOME = {
    "EpisodeTrace": "openloop",
    "OpenLoopReport": "openloop",
    "Validation": "validation",
    "evaluate_open_loop": "openloop",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
