"""What the intrinsics of ``kernels/source/intrinsics.py`` mean, on the simulator's memory.

Integers are Python numbers, floats are ``numpy.float32``. Both modules have the same names; a test checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from loongforge_fuse.kernels.simulator.memory import Memory

_TYPES = ("bf16", "f16", "f32")
_PER_WORD = {"u8": 4, "e4m3": 4, "bf16": 2, "f16": 2, "f32": 1}
_SHAPES = tuple((name, n) for name in _TYPES for n in (4, 8))
_Array = Any  # a local or shared array of the simulator
_Do = Callable[..., Any]


def raw_words(dtype: str, elements: int) -> int:
    """Number of 32-bit words a raw vector takes."""
    return elements // _PER_WORD[dtype]


def widened(words: list[int], dtype: str) -> list[np.float32]:
    """Return the values that words hold."""
    bits = np.array(words, dtype=np.uint32)
    if dtype == "f32":
        return list(bits.view(np.float32))
    if dtype == "u8":
        return list(bits.view(np.uint8).astype(np.float32))
    halves = bits.view(np.uint16)
    if dtype == "f16":
        return list(halves.view(np.float16).astype(np.float32))
    return list((halves.astype(np.uint32) << 16).view(np.float32))


def narrowed(values: list[Any], dtype: str) -> list[int]:
    """Return the words that hold the values, rounded to nearest even."""
    wide = np.array(values, dtype=np.float32)
    if dtype == "f32":
        return wide.view(np.uint32).tolist()
    if dtype == "e4m3":
        return _e4m3_codes(wide).view(np.uint32).tolist()
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16).view(np.uint32).tolist()
    bits = wide.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    halves = np.where(np.isnan(wide), 0x7FFF, rounded).astype(np.uint16)
    return halves.view(np.uint32).tolist()


def _e4m3_codes(values: np.ndarray) -> np.ndarray:
    """Return the bytes of float32 values in e4m3: nearest, ties to even, beyond 448 and infinities to 448.

    A NaN of either sign is 0x7F, as the instruction makes it.
    """
    size = np.minimum(np.abs(values.astype(np.float64)), 1024.0)  # keeps a NaN
    _, exponents = np.frexp(size)
    # Three bits after the leading one; below 2^-6 a fixed grid.
    lowest = np.where(size == 0.0, -6, np.maximum(exponents - 1, -6))
    steps = np.rint(np.ldexp(size, 3 - lowest))
    # A mantissa that was rounded up to 16 steps carries into the exponent by the addition.
    codes = np.minimum(np.nan_to_num(steps).astype(np.int64) + 8 * (lowest + 6), 0x7E)
    codes = np.where(np.isnan(values), 0x7F, codes | np.signbit(values).astype(np.int64) << 7)
    return codes.astype(np.uint8)


class _Access:
    """The memory operations, bound to one memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def words(self, address: int, offset: int, count: int) -> list[int]:
        """Load words by accesses of up to 16 bytes."""
        found: list[int] = []
        for start in range(0, count, 4):
            size = min(4, count - start)
            data = self._memory.load(address + offset + 4 * start, 4 * size, partly=size == 1)
            found += np.frombuffer(data, dtype=np.uint32).tolist()
        return found

    def put(self, address: int, offset: int, words: list[int]) -> None:
        """Store words by accesses of up to 16 bytes."""
        for start in range(0, len(words), 4):
            part = np.array(words[start : start + 4], dtype=np.uint32)
            self._memory.store(address + offset + 4 * start, part.tobytes())

    def number(self, address: int, index: int, dtype: Any) -> Any:
        """Load one number."""
        size = np.dtype(dtype).itemsize
        return np.frombuffer(self._memory.load(address + index * size, size), dtype=dtype)[0]

    def put_number(self, address: int, index: int, value: Any, dtype: Any) -> None:
        """Store one number."""
        data = np.array([value]).astype(dtype).tobytes()
        self._memory.store(address + index * len(data), data)


def _vectors(access: _Access) -> dict[str, Any]:
    def load(dtype: str, n: int) -> _Do:
        def do(address: int, index: int, into: _Array, position: int) -> None:
            count = raw_words(dtype, n)
            into[position : position + n] = widened(access.words(address, 4 * count * index, count), dtype)

        return do

    def store(dtype: str, n: int) -> _Do:
        def do(address: int, index: int, values: _Array, position: int) -> None:
            words = narrowed([values[position + i] for i in range(n)], dtype)
            access.put(address, 4 * len(words) * index, words)

        return do

    def load_words(count: int, unit: int) -> _Do:
        def do(address: int, index: int, into: _Array, position: int) -> None:
            into[position : position + count] = access.words(address, unit * index, count)

        return do

    def store_words(count: int) -> _Do:
        def do(address: int, index: int, values: _Array, position: int) -> None:
            access.put(address, 4 * count * index, [values[position + i] for i in range(count)])

        return do

    def expand(dtype: str, n: int) -> _Do:
        def do(raw: _Array, start: int, into: _Array, position: int) -> None:
            words = [raw[start + i] for i in range(raw_words(dtype, n))]
            into[position : position + n] = widened(words, dtype)

        return do

    def pack(dtype: str, n: int) -> _Do:
        def do(values: _Array, position: int, raw: _Array, start: int) -> None:
            words = narrowed([values[position + i] for i in range(n)], dtype)
            raw[start : start + len(words)] = words

        return do

    bytes_too = (*_SHAPES, ("u8", 4), ("u8", 8))
    counts = {s: raw_words(*s) for s in bytes_too}
    return {
        "LOAD": {s: load(*s) for s in _SHAPES},
        "STORE": {s: store(*s) for s in (*_SHAPES, ("e4m3", 8))},
        "PACK": {s: pack(*s) for s in _SHAPES},
        "LOAD_RAW": {s: load_words(c, 4 * c) for s, c in counts.items()},
        "EXPAND": {s: expand(*s) for s in bytes_too},
        "LOAD_WORDS": {c: load_words(c, 4 * c) for c in (1, 2, 4)},
        "STORE_WORDS": {c: store_words(c) for c in (1, 2, 4)},
        "LOAD_AT": {c: load_words(c, 1) for c in (1, 2, 4)},
    }


def _scalars(access: _Access) -> dict[str, Any]:
    kinds = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32}

    def load(dtype: str) -> _Do:
        def do(address: int, index: int) -> np.float32:
            value = access.number(address, index, kinds[dtype])
            return widened([int(value)], "bf16")[0] if dtype == "bf16" else np.float32(value)

        return do

    def store(dtype: str) -> _Do:
        def do(address: int, index: int, value: np.float32) -> None:
            half = narrowed([value, 0.0], dtype)[0] & 0xFFFF if dtype != "f32" else value
            access.put_number(address, index, half, np.uint16 if dtype != "f32" else np.float32)

        return do

    def rounded(dtype: str) -> _Do:
        return lambda value: widened(narrowed([value, 0.0], dtype), dtype)[0]

    found: dict[str, Any] = {
        "LOAD_SCALAR": {name: load(name) for name in _TYPES},
        "STORE_SCALAR": {name: store(name) for name in _TYPES},
        "ROUNDED": {name: rounded(name) for name in _TYPES},
    }
    for name, dtype in (("u8", np.uint8), ("u16", np.uint16), ("i32", np.int32), ("i64", np.int64)):
        found[f"load_{name}"] = lambda a, i, dtype=dtype: int(access.number(a, i, dtype))
        found[f"store_{name}"] = lambda a, i, v, dtype=dtype: access.put_number(a, i, v, dtype)
    return found


def _shared() -> dict[str, Any]:
    def load(words: int) -> _Do:
        def do(shared: _Array, index: int, into: _Array, position: int) -> None:
            into[position : position + words] = [shared[words * index + i] for i in range(words)]

        return do

    def store(words: int) -> _Do:
        def do(shared: _Array, index: int, values: _Array, position: int) -> None:
            for i in range(words):
                shared[words * index + i] = values[position + i]

        return do

    return {
        "SHARED_LOAD": {w: load(w) for w in (1, 2, 4)},
        "SHARED_STORE": {w: store(w) for w in (1, 2, 4)},
        "shared_store_u16": lambda shared, index, value: shared.store_half(index, value),
    }


def _copies(access: _Access) -> dict[str, Any]:
    """Copies that go on behind a thread: what they bring is there only when it has waited for it."""

    def begin(words: int) -> _Do:
        def do(shared: _Array, place: int, address: int, index: int) -> None:
            found = access.words(address, 4 * words * index, words)
            shared.begin_copy(words * place, found)

        return do

    return {
        "COPY_ASYNC": {w: begin(w) for w in (1, 2, 4)},
        "COPY_CACHED": {w: begin(w) for w in (1, 2, 4)},
        "AWAIT_COPIES": {n: lambda shared, n=n: shared.await_groups(n) for n in range(4)},
        "close_copies": lambda shared: shared.close_group(),
        # Only a hint, but one that must stay inside a buffer.
        "fetch_run": lambda address, index, size: access.words(address, size * index, size // 4) and None,
    }


def _arithmetic() -> dict[str, Any]:
    def quiet(function: _Do) -> _Do:
        def do(value: np.float32) -> np.float32:
            with np.errstate(all="ignore"):
                return np.float32(function(np.float32(value)))

        return do

    def of_two(function: _Do) -> _Do:
        def do(first: np.float32, second: np.float32) -> np.float32:
            with np.errstate(all="ignore"):
                return np.float32(function(np.float32(first), np.float32(second)))

        return do

    def larger_words(dtype: str) -> _Do:
        def do(first: int, second: int) -> int:
            most, size = (np.array(widened([word], dtype)) for word in (first, second))
            return narrowed(np.maximum(most, np.abs(size)).tolist(), dtype)[0]

        return do

    def word_between(low: int, high: int, bits: int) -> int:
        return ((high << 32 | low) >> (bits & 31)) & 0xFFFFFFFF

    return {
        "exp2": quiet(np.exp2),
        "reciprocal": quiet(lambda v: np.float32(1.0) / v),
        "inverse_root": quiet(lambda v: np.float32(1.0) / np.sqrt(v)),
        "square_root": quiet(np.sqrt),
        "larger_magnitude": of_two(lambda a, b: np.maximum(a, np.abs(b))),
        "quotient": of_two(np.divide),
        "LARGER_WORDS": {name: larger_words(name) for name in _TYPES},
        "bits_of": lambda value: int(np.float32(value).view(np.uint32)),
        "word_between": word_between,
        "product": lambda first, second: first * second,
    }


def bound(memory: Memory) -> dict[str, Any]:
    """Return all intrinsics by name, working on `memory`."""
    access = _Access(memory)
    return {
        **_vectors(access),
        **_scalars(access),
        **_shared(),
        **_copies(access),
        **_arithmetic(),
        "raw_words": raw_words,
        "load_word": lambda address, offset: access.words(address, offset, 1)[0],
        "load_word_of_run": lambda address, offset: access.words(address, offset, 1)[0],
        "load_pair": lambda address, offset: int.from_bytes(memory.load(address + offset, 2), "little"),
        "store_word": lambda address, offset, value: access.put(address, offset, [value]),
        "misalignment": lambda address, offset: (address + offset) & 15,
        "address_at": lambda value: value,
        "atomic_add_i32": lambda address, index, value: memory.add_atomically(
            address + 4 * index, int(value)
        ),
    }
