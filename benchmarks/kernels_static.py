"""What the machine code of the bandwidth-bound kernels allows, without a GPU: instructions, occupancy, loads.

At full bandwidth a multiprocessor may spend only so many instructions on a byte. The script compiles the bf16
variants, disassembles them (nvdisasm, from the PATH or the triton package) and sets the instructions of a
thread against that budget, with registers, warps that fit, and bytes of wide loads in flight. Instructions
count whole kernels, slow paths and prologues too, loops once: an upper bound, good for comparing designs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import _common
from loongforge_fuse.kernels.compiler import compile_kernel
from loongforge_fuse.kernels.specs import KernelSpec
from loongforge_fuse.ops.elementwise import GELU_DROPOUT_WAYS, elementwise_spec, gelu_dropout_spec
from loongforge_fuse.ops.image import TABLE_WAYS, planes_spec, table_spec
from loongforge_fuse.ops.norm_plan import backward_spec, backward_ways, forward_spec, forward_ways
from loongforge_fuse.ops.patch_plan import (
    gather_ways,
    padded_length,
    rows_backward_spec,
    rows_spec,
    scatter_ways,
)
from loongforge_fuse.ops.quantise_plan import quantise_spec, ways_of
from loongforge_fuse.ops.rope import rope_backward_spec, rope_spec

# H200 (public data sheet and CUDA's table of limits for compute capability 9.0).
PROCESSORS, CLOCK_GHZ, SCHEDULERS, REGISTERS, WARPS, BLOCKS, SHARED = 132, 1.755, 4, 65536, 64, 32, 227 * 1024
BANDWIDTH_TB_S = 4.0  # device copy, see results/h200/kernels.json


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel, the elements a thread handles in one pass of its code, and the bytes each element moves."""

    name: str
    spec: KernelSpec
    elements: float
    bytes_each: float


def disassembler() -> str | None:
    """Return the path of nvdisasm, or None."""
    found = shutil.which("nvdisasm")
    if found is None and (triton := find_spec("triton")) is not None and triton.origin:
        path = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        found = str(path) if path.is_file() else None
    return found


def instructions(cubin: bytes, tool: str) -> int:
    """Return the number of machine instructions, without padding."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\w+)", text, re.MULTILINE)
    return sum(name != "NOP" for name in found)


def patch_cases() -> Iterator[Case]:
    """Gathering and scattering of patches, every way."""
    for patch, x in ((14, "u8"), (16, "u8"), (14, "bf16"), (16, "bf16")):
        form = {"last": x == "u8", "planar": x != "u8"}
        length = padded_length(patch)
        for way in gather_ways(x, "bf16", patch, **form):
            spec = rows_spec(x, "bf16", patch, way, masked=False, **form)
            each: float = 8
            if way.startswith(("strips", "words")):
                # The loop over the patches of a strip counts once; words are read for all of them, so their
                # count is too high rather than too low.
                each = length / 32
            elif way == "vectors":
                each = length / 32
            elif way.startswith("tiles"):
                each = int(spec.options["tile"]) * length / spec.block
            name = f"masked_unfold {patch} {x} {way}"
            yield Case(name=name, spec=spec, elements=each, bytes_each=3 if x == "u8" else 4)
        for way in scatter_ways("bf16", "bf16", patch, **form) if x == "bf16" else ():
            spec = rows_backward_spec("bf16", "bf16", patch, way, masked=False, fill=True, **form)
            each = int(spec.options["tile"]) * length / spec.block
            yield Case(name=f"masked_unfold backward {patch} {way}", spec=spec, elements=each, bytes_each=4)


def norm_cases() -> Iterator[Case]:
    """Norms of the model's widths with their default plans."""
    same = dict.fromkeys("xwy", "bf16")
    kinds = (
        (1152, True, "scale"), (1536, True, "modulate"), (2048, True, "scale"), (2048, True, "modulate"),
        (2048, False, "scale"),
    )  # fmt: skip
    for width, layer, gain in kinds:
        name = f"{'layer' if layer else 'rms'}_norm {gain} {width}"
        for flag in (False, True):
            modulate = gain == "modulate"
            ways = forward_ways(width, residual=flag, large=True, layer=layer, modulate=modulate)
            plan = next(iter(ways.values()))
            spec = forward_spec(
                plan, width, layer=layer, **same, r="bf16", gain=gain, offset=layer, residual=flag
            )
            yield Case(
                name=name + " residual" * flag, spec=spec, elements=plan.vectors * plan.each,
                bytes_each=8 if flag else 4,
            )  # fmt: skip
            plan = next(iter(backward_ways(width, columns=flag, layer=layer).values()))
            spec = backward_spec(
                plan, width, layer=layer, **same, gain=gain, columns=flag, offset=layer, carry=False
            )
            yield Case(
                name=f"{name} backward{'' if flag else ' frozen'}", spec=spec,
                elements=plan.vectors * plan.each, bytes_each=6,
            )  # fmt: skip


def quantise_cases() -> Iterator[Case]:
    """Rows that become float8, by every plan."""
    chosen = ((1152, "none"), (2048, "none"), (4304, "none"), (4304, "gelu_tanh"), (6144, "silu_mul"))
    for width, activation in chosen:
        for way, plan in ways_of(width, activation).items():
            yield Case(
                name=f"quantise_rows {width} {activation} {way}",
                spec=quantise_spec(plan, width, "bf16", activation), elements=8 * plan.vectors,
                bytes_each=5 if activation == "silu_mul" else 3,
            )  # fmt: skip


def cases() -> Iterator[Case]:
    """Every kernel whose share of the copy bandwidth is measured."""
    for maker, size in (("gelu_forward", 4), ("silu_mul_forward", 6), ("silu_mul_backward", 10)):
        spec = elementwise_spec(maker, x="bf16", vector=True, **({"y": "bf16"} if "gelu" in maker else {}))
        yield Case(name=maker, spec=spec, elements=8, bytes_each=size)
    for way in GELU_DROPOUT_WAYS:
        spec = gelu_dropout_spec("bf16", vector=True, way=way)
        yield Case(
            name=f"gelu dropout {way}", spec=spec, elements=8 * int(spec.options["each"]), bytes_each=4
        )
    yield Case(name="image_to_half", spec=planes_spec("bf16"), elements=12, bytes_each=3)
    for way in TABLE_WAYS:
        spec = table_spec("bf16", 3, vector=True, way=way)
        yield Case(
            name=f"image_table_to_half {way}",
            spec=spec,
            elements=24 * int(spec.options["lines"]),
            bytes_each=3,
        )
    yield from patch_cases()
    yield Case(
        name="head_norm_rope", spec=rope_spec("bf16", "bf16", "bf16", 128, 4), elements=32, bytes_each=4
    )
    spec = rope_backward_spec("bf16", "bf16", "bf16", 128, 4, columns=True)
    yield Case(name="head_norm_rope backward", spec=spec, elements=32, bytes_each=6)
    yield from norm_cases()
    yield from quantise_cases()


def row_of(case: Case, arch: str, tool: str | None) -> dict[str, object]:
    """Compile one kernel and return its row."""
    kernel = compile_kernel(case.spec, arch)
    report, block = kernel.report, case.spec.block
    allocated = -(-report.registers // 8) * 8 * block
    fits = min(
        REGISTERS // allocated,
        WARPS * 32 // block,
        BLOCKS,
        SHARED // report.shared_bytes if report.shared_bytes else BLOCKS,
    )
    # Instructions of a warp that the schedulers issue while the memory moves its elements.
    slots = PROCESSORS * SCHEDULERS * CLOCK_GHZ * 1e9
    budget = slots * case.bytes_each * 32 / (BANDWIDTH_TB_S * 1e12)
    row: dict[str, object] = {
        "case": case.name, "bytes/element": case.bytes_each, "registers": report.registers,
        "spill": report.spill_bytes, "shared": report.shared_bytes, "warps/SM": fits * block // 32,
        "wide KB in flight/SM": round(report.vector_loads * 16 * fits * block / 1024, 1),
        "budget instr/element": budget,
    }  # fmt: skip
    if tool is not None:
        count = instructions(kernel.cubin, tool)
        row |= {"instructions": count, "instr/element": count / case.elements}
        row["share of budget"] = count / case.elements / budget
    return row


def main() -> None:
    parser = _common.parser(__doc__)
    parser.add_argument("--arch", default="sm_90", help="default sm_90; the budget is the H200's")
    arguments = parser.parse_args()
    tool = disassembler()
    chosen = list(cases())
    rows = [row_of(case, arguments.arch, tool) for case in (chosen[::6] if arguments.quick else chosen)]
    shares = {str(r["case"]): r["share of budget"] for r in rows if "share of budget" in r}
    figures: dict[str, float | int | bool | str | None] = {
        "kernels": len(rows),
        "spilling": sum(int(str(r["spill"])) > 0 for r in rows),
        "worst_share_of_budget": max(shares.values(), default=None),
        "worst_case": max(shares, key=lambda k: shares[k], default=None),
    }
    notes = [] if tool else ["nvdisasm was not found: no instruction counts"]
    _common.finish(
        _common.result("kernels_static", rows=rows, figures=figures, repetitions=1, notes=notes),
        arguments.json,
    )


if __name__ == "__main__":
    main()
