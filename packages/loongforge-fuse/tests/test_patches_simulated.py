"""Image and patch kernels in the simulator: odd sizes, addresses, steps and masks, against plain torch."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from loongforge_fuse import ops
from loongforge_fuse.kernels.simulator.operators import simulated_gpu
from loongforge_fuse.ops import patch_launch, patch_plan, patch_reference, variants
from loongforge_fuse.ops.image import TABLE_JOB, TABLE_WAYS

BF16 = torch.bfloat16
CODES = {"u8": torch.uint8, "bf16": BF16, "f16": torch.float16, "f32": torch.float32}
HALF = [0.5, 0.4, 0.6]


pytestmark = pytest.mark.usefixtures("poisoned")


def pixels_of(code: str, count: int, shift: int = 0) -> torch.Tensor:
    """Random pixels that lie `shift` elements above a 16-byte border."""
    flat = torch.empty(count + 16, dtype=CODES[code])
    values = torch.randint(0, 256, (count,)) if code == "u8" else torch.randn(count)
    return flat[shift : shift + count].copy_(values.to(CODES[code]))


def scene(patch: int, *, planar: bool, start: int = 0):
    """A table of three images of different size, a mask with patches left out, and the number of pixels."""
    sizes = [(patch, 3 * patch), (2 * patch, patch), (patch, 2 * patch)]
    table = ops.patch_table(sizes, patch, planar=planar, start=start)
    mask = torch.ones(table.shape[0], dtype=torch.bool)
    mask[[1, 5]] = False
    return table, mask, start + sum(h * w * 3 for h, w in sizes)


def gathering() -> list[tuple]:
    found = []
    for patch, (x, y), last, planar in itertools.product(
        (14, 16),
        (("u8", "bf16"), ("u8", "f32"), ("bf16", "bf16"), ("f32", "f32")),
        (True, False),
        (True, False),
    ):
        ways = patch_plan.gather_ways(x, y, patch, last=last, planar=planar)
        for way in ways:
            # One type and the default way of each job run always, the others with the slow tests.
            marks = () if way == ways[0] and y == "bf16" else pytest.mark.slow
            found.append(pytest.param(patch, x, y, last, planar, way, marks=marks))
    return found


@pytest.mark.parametrize(("patch", "x", "y", "last", "planar", "way"), gathering())
def test_every_gathering_kernel_equals_the_reference_at_any_address(patch, x, y, last, planar, way):
    job = patch_launch.gather_job(x, y, patch, last=last, planar=planar)
    with simulated_gpu(seed=1) as launched, variants.forced(job, way):
        for start, shift, masked in ((0, 0, False), (1, 0, True), (4, 2, True)):
            table, mask, count = scene(patch, planar=planar, start=start)
            if masked:
                table[3, 0] = -1
            pixels = pixels_of(x, count, shift)
            form = (patch, last, planar, HALF, HALF, CODES[y], False)
            got = patch_launch.rows_cuda(pixels, table, mask if masked else None, *form)
            want = patch_reference.rows(pixels, table, mask if masked else None, *form)
            if x == "u8":
                assert float((got.float() - want.float()).abs().max()) <= (2**-8 if y == "bf16" else 1e-6)
            else:
                assert torch.equal(got, want)
    assert not ops.op_counters()["fallbacks"]
    assert len(launched) == 3


def scattering() -> list[tuple]:
    found = []
    for patch, y, last, planar in itertools.product((14, 16), ("bf16", "f32"), (True, False), (True, False)):
        ways = patch_plan.scatter_ways(y, y, patch, last=last, planar=planar)
        for way in ways:
            marks = () if way == ways[0] and y == "bf16" else pytest.mark.slow
            found.append(pytest.param(patch, y, last, planar, way, marks=marks))
    return found


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(("patch", "y", "last", "planar", "way"), scattering())
def test_every_scattering_kernel_equals_the_reference_with_and_without_clearing(
    patch, y, last, planar, way, complete
):
    job = patch_launch.scatter_job(y, y, patch, last=last, planar=planar)
    with simulated_gpu(seed=2) as launched, variants.forced(job, way):
        for start, masked in ((0, False), (0, True), (3, True)):
            if complete and start:
                continue  # the pixels before the first image belong to no patch
            table, mask, count = scene(patch, planar=planar, start=start)
            if masked and not complete:
                table[3, 0] = -1
            grad = torch.randn(table.shape[0], patch_plan.padded_length(patch)).to(CODES[y])
            form = (patch, last, planar, count, CODES[y], complete)
            got = patch_launch.rows_backward_cuda(grad, table, mask if masked else None, *form)
            want = patch_reference.rows_backward(grad, table, mask if masked else None, *form)
            assert torch.equal(got, want)
    assert not ops.op_counters()["fallbacks"]
    cleared = [spec for spec in launched if spec.maker == "clear_down"]
    assert len(cleared) == (0 if complete else 3)
    assert len(launched) - len(cleared) == (2 if complete else 3)


@pytest.mark.parametrize(
    ("x", "planar", "way"),
    [
        ("u8", False, None),
        ("u8", False, "strips walk 8"),
        ("u8", False, "words walk 9"),
        ("bf16", True, None),
        ("bf16", True, "tiles 8 walk 6"),
    ],
)
def test_patches_of_several_blocks_and_a_rest_are_gathered_and_scattered(x, planar, way, monkeypatch):
    # Two blocks at a time, so that those that walk have something to walk.
    monkeypatch.setattr(
        patch_plan, "_walking", lambda spec, blocks, _: min(blocks, 2) if spec.options["walk"] else blocks
    )
    table = ops.patch_table([(28, 14 * 19)], 14, planar=planar)
    pixels = pixels_of(x, 28 * 14 * 19 * 3)
    form = (14, not planar, planar, HALF, HALF, BF16, True)
    with simulated_gpu(seed=3) as launched, contextlib.ExitStack() as stack:
        if way is not None:
            kind = {"last": not planar, "planar": planar}
            for job in (patch_launch.gather_job, patch_launch.scatter_job):
                stack.enter_context(variants.forced(job(x, "bf16", 14, **kind), way))
        got = patch_launch.rows_cuda(pixels, table, None, *form)
        if planar:
            back = patch_launch.rows_backward_cuda(
                got, table, None, 14, False, True, pixels.numel(), BF16, True
            )
            assert torch.equal(back, pixels)
    assert torch.equal(got, patch_reference.rows(pixels, table, None, *form))
    assert len(launched) == 1 + planar


def test_images_whose_rows_are_not_multiples_of_the_access_are_gathered_too():
    # 3 x 14 + 1 pixels a row: rows start at every residue modulo 4 bytes.
    wide = torch.randint(0, 256, (14, 43, 3), dtype=torch.uint8)
    origins = torch.arange(3).mul(42)
    table = torch.stack([origins, *(torch.full((3,), v) for v in (129, 3, 1))], 1)
    for way in ("strips", "words min 12", "words wide min 8", "runs"):
        with (
            simulated_gpu(),
            variants.forced(patch_launch.gather_job("u8", "bf16", 14, last=True, planar=False), way),
        ):
            form = (14, True, False, HALF, HALF, BF16, False)
            got = patch_launch.rows_cuda(wide.view(-1), table, None, *form)
        assert torch.equal(got, patch_reference.rows(wide.view(-1), table, None, *form))


@pytest.mark.parametrize("way", ["words min 12", "words wide min 8", "words walk 9"])
@pytest.mark.parametrize("start", [0, 2, 6, 3])
def test_lines_are_read_as_words_where_patches_lie_side_by_side(way, start, monkeypatch):
    # Lines of 840 bytes are whole words; 20 patches a line leave tiles that go around its end.
    monkeypatch.setattr(
        patch_plan, "_walking", lambda spec, blocks, _: min(blocks, 2) if spec.options["walk"] else blocks
    )
    table = ops.patch_table([(28, 14 * 20)], 14, planar=False, start=start)
    pixels = pixels_of("u8", start + 28 * 14 * 20 * 3)
    mask = torch.ones(table.shape[0], dtype=torch.bool)
    mask[[4, 9, 10, 11, 39]] = False
    form = (14, True, False, HALF, HALF, BF16, False)
    for keep in (None, mask):
        with (
            simulated_gpu(seed=4),
            variants.forced(patch_launch.gather_job("u8", "bf16", 14, last=True, planar=False), way),
        ):
            got = patch_launch.rows_cuda(pixels, table, keep, *form)
        want = patch_reference.rows(pixels, table, keep, *form)
        assert float((got.float() - want.float()).abs().max()) <= 2**-8


def test_a_backward_without_gradient_alignment_falls_back():
    table, _, count = scene(14, planar=True)
    flat = torch.randn(table.shape[0] * 592 + 8).to(BF16)
    with simulated_gpu() as launched:
        patch_launch.rows_backward_cuda(
            flat[1 : 1 + table.shape[0] * 592].view(-1, 592), table, None, 14, False, True, count, BF16, False
        )
    assert launched == []
    assert list(ops.op_counters()["fallbacks"]) == [
        "masked_unfold_backward: a tensor cannot be read in 16-byte vectors"
    ]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [(4, 1), (6, 14), (8, 33)])
def test_whole_images_equal_the_reference(size, dtype):
    image = torch.randint(0, 256, (2, *size, 3), dtype=torch.uint8)
    want = ops.image_to_half(image, HALF, HALF, dtype)
    with simulated_gpu() as launched:
        got = ops.image_to_half(image, HALF, HALF, dtype)
    assert [spec.maker for spec in launched] == ["image_planes"]
    assert float((got.float() - want.float()).abs().max()) <= {BF16: 2**-7, torch.float16: 2**-10}.get(
        dtype, 1e-6
    )


@pytest.mark.parametrize("way", TABLE_WAYS)
@pytest.mark.parametrize(
    ("channels", "planar", "out"),
    [(3, False, (9, 16)), (3, True, (9, 16)), (3, False, (7, 11)), (1, False, (7, 16)), (4, True, (9, 16))],
)
def test_mixed_images_equal_the_reference_cropped_mirrored_and_padded(channels, planar, out, way):
    sizes = [(9, 19), (7, 16), (12, 9)]
    data = torch.randint(0, 256, (sum(h * w * channels for h, w in sizes),), dtype=torch.uint8)
    mean, std = [0.4] * channels, [0.5] * channels
    for flips in ([False] * 3, [True, False, True]):
        table = ops.image_table(
            sizes,
            channels=channels,
            planar=planar,
            crops=[(0, 1, 9, 17), (0, 0, 7, 16), (2, 0, 6, 8)],
            flips=flips,
        )
        want = ops.image_table_to_half(data, table, out, mean, std, pad=7.0)
        with simulated_gpu() as launched, variants.forced(TABLE_JOB, way):
            got = ops.image_table_to_half(data, table, out, mean, std, pad=7.0)
        assert [spec.maker for spec in launched] == ["image_table"]
        lines = min(int(way[0]), 2 if channels == 4 else 4) if out[1] % 8 == 0 else 1
        assert launched[0].options["lines"] == lines
        assert float((got.float() - want.float()).abs().max()) <= 2**-7


def test_a_complete_table_spares_the_clearing_and_gives_the_same_gradient():
    table, mask, count = scene(14, planar=True)
    grads = []
    for complete in (False, True):
        pixels = torch.randn(count).to(BF16).requires_grad_()
        with simulated_gpu():
            rows = ops.masked_unfold(pixels, table, patch=14, mask=mask, last=False, complete=complete)
            seed = torch.arange(rows.numel()).view(rows.shape).to(BF16)
            rows.backward(seed)
        grads.append(pixels.grad)
    assert torch.equal(*grads)
