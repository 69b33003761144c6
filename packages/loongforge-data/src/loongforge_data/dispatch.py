"""Planned batches as jobs for workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from loongforge_data.layout import PlannedBatch
from loongforge_data.planning import VideoDataset, plan_frames
from loongforge_data.supervision import QueuedJob
from loongforge_data.workers.jobs import CollateJob, DecodeJob, SampleJob, TableJob, indices_to_bytes


def video_jobs(
    dataset: VideoDataset, batches: Sequence[PlannedBatch], gap: Mapping[str, int], *, collating: bool
) -> list[QueuedJob]:
    """Return the jobs of batches planned together, in the order in which they are due."""
    jobs: list[tuple[int, int, QueuedJob]] = []
    for batch in batches:
        pictures, sequence = batch.layout.pictures, batch.sequence
        table = TableJob(
            batch.slot,
            sequence,
            pictures,
            batch.layout.table_offset,
            indices_to_bytes(batch.indices),
            not collating,
        )
        jobs.append((sequence, 0, QueuedJob(table)))
        if collating:
            collate = CollateJob(batch.slot, sequence, pictures + 1, batch.layout.samples)
            jobs.append((sequence, 2, QueuedJob(collate, waits_for=batch.slot)))
    for found in plan_frames(dataset, batches, gap):
        decode = DecodeJob(found.key, found.path, found.targets.tobytes())
        jobs.append((found.first, 1, QueuedJob(decode)))
    jobs.sort(key=lambda entry: entry[:2])
    return [queued for _, _, queued in jobs]


def sample_jobs(batches: Sequence[PlannedBatch], epoch: int) -> list[QueuedJob]:
    """Return one job per batch of a data set that is indexed in the workers."""
    return [
        QueuedJob(SampleJob(batch.slot, batch.sequence, 0, epoch, indices_to_bytes(batch.indices)))
        for batch in batches
    ]


def gop_lengths(dataset: VideoDataset) -> dict[str, int]:
    """Return the distance between key frames per camera, read from one file each."""
    from loongforge_data.video import video_index

    result: dict[str, int] = {}
    if len(dataset):
        for request in dataset.frame_requests(0):
            if request.key not in result:
                keys = video_index(request.path).keys
                result[request.key] = int(np.diff(keys).max()) if len(keys) > 1 else 64
    return result
