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
TUNED_WIDTHS = (1152, 1536, 2048)  # where plans are chosen by measurement
# Row widths that are quantised to float8, by the activation in front: vision and language of the model (their
# widths, those of attention, of the MLPs and of the connector); and narrow ones, in every type.
FLOAT8_ROWS = {
    "none": (1152, 2048, 4304, 4608, 6144),
    "gelu_tanh": (4304,),
    "silu_mul": (6144,),
}
FLOAT8_SMALL = (16, 32, 48, 64, 128, 256, 512)
MAX_REGISTERS = 224
TUNED_FOR = "sm_90"
REGISTERS = 65_536  # of a multiprocessor, given to threads in eights: a block with more cannot be launched
MAX_FRAME_ELSEWHERE = 192  # bytes of stack and spills where the plans were not measured


def elementwise_kernels() -> Iterator[KernelSpec]:
    """Variants of the elementwise kernels, vector and scalar."""
    from loongforge_fuse.ops.elementwise import GELU_DROPOUT_WAYS, gelu_dropout_spec
    from loongforge_fuse.ops.elementwise import elementwise_spec as spec

    for x, vector in product(FLOATS, (True, False)):
        yield spec("gelu_forward", x=x, y=x, vector=vector)
        # The scalar kernel always makes one vector a thread.
        yield gelu_dropout_spec(x, vector=vector, way=GELU_DROPOUT_WAYS[0] if vector else "1")
        for dropout in (False, True):
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
    from loongforge_fuse.ops.columns import FEW, MANY, MOST, column_spec
    from loongforge_fuse.ops.norm_plan import (
        backward_plan,
        backward_spec,
        elsewhere,
        fitted,
        forward_plan,
        forward_spec,
    )

    for code, lines, follows in product(FLOATS, (FEW, MANY, MOST), (False, True)):
        yield column_spec(code, lines, follows=follows)
        if lines == FEW:
            yield column_spec(code, lines, follows=follows, brief=True)
    for width, norms in NORMS.items():
        for (x, r, w, y), (layer, gain, offset) in product(_norm_types(width), norms):
            for residual, large in product((False, True), (False, True)):
                plan = forward_plan(
                    width, residual=residual, large=large, layer=layer, modulate=gain == "modulate"
                )
                if plan is None:
                    continue
                yield forward_spec(
                    plan, width, layer=layer, x=x, r=r, w=w, y=y, gain=gain, offset=offset, residual=residual
                )
            for columns, large in product((False, True), (False, True)):
                modulate = gain == "modulate"
                back = backward_plan(width, columns=columns, large=large, layer=layer, modulate=modulate)
                if back is None or (columns and gain == "none"):
                    continue
                back = fitted(back, width, x=x, w=w, y=y)
                for plan, carry in product((back, elsewhere(back, width)), (False, True)):
                    yield backward_spec(
                        plan, width, layer=layer, x=x, w=w, y=y, gain=gain, columns=columns, offset=offset,
                        carry=carry,
                    )  # fmt: skip


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
    from loongforge_fuse.ops.image import TABLE_WAYS, planes_spec, table_spec
    from loongforge_fuse.ops.patch_plan import CLEAR_WAYS, clear_spec

    for y in FLOATS:
        yield planes_spec(y, 4)
        for channels in (1, 3, 4):
            yield table_spec(y, channels, vector=True, way=TABLE_WAYS[0])
            yield table_spec(y, channels, vector=False)
    yield from patch_kernels(first_only=True)
    yield clear_spec(CLEAR_WAYS[0])


def patch_kernels(*, first_only: bool) -> Iterator[KernelSpec]:
    """Variants of the patch kernels: the default of each job, or all others."""
    from loongforge_fuse.ops.patch_plan import (
        gather_ways,
        rows_backward_spec,
        rows_spec,
        scatter_ways,
    )

    chosen = slice(0, 1) if first_only else slice(1, None)
    flags = (True, False)
    for patch, last, planar in product((14, 16), flags, flags):
        for y, masked in product(("bf16", "f32"), flags):
            for x in ("u8", y):
                for way in gather_ways(x, y, patch, last=last, planar=planar)[chosen]:
                    yield rows_spec(x, y, patch, way, last=last, planar=planar, masked=masked)
            for way, fill in product(scatter_ways(y, y, patch, last=last, planar=planar)[chosen], flags):
                yield rows_backward_spec(y, y, patch, way, last=last, planar=planar, masked=masked, fill=fill)


def optimizer_kernels() -> Iterator[KernelSpec]:
    """Variants of the optimizer and the random counter."""
    from loongforge_fuse.ops.adamw_tables import norm_spec, prepare_spec, update_spec
    from loongforge_fuse.ops.dropout import tick_spec
    from loongforge_fuse.ops.products import bias_spec

    for code in FLOATS:
        yield bias_spec(code, code)
    for half in HALVES:
        yield bias_spec(half, "f32")
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
    from loongforge_fuse.ops.rope import BACKWARD_WAYS, rope_backward_spec, rope_spec

    types = (("bf16", "bf16", "bf16"), ("bf16", "f32", "bf16"), ("f32", "f32", "f32"))
    for (width, most), (x, w, c) in product(((16, 1), (16, 4), (128, 1), (128, 4)), types):
        each = min(most, 2) if x == "f32" else most
        yield rope_spec(x, w, c, width, each)
        yield rope_backward_spec(x, w, c, width, each, columns=False)
        for way in BACKWARD_WAYS[:2]:  # the default, and for GPUs where no kernel starts early
            yield rope_backward_spec(x, w, c, width, each, columns=True, way=way)


def float8_kernels() -> Iterator[KernelSpec]:
    """Variants of the quantisation of rows: model widths in bf16, and small rows."""
    from loongforge_fuse.ops.quantise_plan import plan_of, quantise_spec

    for activation, widths in FLOAT8_ROWS.items():
        for width, x in (*((w, "bf16") for w in widths), *product(FLOAT8_SMALL, FLOATS)):
            plan = plan_of(width, activation)
            if plan is not None:
                yield quantise_spec(plan, width, x, activation)


def tuning_kernels() -> Iterator[KernelSpec]:
    """Other ways of doing the same, which ``kernels tune`` measures against the defaults."""
    from loongforge_fuse.ops.elementwise import GELU_DROPOUT_WAYS, gelu_dropout_spec
    from loongforge_fuse.ops.image import TABLE_WAYS, table_spec
    from loongforge_fuse.ops.norm_plan import backward_spec, backward_ways, forward_spec, forward_ways
    from loongforge_fuse.ops.quantise_plan import quantise_spec, ways_of

    for activation, widths in FLOAT8_ROWS.items():
        for width in widths:
            for plan in ways_of(width, activation).values():
                yield quantise_spec(plan, width, "bf16", activation)
    from loongforge_fuse.ops.patch_plan import CLEAR_WAYS, clear_spec
    from loongforge_fuse.ops.rope import BACKWARD_WAYS, rope_backward_spec

    same = dict.fromkeys("xwy", "bf16")
    for way in GELU_DROPOUT_WAYS[1:]:
        yield gelu_dropout_spec("bf16", vector=True, way=way)
    for way, channels in product(TABLE_WAYS[1:], (1, 3, 4)):
        yield table_spec("bf16", channels, vector=True, way=way)
    yield from patch_kernels(first_only=False)
    for way in CLEAR_WAYS[1:-1]:  # the last is torch's
        yield clear_spec(way)
    for way in BACKWARD_WAYS[2:]:
        yield rope_backward_spec("bf16", "bf16", "bf16", 128, 4, columns=True, way=way)
    for width, flag, large in product(TUNED_WIDTHS, (False, True), (False, True)):
        for layer, gain, offset in NORMS[width]:
            modulate = gain == "modulate"
            ways = forward_ways(width, residual=flag, large=large, layer=layer, modulate=modulate)
            for plan in ways.values():
                yield forward_spec(
                    plan, width, layer=layer, **same, r="bf16", gain=gain, offset=offset, residual=flag
                )
            if flag and gain == "none":
                continue
            backs = backward_ways(width, columns=flag, modulate=modulate, large=large, layer=layer)
            for plan, carry in product(backs.values(), (False, True)):
                yield backward_spec(
                    plan, width, layer=layer, **same, gain=gain, columns=flag, offset=offset, carry=carry
                )


FAMILIES = {
    "elementwise": elementwise_kernels,
    "norm": norm_kernels,
    "image": image_kernels,
    "optimizer": optimizer_kernels,
    "rope": rope_kernels,
    "float8": float8_kernels,
    "tuning": tuning_kernels,
}
SHIPPED = ("elementwise", "norm", "image", "optimizer", "rope", "float8")


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
