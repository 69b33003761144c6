"""Which kernel variants are built ahead of time, and the limits each must keep.

Any other variant is compiled when it is first needed, on machines where numba-cuda works.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from loongforge_fuse.kernels.specs import KernelSpec

HALVES = ("bf16", "f16")
FLOATS = ("bf16", "f16", "f32")
_LAYER, _RMS = (True, "scale", True), (False, "scale", False)
_PLAIN_RMS = (False, "none", False)
_MODULATE, _BARE = (True, "modulate", True), (True, "none", False)
# Row widths and the norms met at each: heads and the tiny configuration, action head, vision, language,
# connector.
NORMS = {
    48: (_LAYER, _RMS, _MODULATE, _BARE),
    96: (_LAYER, _RMS, _MODULATE, _BARE),
    128: (_LAYER, _RMS),
    256: (_LAYER, _RMS),
    1024: (_LAYER, _RMS),
    1152: (_LAYER,),
    1536: (_LAYER, _MODULATE, _BARE),
    2048: (_LAYER, _MODULATE, _PLAIN_RMS, _RMS),
    4608: (_LAYER,),
}
# x, residual, table and result types: all the same, or the mixtures of an autocast region.
_SAME = {"bf16": ("bf16",) * 4, "f16": ("f16",) * 4, "f32": ("f32",) * 4}
_MIXED = (("f32", "bf16", "f32", "bf16"), ("bf16", "bf16", "f32", "bf16"))
MAX_REGISTERS = 224
TUNED_FOR = "sm_90"
MAX_FRAME_ELSEWHERE = 192  # bytes of stack and spills where the plans were not measured


def elementwise_kernels() -> Iterator[KernelSpec]:
    """Variants of the elementwise kernels, vector and scalar."""
    from loongforge_fuse.ops.elementwise import elementwise_spec as spec

    for x, vector in product(FLOATS, (True, False)):
        for dropout in (False, True):
            yield spec("gelu_forward", x=x, y=x, vector=vector, dropout=dropout)
            yield spec("gelu_backward", x=x, g=x, vector=vector, dropout=dropout)
        yield spec("silu_mul_forward", x=x, vector=vector)
        yield spec("silu_mul_backward", x=x, vector=vector)
        yield spec("dropout_forward", x=x, r=x, vector=vector, residual=True)
        yield spec("dropout_forward", x=x, r=x, vector=vector, residual=False)
    for half, vector in product(HALVES, (True, False)):
        # Half branch on a float32 residual stream, as autocast gives it.
        yield spec("dropout_forward", x=half, r="f32", vector=vector, residual=True)
        yield spec("dropout_forward", x="f32", r=half, vector=vector, residual=False)
    for x, y, vector, scaled in product(FLOATS, FLOATS, (True, False), (False, True)):
        yield spec("cast_scale", x=x, y=y, vector=vector, count_bad=True, device_scale=scaled)


def norm_kernels() -> Iterator[KernelSpec]:
    """Variants of the norms for the widths of the models."""
    from loongforge_fuse.ops.norm_plan import (
        backward_plan,
        backward_spec,
        column_spec,
        forward_plan,
        forward_spec,
    )

    for code in FLOATS:
        yield column_spec(code)
    for width, norms in NORMS.items():
        for (x, r, w, y), (layer, gain, offset) in product(_norm_types(width), norms):
            for residual in (False, True):
                plan = forward_plan(width, residual=residual)
                if plan is None:
                    continue
                yield forward_spec(
                    plan, width, layer=layer, x=x, r=r, w=w, y=y, gain=gain, offset=offset, residual=residual
                )
            for carry, columns in product((False, True), (False, True)):
                back = backward_plan(width, columns=columns)
                if back is None or (columns and gain == "none"):
                    continue
                yield backward_spec(
                    back,
                    width,
                    layer=layer,
                    x=x,
                    w=w,
                    y=y,
                    gain=gain,
                    columns=columns,
                    offset=offset,
                    carry=carry,
                )


def _norm_types(width: int) -> tuple[tuple[str, str, str, str], ...]:
    """Return the type mixtures built for a width; float16 and pure float32 only where tests and models use
    them.
    """
    types = [_SAME["bf16"], *(_MIXED if 1024 <= width <= 2048 else ())]
    if width <= 256 or width == 2048:
        types.append(_SAME["f32"])
    if width in (48, 96, 2048):
        types.append(_SAME["f16"])
    return tuple(types)


def image_kernels() -> Iterator[KernelSpec]:
    """Variants of the image and patch kernels."""
    from loongforge_fuse.ops.image import planes_spec, table_spec
    from loongforge_fuse.ops.patches import rows_backward_spec, rows_spec

    for y in FLOATS:
        yield planes_spec(y, 4)
        for channels, vector in product((1, 3, 4), (True, False)):
            yield table_spec(y, channels, vector=vector)
    for patch, last, masked in product((14, 16), (True, False), (True, False)):
        for y, planar in product(("bf16", "f32"), (False, True)):
            form = {"last": last, "planar": planar, "masked": masked}
            yield rows_spec("u8", y, patch, **form)
            yield rows_spec(y, y, patch, **form)
            yield rows_backward_spec(y, y, patch, **form)


def optimizer_kernels() -> Iterator[KernelSpec]:
    """Variants of the optimizer and the random counter."""
    from loongforge_fuse.ops.adamw import norm_spec, prepare_spec, update_spec
    from loongforge_fuse.ops.bias import bias_spec
    from loongforge_fuse.ops.dropout import tick_spec

    for code in FLOATS:
        yield bias_spec(code, code)
    yield tick_spec()
    yield prepare_spec()
    for g in FLOATS:
        yield norm_spec(g)
    yield update_spec("f32", "f32", "f32", master=False)
    yield update_spec("f32", "bf16", "f32", master=False)
    for half in HALVES:
        yield update_spec(half, half, half, master=False)
        yield update_spec(half, half, "f32", master=False)
        yield update_spec(half, half, "f32", master=True)
    yield update_spec("bf16", "bf16", "bf16", master=True)


def rope_kernels() -> Iterator[KernelSpec]:
    """Variants of the per-head norm with rotation: model, autocast and full precision."""
    from loongforge_fuse.ops.rope import rope_backward_spec, rope_spec

    types = (("bf16", "bf16", "bf16"), ("bf16", "f32", "bf16"), ("f32", "f32", "f32"))
    for (width, each), (x, w, c) in product(((16, 1), (16, 4), (128, 4)), types):
        yield rope_spec(x, w, c, width, each)
        for columns in (False, True):
            yield rope_backward_spec(x, w, c, width, each, columns=columns)


# (width, threads, vectors, elements, ahead): ways to spread a forward row, to choose from by measurement.
FORWARD_CHOICES = (
    *((2048, 128, 2, 8, a) for a in (False, True)),
    *((1536, t, v, e, a) for t, v, e in ((96, 2, 8), (128, 3, 4)) for a in (False, True)),
    *((1152, t, v, e, a) for t, v, e in ((96, 3, 4), (96, 2, 8), (32, 9, 4)) for a in (False, True)),
)
# (width, threads, vectors, elements, blocks on a multiprocessor): the same for the backward pass.
BACKWARD_CHOICES = (
    *((2048, t, v, 8, m) for t, v, m in ((128, 2, 4), (256, 1, 3))),
    *((1536, t, v, e, m) for t, v, e, m in ((96, 2, 8, 5), (192, 1, 8, 4), (128, 3, 4, 4))),
    *((1152, t, v, e, m) for t, v, e, m in ((96, 3, 4, 5), (160, 1, 8, 4))),
)


def tuning_kernels() -> Iterator[KernelSpec]:
    """Candidates the benchmark chooses row plans from; not part of what is shipped."""
    from loongforge_fuse.ops.norm_plan import RowPlan, backward_spec, forward_spec

    same = dict.fromkeys("xwy", "bf16")
    for width, threads, vectors, each, ahead in FORWARD_CHOICES:
        plan = RowPlan(threads=threads, vectors=vectors, block=max(threads, 96), each=each, ahead=ahead)
        for residual in (False, True):
            yield forward_spec(
                plan, width, layer=True, **same, r="bf16", gain="scale", offset=True, residual=residual
            )
    for width, threads, vectors, each, blocks in BACKWARD_CHOICES:
        plan = RowPlan(threads=threads, vectors=vectors, block=threads, each=each, min_blocks=blocks)
        for columns in (False, True):
            yield backward_spec(
                plan, width, layer=True, **same, gain="scale", columns=columns, offset=True, carry=False
            )


FAMILIES = {
    "elementwise": elementwise_kernels,
    "norm": norm_kernels,
    "image": image_kernels,
    "optimizer": optimizer_kernels,
    "rope": rope_kernels,
    "tuning": tuning_kernels,
}
SHIPPED = ("elementwise", "norm", "image", "optimizer", "rope")


def catalog(family: str | None = None) -> tuple[KernelSpec, ...]:
    """Return the kernels built ahead of time, each once: of one family, or of all that are shipped.

    Raises:
        ValueError: there is no such family.
    """
    if family is not None and family not in FAMILIES:
        message = f"unknown kernel family {family!r}; there are {', '.join(FAMILIES)}"
        raise ValueError(message)
    chosen = SHIPPED if family is None else (family,)
    unique = {spec.name: spec for name in chosen for spec in FAMILIES[name]()}
    return tuple(unique[name] for name in sorted(unique))
