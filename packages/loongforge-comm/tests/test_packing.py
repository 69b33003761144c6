"""Gradients into a flat bucket: the grouped way of devices against the plain one, for all kinds of them."""

import pytest
import torch
from loongforge_comm import LinkModel, gradient_specs, plan_buckets
from loongforge_comm.flat import FlatStore
from loongforge_comm.packing import _gather, pack, publish
from torch import nn


def bucket_of(parameters: dict[str, nn.Parameter]) -> FlatStore:
    model = nn.ParameterDict(parameters)
    plan = plan_buckets(gradient_specs(model), LinkModel.from_alpha_beta(0.05, 1.0), strategy="simple")
    assert len(plan.buckets) == 1
    return FlatStore(plan, {name: p.device for name, p in model.items()})


@pytest.mark.parametrize(
    ("dtype", "scale"),
    # A third in bfloat16 is for devices only: on CPU, torch's grouped product rounds the factor as well.
    [(torch.float32, 1.0), (torch.float32, 1 / 3), (torch.bfloat16, 1.0), (torch.bfloat16, 0.5)],
)
def test_grouped_copies_give_the_bits_of_single_ones(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (7,), "c": (4, 2), "d": (6, 3), "e": (2,)}
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }
    plain, grouped = bucket_of(parameters).buckets[0], bucket_of(parameters).buckets[0]
    members = [parameters[name] for name in plain.names]
    for name in ("a", "b", "c"):
        parameters[name].grad = torch.randn(shapes[name], generator=generator).to(dtype)
    parameters["d"].grad = torch.randn(shapes["d"], generator=generator).to(dtype).to_sparse(1)
    values = torch.randn(shapes["e"], generator=generator).to(dtype)
    at = plain.names.index("e")
    for flat in (plain, grouped):
        flat.views[at].copy_(values)
    parameters["e"].grad = plain.views[at]
    assert pack(plain, members, scale=scale, request=False) == []
    parameters["e"].grad = grouped.views[at]
    _gather([p.grad for p in members], grouped.views, scale)
    for one, other in zip(plain.views, grouped.views, strict=True):
        assert torch.equal(one, other)


def test_a_parameter_without_a_gradient_sends_zeros_and_keeps_none_unless_another_rank_had_one() -> None:
    parameters = {name: nn.Parameter(torch.ones(2)) for name in "abc"}
    flat = bucket_of(parameters).buckets[0]
    members = [parameters[name] for name in flat.names]
    parameters["a"].grad = torch.full((2,), 8.0)
    flat.buffer.fill_(5.0)
    missing = pack(flat, members, scale=0.5, request=True)
    assert sorted(flat.names[i] for i in missing) == ["b", "c"]
    shares = dict(zip(flat.names, flat.flags.tolist(), strict=True))
    assert shares == {"a": 0.5, "b": 0.0, "c": 0.0}
    assert flat.control.tolist() == [1.0]
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        publish(flat, members, missing, captured=True)
    flat.flags[flat.names.index("c")] = 0.5  # as the reduction leaves it when the other rank used "c"
    publish(flat, members, missing, captured=False)
    assert parameters["a"].grad.tolist() == [4.0, 4.0]
    assert parameters["b"].grad is None
    assert parameters["c"].grad.tolist() == [0.0, 0.0]
