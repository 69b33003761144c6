"""Packing: sequences end to end, isolated from each other, each with positions from zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from loongforge_fuse.protocol import Batch


@dataclass(frozen=True, kw_only=True)
class PackRule:
    """How one batch key is packed: ``(B, T, ...)`` becomes ``(sum of lengths, ...)``.

    Attributes:
        lengths: Batch key with the valid length of each sample as host integers (a list or a CPU tensor).
            Default None: all T rows of every sample are valid.
        layout: Key under which the packed batch carries the :class:`PackedLayout`. Default ``"packed"``; keys
            that share lengths share one layout.
    """

    lengths: str | None = None
    layout: str = "packed"


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Where each sequence lies in a packed one.

    Rows of a packed tensor may be followed by fill (:meth:`filled_up`), which is a sequence of its own that
    nothing else sees. The tensors describe it too; ``sequences``, ``lengths``, ``sizes`` and :meth:`sums` do
    not count it.

    Attributes:
        sequences: Number of sequences ``n``.
        total: Rows in all, fill included.
        longest: Bound on the length of every sequence and of the fill, for kernels that take one.
        offsets: ``(n + 1,)`` int32 first row of each sequence, as variable-length attention kernels take it;
            ``(n + 2,)`` with fill.
        segments: ``(total,)`` int64 sequence number of each row, ``n`` on fill.
        positions: ``(total,)`` int64 position inside its sequence.
        keys: Batch keys whose tensors are packed by this layout. Default none.
        source: Batch key the lengths were read from, None where all rows are valid. Default None.
        filled: Rows of fill at the end. Default 0.
        host_lengths: Lengths known on the host; None while a graph is recorded, whose replays have others.
    """

    sequences: int
    total: int
    longest: int
    offsets: Tensor
    segments: Tensor
    positions: Tensor
    keys: tuple[str, ...] = ()
    source: str | None = None
    filled: int = 0
    host_lengths: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        keys: Sequence[str] = (),
        source: str | None = None,
    ) -> PackedLayout:
        """Lay sequences of these lengths end to end.

        Raises:
            ValueError: No sequence, or one without rows (attention over nothing has no value).
        """
        if not lengths or min(lengths) < 1:
            message = f"every packed sequence needs at least one row, got lengths {list(lengths)}"
            raise ValueError(message)
        sizes = tuple(int(n) for n in lengths)
        layout = cls._lay(sizes, device, keys=tuple(keys), fill=0, longest=max(sizes))
        return replace(layout, source=source)

    @classmethod
    def _lay(
        cls,
        lengths: tuple[int, ...],
        device: torch.device | str,
        *,
        keys: tuple[str, ...],
        fill: int,
        longest: int,
    ) -> PackedLayout:
        sizes = torch.tensor([*lengths, fill] if fill else list(lengths))
        offsets = torch.zeros(len(sizes) + 1, dtype=torch.int32)
        offsets[1:] = sizes.cumsum(0)
        segments = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        total = int(sizes.sum())
        positions = torch.arange(total) - offsets[:-1].long().repeat_interleave(sizes)
        return cls(
            sequences=len(lengths),
            total=total,
            longest=longest,
            offsets=offsets.to(device, non_blocking=True),
            segments=segments.to(device, non_blocking=True),
            positions=positions.to(device, non_blocking=True),
            keys=keys,
            filled=fill,
            host_lengths=lengths,
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each sequence on the host.

        Raises:
            RuntimeError: While a graph is recorded: the lengths then belong to the device.
        """
        if self.host_lengths is None:
            message = (
                "the lengths of a packed batch change from replay to replay of a graph; use the layout's "
                "sizes, offsets, segments or positions, which lie on the device"
            )
            raise RuntimeError(message)
        return self.host_lengths

    @property
    def sizes(self) -> Tensor:
        """``(n,)`` int32 length of each sequence, on the device."""
        return self.offsets.diff()[: self.sequences]

    def filled_up(self, multiple: int) -> PackedLayout:
        """Return the layout with fill to a multiple of rows, and ``longest`` rounded up to it.

        Always at least one row of fill, so that layouts of equal total look alike to a graph.
        """
        lengths = self.lengths
        rows = sum(lengths)
        fill = -rows % multiple or multiple
        longest = -(-max(*lengths, fill) // multiple) * multiple
        grown = self._lay(lengths, self.offsets.device, keys=self.keys, fill=fill, longest=longest)
        return replace(grown, source=self.source)

    def on_device(self, offsets: Tensor, segments: Tensor, positions: Tensor) -> PackedLayout:
        """Return a layout of the same sizes that reads these tensors and knows no lengths on the host."""
        return replace(self, offsets=offsets, segments=segments, positions=positions, host_lengths=None)

    def may_see(self, keys: PackedLayout | None = None, *, causal: bool = False) -> Tensor:
        """Return the mask ``(total, total of keys)``, true where a row may attend: its own sequence only."""
        other = keys or self
        mask = self.segments[:, None] == other.segments[None, :]
        if causal:
            mask = mask & (self.positions[:, None] >= other.positions[None, :])
        return mask

    def sums(self, values: Tensor) -> Tensor:
        """Add up ``values`` (total, ...) within each sequence: ``(n, ...)`` in float32."""
        places = self.sequences + (self.filled > 0)
        zero = torch.zeros((places, *values.shape[1:]), dtype=torch.float32, device=values.device)
        return zero.index_add(0, self.segments, values.float())[: self.sequences]


def fill_packed(batch: Batch, multiple: int) -> dict[str, object]:
    """Return a packed batch with the rows of every layout filled up with zeros to a multiple.

    Batches whose rows differ a little then have the same shapes. Cost: one copy of the packed tensors.
    """
    result = dict(batch)
    for name, layout in batch.items():
        if not isinstance(layout, PackedLayout) or layout.filled:
            continue
        grown = layout.filled_up(multiple)
        result[name] = grown
        for key in layout.keys:
            value = batch[key]
            if isinstance(value, Tensor):
                # Zeros, never uninitialised memory: 0 * NaN is NaN in the gradients of shared weights.
                result[key] = torch.cat((value, value.new_zeros((grown.filled, *value.shape[1:]))))
    return result


def pack_rows(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Take the first ``lengths[i]`` rows of each sample of ``(B, T, ...)`` and join them."""
    return torch.cat([sample[:length] for sample, length in zip(rows.unbind(), lengths, strict=True)])


def unpack_rows(packed: Tensor, layout: PackedLayout, *, fill: float = 0.0) -> Tensor:
    """Return ``(n, longest, ...)`` with ``fill`` behind each sequence's end."""
    longest = max(layout.lengths)
    rows = layout.total - layout.filled
    result = packed.new_full((layout.sequences, longest, *packed.shape[1:]), fill)
    result[layout.segments[:rows], layout.positions[:rows]] = packed[:rows]
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
        without work between sequences; elsewhere sequence by sequence, or with a dense mask where a graph
        is recorded, whose replays have other lengths.

    Raises:
        ValueError: Layouts of different numbers of sequences.
    """
    other = keys or layout
    if other.sequences != layout.sequences:
        message = (
            f"queries hold {layout.sequences} sequences, keys {other.sequences}; both need the same number"
        )
        raise ValueError(message)
    if bool(other.filled) != bool(layout.filled):
        message = (
            f"queries hold {layout.filled} rows of fill, keys {other.filled}; fill up both layouts or none"
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
            layout.longest,
            other.longest,
            window_size=(-1, 0) if causal else (-1, -1),
        )
        return packed if isinstance(packed, Tensor) else packed[0]
    if layout.host_lengths is None or other.host_lengths is None:
        return _masked_attention(query, key, value, layout.may_see(other, causal=causal))
    parts = [
        functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=causal
        ).transpose(0, 1)
        for q, k, v in zip(
            torch.split(query, _rows(layout)),
            torch.split(key, _rows(other)),
            torch.split(value, _rows(other)),
            strict=True,
        )
    ]
    return torch.cat(parts)


def _rows(layout: PackedLayout) -> list[int]:
    """Return the rows of each sequence, fill last."""
    return [*layout.lengths, layout.filled] if layout.filled else list(layout.lengths)


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend under a dense mask: no work depends on lengths that only the device knows."""
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)


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
