"""What the intrinsics are made of: LLVM instructions for memory access, packing and widening."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()

_PACK = {"bf16": "cvt.rn.bf16x2.f32 $0, $1, $2;", "f16": "cvt.rn.f16x2.f32 $0, $1, $2;"}
# Two values make a half word, the second operand the lower byte of it. From compute capability 8.9 on.
_PACK_E4M3 = (
    "{ .reg .b16 %lower, %upper; cvt.rn.satfinite.e4m3x2.f32 %lower, $2, $1;"
    " cvt.rn.satfinite.e4m3x2.f32 %upper, $4, $3; mov.b32 $0, {%lower, %upper}; }"
)
_PER_WORD = {"u8": 4, "e4m3": 4, "bf16": 2, "f16": 2, "f32": 1}


def const(value: int) -> ir.Constant:
    """Return a 32-bit constant."""
    return ir.Constant(I32, value)


def words_of(dtype: str, elements: int) -> int:
    """Number of 32-bit words that `elements` values fill."""
    return elements // _PER_WORD[dtype]


def global_pointer(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value, pointee: ir.Type) -> ir.Value:
    """Return base + offset bytes as a pointer into global memory."""
    address = builder.add(builder.ptrtoint(base, I64), offset)
    return builder.inttoptr(address, pointee.as_pointer(addrspace=1))


def bytes_at(builder: ir.IRBuilder, index: ir.Value, size: int) -> ir.Value:
    """Return the byte offset of element `index`."""
    return builder.mul(index, ir.Constant(I64, size))


def _vector(words: int) -> ir.Type:
    return I32 if words == 1 else ir.VectorType(I32, words)


def _split(builder: ir.IRBuilder, value: ir.Value, words: int) -> list[ir.Value]:
    return [value] if words == 1 else [builder.extract_element(value, const(i)) for i in range(words)]


def _joined(builder: ir.IRBuilder, words: list[ir.Value]) -> ir.Value:
    if len(words) == 1:
        return words[0]
    value: ir.Value = ir.Constant(_vector(len(words)), ir.Undefined)
    for i, word in enumerate(words):
        value = builder.insert_element(value, word, const(i))
    return value


def load_run(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value, words: int) -> list[ir.Value]:
    """Load `words` 32-bit words at a byte offset: accesses of 16 bytes, or one of 4 or 8."""
    found = []
    for start in range(0, words, 4):
        size = min(4, words - start)
        at = builder.add(offset, ir.Constant(I64, 4 * start)) if start else offset
        pointer = global_pointer(builder, base, at, _vector(size))
        found += _split(builder, builder.load(pointer, align=4 * size), size)
    return found


def store_run(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value, words: list[ir.Value]) -> None:
    """Store 32-bit words at a byte offset: accesses of 16 bytes, or one of 4 or 8."""
    for start in range(0, len(words), 4):
        part = words[start : start + 4]
        at = builder.add(offset, ir.Constant(I64, 4 * start)) if start else offset
        pointer = global_pointer(builder, base, at, _vector(len(part)))
        builder.store(_joined(builder, part), pointer, align=4 * len(part))


def array_slots(context: Any, builder: ir.IRBuilder, array_type: object, array: ir.Value) -> ir.Value:
    """Return the address of the first element of a Numba array."""
    return context.make_array(array_type)(context, builder, array).data


def slot(builder: ir.IRBuilder, data: ir.Value, position: ir.Value, step: int) -> ir.Value:
    """Return the address of element position + step."""
    index = builder.add(position, ir.Constant(I64, step)) if step else position
    return builder.gep(data, [index])


def load_array(builder: ir.IRBuilder, data: ir.Value, position: ir.Value, words: int) -> list[ir.Value]:
    """Load 1, 2 or 4 words of an array with one access; `position` is a multiple of `words`."""
    pointer = builder.bitcast(slot(builder, data, position, 0), _vector(words).as_pointer())
    return _split(builder, builder.load(pointer, align=4 * words), words)


def store_array(builder: ir.IRBuilder, data: ir.Value, position: ir.Value, words: list[ir.Value]) -> None:
    """Store 1, 2 or 4 words into an array with one access; `position` is a multiple of their number."""
    pointer = builder.bitcast(slot(builder, data, position, 0), _vector(len(words)).as_pointer())
    builder.store(_joined(builder, words), pointer, align=4 * len(words))


def unpack(builder: ir.IRBuilder, word: ir.Value, dtype: str) -> list[ir.Value]:
    """Turn one word of two half values into two float32 values, the lower one first."""
    if dtype == "bf16":
        low = builder.shl(word, const(16))
        high = builder.and_(word, const(0xFFFF0000))
        return [builder.bitcast(low, F32), builder.bitcast(high, F32)]
    convert = ir.InlineAsm(ir.FunctionType(F32, [I16]), "cvt.f32.f16 $0, $1;", "=f,h", side_effect=False)
    low = builder.trunc(word, I16)
    high = builder.trunc(builder.lshr(word, const(16)), I16)
    return [builder.call(convert, [low]), builder.call(convert, [high])]


def _bytes_as_floats(builder: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    """Turn the bytes of a word into float32: one byte permutation and one exact subtraction each.

    0x4700bb00 is 32768 + bb. The conversion instruction proper has an eighth of that throughput.
    """
    kind = ir.FunctionType(I32, [I32, I32])
    values = []
    for i in range(4):
        permute = ir.InlineAsm(kind, f"prmt.b32 $0, $1, $2, 0x74{i}4;", "=r,r,r", side_effect=False)
        bits = builder.call(permute, [word, const(0x47000000)])
        values.append(builder.fsub(builder.bitcast(bits, F32), ir.Constant(F32, 32768.0)))
    return values


def widened(builder: ir.IRBuilder, words: list[ir.Value], dtype: str) -> list[ir.Value]:
    """Return the values that the words hold as float32."""
    if dtype == "f32":
        return [builder.bitcast(w, F32) for w in words]
    if dtype == "u8":
        return [v for w in words for v in _bytes_as_floats(builder, w)]
    return [v for w in words for v in unpack(builder, w, dtype)]


def pack(builder: ir.IRBuilder, low: ir.Value, high: ir.Value, dtype: str) -> ir.Value:
    """Round two float32 values to nearest even and put them in one word."""
    convert = ir.InlineAsm(ir.FunctionType(I32, [F32, F32]), _PACK[dtype], "=r,f,f", side_effect=False)
    return builder.call(convert, [high, low])


def narrowed(builder: ir.IRBuilder, values: list[ir.Value], dtype: str) -> list[ir.Value]:
    """Return the words that hold the values rounded to a type."""
    if dtype == "f32":
        return [builder.bitcast(v, I32) for v in values]
    if dtype == "e4m3":
        convert = ir.InlineAsm(ir.FunctionType(I32, [F32] * 4), _PACK_E4M3, "=r,f,f,f,f", side_effect=False)
        return [builder.call(convert, values[i : i + 4]) for i in range(0, len(values), 4)]
    return [pack(builder, values[i], values[i + 1], dtype) for i in range(0, len(values), 2)]


def effect(builder: ir.IRBuilder, code: str, constraints: str, arguments: list[ir.Value]) -> None:
    """Emit an instruction for what it does, in its place among the others."""
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
    builder.call(ir.InlineAsm(kind, code, constraints, side_effect=True), arguments)
