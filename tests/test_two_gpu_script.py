"""The two-GPU benchmark runs from end to end on two Gloo ranks, so that a GPU run finds no surprise in it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_section_runs_on_gloo(tmp_path: Path) -> None:
    pytest.importorskip("loongforge_comm")
    pytest.importorskip("loongforge")
    out = tmp_path / "two_gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "two_gpu.py"), "--backend", "gloo", "--quick"]
    done = subprocess.run(
        [*command, "--json", str(out)], capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    states = {(row["section"], row["part"]): row["state"] for row in result["rows"]}
    failed = [row for row in result["rows"] if row["state"] not in ("ok", "skipped")]
    assert not failed, failed
    assert {s for (s, _), state in states.items() if state == "skipped"} <= {"slow"}, states
    figures = result["figures"]
    assert figures["largest_gap_fp32"] == figures["largest_gap_bf16"] == 0.0
    assert figures["largest_gap_full_bf16"] == 0.0
    assert figures["kill_named"] is True
    assert figures["stop_named"] is True
    for name in ("accumulation_1", "accumulation_4", "gpu_bound_1", "gpu_bound_4"):
        part = result["sections"]["full"]["parts"][name]["result"]
        columns = set(part["medians_ms"]) | set(part["failed"])
        wanted = {"ddp default", "ddp cap 5", "ddp cap 100", "ddp static_graph", "ddp find_unused", "ours"}
        assert wanted <= columns
        assert "ours" not in part["not_averaged"]
        assert part["passes"] == part["ratios"]["vs_default"]["n"] == 2
        assert figures[f"{name}_vs_default"] == part["ratios"]["vs_default"]["median"]
        assert figures[f"{name}_overlap_by_events"] is not None
