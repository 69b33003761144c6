"""A probe of the first window: do samples of one batch influence each other, are values read on the host?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from loongforge_fuse.fusion.batch import JoinedBatch
from loongforge_fuse.fusion.execute import forward_losses, per_micro_batch
from loongforge_fuse.fusion.reasons import RefusalReason
from loongforge_fuse.fusion.refusal import Refusal
from loongforge_fuse.protocol import Batch, SampleLosses, unwrap

_HOST_READS = frozenset({"_local_scalar_dense"})
_VALUE_SHAPES = frozenset({"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"})


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note operators whose result depends on tensor values in a way the host sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(
        self,
        func: object,
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = getattr(getattr(func, "_schema", None), "name", "").removeprefix("aten::")
        if name in _HOST_READS or name in _VALUE_SHAPES:
            self.found.add(name)
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


@contextlib.contextmanager
def quiet_eval(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode, without gradients and compilation; modes and random state are put back."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with (
            torch.random.fork_rng(devices=devices),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        for module, training in modes:
            module.training = training


def probe_fusion(
    model: nn.Module,
    batches: Sequence[Batch],
    joined: JoinedBatch,
    *,
    tolerance: float | None,
    allow_reads: bool,
) -> Refusal | None:
    """Compare the losses of a joined batch with those of its parts; return why fusing would be wrong, or
    None.

    Dropout is off in the probe, so that only interactions between samples (or padding that a mask does not
    cover) can make a difference. Costs one forward pass of the group twice, and waits for the device.

    Args:
        model: The model.
        batches: Micro-batches with their draws.
        joined: The same, joined.
        tolerance: Largest relative difference of a micro-batch's losses by sample, as norms; None takes 2e-2
            where the model has 16-bit parameters or autocast is on, else 1e-3.
        allow_reads: Accept values read on the host.
    """
    inner = unwrap(model)
    if tolerance is None:
        half = any(p.element_size() < 4 for p in inner.parameters())
        kind = next((p.device.type for p in inner.parameters()), "cpu")
        tolerance = 2e-2 if half or torch.is_autocast_enabled(kind) else 1e-3
    with quiet_eval(inner):
        watch = _Watch()
        with watch:
            separate = [forward_losses(inner, batch) for batch in batches]
        if watch.found and not allow_reads:
            detail = (
                f"the forward pass uses {', '.join(sorted(watch.found))}: results depend on values read on "
                "the host; set data_dependent='allow' if they do not cross samples"
            )
            return Refusal(reason=RefusalReason.DATA_DEPENDENT, detail=detail)
        together = forward_losses(inner, joined.batch)
    if not together.per_sample:
        detail = "the model returns no loss_sum and loss_count per sample"
        return Refusal(reason=RefusalReason.NO_SAMPLE_LOSSES, detail=detail)
    return _compare(separate, together, joined.sizes, tolerance)


def _compare(
    separate: Sequence[SampleLosses], together: SampleLosses, sizes: tuple[int, ...], tolerance: float
) -> Refusal | None:
    """Compare sample by sample: in the sum of a micro-batch what one sample gains another may lose."""
    joint = torch.split(together.sums.double().cpu(), list(sizes))
    counts_joint = [float(v) for v in per_micro_batch(together.counts, sizes)]
    alone = [losses.sums.double().cpu() for losses in separate]
    scale = max((float(a[a.isfinite()].norm()) for a in alone), default=1.0) or 1.0
    for index, (a, b, n) in enumerate(zip(alone, joint, counts_joint, strict=True)):
        m = float(separate[index].counts.sum())
        both = a.isfinite() | b.isfinite()
        distance = float((a - b)[both].norm())
        if not distance <= tolerance * max(float(a[both].norm()), 1e-3 * scale) or abs(m - n) > 0.5:
            detail = (
                f"micro-batch {index} has loss sum {float(a.sum()):.6g} over {m:g} elements alone and "
                f"{float(b.sum()):.6g} over {n:g} fused, and its samples' losses lie {distance:.3g} apart: "
                "samples of one batch influence each other, or padding is not masked"
            )
            return Refusal(reason=RefusalReason.SAMPLES_INTERACT, detail=detail)
    return None
