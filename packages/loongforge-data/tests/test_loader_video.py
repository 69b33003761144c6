"""Batches of robot video from worker processes equal the plain reference path, sample by sample."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from loongforge_data.dataset import open_dataset
from loongforge_data.errors import DataError
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.synthetic import read_code, write_dataset
from loongforge_data.testing import indices_of


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "set"
    write_dataset(path, episodes=3, frames=17, cameras=2, size=(64, 96), codec="h264", gop=6, version="3.0")
    return path


def flat(batches):
    return [i for batch in indices_of(batches) for i in batch]


def check(batch, dataset, seen):
    for row, index in enumerate(int(i) for i in batch["index"]):
        want = dataset[index]
        seen.append(index)
        for key, value in want.items():
            got = batch[key][row]
            if isinstance(value, str):
                assert got == value
            else:
                np.testing.assert_array_equal(np.asarray(got), np.asarray(value), err_msg=f"{key} of {index}")


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("shuffle", [False, "full", "block"])
def test_every_sample_equals_the_reference_path(root, workers, shuffle):
    cameras = open_dataset(root).cameras
    dataset = open_dataset(root, window={"action": range(4), cameras[0]: (-2, 0, 1)})
    seen: list[int] = []
    with ADFEDataLoader(dataset, 4, workers, shuffle=shuffle, seed=5) as loader:
        for batch in loader:
            check(batch, dataset, seen)
            episode, frame = read_code(np.asarray(batch[cameras[1]][0]))
            assert (episode, frame) == (int(batch["episode_index"][0]), int(batch["frame_index"][0]))
    assert sorted(seen) == list(range(len(dataset)))


@pytest.mark.parametrize("workers", [0, 2])
def test_resized_pictures_equal_the_reference_path(root, workers):
    dataset = open_dataset(root, image_size=(33, 47))
    seen: list[int] = []
    with ADFEDataLoader(dataset, 5, workers, shuffle="full") as loader:
        for batch in loader:
            check(batch, dataset, seen)
    assert sorted(seen) == list(range(51))


def first_pixels(samples):
    """A collate function of a user: must run in the worker, over whole samples."""
    camera = next(k for k in samples[0] if k.startswith("observation.images"))
    return {
        "index": np.array([int(s["index"]) for s in samples]),
        "means": [float(s[camera].mean()) for s in samples],
    }


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_custom_collate_sees_whole_samples(root, workers):
    dataset = open_dataset(root)
    camera = dataset.cameras[0]
    with ADFEDataLoader(dataset, 4, workers, collate_fn=first_pixels, shuffle=True) as loader:
        batches = list(loader)
    for batch in batches:
        for index, mean in zip(batch["index"], batch["means"], strict=True):
            assert mean == float(dataset[int(index)][camera].mean())


def test_holding_every_batch_copies_instead_of_blocking(root):
    dataset = open_dataset(root)
    with ADFEDataLoader(dataset, 2, 2, shuffle=True, slots=4, persistent_workers=True) as loader:
        batches = list(loader)
        assert loader.stats()["copied_batches"] > 0
    assert sorted(flat(batches)) == list(range(51))
    camera = dataset.cameras[0]
    for batch in batches:
        for row, index in enumerate(batch["index"]):
            np.testing.assert_array_equal(np.asarray(batch[camera][row]), dataset[int(index)][camera])


def test_cached_epochs_decode_nothing_and_give_the_same_pixels(root, tmp_path):
    dataset = open_dataset(root, image_size=(40, 56))
    with ADFEDataLoader(
        dataset, 4, 2, shuffle=True, cache=tmp_path / "cache", persistent_workers=True, lookahead=False
    ) as loader:
        list(loader)
        decoded = loader.stats()["decoded_frames"]
        assert decoded > 0
        seen: list[int] = []
        for batch in loader:
            check(batch, dataset, seen)
        assert loader.stats()["decoded_frames"] == decoded
        assert loader.stats()["cache_hits"] == 2 * 51


def test_damaged_cache_is_noticed_and_decoded_again(root, tmp_path):
    dataset = open_dataset(root)
    cache = tmp_path / "cache"
    with ADFEDataLoader(dataset, 4, cache=cache) as loader:
        list(loader)
    for pixels in cache.glob("*/*.pixels"):
        raw = bytearray(pixels.read_bytes())
        raw[1000] ^= 255
        pixels.write_bytes(raw[: len(raw) // 2])
    seen: list[int] = []
    with ADFEDataLoader(dataset, 4, 1, cache=cache, persistent_workers=True) as loader:
        for batch in loader:
            check(batch, dataset, seen)
        assert loader.stats()["cache_misses"] > 0
    assert len(seen) == 51


def test_block_shuffle_decodes_each_group_of_pictures_about_once(root):
    dataset = open_dataset(root)
    with ADFEDataLoader(dataset, 4, 2, shuffle="block", persistent_workers=True) as loader:
        list(loader)
        block = loader.stats()["decode_waste"]
    assert block <= 1.25


def test_a_bad_video_is_named_or_skipped(root, tmp_path):
    """A file that is damaged after the set was opened: only its frames are lost, and never replaced."""
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    dataset = open_dataset(copy, cameras=open_dataset(copy).cameras[:1])
    requests = {i: dataset.frame_requests(i)[0] for i in range(len(dataset))}
    victim = Path(requests[0].path)
    raw = bytearray(victim.read_bytes())
    middle = len(raw) // 2
    raw[middle : middle + 400] = bytes(400)
    victim.write_bytes(raw)
    with ADFEDataLoader(dataset, 4, 2) as loader, pytest.raises(DataError, match="sample"):
        list(loader)
    with ADFEDataLoader(dataset, 4, 2, on_error="skip", error_budget=51, persistent_workers=True) as loader:
        got = flat(loader)
        skipped = [s.index for s in loader.skipped]
        assert loader.stats()["skipped_samples"] == len(skipped) > 0
    assert sorted(got + skipped) == list(range(51))


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_real_robot_video_equals_the_reference_path_in_both_layouts(shared_data, shuffle):
    """The same samples from v2.1 and v3.0, through workers, frame by frame."""
    sets = [open_dataset(shared_data / name, episodes=(0, 1)) for name in ("g1_pick", "g1_pick_v30")]
    camera = sets[0].cameras[0]
    loaders = [ADFEDataLoader(s, 8, 2, shuffle=shuffle, seed=3) for s in sets]
    for number, (old, new) in enumerate(zip(*loaders, strict=True)):
        assert indices_of([old]) == indices_of([new])
        np.testing.assert_array_equal(np.asarray(old[camera]), np.asarray(new[camera]))
        if number < 3:
            check(old, sets[0], [])
    for loader in loaders:
        loader.close()
