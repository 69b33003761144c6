"""What a training loop may do around the averaging: two ranks against stock DDP or one process.

All scenarios run in one pair of processes; each is reported as a test of its own.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from loongforge_comm import (
    DivergentGradientError,
    GradientScheduler,
    LinkModel,
    PlanMismatchError,
    SchedulerConfig,
)
from loongforge_comm.testing import (
    Scenarios,
    assert_same,
    gradients_of,
    run_ranks,
    seeded_batch,
    tanh_mlp,
    values_of_ranks,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

LINK = LinkModel.from_alpha_beta(0.01, 1.0)
scenario = Scenarios()


def make(model: nn.Module, **settings: object) -> GradientScheduler:
    base = {"heartbeat_interval_s": 0.0, "warmup_steps": 2, "timeout_s": 20.0, "agree_timeout_s": 20.0}
    return GradientScheduler(model, config=SchedulerConfig(**{**base, **settings}), link=LINK)


def assert_equal_on_ranks(tensors: list[Tensor | None]) -> None:
    left, right = values_of_ranks(tensors)
    assert_same(left, right)


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

        with make(model) as scheduler:
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
    with make(model) as scheduler:
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
    with make(ours) as scheduler:
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
def different_models_fail_on_both_ranks_with_the_names(rank: int) -> None:
    with pytest.raises(
        PlanMismatchError, match=r"rank 1 against rank 0.*also has \['2\.0\.bias', '2\.0\.weight'\]"
    ):
        make(tanh_mlp(depth=2 + rank))
    with pytest.raises(PlanMismatchError, match="scheduler settings"):
        make(tanh_mlp(), compress="bf16" if rank else "off")


@scenario
def half_precision_sums_do_not_overflow(rank: int) -> None:
    model = nn.Linear(1, 1, bias=False).half()
    with make(model):
        for _ in range(3):
            model.zero_grad()
            (model.weight * torch.tensor(40000.0, dtype=torch.float16)).sum().backward()
            assert model.weight.grad.item() == 40000.0


@scenario
def many_dtypes_complex_and_empty_parameters_share_one_model(rank: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64)):
                self.register_parameter(f"p{i}", nn.Parameter(torch.ones(3, dtype=dtype)))
            self.z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.register_buffer("mask", torch.tensor([True, False]))

        def forward(self, k: float) -> Tensor:
            real = sum((p.float() * k).sum() for p in (self.p0, self.p1, self.p2, self.p3))
            return real + (self.z * complex(k, 1)).real.sum() + self.empty.sum() + self.scalar * k

    model = Mixed()
    with make(model) as scheduler:
        for step in range(4):
            model.zero_grad()
            model(float(rank + 1)).backward()
            for p in (model.p0, model.p1, model.p2, model.p3, model.scalar):
                assert torch.equal(p.grad, torch.full_like(p, 1.5))
            assert torch.equal(model.z.grad, torch.full_like(model.z, complex(1.5, -1)))
            assert model.empty.grad.shape == (0, 3)
            scheduler.step_end(step)


@scenario
def a_sparse_embedding_may_be_empty_on_one_rank(rank: int) -> None:
    ours = nn.Sequential(nn.Embedding(4, 2, padding_idx=0, sparse=True), nn.Linear(2, 1))
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    with make(ours) as scheduler:
        for step in range(3):
            tokens = torch.tensor([[0, 0]] if rank == 0 else [[1 + step % 2, 3]])
            for model in (ours, theirs):
                model.zero_grad()
                model(tokens).sum().backward()
            left, right = ours[0].weight.grad, theirs.module[0].weight.grad
            assert left.is_sparse
            assert torch.equal(left.to_dense(), right.to_dense())
            scheduler.step_end(step)


@scenario
def parameters_may_be_frozen_and_unfrozen_between_steps(rank: int) -> None:
    model = tanh_mlp()
    reference = copy.deepcopy(model)
    with make(model) as scheduler:
        for step in range(7):
            if step in (2, 4):
                for m in (model, reference):
                    m[0].requires_grad_(step == 4)
            model.zero_grad()
            reference.zero_grad()
            model(seeded_batch(rank, step)).square().sum().backward()
            for r in range(2):
                (reference(seeded_batch(r, step)).square().sum() / 2).backward()
            assert_same(gradients_of(model), gradients_of(reference), 1e-5)
            scheduler.step_end(step)
        assert scheduler.stats()["rebuilds"] == 3


@scenario
def freezing_on_one_rank_only_is_refused_by_name(rank: int) -> None:
    model = tanh_mlp()
    with make(model, agree_timeout_s=10.0) as scheduler:
        model(seeded_batch(rank, 0)).sum().backward()
        scheduler.step_end()
        model[rank].requires_grad_(False)
        with pytest.raises(PlanMismatchError, match="set of trainable parameters"):
            model(seeded_batch(rank, 1))


@scenario
def any_strides_give_the_right_values(rank: int) -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.conv1 = nn.Conv2d(3, 4, 1)
            self.conv3 = nn.Conv2d(4, 4, 3, padding=1)
            self.wide = nn.Parameter(torch.randn(6, 4).t())
            self.to(memory_format=torch.channels_last)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv3(self.conv1(x)).mean((2, 3))
            return (y @ self.wide).transpose(0, 1).reshape(-1).square().sum()

    ours = Strided()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    with make(ours) as scheduler:
        for step in range(4):
            x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step * 2 + rank))
            for model in (ours, theirs):
                model.zero_grad()
                model(x).backward()
            assert_same(gradients_of(ours), gradients_of(theirs), 1e-6)
            assert ours.conv3.weight.grad.stride() == ours.conv3.weight.stride()
            scheduler.step_end(step)


@scenario
def more_or_fewer_backwards_than_planned_are_safe(rank: int) -> None:
    ours = tanh_mlp()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    with make(ours) as scheduler:
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
    with make(ours) as scheduler:
        for step in range(4):
            for model, owner in ((ours, scheduler), (theirs, theirs)):
                model.zero_grad(set_to_none=step % 2 == 0)
                for k in range(2):
                    with owner.no_sync():
                        model(seeded_batch(rank, 10 * step + k)).square().sum().backward()
                model(seeded_batch(rank, 10 * step + 9)).square().sum().backward()
            assert_same(gradients_of(ours), gradients_of(theirs))
            scheduler.step_end(step)


class SumInBackward(torch.autograd.Function):
    """A collective of the model itself inside backward, as synchronised batch norm has."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / 2


@scenario
def collectives_of_the_model_inside_backward_do_not_mix_with_ours(rank: int) -> None:
    class Synced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = tanh_mlp(depth=5)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = SumInBackward.apply(layer(x))
            return x.square().sum()

    ours = Synced()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    with make(ours, max_bucket_mib=0.0001) as scheduler:
        for step in range(5):
            for model in (ours, theirs):
                model.zero_grad()
                model(seeded_batch(rank, step)).backward()
            assert_same(gradients_of(ours), gradients_of(theirs), 1e-6)
            scheduler.step_end(step)


@scenario
def local_parameters_stay_per_rank_and_can_be_gathered(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.ModuleDict({"shared": nn.Linear(3, 3), "expert": nn.Linear(3, 1)})
    with make(model, local_parameters=("expert.*",)) as scheduler:
        shared = values_of_ranks(model["shared"].weight.detach().clone())
        experts = values_of_ranks(model["expert"].weight.detach().clone())
        assert torch.equal(*shared)
        assert not torch.equal(*experts)
        model["expert"](model["shared"](seeded_batch(rank, 0, 3))).sum().backward()
        assert torch.equal(*values_of_ranks(model["shared"].weight.grad.clone()))
        assert not torch.equal(*values_of_ranks(model["expert"].weight.grad.clone()))
        gathered = scheduler.gather_local()
        assert set(gathered) == {"expert.weight", "expert.bias"}
        assert all(torch.equal(a, b) for a, b in zip(gathered["expert.weight"], experts, strict=True))


@scenario
def an_overflow_on_one_rank_skips_the_step_on_all(rank: int) -> None:
    model = tanh_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with make(model) as scheduler:
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
    with make(ours):
        norms = []
        for model in (ours, theirs):
            model(seeded_batch(rank, 0)).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        assert torch.equal(*norms)


@scenario
def autograd_grad_sends_nothing(rank: int) -> None:
    model = tanh_mlp()
    with make(model) as scheduler:
        model(seeded_batch(rank, 0)).sum().backward()
        count = scheduler.stats()["synced_backwards"]
        x = seeded_batch(rank, 1).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        assert scheduler.stats()["synced_backwards"] == count


@scenario
def reduce_now_keeps_the_tensors_in_grad(rank: int) -> None:
    model = tanh_mlp()
    reference = copy.deepcopy(model)
    with make(model) as scheduler:
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
    with make(model) as scheduler:
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
    with make(model, timeout_s=1.0) as scheduler:
        model(seeded_batch(rank, 0)).sum().backward()
        if rank == 0:
            torch.futures.Future()
            import time

            time.sleep(2.0)
        scheduler.barrier("checkpoint", timeout_s=20.0)
        model(seeded_batch(rank, 1)).sum().backward()


def program(rank: int, world_size: int) -> dict[str, str]:
    return scenario.run(rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(program, 2, timeout_s=150.0)


@pytest.mark.parametrize("name", scenario.names)
def test_on_two_ranks(name: str, outcomes: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert not outcome[name], f"rank {rank}\n{outcome[name]}"
