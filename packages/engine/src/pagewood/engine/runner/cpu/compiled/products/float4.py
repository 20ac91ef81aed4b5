"""Floating point numbers of four bits (E2M1) and their scales of one byte, as the loops over codes read them.

Twice such a number is whole: one of 0, 1, 2, 3, 4, 6, 8, 12, or that negated. Loops compute with the double, and with
half of its scale.

Legend: L lanes of a vector.
"""

# pyright: basic
# llvmlite has no types.

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pagewood.engine.runner.cpu.compiled.machine.vectors import vector_of
from pagewood.engine.runner.cpu.compiled.products.dot import DotLevel, processor_has
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.weights.small_floats import E2M1_DOUBLED

_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
_LARGEST = WeightKind.MXFP4.zero
_OFFSET = [int(value) + _LARGEST for value in E2M1_DOUBLED]
MAGNITUDES = 0xC8643210
"""Twice the magnitudes of the codes 0 to 7, four bits each."""
_JUMPS = {5: 1, 6: 2, 7: 5}
"""What twice a magnitude is more than its code."""
_LOOKUPS = {
    DotLevel.AVX512_VNNI: "llvm.x86.avx512.pshuf.b.512",
    DotLevel.AVX_VNNI: "llvm.x86.avx2.pshuf.b",
    DotLevel.AVX2: "llvm.x86.avx2.pshuf.b",
    DotLevel.SDOT: "llvm.aarch64.neon.tbl1.v16i8",
}
"""Instructions that look up each byte in a table of 16, which those of x86 want for each 16 bytes of a vector."""


def doubled_bytes(builder: Any, codes: Any, level: DotLevel) -> Any:
    """Return twice the numbers of codes 0 to 15 `<L x i8>`, plus the zero of the kind, as unsigned bytes."""
    kind, name = codes.type, _LOOKUPS.get(level)
    if name is not None:
        table = ir.Constant(kind, _OFFSET * (kind.count // 16))
        parts = (table, codes)
        return _call(builder, name, kind, *parts)

    def every(value: int) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    low = builder.and_(codes, every(7))
    double = low
    for code, more in _JUMPS.items():
        jump = builder.select(builder.icmp_unsigned("==", low, every(code)), every(more), every(0))
        double = builder.add(double, jump)
    is_negative = builder.icmp_unsigned(">", codes, every(7))
    zero = every(_LARGEST)
    return builder.select(is_negative, builder.sub(zero, double), builder.add(zero, double))


def doubled_floats(builder: Any, words: Any, shift: int) -> Any:
    """Return twice the numbers of the codes that begin at bit `shift` of `words` `<16 x i32>`, as float32."""
    kind, floats = words.type, vector_of(words.type.count)

    def every(value: int) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    if processor_has("avx512f"):  # the instruction reads the low four bits only
        table = ir.Constant(floats, [float(value) for value in E2M1_DOUBLED])
        return _call(builder, "llvm.x86.avx512.permvar.sf.512", floats, table, builder.lshr(words, every(shift)))
    moved = builder.shl(words, every(2)) if shift == 0 else builder.lshr(words, every(shift - 2))
    places = builder.and_(moved, every(0b11100))  # four times the codes without their signs
    double = builder.and_(builder.lshr(every(MAGNITUDES), places), every(15))
    sign = builder.and_(builder.shl(words, every(28 - shift)), every(1 << 31))
    bits = builder.bitcast(builder.sitofp(double, floats), kind)
    return builder.bitcast(builder.xor(bits, sign), floats)


def half_scales(builder: Any, kind: WeightKind, scales: Any) -> Any:
    """Return halves of the scales of groups, `<L x i8>` as a layout of `kind` stores them, as float32."""
    words, floats = ir.VectorType(_WORD, scales.type.count), vector_of(scales.type.count)
    bits = builder.zext(scales, words)
    if kind == WeightKind.MXFP4:  # bytes are exponents of the halves
        return builder.bitcast(builder.shl(bits, ir.Constant(words, [23] * words.count)), floats)
    # E4M3: exponent and mantissa in their places are the number times 2 ** -120
    small = builder.bitcast(builder.shl(bits, ir.Constant(words, [20] * words.count)), floats)
    return builder.fmul(small, ir.Constant(floats, [2.0**119] * words.count))


def _call(builder: Any, name: str, result: Any, *operands: Any) -> Any:
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    module = builder.module
    return builder.call(module.globals.get(name) or ir.Function(module, kind, name), operands)
