"""Our allocator behind torch's hooks: for the whole process, or for a memory pool.

Nothing here runs at import; torch is needed from the first call on.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loongforge_mem import _core
from loongforge_mem.config import MemoryConfig

# Mangled names: c10::detail::torchCheckFail(char const*, char const*, unsigned, char const*), and the
# constructor (c10::SourceLocation, std::string) of a class in c10.
CHECK_FAIL_SYMBOL = "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"
OOM_CLASS = "16OutOfMemoryError"
CONSTRUCTOR = "C2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
ALLOC_CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What :func:`install_global_allocator` set up.

    Attributes:
        hooks: names of the torch hooks that are connected.
        missing_hooks: hooks this torch does not offer; what they do is silently absent.
        raises_oom: whether a failed allocation raises an error (otherwise torch sees a null tensor).
        oom_error: that error: ``"torch.OutOfMemoryError"``, ``"RuntimeError"`` or None; see
            :func:`connect_errors`.
        backend: ``"cuda"``, ``"vmm"`` or ``"host"``.
    """

    hooks: tuple[str, ...]
    missing_hooks: tuple[str, ...]
    raises_oom: bool
    oom_error: str | None
    backend: str


_installed: Installed | None = None
_pool_allocator: object | None = None


def installed() -> Installed | None:
    """Return what was installed in this process, or None."""
    return _installed


def install_global_allocator(
    pool_gb: float | None = None,
    *,
    backend: str = "cuda",
    grow_mb: int = 256,
    limit_gb: float | None = None,
    timing: bool = True,
) -> Installed:
    """Make every CUDA tensor of this process come from our pool. Call it before anything touches CUDA.

    Args:
        pool_gb: GiB reserved in one driver block at the first allocation; None grows on demand.
        backend: ``"cuda"`` (driver blocks: IPC and NCCL registration work) or ``"vmm"`` (in chunks).
        grow_mb: smallest growth in MiB; 0 never grows.
        limit_gb: most GiB ever taken; None is no limit.
        timing: time each call (about 50 ns).

    Raises:
        RuntimeError: torch has no CUDA, CUDA was used already, or another allocator is installed.
        OSError: the CUDA driver cannot be opened.
        ValueError: a value out of range, or ``torch.backends.cudnn.benchmark`` is on (torch cannot serve it
            with any replaced allocator).
    """
    global _installed
    import torch

    if backend not in ("cuda", "vmm"):
        msg = f"backend is {backend!r}; allowed here: 'cuda', 'vmm'"
        raise ValueError(msg)
    config = MemoryConfig(
        mode="global",
        pool_gb=pool_gb,
        backend="cuda",
        grow_mb=grow_mb,
        limit_gb=limit_gb,
        timing=timing,
    )
    if _installed is not None:
        msg = "the LoongForge allocator is installed already; torch allows one change per process"
        raise RuntimeError(msg)
    require_hooks(torch)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        msg = (
            "CUDA is initialised already, so torch keeps its allocator; call install_global_allocator() "
            "first thing in the program, before any tensor or model goes to the GPU"
        )
        raise RuntimeError(msg)
    if torch.backends.cudnn.benchmark:
        msg = (
            "torch.backends.cudnn.benchmark is True, which asks the allocator for a cache report that torch "
            "cannot give for any replaced allocator; set it to False"
        )
        raise ValueError(msg)
    warn_about_alloc_conf("the global allocator")
    _core.configure(
        backend,
        initial_bytes=config.initial_bytes,
        grow_bytes=grow_mb << 20,
        limit_bytes=config.limit_bytes,
    )
    oom_error = connect_errors(torch)
    _core.set_timing(timing)
    table = _core.c_abi()
    custom = _hooks().custom(table["alloc"], table["free"])
    connected, missing = connect_hooks(custom, table)
    _hooks().change(custom)
    _installed = Installed(
        hooks=connected,
        missing_hooks=missing,
        raises_oom=oom_error is not None,
        oom_error=oom_error,
        backend=backend,
    )
    from loongforge_mem.torch_stats import answer_torch_statistics

    answer_torch_statistics()
    return _installed


def require_hooks(torch: object) -> None:
    """Raise RuntimeError when this torch cannot take an allocator."""
    if not hasattr(getattr(torch, "_C", None), "_cuda_customAllocator"):
        version = getattr(torch, "__version__", "?")
        msg = f"torch {version} has no CUDA, so no allocator to replace; use mode 'advisor' or 'off'"
        raise RuntimeError(msg)


@dataclass(frozen=True, kw_only=True)
class _Hooks:
    custom: Callable[[int, int], object]
    change: Callable[[object], None]


def _hooks() -> _Hooks:
    """Return torch's two entry points; their Python wrappers take a library path, not addresses."""
    native = importlib.import_module("torch._C")
    return _Hooks(
        custom=getattr(native, "_cuda_customAllocator"),  # noqa: B009
        change=getattr(native, "_cuda_changeCurrentAllocator"),  # noqa: B009
    )


def connect_hooks(custom: object, table: dict[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Set every hook that ``custom`` offers; return the names of those connected and those missing."""
    connected, missing = ["alloc", "free"], []
    for name, address in table.items():
        if not name.startswith("set_"):
            continue
        setter = getattr(custom, name, None)
        if setter is None:
            missing.append(name)
            continue
        setter(address)
        connected.append(name)
    return tuple(connected), tuple(missing)


def connect_errors(torch: object) -> str | None:
    """Tell the native part how torch raises its errors; return the Python error of a failed allocation.

    torch's pluggable allocator hands on whatever the allocation function returns, so an error has to leave
    that function as a C++ exception. Where this torch exports what ``c10::OutOfMemoryError`` is made of (2.11
    and 2.13 do), the exception is of that class and arrives as ``"torch.OutOfMemoryError"``; otherwise it is
    torch's general error, a ``"RuntimeError"`` whose text begins with "CUDA out of memory."; None when
    neither can be found: then torch sees a null tensor.
    """
    libraries = list(_libraries(Path(str(getattr(torch, "__file__", ""))).parent / "lib"))
    check_fail = _address(libraries, CHECK_FAIL_SYMBOL)
    if check_fail is not None:
        _core.set_check_fail(check_fail)
    thrower = _oom_thrower(libraries)
    _core.set_oom_thrower(thrower)
    if thrower is not None:
        return "torch.OutOfMemoryError"
    return None if check_fail is None else "RuntimeError"


def _oom_thrower(libraries: list[ctypes.CDLL]) -> list[int] | None:
    """Return what throwing torch's out-of-memory error takes, in the order that the native part wants."""
    own, base = (_address(libraries, f"_ZN3c10{name}{CONSTRUCTOR}") for name in (OOM_CLASS, "5Error"))
    vtable = _address(libraries, f"_ZTVN3c10{OOM_CLASS}E")
    constructor = own if own is not None else base
    if own is None and vtable is None:
        return None
    names = (f"_ZTIN3c10{OOM_CLASS}E", "__cxa_allocate_exception", "__cxa_throw", "_Znwm", "_ZdlPv")
    rest = [_address(libraries, name) for name in names]
    found = [constructor, 0 if own is not None else vtable, *rest]
    addresses = [a for a in found if a is not None]
    return addresses if len(addresses) == len(found) else None


def _libraries(folder: Path) -> Iterator[ctypes.CDLL]:
    """Yield torch's libraries that are there; they are loaded already, so this opens nothing new."""
    for name in ("libc10.so", "libc10_cuda.so", "libtorch_python.so"):
        if (folder / name).exists():
            with contextlib.suppress(OSError):
                yield ctypes.CDLL(str(folder / name))


def _address(libraries: list[ctypes.CDLL], symbol: str) -> int | None:
    """Return the address of an exported symbol, or None; a library also answers for those it depends on."""
    for library in libraries:
        with contextlib.suppress(AttributeError):
            return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
    return None


def warn_about_alloc_conf(what: str) -> None:
    """Warn about allocator settings in the environment that have no effect together with ``what``."""
    for variable in ALLOC_CONF_VARIABLES:
        value = os.environ.get(variable, "")
        ignored = [x for x in value.split(",") if x.strip().lower().startswith(("expandable", "backend"))]
        if ignored:
            warnings.warn(
                f"{variable} sets {', '.join(ignored)}, which has no effect with {what}; unset it, or use "
                "mode 'advisor' to keep torch's own allocator",
                UserWarning,
                stacklevel=3,
            )


def pool_allocator(config: MemoryConfig) -> object:
    """Return the allocator object for ``torch.cuda.MemPool``, made once per process.

    Raises:
        RuntimeError: torch has no CUDA.
        OSError: the CUDA driver cannot be opened.
    """
    global _pool_allocator
    import torch

    require_hooks(torch)
    if _installed is not None:
        msg = "the global allocator is installed, which has no memory pools; use mode 'global'"
        raise RuntimeError(msg)
    if _pool_allocator is None:
        warn_about_alloc_conf("a pool with its own allocator")
        _core.configure(
            "cuda" if config.backend == "auto" else config.backend,
            initial_bytes=config.initial_bytes,
            grow_bytes=config.grow_mb << 20,
            limit_bytes=config.limit_bytes,
        )
        _core.set_timing(config.timing)
        table = _core.c_abi()
        _pool_allocator = _hooks().custom(table["pool_alloc"], table["free"])
    return _pool_allocator
