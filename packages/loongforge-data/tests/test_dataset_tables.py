"""Faults of data sets: windows, tables and what they say about files."""

import json
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

# -- windows ---------------------------------------------------------------------------------------------


def test_a_subset_with_windows_equals_loading_all_and_filtering(tmp_path, sets):
    """D07: episodes 2, 5, 9 of 10, window -1, 0, +1 on state and picture."""
    root = write_dataset(
        tmp_path / "set", episodes=10, frames=[3, 4, 5, 1, 6, 2, 7, 3, 4, 5], cameras=1, size=(64, 64)
    )
    window = {"observation.state": [-1, 0, 1], sets.FRONT: [-1, 0, 1]}
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
        assert a[f"{sets.FRONT}_is_pad"].tolist() == [frame == 0, False, frame == length - 1]
        shown = [read_code(p)[1] for p in a[sets.FRONT]]
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


def test_row_ranges_are_gap_free_after_converting_pictures_in_tables(tmp_path, sets):
    """D08: 3 episodes of lengths 5, 11, 3 with PNG bytes in a column, no mp4."""
    root = sets.picture_set(tmp_path / "v21", [5, 11, 3])
    convert_to_v30(root, tmp_path / "v30")
    table = pq.read_table(sets.episode_table(tmp_path / "v30"))
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


def test_all_shards_of_the_episode_table_are_read(v30, sets):
    """D10: equal basenames in different chunk folders; duplicates and holes are errors."""
    table = pq.read_table(sets.episode_table(v30))
    other = v30 / "meta/episodes/chunk-001/file-000.parquet"
    other.parent.mkdir()
    pq.write_table(table.slice(2), other)
    pq.write_table(table.slice(0, 2), sets.episode_table(v30))
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
def test_a_table_without_footer_names_the_file_and_its_episodes(v21, damage, sets):
    """D12: and a skip policy goes on with the rest and reports it."""
    path = sets.parquet(v21, 1)
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-32], "empty": b"", "zeros": bytes(4096)}[damage])
    with pytest.raises(DataError) as caught:
        open_dataset(v21)
    assert caught.value.path == str(path)
    assert caught.value.episode == 1
    dataset = open_dataset(v21, on_mismatch="skip_episode")
    assert [e.index for e in dataset.episodes] == [0, 2, 3, 4]
    assert [p.episode for p in dataset.skipped] == [1]
    sets.assert_painted(dataset, rows=[0, 7, 8, 36])


def test_all_missing_files_are_listed_at_open(v21, v30, sets):
    """D13: never first seen in the middle of an epoch."""
    sets.video(v21, 1).unlink()
    sets.video(v21, 3, "observation.images.wrist").unlink()
    sets.parquet(v21, 4).unlink()
    with pytest.raises(DataError) as caught:
        open_dataset(v21)
    text = str(caught.value)
    for part in ("episode_000001.mp4", "episode_000003.mp4", "episode_000004.parquet", "3 problems"):
        assert part in text
    found = {(f.episode, Path(f.path).name) for f in validate_dataset(v21).errors if f.kind == "files"}
    assert found == {(1, "episode_000001.mp4"), (3, "episode_000003.mp4"), (4, "episode_000004.parquet")}
    name = f"videos/{sets.FRONT}/file_index"
    sets.edit_table(
        sets.episode_table(v30),
        lambda t: sets.set_column(t, name, pa.array([None, *t[name].to_pylist()[1:]], pa.int64())),
    )
    with pytest.raises(VideoError, match="no file number"):
        open_dataset(v30)
    assert len(open_dataset(v30, on_mismatch="skip_episode").episodes) == 4


def test_pointer_files_empty_metadata_and_wrong_layout_are_called_by_name(v21, v30, sets):
    """D14."""
    sets.parquet(v21, 0).write_text(sets.LFS)
    sets.video(v21, 2).write_text(sets.LFS)
    with pytest.raises(DataError) as caught:
        open_dataset(v21)
    assert str(caught.value).count("Git LFS pointer") == 2
    sets.edit_json(v30 / "meta/info.json", codebase_version="v2.1")
    with pytest.raises(LayoutError, match=r"layout mismatch: info\.json says v2\.1.*v3\.0"):
        open_dataset(v30)
    sets.edit_json(v21 / "meta/info.json", codebase_version="v3.0")
    with pytest.raises(LayoutError, match=r"layout mismatch: info\.json says v3\.0"):
        open_dataset(v21)
    for name in ("info.json", "episodes.jsonl", "tasks.jsonl"):
        sets.edit_json(v21 / "meta/info.json", codebase_version="v2.1") if name != "info.json" else None
        saved = (v21 / "meta" / name).read_bytes()
        (v21 / "meta" / name).write_bytes(b"")
        with pytest.raises(LayoutError, match="empty") as caught:
            open_dataset(v21, on_mismatch="skip_episode")
        assert caught.value.path == str(v21 / "meta" / name)
        (v21 / "meta" / name).write_bytes(saved)
    with pytest.raises(LayoutError, match="does not exist"):
        open_dataset(v21 / "nowhere")


def test_rows_and_frames_that_differ_in_number_follow_a_stated_policy(v21, clips, sets):
    """D15: episode 3 has 29 rows and 27 frames, episode 4 has 31 rows and 33 frames."""
    from loongforge_data.synthetic import encode_video, render, simulate

    for episode, frames in ((3, 27), (4, 33)):
        for camera, name in enumerate((sets.FRONT, "observation.images.wrist")):
            track = simulate(0, episode, frames)
            pictures = [
                render(track, t, camera=camera, size=(64, 64), episode=episode) for t in range(frames)
            ]
            encode_video(sets.video(v21, episode, name), pictures, fps=30, gop=4)
    with pytest.raises(VideoError) as caught:
        open_dataset(v21)
    assert "29 rows but camera" in str(caught.value)
    assert "27 frames" in str(caught.value)
    assert "33 frames" in str(caught.value)
    found = {(f.episode, f.kind) for f in validate_dataset(v21).errors}
    assert found == {(3, "video-frames"), (4, "video-frames")}
    cut = open_dataset(v21, on_mismatch="drop_tail")
    assert [e.length for e in cut.episodes] == [7, 13, 1, 27, 31]
    sets.assert_painted(cut)
    skipped = open_dataset(v21, on_mismatch="skip_episode")
    assert [e.index for e in skipped.episodes] == [0, 1, 2]
    assert {p.episode for p in skipped.skipped} == {3, 4}


def test_a_request_past_the_frames_is_an_error_even_unchecked(v21, sets):
    """D15: with headers unchecked, the first decode says so; no frame is used twice."""
    from loongforge_data.synthetic import encode_video, render, simulate

    track = simulate(0, 3, 27)
    encode_video(
        sets.video(v21, 3), [render(track, t, camera=0, size=(64, 64), episode=3) for t in range(27)], fps=30
    )
    dataset = open_dataset(v21, verify="paths", cameras=[sets.FRONT])
    sets.assert_painted(dataset, rows=[21, 47])
    with pytest.raises(VideoError, match="27 frames") as caught:
        dataset[48]
    assert (caught.value.episode, caught.value.row) == (3, 48)


def test_rows_come_in_index_order_whatever_file_they_are_in(v30, sets):
    """D17: file numbers swapped, rows shuffled inside the file, row groups across episodes."""
    path = v30 / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    order = np.random.default_rng(0).permutation(table.num_rows)
    pq.write_table(table.take(order), path, row_group_size=10)
    dataset = open_dataset(v30)
    assert [int(dataset.tabular(i)["index"]) for i in range(81)] == list(range(81))
    sets.assert_painted(dataset)
    first, second = v30 / "data/chunk-000/file-001.parquet", path
    pq.write_table(table.slice(0, 20), first)
    pq.write_table(table.slice(20), second)
    rows = pq.read_table(sets.episode_table(v30)).to_pylist()
    for row in rows:
        row["data/file_index"] = 1 if row["episode_index"] < 2 else 0
    pq.write_table(pa.Table.from_pylist(rows), sets.episode_table(v30))
    again = open_dataset(v30)
    assert [int(again.tabular(i)["index"]) for i in range(81)] == list(range(81))
    sets.assert_painted(again, rows=range(15, 30))


def test_holes_and_overlaps_of_frame_numbers_are_found(v21, sets):
    """D17."""
    sets.edit_table(sets.parquet(v21, 1), lambda t: t.filter(pa.array([i != 4 for i in range(13)])))
    sets.edit_table(sets.parquet(v21, 3), lambda t: pa.concat_tables([t, t.slice(5, 1)]))
    sets.edit_table(sets.parquet(v21, 4), lambda t: t.slice(0, 30))
    messages = {f.episode: f.message for f in validate_dataset(v21).errors}
    assert "leaves a hole: row 4 of the episode has 5" in messages[1]
    assert "occurs twice: row 6 of the episode has 5" in messages[3]
    assert "30 rows, the episode table says 31" in messages[4]


def test_column_types_that_differ_between_files_are_cast_or_refused(v21, sets):
    """D18: list<double> in place of fixed_size_list<float>; ragged rows; a 2-D feature."""

    def as_list(t, width=3):
        values = [row[:width] for row in t["action"].to_pylist()]
        return sets.set_column(t, "action", pa.array(values, pa.list_(pa.float64())))

    before = open_dataset(v21, cameras=())
    sets.edit_table(sets.parquet(v21, 0), as_list)
    after = open_dataset(v21, cameras=())
    for i in range(10):
        a, b = before[i]["action"], after[i]["action"]
        assert b.dtype == np.float32
        assert np.array_equal(a, b)

    def ragged(t):
        values = t["action"].to_pylist()
        values[5] = values[5][:2]
        return sets.set_column(t, "action", pa.array(values, pa.list_(pa.float32())))

    sets.edit_table(sets.parquet(v21, 1), ragged)
    with pytest.raises(TableError, match=r"row 5 of column 'action' has 2 values, declared shape is \[3\]"):
        open_dataset(v21, cameras=())
    sets.edit_table(sets.parquet(v21, 1), lambda t: as_list(t.slice(0, 0), width=3))
    sets.edit_table(sets.parquet(v21, 3), lambda t: as_list(t, width=2))
    with pytest.raises(DataError) as caught:
        open_dataset(v21, cameras=())
    assert "has 2 values, declared shape is [3]" in str(caught.value)


def test_nested_lists_and_extra_columns_are_accepted(v21, sets):
    """D18 and the trap of list<fixed_size_list> action chunks, `*_is_pad` and `task` columns."""
    info = json.loads((v21 / "meta/info.json").read_text())
    info["features"]["chunk"] = {"dtype": "float32", "shape": [2, 3], "names": [["a", "b"], ["x", "y", "z"]]}
    info["features"]["task"] = {"dtype": "string", "shape": [1], "names": None}
    (v21 / "meta/info.json").write_text(json.dumps(info))
    for episode, length in enumerate(sets.LENGTHS):
        nested = pa.array(
            [[[i, i + 1, i + 2], [0.0, 0.5, i]] for i in range(length)], pa.list_(pa.list_(pa.float32(), 3))
        )

        def extend(t, nested=nested, length=length):
            t = t.append_column("chunk", nested)
            t = t.append_column("chunk_is_pad", pa.array([[False, True]] * length))
            return t.append_column("task", pa.array([f"row {i}" for i in range(length)]))

        sets.edit_table(sets.parquet(v21, episode), extend)
    sample = open_dataset(v21, cameras=())[9]
    assert sample["chunk"].tolist() == [[2, 3, 4], [0, 0.5, 2]]
    assert sample["task"] == "row 2"
    assert open_dataset(v21, cameras=()).features["chunk"].names == ("a", "b", "x", "y", "z")


def test_empty_sets_and_one_frame_episodes_open(tmp_path, v21, sets):
    """D19: nothing recorded; episodes of length 1 and 0."""
    root = tmp_path / "empty"
    (root / "meta").mkdir(parents=True)
    info = json.loads((v21 / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps({**info, "total_episodes": 0, "total_frames": 0}))
    dataset = open_dataset(root)
    assert len(dataset) == 0
    assert list(dataset) == []
    assert dataset.image_layout()[sets.FRONT].height == 64
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


def test_task_texts_arrive_byte_for_byte(v21, v30, tmp_path, sets):
    """D20: plain, 20 kB, Chinese and emoji with a newline, empty."""
    texts = ["pick it up", "x" * 20_000, "拿起瓶子 🤖\nsecond line\u2028third", "", "green square."]
    lines = "".join(
        json.dumps({"task_index": i, "task": t}, ensure_ascii=False) + "\n" for i, t in enumerate(texts)
    )
    (v21 / "meta/tasks.jsonl").write_text(lines, encoding="utf-8")
    write_tasks(v30 / "meta/tasks.parquet", dict(enumerate(texts)))
    for episode, length in enumerate(sets.LENGTHS):
        sets.edit_table(
            sets.parquet(v21, episode),
            lambda t, e=episode, n=length: sets.set_column(t, "task_index", [e] * n),
        )
    data = v30 / "data/chunk-000/file-000.parquet"
    sets.edit_table(data, lambda t: sets.set_column(t, "task_index", t["episode_index"].to_pylist()))
    for root in (v21, v30):
        dataset = open_dataset(root, cameras=())
        assert [dataset[i]["task"] for i in (0, 7, 20, 21, 50)] == texts
    meta = (v21 / "meta/episodes.jsonl").read_text().splitlines()
    rows = [{**json.loads(line), "tasks": "one text, not letters"} for line in meta]
    (v21 / "meta/episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert open_dataset(v21, cameras=()).episodes[0].tasks == ("one text, not letters",)
