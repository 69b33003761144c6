"""Global memory of the simulator: NumPy buffers at made-up addresses, with checks on every access."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_SPACING = 1 << 40  # nothing that runs off one buffer reaches another
_NOBODY = -1


class SimulationError(AssertionError):
    """A kernel did what is wrong or undefined on a GPU; the message says what, where and which thread."""


@dataclass(kw_only=True)
class _Buffer:
    name: str
    address: int
    data: np.ndarray  # uint8, shares memory with the caller's array
    known: np.ndarray  # which bytes hold something
    # Which thread wrote or read a byte in this launch; made at the first access.
    writer: np.ndarray | None = None
    reader: np.ndarray | None = None

    def touched(self) -> tuple[np.ndarray, np.ndarray]:
        """Return writer and reader of every byte."""
        if self.writer is None or self.reader is None:
            self.writer = np.full(self.data.size, _NOBODY, dtype=np.int64)
            self.reader = np.full(self.data.size, _NOBODY, dtype=np.int64)
        return self.writer, self.reader


class Memory:
    """Address space of one simulated device.

    Bytes are little-endian, as on the GPU. Within a launch, a byte that one thread writes must not be touched
    by another one, except by atomic operations.

    Args:
        search: called once, at the first access where nothing is; may place more buffers.
    """

    def __init__(self, search: Callable[[Memory], None] | None = None) -> None:
        self._buffers: list[_Buffer] = []
        self._addresses: list[int] = []
        self._search = search
        self.thread = _NOBODY

    def add(self, array: np.ndarray, name: str, *, shift: int = 0, written: bool = True) -> int:
        """Place `array` (contiguous, shared with the caller) `shift` bytes above a multiple of 256.

        Args:
            array: the buffer; kernels see its memory.
            name: for messages.
            shift: distance of its address from a multiple of 256 bytes.
            written: False: its contents count as garbage until a kernel writes them.

        Returns:
            The address.

        Raises:
            ValueError: the array is not contiguous.
        """
        if not array.flags.c_contiguous:
            message = f"buffer {name!r} must be contiguous, got strides {array.strides}"
            raise ValueError(message)
        data = array.reshape(-1).view(np.uint8)
        address = _SPACING * (len(self._buffers) + 1) + shift
        self.place(data, address, name, written=written)
        return address

    def place(self, data: np.ndarray, address: int, name: str, *, written: bool = True) -> None:
        """Place uint8 `data` at an address of the caller's choice, such as its own in this process."""
        buffer = _Buffer(
            name=name,
            address=address,
            data=data,
            known=np.full(data.size, written),
        )
        insort(self._buffers, buffer, key=lambda b: b.address)
        insort(self._addresses, address)

    def begin_launch(self) -> None:
        """Forget who touched what: kernels on one stream run one after the other."""
        for buffer in self._buffers:
            buffer.writer = buffer.reader = None

    def unwritten(self, name: str) -> int:
        """Return how many bytes of a buffer still hold garbage."""
        (buffer,) = (b for b in self._buffers if b.name == name)
        return int((~buffer.known).sum())

    def _find(self, address: int, size: int, what: str) -> tuple[_Buffer, int]:
        found = bisect_right(self._addresses, address) - 1
        inside = found >= 0 and address < self._addresses[found] + self._buffers[found].data.size
        if not inside and self._search is not None:
            search, self._search = self._search, None
            search(self)
            return self._find(address, size, what)
        if found >= 0:
            buffer = self._buffers[found]
            start = address - buffer.address
            # A word may reach past the end of a buffer, never past the 4-byte word that the end lies in:
            # allocations are multiples of it.
            whole = -(-(buffer.data.size + buffer.address) // 4) * 4 - buffer.address
            if start + size <= (buffer.data.size if what == "store" else whole):
                if address % size:
                    place = f"{buffer.name} + {start}"
                    message = f"thread {self.thread}: {what} of {size} bytes at {place} is misaligned"
                    raise SimulationError(message)
                return buffer, start
            message = (
                f"thread {self.thread}: {what} of {size} bytes at {buffer.name} + {start}, which has"
                f" {buffer.data.size} bytes"
            )
            raise SimulationError(message)
        message = f"thread {self.thread}: {what} of {size} bytes at address {address:#x}, where nothing is"
        raise SimulationError(message)

    def load(self, address: int, size: int, *, partly: bool = False) -> bytes:
        """Read `size` aligned bytes; `partly`: garbage among them is fine, the kernel masks it out.

        Raises:
            SimulationError: out of bounds, misaligned, unwritten, or written by another thread.
        """
        buffer, start = self._find(address, size, "load")
        stop = min(start + size, buffer.data.size)
        if not partly and not buffer.known[start:stop].all():
            message = f"thread {self.thread}: load of {buffer.name} + {start}, which was never written"
            raise SimulationError(message)
        writer, reader = buffer.touched()
        writers = writer[start:stop]
        if ((writers != _NOBODY) & (writers != self.thread)).any():
            message = (
                f"thread {self.thread}: load of {buffer.name} + {start} races with thread {writers.max()}"
            )
            raise SimulationError(message)
        reader[start:stop] = self.thread
        found = buffer.data[start:stop].tobytes()
        return found + b"\xa5" * (size - len(found))

    def store(self, address: int, data: bytes) -> None:
        """Write aligned bytes.

        Raises:
            SimulationError: out of bounds, misaligned, or touched by another thread.
        """
        buffer, start = self._find(address, len(data), "store")
        stop = start + len(data)
        writer, reader = buffer.touched()
        for table, what in ((writer, "write"), (reader, "read")):
            others = table[start:stop]
            if ((others != _NOBODY) & (others != self.thread)).any():
                message = (
                    f"thread {self.thread}: store to {buffer.name} + {start} races with the {what} of thread"
                    f" {others.max()}"
                )
                raise SimulationError(message)
        writer[start:stop] = self.thread
        buffer.known[start:stop] = True
        buffer.data[start:stop] = np.frombuffer(data, dtype=np.uint8)

    def add_atomically(self, address: int, value: int) -> None:
        """Add to an int32, whoever touched it before."""
        buffer, start = self._find(address, 4, "store")
        cell = buffer.data[start : start + 4].view(np.int32)
        cell[0] += value
