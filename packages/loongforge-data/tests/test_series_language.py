"""Time series at rates of their own, language columns, and the GR00T flavour."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loongforge_data.dataset import open_dataset
from loongforge_data.errors import DataError, LayoutError, TableError
from loongforge_data.modalities.language import active_at, parse_language
from loongforge_data.modalities.series import SeriesSource, TimeSeries, read_series
from loongforge_data.synthetic import write_dataset
from loongforge_data.windows import offsets_from_seconds


def test_windows_by_time_take_each_row_once():
    times = np.arange(1000) / 200
    series = TimeSeries(times, np.arange(1000.0))
    rows = [series.between(k / 30, (k + 1) / 30) for k in range(149)]
    counts = [r.stop - r.start for r in rows]
    assert all(a.stop == b.start for a, b in itertools.pairwise(rows))
    assert sum(counts) == rows[-1].stop
    assert set(counts) == {6, 7}
    noisy = TimeSeries(times.astype(np.float32), np.arange(1000.0))
    assert [noisy.between(k / 10, (k + 1) / 10).start for k in range(49)] == [20 * k for k in range(49)]


def test_the_last_rows_before_a_time_are_padded_at_the_start():
    series = TimeSeries(np.array([0.0, 0.01, 0.02, 0.03]), np.arange(8.0).reshape(4, 2))
    values, mask = series.last(0.0201, 5)
    assert values[:, 0].tolist() == [0, 0, 0, 2, 4]
    assert mask.tolist() == [True, True, False, False, False]
    values, mask = series.last(-1.0, 2)
    assert mask.all()
    empty, mask = TimeSeries(np.zeros(0), np.zeros((0, 3))).last(1.0, 2)
    assert empty.shape == (2, 3)
    assert mask.all()


def test_values_between_stamps_are_interpolated():
    series = TimeSeries(np.array([0.0, 1.0, 3.0]), np.array([[0.0, 10.0], [2.0, 20.0], [6.0, 0.0]]))
    assert series.at([0.5, 2.0, 9.0, -1.0]).tolist() == [[1, 15], [4, 10], [6, 0], [0, 10]]
    with pytest.raises(TableError, match="empty series"):
        TimeSeries(np.zeros(0), np.zeros((0, 1))).at([0.0])


def test_stamps_that_go_back_are_refused_with_the_row():
    with pytest.raises(TableError, match="at row 2"):
        TimeSeries(np.array([0.0, 1.0, 0.5]), np.zeros(3))
    with pytest.raises(TableError, match="at row 1"):
        TimeSeries(np.array([0.0, np.nan]), np.zeros(2))
    with pytest.raises(TableError, match="2 time stamps for 3 values"):
        TimeSeries(np.zeros(2), np.zeros(3))


def test_an_imu_beside_the_set_arrives_by_time(tmp_path):
    root = write_dataset(tmp_path / "set", episodes=2, frames=[20, 10], cameras=0)
    for episode, length in enumerate((20, 10)):
        count = length * 200 // 30
        path = root / f"series/imu/episode_{episode:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        accel = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(count * 3, dtype=np.float32)), 3)
        pq.write_table(
            pa.table(
                {"timestamp": np.arange(count) / 200, "accel": accel, "temp": np.full(count, 20.0 + episode)}
            ),
            path,
        )
    source = SeriesSource(
        path="series/imu/episode_{episode_index:06d}.parquet", columns=("accel", "temp"), samples=8
    )
    dataset = open_dataset(root, series={"imu": source})
    for i in (0, 3, 19, 20, 29):
        sample = dataset[i]
        seconds = int(sample["frame_index"]) / 30
        newest = int(np.floor(seconds * 200 + 1e-6))
        assert sample["imu"].shape == (8, 4)
        assert sample["imu"].dtype == np.float32
        assert sample["imu"][-1].tolist() == [newest * 3, newest * 3 + 1, newest * 3 + 2, 20 + (i >= 20)]
        assert sample["imu_is_pad"].sum() == max(0, 7 - newest)
    with pytest.raises(TableError, match="no columns"):
        read_series(root / "series/imu/episode_000000.parquet", columns=["gyro"])
    with pytest.raises(ValueError, match="at least one column"):
        SeriesSource(path="x", columns=(), samples=1)


def test_language_columns_become_messages(tmp_path):
    root = write_dataset(tmp_path / "set", episodes=1, frames=3, cameras=0)
    info = json.loads((root / "meta/info.json").read_text())
    info["features"]["language_persistent"] = {"dtype": "language", "shape": [1], "names": None}
    (root / "meta/info.json").write_text(json.dumps(info))
    cells = [
        [
            {
                "role": "user",
                "content": "拿起 🤖",
                "style": "plan",
                "timestamp": 0.0,
                "camera": None,
                "tool_calls": [],
            },
            {
                "role": "assistant",
                "content": "now",
                "style": "subtask",
                "timestamp": 0.05,
                "camera": "front",
                "tool_calls": ['{"name": "say", "n": 1}'],
            },
        ]
    ] * 2 + [None]
    path = root / "data/chunk-000/episode_000000.parquet"
    pq.write_table(pq.read_table(path).append_column("language_persistent", pa.array(cells)), path)
    dataset = open_dataset(root)
    entries = dataset[1]["language_persistent"]
    assert [e.content for e in entries] == ["拿起 🤖", "now"]
    assert entries[1].tool_calls == ({"name": "say", "n": 1},)
    assert dataset[2]["language_persistent"] == ()
    assert active_at(entries, 0.04).content == "拿起 🤖"
    assert active_at(entries, float(np.float32(0.05))).content == "now"
    assert active_at(entries, 1.0, style="plan").content == "拿起 🤖"
    assert active_at(entries, -1.0) is None
    with pytest.raises(DataError, match="must hold a list"):
        parse_language("text", key="language_events")
    with pytest.raises(DataError, match="not JSON"):
        parse_language([{"role": "a", "content": "", "tool_calls": ["{"]}], key="k", row=3)


# -- GR00T -----------------------------------------------------------------------------------------------


@pytest.fixture
def groot_set(tmp_path):
    root = write_dataset(tmp_path / "set", episodes=2, frames=[6, 4], cameras=1, size=(64, 64))
    info = json.loads((root / "meta/info.json").read_text())
    column = "annotation.human.task_description"
    info["features"][column] = {"dtype": "int64", "shape": [1]}
    info["features"]["next.reward"] = {"dtype": "float64", "shape": [1]}
    info["features"]["next.done"] = {"dtype": "bool", "shape": [1]}
    (root / "meta/info.json").write_text(json.dumps(info))
    with (root / "meta/tasks.jsonl").open("a") as file:
        file.write(json.dumps({"task_index": 2, "task": "valid"}) + "\n")
    for episode, length in enumerate((6, 4)):
        path = root / f"data/chunk-000/episode_{episode:06d}.parquet"
        table = pq.read_table(path)
        table = table.append_column(column, pa.array([episode] * length))
        table = table.append_column("next.reward", pa.array(np.linspace(0, 1, length)))
        pq.write_table(table.append_column("next.done", pa.array([False] * (length - 1) + [True])), path)
    modality = {
        "state": {"position": {"start": 0, "end": 2}, "pad": {"start": 3, "end": 4}},
        "action": {
            "move": {"start": 0, "end": 2},
            "arrived": {"start": 2, "end": 3, "original_key": "action"},
        },
        "video": {"ego": {"original_key": "observation.images.front"}, "front": {}},
        "annotation": {"human.task_description": {}, "human.task": {"original_key": "task_index"}},
    }
    (root / "meta/modality.json").write_text(json.dumps(modality))
    return root, modality


def test_modality_slices_cameras_and_annotations(groot_set):
    root, _ = groot_set
    dataset = open_dataset(root)
    modality = dataset.modality
    assert (modality.state["pad"].start, modality.state["pad"].stop, len(modality.state["position"])) == (
        3,
        4,
        2,
    )
    assert modality.action["arrived"].column == "action"
    assert modality.video == {"ego": "observation.images.front", "front": "observation.images.front"}
    sample = dataset[7]
    assert sample["next.reward"].dtype == np.float32
    assert bool(dataset[9]["next.done"]) is True
    assert int(sample["annotation.human.task_description"]) == 1
    assert dataset.text(7, "human.task_description") == dataset.tasks[1]
    assert dataset.text(7, "human.task") == sample["task"] == dataset.text(7, "task")
    with pytest.raises(KeyError, match="no language key"):
        dataset.text(0, "robot.plan")


def test_modality_that_does_not_fit_names_group_and_size(groot_set):
    root, modality = groot_set
    for change, message in (
        ({"state": {"x": {"start": 2, "end": 9}}}, r"\[2:9\) of 'observation.state', which has 4 values"),
        ({"state": {"x": {"start": 0, "end": 1, "original_key": "hand"}}}, "not a feature"),
        ({"action": {"x": {"start": 0}}}, "needs whole numbers"),
        ({"action": ["x"]}, "objects by name"),
    ):
        (root / "meta/modality.json").write_text(json.dumps({**modality, **change}))
        with pytest.raises(LayoutError, match=message):
            open_dataset(root)


def test_seconds_become_whole_frames():
    assert offsets_from_seconds([-1 / 30, 0.0, 1 / 30, 0.5], 30) == (-1, 0, 1, 15)
    assert offsets_from_seconds([0.0333], 30) == (1,)
    with pytest.raises(ValueError, match="not a multiple of 1/fps"):
        offsets_from_seconds([0.04], 30)
