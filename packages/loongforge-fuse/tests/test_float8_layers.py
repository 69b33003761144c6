"""Frozen linear layers in float8: inside patched models, with their activations, and as modules."""

from __future__ import annotations

import copy

import pytest
import torch
from loongforge_fuse import PrecisionPolicy, apply_fused_ops, apply_precision, ops
from loongforge_fuse.kernels.simulator.operators import simulated_gpu
from loongforge_fuse.precision.fp8 import Float8FrozenLinear, quantise_rows, scaled_product
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

BF16 = torch.bfloat16


class RMSNorm(nn.RMSNorm):
    """Same name and parts as the norm of a language model."""


class VisionMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class LanguageMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down_proj = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class VisionAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.k_proj, self.v_proj, self.q_proj = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.out_proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        n, p, d = x.shape
        q, k, v = (f(x).view(n, p, 2, 16).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, p, d))


class LanguageAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.grouped = 16, True
        self.q_proj, self.k_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.v_proj, self.o_proj = nn.Linear(32, 16, bias=False), nn.Linear(32, 32, bias=False)
        self.q_norm, self.k_norm = RMSNorm(16, eps=1e-6), RMSNorm(16, eps=1e-6)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        def rotated(t: Tensor) -> Tensor:
            low, high = t.transpose(1, 2).chunk(2, -1)
            return t.transpose(1, 2) * cosines + torch.cat((-high, low), -1) * sines

        b, length, _ = x.shape
        q = rotated(self.q_norm(self.q_proj(x).view(b, length, -1, 16)))
        k = rotated(self.k_norm(self.k_proj(x).view(b, length, -1, 16)))
        v = self.v_proj(x).view(b, length, -1, 16).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(b, length, -1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see, self.mlp = VisionAttention(), VisionMLP()
        self.read, self.gated = LanguageAttention(), LanguageMLP()
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(80, dtype=torch.float32, device=x.device).reshape(5, 16).to(x.dtype) / 9
        x = self.mlp(x + self.see(x))
        return self.gated(x + self.read(x, angles.cos(), angles.sin()))


def fuse(model: nn.Module) -> None:
    report = apply_fused_ops(model, "always")
    assert set(report.counts()) == {"vision_attention", "vision_mlp", "language_attention", "language_mlp"}
    assert not report.left()


def to_float8(model: nn.Module) -> None:
    apply_precision(model, PrecisionPolicy.float8_frozen())
    assert sum(isinstance(m, Float8FrozenLinear) for m in model.modules()) == 13


@pytest.fixture(autouse=True)
def counted():
    """Start every test with empty counters and one seed."""
    ops.reset_op_counters()
    torch.manual_seed(0)


def layer(bias: bool = True) -> tuple[nn.Linear, Float8FrozenLinear]:
    linear = nn.Linear(32, 16, bias=bias).requires_grad_(False)
    return linear, Float8FrozenLinear(linear)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("order", [(fuse, to_float8), (to_float8, fuse)])
def test_a_fused_model_is_as_exact_as_its_float8_layers_one_by_one(order, dtype):
    exact = Model()
    plain, fused = copy.deepcopy(exact).to(dtype), copy.deepcopy(exact).to(dtype)
    to_float8(plain)
    for step in order:
        step(fused)
    errors = {plain: 0.0, fused: 0.0}
    for _ in range(20):
        x = torch.randn(3, 5, 32).to(dtype)
        with torch.no_grad():
            for model in errors:
                assert model(x).dtype == dtype
                errors[model] += float((model(x).float() - exact(x.float())).square().sum())
    assert errors[fused] <= 1.05 * errors[plain]


@pytest.mark.parametrize("order", [(fuse, to_float8), (to_float8, fuse)])
def test_inputs_of_siblings_are_quantised_once_and_activations_with_them(order):
    model = Model().to(BF16)
    for step in order:
        step(model)
    ops.reset_op_counters()
    with simulated_gpu() as launched, torch.no_grad():
        model(torch.randn(3, 5, 32).to(BF16))
    found = [s.options["activation"] for s in launched if s.maker == "quantise_rows"]
    assert found == ["none", "none", "none", "gelu_tanh", "none", "none", "none", "silu_mul"]
    assert not {"gelu_forward", "silu_mul_forward"} & {s.maker for s in launched}
    assert not ops.op_counters()["fallbacks"]


def test_kernels_and_reference_give_the_same_float8_layer():
    _, float8 = layer()
    x = torch.randn(3, 5, 32).to(BF16)
    want = float8(x)
    with simulated_gpu() as launched:
        assert torch.equal(float8(x), want)
        float8.requantise()
    assert [s.options["x"] for s in launched] == ["bf16", "f32"]
    assert torch.equal(float8(x), want)


def test_layers_that_somebody_watches_are_called_as_modules():
    model = Model().to(BF16)
    to_float8(model)
    fuse(model)
    x, seen = torch.randn(3, 5, 32).to(BF16), []
    with torch.no_grad():
        want = model(x)
        for name in ("mlp.fc2", "gated.up_proj", "gated.down_proj", "see.k_proj", "read.v_proj"):
            model.get_submodule(name).register_forward_hook(lambda m, i, o, name=name: seen.append(name))
        assert torch.equal(model(x), want)
    assert seen == ["see.k_proj", "mlp.fc2", "read.v_proj", "gated.up_proj", "gated.down_proj"]


def test_a_gradient_that_should_pass_a_fused_layer_is_an_error():
    model = Model()
    to_float8(model)
    fuse(model)
    x = torch.randn(3, 5, 32, requires_grad=True)
    for part in (model.mlp, model.gated):
        with pytest.raises(RuntimeError, match="leave this layer out"):
            part(x)


def test_the_bias_is_cast_once_and_follows_checkpoint_and_requantise():
    linear, float8 = layer()
    bias = float8.bias_bfloat16
    assert bias is not None
    assert bias.dtype == BF16
    x = torch.randn(4, 32)
    float8(x)
    assert float8.bias_bfloat16 is bias
    state = {name: value + 1 for name, value in float8.state_dict().items()}
    assert set(state) == {"weight", "bias"}
    before = float8(x)
    float8.load_state_dict(state)
    assert float8.bias_bfloat16 is bias
    assert torch.equal(bias, linear.bias.to(BF16))
    assert not torch.equal(float8(x), before)
    with torch.no_grad():
        linear.bias.zero_()
    float8.requantise()
    assert not bias.any()
    assert layer(bias=False)[1].bias_bfloat16 is None


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_a_cast_of_the_model_leaves_the_quantised_copies_what_they_are(dtype):
    linear, float8 = layer()
    float8.to(dtype)
    assert float8.weight.dtype == dtype
    assert float8.weight_float8.dtype == torch.float8_e4m3fn
    assert float8.weight_scale.dtype == torch.float32
    assert float8.bias_bfloat16.dtype == BF16
    x = torch.randn(3, 32).to(dtype)
    want = scaled_product(*quantise_rows(x), *quantise_rows(linear.weight.to(dtype)), linear.bias.to(BF16))
    assert torch.equal(float8(x), want.to(dtype))


def test_shapes_types_and_compiled_code():
    _, float8 = layer()
    for shape in ((32,), (0, 32), (2, 0, 32), (2, 3, 32)):
        x = torch.randn(shape).to(BF16)
        assert float8(x).shape == (*shape[:-1], 16)
        assert float8(x).dtype == BF16
    x = torch.randn(2, 3, 32)
    with torch.autocast("cpu", dtype=BF16):
        assert float8(x).dtype == BF16
    turned = torch.randn(3, 32, 2).to(BF16).transpose(1, 2)
    assert torch.equal(float8(turned), float8(turned.contiguous()))
    compiled = torch.compile(float8, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), float8(x))


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_what_the_scaled_product_is_given_is_what_torch_demands(rows):
    with FakeTensorMode():
        x = torch.empty(rows, 1152, dtype=BF16, device="cuda")
        weight = torch.empty(4304, 1152, dtype=torch.float32, device="cuda")
        bias = torch.empty(4304, dtype=BF16, device="cuda")
        product = scaled_product(*quantise_rows(x), *quantise_rows(weight), bias)
        assert product.shape == (rows, 4304)
        assert product.dtype == BF16


def test_a_gpu_without_float8_products_is_counted():
    _, float8 = layer()
    x = torch.randn(2, 32)
    want = float8(x)
    float8._missing = "float8 needs compute capability 8.9, this GPU has 8.0"
    assert torch.equal(float8(x), want)
    assert ops.op_counters()["fallbacks"] == {
        "scaled_product: float8 needs compute capability 8.9, this GPU has 8.0": 1
    }


def test_a_fused_float8_model_compiles_without_a_break():
    model = Model().to(BF16)
    fuse(model)
    to_float8(model)
    x = torch.randn(3, 5, 32).to(BF16)
    with torch.no_grad():
        want = model(x)
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), want)


def test_a_float8_layer_that_was_unfrozen_says_so_instead_of_leaving_its_weight_untrained():
    layer = Float8FrozenLinear(nn.Linear(32, 48).requires_grad_(False))
    layer.requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires a gradient now"):
        layer(torch.randn(2, 32))
    with torch.no_grad():
        layer(torch.randn(2, 32))
