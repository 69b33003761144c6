"""All-reduce algorithms written on point-to-point transfers and all-gather, for backends without a choice.

Every function sums ``buffer`` over the ranks in place and blocks until the sum is there (on CUDA it blocks
the current stream, not the host). Volumes are per rank for P ranks and S bytes:

===========  =================  ==========================  ===========================================
name         steps              bytes sent                  order of the sum
===========  =================  ==========================  ===========================================
ring         2 (P-1)            2 S (P-1)/P                 the backend's; depends on place in the buffer
tree         2 ceil(log2 P)     up to S log2 P (the root)   fixed binomial tree, same for every element
direct       1                  S (P-1)                     rank order, same for every element
all_gather   backend's          S (P-1)                     rank order, same for every element
===========  =================  ==========================  ===========================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def tree_all_reduce(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Binomial reduce to group rank 0, then binomial broadcast."""
    rank, size = group.rank(), group.size()
    scratch = torch.empty_like(buffer)
    mask = 1
    while mask < size:
        if rank & mask:
            _transfer(group, sends=[(rank - mask, buffer)])
            break
        if rank + mask < size:
            _transfer(group, receives=[(rank + mask, scratch)])
            buffer.add_(scratch)
        mask <<= 1
    if rank:
        mask = rank & -rank
        _transfer(group, receives=[(rank - mask, buffer)])
    else:
        mask = 1 << (size - 1).bit_length()
    mask >>= 1
    while mask:
        if rank + mask < size:
            _transfer(group, sends=[(rank + mask, buffer)])
        mask >>= 1


def direct_all_reduce(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Everybody sends to everybody; each rank adds in rank order."""
    rank, size = group.rank(), group.size()
    parts = torch.empty((size, *buffer.shape), dtype=buffer.dtype, device=buffer.device)
    parts[rank].copy_(buffer)
    peers = [(rank + k) % size for k in range(1, size)]
    _transfer(
        group,
        sends=[(peer, buffer) for peer in peers],
        receives=[(peer, parts[peer]) for peer in peers],
    )
    _sum_in_order(parts, buffer)


def gather_all_reduce(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """All-gather by the backend, then the sum in rank order: equal bits for every bucket layout."""
    parts = torch.empty((group.size(), *buffer.shape), dtype=buffer.dtype, device=buffer.device)
    dist.all_gather(list(parts.unbind(0)), buffer, group=group)
    _sum_in_order(parts, buffer)


def ring_all_reduce(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """The backend's all-reduce (Gloo: a ring; NCCL: its own choice by size unless the communicator forces
    one).
    """
    dist.all_reduce(buffer, group=group)


ALGORITHMS: dict[str, Callable[[Tensor, dist.ProcessGroup], None]] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "direct": direct_all_reduce,
    "all_gather": gather_all_reduce,
}


def sparse_all_reduce(
    gradient: Tensor | None, like: Tensor, scale: float, group: dist.ProcessGroup
) -> Tensor | None:
    """Average sparse COO gradients by gathering indices and values.

    Args:
        gradient: this rank's sparse gradient; ``None`` when it has none.
        like: the dense parameter.
        scale: factor for every value, one over the number of contributors.
        group: process group of tensors on the parameter's device.

    Returns:
        The coalesced sparse average, or ``None`` when no rank had a gradient. Moves (P-1) times the longest
        part.
    """
    device = like.device
    if gradient is None:
        count = -1
        indices = torch.empty((1, 0), dtype=torch.int64, device=device)
        values = torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=device)
    else:
        gradient = gradient.coalesce()
        indices, values = gradient.indices(), gradient.values()
        count = values.shape[0]
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([count], dtype=torch.int64, device=device), group=group)
    sizes = [int(c) for c in counts]
    if max(sizes) < 0:
        return None
    longest = max(max(sizes), 0)
    if longest == 0:
        empty = torch.empty((1, 0), dtype=torch.int64, device=device)
        return torch.sparse_coo_tensor(empty, values[:0], like.shape, check_invariants=False)
    padded_indices = torch.zeros((indices.shape[0], longest), dtype=torch.int64, device=device)
    padded_values = torch.zeros((longest, *values.shape[1:]), dtype=values.dtype, device=device)
    if count > 0:
        padded_indices[:, :count] = indices
        padded_values[:count] = values * scale
    all_indices = [torch.empty_like(padded_indices) for _ in sizes]
    all_values = [torch.empty_like(padded_values) for _ in sizes]
    dist.all_gather(all_indices, padded_indices, group=group)
    dist.all_gather(all_values, padded_values, group=group)
    kept = [(i[:, :n], v[:n]) for i, v, n in zip(all_indices, all_values, sizes, strict=True) if n > 0]
    joined = torch.sparse_coo_tensor(
        torch.cat([i for i, _ in kept], dim=1),
        torch.cat([v for _, v in kept]),
        like.shape,
        check_invariants=False,
    )
    return joined.coalesce()


def _sum_in_order(parts: Tensor, out: Tensor) -> None:
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)


def _transfer(
    group: dist.ProcessGroup,
    *,
    sends: Sequence[tuple[int, Tensor]] = (),
    receives: Sequence[tuple[int, Tensor]] = (),
) -> None:
    """Run all transfers at once and wait for them. Ranks are group ranks; a group of one has none."""
    operations = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends]
    operations += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in receives]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
