"""The parameters of norms as arrays, to which instructions refer by address."""

# pyright: basic
# torch's conversions from and to numpy have no types.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.models.ops import Norm

Float32 = NDArray[np.float32]


def weight_of(norm: Norm, size: int) -> Float32:
    """Return the weights of a norm of `size` elements, with its offset."""
    weight = norm.folded().weight
    return np.ones(size, np.float32) if weight is None else _array(weight)


def bias_of(norm: Norm, size: int) -> Float32:
    """Return the bias of a norm of `size` elements."""
    return np.zeros(size, np.float32) if norm.bias is None else _array(norm.bias)


def _array(vector: Tensor) -> Float32:
    return np.ascontiguousarray(vector.numpy(), np.float32)
