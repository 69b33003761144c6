"""Statistics in float64, mergeable, with quantiles of the data and a policy for what is not finite."""

import itertools
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_data.dataset import open_dataset
from loongforge_data.errors import TableError
from loongforge_data.formats.statfiles import merge_stats
from loongforge_data.normalize import normalizer
from loongforge_data.sketch import QuantileSketch
from loongforge_data.stats import QUANTILES, ImageStats, RunningStats, table_stats
from loongforge_data.synthetic import write_dataset


def reference(data):
    stats = {"min": data.min(0), "max": data.max(0), "mean": data.mean(0), "std": data.std(0)}
    return stats | {name: np.quantile(data, share, axis=0) for name, share in QUANTILES.items()}


def assert_close(stats, data):
    for name, want in reference(data.astype(np.float64)).items():
        assert np.allclose(stats[name], want, rtol=1e-9, atol=1e-12), name
    assert stats["count"].tolist() == [len(data)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 200),
    cuts=st.lists(st.integers(0, 200), max_size=5),
    offset=st.sampled_from([0.0, 1e6, -1e9]),
    merged=st.booleans(),
)
def test_any_split_and_merge_equals_numpy_on_all_rows(rows, cuts, offset, merged):
    data = np.random.default_rng(rows).normal(size=(rows, 3)) + offset
    edges = sorted({0, rows, *(c for c in cuts if c < rows)})
    whole = RunningStats(3)
    for a, b in itertools.pairwise(edges):
        if merged:
            part = RunningStats(3)
            part.update(data[a:b])
            whole.merge(part)
        else:
            whole.update(data[a:b])
    stats = whole.result()
    if offset == 0:
        assert_close(stats, data)
    assert np.allclose(stats["mean"], data.mean(0), rtol=1e-12)
    assert np.allclose(stats["std"], data.std(0), rtol=1e-6)


def test_image_statistics_are_never_squared_in_uint8():
    """D21: noise 64x64x3, std as numpy on float64 to 1e-6."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (5, 64, 64, 3), np.uint8)
    one, two = ImageStats(), ImageStats()
    for n, picture in enumerate(pictures):
        (one if n < 2 else two).update(picture)
    one.merge(two)
    stats = one.result()
    scaled = pictures.astype(np.float64) / 255
    assert stats["std"].shape == (3, 1, 1)
    for name, want in (
        ("mean", scaled.mean((0, 1, 2))),
        ("std", scaled.std((0, 1, 2))),
        ("min", scaled.min((0, 1, 2))),
        ("max", scaled.max((0, 1, 2))),
    ):
        assert np.allclose(stats[name].reshape(3), want, atol=1e-6), name
    flat = np.sort(scaled.reshape(-1, 3), axis=0)
    for name, share in QUANTILES.items():
        assert np.allclose(stats[name].reshape(3), flat[int(np.ceil(share * len(flat))) - 1])
    assert stats["count"].tolist() == [5]
    with pytest.raises(ValueError, match="expected uint8"):
        one.update(pictures[0].astype(np.float32))


def test_quantiles_of_a_union_come_from_the_data():
    """D23: A uniform 0..1 (1000 rows), B uniform 100..101 (10 rows)."""
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0, 1, (1000, 1)), rng.uniform(100, 101, (10, 1))
    left, right = RunningStats(1), RunningStats(1)
    left.update(a)
    right.update(b)
    left.merge(right)
    assert_close(left.result(), np.concatenate([a, b]))
    shipped = merge_stats(
        [
            {k: np.atleast_1d(v) for k, v in reference(x).items()} | {"count": np.array([len(x)])}
            for x in (a, b)
        ]
    )
    assert "q99" not in shipped
    assert np.allclose(shipped["std"], np.concatenate([a, b]).std(0))


@pytest.mark.parametrize("distribution", ["uniform", "normal", "sorted", "two"])
def test_the_sketch_keeps_its_stated_rank_error(distribution):
    rng = np.random.default_rng(1)
    count = 300_000
    data = {
        "uniform": rng.uniform(size=count),
        "normal": rng.normal(size=count),
        "sorted": np.arange(count, dtype=float),
        "two": np.concatenate([np.zeros(count // 2), rng.uniform(5, 6, count - count // 2)]),
    }[distribution]
    parts = np.array_split(data, 37)
    left, right = (QuantileSketch(exact_limit=10_000, capacity=2048) for _ in range(2))
    for n, part in enumerate(parts):
        (left if n % 2 else right).update(part)
    left.merge(right)
    assert len(left) == count
    assert 0 < left.rank_error < 0.02
    ordered = np.sort(data)
    for share in (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0):
        value = left.quantile(share)
        low = np.searchsorted(ordered, value, "left") / count
        high = np.searchsorted(ordered, value, "right") / count
        slack = left.rank_error + 2 / count
        assert low - slack <= share <= high + slack


def test_the_sketch_is_exact_while_it_is_short():
    data = np.random.default_rng(0).normal(size=999)
    sketch = QuantileSketch()
    sketch.update(data[:500])
    sketch.update(data[500:])
    assert sketch.rank_error == 0
    assert sketch.quantile(0.37) == np.quantile(data, 0.37)
    with pytest.raises(ValueError, match="needs values"):
        QuantileSketch().quantile(0.5)


def spoiled():
    data = np.random.default_rng(2).normal(size=(500, 2))
    data[17, 0], data[300, 1], data[301, 1] = np.nan, np.inf, np.nan
    return data


def test_values_that_are_not_finite_are_refused_with_their_rows():
    """D25: policy raise."""
    stats = RunningStats(2, name="action")
    stats.update(spoiled()[:10], first_row=0)
    with pytest.raises(TableError, match="action is not finite in 3 rows: 17, 300, 301") as caught:
        stats.update(spoiled()[10:], first_row=10)
    assert caught.value.row == 17


def test_values_that_are_not_finite_are_masked_and_counted():
    """D25: policy mask; the result stays finite and the other component keeps its row."""
    stats = RunningStats(2, policy="mask")
    stats.update(spoiled())
    result = stats.result()
    assert stats.masked.tolist() == [1, 2]
    assert stats.count.tolist() == [499, 498]
    data = spoiled()
    for component in range(2):
        clean = data[np.isfinite(data[:, component]), component]
        assert np.allclose(result["std"][component], clean.std())
        assert np.allclose(result["q01"][component], np.quantile(clean, 0.01))
    empty = RunningStats(1, policy="mask")
    empty.update(np.array([np.nan]))
    with pytest.raises(TableError, match="no finite value"):
        empty.result()
    with pytest.raises(ValueError, match="policy must be"):
        RunningStats(1, policy="drop")
    with pytest.raises(ValueError, match="2 components"):
        RunningStats(3).update(data)


def test_nulls_in_a_float_column_count_as_missing(tmp_path):
    """D25: one null in a column of the table."""
    import pyarrow as pa

    root = write_dataset(tmp_path / "set", episodes=1, frames=6, cameras=0)
    path = root / "data/chunk-000/episode_000000.parquet"
    table = pq.read_table(path)
    values = table["action"].to_pylist()
    values[4][1] = None
    column = pa.array(values, pa.list_(pa.float32(), 3))
    pq.write_table(table.set_column(table.column_names.index("action"), "action", column), path)
    dataset = open_dataset(root)
    assert np.isnan(dataset[4]["action"][1])
    with pytest.raises(TableError, match="rows: 4"):
        table_stats(dataset.rows.arrays, ["action"])
    assert np.isfinite(table_stats(dataset.rows.arrays, ["action"], policy="mask")["action"]["std"]).all()


def test_statistics_of_the_real_set_equal_the_shipped_ones(shared_data):
    dataset = open_dataset(shared_data / "g1_pick_v30", cameras=())
    ours = table_stats(dataset.rows.arrays, ["action", "observation.state"])
    for key, stats in ours.items():
        for name in ("min", "max", "mean", "std"):
            assert np.allclose(stats[name], dataset.stats[key][name], rtol=1e-5, atol=1e-7)


def test_v20_statistics_are_read_from_one_file(tmp_path):
    root = write_dataset(tmp_path / "set", episodes=2, frames=5, cameras=0)
    shipped = {"action": {"mean": [1, 2, 3], "std": [1, 1, 1], "min": [0, 0, 0], "max": [2, 2, 2]}}
    (root / "meta/stats.json").write_text(json.dumps(shipped))
    (root / "meta/episodes_stats.jsonl").unlink()
    info = (root / "meta/info.json").read_text().replace('"v2.1"', '"v2.0"')
    (root / "meta/info.json").write_text(info)
    dataset = open_dataset(root)
    assert dataset.info.version == "2.0"
    assert dataset.stats["action"]["mean"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("mode", ["min_max", "mean_std", "quantiles"])
def test_constant_dimensions_survive_normalisation_both_ways(mode):
    """D24: dim 6 always 0.5; the round trip returns it, a slightly different input stays close."""
    data = np.random.default_rng(0).normal(size=(100, 7)).astype(np.float32)
    data[:, 6] = 0.5
    running = RunningStats(7)
    running.update(data)
    rule = normalizer(running.result(), mode)
    assert rule.constant.tolist() == [False] * 6 + [True]
    scaled = rule.normalize(data)
    assert np.isfinite(scaled).all()
    assert np.allclose(rule.unnormalize(scaled), data, atol=1e-5)
    near = data.copy()
    near[:, 6] += 1e-3
    assert np.abs(rule.normalize(near)[:, 6]).max() <= 2e-3
    assert np.allclose(rule.unnormalize(rule.normalize(near)), near, atol=1e-5)
    if mode == "min_max":
        assert scaled[:, :6].min() == pytest.approx(-1)
        assert scaled[:, :6].max() == pytest.approx(1)


def test_normalisation_says_which_statistics_it_lacks():
    with pytest.raises(ValueError, match="no q01 and q99"):
        normalizer({"min": np.zeros(1), "max": np.ones(1)}, "quantiles")
    with pytest.raises(ValueError, match="not finite"):
        normalizer({"min": np.array([np.nan]), "max": np.ones(1)}, "min_max")
    with pytest.raises(ValueError, match="mode must be"):
        normalizer({}, "max")
