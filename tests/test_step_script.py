"""The step benchmark's arithmetic: ratios within rounds, failing columns, time limits."""

import contextlib
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def rounds():
    pytest.importorskip("loongforge_fuse")
    pytest.importorskip("loongforge")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("_step_rounds")
    finally:
        sys.path.remove(str(BENCHMARKS))


def turns_of(rounds, **times):
    return {
        name: rounds.Turn(name=name, column=None, row={"column": name}, ms=ms) for name, ms in times.items()
    }


def test_ratios_are_taken_within_rounds_and_skip_those_that_failed(rounds):
    # The host gets slower from round to round; the ratio does not.
    turns = turns_of(rounds, eager=[100.0, 150.0, None, 300.0], ours=[50.0, 75.0, 80.0, 150.0])
    assert rounds.ratios(turns, "eager", "ours") == [2.0, 2.0, 2.0]
    assert rounds.ratios(turns, "eager", "nobody") == []


def test_figures_come_from_the_fastest_exact_column_and_say_which_rival_is_missing(rounds):
    turns = turns_of(
        rounds,
        eager_4x4=[600.0, 900.0],
        eager_1x16=[150.0, 300.0],
        graph_fused_compile=[70.0, 70.0],
        compile_regions_1x16=[130.0, 140.0],
        compile_1x16=[],
        stock_4x4=[660.0, None],
    )
    turns.update({"ours+adam": rounds.Turn(name="ours+adam", column=None, row={}, ms=[60.0, 60.0])})
    turns.update({"ours+adam+fp8": rounds.Turn(name="ours+adam+fp8", column=None, row={}, ms=[50.0, 50.0])})
    turns["eager_4x4"].row["kernels"], turns["fused_eager"] = (
        16000,
        rounds.Turn(name="fused_eager", column=None, row={"kernels": 4000}, ms=[170.0, 180.0]),
    )
    figures, rows = rounds.summarise(turns)
    assert figures["step_ms"] == 60.0
    assert figures["step_fp8_ms"] == 50.0
    assert figures["vs_eager_4x4"] == pytest.approx(12.5)
    assert figures["vs_eager_1x16"] == pytest.approx(3.75)
    assert figures["launches_ratio"] == 4.0
    assert figures["vs_stock_4x4"] == pytest.approx(11.0)
    assert figures["vs_stock_1x16"] is None
    # Compiled blocks do not stand in for the compiled whole model.
    assert figures["compile_1x16_measured"] == 0.0
    assert figures["vs_compile_1x16"] is None
    assert figures["vs_compile_regions_1x16"] == pytest.approx(2.25)
    assert {row["column"] for row in rows} >= {"eager_4x4 / ours+adam", "eager_1x16 / ours+adam"}


def test_nothing_measured_gives_no_figures_instead_of_an_error(rounds):
    figures, rows = rounds.summarise(turns_of(rounds, eager_4x4=[None], eager_1x16=[]))
    assert figures["step_ms"] is None
    assert figures["vs_eager_1x16"] is None
    assert rows == []


def test_a_limit_stops_work_that_never_comes_back_and_leaves_no_alarm(rounds):
    def spin():
        with rounds.limited(0.1):
            while True:
                time.monotonic()

    with pytest.raises(TimeoutError, match="stopped after"):
        spin()
    with rounds.limited(60.0):
        pass
    assert rounds.signal.getitimer(rounds.signal.ITIMER_REAL)[0] == 0


def test_a_limit_is_repeated_when_a_callback_swallows_its_exception(rounds):
    started = time.monotonic()

    def spin():
        with rounds.limited(0.1, again=0.1):
            with contextlib.suppress(TimeoutError):
                while True:
                    time.monotonic()
            while time.monotonic() - started < 20.0:
                pass

    with pytest.raises(TimeoutError, match="stopped after"):
        spin()


def test_gaps_are_counted_where_no_kernel_of_any_stream_runs(rounds):
    per = rounds.PROFILED
    # Microseconds: two kernels overlap, then 3, 30 and 300 without any; order of arrival does not matter.
    spans = [(0.0, 100.0), (50.0, 200.0), (203.0, 270.0), (600.0, 700.0), (300.0, 300.0), (300.0, 300.0)]
    found = rounds.gaps([(a * per, b * per) for a, b in reversed(spans)])
    assert found["span_ms"] == pytest.approx(0.7)
    assert found["some_ms"] == pytest.approx(0.37, abs=0.011)
    assert sum(found[f"{name}_ms"] for name in ("below_5_us", "5_to_50_us", "above_50_us")) == pytest.approx(
        0.33, abs=0.011
    )
    assert rounds.gaps([]) == {"span_ms": 0.0, "some_ms": 0.0}


def test_a_stock_column_takes_its_turn_and_without_transformers_says_why_not(rounds, monkeypatch):
    pytest.importorskip("transformers")
    columns = importlib.import_module("_step_columns")
    bench = columns.make_bench(tiny=True, device="cpu", mixed=False, samples=1)
    settings = {"limit": 60.0, "base_gib": 0.0, "turn_s": 0.0, "least_steps": 1}
    with contextlib.ExitStack() as stack:
        turn = rounds.prepare("stock_1x16", bench, stack, **settings)
        monkeypatch.setitem(sys.modules, "transformers", None)
        missing = rounds.prepare("stock_4x4", bench, stack, **settings)
    assert "error" not in turn.row, turn.row["error"]
    # Both compute the same in bf16, in another order of operations.
    assert turn.row["stock_loss_deviation"] < 0.02
    assert turn.row["transformers"]
    assert missing.column is None
    assert "pip install transformers" in missing.row["error"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_script_runs_from_end_to_end_and_a_bad_column_costs_only_its_row(tmp_path):
    pytest.importorskip("loongforge_fuse")
    pytest.importorskip("loongforge")
    out = tmp_path / "step.json"
    columns = "eager_4x4,eager_1x16,nonsense,graph_fused,stock_1x16,ours+adam+join"
    command = [sys.executable, str(BENCHMARKS / "step_gpu.py"), "--tiny", "--columns", columns]
    command += ["--mixed-columns", "eager_1x16,ours+masters", "--rounds", "2", "--steps", "1"]
    done = subprocess.run(
        [*command, "--json", str(out)], capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    rows = {(row["precision"], row["column"]): row for row in result["rows"]}
    assert "unknown column" in rows[("bf16", "nonsense")]["error"]
    for column in ("eager_4x4", "eager_1x16", "graph_fused", "ours+adam+join"):
        assert rows[("bf16", column)]["ms"]["n"] == 2, rows[("bf16", column)]
    assert rows[("mixed", "ours+masters")]["ms"]["n"] == 2
    assert result["figures"]["vs_eager_4x4"] > 0
    # Without transformers the column has an error in its row, and the figure is None.
    stock = rows[("bf16", "stock_1x16")]
    assert (result["figures"]["vs_stock_1x16"] is None) == ("error" in stock), stock
    assert result["figures"]["mixed_step_ms"] > 0
    assert any(note.startswith("equality: ") for note in result["notes"])


def test_clocks_and_power_are_medians_of_the_samples_of_a_turn(rounds):
    gpu = rounds.Samples(*rounds.WATCHED)
    gpu.samples = [
        (0.5, (1980.0, 120.0)),
        (1.0, (1700.0, 690.0)),
        (1.5, (1600.0, 695.0)),
        (2.0, (1650.0, 680.0)),
    ]
    assert gpu.medians(0.9, 2.1) == (1650.0, 690.0)
    assert gpu.medians(5.0, 6.0) is None
