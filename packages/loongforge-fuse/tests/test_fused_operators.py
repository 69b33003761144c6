"""Operators on the CPU: reference against torch, opcheck, gradients in float64, errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_fuse import ops
from loongforge_fuse.ops import reference
from torch import Tensor
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.nn import functional as F

LIBRARY = torch.ops.loongforge
DOUBLE = torch.float64


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=True)


@pytest.fixture
def key():
    torch.manual_seed(0)
    return ops.philox_next(ops.philox_counter(3, "cpu"))


def test_every_operator_passes_opcheck(key):
    x, g, w = double(6, 16), double(6, 16), double(16)
    table = ops.patch_table([(28, 14)], 14, planar=True)
    image = torch.randint(0, 256, (2, 4, 6, 3), dtype=torch.uint8)
    half = [0.5, 0.5, 0.5]
    angles = torch.randn(3, 16, dtype=DOUBLE)
    heads = double(2, 3, 2, 16)
    opcheck(LIBRARY.gelu_tanh, (x, 0.25, key))
    opcheck(LIBRARY.gelu_tanh, (x, 0.0, None))
    opcheck(LIBRARY.silu_mul, (x, g))
    opcheck(LIBRARY.dropout_residual, (x, g, 0.25, key))
    opcheck(LIBRARY.dropout_residual, (x, None, 0.25, key))
    opcheck(LIBRARY.cast_scale, (x, DOUBLE, 2.0, None))
    opcheck(LIBRARY.philox_next, (ops.philox_counter(3, "cpu"), 2))
    opcheck(LIBRARY.norm, (x, g, w[None], w[None], True, False, 6, 1e-5, DOUBLE))
    opcheck(LIBRARY.norm, (x, None, g[:3], None, False, True, 2, 1e-5, DOUBLE))
    opcheck(LIBRARY.norm, (x, None, None, None, True, False, 6, 1e-5, torch.float32))
    opcheck(LIBRARY.bias_grad, (double(5, 6).detach(),))
    opcheck(LIBRARY.bias_grad, (torch.randn(5, 8).to(torch.bfloat16), torch.float32))
    opcheck(LIBRARY.head_norm_rope, (heads, w, angles.cos(), angles.sin(), 1e-6))
    opcheck(LIBRARY.image_to_half, (image, half, half, torch.bfloat16))
    opcheck(
        LIBRARY.masked_unfold, (double(28 * 14 * 3), table, None, 14, False, True, half, half, DOUBLE, False)
    )
    flat = image.reshape(-1)
    opcheck(
        LIBRARY.image_table_to_half,
        (flat, ops.image_table([(4, 6)] * 2), 5, 8, half, half, torch.float16, 0.0),
    )


def test_gradients_are_exact_in_float64(key):
    x, g, w, b = double(3, 5, 16), double(3, 5, 16), double(16), double(16)
    table = double(3, 32)
    assert gradcheck(lambda a: ops.gelu_tanh(a, p=0.3, key=key), (x,))
    assert gradcheck(ops.silu_mul, (x, g))
    assert gradcheck(lambda a, r: ops.dropout_residual(a, r, p=0.3, key=key), (x, g))
    assert gradcheck(lambda a: ops.cast_scale(a, DOUBLE, factor=3.0)[0], (x,))
    assert gradcheck(
        lambda a, r, c, d: ops.layer_norm_modulate(a, residual=r, weight=c, bias=d), (x, g, w, b)
    )
    assert gradcheck(lambda a, t: ops.layer_norm_modulate(a, scale=t[:, :16], shift=t[:, 16:]), (x, table))
    assert gradcheck(lambda a: ops.layer_norm_modulate(a), (x,))
    assert gradcheck(lambda a, r, c: ops.rms_norm(a, residual=r, weight=c), (x, g, w))
    angles = torch.randn(3, 5, 16, dtype=DOUBLE)
    heads = double(3, 5, 2, 16)
    assert gradcheck(lambda a, c: ops.head_norm_rope(a, c, angles.cos(), angles.sin()), (heads, w))


def test_linear_equals_torch_with_all_gradients():
    x, w, b = double(2, 3, 8), double(5, 8), double(5)
    assert torch.equal(ops.linear(x, w, b), F.linear(x, w, b))
    assert gradcheck(ops.linear, (x, w, b))


def test_gradients_of_weights_and_modulation_together_are_exact():
    x, w, b, table = double(3, 5, 16), double(16), double(16), double(3, 32)

    def both(a: Tensor, c: Tensor, d: Tensor, t: Tensor) -> Tensor:
        return ops.layer_norm_modulate(a, weight=c, bias=d, scale=t[:, :16], shift=t[:, None, 16:])

    want = F.layer_norm(x, (16,), w, b) * (1 + table[:, None, :16]) + table[:, None, 16:]
    assert torch.allclose(both(x, w, b, table), want, rtol=1e-12, atol=1e-12)
    assert gradcheck(both, (x, w, b, table))


def test_patch_embedding_equals_convolution_for_mixed_sizes_and_masks():
    sizes = [(28, 42), (14, 28)]
    images = [torch.rand(3, h, w, dtype=DOUBLE) for h, w in sizes]
    pixels = torch.cat([i.reshape(-1) for i in images]).requires_grad_()
    table = ops.patch_table(sizes, 14, planar=True)
    mask = torch.ones(table.shape[0], dtype=torch.bool)
    mask[2] = False
    w, b = double(5, 3, 14, 14), double(5)
    got = ops.masked_patch_embed(pixels, table, w, b, patch=14, mask=mask)
    rows = [F.conv2d(i[None], w, b, stride=14).flatten(2).squeeze(0).T for i in images]
    assert torch.allclose(got, torch.cat(rows) * mask[:, None], rtol=1e-10, atol=1e-10)
    assert gradcheck(
        lambda p, c, d: ops.masked_patch_embed(p, table, c, d, patch=14, mask=mask),
        (pixels, w, b),
        fast_mode=True,
    )


def test_masked_patches_never_read_their_pixels():
    pixels = torch.full((14 * 28 * 3,), float("nan"), dtype=torch.float32)
    table = ops.patch_table([(14, 28)], 14, planar=True)
    mask = torch.tensor([False, False])
    rows = ops.masked_unfold(pixels, table, patch=14, mask=mask, last=False, dtype=torch.float32)
    assert rows.shape == (2, 592)
    assert not rows.any()


def test_linear_patch_embedding_reads_interleaved_bytes():
    image = torch.randint(0, 256, (28, 28, 3), dtype=torch.uint8)
    table = ops.patch_table([(28, 28)], 14, planar=False)
    w = torch.randn(7, 588)
    got = ops.masked_patch_embed(image.reshape(-1), table, w, patch=14)
    patches = image.view(2, 14, 2, 14, 3).permute(0, 2, 1, 3, 4).reshape(4, 588)
    assert torch.allclose(got, ((patches.float() / 255 - 0.5) / 0.5) @ w.T, atol=2e-5)


def test_philox_matches_the_published_test_vector():
    # Philox-4x32 with 7 rounds, zero key and counter (known answers of Random123).
    bits = reference.random_bits(8, torch.zeros(2, dtype=torch.int64))
    words = [int(bits[2 * i]) | int(bits[2 * i + 1]) << 16 for i in range(4)]
    assert words == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


def test_dropout_keeps_the_expected_share_and_differs_between_keys():
    x = torch.ones(200_000)
    counter = ops.philox_counter(5, "cpu")
    first = ops.dropout_residual(x, p=0.2, key=ops.philox_next(counter))
    second = ops.dropout_residual(x, p=0.2, key=ops.philox_next(counter))
    assert abs(float((first == 0).float().mean()) - 0.2) < 0.004
    assert abs(float(first.mean()) - 1.0) < 0.006
    assert not torch.equal(first, second)
    assert abs(float(((first == 0) & (second == 0)).float().mean()) - 0.04) < 0.003


def test_dropout_of_everything_and_of_an_infinity_gives_zero_not_nan():
    x = torch.full((64,), float("inf"))
    key = ops.philox_next(ops.philox_counter(1, "cpu"))
    assert not ops.dropout_residual(x, p=1.0, key=key).any()
    assert not torch.isnan(ops.dropout_residual(x, p=0.5, key=key)).any()


def test_cast_scale_counts_values_that_overflow_only_in_the_narrow_type():
    x = torch.tensor([1.0, 65520.0, -70000.0, float("nan"), 65519.0])
    y, bad = ops.cast_scale(x, torch.float16)
    assert bad.tolist() == [3]
    assert torch.equal(torch.isfinite(y), torch.tensor([True, False, False, False, True]))
    assert ops.cast_scale(x, torch.bfloat16)[1].tolist() == [1]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_operators_accept_any_shape_stride_and_half_type(dims, dtype, strided):
    shape = (*dims, 16)
    x = torch.randn(*dims, 32).to(dtype)[..., ::2] if strided else torch.randn(*shape).to(dtype)
    g = torch.randn(*shape).to(dtype)
    for y in (ops.gelu_tanh(x), ops.silu_mul(x, g), ops.dropout_residual(x, g, p=0.0)):
        assert y.shape == shape
        assert y.dtype == dtype
    if len(shape) > 1:
        y, total = ops.rms_norm(x, residual=g)
        assert torch.equal(total, (x.float() + g.float()).to(dtype))
        assert y.dtype == dtype


def test_compiled_code_keeps_operators_and_gradients():
    x = torch.randn(4, 16, requires_grad=True)
    w = torch.randn(16)

    def work(a: Tensor) -> Tensor:
        return ops.gelu_tanh(ops.rms_norm(a, weight=w)) * 2

    got = torch.compile(work, fullgraph=True, backend="aot_eager")(x)
    grad = torch.autograd.grad(got.sum(), x)[0]
    assert torch.allclose(grad, torch.autograd.grad(work(x).sum(), x)[0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.gelu_tanh(torch.ones(2), p=1.5), "between 0 and 1, got 1.5"),
        (lambda: ops.gelu_tanh(torch.ones(2), p=0.5), "needs a key"),
        (lambda: ops.silu_mul(torch.ones(2), torch.ones(3)), "shapes must be equal"),
        (lambda: ops.dropout_residual(torch.ones(2), torch.ones(3), p=0.0), "must have one shape"),
        (lambda: ops.philox_counter(-1, "cpu"), "got -1"),
        (lambda: ops.philox_next(torch.zeros(3, dtype=torch.int64)), r"shape \(2,\)"),
        (lambda: ops.image_to_half(torch.ones(2, 2, 3)), "must be uint8"),
        (lambda: ops.image_to_half(torch.ones(2, 2, 4, dtype=torch.uint8)), "4 channels"),
        (lambda: ops.image_to_half(torch.ones(2, 2, 3, dtype=torch.uint8), std=(1, 0, 1)), "must not hold 0"),
        (lambda: ops.patch_table([(15, 14)], 14, planar=True), "multiples of 14, got 15 x 14"),
        (lambda: ops.image_table([(4, 4)], crops=[(0, 0, 5, 4)]), "leaves the image of 4 x 4"),
        (lambda: ops.rms_norm(torch.ones(4)), "at least 2 dimensions"),
        (lambda: ops.rms_norm(torch.ones(2, 4), weight=torch.ones(5)), r"weight must have shape \(4,\)"),
        (lambda: ops.rms_norm(torch.ones(2, 4), residual=torch.ones(2, 5)), "residual must have the shape"),
    ],
)
def test_bad_input_is_refused_with_what_was_found(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_import_registers_operators_without_loading_numba():
    import subprocess
    import sys

    code = "import sys, loongforge_fuse.ops; sys.exit(any(n.split('.')[0] == 'numba' for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
