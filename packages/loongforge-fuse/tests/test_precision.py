"""Precision policies: what is cast, what computes how, float8 of frozen layers, tables and undo."""

import copy

import pytest
import torch
from loongforge_fuse import PrecisionPolicy, PrecisionRule, apply_precision, measure_deviation
from loongforge_fuse.precision.fp8 import Float8FrozenLinear, quantise_rows, scaled_product
from loongforge_fuse.testing import TinyVLA, tiny_batch
from torch import nn


class Tower(nn.Module):
    """A frozen part and a trainable part, with norms, an embedding and an unaligned layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.frozen = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))
        self.odd = nn.Linear(32, 30)
        self.head = nn.Linear(32, 4)
        for part in (self.embedding, self.frozen, self.odd):
            part.requires_grad_(False)

    def forward(self, x):
        return self.head(self.frozen(x + self.embedding(torch.zeros(1, dtype=torch.int64)).to(x.dtype)))


def test_frozen_parameters_are_cast_and_trainable_ones_stay_float32_masters():
    model = Tower()
    names = list(model.state_dict())
    parameters = dict(model.named_parameters())
    applied = apply_precision(model, PrecisionPolicy.mixed_bfloat16())
    assert model.frozen[0].weight.dtype == torch.bfloat16
    assert model.embedding.weight.dtype == torch.bfloat16
    assert model.head.weight.dtype == torch.float32
    assert list(model.state_dict()) == names
    assert all(parameters[n] is p for n, p in model.named_parameters())
    out = model(torch.randn(3, 32))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert model.head.weight.grad.dtype == torch.float32
    applied.undo()
    assert model.frozen[0].weight.dtype == torch.float32
    assert model(torch.randn(3, 32)).dtype == torch.float32


def test_trainable_parameters_are_cast_only_without_masters():
    model = Tower()
    applied = apply_precision(model, PrecisionPolicy.of([PrecisionRule(pattern="head", parameters="bf16")]))
    assert model.head.weight.dtype == torch.float32
    assert "master" in {row.module: row.note for row in applied.rows}["head"]
    rule = PrecisionRule(pattern="head", parameters="bf16", masters=False)
    apply_precision(model, PrecisionPolicy.of([rule]))
    assert model.head.weight.dtype == torch.bfloat16


def test_later_rules_win_and_float32_islands_compute_wide_inside_autocast():
    model = Tower()
    seen = {}
    model.frozen[3].register_forward_hook(lambda m, i, o: seen.update(norm=o.dtype))
    model.frozen[0].register_forward_hook(lambda m, i, o: seen.update(linear=o.dtype))
    policy = PrecisionPolicy.of(
        [
            PrecisionRule(pattern="", compute="bfloat16"),
            PrecisionRule(pattern="frozen.*", compute="bfloat16"),
            PrecisionRule(pattern="frozen.3", compute="float32"),
        ]
    )
    apply_precision(model, policy)
    model(torch.randn(2, 32))
    assert seen == {"linear": torch.bfloat16, "norm": torch.float32}


def test_reductions_are_listed_by_parameter():
    applied = apply_precision(
        Tower(), PrecisionPolicy.of([PrecisionRule(pattern="head", reduction="bfloat16")])
    )
    assert applied.reductions == {"head.weight": torch.bfloat16, "head.bias": torch.bfloat16}


def test_float8_takes_only_frozen_aligned_linears_and_says_why_not():
    model = Tower()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    applied = apply_precision(model, PrecisionPolicy.float8_frozen())
    assert isinstance(model.frozen[0], Float8FrozenLinear)
    assert isinstance(model.head, nn.Linear)
    notes = {row.module: row.note for row in applied.rows if row.note}
    assert "trains" in notes["head"]
    assert "multiples of 16" in notes["odd"]
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict(state)
    assert "refused" in applied.table()
    applied.undo()
    assert isinstance(model.frozen[0], nn.Linear)


def test_float8_error_is_small_and_measured():
    torch.manual_seed(0)
    model = TinyVLA(width=64).eval()
    batch = model.draw(tiny_batch(8, seed=0, width=64))
    before = copy.deepcopy(model.state_dict())
    deviation = measure_deviation(
        model, PrecisionPolicy.float8_frozen(), lambda: model(batch)["loss"], watch=("frozen", "head")
    )
    assert deviation.similarity["frozen"] > 0.999
    assert 0 < deviation.loss_deviation < 0.02
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert isinstance(model.frozen[0], nn.Linear)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_row_scales_follow_the_magnitude(scale):
    torch.manual_seed(0)
    x = torch.randn(16, 64) * scale
    quantised, factor = quantise_rows(x)
    back = quantised.float() * factor
    assert ((back - x).abs() <= x.abs().amax(dim=1, keepdim=True) / 16).all()
    zeros, _ = quantise_rows(torch.zeros(2, 16))
    assert (zeros.float() == 0).all()
    weight, weight_scale = quantise_rows(torch.randn(32, 64))
    product = scaled_product(quantised, factor, weight, weight_scale, None)
    expected = x @ (weight.float() * weight_scale).t()
    assert (product.float() - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_scaled_product_on_the_gpu_equals_the_reference():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 products need compute capability 8.9")
    torch.manual_seed(0)
    x, w = torch.randn(128, 256), torch.randn(64, 256)
    bias = torch.randn(64).bfloat16()
    (a, sa), (b, sb) = quantise_rows(x), quantise_rows(w)
    expected = scaled_product(a, sa, b, sb, bias).float()
    got = scaled_product(a.cuda(), sa.cuda(), b.cuda(), sb.cuda(), bias.cuda()).float().cpu()
    assert (got - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize(
    ("rule", "match"),
    [
        ({"pattern": "x"}, "changes nothing"),
        ({"pattern": "x", "compute": "int8"}, "compute of the rule"),
        ({"pattern": "x", "parameters": "float8"}, "parameters of the rule"),
        ({"pattern": "x", "kind": "conv", "compute": "float32"}, "kind of the rule"),
    ],
)
def test_bad_rules_say_what_is_allowed(rule, match):
    with pytest.raises(ValueError, match=match):
        PrecisionRule(**rule)


def test_policies_are_validated_against_the_model():
    with pytest.raises(ValueError, match="covers no module"):
        apply_precision(Tower(), PrecisionPolicy.of([PrecisionRule(pattern="vision.*", compute="float32")]))
    with pytest.raises(ValueError, match="one switch"):
        apply_precision(Tower(), PrecisionPolicy.of([PrecisionRule(pattern="head", compute="tf32")]))
    with pytest.raises(TypeError, match="linear layers only"):
        apply_precision(Tower(), PrecisionPolicy.of([PrecisionRule(pattern="frozen.3", compute="float8")]))


def test_tf32_is_switched_for_the_process_and_back():
    before = torch.get_float32_matmul_precision()
    applied = apply_precision(Tower(), PrecisionPolicy.of([PrecisionRule(pattern="", compute="tf32")]))
    assert torch.get_float32_matmul_precision() == "high"
    applied.undo()
    assert torch.get_float32_matmul_precision() == before


def test_a_loaded_checkpoint_reaches_the_quantised_copy():
    model = Tower()
    apply_precision(model, PrecisionPolicy.float8_frozen("frozen.*"))
    x = torch.randn(4, 32)
    state = {name: value * 2 + 0.1 for name, value in model.state_dict().items()}
    buffer = model.frozen[0].weight_float8
    model.load_state_dict(state)
    fresh = Tower()
    fresh.load_state_dict(state)
    apply_precision(fresh, PrecisionPolicy.float8_frozen("frozen.*"))
    assert torch.equal(model(x), fresh(x))
    # In place, so that a graph that was recorded before reads the new weights.
    assert model.frozen[0].weight_float8 is buffer


def test_a_float8_layer_says_so_when_a_gradient_should_pass_it():
    model = Tower()
    apply_precision(model, PrecisionPolicy.float8_frozen("frozen.*"))
    with pytest.raises(RuntimeError, match="leave this layer out"):
        model(torch.randn(4, 32, requires_grad=True))
    with torch.no_grad():
        model(torch.randn(4, 32, requires_grad=True))


def test_undo_puts_back_a_forward_that_was_patched_before():
    model = Tower()
    plain = model.head.forward

    def patched(x):
        return plain(x) + 1

    model.head.forward = patched
    x = torch.randn(2, 32)
    expected = model(x)
    applied = apply_precision(model, PrecisionPolicy.of([PrecisionRule(pattern="head", compute="bf16")]))
    assert not torch.equal(model(x).float(), expected)
    applied.undo()
    assert model.head.forward is patched
    assert torch.equal(model(x), expected)
