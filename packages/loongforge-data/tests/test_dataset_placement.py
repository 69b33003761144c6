"""Faults of data sets: the two layouts, and where the frames of an episode lie in its files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loongforge_data.dataset import open_dataset
from loongforge_data.errors import VideoError
from loongforge_data.formats.upgrade import convert_to_v30
from loongforge_data.synthetic import read_code, write_dataset
from loongforge_data.validate import validate_dataset

# -- the two layouts -------------------------------------------------------------------------------------


def test_both_layouts_of_the_real_set_give_equal_samples(shared_data):
    window = {"action": range(16), "observation.images.cam_high": [-1, 0]}
    old = open_dataset(shared_data / "g1_pick", window=window)
    new = open_dataset(shared_data / "g1_pick_v30", window=window)
    assert len(old) == len(new) == 2138
    rng = np.random.default_rng(1)
    for i in [0, 289, 290, 788, 789, 1873, 2137, *rng.integers(0, 2138, 12).tolist()]:
        a, b = old[i], new[i]
        assert a.keys() == b.keys()
        for key in a:
            if isinstance(a[key], str):
                assert a[key] == b[key]
            else:
                assert a[key].dtype == b[key].dtype
                assert np.array_equal(a[key], b[key]), key
    assert a["action"].shape == (16, 26)
    assert old.tabular(2137)["action_is_pad"].tolist() == [False] + [True] * 15


def test_real_set_facts(shared_data):
    dataset = open_dataset(shared_data / "g1_pick_v30")
    assert [e.length for e in dataset.episodes] == [290, 278, 221, 277, 267, 280, 260, 265]
    places = [dataset.placement(e.index, dataset.cameras[0]) for e in dataset.episodes]
    assert [p.first for p in places] == [0, 290, 568, 0, 277, 544, 0, 260]
    assert [Path(p.path).name for p in places] == [f"file-00{n}.mp4" for n in (0, 0, 0, 1, 1, 1, 2, 2)]
    assert dataset.fps == 30
    assert dataset.notices == ()
    assert set(dataset.stats["action"]) >= {"min", "max", "mean", "std", "count"}


def test_merged_episode_stats_equal_the_shipped_ones(shared_data):
    old = open_dataset(shared_data / "g1_pick", cameras=()).stats
    new = open_dataset(shared_data / "g1_pick_v30", cameras=()).stats
    for key in ("action", "observation.state"):
        for name in ("min", "max", "mean", "std", "count"):
            assert np.allclose(old[key][name].reshape(-1), new[key][name].reshape(-1), rtol=1e-6, atol=1e-9)


def test_conversion_of_the_real_set_equals_the_published_conversion(shared_data, tmp_path):
    done = convert_to_v30(shared_data / "g1_pick", tmp_path / "out", video_file_mb=8)
    assert (done.episodes, done.frames, done.video_files, done.data_files) == (8, 2138, 3, 1)
    ours = pq.read_table(tmp_path / "out/meta/episodes")
    theirs = pq.read_table(shared_data / "g1_pick_v30/meta/episodes")
    assert set(ours.column_names) == set(theirs.column_names)
    for name in ours.column_names:
        a, b = ours[name].to_pylist(), theirs[name].to_pylist()
        if name.endswith("timestamp"):
            assert np.allclose(a, b, rtol=0, atol=1e-9)
        elif not name.startswith("stats/"):
            assert a == b, name
    assert validate_dataset(tmp_path / "out").findings == []


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1", "vp9"])
def test_converted_sets_show_every_painted_frame(tmp_path, codec, sets):
    """D25 of the failure cases: joined streams with B-frames keep every frame in its place."""
    root = write_dataset(
        tmp_path / "set", episodes=4, frames=[9, 1, 14, 6], size=(64, 64), codec=codec, gop=6, version="3.0"
    )
    sets.assert_painted(open_dataset(root))
    assert validate_dataset(root, decode=True).errors == []


def test_same_arguments_write_the_same_set(tmp_path, sets):
    a = write_dataset(tmp_path / "a", episodes=2, frames=6, size=(64, 64), seed=5)
    b = write_dataset(tmp_path / "b", episodes=2, frames=6, size=(64, 64), seed=5)
    one, two = open_dataset(a), open_dataset(b)
    assert one.fingerprint == two.fingerprint
    assert all(np.array_equal(one[i]["action"], two[i]["action"]) for i in range(len(one)))
    assert all(np.array_equal(one[i][sets.FRONT], two[i][sets.FRONT]) for i in range(len(one)))
    other = open_dataset(write_dataset(tmp_path / "c", episodes=2, frames=6, size=(64, 64), seed=6))
    assert not np.array_equal(one[3]["action"], other[3]["action"])


# -- where frames lie ------------------------------------------------------------------------------------


def test_every_row_of_rolled_over_files_decodes_to_its_own_frame(v30, sets):
    """D01: each camera has several files; times are relative to the file that holds the episode."""
    dataset = open_dataset(v30)
    files = {dataset.placement(e.index, sets.FRONT).path for e in dataset.episodes}
    assert len(files) >= 2
    sets.assert_painted(dataset)


def test_each_camera_goes_by_its_own_file_numbers(tmp_path, v21, sets):
    """D09: one data file, a different number of video files per camera."""
    convert_to_v30(v21, tmp_path / "out", video_file_mb=1)
    wrist = "observation.images.wrist"
    rows = pq.read_table(sets.episode_table(tmp_path / "out")).to_pylist()
    # Give the wrist camera one file per episode.
    for n, row in enumerate(rows):
        target = tmp_path / f"out/videos/{wrist}/chunk-000/file-{n + 10:03d}.mp4"
        shutil.copyfile(sets.video(v21, n, wrist), target)
        row[f"videos/{wrist}/file_index"] = n + 10
        row[f"videos/{wrist}/from_timestamp"] = 0.0
        row[f"videos/{wrist}/to_timestamp"] = sets.LENGTHS[n] / 30
    pq.write_table(pa.Table.from_pylist(rows), sets.episode_table(tmp_path / "out"))
    dataset = open_dataset(tmp_path / "out")
    assert len({dataset.placement(e.index, wrist).path for e in dataset.episodes}) == 5
    assert len({dataset.placement(e.index, sets.FRONT).path for e in dataset.episodes}) == 1
    sets.assert_painted(dataset)


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_start_times_made_by_summing_floats_read_exactly(tmp_path, kind, sets):
    """D03: 60 episodes x 97 frames in one file, from_timestamp by repeated addition."""
    root = write_dataset(
        tmp_path / "set", episodes=60, frames=97, cameras=1, size=(16, 160), gop=30, version="3.0"
    )
    table = pq.read_table(sets.episode_table(root))
    total, starts = kind(0), []
    for _ in range(60):
        starts.append(float(total))
        for _ in range(97):
            total = kind(total + kind(1 / 30))
    sets.edit_table(
        sets.episode_table(root), lambda t: sets.set_column(t, f"videos/{sets.FRONT}/from_timestamp", starts)
    )
    assert table[f"videos/{sets.FRONT}/from_timestamp"].to_pylist() != starts
    dataset = open_dataset(root)
    assert [dataset.placement(n, sets.FRONT).first for n in range(60)] == [97 * n for n in range(60)]
    sets.assert_painted(dataset, rows=[0, 96, 97, 59 * 97, 60 * 97 - 1])


def test_cutting_out_one_episode_gives_exactly_its_frames(v30, sets):
    """D06: lengths 7, 13, 1, 29, 31, the one-frame episode included."""
    for episode, length in enumerate(sets.LENGTHS):
        dataset = open_dataset(v30, episodes=[episode])
        assert len(dataset) == length
        sets.assert_painted(dataset)
        assert [int(dataset.tabular(i)["frame_index"]) for i in range(length)] == list(range(length))


def test_end_times_one_frame_short_lose_no_frame(v30, sets):
    """Trap: every to_timestamp one frame short; only from_timestamp and length count."""
    name = f"videos/{sets.FRONT}/to_timestamp"
    sets.edit_table(
        sets.episode_table(v30), lambda t: sets.set_column(t, name, [v - 1 / 30 for v in t[name].to_pylist()])
    )
    sets.assert_painted(open_dataset(v30))


def test_drifted_start_times_are_corrected_by_the_lengths(tmp_path, v21, sets):
    """Each start short by one more frame, as sets whose ends were one frame short chain them."""
    convert_to_v30(v21, tmp_path / "out", video_file_mb=1)
    name = f"videos/{sets.FRONT}/from_timestamp"
    sets.edit_table(
        sets.episode_table(tmp_path / "out"),
        lambda t: sets.set_column(t, name, [max(v - n / 30, 0.0) for n, v in enumerate(t[name].to_pylist())]),
    )
    dataset = open_dataset(tmp_path / "out")
    sets.assert_painted(dataset)
    assert any("drift" in notice for notice in dataset.notices)


def test_offsets_of_a_merge_that_overlap_are_refused(tmp_path, v21, sets):
    """Two recordings in one file, the offsets of the second not re-based: the order would be a guess."""
    convert_to_v30(v21, tmp_path / "out", video_file_mb=1)
    name = f"videos/{sets.FRONT}/from_timestamp"
    starts = [0.0, 7 / 30, 0.0, 1 / 30, 30 / 30]
    sets.edit_table(sets.episode_table(tmp_path / "out"), lambda t: sets.set_column(t, name, starts))
    with pytest.raises(VideoError, match="offset does not fit"):
        open_dataset(tmp_path / "out")


def test_offsets_that_do_not_fit_the_file_are_refused_with_both_numbers(v30, sets):
    """D01 and the merge trap: gaps of hundreds of seconds."""
    name = f"videos/{sets.FRONT}/from_timestamp"
    sets.edit_table(
        sets.episode_table(v30), lambda t: sets.set_column(t, name, [v + 460.0 for v in t[name].to_pylist()])
    )
    with pytest.raises(VideoError, match=r"(?s)from_timestamp 460\.000000 s is frame 13800.*file holds"):
        open_dataset(v30)
    kinds = {finding.kind for finding in validate_dataset(v30).errors}
    assert kinds == {"video-offset"}


def test_a_file_with_unused_stretches_is_read_at_the_stated_times(tmp_path, v21, sets):
    """Episodes dropped from the table while their frames stay in the file."""
    convert_to_v30(v21, tmp_path / "out", video_file_mb=1)
    path = sets.episode_table(tmp_path / "out")
    rows = [row for row in pq.read_table(path).to_pylist() if row["episode_index"] != 1]
    for number, row in enumerate(rows):
        row["episode_index"] = number
    pq.write_table(pa.Table.from_pylist(rows), path)
    data = tmp_path / "out/data/chunk-000/file-000.parquet"
    table = pq.read_table(data)
    table = table.filter(pa.compute.not_equal(table["episode_index"], 1))
    renumbered = [max(v - 1, 0) for v in table["episode_index"].to_pylist()]
    pq.write_table(sets.set_column(table, "episode_index", renumbered), data)
    dataset = open_dataset(tmp_path / "out")
    assert len(dataset) == sum(sets.LENGTHS) - 13
    for i in range(len(dataset)):
        sample = dataset[i]
        episode = int(sample["episode_index"])
        assert read_code(sample[sets.FRONT]) == (episode + (episode > 0), int(sample["frame_index"]))


def test_frames_are_found_by_index_when_stamps_are_noisy(v21, sets):
    """D04 and the jitter trap: hardware stamps stay data, frames go by frame_index."""
    rng = np.random.default_rng(0)
    length = sets.LENGTHS[4]
    stamps = (np.arange(length) / 30 + rng.uniform(-0.008, 0.008, length)).astype(np.float32)
    stamps[-1] = length / 30 + 0.02
    sets.edit_table(sets.parquet(v21, 4), lambda t: sets.set_column(t, "timestamp", np.sort(stamps)))
    sets.assert_painted(open_dataset(v21, episodes=[4]))
    report = validate_dataset(v21)
    assert report.errors == []
    assert [f.kind for f in report.findings] == ["timestamps"]
    assert report.findings[0].episode == 4


def test_float32_stamps_late_in_a_long_episode_are_no_fault(tmp_path, sets):
    """Trap: float32 timestamp breaks 1e-4 from frame 61441 of an episode at 30 fps."""
    root = write_dataset(tmp_path / "set", episodes=1, frames=4, cameras=0)
    length = 70_000
    steps = np.arange(length)
    columns = {
        "observation.state": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(length * 4, np.float32)), 4),
        "action": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(length * 3, np.float32)), 3),
        "timestamp": (steps / 30).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.zeros(length, np.int64),
        "index": steps,
        "task_index": np.zeros(length, np.int64),
    }
    pq.write_table(pa.table(columns), sets.parquet(root, 0))
    (root / "meta/episodes.jsonl").write_text(
        json.dumps({"episode_index": 0, "tasks": [], "length": length}) + "\n"
    )
    assert abs(float(columns["timestamp"][61441 + 5000]) - (61441 + 5000) / 30) > 4e-5
    sets.edit_json(root / "meta/info.json", total_frames=length)
    assert validate_dataset(root).findings == []


def test_repeated_or_reversed_stamps_are_reported_with_the_first_bad_row(v21, sets):
    """D16: stamps start over, occur twice, run backwards."""
    ramp = (np.arange(29) / 30).astype(np.float32)
    bad = {
        0: np.repeat(ramp[:4], 2)[:7],
        3: np.concatenate([ramp[:15], ramp[:14]]),
        4: (np.arange(31)[::-1] / 30).astype(np.float32),
    }
    for episode, stamps in bad.items():
        sets.edit_table(sets.parquet(v21, episode), lambda t, s=stamps: sets.set_column(t, "timestamp", s))
    findings = {f.episode: f for f in validate_dataset(v21).errors}
    assert set(findings) == {0, 3, 4}
    assert "row 1 of the episode" in findings[0].message
    assert "row 15 of the episode has 0.000000 s after 0.466667 s" in findings[3].message
    assert findings[3].row == 7 + 13 + 1 + 15
