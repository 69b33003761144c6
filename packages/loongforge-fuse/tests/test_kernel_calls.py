"""Which kernels the operators launch, what they fall back to and why: CUDA paths on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from loongforge_fuse import FusedAdamW, ops
from loongforge_fuse.kernels import launcher
from loongforge_fuse.kernels.launcher import KernelUnavailableError
from loongforge_fuse.kernels.simulator.operators import simulated_gpu
from loongforge_fuse.ops import adamw_tables, patch_launch
from torch import Tensor

BF16 = torch.bfloat16


@pytest.fixture
def seen():
    """Send launches to the simulator; the list of kernels that ran."""
    ops.reset_op_counters()
    with simulated_gpu() as launched:
        yield launched


def leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def makers(seen) -> set[str]:
    return {spec.maker for spec in seen}


def test_elementwise_calls_fit_their_kernels(seen):
    x, g = leaf(3, 5, 64), leaf(3, 5, 64)
    key = ops.philox_next(ops.philox_counter(1, "cpu"))
    ops.gelu_tanh(x, p=0.1, key=key).sum().backward()
    ops.gelu_tanh(x.detach()[..., 1:])
    ops.silu_mul(x, g).sum().backward()
    ops.dropout_residual(x, g, p=0.1, key=key).sum().backward()
    ops.cast_scale(x, torch.float32)[0].sum().backward()
    ops.cast_scale(x.detach().float(), BF16, scale=torch.ones(()))
    assert makers(seen) == {
        "philox_tick", "gelu_dropout_forward", "gelu_forward", "gelu_backward", "silu_mul_forward",
        "silu_mul_backward",
        "dropout_forward", "cast_scale",
    }  # fmt: skip
    assert not ops.op_counters()["fallbacks"]


def test_misaligned_tensors_take_the_scalar_variant(seen):
    flat = torch.randn(129).to(BF16)
    ops.gelu_tanh(flat[1:])
    ops.gelu_tanh(flat[:128])
    assert [spec.options["vector"] for spec in seen] == [False, True]


@pytest.mark.parametrize("residual", [False, True])
def test_norm_calls_fit_their_kernels_and_return_gradients_for_everything(seen, residual):
    x, w, table = leaf(3, 5, 256), leaf(256), leaf(3, 512)
    scale, shift = table[:, :256], table[:, None, 256:]
    r = leaf(3, 5, 256) if residual else None
    settings = (
        {"weight": w, "bias": w},
        {"weight": w},
        {},
        {"scale": scale, "shift": shift},
        {"weight": w, "bias": w, "scale": scale, "shift": shift},
        {"weight": w, "shift": shift},
    )
    for named in settings:
        y = ops.layer_norm_modulate(x, residual=r, **named)
        y = y if r is None else y[0] + y[1]
        assert y.shape == x.shape
        y.sum().backward(retain_graph=True)
        with torch.no_grad():
            ops.layer_norm_modulate(x, residual=r, **named)
    y = ops.rms_norm(x, residual=r, weight=w)
    (y if r is None else y[0]).sum().backward()
    assert w.grad.shape == w.shape
    assert table.grad.shape == table.shape
    assert r is None or r.grad.shape == r.shape
    assert {"norm_forward", "norm_backward", "column_sums"} == makers(seen)
    assert not ops.op_counters()["fallbacks"]


def test_the_residual_sum_alone_needs_no_kernel_in_backward(seen):
    x, r = leaf(4, 64), leaf(4, 64, dtype=torch.float32)
    _, total = ops.rms_norm(x, residual=r)
    total.sum().backward()
    assert makers(seen) == {"norm_forward"}
    assert r.grad.dtype == torch.float32
    assert torch.equal(x.grad, torch.ones_like(x))


def test_rows_that_no_kernel_takes_fall_back_with_the_reason(seen):
    ops.rms_norm(torch.randn(4, 20))
    ops.rms_norm(torch.randn(4, 33)[:, 1:])
    ops.rms_norm(torch.randn(4, 64, dtype=torch.float64))
    flat = torch.randn(4 * 64 + 1)
    ops.rms_norm(flat[1:].view(4, 64))
    ops.layer_norm_modulate(torch.randn(4, 64), weight=torch.randn(128)[::2])
    assert [spec.maker for spec in seen] == ["norm_forward"]
    assert ops.op_counters()["fallbacks"] == {
        "norm: width 20 is not a multiple of 8 in range": 1,
        "norm: dtype torch.float64": 1,
        "norm: a tensor cannot be read in 16-byte vectors": 2,
    }


def test_a_missing_kernel_is_counted_and_answered_by_the_reference(monkeypatch):
    def refuse(spec, device):
        raise KernelUnavailableError("nothing here")

    ops.reset_op_counters()
    # Undone before the simulator is: its own replacement would be put back otherwise, and stay.
    with simulated_gpu(), monkeypatch.context() as inside:
        inside.setattr(launcher, "function", refuse)
        x, key = torch.randn(4, 64), torch.tensor([1, 2])
        assert torch.allclose(ops.rms_norm(x), torch.nn.functional.rms_norm(x, (64,), eps=1e-6), atol=1e-5)
        assert torch.equal(ops.gelu_tanh(x, p=0.2, key=key), _common_reference(x, key))
    assert ops.op_counters()["fallbacks"] == {"gelu_tanh: nothing here": 1, "norm: nothing here": 1}


def _common_reference(x: Tensor, key: Tensor) -> Tensor:
    return ops.reference.gelu_tanh(x, 0.2, key)


def test_empty_tensors_launch_nothing(seen):
    empty = torch.empty(0, 64, requires_grad=True)
    w = torch.ones(64, requires_grad=True)
    for y in (ops.gelu_tanh(empty), ops.silu_mul(empty, empty), ops.rms_norm(empty, weight=w)):
        y.sum().backward()
    assert seen == []
    assert torch.equal(w.grad, torch.zeros(64))


def test_image_and_patch_calls_fit_their_kernels(seen):
    pixels = torch.zeros(2, 28, 28, 3, dtype=torch.uint8)
    ops.image_to_half(pixels)
    ops.image_table_to_half(pixels.view(-1), ops.image_table([(28, 28)] * 2), (30, 32))
    table = ops.patch_table([(28, 28)] * 2, 14, planar=False)
    ops.masked_unfold(pixels.view(-1), table, patch=14, mask=torch.ones(8, dtype=torch.bool))
    planar = ops.patch_table([(28, 28)] * 2, 14, planar=True)
    patch_launch.rows_backward_cuda(
        torch.randn(8, 592).to(BF16), planar, None, 14, False, True, 4704, BF16, False
    )
    wanted = {"image_planes", "image_table", "patch_words", "clear_down", "patch_tiles_backward"}
    assert makers(seen) == wanted


def test_linear_sums_its_bias_gradient_by_one_launch(seen):
    x, w, b = leaf(3, 5, 16), leaf(24, 16), leaf(24)
    ops.linear(x, w, b).sum().backward()
    assert makers(seen) == {"bias_sums"}
    assert b.grad.shape == b.shape


def test_head_norm_rope_calls_fit_their_kernels(seen):
    x, w, angles = leaf(2, 3, 4, 128), leaf(128), torch.randn(3, 128).to(BF16)
    ops.head_norm_rope(x, w, angles.cos(), angles.sin()).sum().backward()
    assert makers(seen) == {"head_norm_rope_forward", "head_norm_rope_backward", "column_sums"}
    assert w.grad.shape == w.shape


def test_adamw_launches_norm_preparation_and_update_once_for_each_type(seen, monkeypatch):
    monkeypatch.setattr(
        adamw_tables.Uploader, "send", lambda self, array, device: (torch.from_numpy(array), torch.empty(0))
    )
    monkeypatch.setattr(FusedAdamW, "_refusal", lambda self, slots: None)
    params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 40000)]
    halves = [torch.nn.Parameter(torch.ones(n, dtype=BF16)) for n in (8, 9)]
    optimizer = FusedAdamW([*params, *halves], master_weights=True, state_dtype=torch.float32)
    for p in (*params, *halves):
        p.grad = torch.ones_like(p)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    optimizer.step(grad_scale=torch.ones(()))
    assert [spec.maker for spec in seen] == [
        "gradient_norm", "gradient_norm", "prepare_step", "adamw_update", "adamw_update",
    ]  # fmt: skip
    assert {spec.options.get("master") for spec in seen if spec.maker == "adamw_update"} == {True, False}
