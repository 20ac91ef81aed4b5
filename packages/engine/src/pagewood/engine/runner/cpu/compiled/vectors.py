"""What the hand-made vector loops are built from, as instructions of LLVM."""

# pyright: basic
# llvmlite has no types.

from __future__ import annotations

from collections.abc import Callable
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


def load(builder: Any, pointer: Any, vector: Any) -> Any:
    """Return the vector that starts at a pointer to float32, on whatever address."""
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4)


def store(builder: Any, value: Any, pointer: Any) -> None:
    """Write a vector from a pointer to float32 on."""
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
    """Return what is left of a vector's elements when its second half is combined with its first, again and again.

    Args:
        builder: emits the instructions.
        value: a vector of a power of two of elements.
        combine: (builder, first, second), of vectors, in the end of one element each.
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
    """Ask for the memory at a pointer, to be read, into the second level of the cache; it need not exist."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTE, _FLAG, _FLAG, _FLAG])
    function = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
    builder.call(function, [builder.bitcast(pointer, _BYTE), _FLAG(0), _FLAG(2), _FLAG(1)])
