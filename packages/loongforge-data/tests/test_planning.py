"""From batches to decode jobs: every picture once, near frames in one job, tables equal to requests."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_data.dataset import open_dataset
from loongforge_data.errors import DataError
from loongforge_data.layout import PlannedBatch, batch_layout
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.planning import frame_tables, plan_frames
from loongforge_data.synthetic import write_dataset
from loongforge_data.testing import indices_of


class Listed:
    """Lists frames sample by sample: two files of 50 frames, the second camera has a window."""

    window = (-1, 0, 3)

    def __len__(self):
        return 100

    def frame_requests(self, i):
        path, frame = f"file{i // 50}", i % 50
        near = [min(max(frame + d, 0), 49) for d in self.window]
        return [
            SimpleNamespace(key="a", slot=0, path=path, index=frame),
            *(SimpleNamespace(key="b", slot=s, path=f"b-{path}", index=n) for s, n in enumerate(near)),
        ]

    def image_layout(self):
        picture = {"height": 2, "width": 2, "channels": 3, "size": None, "crop": None}
        return {"a": SimpleNamespace(frames=None, **picture), "b": SimpleNamespace(frames=3, **picture)}

    def tabular(self, i):
        return {"index": i}


def batches_of(dataset, rows, size):
    parts = [rows[n : n + size] for n in range(0, len(rows), size)]
    return [
        PlannedBatch(
            sequence=10 + n,
            slot=n % 7,
            indices=np.asarray(part, dtype=np.int64),
            layout=batch_layout(dataset.image_layout(), len(part)),
        )
        for n, part in enumerate(parts)
    ]


def wanted(dataset, batches):
    """Every (camera, path, index, slot, sequence, item, offset) that the batches need, the slow way."""
    result = []
    for batch in batches:
        base = 0
        for block in batch.layout.blocks:
            for row, sample in enumerate(batch.indices.tolist()):
                for request in dataset.frame_requests(sample):
                    if request.key == block.key:
                        number = row * block.frames + request.slot
                        place = (base + number, block.offset + number * block.frame_bytes)
                        result.append(
                            (request.key, request.path, request.index, batch.slot, batch.sequence, *place)
                        )
            base += block.frames * batch.layout.samples
    return sorted(result)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, 99), min_size=1, max_size=60),
    size=st.integers(1, 20),
    gap=st.integers(1, 12),
    limit=st.integers(2, 30),
)
def test_jobs_hold_every_picture_once_and_split_only_where_frames_are_far_apart(rows, size, gap, limit):
    dataset = Listed()
    batches = batches_of(dataset, rows, size)
    jobs = plan_frames(dataset, batches, {"a": gap, "b": gap}, limit)
    got = sorted((job.key, job.path, *target) for job in jobs for target in job.targets.tolist())
    assert got == wanted(dataset, batches)
    for job in jobs:
        indices, sequences = job.targets[:, 0], job.targets[:, 2]
        assert len(indices) <= limit
        assert (np.diff(indices) >= 0).all()
        assert (np.diff(indices) < gap).all()
        assert job.first == sequences.min()
    assert [job.first for job in jobs] == sorted(job.first for job in jobs)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("planning") / "set"
    write_dataset(path, episodes=4, frames=15, cameras=2, size=(32, 48), codec="h264", gop=5, version="3.0")
    return path


@pytest.mark.parametrize("episodes", [None, (1, 3)])
def test_tables_of_a_robot_data_set_equal_its_requests(root, episodes):
    cameras = open_dataset(root).cameras
    dataset = open_dataset(root, window={cameras[0]: (-3, 0, 2)}, episodes=episodes)
    rows = np.random.default_rng(0).permutation(len(dataset))
    batches = batches_of(dataset, rows, 7)
    jobs = plan_frames(dataset, batches, dict.fromkeys(cameras, 5))
    got = sorted((job.key, job.path, *target) for job in jobs for target in job.targets.tolist())
    assert got == wanted(dataset, batches)
    with pytest.raises(IndexError, match="samples 0 to"):
        dataset.frame_tables(np.array([len(dataset)]))


def test_planning_a_window_of_batches_asks_for_no_single_sample(root, monkeypatch):
    """What `next` does between two batches must not grow with a Python call per sample."""
    dataset = open_dataset(root)
    monkeypatch.setattr(
        type(dataset), "frame_requests", lambda self, i: pytest.fail("asked sample by sample")
    )
    batches = batches_of(dataset, np.arange(len(dataset)), 8)
    jobs = plan_frames(dataset, batches, {})
    assert sum(len(job.targets) for job in jobs) == 2 * len(dataset)


def test_a_data_set_without_tables_loads_through_its_requests(root):
    """Any data set with `frame_requests` works; tables are only quicker."""

    class Plain:
        def __init__(self, inner):
            self.inner = inner

        def __len__(self):
            return len(self.inner)

        def __getitem__(self, i):
            return self.inner[i]

        def frame_requests(self, i):
            return self.inner.frame_requests(i)

        def image_layout(self):
            return self.inner.image_layout()

        def tabular(self, i):
            return self.inner.tabular(i)

    dataset = open_dataset(root)
    camera = dataset.cameras[0]
    with (
        ADFEDataLoader(Plain(dataset), 8, 0, shuffle=True) as plain,
        ADFEDataLoader(dataset, 8, 0, shuffle=True) as ours,
    ):
        for a, b in zip(plain, ours, strict=True):
            assert indices_of([a]) == indices_of([b])
            np.testing.assert_array_equal(np.asarray(a[camera]), np.asarray(b[camera]))


def test_requests_that_do_not_fit_the_layout_are_named():
    class Short(Listed):
        def frame_requests(self, i):
            return super().frame_requests(i)[: 3 if i == 7 else None]

    class Long(Listed):
        window = (-1, 0, 3, 4)

    for dataset, words in ((Short(), "no frame 2 of 'b'.*row 7"), (Long(), "frame 3 of 'b'.*row 5")):
        with pytest.raises(DataError, match=words):
            plan_frames(dataset, batches_of(dataset, [5, 7], 2), {})
    tables = Listed()
    tables.frame_tables = lambda rows: frame_tables(Listed(), rows[:1], {"a": 1, "b": 3})
    with pytest.raises(DataError, match="2 samples"):
        plan_frames(tables, batches_of(tables, [5, 7], 2), {})
