"""Building blocks of the hand-written vector loops, as instructions of LLVM."""

# pyright: basic
# llvmlite has no types.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir

INDEX = ir.IntType(64)
_BYTE, _FLAG = ir.IntType(8).as_pointer(), ir.IntType(32)


def vector_of(lanes: int) -> Any:
    """Return the type of a vector of float32."""
    return ir.VectorType(ir.FloatType(), lanes)


def data_at(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Return a pointer to an element of a flat array of the numba type `kind`."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def with_pointers(builder: Any, arguments: Any, kinds: Mapping[int, Any]) -> list[Any]:
    """Return the arguments of a function, of which those at the places in `kinds` are addresses, as such pointers."""
    return [builder.inttoptr(one, kinds[place]) if place in kinds else one for place, one in enumerate(arguments)]


def load(builder: Any, pointer: Any, vector: Any) -> Any:
    """Return the vector at a pointer to float32 of any alignment."""
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4)


def load_half(builder: Any, pointer: Any, vector: Any) -> Any:
    """Return as float32 the vector of bfloat16 at a pointer to uint16 of any alignment."""
    halves, words = (ir.VectorType(ir.IntType(bits), vector.count) for bits in (16, 32))
    found = builder.zext(builder.load(builder.bitcast(pointer, halves.as_pointer()), align=2), words)
    return builder.bitcast(builder.shl(found, ir.Constant(words, [16] * vector.count)), vector)


def store(builder: Any, value: Any, pointer: Any) -> None:
    """Write a vector to a pointer to float32 of any alignment."""
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def spread(builder: Any, scalar: Any, vector: Any) -> Any:
    """Return a vector of equal elements."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _FLAG(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_FLAG, vector.count), None))


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return `a * b + c` of vectors, rounded once where the processor can do that, in every loop in the same way."""
    return _call(builder, "fmuladd", a, b, c)


def floor(builder: Any, value: Any) -> Any:
    """Return a vector, rounded down to whole numbers."""
    return _call(builder, "floor", value)


def _call(builder: Any, name: str, *vectors: Any) -> Any:
    """Call an intrinsic of LLVM that takes and returns vectors of one type."""
    kind = vectors[0].type
    full_name = f"llvm.{name}.v{kind.count}f32"
    function_type = ir.FunctionType(kind, [kind] * len(vectors))
    function = builder.module.globals.get(full_name) or ir.Function(builder.module, function_type, full_name)
    return builder.call(function, vectors)


def by_halves(builder: Any, value: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine a vector's second half with its first until one element is left, and return it.

    Args:
        builder: emits the instructions.
        value: a vector; its number of elements is a power of two.
        combine: called with (builder, first half, second half).
    """
    while (lanes := value.type.count) > 1:
        low, high = (
            builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(_FLAG, lanes // 2), list(places)))
            for places in (range(lanes // 2), range(lanes // 2, lanes))
        )
        value = combine(builder, low, high)
    return builder.extract_element(value, _FLAG(0))


def total(builder: Any, value: Any) -> Any:
    """Return the sum of a vector's elements, added by halves."""
    return by_halves(builder, value, lambda builder, a, b: builder.fadd(a, b))


def prefetch(builder: Any, pointer: Any) -> None:
    """Prefetch the memory at a pointer for reading, into the second-level cache; it need not exist."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTE, _FLAG, _FLAG, _FLAG])
    function = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
    builder.call(function, [builder.bitcast(pointer, _BYTE), _FLAG(0), _FLAG(2), _FLAG(1)])
