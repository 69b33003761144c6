"""Runs every kernel family once on small tensors: the program that compute-sanitizer watches."""

from __future__ import annotations

import sys
from itertools import product

import torch
from loongforge_fuse import ops
from loongforge_fuse.ops import norm_launch, norm_plan, patch_launch, patch_plan, quantise_plan, variants
from loongforge_fuse.ops.adamw import FusedAdamW
from loongforge_fuse.ops.elementwise import GELU_DROPOUT_WAYS
from loongforge_fuse.ops.image import TABLE_JOB, TABLE_WAYS

KINDS = {"u8": torch.uint8, "bf16": torch.bfloat16, "f32": torch.float32}


def patches() -> None:
    """Gather and scatter patches in every way there is, at even and odd addresses, masked and not."""
    half = [0.5] * 3
    for patch, last, code, start in product((14, 16), (True, False), ("u8", "bf16", "f32"), (0, 1)):
        planar = not last
        form = {"last": last, "planar": planar}
        sizes = [(2 * patch, 21 * patch), (patch, 2 * patch)]
        count = start + sum(h * w * 3 for h, w in sizes)
        table = ops.patch_table(sizes, patch, planar=planar, start=start).cuda()
        keep = torch.arange(table.shape[0], device="cuda") % 3 != 0
        values = torch.randint(0, 256, (count,), device="cuda")
        pixels, target = values.to(KINDS[code]), "bf16" if code == "u8" else code
        for mask in (None, keep):
            for way in patch_plan.gather_ways(code, target, patch, **form):
                with variants.forced(patch_launch.gather_job(code, target, patch, **form), way):
                    rows = patch_launch.rows_cuda(
                        pixels, table, mask, patch, last, planar, half, half, KINDS[target], False
                    )
            if code == "u8":
                continue
            for way, complete in product(
                patch_plan.scatter_ways(code, code, patch, **form), (False, not start)
            ):
                with variants.forced(patch_launch.scatter_job(code, code, patch, **form), way):
                    patch_launch.rows_backward_cuda(
                        rows, table, mask, patch, last, planar, count, KINDS[code], complete
                    )


def norms() -> None:
    """Run every plan of the norms that tuning may choose, on rows enough for blocks to walk a few."""
    kinds = (
        (1152, True, 1),
        (1536, True, 1),
        (2048, True, 1),
        (2048, False, 1),
        (1536, True, 3),
        (2048, True, 3),
    )
    for (width, layer, groups), flag in product(kinds, (0, 1)):
        rows, modulate = 1500, groups > 1
        x, g = (torch.randn(rows, width, device="cuda").to(torch.bfloat16) for _ in "xg")
        w = torch.randn(groups, width, device="cuda").to(torch.bfloat16)
        mean = torch.zeros(rows if layer else 0, device="cuda")
        rstd = torch.ones(rows, device="cuda")
        offset = w if layer else None
        form = {"layer": layer, "large": False, "modulate": modulate}
        job = norm_launch.forward_job(width, residual=bool(flag), **form)
        for way in norm_plan.forward_ways(width, residual=bool(flag), **form):
            with variants.forced(job, way):
                norm_launch.run_norm(x, g if flag else None, w, offset, layer, modulate, 1e-6, torch.bfloat16)
        job = norm_launch.backward_job(width, columns=bool(flag), **form)
        settings = (layer, modulate, rows // groups, bool(flag), bool(flag) and layer, groups)
        for way in norm_plan.backward_ways(width, columns=bool(flag), **form):
            with variants.forced(job, way):
                norm_launch.run_norm_backward(g, None, x, w, mean, rstd, *settings)


def quantised() -> None:
    """Quantise rows by every plan, with activations, and small rows of every type, at odd addresses too."""
    for width, activation in ((1152, "none"), (2048, "none"), (4304, "gelu_tanh"), (6144, "silu_mul")):
        x, up = (torch.randn(501, width, device="cuda").to(torch.bfloat16) for _ in "xu")
        second = up if activation == "silu_mul" else None
        for way in quantise_plan.ways_of(width, activation):
            with variants.forced(quantise_plan.job_of(width, activation), way):
                ops.quantise_rows(x, up=second, activation=activation)
    for width, dtype, start in product((16, 48, 512), (torch.bfloat16, torch.float16, torch.float32), (0, 1)):
        flat = torch.randn(37 * width + start, device="cuda").to(dtype)
        ops.quantise_rows(flat[start:].view(37, width))


def main() -> None:
    """Run forward and backward of every operator, aligned and misaligned, then print the counters."""
    torch.manual_seed(0)
    counter = ops.philox_counter(1, "cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for start in (0, 1):
            flat = torch.randn(3 * 2048 + 16, device="cuda").to(dtype)
            x = flat[start : start + 3 * 2048 + 5].clone().requires_grad_() if start == 0 else flat[1:]
            x = x.detach().requires_grad_()
            y = ops.gelu_tanh(x, p=0.1, key=ops.philox_next(counter))
            z = ops.dropout_residual(ops.silu_mul(y, x), y, p=0.2, key=ops.philox_next(counter))
            ops.cast_scale(z, torch.float32, factor=2.0)[0].sum().backward()
        for width in (48, 128, 1152, 1536, 2048, 4608):
            if dtype == torch.float16 and width not in (48, 2048):
                continue
            a, r = (torch.randn(2, 33, width, device="cuda").to(dtype).requires_grad_() for _ in "ar")
            w = torch.randn(width, device="cuda").to(dtype).requires_grad_()
            b = torch.randn(2, 2 * width, device="cuda").to(dtype).requires_grad_()
            p, total = ops.layer_norm_modulate(a, residual=r, weight=w, bias=w)
            loss = p.float().sum() + total.float().sum()
            if width in (48, 1536):
                scale, shift = b.chunk(2, -1)
                loss = loss + ops.layer_norm_modulate(a, scale=scale, shift=shift).float().sum()
                loss = loss + ops.layer_norm_modulate(a, residual=r, table=b)[0].float().sum()
            if width in (48, 128, 2048):
                loss = loss + ops.rms_norm(a, residual=r, weight=w)[0].float().sum()
            loss.backward()
    heads = torch.randn(2, 33, 4, 128, device="cuda").to(torch.bfloat16).requires_grad_()
    scale = torch.ones(128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    table = torch.randn(33, 128, device="cuda").to(torch.bfloat16)
    ops.head_norm_rope(heads, scale, table, table).float().sum().backward()
    ops.linear(
        heads.flatten(0, 2),
        torch.ones(72, 128, device="cuda", dtype=torch.bfloat16),
        torch.zeros(72, device="cuda", dtype=torch.bfloat16, requires_grad=True),
    ).float().sum().backward()
    images = torch.randint(0, 256, (2, 28, 56, 3), dtype=torch.uint8, device="cuda")
    ops.image_to_half(images)
    ops.image_to_half(images[:, :8, :1].contiguous())
    table = ops.image_table([(28, 56)] * 2, flips=[True, False]).cuda()
    for way in TABLE_WAYS:
        with variants.forced(TABLE_JOB, way):
            ops.image_table_to_half(images.view(-1), table, (30, 64))
    ops.image_table_to_half(images.view(-1), table, (30, 61))
    patches()
    norms()
    if torch.cuda.get_device_capability() >= (8, 9):
        quantised()
    x = torch.randn(40003, device="cuda").to(torch.bfloat16)
    for way in GELU_DROPOUT_WAYS:
        with variants.forced("gelu_dropout", way):
            ops.gelu_tanh(x, p=0.1, key=ops.philox_next(counter))
    for dtype, masters in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)):
        params = [torch.nn.Parameter(torch.randn(n, device="cuda").to(dtype)) for n in (3, 16384, 40001)]
        optimizer = FusedAdamW(params, max_grad_norm=1.0, master_weights=masters, state_dtype=torch.float32)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
    torch.cuda.synchronize()
    sys.stdout.write(f"{ops.op_counters()}\n")


if __name__ == "__main__":
    main()
