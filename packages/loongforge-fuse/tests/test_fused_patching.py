"""apply_fused_ops: what it swaps, what it leaves and why, equal numbers, unchanged state, undo."""

from __future__ import annotations

import copy

import pytest
import torch
from loongforge_fuse import PatchPolicy, apply_fused_ops, join_linears, register_pattern
from loongforge_fuse.patching import Pattern, registry
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """Same name and parts as the norm of a language model."""


class VisionMLP(nn.Module):
    def __init__(self, width: int, activation: str = "tanh") -> None:
        super().__init__()
        self.fc1, self.fc2, self.kind = nn.Linear(width, 32), nn.Linear(32, width), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate=self.kind))


class LanguageMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 32, bias=False), nn.Linear(width, 32, bias=False)
        self.down_proj = nn.Linear(32, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AdaLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.linear(time)[:, None].chunk(2, -1)
        return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class DiTAttention(nn.Module):
    def __init__(self, width: int, memory: int, p: float) -> None:
        super().__init__()
        self.heads = 2
        self.to_q, self.to_k, self.to_v = (
            nn.Linear(width, width),
            nn.Linear(memory, width),
            nn.Linear(memory, width),
        )
        self.to_out = nn.ModuleList([nn.Linear(width, width), nn.Dropout(p)])

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (
            f(t).unflatten(-1, (2, -1)).transpose(1, 2)
            for f, t in ((self.to_q, x), (self.to_k, memory), (self.to_v, memory))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.to_out[1](self.to_out[0](mixed.transpose(1, 2).flatten(2)))


class GeluProjection(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.net = nn.ModuleList(
            [GeluProjection(width), nn.Dropout(p), nn.Linear(4 * width, width), nn.Dropout(p)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.net:
            x = part(x)
        return x


class DiTBlock(nn.Module):
    def __init__(self, width: int, memory: int | None, p: float = 0.2) -> None:
        super().__init__()
        self.norm1, self.attn1 = AdaLayerNorm(width), DiTAttention(width, memory or width, p)
        self.ff, self.final_dropout = FeedForward(width, p), nn.Dropout(p)

    def forward(self, x: Tensor, time: Tensor, memory: Tensor | None, bias: Tensor | None) -> Tensor:
        y = self.norm1(x, time)
        x = x + self.final_dropout(self.attn1(y, y if memory is None else memory, bias))
        return x + self.ff(F.layer_norm(x, x.shape[-1:]))


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.rms = nn.LayerNorm(width), RMSNorm(width, eps=1e-6)
        self.mlp, self.gated = VisionMLP(width), LanguageMLP(width)
        self.block, self.cross = DiTBlock(width, None), DiTBlock(width, 24)

    def forward(self, x: Tensor, time: Tensor, memory: Tensor) -> Tensor:
        x = self.gated(self.rms(x + self.mlp(self.norm(x))))
        return self.cross(self.block(x, time, None, None), time, memory, None)


@pytest.fixture
def setup():
    torch.manual_seed(0)
    return Model(), (torch.randn(3, 5, 16), torch.randn(3, 16), torch.randn(3, 7, 24))


def result(model, inputs):
    model.zero_grad()
    out = model(*inputs)
    out.square().sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def test_a_fused_block_keeps_the_joined_product_of_its_attention(setup):
    model, inputs = setup
    model.eval()
    before = result(model, inputs)
    joined = join_linears(model, [("to_q", "to_k", "to_v"), ("to_k", "to_v")])
    assert joined.products_saved == 3
    assert apply_fused_ops(model, PatchPolicy(mode="always", include=("block", "cross"))).patched
    joined.counters.clear()
    after = result(model, inputs)
    assert joined.counters == {"joined": 2}
    assert torch.allclose(before[0], after[0], rtol=1e-5, atol=1e-5)
    for name, grad in before[1].items():
        torch.testing.assert_close(after[1][name], grad, rtol=1e-4, atol=1e-4, msg=name)


def test_patched_model_gives_the_same_numbers_gradients_and_state(setup):
    model, inputs = setup
    model.eval()
    names, before = list(model.state_dict()), result(model, inputs)
    report = apply_fused_ops(model, "always")
    after = result(model, inputs)
    assert report.counts() == {
        "layer_norm": 1, "rms_norm": 1, "vision_mlp": 1, "language_mlp": 1, "dit_block": 2,
    }  # fmt: skip
    assert list(model.state_dict()) == names
    assert torch.allclose(before[0], after[0], rtol=1e-5, atol=1e-5)
    for name, grad in before[1].items():
        scale = float(grad.abs().max())
        assert float((after[1][name] - grad).abs().max()) <= 1e-4 * scale + 2e-5, name


def test_undo_restores_the_exact_forwards(setup):
    model, inputs = setup
    model.eval()
    before = result(model, inputs)[0]
    report = apply_fused_ops(model, "always")
    report.undo()
    report.undo()
    assert report.patched == 0
    assert torch.equal(result(model, inputs)[0], before)
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_off_changes_nothing_and_a_second_call_patches_nothing_twice(setup):
    model, _ = setup
    assert apply_fused_ops(model, "off").records == []
    assert apply_fused_ops(model, "always").patched == 6
    assert apply_fused_ops(model, "always").patched == 0


def test_auto_runs_the_original_on_the_cpu(setup):
    model, inputs = setup
    model.eval()
    before = result(model, inputs)[0]
    apply_fused_ops(model, "auto")
    assert torch.equal(result(model, inputs)[0], before)


def test_a_module_that_computes_something_else_is_left_with_the_difference(setup):
    model, _ = setup
    model.mlp = VisionMLP(16, activation="none")
    report = apply_fused_ops(model, "always")
    assert "vision_mlp" not in report.counts()
    assert any("differs from the original" in reason for reason in report.left())
    assert "left 1 x vision_mlp" in report.explain()


def test_hooks_inside_a_block_keep_it_unfused(setup):
    model, _ = setup
    model.block.final_dropout.register_forward_hook(lambda *_: None)
    report = apply_fused_ops(model, "always")
    assert report.counts()["dit_block"] == 1
    assert "dit_block: final_dropout has hooks, which a fused block would not call" in report.left()


def test_policy_selects_names_and_patterns(setup):
    model, _ = setup
    assert apply_fused_ops(model, PatchPolicy(mode="always", include=("block",))).counts() == {"dit_block": 1}
    assert apply_fused_ops(model, PatchPolicy(mode="always", kinds=("rms_norm",))).counts() == {"rms_norm": 1}
    with pytest.raises(ValueError, match="unknown pattern nothing"):
        apply_fused_ops(model, PatchPolicy(kinds=("nothing",)))
    with pytest.raises(ValueError, match="policy mode must be one of"):
        apply_fused_ops(model, "sometimes")


def test_dropout_follows_the_seed_and_keeps_its_share(setup):
    model, inputs = setup
    apply_fused_ops(model, "always")
    model.train()
    torch.manual_seed(1)
    first = model(*inputs)
    second = model(*inputs)
    torch.manual_seed(1)
    assert torch.equal(model(*inputs), first)
    assert not torch.equal(second, first)


def test_recomputed_blocks_draw_the_same_masks(setup):
    model, (x, time, _) = setup
    apply_fused_ops(model, "always")
    block = model.block.train()
    grads = []
    for recompute in (False, True):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        if recompute:
            out = torch.utils.checkpoint.checkpoint(block, leaf, time, None, None, use_reentrant=False)
        else:
            out = block(leaf, time, None, None)
        out.sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])


def test_a_patched_model_can_be_copied_and_compiled(setup):
    model, inputs = setup
    model.eval()
    apply_fused_ops(model, "always")
    want = model(*inputs)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.norm.weight.zero_()
    assert torch.allclose(twin(*inputs), want, atol=1e-6)
    compiled = torch.compile(twin, backend="aot_eager")
    assert torch.allclose(compiled(*inputs), want, atol=1e-5)


def test_a_users_pattern_is_tried_first_and_checked():
    class Doubler(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    def refuses(module: nn.Module) -> str | None:
        return None if isinstance(module, Doubler) else "not a Doubler"

    def example(module: nn.Module) -> tuple[Tensor]:
        return (torch.randn(2, module.in_features),)

    right = Pattern(
        name="doubler",
        refuses=refuses,
        forward=lambda m, x: F.linear(x, 2 * m.weight, 2 * m.bias),
        examples=example,
    )
    register_pattern(right)
    try:
        with pytest.raises(ValueError, match="'doubler' is registered"):
            register_pattern(right)
        assert apply_fused_ops(nn.Sequential(Doubler(3, 3)), "always").counts() == {"doubler": 1}
        wrong = Pattern(name="doubler", refuses=refuses, forward=lambda m, x: x, examples=example)
        register_pattern(wrong, replace=True)
        assert apply_fused_ops(nn.Sequential(Doubler(3, 3)), "always").counts() == {}
    finally:
        registry._registry.pop("doubler")
