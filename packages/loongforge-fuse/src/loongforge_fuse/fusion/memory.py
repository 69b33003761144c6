"""Will the fused activations fit? Predicted before any backward, from one micro-batch's forward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loongforge_fuse.fusion.execute import forward_losses
from loongforge_fuse.protocol import Batch, unwrap


def activation_bytes(model: nn.Module, batch: Batch) -> int:
    """Return the bytes one forward pass keeps for its backward.

    Runs the forward pass once in the present mode and throws the result away; random state is put back. On
    CUDA this is the peak of the pass, workspaces included; elsewhere the distinct storages that autograd
    saves, parameters and inputs left out.
    """
    inner = unwrap(model)
    devices = sorted({p.device.index or 0 for p in inner.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=devices):
        if devices:
            return _peak(inner, batch, devices[0])
        return _saved(inner, batch)


def _peak(model: nn.Module, batch: Batch, device: int) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    losses = forward_losses(model, batch)
    del losses
    return torch.cuda.max_memory_allocated(device) - before


def _saved(model: nn.Module, batch: Batch) -> int:
    inputs = [t for t in batch.values() if isinstance(t, Tensor)]
    owned = {_own(t).untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), *inputs]}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = _own(tensor).untyped_storage()
        # Weights that were gathered for this layer are parameters too, or views of one.
        gathered = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)  # noqa: SLF001
        if storage.data_ptr() not in owned and not gathered:
            kept[storage.data_ptr()] = storage.nbytes()
        # Never the tensor itself: a node that saves its own output through a hook would hold itself for ever.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        losses = forward_losses(model, batch)
        total = sum(kept.values())
        del losses
    return total


def _own(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, any other tensor as it is."""
    local = getattr(tensor, "to_local", None)
    return local() if callable(local) else tensor


def elements(batch: Batch) -> int:
    """Return the elements of all tensors of a batch: what its activations grow with."""
    return sum(value.numel() for value in batch.values() if isinstance(value, Tensor))


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
