"""All instructions, by the function that they are compiled in. A new kind is declared in its room, and added here.

What depends on the size of heads is in `heads_unit`, and what depends on the form of weights in `packed_unit`.
A unit is one function, whose calls get slower with the number of its instructions. So rare ones are apart.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from pagewood.engine.runner.cpu.compiled import activations, rows
from pagewood.engine.runner.cpu.compiled.attention.heads import store
from pagewood.engine.runner.cpu.compiled.drafting import accept, passes
from pagewood.engine.runner.cpu.compiled.drawing.adjust import adjust
from pagewood.engine.runner.cpu.compiled.drawing.draw import draw
from pagewood.engine.runner.cpu.compiled.drawing.report import report
from pagewood.engine.runner.cpu.compiled.instruction import Unit
from pagewood.engine.runner.cpu.compiled.machine.clock import clock
from pagewood.engine.runner.cpu.compiled.pool import pool
from pagewood.engine.runner.cpu.compiled.products import matmul

COMMON = (
    Unit(
        "rows", rows.gather, rows.gather_panels, rows.take, rows.put, rows.columns, rows.clear_first, rows.norm,
        rows.add_norm, rows.norm_add, rows.norm_columns, rows.silu_mul, rows.gelu_mul, rows.scale, pool, clock,
    ),
    Unit(
        "rarer_rows", rows.norm_heads, rows.sum_squares, rows.norm_columns_by, rows.layer_norm, rows.add, rows.split,
        rows.multiply_columns, rows.scale_rows, activations.gelu, activations.gelu_mul, activations.gelu_tanh,
        activations.gelu_quick, activations.relu_squared, activations.xielu, activations.soft_cap,
        activations.multiply_gate,
    ),
    Unit("products", matmul.pack, matmul.multiply),
    Unit("pages", store, accept.accept),
    Unit("drawing", draw, adjust, report),
)  # fmt: skip
"""For every model."""
DRAFTING = Unit(
    "drafting", passes.fill, passes.tag, passes.note, passes.last, passes.keep, passes.recall, passes.spread,
    passes.hold_logits, accept.reject,
)  # fmt: skip
"""For drafters that compute in the program."""
STASHES = Unit("stashes", passes.stash, passes.unstash)
"""For drafting heads, and for drafts of models with recurrent layers."""
