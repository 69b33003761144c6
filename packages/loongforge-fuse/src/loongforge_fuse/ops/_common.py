"""What all operators share: the library, dtype codes, launching, counters, the eager fast path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from loongforge_fuse.kernels import launcher
from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.kernels.specs import KernelSpec

LIBRARY: Final = torch.library.Library("loongforge", "DEF")  # type: ignore[no-untyped-call]
CODES: Final = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
BLOCK: Final = 256

_fallbacks: Counter[tuple[str, str]] = Counter()
_epilogues: Counter[str] = Counter()
_dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001 - no public way to ask
_functorch = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001


def op_counters() -> dict[str, dict[str, int]]:
    """Return how often each kernel was launched, how often an operator fell back to torch and why, and how
    often one was the end of a matrix product (``epilogues``).

    Replays of a CUDA graph are not counted: they do not pass through Python.
    """
    return {
        "launches": launcher.launch_counts(),
        "fallbacks": {f"{name}: {reason}": count for (name, reason), count in _fallbacks.items()},
        "epilogues": dict(_epilogues),
    }


def reset_op_counters() -> None:
    """Set all counters to zero."""
    launcher.reset_launch_counts()
    _fallbacks.clear()
    _epilogues.clear()


def fell_back(name: str, reason: str) -> None:
    """Count one call of `name` that ran as plain torch operators."""
    _fallbacks[name, reason] += 1


def in_product(name: str) -> None:
    """Count one call of `name` that a matrix product wrote itself."""
    _epilogues[name] += 1


def kernel(spec: KernelSpec, device: int) -> Function:
    """Return the loaded kernel; see :func:`loongforge_fuse.kernels.launcher.function`."""
    return launcher.function(spec, device)


def load(name: str, spec: KernelSpec, device: int) -> Function | None:
    """Load a kernel for operator `name`; None, and counted, when there is none."""
    try:
        return launcher.function(spec, device)
    except launcher.KernelUnavailableError as error:
        fell_back(name, str(error))
        return None


def load_first(name: str, specs: Sequence[KernelSpec], device: int) -> tuple[Function, int] | None:
    """Load the first kernel there is for one job, such as the way that was chosen, else the default.

    Returns:
        The kernel and its place in `specs`; None, and counted, when there is none.
    """
    reason = "no kernel"
    for place, spec in enumerate(specs):
        try:
            return launcher.function(spec, device), place
        except launcher.KernelUnavailableError as error:
            reason = str(error)
    fell_back(name, reason)
    return None


def resolve(
    name: str, cache: dict[Hashable, Function], key: Hashable, spec: KernelSpec, device: int
) -> Function | None:
    """Load a kernel and put it into an operator's cache; None, and counted, when there is none."""
    found = load(name, spec, device)
    if found is not None:
        cache[key] = found
    return found


def capturing() -> bool:
    """Tell whether torch's current stream is being captured into a graph."""
    return bool(torch.cuda.is_current_stream_capturing())


@cache
def processors(device: int) -> int:
    """Return the number of multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def aligned(*tensors: Tensor) -> bool:
    """Tell whether every address is a multiple of 16 bytes."""
    return not any(t.data_ptr() & 15 for t in tensors)


def vector_blocks(count: int, misaligned: int) -> int:
    """Return the blocks of an elementwise kernel over `count` elements: a thread for 8 of them, or for 1."""
    threads = count if misaligned else (count >> 3) + (count & 7)
    return (threads + BLOCK - 1) >> 8


def plain(*tensors: Tensor | None) -> bool:
    """Tell whether the dispatcher has nothing to add: eager, ordinary CUDA tensors, no mode, no transform."""
    if torch.compiler.is_compiling() or _dispatch_modes() or _functorch() is not None:
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        kind = type(tensor)
        if not tensor.is_cuda or (kind is not Tensor and kind is not torch.nn.Parameter):
            return False
    return True


def ordinary(*tensors: Tensor) -> bool:
    """Tell the same of tensors on any device; :func:`plain` is on the path of every call and stands alone."""
    if torch.compiler.is_compiling() or _dispatch_modes() or _functorch() is not None:
        return False
    return all(type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors)


def transforming() -> bool:
    """Tell whether a functorch transform (grad, vmap, jvp) is running."""
    return _functorch() is not None


def wants_grad(*tensors: Tensor | None) -> bool:
    """Tell whether autograd has to record this call."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110 - a generator costs as much again
        if tensor is not None and tensor.requires_grad:
            return True
    return False


SetupContext = Callable[..., None]
Backward = Callable[..., object]
Context = Any  # torch's autograd context: what is saved becomes an attribute of any name and type


def define(
    schema: str,
    *,
    cpu: Callable[..., object],
    cuda: Callable[..., object],
    fake: Callable[..., object],
    tags: Sequence[torch.Tag] = (),
) -> str:
    """Define an operator with its CPU reference, CUDA kernel and shape function; return the qualified
    name.
    """
    name = schema.split("(", 1)[0]
    library: Any = LIBRARY  # its methods carry no annotations
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    library.impl(name, cpu, "CPU")
    library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"loongforge::{name}", fake, lib=LIBRARY)
    return f"loongforge::{name}"


def register_derivative(qualified: str, *, setup_context: SetupContext, backward: Backward) -> None:
    """Register the derivative of an operator."""
    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=LIBRARY)


def differentiable(
    qualified: str,
    *,
    cuda: Callable[..., object],
    setup_context: SetupContext,
    backward: Backward,
) -> Callable[..., Any]:
    """Register the derivative and return the same pair as an autograd function for the eager fast path."""
    register_derivative(qualified, setup_context=setup_context, backward=backward)

    class Fast(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Context, *arguments: object) -> object:
            # One Python call less than with a separate setup_context, which only transforms need.
            output = cuda(*arguments)
            setup_context(ctx, arguments, output)
            return output

    fast: Any = type(f"Fast_{qualified.rsplit(':', 1)[1]}", (Fast,), {})
    fast.backward = staticmethod(torch.autograd.function.once_differentiable(backward))
    return direct_apply(fast)


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `apply` without the Python around it, which serves transforms and costs more than the rest.

    Only for calls that :func:`plain` has let through: it lets no transform through.
    """
    base: Any = super(torch.autograd.Function, function)
    return base.apply
