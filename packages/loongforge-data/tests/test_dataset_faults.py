"""What a data set directory can do to a reader: the fault catalogue's rows about layouts and tables."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loongforge_data.dataset import open_dataset
from loongforge_data.errors import DataError, LayoutError, TableError, VideoError
from loongforge_data.formats.upgrade import convert_to_v30, write_tasks
from loongforge_data.synthetic import read_code, write_dataset
from loongforge_data.validate import validate_dataset

FRONT = "observation.images.front"
LENGTHS = [7, 13, 1, 29, 31]
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"


@pytest.fixture(scope="session")
def v21_source(tmp_path_factory):
    root = tmp_path_factory.mktemp("base") / "v21"
    return write_dataset(root, episodes=5, frames=LENGTHS, cameras=2, size=(64, 64), gop=4)


@pytest.fixture(scope="session")
def v30_source(tmp_path_factory, v21_source):
    root = tmp_path_factory.mktemp("base") / "v30"
    convert_to_v30(v21_source, root, video_file_mb=0.02)
    return root


@pytest.fixture
def v21(tmp_path, v21_source):
    return Path(shutil.copytree(v21_source, tmp_path / "v21"))


@pytest.fixture
def v30(tmp_path, v30_source):
    return Path(shutil.copytree(v30_source, tmp_path / "v30"))


def assert_painted(dataset, rows=None):
    """Every sample shows its own episode and frame on every camera."""
    for i in range(len(dataset)) if rows is None else rows:
        sample = dataset[i]
        for camera in dataset.cameras:
            picture = sample[camera] if sample[camera].ndim == 3 else sample[camera][0]
            got = read_code(picture)
            assert got == (int(sample["episode_index"]), int(sample["frame_index"])), (i, camera)


def edit_json(path, **changes):
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps(data))


def edit_table(path, change):
    pq.write_table(change(pq.read_table(path)), path)


def set_column(table, name, values):
    column = pa.array(values) if not isinstance(values, pa.Array) else values
    return table.set_column(table.column_names.index(name), name, column)


def episode_table(v30):
    return v30 / "meta/episodes/chunk-000/file-000.parquet"


def parquet(v21, episode):
    return v21 / f"data/chunk-000/episode_{episode:06d}.parquet"


def video(v21, episode, camera=FRONT):
    return v21 / f"videos/chunk-000/{camera}/episode_{episode:06d}.mp4"


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
def test_converted_sets_show_every_painted_frame(tmp_path, codec):
    """D25 of the failure cases: joined streams with B-frames keep every frame in its place."""
    root = write_dataset(
        tmp_path / "set", episodes=4, frames=[9, 1, 14, 6], size=(64, 64), codec=codec, gop=6, version="3.0"
    )
    assert_painted(open_dataset(root))
    assert validate_dataset(root, decode=True).errors == []


def test_same_arguments_write_the_same_set(tmp_path):
    a = write_dataset(tmp_path / "a", episodes=2, frames=6, size=(64, 64), seed=5)
    b = write_dataset(tmp_path / "b", episodes=2, frames=6, size=(64, 64), seed=5)
    one, two = open_dataset(a), open_dataset(b)
    assert one.fingerprint == two.fingerprint
    assert all(np.array_equal(one[i]["action"], two[i]["action"]) for i in range(len(one)))
    assert all(np.array_equal(one[i][FRONT], two[i][FRONT]) for i in range(len(one)))
    other = open_dataset(write_dataset(tmp_path / "c", episodes=2, frames=6, size=(64, 64), seed=6))
    assert not np.array_equal(one[3]["action"], other[3]["action"])


# -- where frames lie ------------------------------------------------------------------------------------


def test_every_row_of_rolled_over_files_decodes_to_its_own_frame(v30):
    """D01: each camera has several files; times are relative to the file that holds the episode."""
    dataset = open_dataset(v30)
    files = {dataset.placement(e.index, FRONT).path for e in dataset.episodes}
    assert len(files) >= 2
    assert_painted(dataset)


def test_each_camera_goes_by_its_own_file_numbers(tmp_path, v21):
    """D09: one data file, a different number of video files per camera."""
    convert_to_v30(v21, tmp_path / "out", video_file_mb=1)
    wrist = "observation.images.wrist"
    rows = pq.read_table(episode_table(tmp_path / "out")).to_pylist()
    # Give the wrist camera one file per episode.
    for n, row in enumerate(rows):
        target = tmp_path / f"out/videos/{wrist}/chunk-000/file-{n + 10:03d}.mp4"
        shutil.copyfile(video(v21, n, wrist), target)
        row[f"videos/{wrist}/file_index"] = n + 10
        row[f"videos/{wrist}/from_timestamp"] = 0.0
        row[f"videos/{wrist}/to_timestamp"] = LENGTHS[n] / 30
    pq.write_table(pa.Table.from_pylist(rows), episode_table(tmp_path / "out"))
    dataset = open_dataset(tmp_path / "out")
    assert len({dataset.placement(e.index, wrist).path for e in dataset.episodes}) == 5
    assert len({dataset.placement(e.index, FRONT).path for e in dataset.episodes}) == 1
    assert_painted(dataset)


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_start_times_made_by_summing_floats_read_exactly(tmp_path, kind):
    """D03: 60 episodes x 97 frames in one file, from_timestamp by repeated addition."""
    root = write_dataset(
        tmp_path / "set", episodes=60, frames=97, cameras=1, size=(16, 160), gop=30, version="3.0"
    )
    table = pq.read_table(episode_table(root))
    total, starts = kind(0), []
    for _ in range(60):
        starts.append(float(total))
        for _ in range(97):
            total = kind(total + kind(1 / 30))
    edit_table(episode_table(root), lambda t: set_column(t, f"videos/{FRONT}/from_timestamp", starts))
    assert table[f"videos/{FRONT}/from_timestamp"].to_pylist() != starts
    dataset = open_dataset(root)
    assert [dataset.placement(n, FRONT).first for n in range(60)] == [97 * n for n in range(60)]
    assert_painted(dataset, rows=[0, 96, 97, 59 * 97, 60 * 97 - 1])


def test_cutting_out_one_episode_gives_exactly_its_frames(v30):
    """D06: lengths 7, 13, 1, 29, 31, the one-frame episode included."""
    for episode, length in enumerate(LENGTHS):
        dataset = open_dataset(v30, episodes=[episode])
        assert len(dataset) == length
        assert_painted(dataset)
        assert [int(dataset.tabular(i)["frame_index"]) for i in range(length)] == list(range(length))


def test_end_times_one_frame_short_lose_no_frame(v30):
    """Trap: every to_timestamp one frame short; only from_timestamp and length count."""
    name = f"videos/{FRONT}/to_timestamp"
    edit_table(episode_table(v30), lambda t: set_column(t, name, [v - 1 / 30 for v in t[name].to_pylist()]))
    assert_painted(open_dataset(v30))


def test_drifted_start_times_are_corrected_by_the_lengths(tmp_path, v21):
    """Each start short by one more frame, as sets whose ends were one frame short chain them."""
    convert_to_v30(v21, tmp_path / "out", video_file_mb=1)
    name = f"videos/{FRONT}/from_timestamp"
    edit_table(
        episode_table(tmp_path / "out"),
        lambda t: set_column(t, name, [max(v - n / 30, 0.0) for n, v in enumerate(t[name].to_pylist())]),
    )
    dataset = open_dataset(tmp_path / "out")
    assert_painted(dataset)
    assert any("drift" in notice for notice in dataset.notices)


def test_offsets_of_a_merge_that_overlap_are_refused(tmp_path, v21):
    """Two recordings in one file, the offsets of the second not re-based: the order would be a guess."""
    convert_to_v30(v21, tmp_path / "out", video_file_mb=1)
    name = f"videos/{FRONT}/from_timestamp"
    starts = [0.0, 7 / 30, 0.0, 1 / 30, 30 / 30]
    edit_table(episode_table(tmp_path / "out"), lambda t: set_column(t, name, starts))
    with pytest.raises(VideoError, match="offset does not fit"):
        open_dataset(tmp_path / "out")


def test_offsets_that_do_not_fit_the_file_are_refused_with_both_numbers(v30):
    """D01 and the merge trap: gaps of hundreds of seconds."""
    name = f"videos/{FRONT}/from_timestamp"
    edit_table(episode_table(v30), lambda t: set_column(t, name, [v + 460.0 for v in t[name].to_pylist()]))
    with pytest.raises(VideoError, match=r"(?s)from_timestamp 460\.000000 s is frame 13800.*file holds"):
        open_dataset(v30)
    kinds = {finding.kind for finding in validate_dataset(v30).errors}
    assert kinds == {"video-offset"}


def test_a_file_with_unused_stretches_is_read_at_the_stated_times(tmp_path, v21):
    """Episodes dropped from the table while their frames stay in the file."""
    convert_to_v30(v21, tmp_path / "out", video_file_mb=1)
    path = episode_table(tmp_path / "out")
    rows = [row for row in pq.read_table(path).to_pylist() if row["episode_index"] != 1]
    for number, row in enumerate(rows):
        row["episode_index"] = number
    pq.write_table(pa.Table.from_pylist(rows), path)
    data = tmp_path / "out/data/chunk-000/file-000.parquet"
    table = pq.read_table(data)
    table = table.filter(pa.compute.not_equal(table["episode_index"], 1))
    renumbered = [max(v - 1, 0) for v in table["episode_index"].to_pylist()]
    pq.write_table(set_column(table, "episode_index", renumbered), data)
    dataset = open_dataset(tmp_path / "out")
    assert len(dataset) == sum(LENGTHS) - 13
    for i in range(len(dataset)):
        sample = dataset[i]
        episode = int(sample["episode_index"])
        assert read_code(sample[FRONT]) == (episode + (episode > 0), int(sample["frame_index"]))


def test_frames_are_found_by_index_when_stamps_are_noisy(v21):
    """D04 and the jitter trap: hardware stamps stay data, frames go by frame_index."""
    rng = np.random.default_rng(0)
    length = LENGTHS[4]
    stamps = (np.arange(length) / 30 + rng.uniform(-0.008, 0.008, length)).astype(np.float32)
    stamps[-1] = length / 30 + 0.02
    edit_table(parquet(v21, 4), lambda t: set_column(t, "timestamp", np.sort(stamps)))
    assert_painted(open_dataset(v21, episodes=[4]))
    report = validate_dataset(v21)
    assert report.errors == []
    assert [f.kind for f in report.findings] == ["timestamps"]
    assert report.findings[0].episode == 4


def test_float32_stamps_late_in_a_long_episode_are_no_fault(tmp_path):
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
    pq.write_table(pa.table(columns), parquet(root, 0))
    (root / "meta/episodes.jsonl").write_text(
        json.dumps({"episode_index": 0, "tasks": [], "length": length}) + "\n"
    )
    assert abs(float(columns["timestamp"][61441 + 5000]) - (61441 + 5000) / 30) > 4e-5
    edit_json(root / "meta/info.json", total_frames=length)
    assert validate_dataset(root).findings == []


def test_repeated_or_reversed_stamps_are_reported_with_the_first_bad_row(v21):
    """D16: stamps start over, occur twice, run backwards."""
    ramp = (np.arange(29) / 30).astype(np.float32)
    bad = {
        0: np.repeat(ramp[:4], 2)[:7],
        3: np.concatenate([ramp[:15], ramp[:14]]),
        4: (np.arange(31)[::-1] / 30).astype(np.float32),
    }
    for episode, stamps in bad.items():
        edit_table(parquet(v21, episode), lambda t, s=stamps: set_column(t, "timestamp", s))
    findings = {f.episode: f for f in validate_dataset(v21).errors}
    assert set(findings) == {0, 3, 4}
    assert "row 1 of the episode" in findings[0].message
    assert "row 15 of the episode has 0.000000 s after 0.466667 s" in findings[3].message
    assert findings[3].row == 7 + 13 + 1 + 15


# -- windows ---------------------------------------------------------------------------------------------


def test_a_subset_with_windows_equals_loading_all_and_filtering(tmp_path):
    """D07: episodes 2, 5, 9 of 10, window -1, 0, +1 on state and picture."""
    root = write_dataset(
        tmp_path / "set", episodes=10, frames=[3, 4, 5, 1, 6, 2, 7, 3, 4, 5], cameras=1, size=(64, 64)
    )
    window = {"observation.state": [-1, 0, 1], FRONT: [-1, 0, 1]}
    whole = open_dataset(root, window=window)
    part = open_dataset(root, window=window, episodes=[9, 2, 5])
    chosen = [i for i in range(len(whole)) if int(whole.tabular(i)["episode_index"]) in (2, 5, 9)]
    assert len(part) == len(chosen)
    for i, j in enumerate(chosen):
        a, b = part[i], whole[j]
        for key in a:
            assert np.array_equal(a[key], b[key]) if not isinstance(a[key], str) else a[key] == b[key]
        length = {2: 5, 5: 2, 9: 5}[int(a["episode_index"])]
        frame = int(a["frame_index"])
        assert a["observation.state_is_pad"].tolist() == [frame == 0, False, frame == length - 1]
        assert a[f"{FRONT}_is_pad"].tolist() == [frame == 0, False, frame == length - 1]
        shown = [read_code(p)[1] for p in a[FRONT]]
        assert shown == [max(frame - 1, 0), frame, min(frame + 1, length - 1)]


def test_bad_windows_and_choices_name_the_allowed_values(v21):
    with pytest.raises(ValueError, match="not a feature"):
        open_dataset(v21, window={"actions": range(4)})
    with pytest.raises(ValueError, match="non-empty sequence of whole frame offsets"):
        open_dataset(v21, window={"action": []})
    with pytest.raises(ValueError, match="not a video feature"):
        open_dataset(v21, cameras=["front"])
    with pytest.raises(LayoutError, match="episode 12 does not exist"):
        open_dataset(v21, episodes=[12])
    with pytest.raises(ValueError, match="twice"):
        open_dataset(v21, episodes=[1, 1])
    with pytest.raises(ValueError, match="on_mismatch must be one of"):
        open_dataset(v21, on_mismatch="ignore")
    with pytest.raises(ValueError, match="image_size"):
        open_dataset(v21, image_size=(0, 5))
    with pytest.raises(IndexError, match="81 samples"):
        open_dataset(v21)[81]


# -- tables ----------------------------------------------------------------------------------------------


def test_row_ranges_are_gap_free_after_converting_pictures_in_tables(tmp_path):
    """D08: 3 episodes of lengths 5, 11, 3 with PNG bytes in a column, no mp4."""
    root = picture_set(tmp_path / "v21", [5, 11, 3])
    convert_to_v30(root, tmp_path / "v30")
    table = pq.read_table(episode_table(tmp_path / "v30"))
    assert table["dataset_from_index"].to_pylist() == [0, 5, 16]
    assert table["dataset_to_index"].to_pylist() == [5, 16, 19]
    dataset = open_dataset(tmp_path / "v30")
    for i in range(19):
        sample = dataset[i]
        assert read_code(sample["observation.images.eye"]) == (
            int(sample["episode_index"]),
            int(sample["frame_index"]),
        )
        assert int(sample["index"]) == i


def picture_set(root, lengths):
    """A v2.1 set whose pictures are PNG bytes in the table."""
    import io

    from loongforge_data.synthetic import render, simulate
    from PIL import Image

    write_dataset(root, episodes=len(lengths), frames=lengths, cameras=0)
    info = json.loads((root / "meta/info.json").read_text())
    info["features"]["observation.images.eye"] = {
        "dtype": "image",
        "shape": [64, 64, 3],
        "names": ["height", "width", "channels"],
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    for episode, length in enumerate(lengths):
        track = simulate(0, episode, length)
        cells = []
        for t in range(length):
            data = io.BytesIO()
            Image.fromarray(render(track, t, camera=0, size=(64, 64), episode=episode)).save(data, "PNG")
            cells.append({"bytes": data.getvalue(), "path": f"frame_{t:06d}.png"})
        column = pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        edit_table(parquet(root, episode), lambda t, c=column: t.append_column("observation.images.eye", c))
    return root


def test_all_shards_of_the_episode_table_are_read(v30):
    """D10: equal basenames in different chunk folders; duplicates and holes are errors."""
    table = pq.read_table(episode_table(v30))
    other = v30 / "meta/episodes/chunk-001/file-000.parquet"
    other.parent.mkdir()
    pq.write_table(table.slice(2), other)
    pq.write_table(table.slice(0, 2), episode_table(v30))
    assert [e.index for e in open_dataset(v30).episodes] == [0, 1, 2, 3, 4]
    pq.write_table(table.slice(1), other)
    with pytest.raises(LayoutError, match=r"occurs twice.*\[1\]"):
        open_dataset(v30)
    pq.write_table(table.slice(3), other)
    with pytest.raises(LayoutError, match=r"missing in the episode table: \[2\]"):
        open_dataset(v30)


def test_task_texts_are_found_in_all_three_shapes(v21, v30):
    """D11: text as pandas index, as a column, and in tasks.jsonl."""
    texts = [open_dataset(v21, cameras=())[i]["task"] for i in range(81)]
    assert {t.split()[-2] for t in texts} <= {"green", "blue"}
    assert [open_dataset(v30, cameras=())[i]["task"] for i in range(81)] == texts
    table = pq.read_table(v30 / "meta/tasks.parquet")
    renamed = pa.table({"task": table["__index_level_0__"], "task_index": table["task_index"]})
    pq.write_table(renamed, v30 / "meta/tasks.parquet")
    assert [open_dataset(v30, cameras=())[i]["task"] for i in range(81)] == texts
    large = renamed.set_column(0, "task", renamed["task"].cast(pa.large_string()))
    pq.write_table(large, v30 / "meta/tasks.parquet")
    assert [open_dataset(v30, cameras=())[i]["task"] for i in range(81)] == texts


@pytest.mark.parametrize("damage", ["cut", "empty", "zeros"])
def test_a_table_without_footer_names_the_file_and_its_episodes(v21, damage):
    """D12: and a skip policy goes on with the rest and reports it."""
    path = parquet(v21, 1)
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-32], "empty": b"", "zeros": bytes(4096)}[damage])
    with pytest.raises(DataError) as caught:
        open_dataset(v21)
    assert caught.value.path == str(path)
    assert caught.value.episode == 1
    dataset = open_dataset(v21, on_mismatch="skip_episode")
    assert [e.index for e in dataset.episodes] == [0, 2, 3, 4]
    assert [p.episode for p in dataset.skipped] == [1]
    assert_painted(dataset, rows=[0, 7, 8, 36])


def test_all_missing_files_are_listed_at_open(v21, v30):
    """D13: never first seen in the middle of an epoch."""
    video(v21, 1).unlink()
    video(v21, 3, "observation.images.wrist").unlink()
    parquet(v21, 4).unlink()
    with pytest.raises(DataError) as caught:
        open_dataset(v21)
    text = str(caught.value)
    for part in ("episode_000001.mp4", "episode_000003.mp4", "episode_000004.parquet", "3 problems"):
        assert part in text
    found = {(f.episode, Path(f.path).name) for f in validate_dataset(v21).errors if f.kind == "files"}
    assert found == {(1, "episode_000001.mp4"), (3, "episode_000003.mp4"), (4, "episode_000004.parquet")}
    name = f"videos/{FRONT}/file_index"
    edit_table(
        episode_table(v30),
        lambda t: set_column(t, name, pa.array([None, *t[name].to_pylist()[1:]], pa.int64())),
    )
    with pytest.raises(VideoError, match="no file number"):
        open_dataset(v30)
    assert len(open_dataset(v30, on_mismatch="skip_episode").episodes) == 4


def test_pointer_files_empty_metadata_and_wrong_layout_are_called_by_name(v21, v30):
    """D14."""
    parquet(v21, 0).write_text(LFS)
    video(v21, 2).write_text(LFS)
    with pytest.raises(DataError) as caught:
        open_dataset(v21)
    assert str(caught.value).count("Git LFS pointer") == 2
    edit_json(v30 / "meta/info.json", codebase_version="v2.1")
    with pytest.raises(LayoutError, match=r"layout mismatch: info\.json says v2\.1.*v3\.0"):
        open_dataset(v30)
    edit_json(v21 / "meta/info.json", codebase_version="v3.0")
    with pytest.raises(LayoutError, match=r"layout mismatch: info\.json says v3\.0"):
        open_dataset(v21)
    for name in ("info.json", "episodes.jsonl", "tasks.jsonl"):
        edit_json(v21 / "meta/info.json", codebase_version="v2.1") if name != "info.json" else None
        saved = (v21 / "meta" / name).read_bytes()
        (v21 / "meta" / name).write_bytes(b"")
        with pytest.raises(LayoutError, match="empty") as caught:
            open_dataset(v21, on_mismatch="skip_episode")
        assert caught.value.path == str(v21 / "meta" / name)
        (v21 / "meta" / name).write_bytes(saved)
    with pytest.raises(LayoutError, match="does not exist"):
        open_dataset(v21 / "nowhere")


def test_rows_and_frames_that_differ_in_number_follow_a_stated_policy(v21, clips):
    """D15: episode 3 has 29 rows and 27 frames, episode 4 has 31 rows and 33 frames."""
    from loongforge_data.synthetic import encode_video, render, simulate

    for episode, frames in ((3, 27), (4, 33)):
        for camera, name in enumerate((FRONT, "observation.images.wrist")):
            track = simulate(0, episode, frames)
            pictures = [
                render(track, t, camera=camera, size=(64, 64), episode=episode) for t in range(frames)
            ]
            encode_video(video(v21, episode, name), pictures, fps=30, gop=4)
    with pytest.raises(VideoError) as caught:
        open_dataset(v21)
    assert "29 rows but camera" in str(caught.value)
    assert "27 frames" in str(caught.value)
    assert "33 frames" in str(caught.value)
    found = {(f.episode, f.kind) for f in validate_dataset(v21).errors}
    assert found == {(3, "video-frames"), (4, "video-frames")}
    cut = open_dataset(v21, on_mismatch="drop_tail")
    assert [e.length for e in cut.episodes] == [7, 13, 1, 27, 31]
    assert_painted(cut)
    skipped = open_dataset(v21, on_mismatch="skip_episode")
    assert [e.index for e in skipped.episodes] == [0, 1, 2]
    assert {p.episode for p in skipped.skipped} == {3, 4}


def test_a_request_past_the_frames_is_an_error_even_unchecked(v21):
    """D15: with headers unchecked, the first decode says so; no frame is used twice."""
    from loongforge_data.synthetic import encode_video, render, simulate

    track = simulate(0, 3, 27)
    encode_video(
        video(v21, 3), [render(track, t, camera=0, size=(64, 64), episode=3) for t in range(27)], fps=30
    )
    dataset = open_dataset(v21, verify="paths", cameras=[FRONT])
    assert_painted(dataset, rows=[21, 47])
    with pytest.raises(VideoError, match="27 frames") as caught:
        dataset[48]
    assert (caught.value.episode, caught.value.row) == (3, 48)


def test_rows_come_in_index_order_whatever_file_they_are_in(v30):
    """D17: file numbers swapped, rows shuffled inside the file, row groups across episodes."""
    path = v30 / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    order = np.random.default_rng(0).permutation(table.num_rows)
    pq.write_table(table.take(order), path, row_group_size=10)
    dataset = open_dataset(v30)
    assert [int(dataset.tabular(i)["index"]) for i in range(81)] == list(range(81))
    assert_painted(dataset)
    first, second = v30 / "data/chunk-000/file-001.parquet", path
    pq.write_table(table.slice(0, 20), first)
    pq.write_table(table.slice(20), second)
    rows = pq.read_table(episode_table(v30)).to_pylist()
    for row in rows:
        row["data/file_index"] = 1 if row["episode_index"] < 2 else 0
    pq.write_table(pa.Table.from_pylist(rows), episode_table(v30))
    again = open_dataset(v30)
    assert [int(again.tabular(i)["index"]) for i in range(81)] == list(range(81))
    assert_painted(again, rows=range(15, 30))


def test_holes_and_overlaps_of_frame_numbers_are_found(v21):
    """D17."""
    edit_table(parquet(v21, 1), lambda t: t.filter(pa.array([i != 4 for i in range(13)])))
    edit_table(parquet(v21, 3), lambda t: pa.concat_tables([t, t.slice(5, 1)]))
    edit_table(parquet(v21, 4), lambda t: t.slice(0, 30))
    messages = {f.episode: f.message for f in validate_dataset(v21).errors}
    assert "leaves a hole: row 4 of the episode has 5" in messages[1]
    assert "occurs twice: row 6 of the episode has 5" in messages[3]
    assert "30 rows, the episode table says 31" in messages[4]


def test_column_types_that_differ_between_files_are_cast_or_refused(v21):
    """D18: list<double> in place of fixed_size_list<float>; ragged rows; a 2-D feature."""

    def as_list(t, width=3):
        values = [row[:width] for row in t["action"].to_pylist()]
        return set_column(t, "action", pa.array(values, pa.list_(pa.float64())))

    before = open_dataset(v21, cameras=())
    edit_table(parquet(v21, 0), as_list)
    after = open_dataset(v21, cameras=())
    for i in range(10):
        a, b = before[i]["action"], after[i]["action"]
        assert b.dtype == np.float32
        assert np.array_equal(a, b)

    def ragged(t):
        values = t["action"].to_pylist()
        values[5] = values[5][:2]
        return set_column(t, "action", pa.array(values, pa.list_(pa.float32())))

    edit_table(parquet(v21, 1), ragged)
    with pytest.raises(TableError, match=r"row 5 of column 'action' has 2 values, declared shape is \[3\]"):
        open_dataset(v21, cameras=())
    edit_table(parquet(v21, 1), lambda t: as_list(t.slice(0, 0), width=3))
    edit_table(parquet(v21, 3), lambda t: as_list(t, width=2))
    with pytest.raises(DataError) as caught:
        open_dataset(v21, cameras=())
    assert "has 2 values, declared shape is [3]" in str(caught.value)


def test_nested_lists_and_extra_columns_are_accepted(v21):
    """D18 and the trap of list<fixed_size_list> action chunks, `*_is_pad` and `task` columns."""
    info = json.loads((v21 / "meta/info.json").read_text())
    info["features"]["chunk"] = {"dtype": "float32", "shape": [2, 3], "names": [["a", "b"], ["x", "y", "z"]]}
    info["features"]["task"] = {"dtype": "string", "shape": [1], "names": None}
    (v21 / "meta/info.json").write_text(json.dumps(info))
    for episode, length in enumerate(LENGTHS):
        nested = pa.array(
            [[[i, i + 1, i + 2], [0.0, 0.5, i]] for i in range(length)], pa.list_(pa.list_(pa.float32(), 3))
        )

        def extend(t, nested=nested, length=length):
            t = t.append_column("chunk", nested)
            t = t.append_column("chunk_is_pad", pa.array([[False, True]] * length))
            return t.append_column("task", pa.array([f"row {i}" for i in range(length)]))

        edit_table(parquet(v21, episode), extend)
    sample = open_dataset(v21, cameras=())[9]
    assert sample["chunk"].tolist() == [[2, 3, 4], [0, 0.5, 2]]
    assert sample["task"] == "row 2"
    assert open_dataset(v21, cameras=()).features["chunk"].names == ("a", "b", "x", "y", "z")


def test_empty_sets_and_one_frame_episodes_open(tmp_path, v21):
    """D19: nothing recorded; episodes of length 1 and 0."""
    root = tmp_path / "empty"
    (root / "meta").mkdir(parents=True)
    info = json.loads((v21 / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps({**info, "total_episodes": 0, "total_frames": 0}))
    dataset = open_dataset(root)
    assert len(dataset) == 0
    assert list(dataset) == []
    assert dataset.image_layout()[FRONT].height == 64
    with pytest.raises(IndexError, match="0 samples"):
        dataset[0]
    (root / "meta/info.json").write_text(
        json.dumps({**info, "codebase_version": "v3.0", "total_episodes": 0, "total_frames": 0})
    )
    assert len(open_dataset(root)) == 0
    one = open_dataset(v21, episodes=[2], window={"action": range(4)})
    assert len(one) == 1
    assert one[0]["action_is_pad"].tolist() == [False, True, True, True]
    with (v21 / "meta/episodes.jsonl").open("a") as file:
        file.write(json.dumps({"episode_index": 5, "tasks": [], "length": 0}) + "\n")
    dataset = open_dataset(v21)
    assert len(dataset) == 81
    assert [f.kind for f in validate_dataset(v21).findings if f.episode == 5] == ["empty-episode"]


def test_task_texts_arrive_byte_for_byte(v21, v30, tmp_path):
    """D20: plain, 20 kB, Chinese and emoji with a newline, empty."""
    texts = ["pick it up", "x" * 20_000, "拿起瓶子 🤖\nsecond line\u2028third", "", "green square."]
    lines = "".join(
        json.dumps({"task_index": i, "task": t}, ensure_ascii=False) + "\n" for i, t in enumerate(texts)
    )
    (v21 / "meta/tasks.jsonl").write_text(lines, encoding="utf-8")
    write_tasks(v30 / "meta/tasks.parquet", dict(enumerate(texts)))
    for episode, length in enumerate(LENGTHS):
        edit_table(parquet(v21, episode), lambda t, e=episode, n=length: set_column(t, "task_index", [e] * n))
    data = v30 / "data/chunk-000/file-000.parquet"
    edit_table(data, lambda t: set_column(t, "task_index", t["episode_index"].to_pylist()))
    for root in (v21, v30):
        dataset = open_dataset(root, cameras=())
        assert [dataset[i]["task"] for i in (0, 7, 20, 21, 50)] == texts
    meta = (v21 / "meta/episodes.jsonl").read_text().splitlines()
    rows = [{**json.loads(line), "tasks": "one text, not letters"} for line in meta]
    (v21 / "meta/episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert open_dataset(v21, cameras=()).episodes[0].tasks == ("one text, not letters",)


# -- odd but accepted ------------------------------------------------------------------------------------


def test_oddities_of_published_sets_are_accepted(v21):
    """Quirks of GR00T demo sets and traps: float fps, float64 columns, wrong totals, video_info, no names."""
    info = json.loads((v21 / "meta/info.json").read_text())
    info["fps"] = 30.0
    info["splits"] = {"train": "0:100"}
    info["total_chunks"] = 0
    info["total_frames"] = 9
    info.pop("total_videos")
    info["robot_type"] = None
    info["features"]["action"]["dtype"] = "float64"
    info["features"]["action"]["names"] = {"motors": ["a", "b", "c"]}
    info["features"]["timestamp"].pop("names")
    info["features"][FRONT]["video_info"] = {"video.codec": "mpeg4"}
    info["features"][FRONT].pop("info")
    info["features"]["observation.images.ego"] = dict(info["features"][FRONT])
    (v21 / "meta/info.json").write_text(json.dumps(info))
    edit_table(
        parquet(v21, 0),
        lambda t: set_column(t, "action", pa.array(t["action"].to_pylist(), pa.list_(pa.float64()))),
    )
    (v21 / "meta/episodes.jsonl").write_text(
        "\n".join(reversed((v21 / "meta/episodes.jsonl").read_text().splitlines())) + "\n\n"
    )
    dataset = open_dataset(v21)
    assert dataset.fps == 30
    assert isinstance(dataset.fps, int)
    assert dataset[0]["action"].dtype == np.float32
    assert dataset.features["action"].names == ("a", "b", "c")
    assert "observation.images.ego" not in dataset.cameras
    assert any("ego" in notice for notice in dataset.notices)
    assert any("total_frames" in notice for notice in dataset.notices)
    assert_painted(dataset, rows=[0, 40])
    kinds = sorted({f.kind for f in validate_dataset(v21).findings})
    assert kinds == ["camera-without-files", "totals", "video-codec"]


def test_features_are_trusted_over_name_prefixes(tmp_path):
    """Trap: keys `state`, `actions`, `image` in place of `observation.*`."""
    root = write_dataset(tmp_path / "set", episodes=1, frames=5, cameras=0)
    text = (
        (root / "meta/info.json")
        .read_text()
        .replace("observation.state", "state")
        .replace('"action"', '"actions"')
    )
    (root / "meta/info.json").write_text(text)
    edit_table(
        parquet(root, 0),
        lambda t: t.rename_columns(
            [{"observation.state": "state", "action": "actions"}.get(n, n) for n in t.column_names]
        ),
    )
    sample = open_dataset(root, window={"actions": range(2)})[1]
    assert sample["state"].shape == (4,)
    assert sample["actions"].shape == (2, 3)


def test_a_renamed_video_folder_is_named_with_both_paths(v21):
    """Trap: the folder is `video/` while the template says `videos/`."""
    (v21 / "videos").rename(v21 / "video")
    with pytest.raises(LayoutError) as caught:
        open_dataset(v21, cameras=[FRONT])
    assert f"videos/chunk-000/{FRONT}" in str(caught.value)
    assert "has data, meta, video" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codebase_version": "v1.6"}, "not supported; supported: v2.0, v2.1, v3.0"),
        ({"fps": 0}, "fps must be a positive number"),
        ({"fps": "x"}, "fps must be a positive number"),
        ({"features": {}}, "declares no features"),
        ({"features": {"a": 3}}, "must be an object"),
        ({"data_path": None}, "data_path"),
    ],
)
def test_metadata_that_cannot_be_used_says_why(v21, change, message):
    edit_json(v21 / "meta/info.json", **change)
    with pytest.raises(LayoutError, match=message):
        open_dataset(v21)
    assert [f.kind for f in validate_dataset(v21).errors] == ["info"]


def test_fractional_rates_are_kept_exact(v21):
    edit_json(v21 / "meta/info.json", fps="30000/1001")
    dataset = open_dataset(v21, cameras=())
    assert dataset.info.fps.numerator == 30000
    assert abs(dataset.fps - 29.97) < 0.01
    edit_json(v21 / "meta/info.json", fps=29.97)
    assert str(open_dataset(v21, cameras=()).info.fps) in ("2997/100", "30000/1001")


# -- identity --------------------------------------------------------------------------------------------


def test_the_fingerprint_follows_content_and_choices_not_place(v21, tmp_path):
    base = open_dataset(v21).fingerprint
    moved = Path(shutil.copytree(v21, tmp_path / "moved"))
    assert open_dataset(moved).fingerprint == base
    assert open_dataset(v21, window={"action": range(2)}).fingerprint != base
    assert open_dataset(v21, episodes=[0, 1]).fingerprint != base
    assert open_dataset(v21, image_size=(32, 32)).fingerprint != base
    edit_table(parquet(moved, 1), lambda t: set_column(t, "timestamp", [0.0] * 13))
    assert open_dataset(moved).fingerprint != base


def test_a_pickled_set_opens_again_and_notices_changes(v21):
    import pickle

    dataset = open_dataset(v21, window={"action": range(3)}, image_size=(32, 48))
    data = pickle.dumps(dataset)
    assert len(data) < 4096
    again = pickle.loads(data)
    assert again.fingerprint == dataset.fingerprint
    assert again[5][FRONT].shape == (32, 48, 3)
    parquet(v21, 4).unlink()
    with pytest.raises(DataError):
        pickle.loads(data)


def test_errors_keep_their_fields_between_processes():
    import pickle

    error = pickle.loads(pickle.dumps(VideoError("broken", path="a.mp4", episode=3, row=9)))
    assert (error.message, error.path, error.episode, error.row) == ("broken", "a.mp4", 3, 9)
    assert str(error) == "broken (episode 3, row 9, file a.mp4)"


def test_requests_and_layout_agree_with_the_samples(v30):
    dataset = open_dataset(v30, window={FRONT: [-1, 0]}, image_size=(48, 32))
    layout = dataset.image_layout()
    assert set(layout) == set(dataset.cameras)
    assert layout[FRONT].frames == 2
    assert (layout[FRONT].height, layout[FRONT].width, layout[FRONT].channels) == (48, 32, 3)
    requests = dataset.frame_requests(30)
    assert [(r.key, r.slot) for r in requests] == [
        (FRONT, 0),
        (FRONT, 1),
        ("observation.images.wrist", 0),
    ]
    assert dataset[30][FRONT].shape == (2, 48, 32, 3)
    starts = dataset.block_starts()
    assert set(dataset.episode_starts[:-1].tolist()) <= set(starts)
    assert starts == sorted(set(starts))
    assert max(np.diff([*starts, len(dataset)])) <= 4


# -- robustness ------------------------------------------------------------------------------------------


def test_damaged_tables_and_metadata_never_raise_anything_but_data_errors(tmp_path, v21_source, v30_source):
    """Random bytes changed in parquet and JSON: an error that names the data, or a set that still opens."""
    rng = np.random.default_rng(0)
    kinds = ("data/**/*.parquet", "meta/**/*.parquet", "meta/*.json", "meta/*.jsonl")
    seen = {"opened": 0, "refused": 0}
    for seed in range(60):
        source = (v21_source, v30_source)[seed % 2]
        root = Path(shutil.copytree(source, tmp_path / f"set{seed}"))
        paths = sorted(p for kind in kinds for p in root.glob(kind))
        path = paths[int(rng.integers(len(paths)))]
        data = bytearray(path.read_bytes())
        for _ in range(int(rng.choice([1, 5, 40]))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        if seed % 5 == 0:
            del data[int(rng.integers(len(data))) :]
        path.write_bytes(data)
        try:
            dataset = open_dataset(root, verify="paths")
            for i in range(0, len(dataset), 20):
                dataset.tabular(i)
            seen["opened"] += 1
        except DataError as error:
            if error.path is None and error.episode is None and error.row is None:
                pytest.fail(f"the error names no place: {error}")
            seen["refused"] += 1
        validate_dataset(root)
    assert min(seen.values()) > 5, seen


def test_windows_equal_a_brute_force_reading(v21):
    """Any offsets, any row: clamped to the episode, and the mask says where."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    plain = open_dataset(v21, cameras=())
    actions = [plain[i]["action"] for i in range(len(plain))]
    episodes = [int(plain[i]["episode_index"]) for i in range(len(plain))]

    @settings(max_examples=40, deadline=None)
    @given(offsets=st.lists(st.integers(-40, 40), min_size=1, max_size=6), row=st.integers(0, 80))
    def check(offsets, row):
        sample = open_dataset(v21, cameras=(), window={"action": offsets}).tabular(row)
        mine = [i for i, e in enumerate(episodes) if e == episodes[row]]
        wanted = [row + o for o in offsets]
        kept = [min(max(w, mine[0]), mine[-1]) for w in wanted]
        assert np.array_equal(sample["action"], np.stack([actions[k] for k in kept]))
        assert sample["action_is_pad"].tolist() == [w != k for w, k in zip(wanted, kept, strict=True)]

    check()


def test_files_and_memory_stay_bounded_over_many_files(tmp_path):
    """D47 and M15: 300 files with a limit of 128 open ones, 3 shuffled epochs; memory is flat."""
    import subprocess
    import sys

    root = write_dataset(tmp_path / "set", episodes=2, frames=3, cameras=1, size=(64, 64))
    info = json.loads((root / "meta/info.json").read_text())
    lines = []
    for n in range(300):
        if n >= 2:
            shutil.copyfile(video(root, n % 2), video(root, n))
            table = pq.read_table(parquet(root, n % 2))
            pq.write_table(set_column(table, "episode_index", [n] * 3), parquet(root, n))
        lines.append(json.dumps({"episode_index": n, "tasks": [], "length": 3}))
    (root / "meta/episodes.jsonl").write_text("\n".join(lines))
    (root / "meta/info.json").write_text(json.dumps({**info, "total_episodes": 300, "total_frames": 900}))
    script = f"""
import ctypes, gc, os, random, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from loongforge_data import open_dataset
dataset = open_dataset({str(root)!r})
assert len(dataset) == 900
sizes = []
for epoch in range(4):
    order = list(range(900))
    random.Random(epoch).shuffle(order)
    for i in order:
        dataset[i]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps for itself is not ours to count
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    sizes.append(int(fields["VmRSS"].split()[0]))
    assert len(os.listdir("/proc/self/fd")) < 64
assert sizes[3] < sizes[1] * 1.03 + 2000, sizes
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150)
    assert done.stdout.strip() == "ok", done.stderr[-2000:]


def test_a_joined_file_is_opened_once_however_many_episodes_it_holds(v21, tmp_path, monkeypatch):
    """Opening a set costs one look at each video file, not one per episode."""
    from loongforge_data import opening

    convert_to_v30(v21, tmp_path / "out", video_file_mb=1)
    seen = []
    real = opening.frame_count
    monkeypatch.setattr(opening, "frame_count", lambda path: seen.append(path) or real(path))
    open_dataset(tmp_path / "out")
    assert len(seen) == len(set(seen)) == 2


def test_a_truncated_video_is_found_at_open(v21):
    """D33: the header of a faststart file still promises all frames; the frames that are there count."""
    import av

    path = video(v21, 4)
    with (
        av.open(str(path)) as reader,
        av.open(str(path) + ".tmp.mp4", "w", options={"movflags": "+faststart"}) as writer,
    ):
        stream = writer.add_stream_from_template(reader.streams.video[0])
        for packet in reader.demux(video=0):
            if packet.size:
                packet.stream = stream
                writer.mux(packet)
    data = Path(str(path) + ".tmp.mp4").read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])
    with pytest.raises(VideoError, match="31 rows but camera") as caught:
        open_dataset(v21)
    assert caught.value.episode == 4
    cut = open_dataset(v21, on_mismatch="drop_tail")
    assert 0 < cut.episodes[4].length < 31
    kinds = {f.kind for f in validate_dataset(v21).errors}
    assert kinds == {"video-frames", "video-damage"}
