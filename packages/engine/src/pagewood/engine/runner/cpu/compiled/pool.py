"""Sums of hidden states, of the prompts that become vectors. Legend: K kept tokens, E elements of a hidden state."""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.instruction import InScope, Part, instruction
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact, inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import integer_rows, vector

_BLOCK = 64  # sums side by side, so that states are added as vectors


@inlined
def _pooled(scope: Any) -> Any:
    return scope[Column.NUM_POOLED]


@instruction(_pooled)
@exact
def pool(scope: InScope, p: Part, states_at: Any, size: Any, out_at: Any) -> None:
    """Write the sum of the states of pooled grant `p`, added in float64.

    Args:
        scope: a row of the table of scopes.
        p: index in its table of pooled grants.
        states_at: address of `[K, E]`.
        size: E.
        out_at: address of `[>= p + 1, E]`, written.
    """
    span = integer_rows(scope[Column.POOLED], 0, 2)[p]
    first, num = np.int64(span[0]), np.int64(span[1])
    sums = np.empty(_BLOCK, np.float64)
    for start in range(0, size, _BLOCK):
        width = min(size - start, _BLOCK)
        out = vector(out_at + 4 * (p * size + start), width)
        for j in range(width):
            sums[j] = 0.0
        for i in range(num):
            state = vector(states_at + 4 * ((first + i) * size + start), width)
            for j in range(width):
                sums[j] += np.float64(state[j])
        for j in range(width):
            out[j] = np.float32(sums[j])
