"""The memory pillar under its public name: ``from loongforge.mla import get_mla_stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loongforge.errors import require

if TYPE_CHECKING:
    from loongforge_mem import MemoryConfig as MemoryConfig
    from loongforge_mem import MemoryOrchestrator as MemoryOrchestrator
    from loongforge_mem import get_mla_stats as get_mla_stats

__all__ = ["MemoryConfig", "MemoryOrchestrator", "get_mla_stats"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(require("loongforge_mem", "loongforge-mem"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
