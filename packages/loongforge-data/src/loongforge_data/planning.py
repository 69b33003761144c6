"""From a list of batches to work: which frames to decode together, and where each picture goes.

All functions are pure. Frames of one file that lie close together become one job, whatever batch they
belong to, so that a group of pictures is decoded once for everything in the window of planned batches that
needs it.

Planning happens while the trainer waits for ``next``, so it works on whole arrays: a few microseconds per
batch where the data set gives its frames as tables (`FrameTables`), else one call per sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from loongforge_data.errors import DataError
from loongforge_data.layout import Block, ImageLayoutLike, PlannedBatch

MAX_TARGETS = 128
TARGET_FIELDS = 5
Integers = npt.NDArray[np.int64]


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


class FrameTableLike(Protocol):
    """The frames of one camera that ``n`` samples need, ``T`` each."""

    @property
    def key(self) -> str:
        """Camera."""

    @property
    def paths(self) -> Sequence[str]:
        """Video files."""

    @property
    def files(self) -> Integers:
        """(n, T) positions in ``paths``."""

    @property
    def indices(self) -> Integers:
        """(n, T) display indices inside the files."""


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


class FrameTables(Protocol):
    """What a `VideoDataset` may offer beside `frame_requests`: the frames of many samples at once."""

    def frame_tables(self, rows: Integers, /) -> Sequence[FrameTableLike]:
        """Return one table per camera for samples ``rows`` (n,)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameTable:
    """See `FrameTableLike`."""

    key: str
    """Camera."""
    paths: Sequence[str]
    """Video files."""
    files: Integers
    """(n, T) positions in ``paths``."""
    indices: Integers
    """(n, T) display indices inside the files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameJob:
    """Frames of one file to decode, and where each goes."""

    key: str
    """Camera."""
    path: str
    """Video file."""
    targets: Integers
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

    Raises:
        DataError: The data set lists other frames than its `image_layout` says.
    """
    if not batches:
        return []
    rows = np.concatenate([batch.indices for batch in batches])
    frames = {block.key: block.frames for block in batches[0].layout.blocks}
    jobs: list[FrameJob] = []
    for table in frame_tables(dataset, rows, frames):
        if table.indices.shape != (len(rows), frames.get(table.key, 0)):
            msg = (
                f"frame_tables gives {table.indices.shape} frames of {table.key!r} for {len(rows)} samples; "
                f"image_layout has {frames} frames per sample"
            )
            raise DataError(msg)
        targets, files = _targets(table, batches, frames[table.key])
        jobs += _cut(table, targets, files, gap.get(table.key, 1), limit)
    jobs.sort(key=lambda job: (job.first, job.path, int(job.targets[0, 0])))
    return jobs


def frame_tables(
    dataset: VideoDataset, rows: Integers, frames: Mapping[str, int]
) -> Sequence[FrameTableLike]:
    """Return the frames of samples, one table per camera; ``frames`` is the number per sample of each."""
    if callable(getattr(dataset, "frame_tables", None)):
        return cast("FrameTables", dataset).frame_tables(rows)
    return _listed_tables(dataset, rows, frames)


def _listed_tables(
    dataset: VideoDataset, rows: Integers, frames: Mapping[str, int]
) -> Sequence[FrameTableLike]:
    """Ask a data set sample by sample."""
    paths: dict[str, int] = {}
    files = {key: np.full((len(rows), count), -1, dtype=np.int64) for key, count in frames.items()}
    indices = {key: np.zeros((len(rows), count), dtype=np.int64) for key, count in frames.items()}
    for number, row in enumerate(rows.tolist()):
        for request in dataset.frame_requests(row):
            if not 0 <= request.slot < frames.get(request.key, 0):
                msg = (
                    f"frame_requests lists frame {request.slot} of {request.key!r}; image_layout has "
                    f"{dict(frames)} frames per sample"
                )
                raise DataError(msg, row=row)
            files[request.key][number, request.slot] = paths.setdefault(request.path, len(paths))
            indices[request.key][number, request.slot] = request.index
    for key, table in files.items():
        if len(missing := np.argwhere(table < 0)):
            number, slot = missing[0].tolist()
            msg = f"frame_requests lists no frame {slot} of {key!r}, which image_layout has"
            raise DataError(msg, row=int(rows[number]))
    names = list(paths)
    return [FrameTable(key=key, paths=names, files=files[key], indices=indices[key]) for key in frames]


def _targets(
    table: FrameTableLike, batches: Sequence[PlannedBatch], frames: int
) -> tuple[Integers, Integers]:
    """Return the (n, 5) targets of all batches and the (n,) files they lie in, sorted by file and index."""
    sizes = [len(batch.indices) for batch in batches]
    places = [_place(batch, table.key) for batch in batches]

    def spread(values: Sequence[int]) -> Integers:
        """Repeat one value per batch for each of its frames."""
        return np.repeat(np.asarray(values, dtype=np.int64), np.asarray(sizes) * frames)

    starts = np.cumsum([0, *sizes[:-1]]) * frames
    number = np.arange(sum(sizes) * frames, dtype=np.int64) - spread(starts.tolist())
    item = spread([first for first, _ in places]) + number
    offset = spread([block.offset for _, block in places]) + number * places[0][1].frame_bytes
    slot = spread([batch.slot for batch in batches])
    sequence = spread([batch.sequence for batch in batches])
    index, files = table.indices.reshape(-1), table.files.reshape(-1)
    targets = np.stack((index, slot, sequence, item, offset), axis=1)
    order = np.lexsort((item, sequence, index, files))
    return targets[order], files[order]


def _place(batch: PlannedBatch, key: str) -> tuple[int, Block]:
    """Return the number of a camera's first picture in a batch, and its block."""
    blocks = batch.layout.blocks
    position = [block.key for block in blocks].index(key)
    return sum(block.frames for block in blocks[:position]) * batch.layout.samples, blocks[position]


def _cut(table: FrameTableLike, targets: Integers, files: Integers, gap: int, limit: int) -> list[FrameJob]:
    """Cut sorted targets into jobs: at another file, where neighbours are far apart, and at the limit."""
    apart = (np.diff(targets[:, 0]) >= gap) | (np.diff(files) != 0)
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(targets)]
    if np.diff(edges).max() > limit:
        edges = _within(targets[:, 0], edges, limit)
    starts = edges[:-1]
    first = np.minimum.reduceat(targets[:, 2], starts).tolist()
    paths = [table.paths[file] for file in files[starts].tolist()]
    return [
        FrameJob(key=table.key, path=path, targets=targets[a:b], first=low)
        for path, a, b, low in zip(paths, starts, edges[1:], first, strict=True)
    ]


def _within(indices: Integers, edges: Sequence[int], limit: int) -> list[int]:
    """Add edges so that no piece is longer than the limit: at the widest gap of the piece's second half."""
    result = [edges[0]]
    for stop in edges[1:]:
        while stop - result[-1] > limit:
            start = result[-1]
            # Prefer a border between groups of pictures near the limit; equal indices stay together where
            # possible.
            steps = np.diff(indices[start + limit // 2 : start + limit + 1])
            result.append(start + limit // 2 + 1 + int(np.flatnonzero(steps == steps.max())[-1]))
        result.append(stop)
    return result
