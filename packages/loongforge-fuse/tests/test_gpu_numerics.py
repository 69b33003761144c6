"""Fused operators on a real GPU: numerics against float64, and against the reference bit for bit."""

from __future__ import annotations

import pytest
import torch
from loongforge_fuse import ops
from loongforge_fuse.ops import patch_launch, patch_plan, reference, variants
from loongforge_fuse.ops.checking import check_as_exact, check_no_fallback, relative_error
from torch import Tensor
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def counted():
    """Start every test with empty counters."""
    ops.reset_op_counters()
    torch.manual_seed(0)


def used(name: str) -> int:
    return ops.op_counters()["launches"].get(name, 0)


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def eager_modulate(x, r, scale, shift):
    total = x + r
    y = F.layer_norm(total, (x.shape[-1],), eps=1e-5)
    return y * (1 + scale[:, None]) + shift[:, None], total


def eager_rms(x, r, w):
    total = x + r
    wide = total if total.dtype == torch.float64 else total.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return w * y.to(x.dtype), total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_elementwise_operators_are_as_exact_as_eager(dtype):
    x, g = randn(64, 1536, dtype=dtype), randn(64, 1536, dtype=dtype)
    check_as_exact(ops.gelu_tanh, lambda a: F.gelu(a, approximate="tanh"), [x])
    check_as_exact(ops.silu_mul, lambda a, b: F.silu(a) * b, [x, g])
    check_no_fallback()


@pytest.mark.parametrize("width", [48, 1536, 2048])
def test_layer_norm_modulate_is_as_exact_as_eager(width):
    x, r = randn(16, 51, width), randn(16, 51, width)
    scale, shift = randn(16, width), randn(16, width)
    check_as_exact(
        lambda a, b, c, d: ops.layer_norm_modulate(a, residual=b, scale=c, shift=d),
        eager_modulate,
        [x, r, scale, shift],
    )
    check_no_fallback()
    assert used("norm_backward") == 1


@pytest.mark.parametrize("width", [128, 1152, 1536, 2048, 4608])
def test_layer_norm_with_weights_is_as_exact_as_eager(width):
    x, w, b = randn(700, width), randn(width), randn(width)
    check_as_exact(
        lambda a, c, d: ops.layer_norm_modulate(a, weight=c, bias=d),
        lambda a, c, d: F.layer_norm(a, (width,), c, d),
        [x, w, b],
    )
    check_no_fallback()


@pytest.mark.parametrize("width", [48, 128, 2048])
def test_rms_norm_is_as_exact_as_eager(width):
    check_as_exact(
        lambda a, b, c: ops.rms_norm(a, residual=b, weight=c),
        eager_rms,
        [randn(4, 220, width), randn(4, 220, width), randn(width)],
    )
    check_no_fallback()


def eager_head_norm_rope(x, w, cos, sin):
    wide = x if x.dtype == torch.float64 else x.float()
    y = w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    low, high = y.chunk(2, -1)
    return y * cos[:, None].to(x.dtype) + torch.cat((-high, low), -1) * sin[:, None].to(x.dtype)


@pytest.mark.parametrize("width", [16, 128])
def test_head_norm_rope_is_as_exact_as_eager(width):
    angles = torch.rand(220, width // 2, device="cuda") * 200
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    check_as_exact(
        lambda a, w: ops.head_norm_rope(a, w, cos, sin),
        lambda a, w: eager_head_norm_rope(a, w, cos, sin),
        [randn(4, 220, 16, width), randn(width)],
    )
    check_no_fallback()


def test_autocast_mixture_takes_float32_rows_and_returns_half():
    x, r, w = randn(8, 51, 1536, dtype=torch.float32), randn(8, 51, 1536), randn(1536, dtype=torch.float32)
    b = randn(1536, dtype=torch.float32)
    y, total = ops.layer_norm_modulate(x, residual=r, weight=w, bias=b, dtype=BF16)
    truth = F.layer_norm((x + r).double(), (1536,), w.double(), b.double())
    assert y.dtype == BF16
    assert total.dtype == torch.float32
    assert relative_error(y, truth) < 2.5e-3
    check_no_fallback()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 7, 8, 1000, 4096, 100003])
def test_dropout_mask_equals_the_cpu_stream(dtype, count):
    x, r = randn(count, dtype=dtype), randn(count, dtype=dtype)
    counter = ops.philox_counter(2**40 + 5, "cuda")
    ops.philox_next(counter, steps=2**33)
    key = ops.philox_next(counter)
    y = ops.dropout_residual(x, r, p=0.2, key=key)
    truth = reference.dropout_residual(x.cpu(), r.cpu(), 0.2, key.cpu())
    assert torch.equal(y.cpu(), truth)
    assert counter.tolist() == [2**40 + 5, 2**33 + 1]
    check_no_fallback()


def test_dropout_gradient_uses_the_same_mask():
    x = torch.ones(10007, device="cuda", requires_grad=True)
    key = ops.philox_next(ops.philox_counter(3, "cuda"))
    y = ops.dropout_residual(x, p=0.4, key=key)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert abs(float((y == 0).float().mean()) - 0.4) < 0.02


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_cast_scale_equals_torch_bit_for_bit_and_counts_bad_values(source, target):
    x = randn(100003, dtype=source)
    x[17], x[500], x[99999] = float("inf"), float("nan"), 60000.0
    y, bad = ops.cast_scale(x, target, factor=2.0)
    truth = (x.float() * 2.0).to(target)
    assert torch.equal(y.view(torch.uint8), truth.view(torch.uint8)) or torch.equal(
        torch.nan_to_num(y.float(), 1.0), torch.nan_to_num(truth.float(), 1.0)
    )
    assert bad.item() == int((~torch.isfinite(truth)).sum())
    scale = torch.full((), 0.5, device="cuda")
    assert torch.equal(
        torch.nan_to_num(ops.cast_scale(x, target, scale=scale)[0].float()),
        torch.nan_to_num((x.float() * 0.5).to(target).float()),
    )
    check_no_fallback()


@pytest.mark.parametrize("size", [(252, 252), (256, 340), (4, 1), (16, 16), (480, 640)])
def test_image_to_half_matches_the_reference(size):
    image = torch.randint(0, 256, (3, *size, 3), dtype=torch.uint8, device="cuda")
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    for dtype in (BF16, torch.float16, torch.float32):
        y = ops.image_to_half(image, mean, std, dtype)
        truth = (
            (image.double() / 255 - torch.tensor(mean, device="cuda")) / torch.tensor(std, device="cuda")
        ).permute(0, 3, 1, 2)
        assert y.shape == truth.shape
        assert (
            float((y.double() - truth).abs().max())
            < {BF16: 1.1e-2, torch.float16: 1.3e-3, torch.float32: 2e-6}[dtype]
        )
    check_no_fallback()


@pytest.mark.parametrize("out", [(24, 32), (24, 33)])
def test_mixed_images_crop_mirror_and_pad_like_the_reference(out):
    sizes = [(28, 42), (14, 28), (31, 17)]
    data = torch.randint(0, 256, (sum(h * w * 3 for h, w in sizes),), dtype=torch.uint8)
    table = ops.image_table(
        sizes, crops=[(1, 2, 20, 30), (0, 0, 14, 28), (5, 3, 22, 9)], flips=[True, False, True]
    )
    y = ops.image_table_to_half(data.cuda(), table.cuda(), out, pad=7.0)
    truth = ops.image_table_to_half(data, table, out, pad=7.0)
    assert float((y.cpu().float() - truth.float()).abs().max()) <= 2**-8
    check_no_fallback()


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("last", [True, False])
def test_unfold_of_mixed_sizes_matches_the_reference_and_its_backward(patch, last):
    sizes = [(2 * patch, 5 * patch), (patch, 3 * patch), (4 * patch, 4 * patch)]
    count = sum(h * w * 3 for h, w in sizes)
    mask = torch.rand(10 + 3 + 16) > 0.3
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8)
    table = ops.patch_table(sizes, patch, planar=False)
    other = ops.patch_table(sizes, patch, planar=True)
    rows = ops.masked_unfold(raw.cuda(), other.cuda(), patch=patch, last=last, planar=True)
    truth = ops.masked_unfold(raw, other, patch=patch, last=last, planar=True)
    assert float((rows.cpu().float() - truth.float()).abs().max()) <= 2**-8
    rows = ops.masked_unfold(raw.cuda(), table.cuda(), patch=patch, mask=mask.cuda(), last=last)
    truth = ops.masked_unfold(raw, table, patch=patch, mask=mask, last=last)
    assert float((rows.cpu().float() - truth.float()).abs().max()) <= 2**-8
    planar = ops.patch_table(sizes, patch, planar=True)
    x = torch.randn(count).to(BF16)
    a, b = x.cuda().requires_grad_(), x.clone().requires_grad_()
    got = ops.masked_unfold(a, planar.cuda(), patch=patch, mask=mask.cuda(), last=last)
    want = ops.masked_unfold(b, planar, patch=patch, mask=mask, last=last)
    assert torch.equal(got.cpu(), want)
    seed = torch.randn(want.shape).to(BF16)
    got.backward(seed.cuda())
    want.backward(seed)
    assert torch.equal(a.grad.cpu(), b.grad)
    check_no_fallback()


def test_patch_embedding_equals_the_convolution():
    images = torch.randn(2, 3, 28, 42, device="cuda")
    w, b = torch.randn(64, 3, 14, 14, device="cuda"), torch.randn(64, device="cuda")
    table = ops.patch_table([(28, 42)] * 2, 14, planar=True).cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
    got = ops.masked_patch_embed(images.reshape(-1), table, w, b, patch=14)
    want = (
        F.conv2d(images.double(), w.double(), b.double(), stride=14)
        .flatten(2)
        .transpose(1, 2)
        .reshape(-1, 64)
    )
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("rows", [1, 7, 816, 5000])
@pytest.mark.parametrize("width", [8, 64, 1536, 6144, 4304])
def test_linear_gives_the_bias_its_gradient(rows, width):
    x, w, b = randn(rows, 64), randn(width, 64), randn(width)
    check_as_exact(ops.linear, F.linear, [x, w, b])
    assert used("bias_sums") == 1
    check_no_fallback()


def patch_ways() -> list[tuple[str, str, int, str]]:
    found = []
    for patch, (x, y) in (
        (p, k) for p in (14, 16) for k in (("u8", "bf16"), ("bf16", "bf16"), ("f32", "f32"))
    ):
        form = {"last": x == "u8", "planar": x != "u8"}
        found += [(x, y, patch, way) for way in patch_plan.gather_ways(x, y, patch, **form)]
    return found


@pytest.mark.parametrize(("x", "y", "patch", "way"), patch_ways())
def test_every_way_of_gathering_and_scattering_patches_equals_the_reference(x, y, patch, way):
    kinds = {"u8": torch.uint8, "bf16": BF16, "f32": torch.float32}
    last = x == "u8"
    sizes = [(2 * patch, 37 * patch), (patch, 3 * patch)]
    count = sum(h * w * 3 for h, w in sizes)
    form = {"last": last, "planar": not last}
    table = ops.patch_table(sizes, patch, planar=not last)
    mask = torch.rand(table.shape[0]) > 0.3
    values = torch.randint(0, 256, (count,)) if last else torch.randn(count)
    pixels = values.to(kinds[x])
    half = [0.5] * 3
    with variants.forced(patch_launch.gather_job(x, y, patch, **form), way):
        call = (patch, last, not last, half, half, kinds[y], True)
        got = patch_launch.rows_cuda(pixels.cuda(), table.cuda(), mask.cuda(), *call)
    want = torch.ops.loongforge.masked_unfold(pixels, table, mask, *call)
    assert float((got.cpu().float() - want.float()).abs().max()) <= (2**-8 if last else 0.0)
    if not last:
        with variants.forced(patch_launch.scatter_job(y, y, patch, **form), way):
            rest = (patch, last, not last, count, kinds[y], True)
            back = patch_launch.rows_backward_cuda(got, table.cuda(), mask.cuda(), *rest)
        assert torch.equal(back.cpu(), torch.ops.loongforge.masked_unfold_backward(want, table, mask, *rest))
    check_no_fallback()


def test_a_joined_table_is_as_exact_as_eager():
    x, r, table = randn(16, 51, 1536), randn(16, 51, 1536), randn(16, 3072)
    check_as_exact(
        lambda a, b, t: ops.layer_norm_modulate(a, residual=b, table=t),
        lambda a, b, t: eager_modulate(a, b, *t.chunk(2, -1)),
        [x, r, table],
    )
    check_no_fallback()
