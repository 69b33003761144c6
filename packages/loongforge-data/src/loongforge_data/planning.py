"""From a list of batches to work: where each picture of a batch lies in its slot, and which frames to
decode together.

All functions are pure. Frames of one file that lie close together become one job, whatever batch they
belong to, so that a group of pictures is decoded once for everything in the window of planned batches that
needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from loongforge_data.transport import align

HEADER_BYTES = 64
MAX_TARGETS = 128
TARGET_FIELDS = 5
Targets = npt.NDArray[np.int64]


class ImageLayoutLike(Protocol):
    """Shape of the decoded pictures of one camera."""

    @property
    def frames(self) -> int | None:
        """Length of the time axis; None without one."""

    @property
    def height(self) -> int:
        """Rows."""

    @property
    def width(self) -> int:
        """Columns."""

    @property
    def channels(self) -> int:
        """Channels."""

    @property
    def size(self) -> tuple[int, int] | None:
        """Size to resize to, or None."""

    @property
    def crop(self) -> tuple[int, int, int, int] | None:
        """Crop before the resize, or None."""


class FrameRequestLike(Protocol):
    """One frame that a sample needs."""

    @property
    def key(self) -> str:
        """Camera."""

    @property
    def slot(self) -> int:
        """Position in the window."""

    @property
    def path(self) -> str:
        """Video file."""

    @property
    def index(self) -> int:
        """Display index inside the file."""


@runtime_checkable
class VideoDataset(Protocol):
    """A map-style data set that says which frames a sample needs, so that they can be decoded elsewhere."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def frame_requests(self, i: int, /) -> Sequence[FrameRequestLike]:
        """Return the frames of sample ``i``."""
        ...

    def image_layout(self) -> Mapping[str, ImageLayoutLike]:
        """Return the picture shapes of the keys that `frame_requests` delivers."""
        ...

    def tabular(self, i: int, /) -> Mapping[str, object]:
        """Return everything of sample ``i`` but decoded frames."""
        ...


@dataclass(frozen=True, kw_only=True)
class Block:
    """Where one camera's pictures of a whole batch lie in a slot."""

    key: str
    """Camera."""
    offset: int
    """First byte in the slot."""
    shape: tuple[int, ...]
    """Shape of one sample: (T, H, W, C) or (H, W, C)."""
    frame_bytes: int
    """Bytes of one picture."""
    frames: int
    """Pictures per sample."""


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Where everything of a batch of ``samples`` lies in its slot. Item ``blocks x samples x frames``
    counts up in
    that order; the table is the item after the last picture.
    """

    samples: int
    """Samples of the batch."""
    blocks: tuple[Block, ...]
    """Cameras."""
    table_offset: int
    """First byte of the packed rest."""

    @property
    def pictures(self) -> int:
        """Number of pictures."""
        return sum(block.frames for block in self.blocks) * self.samples


def batch_layout(images: Mapping[str, ImageLayoutLike], samples: int) -> BatchLayout:
    """Lay out a batch: one contiguous array (samples, [T,] H, W, C) per camera, then the table."""
    offset, blocks = HEADER_BYTES, []
    for key, image in images.items():
        picture = (image.height, image.width, image.channels)
        frames = image.frames or 1
        shape = picture if image.frames is None else (image.frames, *picture)
        size = image.height * image.width * image.channels
        blocks.append(Block(key=key, offset=align(offset), shape=shape, frame_bytes=size, frames=frames))
        offset = align(offset) + samples * frames * size
    return BatchLayout(samples=samples, blocks=tuple(blocks), table_offset=align(offset))


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """A batch with the slot it goes to."""

    sequence: int
    """Number of the batch, unique over the life of the pipeline."""
    slot: int
    """Slot."""
    indices: npt.NDArray[np.int64]
    """Samples."""
    layout: BatchLayout
    """Where things go."""


@dataclass(frozen=True, kw_only=True)
class FrameJob:
    """Frames of one file to decode, and where each goes."""

    key: str
    """Camera."""
    path: str
    """Video file."""
    targets: Targets
    """(n, 5) int64: display index, slot, sequence, item, byte offset; sorted by display index."""
    first: int
    """Smallest sequence that needs it; jobs are done in this order."""


def plan_frames(
    dataset: VideoDataset, batches: Sequence[PlannedBatch], gap: Mapping[str, int], limit: int = MAX_TARGETS
) -> list[FrameJob]:
    """Group the frames that batches need into jobs.

    Args:
        dataset: Says which frames a sample needs.
        batches: Batches planned together.
        gap: Per camera, the distance in frames from which on two frames count as far apart (a GOP's length).
        limit: Most targets of one job.

    Returns:
        Jobs in the order in which their first batch is due. O(n log n) in the number of frames.
    """
    wanted: dict[tuple[str, str], list[tuple[int, int, int, int, int]]] = {}
    for batch in batches:
        bases, base = {}, 0
        for block in batch.layout.blocks:
            bases[block.key] = (base, block)
            base += block.frames * batch.layout.samples
        for row, sample in enumerate(batch.indices.tolist()):
            for request in dataset.frame_requests(sample):
                start, block = bases[request.key]
                number = row * block.frames + request.slot
                target = (
                    request.index,
                    batch.slot,
                    batch.sequence,
                    start + number,
                    block.offset + number * block.frame_bytes,
                )
                wanted.setdefault((request.key, request.path), []).append(target)
    jobs = []
    for (key, path), targets in wanted.items():
        targets.sort()
        table = np.array(targets, dtype=np.int64)
        jobs += [
            FrameJob(key=key, path=path, targets=part, first=int(part[:, 2].min()))
            for part in _split(table, gap.get(key, 1), limit)
        ]
    jobs.sort(key=lambda job: (job.first, job.path, int(job.targets[0, 0])))
    return jobs


def _split(table: Targets, gap: int, limit: int) -> list[Targets]:
    """Cut a sorted table where neighbours are far apart, and pieces over the limit at their widest gap."""
    cuts = np.flatnonzero(np.diff(table[:, 0]) >= gap) + 1
    pieces = []
    for piece in np.split(table, cuts):
        rest = piece
        while len(rest) > limit:
            # Prefer a border between groups of pictures near the limit; equal indices stay together where
            # possible.
            steps = np.diff(rest[limit // 2 : limit + 1, 0])
            cut = limit // 2 + 1 + int(np.flatnonzero(steps == steps.max())[-1])
            pieces.append(rest[:cut])
            rest = rest[cut:]
        pieces.append(rest)
    return pieces
