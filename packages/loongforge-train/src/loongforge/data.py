"""The data pillar under its public name: ``from loongforge.data import ADFEDataLoader,
DynamicPadCollator``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loongforge.errors import require

if TYPE_CHECKING:
    from loongforge_data import ADFEDataLoader as ADFEDataLoader
    from loongforge_data import DynamicPadCollator as DynamicPadCollator
    from loongforge_data import open_dataset as open_dataset

__all__ = ["ADFEDataLoader", "DynamicPadCollator", "open_dataset"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(require("loongforge_data", "loongforge-data"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
