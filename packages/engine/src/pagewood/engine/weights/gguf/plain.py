"""Plain numbers in a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from pagewood.engine.weights.checkpoint_formats import Array
from pagewood.engine.weights.matrix_forms import F32

PLAIN: Mapping[str, str] = MappingProxyType({"F32": "<f4", "F16": "<f2", "BF16": "<u2"})
"""Types without blocks, as numpy reads them."""


def as_float32(numbers: Array) -> F32:
    """Return plain numbers (BF16 as uint16) as float32."""
    if numbers.dtype == np.uint16:
        return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return numbers.astype(np.float32)
