"""LoongForge: trains vision-language-action models with four pillars that work alone or together.

Names are imported at first use: ``import loongforge`` loads neither torch nor a pillar, touches no GPU and
starts no thread.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loongforge_comm import build_mdg as build_mdg

    from loongforge.enable import enable_loongforge as enable_loongforge
    from loongforge.records import StepRecord as StepRecord
    from loongforge.trainer import LoongTrainer as LoongTrainer

__version__ = "0.1.0"
__all__ = ["LoongTrainer", "StepRecord", "build_mdg", "enable_loongforge"]

_HOME = {
    "LoongTrainer": "loongforge.trainer",
    "StepRecord": "loongforge.records",
    "enable_loongforge": "loongforge.enable",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "build_mdg":
        from loongforge.errors import require

        return getattr(require("loongforge_comm", "loongforge-comm"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
