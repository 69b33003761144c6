"""Tensors that may be split over ranks (DTensors), and the gradient norm over all of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_gradients(model: nn.Module, limit: float | None, device: torch.device) -> Tensor:
    """Return the global gradient norm, over all shards where there are any, and scale down to ``limit``."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=device)
    norm = whole(get_total_norm(gradients))
    if limit is not None:
        clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


def whole(value: Tensor) -> Tensor:
    """Return the whole tensor of a DTensor (a collective); any other tensor as it is."""
    full = getattr(value, "full_tensor", None)
    return full() if callable(full) else value


def local(value: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory; any other tensor as it is."""
    own = getattr(value, "to_local", None)
    return own() if callable(own) else value


def split_like(value: Tensor, like: Tensor) -> Tensor:
    """Return ``value`` (whole, and equal on all ranks) split as the DTensor ``like`` is; sends nothing."""
    mesh, placements = getattr(like, "device_mesh", None), getattr(like, "placements", None)
    if mesh is None:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), mesh, placements, src_data_rank=None)
