"""All strategies, modes, splits and switches on one to four ranks give the same gradients."""

import traceback
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from loongforge_comm import (
    CommPlan,
    GradientScheduler,
    LinkModel,
    SchedulerConfig,
    gradient_specs,
    plan_buckets,
)
from loongforge_comm.algorithms import ALGORITHMS
from loongforge_comm.testing import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

FAST = {"heartbeat_interval_s": 0.0, "timeout_s": 20.0, "agree_timeout_s": 20.0, "warmup_steps": 2}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 3)
    )


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def forced(model: nn.Module, world_size: int, strategy: str, parts: int) -> CommPlan:
    """A plan with about ``parts`` buckets that all use one strategy."""
    specs = gradient_specs(model)
    total = sum(s.nbytes for s in specs) / 2**20
    plan = plan_buckets(
        specs,
        LinkModel.from_alpha_beta(0.0, 1.0, world_size=world_size),
        strategy="simple",
        simple_bucket_mib=total / parts,
        max_bucket_mib=total / parts,
    )
    return replace(plan, buckets=tuple(replace(b, strategy=strategy) for b in plan.buckets))


def train(model: nn.Module, rank: int, scheduler: GradientScheduler | None, steps: int = 20) -> list[Tensor]:
    target = scheduler.module if scheduler is not None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        target(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step_end(step)
    return [p.detach().clone() for p in model.parameters()]


def largest_gap(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def program(rank: int, world_size: int) -> dict[int, dict[str, object]]:
    """One spawn serves all group sizes: four alone, two pairs, then all four, then the first three."""
    out: dict[int, dict[str, object]] = {}
    for layout in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 1, 2]]):
        groups = [dist.new_group(ranks) for ranks in layout]
        for ranks, group in zip(layout, groups, strict=True):
            if rank in ranks:
                try:
                    out[len(ranks)] = compare(rank, len(ranks), group)
                except BaseException:
                    out[len(ranks)] = {"error": traceback.format_exc()}
        dist.barrier()
    return out


def compare(rank: int, size: int, group: dist.ProcessGroup) -> dict[str, object]:
    out: dict[str, object] = {}
    for name, run in ALGORITHMS.items():
        for numel in (1, 5, 1023):
            buffer = torch.arange(numel, dtype=torch.float32) + rank * 0.5
            members = dist.get_process_group_ranks(group)
            expected = sum(torch.arange(numel, dtype=torch.float32) + r * 0.5 for r in members)
            run(buffer, group)
            assert torch.equal(buffer, expected), (name, numel)
    want = train(DistributedDataParallel(network(), process_group=group), rank, None)
    gaps = {}
    weights = {}
    for strategy in ALGORITHMS:
        for parts in (1, 7) if size != 3 else (7,):
            model = network()
            plan = forced(model, size, strategy, parts)
            config = SchedulerConfig(**{**FAST, "warmup_steps": 0, "allow_single_rank": True})
            with GradientScheduler(model, config=config, plan=plan, process_group=group) as scheduler:
                weights[strategy, parts] = train(model, rank, scheduler)
                assert len(scheduler.plan.buckets) >= min(parts, 4)
            gaps[f"{strategy}/{parts}"] = largest_gap(weights[strategy, parts], want)
    if size != 3:
        out["all_gather_bits"] = largest_gap(weights["all_gather", 1], weights["all_gather", 7])
        out["tree_bits"] = largest_gap(weights["tree", 1], weights["tree", 7])
    link = LinkModel.from_alpha_beta(0.05, 1.0, world_size=size)
    for mode in ("hooks", "simple", "plan-only"):
        model = network()
        config = SchedulerConfig(**FAST, mode=mode, allow_single_rank=True)
        with GradientScheduler(model, config=config, link=link, process_group=group) as scheduler:
            if mode == "plan-only":
                assert isinstance(scheduler.module, DistributedDataParallel)
            gaps[f"mode {mode}"] = largest_gap(train(model, rank, scheduler), want)
    compressed = one_gradient(rank, group, link, compress="bf16")
    exact = one_gradient(rank, group, link, compress="off")
    out["bf16"] = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(compressed, exact, strict=True)
    )
    out["gaps"] = gaps
    return out


def one_gradient(rank: int, group: dist.ProcessGroup, link: LinkModel, *, compress: str) -> list[Tensor]:
    model = network()
    config = SchedulerConfig(**FAST, compress=compress, allow_single_rank=True)
    with GradientScheduler(model, config=config, link=link, process_group=group):
        model(batch(rank, 0)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]


def test_twenty_steps_of_every_strategy_and_mode_agree_with_ddp_for_every_group_size() -> None:
    for rank, outcomes in enumerate(run_ranks(program, 4, timeout_s=170.0)):
        assert outcomes is not None
        for size, outcome in outcomes.items():
            assert "error" not in outcome, f"rank {rank} of {size}\n{outcome['error']}"
            gaps = outcome["gaps"]
            limit = 0.0 if size <= 2 else 1e-6
            assert all(gap <= limit for gap in gaps.values()), gaps
            assert outcome.get("all_gather_bits", 0.0) == 0.0
            assert outcome.get("tree_bits", 0.0) == 0.0
            assert 0.0 < outcome["bf16"] < 0.01 * size


def switching(rank: int, world_size: int) -> dict[str, object]:
    model, reference = network(), DistributedDataParallel(network())
    out: dict[str, object] = {}
    link = LinkModel.from_alpha_beta(0.0, 0.001)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    hashes = []
    with GradientScheduler(model, config=SchedulerConfig(**FAST, rebuild_interval=5), link=link) as scheduler:
        for step in range(20):
            for m, optimizer in zip((model, reference), optimizers, strict=True):
                m(batch(rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step == 7 and rank == 1:
                scheduler.switch_strategy("simple")
            if step == 12 and rank == 0:
                scheduler.switch_strategy("hybrid")
            if step == 16 and rank == 1:
                scheduler.rebuild()
            scheduler.step_end(step)
            hashes.append(
                (scheduler.stats()["strategy"], scheduler.stats()["plan_hash"], scheduler.stats()["rebuilds"])
            )
        state = scheduler.state_dict()
        out["stats"] = scheduler.stats()
    out["hashes"] = hashes
    out["gap"] = largest_gap(
        [p.detach() for p in model.parameters()], [p.detach() for p in reference.parameters()]
    )
    with GradientScheduler(model, config=SchedulerConfig(**FAST, rebuild_interval=5)) as resumed:
        resumed.load_state_dict(state)
        model(batch(rank, 0)).sum().backward()
        out["resumed"] = {k: resumed.stats()[k] for k in ("analyses", "plan_hash", "steps")}
        out["overlapped"] = resumed._reducer.last.deferred is False
    other = nn.Linear(3, 3)
    with GradientScheduler(other, config=SchedulerConfig(**FAST), link=link) as wrong:
        try:
            wrong.load_state_dict(state)
        except ValueError as error:
            out["refusal"] = str(error)
        wrong.load_state_dict(state, on_mismatch="replan")
        other(torch.ones(1, 3)).sum().backward()
    return out


def test_switch_rebuild_and_resume_are_agreed_and_change_no_number() -> None:
    left, right = run_ranks(switching, 2, timeout_s=120.0)
    assert left is not None
    assert right is not None
    assert left["hashes"] == right["hashes"]
    strategies = [s for s, _, _ in left["hashes"]]
    assert strategies == ["hybrid"] * 7 + ["simple"] * 0 + strategies[7:]
    assert strategies[8:12] == ["simple"] * 4
    assert strategies[13:] == ["hybrid"] * 7
    assert left["gap"] == right["gap"] == 0.0
    assert left["resumed"]["analyses"] == 0
    assert left["resumed"]["plan_hash"] == left["hashes"][-1][1]
    assert left["resumed"]["steps"] == 20
    assert left["overlapped"]
    assert "does not fit the model" in left["refusal"]


def test_without_a_process_group_nothing_happens() -> None:
    model = network()
    scheduler = GradientScheduler(model)
    assert not scheduler.active
    with scheduler.no_sync():
        model(batch(0, 0)).sum().backward()
    scheduler.reduce_now()
    scheduler.step_end(0)
    assert scheduler.stats() == {"active": False, "mode": "hooks", "strategy": "hybrid"}
    scheduler.load_state_dict(scheduler.state_dict())
    scheduler.close()
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_compiled_model_is_refused_with_the_remedy() -> None:
    class Wrapper(nn.Module):  # what torch.compile returns, without the cost of importing the compiler
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = network()

    compiled = Wrapper()
    with pytest.raises(ValueError, match=r"block\.compile\(\)"):
        GradientScheduler(compiled)


def test_settings_out_of_range_name_value_and_limit() -> None:
    with pytest.raises(ValueError, match="strategy is 'fast', allowed are 'hybrid', 'simple'"):
        SchedulerConfig(strategy="fast")
    with pytest.raises(ValueError, match="timeout_s is 0"):
        SchedulerConfig(timeout_s=0)
    with pytest.raises(ValueError, match="heartbeat_interval_s is 9"):
        SchedulerConfig(heartbeat_interval_s=9)
