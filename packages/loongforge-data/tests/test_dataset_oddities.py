"""Data sets that are odd but accepted, their identity, and damage of every kind."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loongforge_data.dataset import open_dataset
from loongforge_data.errors import DataError, LayoutError, VideoError
from loongforge_data.formats.upgrade import convert_to_v30
from loongforge_data.synthetic import write_dataset
from loongforge_data.validate import validate_dataset

# -- odd but accepted ------------------------------------------------------------------------------------


def test_oddities_of_published_sets_are_accepted(v21, sets):
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
    info["features"][sets.FRONT]["video_info"] = {"video.codec": "mpeg4"}
    info["features"][sets.FRONT].pop("info")
    info["features"]["observation.images.ego"] = dict(info["features"][sets.FRONT])
    (v21 / "meta/info.json").write_text(json.dumps(info))
    sets.edit_table(
        sets.parquet(v21, 0),
        lambda t: sets.set_column(t, "action", pa.array(t["action"].to_pylist(), pa.list_(pa.float64()))),
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
    sets.assert_painted(dataset, rows=[0, 40])
    kinds = sorted({f.kind for f in validate_dataset(v21).findings})
    assert kinds == ["camera-without-files", "totals", "video-codec"]


def test_features_are_trusted_over_name_prefixes(tmp_path, sets):
    """Trap: keys `state`, `actions`, `image` in place of `observation.*`."""
    root = write_dataset(tmp_path / "set", episodes=1, frames=5, cameras=0)
    text = (
        (root / "meta/info.json")
        .read_text()
        .replace("observation.state", "state")
        .replace('"action"', '"actions"')
    )
    (root / "meta/info.json").write_text(text)
    sets.edit_table(
        sets.parquet(root, 0),
        lambda t: t.rename_columns(
            [{"observation.state": "state", "action": "actions"}.get(n, n) for n in t.column_names]
        ),
    )
    sample = open_dataset(root, window={"actions": range(2)})[1]
    assert sample["state"].shape == (4,)
    assert sample["actions"].shape == (2, 3)


def test_a_renamed_video_folder_is_named_with_both_paths(v21, sets):
    """Trap: the folder is `video/` while the template says `videos/`."""
    (v21 / "videos").rename(v21 / "video")
    with pytest.raises(LayoutError) as caught:
        open_dataset(v21, cameras=[sets.FRONT])
    assert f"videos/chunk-000/{sets.FRONT}" in str(caught.value)
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
def test_metadata_that_cannot_be_used_says_why(v21, change, message, sets):
    sets.edit_json(v21 / "meta/info.json", **change)
    with pytest.raises(LayoutError, match=message):
        open_dataset(v21)
    assert [f.kind for f in validate_dataset(v21).errors] == ["info"]


def test_fractional_rates_are_kept_exact(v21, sets):
    sets.edit_json(v21 / "meta/info.json", fps="30000/1001")
    dataset = open_dataset(v21, cameras=())
    assert dataset.info.fps.numerator == 30000
    assert abs(dataset.fps - 29.97) < 0.01
    sets.edit_json(v21 / "meta/info.json", fps=29.97)
    assert str(open_dataset(v21, cameras=()).info.fps) in ("2997/100", "30000/1001")


# -- identity --------------------------------------------------------------------------------------------


def test_the_fingerprint_follows_content_and_choices_not_place(v21, tmp_path, sets):
    base = open_dataset(v21).fingerprint
    moved = Path(shutil.copytree(v21, tmp_path / "moved"))
    assert open_dataset(moved).fingerprint == base
    assert open_dataset(v21, window={"action": range(2)}).fingerprint != base
    assert open_dataset(v21, episodes=[0, 1]).fingerprint != base
    assert open_dataset(v21, image_size=(32, 32)).fingerprint != base
    sets.edit_table(sets.parquet(moved, 1), lambda t: sets.set_column(t, "timestamp", [0.0] * 13))
    assert open_dataset(moved).fingerprint != base


def test_a_pickled_set_opens_again_and_notices_changes(v21, sets):
    import pickle

    dataset = open_dataset(v21, window={"action": range(3)}, image_size=(32, 48))
    data = pickle.dumps(dataset)
    assert len(data) < 4096
    again = pickle.loads(data)
    assert again.fingerprint == dataset.fingerprint
    assert again[5][sets.FRONT].shape == (32, 48, 3)
    sets.parquet(v21, 4).unlink()
    with pytest.raises(DataError):
        pickle.loads(data)


def test_errors_keep_their_fields_between_processes():
    import pickle

    error = pickle.loads(pickle.dumps(VideoError("broken", path="a.mp4", episode=3, row=9)))
    assert (error.message, error.path, error.episode, error.row) == ("broken", "a.mp4", 3, 9)
    assert str(error) == "broken (episode 3, row 9, file a.mp4)"


def test_requests_and_layout_agree_with_the_samples(v30, sets):
    dataset = open_dataset(v30, window={sets.FRONT: [-1, 0]}, image_size=(48, 32))
    layout = dataset.image_layout()
    assert set(layout) == set(dataset.cameras)
    assert layout[sets.FRONT].frames == 2
    assert (layout[sets.FRONT].height, layout[sets.FRONT].width, layout[sets.FRONT].channels) == (48, 32, 3)
    requests = dataset.frame_requests(30)
    assert [(r.key, r.slot) for r in requests] == [
        (sets.FRONT, 0),
        (sets.FRONT, 1),
        ("observation.images.wrist", 0),
    ]
    assert dataset[30][sets.FRONT].shape == (2, 48, 32, 3)
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


def test_files_and_memory_stay_bounded_over_many_files(tmp_path, sets):
    """D47 and M15: 300 files with a limit of 128 open ones, 3 shuffled epochs; memory is flat."""
    import subprocess
    import sys

    root = write_dataset(tmp_path / "set", episodes=2, frames=3, cameras=1, size=(64, 64))
    info = json.loads((root / "meta/info.json").read_text())
    lines = []
    for n in range(300):
        if n >= 2:
            shutil.copyfile(sets.video(root, n % 2), sets.video(root, n))
            table = pq.read_table(sets.parquet(root, n % 2))
            pq.write_table(sets.set_column(table, "episode_index", [n] * 3), sets.parquet(root, n))
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


def test_a_truncated_video_is_found_at_open(v21, sets):
    """D33: the header of a faststart file still promises all frames; the frames that are there count."""
    import av

    path = sets.video(v21, 4)
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
