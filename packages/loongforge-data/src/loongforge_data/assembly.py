"""Putting samples and batches together from a slot's bytes; the same code in workers, in the trainer and
inline.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from loongforge_data.layout import BatchLayout
from loongforge_data.order import random_keys
from loongforge_data.planning import VideoDataset
from loongforge_data.workers.jobs import FAILED, describe

Bad = list[tuple[int, str]]
"""(row in the batch, what went wrong) each."""


class Indexable(Protocol):
    """Samples by index."""

    def __getitem__(self, index: int, /) -> object:
        """Return a sample."""


def read_table(dataset: VideoDataset, indices: Sequence[int]) -> tuple[list[Mapping[str, object]], Bad]:
    """Return everything but frames of samples; bad rows are left out and listed."""
    samples: list[Mapping[str, object]] = []
    bad: Bad = []
    for row, index in enumerate(indices):
        try:
            samples.append(dataset.tabular(index))
        except Exception as error:
            bad.append((row, describe(error)))
    return samples, bad


def read_samples(
    dataset: object, indices: Sequence[int], *, seed: int, epoch: int, go_on: bool
) -> tuple[list[object], Bad]:
    """Return samples of a map-style data set; the random streams of each are a function of (seed, epoch,
    index).
    """
    samples: list[object] = []
    bad: Bad = []
    source = cast("Indexable", dataset)
    for row, index in enumerate(indices):
        try:
            seed_streams(seed, epoch, index)
            samples.append(source[index])
        except Exception as error:
            bad.append((row, describe(error)))
            if not go_on:
                break
    return samples, bad


def read_result(value: object) -> tuple[object, Bad]:
    """Split what a worker packed into the value and the bad rows."""
    content, bad = cast("tuple[object, Bad]", value)
    return content, bad


def good_rows(layout: BatchLayout, marks: bytes, bad: Bad) -> list[int]:
    """Return the samples of a slot of which everything is there."""
    gone = {row for row, _ in bad} | picture_failures(layout, marks).keys()
    return [row for row in range(layout.samples) if row not in gone]


def picture_failures(layout: BatchLayout, marks: bytes) -> dict[int, int]:
    """Return the samples with a failed picture, each with its first failed item."""
    found: dict[int, int] = {}
    if FAILED not in marks:
        return found
    base = 0
    for block in layout.blocks:
        for number in range(block.frames * layout.samples):
            if marks[base + number] == FAILED:
                found.setdefault(number // block.frames, base + number)
        base += block.frames * layout.samples
    return found


def block_arrays(view: memoryview, layout: BatchLayout) -> dict[str, npt.NDArray[np.uint8]]:
    """Return each camera's pictures of a batch, (samples, [T,] H, W, C), as views of the slot."""
    result = {}
    for block in layout.blocks:
        size = layout.samples * block.frames * block.frame_bytes
        flat = np.frombuffer(view, dtype=np.uint8, count=size, offset=block.offset)
        result[block.key] = flat.reshape(layout.samples, *block.shape)
    return result


def table_rows(layout: BatchLayout, bad: Bad) -> list[int]:
    """Return the samples that the packed table holds, in its order."""
    gone = {row for row, _ in bad}
    return [row for row in range(layout.samples) if row not in gone]


def join_samples(
    view: memoryview, layout: BatchLayout, table: object, rows: Sequence[int], bad: Bad
) -> list[object]:
    """Put pictures (views of the slot) and the rest of each sample together."""
    arrays = block_arrays(view, layout)
    entries = cast("Sequence[Mapping[str, object]]", table)
    place = {row: number for number, row in enumerate(table_rows(layout, bad))}
    result: list[object] = []
    for row in rows:
        sample = dict(entries[place[row]])
        sample.update({key: array[row] for key, array in arrays.items()})
        result.append(sample)
    return result


def join_batch(
    view: memoryview, layout: BatchLayout, table: object, rows: Sequence[int], bad: Bad
) -> dict[str, object]:
    """Put pictures and the stacked rest of a batch together; copies only when samples are missing."""
    batch = dict(cast("Mapping[str, object]", table))
    held = table_rows(layout, bad)
    if len(rows) < len(held):
        keep = [number for number, row in enumerate(held) if row in set(rows)]
        batch = {key: take_rows(value, keep) for key, value in batch.items()}
    for key, array in block_arrays(view, layout).items():
        batch[key] = array if len(rows) == layout.samples else array[list(rows)]
    return batch


def take_rows(value: object, keep: Sequence[int]) -> object:
    """Return some rows of a collated value."""
    if isinstance(value, np.ndarray):
        return value[list(keep)]
    if isinstance(value, dict):
        return {key: take_rows(item, keep) for key, item in value.items()}
    if isinstance(value, list):
        return [value[i] for i in keep]
    return value


def seed_streams(seed: int, epoch: int, index: int) -> None:
    """Seed Python's, numpy's and torch's global generators for one sample: the same on any worker."""
    key = int(random_keys(1, "sample", seed, epoch, index)[0])
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - user transforms draw from the global generator
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(key & 0x7FFFFFFFFFFFFFFF)
