"""What the hand-made vector loops are built from, as instructions of LLVM."""

# pyright: basic
# llvmlite has no types.

from __future__ import annotations

from typing import Any

from llvmlite import ir

INDEX = ir.IntType(64)
FUSED = ("contract",)
"""Lets a product and a sum become one instruction."""
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


def total(builder: Any, value: Any) -> Any:
    """Return the sum of a vector's elements, in whatever order is fastest."""
    kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), value.type])
    name = f"llvm.vector.reduce.fadd.v{value.type.count}f32"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [ir.FloatType()(-0.0), value], fastmath=("reassoc",))


def prefetch(builder: Any, pointer: Any) -> None:
    """Ask for the memory at a pointer, to be read, into the second level of the cache; it need not exist."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTE, _FLAG, _FLAG, _FLAG])
    function = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
    builder.call(function, [builder.bitcast(pointer, _BYTE), _FLAG(0), _FLAG(2), _FLAG(1)])
