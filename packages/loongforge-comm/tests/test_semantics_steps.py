"""What a training loop may do around the averaging: two ranks against stock DDP or one process.

All scenarios run in one pair of processes; each is reported as a test of its own.
"""

import copy
import time

import pytest
import torch
from loongforge_comm import (
    DivergentGradientError,
    GradientScheduler,
    LinkModel,
    SchedulerConfig,
)
from loongforge_comm.testing import (
    Scenarios,
    assert_equal_on_ranks,
    assert_same,
    gradients_of,
    quick_scheduler,
    run_ranks,
    seeded_batch,
    tanh_mlp,
    values_of_ranks,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

scenario = Scenarios()


@scenario
def a_block_reused_under_checkpoints_is_averaged_right(rank: int) -> None:
    for reentrant in (False, True):
        model = nn.ModuleDict({"shared": nn.Linear(4, 4), "last": nn.Linear(4, 1)})
        torch.manual_seed(2)
        for p in model.parameters():
            nn.init.normal_(p)
        reference = copy.deepcopy(model)

        def run(m: nn.ModuleDict, x: Tensor, reentrant: bool = reentrant) -> Tensor:
            for _ in range(2):
                x = checkpoint(m["shared"], x, use_reentrant=reentrant)
            return m["last"](x).sum()

        with quick_scheduler(model) as scheduler:
            for step in range(5):
                model.zero_grad()
                reference.zero_grad()
                x = seeded_batch(rank, step, 4).requires_grad_()
                run(model, x).backward()
                for r in range(2):
                    (run(reference, seeded_batch(r, step, 4).requires_grad_()) / 2).backward()
                assert_same(gradients_of(model), gradients_of(reference), 1e-6)
                scheduler.step_end(step)
            assert scheduler.state_dict()["plan"]


class InnerBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):  # type: ignore[no-untyped-def]
        ctx.layer, ctx.x = layer, x.detach()
        return layer(x.detach())

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        out.backward(grad)
        return x.grad, None


class WithInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, *, custom: bool) -> Tensor:
        x = self.first(x)
        x = InnerBackward.apply(x, self.inner) if custom else self.inner(x)
        return self.last(self.inner(x)).sum()


@scenario
def an_inner_backward_is_averaged_right(rank: int) -> None:
    model = WithInner()
    reference = copy.deepcopy(model)
    with quick_scheduler(model) as scheduler:
        for step in range(5):
            model.zero_grad()
            reference.zero_grad()
            model(seeded_batch(rank, step, 4), custom=True).backward()
            for r in range(2):
                (reference(seeded_batch(r, step, 4), custom=False) / 2).backward()
            assert_same(gradients_of(model), gradients_of(reference), 1e-5)
            scheduler.step_end(step)


@scenario
def a_gradient_that_changes_after_its_bucket_left_is_an_error(rank: int) -> None:
    model = nn.ModuleDict({"shared": nn.Linear(4, 4), "last": nn.Linear(4, 1)})
    config = SchedulerConfig(heartbeat_interval_s=0.0, warmup_steps=0)
    with GradientScheduler(model, config=config, link=LinkModel.from_alpha_beta(0.0, 0.001)) as scheduler:

        def run(times: int) -> Tensor:
            x = seeded_batch(rank, 0, 4).requires_grad_()
            for _ in range(times):
                x = checkpoint(model["shared"], x, use_reentrant=True)
            return model["last"](x).sum()

        run(1).backward()
        scheduler.step_end()
        with pytest.raises(DivergentGradientError, match=r"shared\.(weight|bias).*use_reentrant=False"):
            run(2).backward()


@scenario
def replaced_and_cleared_gradients_never_send_stale_data(rank: int) -> None:
    ours = tanh_mlp()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    with quick_scheduler(ours) as scheduler:
        for step in range(8):
            for model in (ours, theirs):
                if step % 4 == 3:
                    for p in model.parameters():
                        p.grad = p.grad.clone()
                        p.grad.zero_()
                elif step % 4 == 2:
                    list(model.parameters())[1].grad = None
                    model.zero_grad(set_to_none=False)
                else:
                    model.zero_grad(set_to_none=step % 2 == 0)
                model(seeded_batch(rank, step)).square().sum().backward()
            assert_same(gradients_of(ours), gradients_of(theirs))
            scheduler.step_end(step)


@scenario
def more_or_fewer_backwards_than_planned_are_safe(rank: int) -> None:
    ours = tanh_mlp()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    with quick_scheduler(ours) as scheduler:
        for step, backwards in enumerate((3, 1, 0, 2)):
            for model in (ours, theirs):
                model.zero_grad()
                for k in range(backwards):
                    model(seeded_batch(rank, 10 * step + k)).square().sum().backward()
            assert_same(gradients_of(ours), gradients_of(theirs), 1e-5)
            scheduler.step_end(step)
        ours.zero_grad()
        loss = ours(seeded_batch(rank, 99)).square().sum()
        loss.backward(retain_graph=True)
        once = gradients_of(ours)
        loss.backward()
        assert_same(gradients_of(ours), [2 * g for g in once], 1e-5)


@scenario
def accumulation_with_no_sync_equals_ddp(rank: int) -> None:
    ours = tanh_mlp()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    with quick_scheduler(ours) as scheduler:
        for step in range(4):
            for model, owner in ((ours, scheduler), (theirs, theirs)):
                model.zero_grad(set_to_none=step % 2 == 0)
                for k in range(2):
                    with owner.no_sync():
                        model(seeded_batch(rank, 10 * step + k)).square().sum().backward()
                model(seeded_batch(rank, 10 * step + 9)).square().sum().backward()
            assert_same(gradients_of(ours), gradients_of(theirs))
            scheduler.step_end(step)


@scenario
def an_overflow_on_one_rank_skips_the_step_on_all(rank: int) -> None:
    model = tanh_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with quick_scheduler(model) as scheduler:
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(
                model(seeded_batch(rank, step)).sum() * (float("inf") if rank == 1 and step == 0 else 1.0)
            ).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step_end(step)
            if step == 0:
                assert not torch.isfinite(norm)
                assert_same([p.detach() for p in model.parameters()], before)
        assert_equal_on_ranks([p.detach().clone() for p in model.parameters()])
        assert values_of_ranks(scaler.get_scale()) == [scaler.get_scale()] * 2
        found = torch.tensor(float(rank))
        scheduler.agree_found_inf(found)
        assert found.item() == 1.0


@scenario
def clipping_after_backward_sees_the_average(rank: int) -> None:
    ours = tanh_mlp()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    with quick_scheduler(ours):
        norms = []
        for model in (ours, theirs):
            model(seeded_batch(rank, 0)).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        assert torch.equal(*norms)


@scenario
def autograd_grad_sends_nothing(rank: int) -> None:
    model = tanh_mlp()
    with quick_scheduler(model) as scheduler:
        model(seeded_batch(rank, 0)).sum().backward()
        count = scheduler.stats()["synced_backwards"]
        x = seeded_batch(rank, 1).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        assert scheduler.stats()["synced_backwards"] == count


@scenario
def reduce_now_keeps_the_tensors_in_grad(rank: int) -> None:
    model = tanh_mlp()
    reference = copy.deepcopy(model)
    with quick_scheduler(model) as scheduler:
        for _ in range(3):
            model.zero_grad()
            with scheduler.no_sync():
                model(seeded_batch(rank, 0)).sum().backward()
            held = [p.grad for p in model.parameters()]
            scheduler.reduce_now()
            assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
        for r in range(2):
            (reference(seeded_batch(r, 0)).sum() / 2).backward()
        assert_same(gradients_of(model), gradients_of(reference), 1e-6)
        scheduler.attach_gradients()
        held = [p.grad for p in model.parameters()]
        with scheduler.no_sync():
            model(seeded_batch(rank, 0)).sum().backward()
        scheduler.reduce_now()
        assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
        assert_same(gradients_of(model), gradients_of(reference), 1e-6)


@scenario
def an_error_inside_backward_before_anything_was_sent_is_forgotten(rank: int) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            msg = "broken"
            raise ValueError(msg)

    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = tanh_mlp()
            self.broken = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            return (Fails.apply(y) if self.broken else y).sum()

    model = Guarded()
    with quick_scheduler(model) as scheduler:
        model(seeded_batch(rank, 0)).backward()
        model.broken = True
        with pytest.raises(ValueError, match="broken"):
            model(seeded_batch(rank, 1)).backward()
        model.broken = False
        model.zero_grad()
        model(seeded_batch(rank, 1)).backward()
        assert_equal_on_ranks(gradients_of(model))
        scheduler.step_end()


@scenario
def a_slow_checkpoint_does_not_count_against_the_bucket_limit(rank: int) -> None:
    model = tanh_mlp()
    with quick_scheduler(model, timeout_s=1.0) as scheduler:
        model(seeded_batch(rank, 0)).sum().backward()
        if rank == 0:
            time.sleep(2.0)
        scheduler.barrier("checkpoint", timeout_s=20.0)
        model(seeded_batch(rank, 1)).sum().backward()


def program(rank: int, world_size: int) -> dict[str, str]:
    return scenario.run(rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str] | None]:
    return run_ranks(program, 2, timeout_s=150.0)


@pytest.mark.parametrize("name", scenario.names)
def test_on_two_ranks(name: str, outcomes: list[dict[str, str] | None]) -> None:
    scenario.check(name, outcomes)
