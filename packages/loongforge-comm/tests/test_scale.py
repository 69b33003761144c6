"""Plans for 1024 ranks are identical on all of them; bucket launch order is the plan's; status file and
groups."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from loongforge_comm import (
    CommPlan,
    GradientScheduler,
    LinkModel,
    ModuleDependencyGraph,
    SchedulerConfig,
    build_mdg,
    gradient_specs,
    measure_link,
    plan_buckets,
)
from loongforge_comm import channels as channels_module
from loongforge_comm.channels import Channels, Flight
from loongforge_comm.reducer import Reducer
from loongforge_comm.testing import run_ranks, seeded_batch, tanh_mlp
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore


class Recorder(Channels):
    """Channels of a fake group: notes the launches, sends nothing."""

    def __init__(self, ranks: range) -> None:
        self.ranks = tuple(ranks)
        self.ring = dist.group.WORLD
        self.peers = dist.group.WORLD
        self.launched: list[tuple[int, str]] = []

    def launch(self, buffer: torch.Tensor, strategy: str, **_: object) -> Flight:
        self.launched.append((buffer.numel(), strategy))
        return Flight(launched=0.0, landed=1.0)


def test_plans_and_launch_order_are_identical_on_1024_ranks() -> None:
    """A process group of 1024 fake ranks; each rank uses other parts of the model, as its data might."""
    texts, orders = set(), set()
    link = LinkModel.from_alpha_beta(0.0, 0.01, world_size=1024)
    for rank in range(1024):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1024)
        try:
            model = tanh_mlp(depth=6)
            plan = plan_buckets(gradient_specs(model), link)
            recorder = Recorder(range(1024))
            reducer = Reducer(
                plan,
                dict(model.named_parameters()),
                recorder,
                contributors=1024,
                overlap=True,
                compress=False,
                wait=lambda index, flight: None,
                deferred_first=False,
            )
            hooks = [
                p.register_post_accumulate_grad_hook(lambda p, name=name, r=reducer: r.fired(name))
                for name, p in model.named_parameters()
            ]
            used = model[: 1 + rank % 6]
            used(seeded_batch(rank, 0)).sum().backward()
            for hook in hooks:
                hook.remove()
            texts.add(plan.to_json())
            orders.add(tuple(recorder.launched))
            assert len(recorder.launched) == len(plan.buckets)
        finally:
            dist.destroy_process_group()
    assert len(texts) == 1
    assert len(orders) == 1


def observed(rank: int, world_size: int, folder: str) -> dict[str, object]:
    path = Path(folder)
    overrides = path / "groups.yaml"
    if rank == 0:
        overrides.write_text("groups:\n  - name: first\n    match: ['0.*']\n    strategy: direct\n")
    dist.barrier()
    link = measure_link(budget_s=0.3, cache=path / "links")
    again = measure_link(budget_s=0.3, cache=path / "links")
    model = tanh_mlp()
    config = SchedulerConfig(
        heartbeat_interval_s=0.0,
        heartbeat_every=4,
        warmup_steps=2,
        status_path=path / "status.json",
        group_overrides=overrides,
    )
    order: list[int] = []
    with GradientScheduler(model, config=config, link=link) as scheduler:
        inner = scheduler._team.channels.launch

        def launch(buffer: torch.Tensor, strategy: str, **rest: object) -> Flight:
            order.append(buffer.numel())
            return inner(buffer, strategy, **rest)

        scheduler._team.channels.launch = launch
        for step in range(8):
            model(seeded_batch(rank, step)).sum().backward()
            model.zero_grad()
            scheduler.step_end(step)
        stats = scheduler.stats()
        expected = [scheduler._reducer._store.buckets[b.index].buffer.numel() for b in scheduler.plan.buckets]
    return {
        "sources": (link.source, again.source),
        "equal": link.curves == again.curves,
        "text": link.to_json(),
        "stats": json.loads(json.dumps(stats)),
        "last_order": order[-len(expected) :],
        "expected": expected,
        "status": json.loads((path / "status.json").read_text()) if rank == 0 else None,
        "strategies": {b.group: b.strategy for b in scheduler.plan.buckets},
    }


def test_measured_link_groups_launch_order_and_status(tmp_path: Path) -> None:
    left, right = run_ranks(observed, 2, str(tmp_path), timeout_s=90.0)
    assert left is not None
    assert right is not None
    assert left["sources"] == ("measured", "cache")
    assert left["equal"]
    assert left["text"] == right["text"]
    assert left["last_order"] == left["expected"] == right["last_order"]
    assert left["strategies"]["first"] == "direct"
    assert left["stats"]["plan_hash"] == right["stats"]["plan_hash"]
    assert set(left["stats"]["ranks"]["waiting_ms"]) == {"0", "1"}
    assert left["stats"]["ranks"]["waited_for"] in (0, 1)
    assert left["status"]["closed"] is True
    assert left["status"]["groups"]["first"]["buckets"] >= 1


def test_overlap_definition_on_a_known_timeline() -> None:
    from loongforge_comm.reducer import BackwardRecord
    from loongforge_comm.telemetry import Telemetry

    link = LinkModel.from_alpha_beta(0.1, 1.0)
    plan = plan_buckets(gradient_specs(nn.Linear(4, 4)), link)
    telemetry = Telemetry(plan)
    spans = {0: (1.0, 5.0), 1: (4.0, 11.0)}
    telemetry.add(BackwardRecord(begin=0.0, end=10.0, finish=11.5, first_ready=1.0, spans=spans))
    summary = telemetry.summary()
    assert summary["comm_ms_mean"] == pytest.approx(10_000.0)
    assert summary["exposed_ms"] == pytest.approx(1_500.0)
    assert summary["overlap"] == pytest.approx(0.9)
    assert telemetry.bucket_ms() == pytest.approx({0: 4_000.0, 1: 6_000.0})
    assert channels_module.Flight(launched=0.0).landed == 0.0


def test_graph_times_feed_the_first_plan() -> None:
    model = tanh_mlp()
    graph = build_mdg(model, (seeded_batch(0, 0),))
    assert ModuleDependencyGraph.from_json(graph.to_json()).ready_ms(10.0) == graph.ready_ms(10.0)
    plan = plan_buckets(graph.gradient_specs(10.0), LinkModel.from_alpha_beta(0.1, 1.0), source="mdg")
    assert CommPlan.from_json(plan.to_json()).source == "mdg"
    assert plan.backward_ms == pytest.approx(max(graph.ready_ms(10.0).values()))
