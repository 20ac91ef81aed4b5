"""The instruction that draws tokens. Legend: W wanted tokens, V vocab_size."""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

from pagewood.engine.runner.cpu.compiled.drawing.choice import NUM_CHOICE_COLUMNS, POSITION, choose, seed_of
from pagewood.engine.runner.cpu.compiled.drawing.noise import row_key
from pagewood.engine.runner.cpu.compiled.instruction import Part, instruction, single_rows
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact
from pagewood.engine.runner.cpu.compiled.machine.memory import integers, vector


@instruction(single_rows)
@exact
def draw(logits_at: Any, choices_at: Any, out_at: Any, vocab_size: Any, w: Part) -> None:
    """Draw a token.

    Args:
        logits_at: `[W, V] float32`.
        choices_at: `[W, NUM_CHOICE_COLUMNS]`, how.
        out_at: `[W] int32`, written; `NO_NUMBER` or `NO_CHANCE` if there is none.
        vocab_size: V.
        w: the row.
    """
    at = choices_at + 4 * NUM_CHOICE_COLUMNS * w
    choice, exact_choice = vector(at, NUM_CHOICE_COLUMNS), integers(at, NUM_CHOICE_COLUMNS)
    key = row_key(seed_of(exact_choice), exact_choice[POSITION])
    integers(out_at, 0)[w] = choose(vector(logits_at + 4 * vocab_size * w, vocab_size), choice, exact_choice, key)
