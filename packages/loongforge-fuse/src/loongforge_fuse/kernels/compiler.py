"""Compile a kernel specification to machine code. Needs numba-cuda and cuda-core, but neither GPU nor
driver.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata

from loongforge_fuse.kernels.specs import KernelSpec

_TOOLS = ("numba", "numba-cuda", "cuda-core", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-nvjitlink")


class KernelCompileError(RuntimeError):
    """A kernel could not be compiled; the message says which one and why."""


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """What the compiler made of a kernel, for the gates and for ``kernels list``.

    Attributes:
        registers: registers per thread.
        spill_bytes: bytes of spill stores plus loads per thread.
        stack_bytes: stack frame per thread; more than 0 means an array did not stay in registers.
        shared_bytes: static shared memory per block.
        vector_loads: 16-byte global loads in the PTX.
        vector_stores: 16-byte global stores in the PTX.
        double_operations: lines with float64 in the PTX; the gate wants 0.
        code_bytes: size of the cubin.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    vector_loads: int
    vector_stores: int
    double_operations: int
    code_bytes: int

    def as_dict(self) -> dict[str, int]:
        """Return the fields as a dictionary."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """Machine code of one kernel for one architecture."""

    spec: KernelSpec
    arch: str
    cubin: bytes
    ptx: str
    report: KernelReport


@cache
def tool_versions() -> dict[str, str]:
    """Return the versions of the tools that shape the machine code, as far as they are installed."""
    found = {}
    for name in _TOOLS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def compile_kernel(spec: KernelSpec, arch: str) -> CompiledKernel:
    """Compile `spec` for `arch` (such as ``"sm_90"``).

    Raises:
        KernelCompileError: the tools are missing or refuse the kernel.
    """
    match = re.fullmatch(r"sm_(\d+)(\d)", arch)
    if match is None:
        message = f"arch must look like 'sm_90', got {arch!r}"
        raise ValueError(message)
    if not spec.runs_on(arch):
        message = f"kernel {spec.name} needs compute capability {spec.capability / 10}, {arch} is below it"
        raise KernelCompileError(message)
    try:
        ptx = _ptx(spec, (int(match[1]), int(match[2])))
        cubin, log = _link(ptx, arch)
    except Exception as error:  # the tools raise many types; the caller needs one
        message = f"kernel {spec.name} does not compile for {arch}: {type(error).__name__}: {error}"
        raise KernelCompileError(message) from error
    return CompiledKernel(spec=spec, arch=arch, cubin=cubin, ptx=ptx, report=_report(ptx, log, len(cubin)))


def _ptx(spec: KernelSpec, capability: tuple[int, int]) -> str:
    from numba import cuda, types

    kinds = {"P": types.CPointer(types.uint32), "q": types.int64, "i": types.int32, "f": types.float32}
    module = importlib.import_module(f"loongforge_fuse.kernels.source.{spec.module}")
    maker = getattr(module, spec.maker)
    options = dict(spec.options)
    if "block" in inspect.signature(maker).parameters:
        options["block"] = spec.block
    function = maker(**options)
    signature = tuple(kinds[letter] for letter in spec.arguments)
    # The register limit was measured on one architecture; elsewhere it could spill.
    limited = spec.min_blocks and capability == (9, 0)
    bounds = (spec.block, spec.min_blocks) if limited else spec.block
    ptx, _ = cuda.compile_ptx(function, signature, cc=capability, launch_bounds=bounds)
    entry = re.search(r"\.entry\s+(\S+?)\(", ptx)
    if entry is None:
        message = "the compiler returned no entry point"
        raise KernelCompileError(message)
    # The mangled name repeats all argument types and fills most of the symbol table.
    return str(ptx).replace(entry[1], spec.name)


def _link(ptx: str, arch: str) -> tuple[bytes, str]:
    from cuda.core import Linker, LinkerOptions, ObjectCode

    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=LinkerOptions(arch=arch, verbose=True))
    code = linker.link("cubin").code
    return bytes(code), linker.get_info_log()


def _report(ptx: str, log: str, size: int) -> KernelReport:
    def number(pattern: str) -> int:
        found = re.findall(pattern, log)
        return int(found[-1]) if found else 0

    wide = r"\.(?:v4\.(?:u32|b32|f32|s32)|v2\.(?:u64|b64|f64))"
    return KernelReport(
        registers=number(r"[Uu]sed (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=number(r"(\d+) bytes smem"),
        vector_loads=len(re.findall(r"ld\.global(?:\.\w+)*" + wide, ptx)),
        vector_stores=len(re.findall(r"st\.global(?:\.\w+)*" + wide, ptx)),
        double_operations=sum(".f64" in line for line in ptx.splitlines()),
        code_bytes=size,
    )
