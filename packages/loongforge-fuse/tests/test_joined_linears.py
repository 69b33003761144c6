"""Sibling linear layers as one product: the same numbers, gradients and names, fewer products."""

import copy

import pytest
import torch
from loongforge_fuse import GraphConfig, GraphRunner, join_linears
from loongforge_fuse.ops.beside import WeightGradients
from loongforge_fuse.testing import TinyVLA, tiny_batch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode


class Attention(nn.Module):
    def __init__(self, width=16, memory=16, bias=True):
        super().__init__()
        self.to_k = nn.Linear(memory, width, bias=bias)
        self.to_q = nn.Linear(width, width, bias=bias)
        self.to_v = nn.Linear(memory, width, bias=bias)

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        q, k, v = (f(y).unflatten(-1, (2, -1)).transpose(-2, -3) for f, y in self.pairs(x, memory))
        return functional.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)

    def pairs(self, x, memory):
        return ((self.to_q, x), (self.to_k, memory), (self.to_v, memory))


class Gated(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.gate_proj = nn.Linear(width, 24, bias=False)
        self.up_proj = nn.Linear(width, 24, bias=False)
        self.down_proj = nn.Linear(24, width, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    """Self-attention, cross-attention over a wider memory, a gated MLP, and a frozen attention first."""

    def __init__(self):
        super().__init__()
        self.frozen = Attention().requires_grad_(False)
        self.own, self.cross, self.mlp = Attention(), Attention(memory=20, bias=False), Gated()

    def forward(self, x, memory):
        x = x + self.own(self.frozen(x))
        return self.mlp(x + self.cross(x, memory))


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in {"aten::mm", "aten::addmm"}
        return func(*args, **(kwargs or {}))


def pair(dtype=torch.float32):
    torch.manual_seed(0)
    model = Model().to(dtype)
    return model, copy.deepcopy(model)


def inputs(dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(3, 5, 16, generator=generator).to(dtype),
        torch.randn(3, 7, 20, generator=generator).to(dtype).requires_grad_(),
    )


def assert_same(ours, theirs, *, forward_of=None, tolerance=1e-5):
    one, other = inputs(), inputs()
    run = ours if forward_of is None else forward_of
    got, expected = run(*one), theirs(*other)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    got.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(one[1].grad, other[1].grad, rtol=tolerance, atol=tolerance)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance, msg=name)


def test_numbers_and_gradients_are_the_same_with_fewer_products():
    ours, theirs = pair()
    report = join_linears(ours)
    assert report.groups == {
        "frozen": ("to_q", "to_k", "to_v"),
        "own": ("to_q", "to_k", "to_v"),
        "cross": ("to_k", "to_v"),
        "mlp": ("gate_proj", "up_proj"),
    }
    assert report.products_saved == 6
    assert_same(ours, theirs)
    assert report.counters == {"joined": 4}
    with Products() as joined, torch.no_grad():
        ours(*inputs())
    with Products() as plain, torch.no_grad():
        theirs(*inputs())
    assert plain.count - joined.count == 6


def test_training_goes_on_alike_and_the_state_dict_keeps_its_names():
    ours, theirs = pair()
    join_linears(ours)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    optimizers = [
        torch.optim.SGD((p for p in m.parameters() if p.requires_grad), lr=1e-3) for m in (ours, theirs)
    ]
    for step in range(5):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(*inputs(seed=step)).square().sum().backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    # A checkpoint is loaded in place, through the parameters.
    ours.load_state_dict({name: value * 0.5 for name, value in theirs.state_dict().items()})
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(0.5)
    ours.zero_grad()
    theirs.zero_grad()
    assert_same(ours, theirs)


@pytest.mark.parametrize("how", ["cast", "data", "assign"])
def test_a_weight_that_left_the_buffer_is_noticed(how):
    ours, _ = pair()
    report = join_linears(ours)
    if how == "cast":
        ours.double()
    elif how == "data":
        ours.own.to_v.weight.data = ours.own.to_v.weight.data * 2
    else:
        ours.load_state_dict({n: v * 2 for n, v in ours.state_dict().items()}, assign=True)
    assert not report.intact()
    dtype = next(ours.parameters()).dtype
    expected = copy.deepcopy(ours)
    torch.testing.assert_close(ours(*inputs(dtype)), expected(*inputs(dtype)))
    assert report.counters["weights_moved"] > 0


def test_a_copy_uses_its_own_weights():
    ours, _ = pair()
    join_linears(ours)
    other = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(0.5)
        expected = other(*inputs())
        for module in other.modules():
            module.__dict__.pop("forward", None)
        assert torch.equal(expected, other(*inputs()))
        assert not torch.equal(expected, ours(*inputs()))


def test_siblings_that_read_something_else_are_computed_apart_after_a_few_calls():
    ours = Attention(width=16, memory=16)
    theirs = copy.deepcopy(ours)
    report = join_linears(ours)
    x, memory = torch.randn(2, 3, 16), torch.randn(2, 4, 16)
    for _ in range(6):
        torch.testing.assert_close(ours(x, memory), theirs(x, memory))
    assert report.counters["inputs_differ"] == 3


def test_compiled_regions_give_the_same_numbers():
    ours, theirs = pair()
    join_linears(ours)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        ours.zero_grad()
        theirs.zero_grad()
        assert_same(ours, theirs, forward_of=compiled)


def test_autocast_keeps_float32_masters():
    ours, theirs = pair()
    join_linears(ours)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = (m(*inputs()) for m in (ours, theirs))
    torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)
    got.float().square().sum().backward()
    assert ours.own.to_q.weight.grad.dtype == torch.float32


def test_undo_gives_plain_layers_with_memory_of_their_own():
    ours, theirs = pair()
    report = join_linears(ours)
    report.undo()
    assert not report.groups
    assert all("forward" not in module.__dict__ for module in ours.modules())
    assert len({p.untyped_storage().data_ptr() for p in ours.parameters()}) == len(list(ours.parameters()))
    assert_same(ours, theirs)


def test_what_cannot_be_joined_is_named():
    class Hooked(Attention):
        pass

    hooked, mixed, patched = Hooked(), Attention(), Attention()
    hooked.to_v.register_forward_hook(lambda *_: None)
    mixed.to_k.requires_grad_(False)
    mixed.to_v.weight.requires_grad_(False)
    patched.to_v.forward = patched.to_v.forward
    report = join_linears(nn.ModuleDict({"hooked": hooked, "mixed": mixed, "patched": patched}))
    assert not report.groups
    assert "hooks" in report.left["hooked"]
    assert "train" in report.left["mixed"]
    assert "patched" in report.left["patched"]
    assert join_linears(nn.ModuleDict({"a": Attention()}), frozen_only=True).left == {"a": "they train"}


def test_layers_frozen_after_joining_leave_the_others_their_gradients():
    ours, theirs = pair()
    join_linears(ours)
    for model in (ours, theirs):
        model.own.to_k.weight.requires_grad_(False)
        model.own.to_q.bias.requires_grad_(False)
    assert_same(ours, theirs)


def both(**options):
    torch.manual_seed(0)
    plain = Attention(**options)
    joined = copy.deepcopy(plain)
    join_linears(joined)
    return joined, plain


def same_gradients(joined, plain):
    for (name, p), q in zip(joined.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize(
    "frozen", [("to_q.weight", "to_q.bias"), ("to_q.weight", "to_k.weight", "to_v.weight")]
)
def test_what_trains_gets_its_gradient_where_the_first_weight_was_frozen_and_the_input_needs_none(frozen):
    models, x = both(), torch.randn(2, 3, 16)
    for model in models:
        for name in frozen:
            model.get_parameter(name).requires_grad_(requires_grad=False)
        model(x).square().sum().backward()
    same_gradients(*models)


def test_a_result_is_not_handed_out_when_input_weight_or_mode_changed_since():
    models = both()

    def changed_input(model):
        x = torch.ones(2, 16)
        model.to_q(x)
        x.mul_(2)
        return model.to_k(x)

    def changed_weight(model):
        x = torch.ones(2, 16)
        model.to_q(x)
        with torch.no_grad():
            model.to_k.weight.add_(1)
        return model.to_k(x)

    def without_gradient(model):
        x = torch.ones(2, 16)
        with torch.no_grad():
            q = model.to_q(x)
        return q * model.to_k(x)

    def autocast(model):
        x = torch.ones(2, 16)
        q = model.to_q(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return q + model.to_k(x)

    for use in (changed_input, changed_weight, without_gradient, autocast):
        ours, theirs = (use(model) for model in models)
        assert torch.allclose(ours, theirs, atol=1e-5), use
        assert ours.requires_grad, use
        for model, result in zip(models, (ours, theirs), strict=True):
            model.zero_grad()
            result.float().sum().backward()
        same_gradients(*models)


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_that_were_replaced_are_the_ones_that_are_read_and_trained(compiled):
    models, x = both(), torch.randn(2, 3, 16)
    for model, again in zip(models, (True, False), strict=True):
        run = torch.compile(model, backend="aot_eager") if compiled and again else model
        run(x)
        # Over the same memory, and over other memory.
        model.to_k.weight = nn.Parameter(model.to_k.weight.data)
        run(x).square().sum().backward()
        model.to_v.weight = nn.Parameter(model.to_v.weight.detach() * 2)
        run(x).square().sum().backward()
    same_gradients(*models)


def test_joined_layers_work_under_transforms():
    models, x = both(), torch.randn(2, 3, 16)
    found = []
    for model in models:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        loss = lambda w, model=model: torch.func.functional_call(model, w, (x,)).square().sum()  # noqa: E731
        found.append(torch.func.grad(loss)(weights))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])


def test_weight_gradients_of_a_joined_product_can_be_late():
    ours, theirs = pair()
    join_linears(ours)
    late = WeightGradients(torch.device("cpu"))
    with late.collecting(ours):
        ours(*inputs()).square().sum().backward()
        assert ours.own.to_q.weight.grad is None
        assert ours.mlp.down_proj.weight.grad is not None
    assert late.taken == 6 + 2 + 2
    theirs(*inputs()).square().sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)


def test_a_graph_replays_joined_layers():
    class Joined(TinyVLA):
        def __init__(self):
            super().__init__()
            self.mlp = Gated(5)
            self.mlp.down_proj = nn.Linear(24, 5, bias=False)

        def forward(self, batch):
            return super().forward({**batch, "noise": batch["noise"] + self.mlp(batch["action"])})

    torch.manual_seed(0)
    ours = Joined()
    theirs = copy.deepcopy(ours)
    assert join_linears(ours).groups == {"mlp": ("gate_proj", "up_proj")}
    runner = GraphRunner(ours, GraphConfig(mode="emulated", warmup_steps=1))
    for seed in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        batch = ours.draw(tiny_batch(2, seed=seed), generator=torch.Generator().manual_seed(seed))
        result = runner.run(batch)
        out = theirs(batch)
        (out["loss_sum"].sum() / out["loss_count"].sum()).backward()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
    assert result.graph
