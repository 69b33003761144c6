"""What averaging costs the host, counted in calls instead of time: a host-bound step gets longer by them."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from loongforge_comm import GradientScheduler, LinkModel, SchedulerConfig, gradient_specs, plan_buckets
from loongforge_comm.testing import run_ranks
from torch import Tensor, nn

SMALL, LARGE = 20, 60
WARMUP = 3


class Chain(nn.Module):
    """One cheap node of the graph per parameter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x * factor
        return x.sum()


def calls_of(action: Callable[[], object]) -> Counter[str]:
    """Python functions called (all of this package, ``python`` in sum) and reads of the clock."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found["python"] += 1
            found[frame.f_code.co_name] += 1
        elif event == "c_call" and argument is time.perf_counter:
            found["clock"] += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    # The end of a collective is noted in two calls by whichever thread sees it: this one, or the backend's.
    landed = found["_land"]
    found["python"] -= 2 * landed
    found["clock"] -= landed
    return found


def one_model(count: int) -> dict[str, Counter[str]]:
    """Calls during a backward and a forward without scheduler, inside no_sync, synchronised, and learning."""
    net, x = Chain(count), torch.ones(2)
    link = LinkModel.from_alpha_beta(0.05, 1.0, world_size=1)
    plan = plan_buckets(gradient_specs(net), link, strategy="simple")
    assert len(plan.buckets) == 1
    config = SchedulerConfig(
        heartbeat_interval_s=0.0, heartbeat_every=0, allow_single_rank=True, warmup_steps=WARMUP
    )
    found = {"plain": calls_of(net(x).backward), "plain forward": calls_of(lambda: net(x))}
    with GradientScheduler(net, config=config, link=link, plan=plan) as scheduler:
        assert scheduler.plan.hash == plan.hash
        for step in range(WARMUP):
            found["learning"] = calls_of(net(x).backward)
            assert set(scheduler._reducer.last_ready) == {name for name, _ in net.named_parameters()}
            scheduler.step_end(step)
        assert scheduler.stats()["plan_source"] == "measured"
        net(x).backward()
        scheduler.step_end()
        for _ in range(3):
            with scheduler.no_sync():
                found["no_sync"] = calls_of(net(x).backward)
        found["forward"] = calls_of(lambda: net(x))
        found["synced"] = calls_of(net(x).backward)
        assert scheduler._reducer.last_ready == {}
    found["closed"] = calls_of(net(x).backward)
    return found


def both_models(rank: int, world_size: int) -> dict[str, dict[str, int]]:
    small, large = one_model(SMALL), one_model(LARGE)
    return {
        kind: {what: large[kind][what] - small[kind][what] for what in large[kind] | small[kind]}
        for kind in large
    }


@pytest.fixture(scope="module")
def growth() -> dict[str, dict[str, int]]:
    """Further calls of the larger model, which has 40 parameters more."""
    (found,) = run_ranks(both_models, 1)
    assert found is not None
    return found


def test_a_backward_inside_no_sync_calls_one_function_per_gradient(growth: dict[str, dict[str, int]]) -> None:
    assert growth["plain"]["python"] == 0
    assert growth["no_sync"]["python"] == LARGE - SMALL
    assert growth["no_sync"]["hook"] == LARGE - SMALL
    assert growth["no_sync"].get("clock", 0) == 0


def test_a_synchronised_backward_calls_two_functions_per_gradient_and_no_clock(
    growth: dict[str, dict[str, int]],
) -> None:
    assert growth["synced"]["python"] == 2 * (LARGE - SMALL)
    assert growth["synced"]["fired"] == LARGE - SMALL
    assert growth["synced"].get("clock", 0) == 0


def test_gradients_are_timed_one_by_one_only_while_the_plan_is_learned(
    growth: dict[str, dict[str, int]],
) -> None:
    assert growth["learning"]["clock"] == LARGE - SMALL
    assert growth["learning"]["note"] == LARGE - SMALL


def test_a_forward_calls_nothing_per_parameter(growth: dict[str, dict[str, int]]) -> None:
    assert growth["forward"]["python"] == growth["plain forward"]["python"]


def test_a_closed_scheduler_leaves_nothing_behind(growth: dict[str, dict[str, int]]) -> None:
    assert growth["closed"]["python"] == 0


def without_a_group(rank: int, world_size: int) -> tuple[int, int]:
    net, x = Chain(SMALL), torch.ones(2)
    plain = calls_of(net(x).backward)["python"]
    with GradientScheduler(net) as scheduler:
        assert not scheduler.active
        return plain, calls_of(net(x).backward)["python"]


def test_an_inactive_scheduler_adds_no_call() -> None:
    ((plain, inactive),) = run_ranks(without_a_group, 1)
    assert plain == inactive
