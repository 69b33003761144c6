"""Decoders, files and memory of the workers stay bounded; decoding works after fork."""

from __future__ import annotations

import resource

import numpy as np
import psutil
import pytest
from loongforge_data.bench import main as bench
from loongforge_data.dataset import open_dataset
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.pipeline import RingPipeline
from loongforge_data.synthetic import write_dataset
from loongforge_data.testing import ToyDataset, indices_of


@pytest.fixture(scope="module")
def many_files(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "set"
    write_dataset(path, episodes=60, frames=6, cameras=1, size=(32, 48), codec="h264", gop=3, version="2.1")
    return path


@pytest.mark.timeout(90)
def test_open_files_and_memory_stay_bounded_over_many_videos(many_files):
    """Fault D47: far more files than the limit on open files, shuffled, several epochs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    dataset = open_dataset(many_files)
    loader = ADFEDataLoader(dataset, 8, 2, shuffle=True, persistent_workers=True, threads_per_worker=1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 70, hard))
    try:
        sizes = []
        for _ in range(4):
            assert sum(len(b["index"]) for b in loader) == 360
            assert isinstance(loader.pipeline, RingPipeline)
            workers = [psutil.Process(pid) for pid in loader.pipeline.pids.values()]
            assert max(w.num_fds() for w in workers) < psutil.Process().num_fds() + 60
            sizes.append(sum(w.memory_full_info().uss for w in workers))
        assert sizes[-1] < sizes[1] * 1.2 + (8 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        loader.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", ["fork", "server"])
def test_decoder_used_in_the_parent_does_not_disturb_workers(many_files, method):
    """Faults D45 and D46: decode in the parent, then in forked workers; the parent still reads right
    afterwards."""
    dataset = open_dataset(many_files)
    camera = dataset.cameras[0]
    before = dataset[0][camera].copy()
    with ADFEDataLoader(
        dataset, 6, 2, multiprocessing_context=method, threads_per_worker=2, persistent_workers=True
    ) as loader:
        for batch in loader:
            for row, index in enumerate(batch["index"]):
                np.testing.assert_array_equal(np.asarray(batch[camera][row]), dataset[int(index)][camera])
    np.testing.assert_array_equal(dataset[0][camera], before)


def test_threads_inside_a_worker_give_the_same_batches(many_files):
    dataset = open_dataset(many_files, image_size=(24, 24))
    got = []
    for threads in (1, 4):
        with ADFEDataLoader(dataset, 16, 1, shuffle=True, threads_per_worker=threads) as loader:
            camera = dataset.cameras[0]
            got.append([(indices_of([b]), np.asarray(b[camera]).copy()) for b in loader])
    for (a, pixels_a), (b, pixels_b) in zip(*got, strict=True):
        assert a == b
        np.testing.assert_array_equal(pixels_a, pixels_b)


def test_automatic_slots_retune_while_running():
    with ADFEDataLoader(ToyDataset(400), 2, 2, slots="auto", persistent_workers=True) as loader:
        assert len(list(loader)) == 200
        assert loader.stats()["queue_slots"] >= 2
        assert len(list(loader)) == 200


def test_bench_command_prints_a_table_and_json(many_files, capsys):
    assert bench([str(many_files), "--seconds", "0.3", "--workers", "1", "--image-size", "24", "24"]) == 0
    text = capsys.readouterr().out
    assert "samples_per_s" in text
    assert "L1 decode" in text
    assert bench([str(many_files), "--seconds", "0.2", "--json"]) == 0
    assert '"decode_waste"' in capsys.readouterr().out
    assert bench(["/nowhere"]) == 1
    assert "error" in capsys.readouterr().err
