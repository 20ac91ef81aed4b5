"""Mixtures of experts as instructions on a tape: a choice, rows grouped by expert, two products, and a sum.

Legend: T tokens, N experts, K chosen experts of a token, S slots, T times K, E hidden_size, P panels.
"""

# pyright: basic
# torch's conversions from and to numpy have no types.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.models.expert_map import ExpertPlacement
from pagewood.engine.models.parts.experts import RouterConfig
from pagewood.engine.runner.cpu.compiled.experts import placing, route
from pagewood.engine.runner.cpu.compiled.instruction import Unit
from pagewood.engine.runner.cpu.compiled.products.dot import DotLevel
from pagewood.engine.runner.cpu.compiled.products.grouped import (
    FLOAT_RUNS,
    multiply_packed_runs,
    multiply_runs,
    packed_runs_unit,
    quantise_runs,
    round_runs,
)
from pagewood.engine.runner.cpu.compiled.products.packed_weights import ProductLevel
from pagewood.engine.runner.cpu.compiled.products.pair_dot import PairLevel
from pagewood.engine.runner.cpu.compiled.products.tile import WIDTH
from pagewood.engine.runner.cpu.program.tape import Buffer, Rows, Tape
from pagewood.engine.runner.cpu.weights.packing import PackedWeight

Float32 = NDArray[np.float32]
_ZEROS = np.zeros(2 * WIDTH, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """The slots of the tokens of a pass, by expert."""

    places: Buffer
    """`[S] int32`, see `route.group`; this and the next two."""
    slots: Buffer
    runs: Buffer
    num_slots: Rows
    num_runs: Rows


def choose(logits: Buffer, router: RouterConfig, bias: Float32 | None) -> tuple[Buffer, Buffer]:
    """Write the instruction that chooses experts; see `Ops.choose`."""
    tape, num_chosen = logits.tape, router.num_chosen
    chosen, shares = tape.buffer(logits.rows, num_chosen), tape.buffer(logits.rows, num_chosen)
    tape.write(
        route.choose, logits.rows, logits=logits, bias=bias, chosen=chosen, shares=shares,
        num_experts=router.num_experts, num_chosen=num_chosen, is_sigmoid=int(router.score == "sigmoid"),
        scores_chosen_only=int(router.scores_chosen_only), num_groups=router.num_groups,
        num_chosen_groups=router.num_chosen_groups, best_of_group=router.best_of_group,
        renormalises=int(router.renormalises), epsilon=router.epsilon, least_sum=router.least_sum,
        factor=router.factor,
    )  # fmt: skip
    choices_on(tape).append(chosen)
    return chosen, shares


def choices_on(tape: Tape) -> list[Buffer]:
    """Return the chosen experts `[T, K]` of all routers on a tape so far, in the order of their instructions."""
    return tape.shared("choices of experts", list[Buffer])


class CPUPlacing:
    """`models.ops.Placing`."""

    __slots__ = ("_num_ranks", "_ranks", "_table")

    def __init__(self, placement: ExpertPlacement) -> None:
        """Keep the tables of `placement`."""
        self._table = placement.table()
        self._ranks = placement.placed_ranks()
        self._num_ranks = placement.num_ranks

    def __call__(self, chosen: Buffer, logits: Buffer) -> Buffer:
        """Return the placed experts `[T, K]`."""
        out = chosen.tape.buffer(chosen.rows, chosen.size)
        chosen.tape.write(
            placing.place_chosen, chosen.rows, chosen=chosen, logits=logits, table=self._table, ranks=self._ranks,
            out=out, num_experts=logits.size, num_chosen=chosen.size, most_copies=self._table.shape[1],
            num_ranks=self._num_ranks,
        )  # fmt: skip
        return out


def count_rows(chosen: Buffer, counts: NDArray[np.int64]) -> None:
    """Write the instruction that adds the rows of each placed expert to `counts` `[P]`."""
    chosen.tape.write(placing.count_rows, chosen.rows, chosen=chosen, counts=counts, num_chosen=chosen.size)


def group(chosen: Buffer, num_experts: int, first: int = 0) -> Grouping:
    """Write the instruction that groups the pairs `chosen` `[T, K]` of a token and an expert, from `first` on."""
    tape, num_chosen = chosen.tape, chosen.size
    own = Grouping(
        places=tape.buffer(chosen.rows, num_chosen),
        slots=tape.buffer(chosen.rows, num_chosen),
        runs=tape.buffer(chosen.rows, num_chosen * route.NUM_RUN_COLUMNS),
        num_slots=tape.counted(chosen.rows, times=num_chosen),
        num_runs=tape.counted(chosen.rows, times=num_chosen),
    )
    tape.write(
        route.group, chosen.rows, chosen=chosen, places=own.places, slots=own.slots, runs=own.runs,
        first_expert=first, num_experts=num_experts, num_chosen=num_chosen, num_slots=own.num_slots,
        num_runs=own.num_runs,
    )  # fmt: skip
    return own


def spread(x: Buffer, grouping: Grouping, shares: Buffer | None, depth: int) -> Buffer:
    """Write the instruction that copies the rows of `x` `[T, E]` to their slots `[S, depth]`, times `shares`."""
    out = x.tape.buffer(grouping.num_slots, depth)
    x.tape.write(
        route.spread, grouping.num_slots, x=x, places=grouping.places, shares=shares, out=out, size=x.size, depth=depth,
        num_chosen=grouping.slots.size,
    )  # fmt: skip
    return out


def collect(x: Buffer, grouping: Grouping, shares: Buffer | None) -> Buffer:
    """Write the instruction that adds up the slots `x` `[S, E]` of each token, times `shares`; return `[T, E]`."""
    slots = grouping.slots
    out = x.tape.buffer(slots.rows, x.size)
    x.tape.write(
        route.collect, slots.rows, x=x, slots=slots, shares=shares, out=out, size=x.size, num_chosen=slots.size
    )  # fmt: skip
    return out


class PanelExperts:
    """One matrix of each expert, in the panels of float32. Invariant: a row's result depends on that row only."""

    __slots__ = ("_bias", "_panels", "_size", "depth", "unit")

    def __init__(self, panels: Float32, size: int, bias: Tensor | None) -> None:
        """Keep `panels` `[P, in, 32]` of matrices of `size` outputs each, and a copy of `bias` `[N * size]`."""
        self._panels = panels
        self._size = size
        self._bias = _biases(bias, len(panels))
        self.depth: int = panels.shape[1]
        """Columns of the input."""
        self.unit: Unit = FLOAT_RUNS
        """Its instructions."""

    def __call__(self, x: Buffer, grouping: Grouping) -> Buffer:
        """Return `[S, size]` of `[S, in]`."""
        out = x.tape.buffer(x.rows, self._size)
        x.tape.write(
            multiply_runs, grouping.num_runs, runs=grouping.runs, x=x, panels=self._panels, bias=self._bias,
            bias_step=int(self._bias is not _ZEROS), out=out, depth=self.depth, size=self._size,
        )  # fmt: skip
        return out


class PackedExperts:
    """One matrix of each expert, in a packed layout. Invariant: the same as that of `PanelExperts`."""

    __slots__ = ("_bias", "_level", "_size", "_weight", "depth", "unit")

    def __init__(self, weight: PackedWeight, size: int, bias: Tensor | None, level: ProductLevel) -> None:
        """Keep `weight` of matrices of `size` outputs each; `level` says what activations are in the product."""
        self._weight = weight
        self._size = size
        self._bias = _biases(bias, weight.shape.num_panels)
        self._level = level
        has_rounded = isinstance(level, DotLevel | PairLevel)
        self.depth: int = weight.shape.inputs if has_rounded else weight.shape.depth
        """Columns of the input."""
        self.unit: Unit = packed_runs_unit(weight.shape.kind, level)
        """Its instructions."""

    def __call__(self, x: Buffer, grouping: Grouping) -> Buffer:
        """Return `[S, size]` of `[S, in]`."""
        tape, shape, runs = x.tape, self._weight.shape, grouping.runs
        sums, row_scales, source = None, None, x
        if isinstance(self._level, DotLevel):
            source = tape.buffer(x.rows, shape.depth // 4)
            sums, row_scales = tape.buffer(x.rows, shape.depth // shape.group), tape.buffer(x.rows, 1)
            tape.write(
                quantise_runs, grouping.num_runs, runs=runs, x=x, out=source, sums=sums, scales=row_scales,
                size=shape.inputs, depth=shape.depth, group=shape.group, factor=shape.kind.factor,
            )  # fmt: skip
        elif isinstance(self._level, PairLevel):
            source = tape.buffer(x.rows, shape.depth // 2)
            tape.write(
                round_runs, grouping.num_runs, runs=runs, x=x, out=source, size=shape.inputs, depth=shape.depth
            )  # fmt: skip
        elif shape.depth > x.size:
            source = tape.buffer(x.rows, shape.depth)
            tape.write(route.fill_up, x.rows, x=x, out=source, size=x.size, depth=shape.depth)
        out = tape.buffer(x.rows, self._size)
        tape.write(
            multiply_packed_runs(shape.kind, self._level), grouping.num_runs, runs=runs, x=source, sums=sums,
            row_scales=row_scales, panels=self._weight.panels, scales=self._weight.scales, bias=self._bias,
            bias_step=int(self._bias is not _ZEROS), out=out, depth=shape.depth, size=self._size, group=shape.group,
        )  # fmt: skip
        return out


def _biases(bias: Tensor | None, num_panels: int) -> Float32:
    """Return a copy of `bias`, filled up to whole panels; without one, zeros for a part."""
    if bias is None:
        return _ZEROS
    filled = np.zeros(num_panels * WIDTH, np.float32)
    filled[: len(bias)] = bias.float().numpy()
    return filled
