"""``enable_loongforge``: marks a model (class or object) with the pillars it trains with.

Nothing about the model changes: the settings travel with it and :class:`loongforge.trainer.LoongTrainer`
reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, overload

from torch import nn

from loongforge.config import PillarConfig
from loongforge.errors import ConfigError

M = TypeVar("M", bound="type[nn.Module] | nn.Module")
_ATTRIBUTE = "__loongforge__"
SETTINGS = (
    "gcts_comm_strategy",
    "gcts_rebuild_interval",
    "mla_global_pool_gb",
    "adfe_prefetch_factor",
    "dmf_fusion_batch_size",
)
"""Settings of the original API, all keyword arguments of :func:`enable_loongforge`."""


@overload
def enable_loongforge(target: M, /) -> M: ...
@overload
def enable_loongforge(
    target: None = None,
    /,
    *,
    gcts: bool = True,
    mla: bool = True,
    adfe: bool = True,
    dmf: bool = True,
    mdg_config: str | Path | Mapping[str, object] | None = None,
    gcts_comm_strategy: str = "hybrid",
    gcts_rebuild_interval: int = 5000,
    mla_global_pool_gb: float | None = None,
    adfe_prefetch_factor: int = 2,
    dmf_fusion_batch_size: int | str = "auto",
) -> Callable[[M], M]: ...


def enable_loongforge(
    target: M | None = None,
    /,
    *,
    gcts: bool = True,
    mla: bool = True,
    adfe: bool = True,
    dmf: bool = True,
    mdg_config: str | Path | Mapping[str, object] | None = None,
    gcts_comm_strategy: str = "hybrid",
    gcts_rebuild_interval: int = 5000,
    mla_global_pool_gb: float | None = None,
    adfe_prefetch_factor: int = 2,
    dmf_fusion_batch_size: int | str = "auto",
) -> M | Callable[[M], M]:
    """Switch pillars on for a model class (as a decorator) or a model object (as a function).

    Args:
        target: Class or object when used without parentheses or as a function.
        gcts: Gradient communication pillar; off = stock DistributedDataParallel.
        mla: Memory pillar; off = stock allocation.
        adfe: Data pillar; off = torch's DataLoader.
        dmf: Micro-batch fusion; off = one forward and backward per micro-batch.
        mdg_config: Overrides of communication groups by name: a YAML file or a mapping.
        gcts_comm_strategy: ``hybrid`` or ``simple``.
        gcts_rebuild_interval: Steps between two rebuilds of the communication plan.
        mla_global_pool_gb: Size of the memory pool in GB; None lets the pillar choose.
        adfe_prefetch_factor: Batches loaded ahead per worker.
        dmf_fusion_batch_size: Micro-batches per fused forward and backward, or ``auto``.

    Returns:
        The same class or object, marked; or a decorator.

    Raises:
        ConfigError: A value is not allowed.
    """
    if gcts_comm_strategy not in {"hybrid", "simple"}:
        msg = f"gcts_comm_strategy is {gcts_comm_strategy!r}: allowed are hybrid and simple (or gcts=False)"
        raise ConfigError(msg)
    if dmf_fusion_batch_size != "auto" and not isinstance(dmf_fusion_batch_size, int):
        msg = f"dmf_fusion_batch_size is {dmf_fusion_batch_size!r}: allowed are a whole number and auto"
        raise ConfigError(msg)
    if adfe_prefetch_factor < 1 or gcts_rebuild_interval < 1:
        msg = (
            f"adfe_prefetch_factor is {adfe_prefetch_factor} and gcts_rebuild_interval is "
            f"{gcts_rebuild_interval}: both must be 1 or more"
        )
        raise ConfigError(msg)
    pillars = PillarConfig(
        comm=gcts_comm_strategy if gcts else "off",  # type: ignore[arg-type]
        comm_rebuild_interval=gcts_rebuild_interval,
        comm_groups=read_groups(mdg_config),
        mem="pool" if mla else "off",
        mem_pool_gb=mla_global_pool_gb,
        data="on" if adfe else "off",
        prefetch_factor=adfe_prefetch_factor,
        fuse=dmf_fusion_batch_size if dmf else "off",  # type: ignore[arg-type]
    )

    def mark(model: M) -> M:
        setattr(model, _ATTRIBUTE, pillars)
        return model

    return mark if target is None else mark(target)


def settings_of(model: nn.Module) -> PillarConfig | None:
    """Return the pillars a model was marked with, or None."""
    found = getattr(model, _ATTRIBUTE, None)
    return found if isinstance(found, PillarConfig) else None


def read_groups(source: str | Path | Mapping[str, object] | None) -> Mapping[str, object]:
    """Read ``mdg_config``: a YAML (or TOML) file or a mapping.

    Raises:
        ConfigError: The file is missing or not valid.
    """
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return dict(source)
    from loongforge.config import read_file

    return read_file(source)
