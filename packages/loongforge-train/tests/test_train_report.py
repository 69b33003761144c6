"""Reports: sums, the named bottleneck, the page, comparison, and the command line."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from loongforge.cli import MEMORY_HINT, explain, run
from loongforge.report import chart
from loongforge.report.bottleneck import diagnose
from loongforge.report.compare import compare
from loongforge.report.html import page
from loongforge.report.summary import summarise
from loongforge.report.text import screen


def records(count: int = 20, *, rank: int = 0, **values: object) -> list[dict[str, object]]:
    base: dict[str, object] = {
        "rank": rank, "epoch": 0, "loss": 1.0, "samples": 8, "samples_per_s": 80.0, "step_ms": 100.0,
        "data_wait_ms": 1.0, "h2d_ms": 1.0, "forward_ms": 40.0, "backward_ms": 50.0, "optimizer_ms": 6.0,
        "checkpoint_ms": 0.0, "host_gap_ms": 2.0, "fused": False, "fusion_reason": "off", "skipped": False,
        "data": {}, "comm": {}, "mem": {},
    }  # fmt: skip
    return [{**base, "step": step, "time_unix": 1e9 + step, **values} for step in range(1, count + 1)]


PROBE = {"ops": 1000, "op_cost_us": 5.0, "sync_count": 0, "sync_ms": 0.0}


@pytest.mark.parametrize(
    ("values", "probe", "name"),
    [
        ({}, PROBE, "serial dependency"),
        ({"data_wait_ms": 300.0, "step_ms": 399.0}, PROBE, "data stall"),
        ({"comm_exposed_ms": 300.0, "step_ms": 399.0}, PROBE, "communication wait"),
        ({}, {**PROBE, "ops": 15_000}, "kernel launch"),
        ({}, {**PROBE, "ops": 600}, "serial dependency"),
        ({}, {**PROBE, "sync_count": 500, "sync_ms": 80.0}, "host sync"),
        ({"host_gap_ms": 300.0, "step_ms": 399.0}, PROBE, "host sync"),
        ({"alloc_ms": 70.0}, PROBE, "memory"),
    ],
)
def test_the_planted_cause_is_named_with_setting_and_gain(
    values: dict[str, object], probe: dict[str, object], name: str
) -> None:
    rows = records(**values)
    rows[5] = {**rows[5], **probe}
    diagnosis = diagnose(rows)
    assert diagnosis.bottleneck.name == name
    assert diagnosis.bottleneck.setting
    assert sum(finding.ms for finding in diagnosis.findings) == pytest.approx(
        diagnosis.summary.step_ms, rel=0.05
    )


def test_the_gain_is_the_share_that_would_vanish() -> None:
    diagnosis = diagnose(records(data_wait_ms=300.0, step_ms=400.0))
    assert "4." in diagnosis.bottleneck.gain or "3.9" in diagnosis.bottleneck.gain


def test_counters_of_the_loader_are_told_per_step_and_gauges_as_means() -> None:
    rows = []
    for rank in (0, 1):
        for row in records(11, rank=rank):
            step = int(str(row["step"]))
            data = {
                "decode_ms": 1000.0 + 40.0 * (rank + 1) * step,
                "worker_busy": 0.1 * step,
                "batches": 4.0 * step,
            }
            rows.append({**row, "data": data})
    loader = summarise(rows).loader
    assert loader == pytest.approx({"decode_ms": 60.0, "worker_busy": 0.6, "batches": 4.0})
    assert "decode_ms" not in summarise(rows[:1]).loader, "one step does not show how much a counter grew"


def test_unknown_phases_are_said_to_be_unknown() -> None:
    rows = [{k: v for k, v in r.items() if k != "h2d_ms"} for r in records()]
    diagnosis = diagnose(rows)
    assert "h2d_ms" not in diagnosis.summary.phases
    text = screen(diagnosis, title="run")
    assert re.search(r"h2d\s+not measured", text)
    assert re.search(r"comm_exposed\s+not measured", text)
    assert len(text.splitlines()) < 50
    with pytest.raises(ValueError, match="no step record"):
        summarise([])


class Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "href"}]


def test_the_page_is_self_contained_and_has_its_charts() -> None:
    rows = records(700, samples_per_s=5.0, comm_overlap=0.5, mem_peak_bytes=3_000_000)
    rows[3]["loss"] = None
    text = page(diagnose(rows), rows, title="run <1> & co")
    outline = Outline()
    outline.feed(text)
    assert outline.tags.count("svg") == 6
    assert "script" not in outline.tags
    assert all(link.startswith("data:") for link in outline.links)
    assert "http" not in text
    assert "run &lt;1&gt; &amp; co" in text
    assert text.count("<rect") < 8 * 320 + 400, "long runs are thinned out"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 7.3, [0, 2, 4, 6, 8]),
        (0.0, 0.003, [0, 0.001, 0.002, 0.003]),
        (1.02, 1.58, [1.0, 1.2, 1.4, 1.6]),
        (5.0, 5.0, [2.0, 4.0, 6.0, 8.0]),
        (0.0, 0.0, [-0.5, 0.0, 0.5]),
        (-3e9, 4e9, [-4e9, -2e9, 0, 2e9, 4e9]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, expected: list[float]) -> None:
    found = chart.ticks(low, high)
    assert found == pytest.approx(expected)
    assert found[0] <= low <= high <= found[-1]


def test_labels_at_the_axis_are_short_in_any_range() -> None:
    assert [chart.milliseconds(v) for v in (0, 0.25, 300, 999, 1000, 4000, 2.5e5)] == [
        "0 ms", "0.25 ms", "300 ms", "999 ms", "1 s", "4 s", "250 s",
    ]  # fmt: skip
    assert [chart.memory(v) for v in (0, 1024, 3 * 2**20, 1.5 * 2**30)] == [
        "0 B",
        "1 KiB",
        "3 MiB",
        "1.5 GiB",
    ]
    assert [chart.plain(v) for v in (0.125, 80, 12_500, 3e9)] == ["0.125", "80", "12.5k", "3G"]


def test_labels_stay_inside_the_picture_for_slow_steps() -> None:
    rows = records(step_ms=4321.0, forward_ms=4231.0, samples=1, mem_peak_bytes=7 * 2**30)
    text = page(diagnose(rows), rows, title="slow")
    labels = re.findall(r'<text x="(\d+)" y="[\d.]+" text-anchor="end">([^<]*)</text>', text)
    assert labels
    for place, label in labels:
        assert 7 * len(label) <= int(place), f"{label!r} would begin left of the picture"
    assert "e+" not in text


def test_a_comparison_says_how_far_losses_differ() -> None:
    other = records()
    other[7]["loss"] = 1.25
    text = compare(records(), other, names=("a", "b"))
    assert "19 equal, largest difference 0.25 at step 8" in text
    assert re.search(r"step ms\s+100.00\s+100.00\s+1.000", text)


def write(folder: Path, rows: list[dict[str, object]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_report_and_compare_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "first", records(data_wait_ms=300.0, step_ms=399.0))
    assert run(["report", str(first)]) == 0
    assert "bottleneck: data stall" in capsys.readouterr().out
    assert (first / "report.html").read_text().startswith("<!doctype html>")
    assert run(["report", str(first), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["name"] == "data stall"
    assert run(["compare", str(first), str(write(tmp_path / "second", records()))]) == 0
    assert "second / first" in capsys.readouterr().out
    assert run(["report", str(tmp_path / "nothing")]) == 66
    assert "has no metrics.jsonl" in capsys.readouterr().err
    assert run(["debug-dmf", "--run", str(first), "--last", "3"]) == 0
    assert "3 x off" in capsys.readouterr().out


def test_exit_codes_and_streams_of_wrong_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--dataset", "x", "--steps", "0"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "steps is 0: allowed is a whole number" in err
    assert run(["train", "--nonsense"]) == 2
    assert run(["profile-step", "--pid", "999999999"]) == 69
    assert run(["validate-checkpoint", str(tmp_path / "none")]) == 74
    assert "does not exist" in capsys.readouterr().out
    assert run(["train", "--steps", "3"]) == 2
    assert "pass --dataset DIR" in capsys.readouterr().err
    assert run(["train", "--dataset", "x", "--steps", "3", "--accumulation", "4", "--fuse", "3"]) == 2
    assert "must divide" in capsys.readouterr().err


def test_errors_of_others_become_one_line_with_a_hint_and_a_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--steps", "3", "--output", str(tmp_path / "run")]
    assert run(["train", "--dataset", str(tmp_path / "none"), *output]) == 66
    err = capsys.readouterr().err
    assert "error: data set directory does not exist" in err
    assert "hint: `loongforge-data validate DIR`" in err
    assert "Traceback" not in err
    assert run(["train", "--dataset", "x", "--device", "cuda:one", *output]) == 2
    capsys.readouterr()
    assert explain(OSError(28, "No space left on device")) == (74, explain(OSError(27, "too large"))[1])  # type: ignore[index]
    assert explain(PermissionError(13, "Permission denied", "/srv/x")) is not None
    assert explain(OSError(104, "Connection reset by peer")) is None, (
        "not about a file: show where it is from"
    )
    assert explain(ValueError("a bug")) is None
    assert explain(torch.OutOfMemoryError("CUDA out of memory")) == (1, MEMORY_HINT)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    target = write(tmp_path / "run", records())
    assert run(["report", str(target), "--html", str(tmp_path / "file" / "report.html")]) == 74
    err = capsys.readouterr().err
    assert str(tmp_path / "file" / "report.html") in err
    assert "hint: check the path" in err


def test_print_config_merges_recipe_file_flags_and_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tomllib

    file = tmp_path / "run.toml"
    file.write_text("steps = 7\nbatch_size = 3\n[guards]\nmax_skips = 4\n")
    arguments = ["train", "--config", str(file), "--batch-size", "5", "--set", "guards.hang_timeout_s=9"]
    assert run([*arguments, "--print-config"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert (printed["steps"], printed["batch_size"]) == (7, 5)
    assert printed["guards"]["max_skips"] == 4
    assert printed["guards"]["hang_timeout_s"] == 9.0
    assert run([*arguments, "--set", "nonsense", "--print-config"]) == 2
    assert run([*arguments, "--set", "no.such=1", "--print-config"]) == 2


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for command in (
        "train", "validate-checkpoint", "profile-step", "monitor-comm", "switch-strategy", "debug-dmf",
        "report", "compare", "doctor", "verify",
    ):  # fmt: skip
        assert command in text


def test_doctor_reports_and_bad_data_is_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--output", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for name in ("versions", "gpu", "codecs", "/dev/shm", "open files", "output"):
        assert name in text
    assert run(["doctor", "--dataset", str(tmp_path / "none"), "--output", str(tmp_path)]) == 1
    assert "loongforge-data validate" in capsys.readouterr().out
