"""Between ``grad`` and the flat buffers: gradients in before a bucket leaves, ``grad`` at averages after."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from loongforge_comm.flat import FlatBucket


@torch.no_grad()
def pack(
    flat: FlatBucket,
    parameters: Sequence[nn.Parameter],
    *,
    scale: float,
    request: bool,
) -> list[int]:
    """Copy the gradients into the bucket, multiplied by ``scale``, with use flags and the request word.

    Args:
        flat: the bucket.
        parameters: parameters that start in this bucket, in the order of ``flat.names``.
        scale: 1 / contributors, applied before the sum (fp16 would overflow after); 1 if the backend divides.
        request: this rank has a wish for the step border.

    Returns:
        Positions of the parameters that have no gradient here.
    """
    gradients = [parameter.grad for parameter in parameters]
    missing = [i for i, gradient in enumerate(gradients) if gradient is None]
    for i in missing:
        flat.views[i].zero_()
    if flat.buffer.is_cuda:
        _gather(gradients, flat.views, scale)
    else:
        for gradient, view in zip(gradients, flat.views, strict=True):
            if gradient is None:
                continue
            if gradient.is_sparse:
                view.copy_(gradient.to_dense()).mul_(scale)
            else:
                torch.mul(gradient, scale, out=view)
    if missing:
        used = torch.full((len(gradients),), scale)
        used[missing] = 0.0
        flat.flags.copy_(used.to(flat.flags.dtype))
    else:
        flat.flags.fill_(scale)
    if flat.control.numel():
        flat.control.fill_(1.0 if request else 0.0)
    return missing


def _gather(gradients: Sequence[Tensor | None], views: Sequence[Tensor], scale: float) -> None:
    """All gradients of a bucket by a few kernels for hundreds of tensors; those in place already stay."""
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    for gradient, view in zip(gradients, views, strict=True):
        if gradient is None:
            continue
        if gradient is view:
            if scale != 1.0:
                view.mul_(scale)
        elif gradient.is_sparse:
            view.copy_(gradient.to_dense()).mul_(scale)
        else:
            sources.append(gradient)
            targets.append(view)
    if sources:
        torch._foreach_copy_(targets, sources)
        if scale != 1.0:
            torch._foreach_mul_(targets, scale)


@torch.no_grad()
def publish(
    flat: FlatBucket, parameters: Sequence[nn.Parameter], missing: Sequence[int], *, captured: bool
) -> None:
    """Point ``grad`` at the averages. Flags are read only where this rank had no gradient itself.

    Args:
        flat: the bucket, after its reduction.
        parameters: parameters that start in it, in the order of ``flat.names``.
        missing: positions of those without a gradient here.
        captured: the work is being recorded into a CUDA graph.

    Raises:
        RuntimeError: inside a CUDA graph capture a parameter has no gradient here.
    """
    if not missing:
        for parameter, view in zip(parameters, flat.views, strict=True):
            parameter.grad = view
        return
    if captured:
        names = [flat.names[i] for i in missing]
        msg = (
            f"parameters {names[:5]} have no gradient while a CUDA graph is captured; whether another rank "
            "has one cannot be asked inside a graph. Give every captured parameter a gradient, or reduce "
            "after the replay with reduce_now()"
        )
        raise RuntimeError(msg)
    shares = flat.flags.tolist()
    nowhere = {i for i in missing if not abs(shares[i]) > 0.0}
    for i, (parameter, view) in enumerate(zip(parameters, flat.views, strict=True)):
        if i not in nowhere:
            parameter.grad = view
