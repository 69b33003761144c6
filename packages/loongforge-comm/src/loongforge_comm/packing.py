"""Between ``grad`` and the flat buffers: gradients in before a bucket leaves, ``grad`` at averages after."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from loongforge_comm.flat import FlatBucket


@torch.no_grad()
def pack(
    flat: FlatBucket,
    parameters: Mapping[str, nn.Parameter],
    views: Mapping[str, Tensor],
    *,
    scale: float,
    request: bool,
) -> dict[str, bool]:
    """Copy the gradients into the bucket, multiplied by ``scale``, with use flags and the request word.

    Args:
        flat: the bucket.
        parameters: parameters by name.
        views: gradient views into the flat buffers by name.
        scale: 1 / contributors, applied before the sum (fp16 would overflow after); 1 if the backend divides.
        request: this rank has a wish for the step border.

    Returns:
        For each parameter that starts in this bucket whether it has a gradient here.
    """
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    used: dict[str, bool] = {}
    for name in flat.names:
        view = views[name]
        gradient = parameters[name].grad
        used[name] = gradient is not None
        if gradient is None:
            view.zero_()
        elif gradient is view:
            if scale != 1.0:
                view.mul_(scale)
        elif gradient.is_sparse:
            view.copy_(gradient.to_dense()).mul_(scale)
        elif flat.buffer.is_cuda:
            sources.append(gradient)
            targets.append(view)
        else:
            torch.mul(gradient, scale, out=view)
    if sources:
        torch._foreach_copy_(targets, sources)
        if scale != 1.0:
            torch._foreach_mul_(targets, scale)
    if all(used.values()):
        flat.flags.fill_(scale)
    else:
        flags = torch.tensor(list(used.values()), dtype=torch.float32).mul_(scale)
        flat.flags.copy_(flags.to(flat.flags.dtype))
    if flat.control.numel():
        flat.control.fill_(1.0 if request else 0.0)
    return used


@torch.no_grad()
def publish(
    flat: FlatBucket,
    parameters: Mapping[str, nn.Parameter],
    views: Mapping[str, Tensor],
    used: Mapping[str, bool],
    *,
    captured: bool,
) -> None:
    """Point ``grad`` at the averages. Flags are read only where this rank had no gradient itself.

    Raises:
        RuntimeError: inside a CUDA graph capture a parameter has no gradient here.
    """
    missing = [name for name in flat.names if not used.get(name, False)]
    if missing and captured:
        msg = (
            f"parameters {missing[:5]} have no gradient while a CUDA graph is captured; whether another rank "
            "has one cannot be asked inside a graph. Give every captured parameter a gradient, or reduce "
            "after the replay with reduce_now()"
        )
        raise RuntimeError(msg)
    shares = flat.flags.tolist() if missing else []
    for i, name in enumerate(flat.names):
        if used.get(name, False) or abs(shares[i]) > 0.0:
            parameters[name].grad = views[name]
