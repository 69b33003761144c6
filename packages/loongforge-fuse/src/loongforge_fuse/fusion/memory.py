"""Will the fused activations fit? Predicted before any backward, from one micro-batch's forward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loongforge_fuse.fusion.execute import forward_losses
from loongforge_fuse.protocol import Batch, unwrap


def activation_bytes(model: nn.Module, batch: Batch) -> int:
    """Return the bytes one forward pass keeps for its backward: distinct storages, parameters left out.

    Runs the forward pass once in the present mode and throws the result away; random state is put back. On
    CUDA the peak of the pass counts when it is higher, which includes workspaces.
    """
    inner = unwrap(model)
    owned = {t.untyped_storage().data_ptr() for t in [*inner.parameters(), *inner.buffers()]}
    owned.update(t.untyped_storage().data_ptr() for t in batch.values() if isinstance(t, Tensor))
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    devices = sorted({p.device.index or 0 for p in inner.parameters() if p.is_cuda})
    before = 0
    if devices:
        torch.cuda.reset_peak_memory_stats(devices[0])
        before = torch.cuda.memory_allocated(devices[0])
    with torch.random.fork_rng(devices=devices), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        losses = forward_losses(inner, batch)
        total = sum(kept.values())
        del losses
    if devices:
        total = max(total, torch.cuda.max_memory_allocated(devices[0]) - before)
    return total


def free_bytes(model: nn.Module) -> int | None:
    """Return what the model's device can still give, idle blocks included; None on the CPU."""
    device = next((p.device for p in model.parameters() if p.is_cuda), None)
    if device is None:
        return None
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + idle


def largest_factor(
    *, accumulation_steps: int, per_micro_batch: int, available: int | None, headroom: float
) -> int:
    """Return the largest divisor of the accumulation steps whose activations fit; at least 1.

    Args:
        accumulation_steps: Micro-batches per window.
        per_micro_batch: Bytes that one micro-batch keeps for its backward.
        available: Free bytes, or None when memory is no limit.
        headroom: Share of the free bytes that may be filled.
    """
    divisors = [d for d in range(1, accumulation_steps + 1) if accumulation_steps % d == 0]
    if available is None:
        return divisors[-1]
    return max((d for d in divisors if d * per_micro_batch <= headroom * available), default=1)
