# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Numba intrinsics the kernels are made of: wide memory access, conversions, approximate maths.

Kernels take every buffer as a raw address (`CPointer(uint32)`), so that bf16 needs no Numba type and a launch
needs no array descriptor. A *vector* is 8 (or 4) neighbouring elements of one type. All arithmetic is
float32. ``kernels/simulator/intrinsics.py`` has the same names for the CPU; a test keeps the two alike.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import float32, int64, types, uint32
from numba.core.extending import intrinsic

from loongforge_fuse.kernels.source import lowering as low

ADDRESS = types.CPointer(types.uint32)
FLOATS = ("bf16", "f16", "f32")
Device = Callable[..., object]


def _make_load_vector(dtype: str, elements: int) -> Device:
    words = low.words_of(dtype, elements)

    @intrinsic
    def load_vector(typingctx, address, index, into, position):
        """Load vector `index` into into[position : position + elements] as float32."""

        def codegen(context, builder, signature, args):
            base, at, array, start = args
            found = low.load_run(builder, base, low.bytes_at(builder, at, 4 * words), words)
            data = low.array_slots(context, builder, signature.args[2], array)
            for i, value in enumerate(low.widened(builder, found, dtype)):
                builder.store(value, low.slot(builder, data, start, i))
            return context.get_dummy_value()

        return types.void(ADDRESS, int64, into, int64), codegen

    return load_vector


def _make_load_raw(words: int) -> Device:
    @intrinsic
    def load_raw(typingctx, address, index, into, position):
        """Load run `index` of words as it is into the uint32 slots from `position`."""

        def codegen(context, builder, signature, args):
            base, at, array, start = args
            data = low.array_slots(context, builder, signature.args[2], array)
            found = low.load_run(builder, base, low.bytes_at(builder, at, 4 * words), words)
            for i, word in enumerate(found):
                builder.store(word, low.slot(builder, data, start, i))
            return context.get_dummy_value()

        return types.void(ADDRESS, int64, into, int64), codegen

    return load_raw


def _make_store_raw(words: int) -> Device:
    @intrinsic
    def store_raw(typingctx, address, index, values, position):
        """Store the uint32 slots from `position` as run `index` of words."""

        def codegen(context, builder, signature, args):
            base, at, array, start = args
            data = low.array_slots(context, builder, signature.args[2], array)
            found = [builder.load(low.slot(builder, data, start, i)) for i in range(words)]
            low.store_run(builder, base, low.bytes_at(builder, at, 4 * words), found)
            return context.get_dummy_value()

        return types.void(ADDRESS, int64, values, int64), codegen

    return store_raw


def _make_expand(dtype: str, elements: int) -> Device:
    count = low.words_of(dtype, elements)

    @intrinsic
    def expand(typingctx, raw, start, into, position):
        """Turn the words of a raw vector into into[position : position + elements] as float32."""

        def codegen(context, builder, signature, args):
            source = low.array_slots(context, builder, signature.args[0], args[0])
            words = [builder.load(low.slot(builder, source, args[1], i)) for i in range(count)]
            data = low.array_slots(context, builder, signature.args[2], args[2])
            for i, value in enumerate(low.widened(builder, words, dtype)):
                builder.store(value, low.slot(builder, data, args[3], i))
            return context.get_dummy_value()

        return types.void(raw, int64, into, int64), codegen

    return expand


def _make_pack(dtype: str, elements: int) -> Device:
    @intrinsic
    def pack(typingctx, values, position, raw, start):
        """Round values[position : position + elements] into the words of a raw vector."""

        def codegen(context, builder, signature, args):
            data = low.array_slots(context, builder, signature.args[0], args[0])
            items = [builder.load(low.slot(builder, data, args[1], i)) for i in range(elements)]
            target = low.array_slots(context, builder, signature.args[2], args[2])
            for i, word in enumerate(low.narrowed(builder, items, dtype)):
                builder.store(word, low.slot(builder, target, args[3], i))
            return context.get_dummy_value()

        return types.void(values, int64, raw, int64), codegen

    return pack


def _make_store_vector(dtype: str, elements: int) -> Device:
    @intrinsic
    def store_vector(typingctx, address, index, values, position):
        """Round values[position : position + elements] and store them as vector `index`."""

        def codegen(context, builder, signature, args):
            base, at, array, start = args
            data = low.array_slots(context, builder, signature.args[2], array)
            items = [builder.load(low.slot(builder, data, start, i)) for i in range(elements)]
            words = low.narrowed(builder, items, dtype)
            low.store_run(builder, base, low.bytes_at(builder, at, 4 * len(words)), words)
            return context.get_dummy_value()

        return types.void(ADDRESS, int64, values, int64), codegen

    return store_vector


def _make_load_scalar(dtype: str) -> Device:
    @intrinsic
    def load_scalar(typingctx, address, index):
        """Load element `index` as float32."""

        def codegen(context, builder, signature, args):
            base, at = args
            if dtype == "f32":
                pointer = low.global_pointer(builder, base, low.bytes_at(builder, at, 4), low.F32)
                return builder.load(pointer, align=4)
            pointer = low.global_pointer(builder, base, low.bytes_at(builder, at, 2), low.I16)
            word = builder.zext(builder.load(pointer, align=2), low.I32)
            return low.unpack(builder, word, dtype)[0]

        return float32(ADDRESS, int64), codegen

    return load_scalar


def _make_store_scalar(dtype: str) -> Device:
    @intrinsic
    def store_scalar(typingctx, address, index, value):
        """Round `value` and store it as element `index`."""

        def codegen(context, builder, signature, args):
            base, at, item = args
            if dtype == "f32":
                pointer = low.global_pointer(builder, base, low.bytes_at(builder, at, 4), low.F32)
                builder.store(item, pointer, align=4)
            else:
                word = low.pack(builder, item, ir.Constant(low.F32, 0.0), dtype)
                pointer = low.global_pointer(builder, base, low.bytes_at(builder, at, 2), low.I16)
                builder.store(builder.trunc(word, low.I16), pointer, align=2)
            return context.get_dummy_value()

        return types.void(ADDRESS, int64, float32), codegen

    return store_scalar


def _make_rounding(dtype: str) -> Device:
    @intrinsic
    def rounded(typingctx, value):
        """Return `value` rounded to the type and back, i.e. what a store followed by a load gives."""

        def codegen(context, builder, signature, args):
            if dtype == "f32":
                return args[0]
            word = low.pack(builder, args[0], ir.Constant(low.F32, 0.0), dtype)
            return low.unpack(builder, word, dtype)[0]

        return float32(float32), codegen

    return rounded


# By (type, elements). Four float32 are 16 bytes: where float32 is written, neighbouring threads then write
# neighbouring 16-byte pieces; with eight elements each piece would be half of a 32-byte sector of its thread.
_SHAPES = tuple((name, n) for name in FLOATS for n in (4, 8))
LOAD = {(name, n): _make_load_vector(name, n) for name, n in _SHAPES}
STORE = {(name, n): _make_store_vector(name, n) for name, n in (*_SHAPES, ("e4m3", 8))}
_RAW, _RAW_STORES = {w: _make_load_raw(w) for w in (1, 2, 4, 8)}, {w: _make_store_raw(w) for w in (1, 2, 4)}
LOAD_RAW = {(name, n): _RAW[low.words_of(name, n)] for name, n in (*_SHAPES, ("u8", 4), ("u8", 8))}
EXPAND = {(name, n): _make_expand(name, n) for name, n in (*_SHAPES, ("u8", 4), ("u8", 8))}
PACK = {(name, n): _make_pack(name, n) for name, n in _SHAPES}
LOAD_WORDS, STORE_WORDS = {w: _RAW[w] for w in (1, 2, 4)}, _RAW_STORES
LOAD_SCALAR = {name: _make_load_scalar(name) for name in FLOATS}
STORE_SCALAR = {name: _make_store_scalar(name) for name in FLOATS}
ROUNDED = {name: _make_rounding(name) for name in FLOATS}


def raw_words(dtype: str, elements: int) -> int:
    """Number of 32-bit words a raw vector takes."""
    return low.words_of(dtype, elements)


def _make_load_at(words: int) -> Device:
    @intrinsic
    def load_at(typingctx, address, offset, into, position):
        """Load words at byte `offset`, a multiple of their size, into the uint32 slots from `position`."""

        def codegen(context, builder, signature, args):
            base, at, array, start = args
            data = low.array_slots(context, builder, signature.args[2], array)
            for i, word in enumerate(low.load_run(builder, base, at, words)):
                builder.store(word, low.slot(builder, data, start, i))
            return context.get_dummy_value()

        return types.void(ADDRESS, int64, into, int64), codegen

    return load_at


LOAD_AT = {w: _make_load_at(w) for w in (1, 2, 4)}


@intrinsic
def load_word(typingctx, address, offset):
    """Load one 32-bit word at byte `offset` (a multiple of 4)."""

    def codegen(context, builder, signature, args):
        return low.load_run(builder, args[0], args[1], 1)[0]

    return uint32(ADDRESS, int64), codegen


@intrinsic
def load_pair(typingctx, address, offset):
    """Load two bytes at byte `offset` (a multiple of 2), the first one lowest."""

    def codegen(context, builder, signature, args):
        pointer = low.global_pointer(builder, args[0], args[1], low.I16)
        return builder.zext(builder.load(pointer, align=2), low.I32)

    return uint32(ADDRESS, int64), codegen


@intrinsic
def store_word(typingctx, address, offset, value):
    """Store one 32-bit word at byte `offset` (a multiple of 4)."""

    def codegen(context, builder, signature, args):
        low.store_run(builder, args[0], args[1], [args[2]])
        return context.get_dummy_value()

    return types.void(ADDRESS, int64, uint32), codegen


@intrinsic
def misalignment(typingctx, address, offset):
    """Return how many bytes address + offset lies above a multiple of 16."""

    def codegen(context, builder, signature, args):
        absolute = builder.add(builder.ptrtoint(args[0], low.I64), args[1])
        return builder.and_(absolute, ir.Constant(low.I64, 15))

    return int64(ADDRESS, int64), codegen


def _make_integer_access(bits: int) -> tuple[Device, Device]:
    kind = ir.IntType(bits)
    result = {8: types.uint8, 16: types.uint16, 32: types.int32, 64: types.int64}[bits]
    taken = types.uint32 if bits == 16 else result

    @intrinsic
    def load(typingctx, address, index):
        """Load integer `index`."""

        def codegen(context, builder, signature, args):
            offset = low.bytes_at(builder, args[1], bits // 8)
            return builder.load(low.global_pointer(builder, args[0], offset, kind), align=bits // 8)

        return result(ADDRESS, int64), codegen

    @intrinsic
    def store(typingctx, address, index, value):
        """Store integer `index`."""

        def codegen(context, builder, signature, args):
            offset = low.bytes_at(builder, args[1], bits // 8)
            value = builder.trunc(args[2], kind) if bits == 16 else args[2]
            builder.store(value, low.global_pointer(builder, args[0], offset, kind), align=bits // 8)
            return context.get_dummy_value()

        return types.void(ADDRESS, int64, taken), codegen

    return load, store


load_u8, store_u8 = _make_integer_access(8)
load_u16, store_u16 = _make_integer_access(16)
load_i32, store_i32 = _make_integer_access(32)
load_i64, store_i64 = _make_integer_access(64)


def _make_shared_access(words: int) -> tuple[Device, Device]:
    @intrinsic
    def load(typingctx, shared, index, into, position):
        """Load run `index` of words of a uint32 array with one access into the slots from `position`."""

        def codegen(context, builder, signature, args):
            source = low.array_slots(context, builder, signature.args[0], args[0])
            at = low.bytes_at(builder, args[1], words)
            data = low.array_slots(context, builder, signature.args[2], args[2])
            for i, word in enumerate(low.load_array(builder, source, at, words)):
                builder.store(word, low.slot(builder, data, args[3], i))
            return context.get_dummy_value()

        return types.void(shared, int64, into, int64), codegen

    @intrinsic
    def store(typingctx, shared, index, values, position):
        """Store the slots from `position` as run `index` of words of a uint32 array with one access."""

        def codegen(context, builder, signature, args):
            target = low.array_slots(context, builder, signature.args[0], args[0])
            at = low.bytes_at(builder, args[1], words)
            data = low.array_slots(context, builder, signature.args[2], args[2])
            found = [builder.load(low.slot(builder, data, args[3], i)) for i in range(words)]
            low.store_array(builder, target, at, found)
            return context.get_dummy_value()

        return types.void(shared, int64, values, int64), codegen

    return load, store


SHARED_LOAD, SHARED_STORE = ({w: _make_shared_access(w)[way] for w in (1, 2, 4)} for way in (0, 1))


def _make_shared_narrow(bits: int) -> Device:
    kind = ir.IntType(bits)

    @intrinsic
    def store(typingctx, shared, index, value):
        """Store the low bits of `value` as narrow element `index` of a uint32 array."""

        def codegen(context, builder, signature, args):
            data = low.array_slots(context, builder, signature.args[0], args[0])
            narrow = builder.bitcast(data, kind.as_pointer())
            builder.store(builder.trunc(args[2], kind), builder.gep(narrow, [args[1]]), align=bits // 8)
            return context.get_dummy_value()

        return types.void(shared, int64, uint32), codegen

    return store


shared_store_u16 = _make_shared_narrow(16)


def _make_copy_async(words: int, kind: str) -> Device:
    code = (
        "{ .reg .u64 %to; cvta.to.shared.u64 %to, $0;"
        f" cp.async.{kind}.shared.global [%to], [$1], {4 * words}; }}"
    )

    @intrinsic
    def copy_async(typingctx, shared, place, address, index):
        """Begin to copy run `index` of words of global memory to run `place` of a uint32 array."""

        def codegen(context, builder, signature, args):
            target = low.array_slots(context, builder, signature.args[0], args[0])
            to = builder.ptrtoint(
                low.slot(builder, target, low.bytes_at(builder, args[1], words), 0), low.I64
            )
            base = builder.ptrtoint(args[2], low.I64)
            source = builder.add(base, low.bytes_at(builder, args[3], 4 * words))
            low.effect(builder, code, "l,l,~{memory}", [to, source])
            return context.get_dummy_value()

        return types.void(shared, int64, ADDRESS, int64), codegen

    return copy_async


def _make_await_copies(left: int) -> Device:
    @intrinsic
    def await_copies(typingctx, shared):
        """Wait until at most the last `left` groups of copies of this thread are under way."""

        def codegen(context, builder, signature, args):
            low.effect(builder, f"cp.async.wait_group {left};", "~{memory}", [])
            return context.get_dummy_value()

        return types.void(shared), codegen

    return await_copies


@intrinsic
def close_copies(typingctx, shared):
    """Make the copies that this thread has begun since the last call one group, which may be empty."""

    def codegen(context, builder, signature, args):
        low.effect(builder, "cp.async.commit_group;", "~{memory}", [])
        return context.get_dummy_value()

    return types.void(shared), codegen


# What is read once passes by the first-level cache, which only copies of 16 bytes can; what other blocks of
# the multiprocessor read too goes through it.
COPY_ASYNC = {w: _make_copy_async(w, "cg" if w == 4 else "ca") for w in (1, 2, 4)}
COPY_CACHED = {w: _make_copy_async(w, "ca") for w in (1, 2, 4)}
AWAIT_COPIES = {n: _make_await_copies(n) for n in range(4)}


@intrinsic
def fetch_run(typingctx, address, index, size):
    """Begin to bring `size` bytes, run `index` of as many, into the second-level cache; from 9.0 on."""

    def codegen(context, builder, signature, args):
        wide = builder.sext(args[2], low.I64)
        source = builder.add(builder.ptrtoint(args[0], low.I64), builder.mul(args[1], wide))
        low.effect(builder, "cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r,~{memory}", [source, args[2]])
        return context.get_dummy_value()

    return types.void(ADDRESS, int64, types.int32), codegen


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
        pointer = low.global_pointer(builder, args[0], low.bytes_at(builder, args[1], 4), low.I32)
        builder.atomic_rmw("add", pointer, args[2], "monotonic")
        return context.get_dummy_value()

    return types.void(ADDRESS, int64, types.int32), codegen


@intrinsic
def word_between(typingctx, low_word, high_word, bits):
    """Return the word that begins `bits` (0 to 31) above the lowest bit of the two words."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(low.I32, [low.I32] * 3)
        shift = ir.InlineAsm(kind, "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", side_effect=False)
        return builder.call(shift, args)

    return uint32(uint32, uint32, uint32), codegen


@intrinsic
def product(typingctx, first, second):
    """Multiply two 32-bit words into 64 bits by one instruction; a product of 64-bit numbers is several."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(low.I64, [low.I32, low.I32])
        multiply = ir.InlineAsm(kind, "mul.wide.u32 $0, $1, $2;", "=l,r,r", side_effect=False)
        return builder.call(multiply, args)

    return types.uint64(uint32, uint32), codegen


def _make_approximation(instruction: str) -> Device:
    @intrinsic
    def approximation(typingctx, value):
        """One instruction of the special function unit."""

        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(low.F32, [low.F32])
            call = ir.InlineAsm(kind, f"{instruction} $0, $1;", "=f,f", side_effect=False)
            return builder.call(call, args)

        return float32(float32), codegen

    return approximation


exp2 = _make_approximation("ex2.approx.ftz.f32")  # relative error 2^-22
reciprocal = _make_approximation("rcp.approx.ftz.f32")  # 1 ulp
inverse_root = _make_approximation("rsqrt.approx.ftz.f32")  # relative error 2^-22.9
square_root = _make_approximation("sqrt.rn.f32")


def _make_of_two(code: str) -> Device:
    @intrinsic
    def of_two(typingctx, first, second):
        """One or a few instructions of two float32 values."""

        def codegen(context, builder, signature, args):
            kind = ir.FunctionType(low.F32, [low.F32, low.F32])
            return builder.call(ir.InlineAsm(kind, code, "=f,f,f", side_effect=False), args)

        return float32(float32, float32), codegen

    return of_two


# The larger of the first and the magnitude of the second; a NaN once seen stays.
larger_magnitude = _make_of_two("{ .reg .f32 %size; abs.f32 %size, $2; max.NaN.f32 $0, $1, %size; }")
# first / second, rounded as IEEE 754 demands, so that a CPU computes the same: for a normal quotient and
# operands of 2^-40 to 2^127. The steps are those of a division without the branch for other operands, which
# costs registers; the reciprocal of a large number would be too small without the factor.
quotient = _make_of_two(
    "{ .reg .f32 %a, %b, %n, %y, %e, %q; mul.f32 %a, $1, 0f1F800000; mul.f32 %b, $2, 0f1F800000;"
    " neg.f32 %n, %b; rcp.approx.ftz.f32 %y, %b; fma.rn.f32 %e, %n, %y, 0f3F800000;"
    " fma.rn.f32 %y, %y, %e, %y; mul.rn.f32 %q, %a, %y; fma.rn.f32 %e, %n, %q, %a;"
    " fma.rn.f32 %q, %e, %y, %q; fma.rn.f32 %e, %n, %q, %a; fma.rn.f32 $0, %e, %y, %q; }"
)


def _make_larger_words(dtype: str) -> Device:
    kind = {"bf16": "bf16x2", "f16": "f16x2", "f32": "f32"}[dtype]
    size = "f32" if dtype == "f32" else "b32"
    code = (
        f"{{ .reg .{size} %most, %size; mov.b32 %most, $1; mov.b32 %size, $2; abs.{kind} %size, %size;"
        f" max.NaN.{kind} %most, %most, %size; mov.b32 $0, %most; }}"
    )

    @intrinsic
    def larger_words(typingctx, first, second):
        """Return the larger of each value of a word and its fellow's magnitude; a NaN once seen stays."""

        def codegen(context, builder, signature, args):
            function = ir.FunctionType(low.I32, [low.I32, low.I32])
            return builder.call(ir.InlineAsm(function, code, "=r,r,r", side_effect=False), args)

        return uint32(uint32, uint32), codegen

    return larger_words


LARGER_WORDS = {name: _make_larger_words(name) for name in FLOATS}


@intrinsic
def bits_of(typingctx, value):
    """Return the bit pattern of a float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], low.I32)

    return uint32(float32), codegen
