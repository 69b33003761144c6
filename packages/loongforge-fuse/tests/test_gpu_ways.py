"""Every way that tuning may choose, on a real GPU, over enough rows and patches that blocks have to walk."""

from __future__ import annotations

import itertools

import pytest
import torch
from loongforge_fuse import ops
from loongforge_fuse.ops import norm_launch, norm_plan, patch_launch, patch_plan, reference, rope, variants
from loongforge_fuse.ops.checking import check_no_fallback
from loongforge_fuse.ops.elementwise import GELU_DROPOUT_WAYS
from loongforge_fuse.ops.image import TABLE_JOB, TABLE_WAYS
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]
BF16 = torch.bfloat16
HALF = [0.5] * 3
KINDS = ((1152, True), (1536, True), (2048, True), (2048, False))  # width, LayerNorm or not
MODULATED = ((1536, True), (2048, True))


@pytest.fixture(autouse=True)
def counted():
    """Start every test with empty counters."""
    ops.reset_op_counters()
    torch.manual_seed(0)
    yield
    check_no_fallback()


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def close(got: Tensor, want: Tensor, limit: float) -> None:
    assert got.shape == want.shape
    gap = (got.double() - want.double()).abs() / (want.double().abs() + 1.0)
    assert float(gap.max()) <= limit


def forwards() -> list[tuple[int, bool, bool, str]]:
    return [
        (width, layer, residual, way)
        for (width, layer), residual in itertools.product(KINDS, (False, True))
        for way in norm_plan.forward_ways(
            width, residual=residual, large=False, layer=layer, modulate=(width, layer) in MODULATED
        )
    ]


@pytest.mark.parametrize(("width", "layer", "residual", "way"), forwards())
def test_every_forward_plan_equals_float64(width, layer, residual, way):
    for groups, rows in ((1, 5), (1, 5100), (3, 1700)):
        if groups > 1 and (width, layer) not in MODULATED:
            continue
        x, r = randn(groups * rows, width), randn(groups * rows, width) if residual else None
        gain = randn(groups, width)
        offset = randn(groups, width) if layer else None
        form = (layer, groups > 1)
        job = norm_launch.forward_job(width, layer=layer, residual=residual, large=False, modulate=groups > 1)
        with variants.forced(job, way):
            got = norm_launch.run_norm(x, r, gain, offset, *form, 1e-6, BF16)
        assert got is not None
        # The kernel normalises the rounded sum.
        total = x if r is None else (x.float() + r.float()).to(BF16)
        wide = [None if t is None else t.double() for t in (total, None, gain, offset)]
        y, _, mean, rstd = reference.norm(*wide, *form, rows, 1e-6, torch.float64)
        close(got[0], y, 2**-7)
        assert r is None or torch.equal(got[1], total)
        close(got[3], rstd, 1e-5)
        assert not layer or float((got[2].double() - mean).abs().max()) < 1e-5


def backwards() -> list[tuple[int, bool, bool, str]]:
    return [
        (width, layer, columns, way)
        for (width, layer), columns in itertools.product(KINDS, (False, True))
        for way in norm_plan.backward_ways(
            width, columns=columns, modulate=(width, layer) in MODULATED, large=False, layer=layer
        )
    ]


@pytest.mark.parametrize(("width", "layer", "columns", "way"), backwards())
def test_every_backward_plan_equals_float64(width, layer, columns, way):
    for groups, rows, carried in ((1, 1, False), (1, 5, True), (1, 5500, True), (16, 341, False)):
        if groups > 1 and (width, layer) not in MODULATED:
            continue
        count = groups * rows
        g, x, gain = randn(count, width), randn(count, width), randn(groups, width)
        carry = randn(count, width) if carried else None
        mean = randn(count, dtype=torch.float32) / 8 if layer else randn(0, dtype=torch.float32)
        rstd = torch.rand(count, device="cuda") + 0.5
        form = (layer, groups > 1, rows, columns, columns and layer, groups)
        job = norm_launch.backward_job(width, layer=layer, columns=columns, large=False, modulate=groups > 1)
        with variants.forced(job, way):
            dx, sums = norm_launch.run_norm_backward(g, carry, x, gain, mean, rstd, *form, torch.float32)
            again = norm_launch.run_norm_backward(g, carry, x, gain, mean, rstd, *form, torch.float32)
        wide = [None if t is None else t.double() for t in (g, carry, x, gain, mean, rstd)]
        want, totals = reference.norm_backward(*wide, *form)
        close(dx, want, 2**-6)
        assert torch.equal(dx, again[0])
        if columns:
            # Sums of `rows` products in float32.
            assert float((sums.double() - totals.view_as(sums)).abs().max()) < 2e-5 * rows**0.5 * 8
            assert torch.equal(sums, again[1])


@pytest.mark.parametrize(("width", "groups"), [(1152, 1), (1536, 1), (1536, 16), (2048, 1), (2048, 16)])
def test_sums_that_are_added_early_are_those_that_wait(width, groups, monkeypatch):
    rows = norm_launch.LARGE // width // groups + 1
    assert norm_plan.backward_plan(width, columns=True).early
    count = rows * groups
    x, gain = randn(count, width), randn(groups, width)
    mean, rstd = randn(count, dtype=torch.float32) / 8, torch.rand(count, device="cuda") + 0.5
    inputs, found = [randn(count, width) for _ in range(4)], []
    call = (None, x, gain, mean, rstd, True, groups > 1, rows, True, True, groups)
    add = norm_launch.add_partials
    for late in (False, True):
        if late:
            monkeypatch.setattr(norm_launch, "add_partials", lambda *of, follows: add(*of))
        found += [norm_launch.run_norm_backward(g, *call, torch.float32) for g in inputs]
    for one, other in zip(found[:4], found[4:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("groups", [1, 16])
def test_sums_that_are_added_early_are_those_of_this_replay(groups):
    # Captured with what follows, and replayed on new inputs without a pause.
    g, x, gain = randn(4096, 2048), randn(4096, 2048), randn(groups, 2048)
    mean, rstd = randn(4096, dtype=torch.float32) / 8, torch.rand(4096, device="cuda") + 0.5
    form = (True, groups > 1, 4096 // groups, True, True, groups)

    def work() -> tuple[Tensor, Tensor]:
        dx, sums = norm_launch.run_norm_backward(g, None, x, gain, mean, rstd, *form, torch.float32)
        return dx.float().sum(0), sums * 2.0

    plan = next(iter(norm_plan.backward_ways(2048, columns=True, modulate=groups > 1, large=False).values()))
    assert plan.early
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = work()
    inputs = [randn(4096, 2048) for _ in range(8)]
    seen = []
    for each in inputs:
        g.copy_(each)
        graph.replay()
        seen.append([t.clone() for t in got])
    for each, found in zip(inputs, seen, strict=True):
        g.copy_(each)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, work(), strict=True))


@pytest.mark.parametrize("way", rope.BACKWARD_WAYS)
@pytest.mark.parametrize("heads", [16, 3])
def test_every_way_of_the_rotation_backward_equals_float64(way, heads):
    x, g = randn(2, 999, heads, 128), randn(2, 999, heads, 128)
    w, cos, sin = randn(128), randn(999, 128), randn(999, 128)
    with variants.forced(rope.BACKWARD_JOB, way):
        dx, dw = torch.ops.loongforge.head_norm_rope_backward(g, x, w, cos, sin, 1e-6, True)
        again = torch.ops.loongforge.head_norm_rope_backward(g, x, w, cos, sin, 1e-6, True)
    want, sums = rope._backward_reference(*(t.double() for t in (g, x, w, cos, sin)), 1e-6, True)
    close(dx, want, 2**-6)
    assert float((dw.double() - sums).abs().max()) < 2e-5 * (2 * 999 * heads) ** 0.5 * 8
    assert torch.equal(dx, again[0])
    assert torch.equal(dw, again[1])


@pytest.mark.parametrize("way", patch_plan.CLEAR_WAYS)
def test_every_way_of_clearing_leaves_zeros_where_no_patch_is(way):
    sizes = [(280, 420)] * 50
    table = ops.patch_table(sizes, 14, planar=True)[7:].cuda()
    count = 50 * 280 * 420 * 3 + 5
    g = randn(table.shape[0], patch_plan.padded_length(14))
    call = (table, None, 14, False, True, count, BF16, False)
    torch.full((count,), torch.nan, device="cuda", dtype=BF16)  # what the memory held before
    with variants.forced(patch_plan.CLEAR_JOB, way):
        got = patch_launch.rows_backward_cuda(g, *call)
    assert torch.equal(got, patch_launch.patch_reference.rows_backward(g, *call))


def patch_jobs() -> list[tuple[int, str, str]]:
    return [
        (patch, x, way)
        for patch, x in itertools.product((14, 16), ("u8", "bf16"))
        for way in dict.fromkeys(
            (
                *patch_plan.gather_ways(x, "bf16", patch, last=x == "u8", planar=x != "u8"),
                *(
                    patch_plan.scatter_ways("bf16", "bf16", patch, last=False, planar=True)
                    if x != "u8"
                    else ()
                ),
            )
        )
    ]


@pytest.mark.parametrize(("patch", "x", "way"), patch_jobs())
def test_every_way_of_patches_is_right_where_blocks_walk(patch, x, way):
    last = x == "u8"
    sizes = [(40 * patch, 61 * patch)] * 4
    count = sum(h * w * 3 for h, w in sizes)
    table = ops.patch_table(sizes, patch, planar=not last).cuda()
    mask = torch.rand(table.shape[0], device="cuda") > 0.2
    pixels = torch.randint(0, 256, (count,), device="cuda", dtype=torch.uint8) if last else randn(count)
    form = {"last": last, "planar": not last}
    for keep in (None, mask):
        with variants.forced(patch_launch.gather_job(x, "bf16", patch, **form), way):
            rows = patch_launch.rows_cuda(pixels, table, keep, patch, last, not last, HALF, HALF, BF16, True)
        want = patch_launch.patch_reference.rows(
            pixels, table, keep, patch, last, not last, HALF, HALF, BF16, True
        )
        assert float((rows.float() - want.float()).abs().max()) <= (2**-8 if last else 0.0)
        if last:
            continue
        for complete in (False, True):
            rest = (patch, last, not last, count, BF16, complete)
            with variants.forced(patch_launch.scatter_job("bf16", "bf16", patch, **form), way):
                back = patch_launch.rows_backward_cuda(rows, table, keep, *rest)
            assert torch.equal(back, patch_launch.patch_reference.rows_backward(rows, table, keep, *rest))


@pytest.mark.parametrize("way", GELU_DROPOUT_WAYS)
@pytest.mark.parametrize("count", [3, 40003, 2**20])
def test_every_way_of_gelu_with_dropout_drops_the_same_elements(way, count):
    x, key = randn(count), ops.philox_next(ops.philox_counter(5, "cuda"))
    with variants.forced("gelu_dropout", way):
        got = ops.gelu_tanh(x, p=0.25, key=key)
    want = reference.gelu_tanh(x.cpu(), 0.25, key.cpu())
    close(got.cpu(), want, 2**-7)


@pytest.mark.parametrize("way", TABLE_WAYS)
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("planar", [False, True])
def test_every_way_of_mixed_images_equals_the_reference(way, channels, planar):
    sizes = [(61, 77), (40, 96), (90, 31)]
    data = torch.randint(0, 256, (sum(h * w * channels for h, w in sizes),), dtype=torch.uint8)
    crops = [(1, 3, 59, 70), (0, 0, 40, 96), (7, 2, 80, 29)]
    for flips in ([False] * 3, [True] * 3):
        table = ops.image_table(sizes, channels=channels, planar=planar, crops=crops, flips=flips)
        call = ((67, 96), [0.4] * channels, [0.5] * channels)
        with variants.forced(TABLE_JOB, way):
            got = ops.image_table_to_half(data.cuda(), table.cuda(), *call, pad=9.0)
        want = ops.image_table_to_half(data, table, *call, pad=9.0)
        assert float((got.cpu().float() - want.float()).abs().max()) <= 2**-7
