"""Settings of micro-batch fusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from loongforge_fuse.fusion.batch import PadRule
from loongforge_fuse.fusion.cost import CostModel
from loongforge_fuse.fusion.packing import PackRule

LARGEST_FACTOR = 64


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Settings of :class:`~loongforge_fuse.fusion.fuser.MicroBatchFuser`.

    Attributes:
        fusion_batch_size: Micro-batches per fused forward/backward; 1 switches fusion off; ``"auto"`` picks
            the largest divisor of the accumulation steps whose activations fit. Default 4.
        accumulation_steps: Micro-batches per optimizer step, when known: checked at construction against
            ``fusion_batch_size``. Default None, then the length of the first window is taken.
        normalize: ``"elements"``: the window's loss is the sum over all valid elements divided by their
            number. ``"mean_of_means"``: every micro-batch's mean weighs the same, as plain accumulation does.
            Default ``"elements"``.
        pad_rules: How tensors of different shape are brought together, by batch key; joined with (and
            stronger than) the model's own ``pad_rules``. Default none.
        pack_rules: Keys that may be packed end to end; joined with the model's own ``pack_rules``. The
            model must then read packed batches. Default none.
        layout: ``"auto"``: mixed shapes are padded, packed or left apart, whichever the cost model predicts
            to be fastest. ``"pad"`` or ``"pack"`` forces one. Default ``"auto"``.
        cost: The cost model. Default :class:`~loongforge_fuse.fusion.cost.CostModel` with its constants.
        shared_keys: Batch keys without a sample dimension, taken from the first micro-batch after an
            identity or equality check. Default none.
        hooks: ``"refuse"`` or ``"allow"`` fusion while module hooks are registered. Default ``"refuse"``.
        probe: ``"first"``: before the first fused window compare fused and separate losses in eval mode,
            without gradients; a difference beyond ``probe_tolerance`` refuses fusion for good. ``"off"``:
            trust the model. Default ``"first"``.
        probe_tolerance: Largest relative difference of a micro-batch's loss in the probe. Default None:
            2e-2 in 16-bit precision, 1e-3 in float32, above rounding and below any real interaction.
        data_dependent: Whether the probe refuses a model that reads tensor values on the host or makes shapes
            from them. Default ``"refuse"``.
        debug_gradients: Keep each micro-batch's weight gradients on the outcome. Costs one backward per
            micro-batch. Default False.
        predict_memory: Predict the fused activations from one micro-batch's forward pass before the first
            window, scaled by the size of the group's inputs (always done for ``"auto"``). Default True; it
            needs a GPU or a ``free_bytes`` function to compare with.
        memory_headroom: Share of the free memory that fused activations may fill. Default 0.9.
        trace_length: Groups of micro-batches kept in the trace. Default 2000.
    """

    fusion_batch_size: int | Literal["auto"] = 4
    accumulation_steps: int | None = None
    normalize: Literal["elements", "mean_of_means"] = "elements"
    pad_rules: Mapping[str, PadRule] = field(default_factory=dict)
    pack_rules: Mapping[str, PackRule] = field(default_factory=dict)
    layout: Literal["auto", "pad", "pack"] = "auto"
    cost: CostModel = field(default_factory=CostModel)
    shared_keys: frozenset[str] = frozenset()
    hooks: Literal["refuse", "allow"] = "refuse"
    probe: Literal["first", "off"] = "first"
    probe_tolerance: float | None = None
    data_dependent: Literal["refuse", "allow"] = "refuse"
    debug_gradients: bool = False
    predict_memory: bool = True
    memory_headroom: float = 0.9
    trace_length: int = 2000

    def __post_init__(self) -> None:
        size, steps = self.fusion_batch_size, self.accumulation_steps
        if size != "auto" and not (isinstance(size, int) and 1 <= size <= LARGEST_FACTOR):
            message = f"fusion_batch_size is {size!r}, allowed: 'auto' or 1 to {LARGEST_FACTOR}"
            raise ValueError(message)
        if steps is not None and steps < 1:
            message = f"accumulation_steps is {steps}, it must be at least 1"
            raise ValueError(message)
        if steps is not None and isinstance(size, int):
            check_divides(size, steps)
        if self.normalize not in {"elements", "mean_of_means"}:
            message = f"normalize is {self.normalize!r}, allowed: 'elements', 'mean_of_means'"
            raise ValueError(message)
        for name, value, allowed in (
            ("hooks", self.hooks, ("refuse", "allow")),
            ("probe", self.probe, ("first", "off")),
            ("data_dependent", self.data_dependent, ("refuse", "allow")),
            ("layout", self.layout, ("auto", "pad", "pack")),
        ):
            if value not in allowed:
                message = f"{name} is {value!r}, allowed: {', '.join(map(repr, allowed))}"
                raise ValueError(message)
        if not 0.0 < self.memory_headroom <= 1.0:
            message = f"memory_headroom is {self.memory_headroom}, it must be above 0 and at most 1"
            raise ValueError(message)
        if self.trace_length < 1:
            message = f"trace_length is {self.trace_length}, it must be at least 1"
            raise ValueError(message)


def check_divides(fusion_batch_size: int, accumulation_steps: int) -> None:
    """Raise ValueError unless ``fusion_batch_size`` divides ``accumulation_steps``."""
    if accumulation_steps % fusion_batch_size:
        divisors = [d for d in range(1, accumulation_steps + 1) if accumulation_steps % d == 0]
        message = (
            f"fusion_batch_size {fusion_batch_size} does not divide the {accumulation_steps} micro-batches "
            f"of an accumulation window; use one of {divisors}, or 'auto', "
            "or change gradient_accumulation_steps"
        )
        raise ValueError(message)
