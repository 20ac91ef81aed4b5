"""Giving no probability to tokens that a grammar does not allow.

Legend: V vocab_size.
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pagewood.engine.runner.cpu.compiled.machine.kernel import strict
from pagewood.engine.runner.cpu.compiled.machine.vectors import INDEX, data_at, load, store, vector_of

_LANES = 16
_WORD = 32  # tokens of a word
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values


def _keep(context: Any, logits: Any, start: Any, bits: Any) -> Any:
    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector = vector_of(_LANES)
        nothing = ir.Constant(vector, [float("-inf")] * _LANES)
        first = data_at(ctx, builder, sig.args[0], args[0], args[1])
        for at in range(0, _WORD, _LANES):
            half = builder.trunc(builder.lshr(args[2], args[2].type(at)), ir.IntType(_LANES))
            is_allowed = builder.bitcast(half, ir.VectorType(ir.IntType(1), _LANES))
            place = builder.gep(first, [INDEX(at)])
            store(builder, builder.select(is_allowed, load(builder, place, vector), nothing), place)
        return ctx.get_dummy_value()

    return types.void(logits, types.uint64, types.uint32), generate


_keep_allowed: Any = intrinsic(_keep)
"""Sets those of 32 logits to minus infinity whose bits are not set; called with (logits, start, bits)."""


@strict
def apply_mask(logits: Any, mask: Any) -> None:
    """Set the logits of tokens that are not allowed to minus infinity.

    Args:
        logits: `[V] float32`, changed.
        mask: `[(V + 31) // 32] int32`, see `ConstrainedHandle.constrain`.
    """
    size = _U(logits.shape[0])
    num_whole = size // _U(_WORD)
    for word in range(num_whole):
        bits = np.uint32(mask[word])
        if bits != np.uint32(0xFFFFFFFF):
            _keep_allowed(logits, word * _U(_WORD), bits)
    for i in range(num_whole * _U(_WORD), size):
        if (np.uint32(mask[num_whole]) >> np.uint32(i % _U(_WORD))) & np.uint32(1) == np.uint32(0):
            logits[i] = -np.inf
