"""Packing: sequences end to end, isolated from each other, each with positions from zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class PackRule:
    """How one batch key is packed: ``(B, T, ...)`` becomes ``(sum of lengths, ...)``.

    Attributes:
        lengths: Batch key with the valid length of each sample as host integers (a list or a CPU tensor).
            Default
            None: all T rows of every sample are valid.
        layout: Key under which the packed batch carries the :class:`PackedLayout`. Default ``"packed"``; keys
            that share lengths share one layout.
    """

    lengths: str | None = None
    layout: str = "packed"


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Where each sequence lies in a packed one.

    Attributes:
        lengths: Length of each sequence, host integers, all at least 1.
        offsets: ``(n + 1,)`` int32 first row of each sequence, as variable-length attention kernels take it.
        segments: ``(total,)`` int64 sequence number of each row.
        positions: ``(total,)`` int64 position inside its sequence.
    """

    lengths: tuple[int, ...]
    offsets: Tensor
    segments: Tensor
    positions: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedLayout:
        """Lay sequences of these lengths end to end.

        Raises:
            ValueError: No sequence, or one without rows (attention over nothing has no value).
        """
        if not lengths or min(lengths) < 1:
            message = f"every packed sequence needs at least one row, got lengths {list(lengths)}"
            raise ValueError(message)
        sizes = torch.tensor(list(lengths))
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        offsets[1:] = sizes.cumsum(0)
        segments = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
        positions = torch.arange(int(sizes.sum())) - offsets[:-1].long().repeat_interleave(sizes)
        return cls(
            lengths=tuple(int(n) for n in lengths),
            offsets=offsets.to(device, non_blocking=True),
            segments=segments.to(device, non_blocking=True),
            positions=positions.to(device, non_blocking=True),
        )

    @property
    def total(self) -> int:
        """Rows in all."""
        return sum(self.lengths)

    def may_see(self, keys: PackedLayout | None = None, *, causal: bool = False) -> Tensor:
        """Return the mask ``(total, total of keys)``, true where a row may attend: its own sequence only."""
        other = keys or self
        mask = self.segments[:, None] == other.segments[None, :]
        if causal:
            mask = mask & (self.positions[:, None] >= other.positions[None, :])
        return mask

    def sums(self, values: Tensor) -> Tensor:
        """Add up ``values`` (total, ...) within each sequence: ``(n, ...)`` in float32."""
        zero = torch.zeros((len(self.lengths), *values.shape[1:]), dtype=torch.float32, device=values.device)
        return zero.index_add(0, self.segments, values.float())


def pack_rows(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Take the first ``lengths[i]`` rows of each sample of ``(B, T, ...)`` and join them."""
    return torch.cat([sample[:length] for sample, length in zip(rows.unbind(), lengths, strict=True)])


def unpack_rows(packed: Tensor, layout: PackedLayout, *, fill: float = 0.0) -> Tensor:
    """Return ``(n, longest, ...)`` with ``fill`` behind each sequence's end."""
    longest = max(layout.lengths)
    result = packed.new_full((len(layout.lengths), longest, *packed.shape[1:]), fill)
    result[layout.segments, layout.positions] = packed
    return result


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    keys: PackedLayout | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """Attend within each sequence.

    Args:
        query: ``(total, H, D)``.
        key: ``(total of keys, H, D)``.
        value: As ``key``.
        layout: Layout of the queries.
        keys: Layout of the keys for cross attention, with as many sequences. Default: self attention.
        causal: Rows see earlier positions of their own sequence only.

    Returns:
        ``(total, H, D)``. On CUDA in 16-bit types by torch's variable-length kernel, without a mask and
        without work between sequences; elsewhere sequence by sequence, or with a dense mask when they are
        many.
    """
    other = keys or layout
    if len(other.lengths) != len(layout.lengths):
        message = (
            f"queries hold {len(layout.lengths)} sequences, keys {len(other.lengths)}; both need the same"
        )
        raise ValueError(message)
    if query.is_cuda and query.dtype in {torch.bfloat16, torch.float16}:
        from torch.nn.attention.varlen import varlen_attn

        packed = varlen_attn(
            query,
            key,
            value,
            layout.offsets,
            other.offsets,
            max(layout.lengths),
            max(other.lengths),
            window_size=(-1, 0) if causal else (-1, -1),
        )
        return packed if isinstance(packed, Tensor) else packed[0]
    parts = [
        functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=causal
        ).transpose(0, 1)
        for q, k, v in zip(
            torch.split(query, list(layout.lengths)),
            torch.split(key, list(other.lengths)),
            torch.split(value, list(other.lengths)),
            strict=True,
        )
    ]
    return torch.cat(parts)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute sequences over packs of at most ``capacity`` rows, longest first into the first that has
    room.

    Returns:
        Indices of the sequences in each pack. Cost ``O(n * packs)``.

    Raises:
        ValueError: A sequence is longer than ``capacity``.
    """
    longest = max(lengths, default=0)
    if longest > capacity:
        message = f"a sequence of {longest} rows does not fit a pack of {capacity}; raise the capacity"
        raise ValueError(message)
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((p for p, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            packs.append([])
            room.append(capacity)
            place = len(packs) - 1
        packs[place].append(index)
        room[place] -= lengths[index]
    return packs
