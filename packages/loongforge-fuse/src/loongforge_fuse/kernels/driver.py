"""The CUDA driver by ctypes: load a cubin once per device, launch it with a packed argument block.

A launch goes through the launcher inside torch where this version of torch has one; else it packs the launch
configuration and all arguments with one ``struct.pack_into`` and makes one foreign call with four ready-made
pointers. Neither way imports numba or creates objects per argument.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any, Final

import torch

_SUCCESS: Final = 0
_INVALID_CONTEXT: Final = 201
_CAPTURE_RELAXED: Final = 2
_MAX_DYNAMIC_SHARED: Final = 8
_ARGUMENTS_AT: Final = 64  # the launch configuration takes 56 bytes in front of the arguments
_CONFIG: Final = "@IIIIIIIxxxxPPIxxxx"
# One launch attribute of 72 bytes: programmatic stream serialisation is allowed.
_FOLLOWS: Final = ctypes.create_string_buffer(struct.pack("@IxxxxI60x", 6, 1), 72)
_SIZES: Final = {"P": 8, "q": 8, "i": 4, "f": 4}
_Arguments = tuple[int | float, ...]
# Private parts of torch without a public equivalent of the same cost; each is optional.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # noqa: SLF001
_static_launcher = getattr(torch._C, "_StaticCudaLauncher", None)  # noqa: SLF001


class DriverError(RuntimeError):
    """A CUDA driver call failed; the message names the call and the driver's own words."""


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        message = "libcuda.so.1 cannot be opened: kernels need an NVIDIA driver on this machine"
        raise DriverError(message) from error


def _check(code: int, what: str) -> None:
    if code == _SUCCESS:
        return
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    library = _library()
    library.cuGetErrorName(code, ctypes.byref(name))
    library.cuGetErrorString(code, ctypes.byref(text))
    words = " ".join(v.decode() for v in (name.value, text.value) if v)
    message = f"{what} failed with {code}: {words or 'unknown error'}"
    raise DriverError(message)


@cache
def _primary_context(device: int) -> ctypes.c_void_p:
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_library().cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)), "cuDeviceGet")
    _check(_library().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    return context


def bind_context(device: int) -> None:
    """Make the device's primary context, the one torch uses, current on this thread."""
    _check(_library().cuCtxSetCurrent(_primary_context(device)), "cuCtxSetCurrent")


def copy_to_device(target: int, source: int, size: int, device: int) -> None:
    """Queue a copy of `size` bytes from pinned memory on torch's current stream; legal in a graph capture.

    Raises:
        DriverError: the driver refused.
    """
    if _current_stream is None:
        message = "this build of torch has no CUDA support"
        raise DriverError(message)
    library = _library()
    code = library.cuMemcpyHtoDAsync_v2(
        ctypes.c_void_p(target),
        ctypes.c_void_p(source),
        ctypes.c_size_t(size),
        ctypes.c_void_p(_current_stream(device)),
    )
    _check(code, f"copying {size} bytes to device {device}")


class Function:
    """One kernel on one device.

    Thread-safe: each launch takes a private argument block from a free list, because autograd launches
    from its own threads. Code is loaded at construction, in relaxed capture mode, so that a first use
    inside a CUDA graph capture is legal.

    Args:
        cubin: machine code for the device's architecture.
        symbol: entry point.
        arguments: one letter per argument, see :class:`~loongforge_fuse.kernels.specs.KernelSpec`.
        block: threads per block of every launch.
        device: device ordinal.
        follows: launches may start before the kernel in front of them has ended; the kernel waits itself.

    Attributes:
        label: name under which launches are counted.
        launches: number of launches from Python; replays of a CUDA graph do not pass here.
        run: ``run(grid_x, grid_y, arguments)`` queues the kernel on torch's current stream of the function's
            device, with that device current.
    """

    def __init__(
        self,
        *,
        cubin: bytes,
        symbol: str,
        arguments: str,
        block: int,
        device: int,
        label: str = "",
        follows: bool = False,
    ) -> None:
        self.label, self.launches = label or symbol, 0
        self._symbol, self._block, self._device = symbol, block, device
        self._layout, self._positions, self._size = _layout(arguments)
        self._pack = self._layout.pack_into
        self._free: list[tuple[ctypes.Array[ctypes.c_char], ctypes.c_void_p, ctypes.c_void_p, object]] = []
        self._launch = _library().cuLaunchKernelEx
        self._handle = self._load(cubin)
        self._attributes = (ctypes.addressof(_FOLLOWS), 1) if follows else (0, 0)
        native = _static_launcher if block % 32 == 0 and not follows else None
        self._native = getattr(native, "_launch_kernel", None)
        self._types = arguments.replace("P", "l").replace("q", "l")
        self._address, self._warps = int(self._handle.value or 0), block // 32

        self.run = self._bound() if self._native is not None else self._run

    def _bound(self) -> Callable[[int, int, _Arguments], None]:
        """Return `run` with everything it needs in local variables: it is the hottest path of the package."""
        native: Any = self._native
        address, warps, types = self._address, self._warps, self._types
        device = self._device
        current_device: Any = _current_device
        current_stream: Any = _current_stream

        def run(grid_x: int, grid_y: int, arguments: _Arguments) -> None:
            if current_device() != device:
                with torch.cuda.device(device):
                    run(grid_x, grid_y, arguments)
                return
            self.launches += 1
            native(address, grid_x, grid_y, 1, warps, 0, types, arguments, current_stream(device))

        return run

    def _run(self, grid_x: int, grid_y: int, arguments: _Arguments) -> None:
        """Queue the kernel on torch's current stream of the function's device, with that device current.

        The caller keeps every buffer alive as torch does: the caching allocator knows the current stream.
        """
        if _current_device is None or _current_stream is None:
            message = "this build of torch has no CUDA support"
            raise DriverError(message)
        if _current_device() != self._device:
            with torch.cuda.device(self._device):
                self._run(grid_x, grid_y, arguments)
            return
        self.launches += 1
        self.launch(grid_x, grid_y, _current_stream(self._device), *arguments)

    def _load(self, cubin: bytes) -> ctypes.c_void_p:
        library = _library()
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        previous = ctypes.c_void_p()
        _check(library.cuCtxGetCurrent(ctypes.byref(previous)), "cuCtxGetCurrent")
        bind_context(self._device)
        _check(
            library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode"
        )
        try:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            _check(library.cuModuleLoadData(ctypes.byref(module), cubin), f"loading kernel {self._symbol}")
            name = self._symbol.encode()
            _check(
                library.cuModuleGetFunction(ctypes.byref(function), module, name), f"finding {self._symbol}"
            )
            return function
        finally:
            library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            if previous.value:
                library.cuCtxSetCurrent(previous)

    def _block_of_arguments(
        self,
    ) -> tuple[ctypes.Array[ctypes.c_char], ctypes.c_void_p, ctypes.c_void_p, object]:
        buffer = ctypes.create_string_buffer(self._size)
        address = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * max(1, len(self._positions)))(*(address + p for p in self._positions))
        return buffer, ctypes.c_void_p(address), ctypes.c_void_p(ctypes.addressof(pointers)), pointers

    def launch(self, grid_x: int, grid_y: int, stream: int, *arguments: int | float) -> None:
        """Queue the kernel on `stream` (a raw CUstream, 0 for the default one).

        The caller has made the device current and keeps every buffer alive until the stream has passed.

        Raises:
            DriverError: the driver refused the launch.
        """
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._block_of_arguments()
        self._pack(slot[0], 0, grid_x, grid_y, 1, self._block, 1, 1, 0, stream, *self._attributes, *arguments)
        code = self._launch(slot[1], self._handle, slot[2], None)
        if code == _INVALID_CONTEXT:
            # A thread that has not used CUDA yet (autograd starts its own) has no context.
            bind_context(self._device)
            code = self._launch(slot[1], self._handle, slot[2], None)
        self._free.append(slot)
        if code:
            _check(code, f"launching {self._symbol} with {grid_x} x {grid_y} blocks")


def _layout(arguments: str) -> tuple[struct.Struct, tuple[int, ...], int]:
    """Return the packer of configuration and arguments, the place of each argument, and the total size."""
    text, position, places = _CONFIG + "8x", _ARGUMENTS_AT, []
    for letter in arguments:
        size = _SIZES[letter]
        position = -(-position // size) * size
        places.append(position)
        position += size
        text += letter
    return struct.Struct(text), tuple(places), position + 8


_architecture_lock = Lock()
_architectures: dict[int, str] = {}


def architecture(device: int) -> str:
    """Return the device's architecture, such as ``"sm_90"``."""
    with _architecture_lock:
        if device not in _architectures:
            major, minor = torch.cuda.get_device_capability(device)
            _architectures[device] = f"sm_{major}{minor}"
        return _architectures[device]
