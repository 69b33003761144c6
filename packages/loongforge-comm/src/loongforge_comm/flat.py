"""Flat gradient buffers: one per dtype and device, buckets are slices of it, gradients are views into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loongforge_comm.gradients import GradientSpec
from loongforge_comm.plan import CommPlan

ALIGN_BYTES = 16
"""Every gradient starts at a multiple of this, so that vectorised kernels work on the views."""


@dataclass(kw_only=True)
class FlatBucket:
    """The memory of one bucket.

    Attributes:
        index: launch position.
        names: parameters whose first element lies in this bucket; they are packed when it is launched.
        views: their gradient views, in the same order.
        buffer: everything that is sent: gradients, use flags and, in the first bucket, the control word.
        flags: one element per entry of ``names``; after the reduction the share of ranks that had a gradient.
        control: one element in the first dense bucket, else empty; non-zero after the reduction when a rank
            has a request for the step border.
    """

    index: int
    names: tuple[str, ...]
    views: tuple[Tensor, ...]
    buffer: Tensor
    flags: Tensor
    control: Tensor


class FlatStore:
    """Allocates the flat buffers of a plan and hands out bucket slices and gradient views.

    Memory: all gradient bytes once, plus alignment (at most 15 bytes a tensor) and one element per tensor.
    """

    def __init__(self, plan: CommPlan, devices: Mapping[str, torch.device]) -> None:
        """Allocate.

        Args:
            plan: the plan.
            devices: device of each parameter by name (the plan only knows device types).
        """
        self.views: dict[str, Tensor] = {}
        self.buckets: dict[int, FlatBucket] = {}
        self.nbytes = 0
        specs = {spec.name: spec for spec in plan.gradients}
        dense = [bucket for bucket in plan.buckets if bucket.strategy != "sparse"]
        first = dense[0].index if dense else -1
        streams: dict[tuple[str, torch.device], list[int]] = {}
        for position, bucket in enumerate(dense):
            streams.setdefault((bucket.dtype, devices[bucket.pieces[0].name]), []).append(position)
        for (dtype, device), positions in streams.items():
            self._allocate(specs, [dense[i] for i in positions], getattr(torch, dtype), device, first)

    def _allocate(
        self,
        specs: Mapping[str, GradientSpec],
        buckets: Sequence,
        dtype: torch.dtype,
        device: torch.device,
        first: int,
    ) -> None:
        align = max(1, ALIGN_BYTES // dtype.itemsize)
        offset = 0
        starts: dict[str, int] = {}
        layout: list[tuple[int, int, int, tuple[str, ...], int]] = []
        for bucket in buckets:
            begin = offset
            pieces = list(bucket.pieces)
            if pieces and pieces[0].start > 0:
                # The rest of a split tensor must follow its first part without a gap.
                offset += pieces[0].stop - pieces[0].start
                pieces = pieces[1:]
            flags_at = offset
            names = tuple(piece.name for piece in pieces)
            offset += len(names) + (1 if bucket.index == first else 0)
            for piece in pieces:
                offset = -(-offset // align) * align
                starts[piece.name] = offset
                offset += piece.stop - piece.start
            layout.append((bucket.index, begin, offset, names, flags_at))
        storage = torch.zeros(offset, dtype=dtype, device=device)
        self.nbytes += storage.numel() * dtype.itemsize
        for name, start in starts.items():
            spec = specs[name]
            self.views[name] = storage.as_strided(spec.shape, spec.stride, start)
        for index, begin, end, names, flags_at in layout:
            self.buckets[index] = FlatBucket(
                index=index,
                names=names,
                views=tuple(self.views[name] for name in names),
                buffer=storage[begin:end],
                flags=storage[flags_at : flags_at + len(names)],
                control=storage[flags_at + len(names) : flags_at + len(names) + (1 if index == first else 0)],
            )
