"""Keeps parameters and module buffers of the ranks equal: at start, and buffers before each synchronised
forward.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loongforge_comm.agreement import Agreement
from loongforge_comm.errors import PlanMismatchError
from loongforge_comm.gradients import dense_stride, is_local
from loongforge_comm.internals import buffer_table, flatten, unflatten

CHUNK_BYTES = 64 * 2**20


def check_same_model(model: nn.Module, agreement: Agreement, local: Collection[str]) -> None:
    """Raise PlanMismatchError on every rank when names, shapes, dtypes or strides of shared tensors
    differ.
    """
    mine = {
        name: f"{tuple(t.shape)} {t.dtype} strides {dense_stride(t)}"
        + (" trainable" if isinstance(t, nn.Parameter) and t.requires_grad else "")
        for name, t in _shared(model, local).items()
    }
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    if len(set(map(str, agreement.exchange("model-digest", digest)))) == 1:
        return
    tables = agreement.exchange("model-table", mine)
    first = tables[0]
    lines = []
    for rank, table in zip(agreement.ranks, tables, strict=True):
        if table == first or not isinstance(table, Mapping) or not isinstance(first, Mapping):
            continue
        extra = sorted(set(table) - set(first))
        lacking = sorted(set(first) - set(table))
        changed = sorted(n for n in set(table) & set(first) if table[n] != first[n])
        lines.append(
            f"rank {rank} against rank {agreement.ranks[0]}: "
            + "; ".join(
                part
                for part in (
                    f"also has {extra[:5]}" if extra else "",
                    f"lacks {lacking[:5]}" if lacking else "",
                    f"differs in {[(n, first[n], table[n]) for n in changed[:3]]}" if changed else "",
                )
                if part
            )
        )
    msg = (
        "the model is not the same on all ranks ("
        + " | ".join(lines)
        + "); build it alike everywhere, or list "
        "parameters that stay per rank in local_parameters"
    )
    raise PlanMismatchError(msg)


@torch.no_grad()
def broadcast_model(model: nn.Module, group: dist.ProcessGroup, source: int, local: Collection[str]) -> int:
    """Copy rank ``source``'s parameters (frozen ones too) and buffers to all ranks; returns the bytes
    sent.
    """
    return broadcast_tensors(list(_shared(model, local).values()), group, source)


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int) -> int:
    """Broadcast tensors in flat chunks of at most 64 MiB per dtype and device."""
    streams: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        data = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        if data.numel():
            streams.setdefault((data.dtype, data.device), []).append(data)
    sent = 0
    for (dtype, _), members in streams.items():
        chunk: list[Tensor] = []
        size = 0
        for tensor in members:
            if chunk and size + tensor.nbytes > CHUNK_BYTES:
                _broadcast(chunk, group, source, dtype)
                chunk, size = [], 0
            chunk.append(tensor)
            size += tensor.nbytes
        _broadcast(chunk, group, source, dtype)
        sent += sum(tensor.nbytes for tensor in members)
    return sent


def _broadcast(chunk: list[Tensor], group: dist.ProcessGroup, source: int, dtype: torch.dtype) -> None:
    plain = [t.contiguous() for t in chunk]
    flat = flatten([t.to(torch.uint8) if dtype == torch.bool else t for t in plain])
    dist.broadcast(flat, src=source, group=group)
    for target, part in zip(chunk, unflatten(flat, plain), strict=True):
        target.copy_(part)


def _shared(model: nn.Module, local: Collection[str]) -> dict[str, Tensor]:
    tensors = {n: p for n, p in model.named_parameters() if not is_local(n, local)}
    return {**tensors, **{n: b for n, b in model.named_buffers() if not is_local(n, local)}}


class SharedBuffers:
    """The module buffers that follow rank 0.

    The walk over the modules is done once, as in stock DDP; the tensors are looked up anew each time, because
    forward may have replaced them by assignment.
    """

    def __init__(self, model: nn.Module, local: Collection[str]) -> None:
        """``local``: patterns of parameters and buffers that stay per rank."""
        self._local = tuple(local)
        self._tables = [
            (f"{prefix}." if prefix else "", buffer_table(module)) for prefix, module in model.named_modules()
        ]

    def now(self) -> list[Tensor]:
        """The tensors at this moment, each once. O(modules)."""
        found = {
            id(buffer): buffer
            for prefix, table in self._tables
            if table
            for name, buffer in table.items()
            if buffer is not None and not is_local(prefix + name, self._local)
        }
        return list(found.values())
