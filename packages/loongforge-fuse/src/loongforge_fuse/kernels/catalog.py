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
    2048: (_LAYER, _RMS),
    4608: (_LAYER,),
}
# x, residual, table and result types: all the same, or the mixtures of an autocast region.
_SAME = {"bf16": ("bf16",) * 4, "f16": ("f16",) * 4, "f32": ("f32",) * 4}
_MIXED = (("f32", "bf16", "f32", "bf16"), ("bf16", "bf16", "f32", "bf16"))
MAX_REGISTERS = 168


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
    from loongforge_fuse.ops.norm import (
        backward_plan,
        backward_spec,
        column_spec,
        forward_plan,
        forward_spec,
    )

    yield column_spec()
    for width, norms in NORMS.items():
        forward, backward = forward_plan(width), backward_plan(width)
        if forward is None or backward is None:
            continue
        for (x, r, w, y), (layer, gain, offset) in product(_norm_types(width), norms):
            for residual in (False, True):
                yield forward_spec(
                    forward, layer=layer, x=x, r=r, w=w, y=y, gain=gain, offset=offset, residual=residual
                )
            for carry, columns in product((False, True), (False, True)):
                if columns and gain == "none":
                    continue
                yield backward_spec(
                    backward,
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
    types = [_SAME["bf16"], *(_MIXED if width >= 1024 else ())]
    if width <= 256 or width in (1536, 2048):
        types.append(_SAME["f32"])
    if width in (48, 2048):
        types.append(_SAME["f16"])
    return tuple(types)


def image_kernels() -> Iterator[KernelSpec]:
    """Variants of the image and patch kernels."""
    from loongforge_fuse.ops.image import planes_spec, table_spec
    from loongforge_fuse.ops.patches import rows_backward_spec, rows_spec

    for y in FLOATS:
        for pixels in (8, 16):
            yield planes_spec(y, pixels)
        for vector in (True, False):
            yield table_spec(y, vector=vector)
    for patch, last, masked in product((14, 16), (True, False), (True, False)):
        for y in FLOATS:
            yield rows_spec("u8", y, patch, last=last, masked=masked)
            yield rows_spec(y, y, patch, last=last, masked=masked)
            yield rows_backward_spec(y, y, patch, last=last, masked=masked)


def optimizer_kernels() -> Iterator[KernelSpec]:
    """Variants of the optimizer and the random counter."""
    from loongforge_fuse.ops.adamw import norm_spec, prepare_spec, update_spec
    from loongforge_fuse.ops.dropout import tick_spec

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


# (width, threads, vectors, block): ways to spread a forward row, to choose from by measurement.
FORWARD_CHOICES = (
    *((2048, t, v, b) for t, v in ((32, 8), (64, 4), (128, 2), (256, 1)) for b in (128, 256) if t <= b),
    *((1536, t, v, b) for t, v, b in ((32, 6, 128), (32, 6, 256), (64, 3, 256), (96, 2, 96), (192, 1, 192))),
    *((1152, t, v, b) for t, v, b in ((32, 5, 128), (32, 5, 256), (64, 3, 256), (160, 1, 160))),
)
# (width, threads, vectors, pace): the same for the backward pass.
BACKWARD_CHOICES = (
    *(
        (2048, t, v, p)
        for t, v, p in ((256, 1, 1), (256, 1, 2), (256, 1, 4), (128, 2, 1), (128, 2, 2), (64, 4, 1))
    ),
    *((1536, t, v, p) for t, v, p in ((192, 1, 1), (192, 1, 2), (192, 1, 4), (96, 2, 1), (96, 2, 2))),
    *((1152, t, v, p) for t, v, p in ((160, 1, 1), (160, 1, 2), (160, 1, 4), (96, 2, 1))),
)


def tuning_kernels() -> Iterator[KernelSpec]:
    """Candidates the benchmark chooses row plans from; not part of what is shipped."""
    from loongforge_fuse.ops.norm import RowPlan, backward_spec, forward_spec

    for width, threads, vectors, block in FORWARD_CHOICES:
        plan = RowPlan(threads=threads, vectors=vectors, block=block)
        for layer, gain, offset in NORMS[width]:
            for residual in (False, True):
                yield forward_spec(
                    plan, layer=layer, **_types("bf16"), gain=gain, offset=offset, residual=residual
                )
    for width, threads, vectors, pace in BACKWARD_CHOICES:
        plan = RowPlan(threads=threads, vectors=vectors, block=threads, pace=pace)
        for layer, gain, offset in NORMS[width]:
            for columns in (False, True) if gain != "none" else (False,):
                yield backward_spec(
                    plan,
                    layer=layer,
                    x="bf16",
                    w="bf16",
                    y="bf16",
                    gain=gain,
                    columns=columns,
                    offset=offset,
                    carry=False,
                )


def _types(code: str) -> dict[str, str]:
    return dict.fromkeys("xrwy", code)


FAMILIES = {
    "elementwise": elementwise_kernels,
    "norm": norm_kernels,
    "image": image_kernels,
    "optimizer": optimizer_kernels,
    "tuning": tuning_kernels,
}
SHIPPED = ("elementwise", "norm", "image", "optimizer")


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
