"""Which gradients are averaged, and to what: two ranks against stock DDP or one process.

All scenarios run in one pair of processes; each is reported as a test of its own.
"""

import copy

import pytest
import torch
from loongforge_comm.testing import (
    Scenarios,
    assert_equal_on_ranks,
    assert_same,
    gradients_of,
    quick_scheduler,
    run_ranks,
    seeded_batch,
    tanh_mlp,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

scenario = Scenarios()


@scenario
def twenty_steps_give_the_weights_of_ddp_bit_for_bit(rank: int) -> None:
    ours = tanh_mlp()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    with quick_scheduler(ours) as scheduler:
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs)]
        for step in range(20):
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                model(seeded_batch(rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step_end(step)
        assert scheduler.stats()["plan_source"] == "measured"
    assert_same([p.detach() for p in ours.parameters()], [p.detach() for p in theirs.parameters()])


@scenario
def a_parameter_used_only_in_an_early_micro_batch_is_averaged(rank: int) -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    with quick_scheduler(model) as scheduler:
        x = torch.full((1, 1), rank + 1.0)
        for _ in range(3):
            model.zero_grad()
            with scheduler.no_sync():
                model["a"](x).sum().backward()
            model["b"](x).sum().backward()
            assert [p.grad.item() for p in model.parameters()] == [1.5, 1.5]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, head: str) -> Tensor:
        return getattr(self, head)(self.trunk(x)).square().mean()


@scenario
def a_parameter_that_no_rank_used_keeps_no_gradient_and_no_optimizer_state(rank: int) -> None:
    ours = TwoHeads()
    theirs = DistributedDataParallel(copy.deepcopy(ours), find_unused_parameters=True)
    with quick_scheduler(ours) as scheduler:
        pair = [(m, torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1)) for m in (ours, theirs)]
        for step in range(5):
            head = "b" if step >= 3 and rank == 0 else "a"
            for model, optimizer in pair:
                model(seeded_batch(rank, step, 4), head).backward()
                if step < 3:
                    assert list(model.parameters())[4].grad is None
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step_end(step)
    assert_same([p.detach() for p in ours.parameters()], [p.detach() for p in theirs.parameters()])


@scenario
def ranks_choosing_different_heads_do_not_stall_and_average_with_zeros(rank: int) -> None:
    ours = TwoHeads()
    theirs = DistributedDataParallel(copy.deepcopy(ours), find_unused_parameters=True)
    with quick_scheduler(ours) as scheduler:
        for step in range(6):
            head = "ab"[(step // 2 + rank) % 2]
            for model in (ours, theirs):
                model.zero_grad()
                model(seeded_batch(rank, step, 4), head).backward()
            assert_same(gradients_of(ours), gradients_of(theirs))
            scheduler.step_end(step)


@scenario
def ranks_with_different_numbers_of_batches_stop_together_or_join(rank: int) -> None:
    model = tanh_mlp()
    batches = [3, 2][rank]
    with quick_scheduler(model, buffers="off") as scheduler:
        done = 0
        while scheduler.agree_continue(has_batch=done < batches):
            model(seeded_batch(rank, done)).sum().backward()
            done += 1
        assert done == 2
        done = 0
        while scheduler.agree_continue(has_batch=done < batches, rule="join"):
            model.zero_grad()
            if done < batches:
                model(seeded_batch(rank, done)).sum().backward()
            else:
                scheduler.shadow_step()
            done += 1
            averaged = gradients_of(model)
        assert done == 3
        model.zero_grad()
        with scheduler.no_sync():
            model(seeded_batch(0, 2)).sum().backward()
        assert_same(averaged, gradients_of(model), 1e-6)


class Counter(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.layer = nn.Linear(1, 1)
        self.register_buffer("c", torch.zeros(1))
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        self.c = self.c + self.rank + 1
        return self.layer(x).sum()


@scenario
def buffers_replaced_by_assignment_follow_rank_zero_like_ddp(rank: int) -> None:
    ours, inner = Counter(rank), Counter(rank)
    theirs = DistributedDataParallel(inner)
    with quick_scheduler(ours) as scheduler:
        for step in range(3):
            ours(torch.ones(1, 1)).backward()
            theirs(torch.ones(1, 1)).backward()
            assert ours.c.item() == inner.c.item()
            scheduler.step_end(step)
        scheduler.sync_buffers()
        assert_equal_on_ranks([ours.c.clone()])


@scenario
def frozen_parameters_and_buffers_are_equal_after_the_start(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    model[1].running_mean.fill_(rank)
    with quick_scheduler(model):
        assert_equal_on_ranks([t.detach().clone() for t in model.state_dict().values()])


@scenario
def tied_weights_are_sent_once_and_averaged_exactly(rank: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x)).logsumexp(-1).mean()

    model = Tied()
    reference = copy.deepcopy(model)
    with quick_scheduler(model) as scheduler:
        assert scheduler.plan.nbytes == 7 * 4 * 4
        for _ in range(3):
            model.zero_grad()
            reference.zero_grad()
            model(torch.tensor([rank, rank + 2])).backward()
            (sum(reference(torch.tensor([r, r + 2])) for r in range(2)) / 2).backward()
            assert_same(gradients_of(model), gradients_of(reference), 1e-6)
        assert model.head.weight is model.embed.weight


def program(rank: int, world_size: int) -> dict[str, str]:
    return scenario.run(rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str] | None]:
    return run_ranks(program, 2, timeout_s=150.0)


@pytest.mark.parametrize("name", scenario.names)
def test_on_two_ranks(name: str, outcomes: list[dict[str, str] | None]) -> None:
    scenario.check(name, outcomes)
