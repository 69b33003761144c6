"""Facts of the repository as a whole: generated pages are current, nothing machine-bound is kept."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULT_KEYS = {"name", "hardware", "versions", "command", "repetitions", "rows", "figures"}


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=30)
    return [ROOT / name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_the_performance_page_is_generated_from_the_kept_results() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "performance.py"), "--check"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_goal_with_a_condition_is_not_met_by_a_figure_of_something_else(tmp_path, monkeypatch) -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "performance.py"))
    goals, results = tmp_path / "goals.toml", tmp_path / "results"
    goals.write_text('[h200.step]\nratio = ">= 1.4 if measured"\n')
    (results / "h200").mkdir(parents=True)
    table = page["_goals"]
    monkeypatch.setitem(table.__globals__, "GOALS", goals)
    monkeypatch.setitem(table.__globals__, "RESULTS", results)
    for measured, shown in ((0.0, "not measured | **no**"), (1.0, "1.9 | yes")):
        figures = {"ratio": 1.9, "measured": measured}
        (results / "h200" / "step.json").write_text(json.dumps({"figures": figures}))
        assert f"| step (h200) | ratio | >= 1.4 | {shown} |" in table()


def test_every_kept_result_names_hardware_versions_command_and_repetitions() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*/*.json"):
        data = json.loads(path.read_text())
        assert data.keys() >= RESULT_KEYS, path
        assert (ROOT / "benchmarks" / f"{Path(data['command'].split()[2]).stem}.py").exists(), path


def test_packages_carry_typing_marker_readme_licence_and_tests() -> None:
    for manifest in (ROOT / "packages").glob("*/pyproject.toml"):
        project = tomllib.loads(manifest.read_text())["project"]
        assert project["license"] == "Apache-2.0"
        assert project["requires-python"].startswith(">=3.11")
        assert list(manifest.parent.glob("src/*/py.typed"))
        assert list(manifest.parent.glob("tests/**/test_*.py"))
        assert len((manifest.parent / "README.md").read_text()) > 500


def test_tracked_files_hold_no_machine_paths_and_no_large_binaries() -> None:
    pattern = re.compile(r"(/work/|/root/|/tmp/lf|\.pyenv|/home/[a-z])")
    for path in tracked():
        assert path.stat().st_size < 2_000_000, path
        if path.suffix in {".py", ".rs", ".md", ".toml", ".json", ".yml", ".yaml", ".sh", ".html"}:
            if path == Path(__file__).resolve():
                continue
            found = pattern.search(path.read_text(errors="replace"))
            assert found is None, f"{path}: {found and found.group()}"


def test_make_bench_runs_every_benchmark_whose_cpu_result_is_kept() -> None:
    kept = {path.stem for path in (ROOT / "benchmarks" / "results" / "cpu").glob("*.json")}
    listed = runpy.run_path(str(ROOT / "scripts" / "bench.py"))["CPU_BENCHMARKS"]
    assert kept <= set(listed)
    assert all((ROOT / "benchmarks" / f"{name}.py").is_file() for name in listed)
