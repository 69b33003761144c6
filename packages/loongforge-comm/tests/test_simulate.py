"""Simulator, drawings, monitor and command line."""

import io
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from loongforge_comm import CommPlan, Curve, GradientSpec, LinkModel, build_mdg, plan_buckets
from loongforge_comm.cli import main
from loongforge_comm.mdg.render import communication_groups, to_svg
from loongforge_comm.monitor import read_status, watch
from loongforge_comm.presets import PRESETS, Tier, Topology
from loongforge_comm.simulate import (
    Contention,
    collective_ms,
    link_from_topology,
    scale_link,
    simulate,
    stock_plan,
)
from loongforge_comm.telemetry import StatusFile
from rich.console import Console
from torch import nn

FLAT = Topology(
    name="flat",
    ranks_per_node=1,
    intra=Tier(step_us=100, gbytes_per_s=1),
    inter=Tier(step_us=100, gbytes_per_s=1),
    base_us=0,
    source="test",
)


def gradients(count: int = 6, numel: int = 2**18) -> list[GradientSpec]:
    return [
        GradientSpec(
            name=f"p{i}", shape=(numel,), stride=(1,), dtype="float32", device="cpu", ready_ms=10.0 * (i + 1)
        )
        for i in range(count)
    ]


def tiny() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Found by the command line as test model."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.ones(2, 8),)


def test_closed_forms_on_a_flat_network() -> None:
    size = 1e6  # one millisecond of wire
    assert collective_ms("ring", size, 4, FLAT) == pytest.approx(2 * 3 * 0.1 + 2 * 3 / 4 * 1.0)
    assert collective_ms("tree", size, 4, FLAT) == pytest.approx(2 * 2 * (0.1 + 1.0))
    assert collective_ms("direct", size, 4, FLAT) == pytest.approx(0.1 + 3.0)
    assert collective_ms("all_gather", size, 4, FLAT) == pytest.approx(3 * 1.1)
    assert collective_ms("ring", size, 1, FLAT) == 0.0


def test_hierarchical_ring_moves_a_shard_between_nodes() -> None:
    two = Topology(
        name="two",
        ranks_per_node=4,
        intra=Tier(step_us=0, gbytes_per_s=100),
        inter=Tier(step_us=0, gbytes_per_s=1),
        base_us=0,
        source="test",
    )
    assert collective_ms("ring", 8e6, 8, two) == pytest.approx(2 * (3 / 4 * 0.08) + 2 * (1 / 2) * 2.0)


def test_scaling_a_link_equals_the_closed_form_at_the_other_size() -> None:
    scaled = scale_link(link_from_topology(FLAT, 2), 16)
    direct = link_from_topology(FLAT, 16)
    sizes = np.asarray([4096.0, 2.0**20, 2.0**26])
    for name in ("ring", "tree", "direct", "all_gather"):
        np.testing.assert_allclose(
            scaled.curves[name].predict(sizes), direct.curves[name].predict(sizes), rtol=5e-2
        )


def test_replay_without_jitter_equals_the_plan_and_jitter_only_adds() -> None:
    link = LinkModel.from_alpha_beta(0.5, 0.1, world_size=64)
    plan = plan_buckets(gradients(), link)
    exact = simulate(plan, link)
    assert exact.finish_ms == pytest.approx(plan.buckets[-1].end_ms)
    assert exact.exposed_ms == pytest.approx(plan.exposed_ms)
    assert exact.spans == tuple((b.start_ms, b.end_ms) for b in plan.buckets)
    noisy = simulate(plan, link, jitter=0.05, steps=100, seed=1)
    assert noisy.finish_p95_ms >= noisy.finish_ms > exact.finish_ms
    assert noisy.straggler_ms > 0
    assert noisy == simulate(plan, link, jitter=0.05, steps=100, seed=1)
    assert "model, not a measurement" in noisy.report()


def test_contention_delays_backward() -> None:
    link = LinkModel.from_alpha_beta(0.5, 0.1)
    plan = plan_buckets(gradients(), link)
    free = simulate(plan, link)
    packed = simulate(plan, link, contention=Contention(pack_ms_per_mib=1.0))
    assert packed.backward_ms == pytest.approx(free.backward_ms + 6.0)
    slowed = simulate(plan, link, contention=Contention(slowdown=0.1))
    assert slowed.backward_ms > free.backward_ms


def test_stock_buckets_close_at_the_cap() -> None:
    link = LinkModel.from_alpha_beta(0.1, 1.0)
    plan = stock_plan(gradients(7), link, cap_mib=2.5)
    assert [len(b.pieces) for b in plan.buckets] == [3, 3, 1]
    default = stock_plan(gradients(30), link)
    assert [b.nbytes / 2**20 for b in default.buckets] == [1.0, 25.0, 4.0]
    default.validate()


def test_every_preset_names_its_source_and_grows_with_ranks() -> None:
    for preset in PRESETS.values():
        assert len(preset.source) > 20
        few, many = link_from_topology(preset, 16), link_from_topology(preset, 256)
        assert many.predict_ms("ring", 2**20) > few.predict_ms("ring", 2**20)
        assert math.isfinite(many.crossover_bytes)


def test_command_line_from_model_to_drawing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_file = tmp_path / "cli_model.py"
    model_file.write_text(
        "import torch\nfrom torch import nn\n\n\ndef tiny():\n"
        "    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.ones(2, 8),)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["graph", "cli_model:tiny", "-o", "mdg.json"]) == 0
    assert main(["graph", "mdg.json", "-o", "mdg.svg"]) == 0
    assert main(["graph", "mdg.json", "-o", "mdg.html", "--depth", "1"]) == 0
    assert "<svg" in (tmp_path / "mdg.html").read_text()
    assert main(["graph", "mdg.json"]) == 0
    assert "GFLOP" in capsys.readouterr().out
    assert (
        main(["plan", "mdg.json", "--backward-ms", "5", "--link", "10gbe", "--ranks", "4", "-o", "plan.json"])
        == 0
    )
    assert "exposed" in capsys.readouterr().out
    assert CommPlan.from_json((tmp_path / "plan.json").read_text()).world_size == 4
    pytest.importorskip("matplotlib")
    command = [
        "simulate",
        "plan.json",
        "--ranks",
        "256",
        "--link",
        "a800-ib200",
        "--jitter",
        "0.02",
        "--gantt",
        "g.png",
    ]
    assert main([*command, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["kind"], out["ranks"]) == ("model", 256)
    assert (tmp_path / "g.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["simulate", "plan.json", "--link", "token-ring"]) == 2
    assert "allowed are" in capsys.readouterr().err
    assert main(["graph", "mdg.json", "-o", "mdg.pdf"]) == 2
    assert main(["plan", "nothing", "--backward-ms", "1"]) == 2


def test_graph_drawing_colours_by_group_and_marks_branches() -> None:
    model, args = tiny()
    graph = build_mdg(model, args)
    link = LinkModel(world_size=2, backend="model", curves={"ring": Curve.linear(1.0, 1.0)})
    plan = plan_buckets(graph.gradient_specs(1.0), link)
    groups = communication_groups(graph, plan, 1.0)
    assert set(groups) == {"0", "2"}
    text = to_svg(graph, groups)
    assert text.count("<rect") >= 5
    assert "Linear" in text


def test_monitor_reads_the_status_file(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    with pytest.raises(ValueError, match="status_path"):
        read_status(path)
    status = {
        "step": 7,
        "plan_hash": "abc",
        "plan_source": "measured",
        "strategy": "hybrid",
        "overlap": 0.91,
        "exposed_ms": 1.5,
        "exposed_ms_mean": 2.0,
        "groups": {"high": {"buckets": 2.0, "mib": 8.0, "mean_ms": 3.0, "p95_ms": 4.0}},
        "ranks": {"waiting_ms": {"0": 0.0, "1": 2.0}, "backward_ms": {"0": 9.0, "1": 7.0}, "waited_for": 0},
    }
    file = StatusFile(path)
    file.write(status)
    file.write({"step": 8})
    assert read_status(path)["step"] == 7
    out = io.StringIO()
    assert watch(path, interval_s=0.01, as_json=False, once=True, console=Console(file=out, width=120)) == 0
    assert "91.0 %" in out.getvalue()
    assert "waited for" in out.getvalue()
    file.write({**status, "closed": True}, force=True)
    out = io.StringIO()
    assert watch(path, interval_s=0.01, as_json=True, once=False, console=Console(file=out)) == 0
    assert json.loads(out.getvalue())["closed"] is True
    assert abs(json.loads(out.getvalue())["time_unix"] - time.time()) < 60
