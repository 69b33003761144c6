# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Numba intrinsics the kernels are made of: 16-byte memory access, half conversions, approximate maths.

Kernels take every buffer as a raw address (`CPointer(uint32)`), so that bf16 needs no Numba type and a launch
needs no array descriptor. A *vector* is 8 neighbouring elements of any of the three float types: one 16-byte
access for bf16 and f16, two for f32. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import cuda, float32, int64, types, uint32, uint64
from numba.core.extending import intrinsic

ADDRESS = types.CPointer(types.uint32)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_I16 = ir.IntType(16)
_F32 = ir.FloatType()
_LOW_HALF, _HIGH_HALF = 0, 1

_PACK = {"bf16": "cvt.rn.bf16x2.f32 $0, $1, $2;", "f16": "cvt.rn.f16x2.f32 $0, $1, $2;"}


def _const(value: int) -> ir.Constant:
    return ir.Constant(_I32, value)


def _global_pointer(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value, pointee: ir.Type) -> ir.Value:
    """Return base + offset bytes as a pointer into global memory."""
    address = builder.add(builder.ptrtoint(base, _I64), offset)
    return builder.inttoptr(address, pointee.as_pointer(addrspace=1))


def _load_words(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value, words: int = 4) -> list[ir.Value]:
    """Load `words` 32-bit words (1, 2 or 4) with one access."""
    if words == 1:
        return [builder.load(_global_pointer(builder, base, offset, _I32), align=4)]
    vector = ir.VectorType(_I32, words)
    value = builder.load(_global_pointer(builder, base, offset, vector), align=4 * words)
    return [builder.extract_element(value, _const(i)) for i in range(words)]


def _store_words(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value, words: list[ir.Value]) -> None:
    """Store 1, 2 or 4 words with one access."""
    if len(words) == 1:
        builder.store(words[0], _global_pointer(builder, base, offset, _I32), align=4)
        return
    vector = ir.VectorType(_I32, len(words))
    value: ir.Value = ir.Constant(vector, ir.Undefined)
    for i, word in enumerate(words):
        value = builder.insert_element(value, word, _const(i))
    builder.store(value, _global_pointer(builder, base, offset, vector), align=4 * len(words))


def _bytes_at(builder: ir.IRBuilder, index: ir.Value, size: int) -> ir.Value:
    return builder.mul(index, ir.Constant(_I64, size))


def _unpack(builder: ir.IRBuilder, word: ir.Value, dtype: str) -> list[ir.Value]:
    """Turn one word of two half values into two float32 values, the lower one first."""
    if dtype == "bf16":
        low = builder.shl(word, _const(16))
        high = builder.and_(word, _const(0xFFFF0000))
        return [builder.bitcast(low, _F32), builder.bitcast(high, _F32)]
    convert = ir.InlineAsm(ir.FunctionType(_F32, [_I16]), "cvt.f32.f16 $0, $1;", "=f,h", side_effect=False)
    low = builder.trunc(word, _I16)
    high = builder.trunc(builder.lshr(word, _const(16)), _I16)
    return [builder.call(convert, [low]), builder.call(convert, [high])]


def _pack(builder: ir.IRBuilder, low: ir.Value, high: ir.Value, dtype: str) -> ir.Value:
    """Round two float32 values to nearest even and put them in one word."""
    kind = ir.FunctionType(_I32, [_F32, _F32])
    convert = ir.InlineAsm(kind, _PACK[dtype], "=r,f,f", side_effect=False)
    return builder.call(convert, [high, low])


def _array_slots(context: object, builder: ir.IRBuilder, array_type: object, array: ir.Value) -> ir.Value:
    return context.make_array(array_type)(context, builder, array).data  # type: ignore[attr-defined]


def _slot(builder: ir.IRBuilder, data: ir.Value, position: ir.Value, step: int) -> ir.Value:
    index = builder.add(position, ir.Constant(_I64, step))
    return builder.gep(data, [index])


def _words_of(dtype: str, elements: int) -> int:
    """Number of 32-bit words that `elements` values fill."""
    return elements if dtype == "f32" else elements // 2


def _load_run(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, words: int) -> list[ir.Value]:
    """Load run `index` of `words` words: accesses of 16 bytes, or one of 8."""
    offset = _bytes_at(builder, index, 4 * words)
    if words <= 4:
        return _load_words(builder, base, offset, words)
    found = []
    for start in range(0, words, 4):
        at = builder.add(offset, ir.Constant(_I64, 4 * start))
        found += _load_words(builder, base, at)
    return found


def _widened(builder: ir.IRBuilder, words: list[ir.Value], dtype: str) -> list[ir.Value]:
    if dtype == "f32":
        return [builder.bitcast(w, _F32) for w in words]
    return [v for w in words for v in _unpack(builder, w, dtype)]


def _make_load_vector(dtype: str, elements: int = 8) -> Callable[..., object]:
    @intrinsic
    def load_vector(typingctx, address, index, into, position):
        """Load vector `index` into into[position : position + elements] as float32."""

        def codegen(context, builder, signature, args):
            base, at, array, start = args
            words = _load_run(builder, base, at, _words_of(dtype, elements))
            data = _array_slots(context, builder, signature.args[2], array)
            for i, value in enumerate(_widened(builder, words, dtype)):
                builder.store(value, _slot(builder, data, start, i))
            return context.get_dummy_value()

        return types.void(ADDRESS, int64, into, int64), codegen

    return load_vector


def _make_load_raw(dtype: str, elements: int) -> Callable[..., object]:
    @intrinsic
    def load_raw(typingctx, address, index, into, position):
        """Load vector `index` as it is into the uint32 slots from `position`."""

        def codegen(context, builder, signature, args):
            base, at, array, start = args
            data = _array_slots(context, builder, signature.args[2], array)
            for i, word in enumerate(_load_run(builder, base, at, _words_of(dtype, elements))):
                builder.store(word, _slot(builder, data, start, i))
            return context.get_dummy_value()

        return types.void(ADDRESS, int64, into, int64), codegen

    return load_raw


def _make_expand(dtype: str, elements: int) -> Callable[..., object]:
    @intrinsic
    def expand(typingctx, raw, start, into, position):
        """Turn the words of a raw vector into into[position : position + elements] as float32."""

        def codegen(context, builder, signature, args):
            source = _array_slots(context, builder, signature.args[0], args[0])
            count = _words_of(dtype, elements)
            words = [builder.load(_slot(builder, source, args[1], i)) for i in range(count)]
            data = _array_slots(context, builder, signature.args[2], args[2])
            for i, value in enumerate(_widened(builder, words, dtype)):
                builder.store(value, _slot(builder, data, args[3], i))
            return context.get_dummy_value()

        return types.void(raw, int64, into, int64), codegen

    return expand


def _make_store_vector(dtype: str, elements: int = 8) -> Callable[..., object]:
    @intrinsic
    def store_vector(typingctx, address, index, values, position):
        """Round values[position : position + elements] and store them as vector `index`."""

        def codegen(context, builder, signature, args):
            base, at, array, start = args
            data = _array_slots(context, builder, signature.args[2], array)
            items = [builder.load(_slot(builder, data, start, i)) for i in range(elements)]
            if dtype == "f32":
                words = [builder.bitcast(v, _I32) for v in items]
            else:
                words = [_pack(builder, items[i], items[i + 1], dtype) for i in range(0, elements, 2)]
            offset = _bytes_at(builder, at, 4 * len(words))
            for first in range(0, len(words), 4):
                place = builder.add(offset, ir.Constant(_I64, 4 * first))
                _store_words(builder, base, place, words[first : first + 4])
            return context.get_dummy_value()

        return types.void(ADDRESS, int64, values, int64), codegen

    return store_vector


def _make_load_scalar(dtype: str) -> Callable[..., object]:
    @intrinsic
    def load_scalar(typingctx, address, index):
        """Load element `index` as float32."""

        def codegen(context, builder, signature, args):
            base, at = args
            if dtype == "f32":
                return builder.load(_global_pointer(builder, base, _bytes_at(builder, at, 4), _F32), align=4)
            pointer = _global_pointer(builder, base, _bytes_at(builder, at, 2), _I16)
            word = builder.zext(builder.load(pointer, align=2), _I32)
            return _unpack(builder, word, dtype)[_LOW_HALF]

        return float32(ADDRESS, int64), codegen

    return load_scalar


def _make_store_scalar(dtype: str) -> Callable[..., object]:
    @intrinsic
    def store_scalar(typingctx, address, index, value):
        """Round `value` and store it as element `index`."""

        def codegen(context, builder, signature, args):
            base, at, item = args
            if dtype == "f32":
                pointer = _global_pointer(builder, base, _bytes_at(builder, at, 4), _F32)
                builder.store(item, pointer, align=4)
            else:
                word = _pack(builder, item, ir.Constant(_F32, 0.0), dtype)
                pointer = _global_pointer(builder, base, _bytes_at(builder, at, 2), _I16)
                builder.store(builder.trunc(word, _I16), pointer, align=2)
            return context.get_dummy_value()

        return types.void(ADDRESS, int64, float32), codegen

    return store_scalar


def _make_rounding(dtype: str) -> Callable[..., object]:
    @intrinsic
    def rounded(typingctx, value):
        """Return `value` rounded to the type and back, i.e. what a store followed by a load gives."""

        def codegen(context, builder, signature, args):
            if dtype == "f32":
                return args[0]
            word = _pack(builder, args[0], ir.Constant(_F32, 0.0), dtype)
            return _unpack(builder, word, dtype)[_LOW_HALF]

        return float32(float32), codegen

    return rounded


LOAD_VECTOR = {name: _make_load_vector(name) for name in ("bf16", "f16", "f32")}
STORE_VECTOR = {name: _make_store_vector(name) for name in ("bf16", "f16", "f32")}
# Four elements: 16 bytes of float32. Where float32 is written, neighbouring threads then write neighbouring
# 16-byte pieces; with eight elements each piece would be half of a 32-byte sector of its thread.
LOAD_QUAD = {name: _make_load_vector(name, 4) for name in ("bf16", "f16", "f32")}
STORE_QUAD = {name: _make_store_vector(name, 4) for name in ("bf16", "f16", "f32")}
_TYPES = ("bf16", "f16", "f32")
LOAD_RAW = {(name, n): _make_load_raw(name, n) for name in _TYPES for n in (4, 8)}
EXPAND = {(name, n): _make_expand(name, n) for name in _TYPES for n in (4, 8)}
LOAD_PART = {(name, n): _make_load_vector(name, n) for name in _TYPES for n in (4, 8)}
STORE_PART = {(name, n): _make_store_vector(name, n) for name in _TYPES for n in (4, 8)}


def raw_words(dtype: str, elements: int) -> int:
    """Number of 32-bit words a raw vector takes."""
    return _words_of(dtype, elements)


LOAD_SCALAR = {name: _make_load_scalar(name) for name in ("bf16", "f16", "f32")}
STORE_SCALAR = {name: _make_store_scalar(name) for name in ("bf16", "f16", "f32")}
ROUNDED = {name: _make_rounding(name) for name in ("bf16", "f16", "f32")}


@intrinsic
def load_words4(typingctx, address, offset, into, position):
    """Load 16 bytes at byte `offset` (a multiple of 16) into four uint32 slots from `position`."""

    def codegen(context, builder, signature, args):
        base, at, array, start = args
        data = _array_slots(context, builder, signature.args[2], array)
        for i, word in enumerate(_load_words(builder, base, at)):
            builder.store(word, _slot(builder, data, start, i))
        return context.get_dummy_value()

    return types.void(ADDRESS, int64, into, int64), codegen


@intrinsic
def load_word(typingctx, address, offset):
    """Load one 32-bit word at byte `offset` (a multiple of 4)."""

    def codegen(context, builder, signature, args):
        return _load_words(builder, args[0], args[1], 1)[0]

    return uint32(ADDRESS, int64), codegen


@intrinsic
def misalignment(typingctx, address, offset):
    """Return how many bytes address + offset lies above a multiple of 4."""

    def codegen(context, builder, signature, args):
        absolute = builder.add(builder.ptrtoint(args[0], _I64), args[1])
        return builder.and_(absolute, ir.Constant(_I64, 3))

    return int64(ADDRESS, int64), codegen


def _make_integer_access(bits: int) -> tuple[Callable[..., object], Callable[..., object]]:
    kind = ir.IntType(bits)
    result = {8: types.uint8, 32: types.int32, 64: types.int64}[bits]

    @intrinsic
    def load(typingctx, address, index):
        """Load integer `index`."""

        def codegen(context, builder, signature, args):
            offset = _bytes_at(builder, args[1], bits // 8)
            return builder.load(_global_pointer(builder, args[0], offset, kind), align=bits // 8)

        return result(ADDRESS, int64), codegen

    @intrinsic
    def store(typingctx, address, index, value):
        """Store integer `index`."""

        def codegen(context, builder, signature, args):
            offset = _bytes_at(builder, args[1], bits // 8)
            builder.store(args[2], _global_pointer(builder, args[0], offset, kind), align=bits // 8)
            return context.get_dummy_value()

        return types.void(ADDRESS, int64, result), codegen

    return load, store


load_u8, store_u8 = _make_integer_access(8)
load_i32, store_i32 = _make_integer_access(32)
load_i64, store_i64 = _make_integer_access(64)


@intrinsic
def address_at(typingctx, value):
    """Turn an address read from a table into something the loads accept."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(ADDRESS))

    return ADDRESS(int64), codegen


@intrinsic
def atomic_add_i32(typingctx, address, index, value):
    """Add to a 32-bit counter in global memory."""

    def codegen(context, builder, signature, args):
        pointer = _global_pointer(builder, args[0], _bytes_at(builder, args[1], 4), _I32)
        builder.atomic_rmw("add", pointer, args[2], "monotonic")
        return context.get_dummy_value()

    return types.void(ADDRESS, int64, types.int32), codegen


def _make_approximation(instruction: str) -> Callable[..., object]:
    @intrinsic
    def approximation(typingctx, value):
        """One instruction of the special function unit."""

        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(_F32, [_F32])
            call = ir.InlineAsm(kind, f"{instruction} $0, $1;", "=f,f", side_effect=False)
            return builder.call(call, args)

        return float32(float32), codegen

    return approximation


exp2 = _make_approximation("ex2.approx.ftz.f32")  # relative error 2^-22
reciprocal = _make_approximation("rcp.approx.ftz.f32")  # 1 ulp
inverse_root = _make_approximation("rsqrt.approx.ftz.f32")  # relative error 2^-22.9
square_root = _make_approximation("sqrt.rn.f32")


@intrinsic
def bits_of(typingctx, value):
    """Return the bit pattern of a float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _I32)

    return uint32(float32), codegen


@cuda.jit(device=True, inline="always")
def global_thread():
    """Index of the thread in the grid, 64 bits wide: a grid may cover more than 2^31 elements."""
    return int64(cuda.blockIdx.x) * int64(cuda.blockDim.x) + int64(cuda.threadIdx.x)


@cuda.jit(device=True, inline="always")
def exponential(x):
    """exp(x) by one ex2."""
    return exp2(x * float32(1.4426950408889634))


@cuda.jit(device=True, inline="always")
def sigmoid(x):
    """1 / (1 + exp(-x)); exact limits at both ends because rcp(inf) is 0."""
    return reciprocal(float32(1.0) + exponential(-x))


@cuda.jit(device=True, inline="always")
def is_finite(x):
    """True unless x is an infinity or a NaN."""
    return (bits_of(x) & uint32(0x7F800000)) != uint32(0x7F800000)


@cuda.jit(device=True, inline="always")
def philox_round(c0, c1, c2, c3, k0, k1):
    """One round of Philox-4x32 (Salmon et al., SC 2011)."""
    a = uint64(c0) * uint64(0xD2511F53)
    b = uint64(c2) * uint64(0xCD9E8D57)
    n0 = uint32(b >> uint64(32)) ^ c1 ^ k0
    n2 = uint32(a >> uint64(32)) ^ c3 ^ k1
    return n0, uint32(b), n2, uint32(a)
