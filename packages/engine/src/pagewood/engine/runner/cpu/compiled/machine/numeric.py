"""Arithmetic that numba does not have, in a form that it can vectorise."""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pagewood.engine.runner.cpu.compiled.machine.kernel import exact

_F = np.float32


def _bitcast(typing_context: Any, bits: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


float_from_bits: Any = intrinsic(_bitcast)
"""Returns the float32 whose bits are the given int32."""


@exact
def exp(x: Any) -> Any:
    """Return e to the power of `x`, float32, within two units in the last place; 0 below -87, where it would underflow.

    x = n ln 2 + r with |r| <= ln 2 / 2, where ln 2 is subtracted in two parts, so that r is exact to float32.
    """
    clamped = min(max(x, _F(-87.3)), _F(88.3))
    n = np.floor(clamped * _F(1.44269504) + _F(0.5))
    r = clamped - n * _F(0.693359375)
    r = r + n * _F(2.12194440e-4)
    p = _F(1.9841270e-4)
    p = p * r + _F(1.3888889e-3)
    p = p * r + _F(8.3333333e-3)
    p = p * r + _F(4.1666667e-2)
    p = p * r + _F(1.6666667e-1)
    p = p * r + _F(0.5)
    p = p * r + _F(1.0)
    p = p * r + _F(1.0)
    power = float_from_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return p * power if x > _F(-87.3) else (_F(0.0) if x <= _F(-87.3) else x)


@exact
def logistic(x: Any) -> Any:
    """Return one over 1 plus e to the power of -x."""
    return _F(1.0) / (_F(1.0) + exp(-x))
