"""Kernels ready to launch: found on disk or compiled once, loaded once per device, counted."""

from __future__ import annotations

import os
from contextlib import suppress
from threading import Lock

from loongforge_fuse.kernels import driver, store
from loongforge_fuse.kernels.specs import KernelSpec


class KernelUnavailableError(RuntimeError):
    """No machine code for a kernel and no way to make it; operators then fall back to torch with this
    reason.
    """


_functions: dict[tuple[str, int], driver.Function] = {}
_refused: dict[tuple[str, int], str] = {}
_lock = Lock()


def function(spec: KernelSpec, device: int) -> driver.Function:
    """Return the loaded kernel for `device`; compile it when no directory has it.

    Raises:
        KernelUnavailableError: neither a matching cubin nor a working compiler; says how to get one.
    """
    key = (spec.name, device)
    ready = _functions.get(key)
    if ready is not None:
        return ready
    with _lock:
        if key in _functions:
            return _functions[key]
        if key in _refused:
            raise KernelUnavailableError(_refused[key])
        arch = driver.architecture(device)
        try:
            if not spec.runs_on(arch):
                need, have = spec.capability / 10, int(arch.removeprefix("sm_")) / 10
                message = f"{spec.maker} needs compute capability {need}, this GPU has {have}"
                raise KernelUnavailableError(message)
            code = store.find(spec, arch) or _compile(spec, arch)
            loaded = driver.Function(
                cubin=code,
                symbol=spec.name,
                arguments=spec.arguments,
                block=spec.block,
                device=device,
                label=spec.maker,
                follows=spec.follows,
            )
        except (KernelUnavailableError, driver.DriverError) as error:
            _refused[key] = str(error)
            raise KernelUnavailableError(str(error)) from error
        _functions[key] = loaded
        return loaded


def _compile(spec: KernelSpec, arch: str) -> bytes:
    if os.environ.get("LOONGFORGE_KERNEL_COMPILE", "1") == "0":
        message = f"no cubin of {spec.name} for {arch} and compiling is off (LOONGFORGE_KERNEL_COMPILE=0)"
        raise KernelUnavailableError(message)
    from loongforge_fuse.kernels.compiler import KernelCompileError, compile_kernel

    try:
        kernel = compile_kernel(spec, arch)
    except KernelCompileError as error:
        message = (
            f"{error}. Build kernels where numba-cuda works with `python -m loongforge_fuse kernels build"
            f" --arch {arch} --out DIR` and set LOONGFORGE_CUBIN_DIR=DIR"
        )
        raise KernelUnavailableError(message) from error
    with suppress(OSError):  # a read-only home costs a compile per process, not the run
        store.save(kernel, store.user_cache())
    return kernel.cubin


def launch_counts() -> dict[str, int]:
    """Return the number of launches by kernel maker."""
    counts: dict[str, int] = {}
    for loaded in tuple(_functions.values()):
        if loaded.launches:
            counts[loaded.label] = counts.get(loaded.label, 0) + loaded.launches
    return counts


def reset_launch_counts() -> None:
    """Set the number of launches of every kernel to zero."""
    for loaded in tuple(_functions.values()):
        loaded.launches = 0


def loaded_kernels() -> tuple[str, ...]:
    """Return the names of the kernels loaded in this process."""
    return tuple(sorted({name for name, _ in _functions}))
