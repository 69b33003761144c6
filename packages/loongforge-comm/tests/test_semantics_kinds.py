"""What kinds of parameters and models may be averaged: two ranks against stock DDP or one process.

All scenarios run in one pair of processes; each is reported as a test of its own.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from loongforge_comm import (
    PlanMismatchError,
)
from loongforge_comm.testing import (
    Scenarios,
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

scenario = Scenarios()


@scenario
def different_models_fail_on_both_ranks_with_the_names(rank: int) -> None:
    with pytest.raises(
        PlanMismatchError, match=r"rank 1 against rank 0.*also has \['2\.0\.bias', '2\.0\.weight'\]"
    ):
        quick_scheduler(tanh_mlp(depth=2 + rank))
    with pytest.raises(PlanMismatchError, match="scheduler settings"):
        quick_scheduler(tanh_mlp(), compress="bf16" if rank else "off")


@scenario
def half_precision_sums_do_not_overflow(rank: int) -> None:
    model = nn.Linear(1, 1, bias=False).half()
    with quick_scheduler(model):
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
    with quick_scheduler(model) as scheduler:
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
    with quick_scheduler(ours) as scheduler:
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
    with quick_scheduler(model) as scheduler:
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
    with quick_scheduler(model, agree_timeout_s=10.0) as scheduler:
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
    with quick_scheduler(ours) as scheduler:
        for step in range(4):
            x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step * 2 + rank))
            for model in (ours, theirs):
                model.zero_grad()
                model(x).backward()
            assert_same(gradients_of(ours), gradients_of(theirs), 1e-6)
            assert ours.conv3.weight.grad.stride() == ours.conv3.weight.stride()
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
    with quick_scheduler(ours, max_bucket_mib=0.0001) as scheduler:
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
    with quick_scheduler(model, local_parameters=("expert.*",)) as scheduler:
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


def program(rank: int, world_size: int) -> dict[str, str]:
    return scenario.run(rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str] | None]:
    return run_ranks(program, 2, timeout_s=150.0)


@pytest.mark.parametrize("name", scenario.names)
def test_on_two_ranks(name: str, outcomes: list[dict[str, str] | None]) -> None:
    scenario.check(name, outcomes)
