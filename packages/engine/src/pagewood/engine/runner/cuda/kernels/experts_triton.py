"""Mixtures of experts in five kernels: choice, places, two products, sum. Nothing waits for the device.

A pair of a token and one of its experts is a slot. Slots are put in the order of their experts. A tile is some slots of
one expert, which lie side by side then, times some columns. How many tiles an expert has is known on the device only.
So there are as many programs as tiles there can be, and those without a tile end at once: a graph may hold all of it.

The size of tiles depends on the step, and a token's bits do not: each of its numbers is a sum in one order, in whatever
tile it lies. `tools/gpu_check.py` compares rows alone with the same rows among others, for all sizes.

Legend: T tokens, N experts, K chosen experts of a token, S slots, T times K, E hidden_size, I size of an expert.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# Triton comes only with torch's CUDA build.

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewood.engine.models.ops import CLAMP_ALPHA, CLAMP_LIMIT, ExpertMatrices
from pagewood.engine.models.parts.experts import RouterConfig
from pagewood.engine.models.parts.feed_forward import Activation
from pagewood.engine.models.scaled_codes import ScaledCodes
from pagewood.engine.runner.cuda.adapters import AdaptedExperts
from pagewood.engine.runner.cuda.experts import local_experts

_MOST_COMPARED = 4096
"""Up to this many slots, comparing each with all others is faster than sorting them, which takes several kernels."""
_SLOTS = 64  # slots, or experts, that a program puts in order
_OTHERS = 256  # slots that it compares them with at a time
_SUMMED = 1024  # columns of a token that a program adds up, or activates


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """The sizes of a tile."""

    rows: int
    columns: int
    depth: int
    """Products added per round."""
    warps: int
    stages: int


_GATED = (
    (8, _Tile(rows=16, columns=32, depth=128, warps=4, stages=4)),
    (48, _Tile(rows=64, columns=64, depth=64, warps=4, stages=4)),
    (1 << 30, _Tile(rows=128, columns=128, depth=64, warps=8, stages=3)),
)
_DOWN = (
    (8, _Tile(rows=16, columns=64, depth=128, warps=4, stages=4)),
    (48, _Tile(rows=64, columns=128, depth=64, warps=8, stages=3)),
    (1 << 30, _Tile(rows=128, columns=256, depth=64, warps=8, stages=3)),
)
"""Tiles by the mean number of slots of an expert that they are for, at most. Measured on an H100 with 128 experts."""
_DEPTH_OF_CODES = 128


class TritonExperts:
    """`models.ops.ChosenExperts`. Invariant: a token's bits do not depend on the other tokens."""

    __slots__ = ("_activation", "_adapted", "_matrices", "_size", "_weighs_inputs")

    def __init__(
        self,
        matrices: ExpertMatrices,
        activation: Activation,
        *,
        weighs_inputs: bool = False,
        adapted: AdaptedExperts | None = None,
    ) -> None:
        """Take `matrices`, all of one dtype or in codes; `adapted` adds to both products."""
        self._adapted = adapted
        self._matrices = matrices
        self._size = matrices.down.shape[1]
        self._activation: Activation = activation
        self._weighs_inputs = weighs_inputs

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return `[T, E]`; the results of a token are added in the order of `chosen`, in float32."""
        own, (num_tokens, num_chosen), width = self._matrices, chosen.shape, x.shape[1]
        if own.is_part:
            chosen = local_experts(chosen, own.first, own.count)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not num_tokens:
            return out
        x, num_slots, bins = x.contiguous(), num_tokens * num_chosen, triton.next_power_of_2(own.count)
        order, starts = arranged(chosen, own.count)
        pairs = None if self._adapted is None else self._adapted.pairs(chosen)
        activated = x.new_empty(num_slots, self._size)
        # Adapters add to numbers that are not rounded yet, so that without them the bits are the same in both ways.
        gate_up = activated if pairs is None else x.new_empty(num_slots, 2 * self._size, dtype=torch.float32)
        num_placed = own.num_placed or own.count
        tile, grid = _tile_and_grid(_GATED, own.gate_up, num_slots, own.count, num_placed, self._size)
        _gated[grid](
            x, *_parts(own.gate_up), x if own.gate_up_bias is None else own.gate_up_bias, gate_up, order, starts,
            shares, own.count, self._size, num_chosen, INPUTS=width, BINS=bins, HAS_BIAS=own.gate_up_bias is not None,
            ACTIVATION=self._activation if pairs is None else "none", WEIGHS=self._weighs_inputs, ALPHA=CLAMP_ALPHA,
            LIMIT=CLAMP_LIMIT, GROUP=getattr(own.gate_up, "group", 0),
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if self._adapted is not None and pairs is not None:
            inputs = x
            if self._weighs_inputs:
                inputs = (x[:, None] * shares[:, :, None].to(x.dtype)).flatten(0, 1)
            self._adapted.to_first(inputs, gate_up, pairs)
            _activated[(num_slots, triton.cdiv(self._size, _SUMMED))](
                gate_up, activated, self._size, ACTIVATION=self._activation, ALPHA=CLAMP_ALPHA, LIMIT=CLAMP_LIMIT,
                BLOCK=_SUMMED,
            )  # fmt: skip
        # Slots whose expert is on another rank get no result.
        results = x.new_zeros(num_slots, width) if own.is_part else x.new_empty(num_slots, width)
        tile, grid = _tile_and_grid(_DOWN, own.down, num_slots, own.count, num_placed, width)
        _down[grid](
            activated, *_parts(own.down), x if own.down_bias is None else own.down_bias, results, order, starts,
            own.count, width, INPUTS=self._size, BINS=bins, HAS_BIAS=own.down_bias is not None, ROWS=tile.rows,
            COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
            GROUP=getattr(own.down, "group", 0), BY_SLOT=pairs is not None,
        )  # fmt: skip
        if self._adapted is not None and pairs is not None:
            self._adapted.to_second(activated, results, pairs)
        _sum[(num_tokens, triton.cdiv(width, _SUMMED))](
            results, shares, out, width, NUM_CHOSEN=num_chosen, WEIGHS=not self._weighs_inputs, BLOCK=_SUMMED
        )
        return out


def choose(logits: Tensor, router: RouterConfig, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the chosen experts `[T, K] int32` and their shares `[T, K] float32`; see `models.ops.Ops.choose`."""
    num_tokens, num_experts = logits.shape
    chosen = torch.empty(num_tokens, router.num_chosen, dtype=torch.int32, device=logits.device)
    shares = torch.empty(num_tokens, router.num_chosen, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _choose[(num_tokens,)](
            logits.contiguous(), logits if bias is None else bias, chosen, shares, router.epsilon, router.least_sum,
            router.factor, NUM=num_experts, BINS=triton.next_power_of_2(num_experts), NUM_CHOSEN=router.num_chosen,
            CHOSEN_BINS=triton.next_power_of_2(router.num_chosen), IS_SOFTMAX=router.score == "softmax",
            SCORES_CHOSEN=router.scores_chosen_only, HAS_BIAS=bias is not None, GROUPS=router.num_groups,
            GROUP_BINS=triton.next_power_of_2(router.num_groups), CHOSEN_GROUPS=router.num_chosen_groups,
            BEST_OF_GROUP=router.best_of_group, RENORMALISES=router.renormalises, num_warps=1,
        )  # fmt: skip
    return chosen, shares


def arranged(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the slots by expert and token `[S] int32`, the first place of each expert, and the end, `[N + 1] int32`.

    Args:
        chosen: `[T, K] int32`, the experts of each token.
        num_experts: N; a slot with this number, behind the last one, is of no expert here.
    """
    num_slots = chosen.numel()
    if num_slots > _MOST_COMPARED:
        experts, order = chosen.flatten().sort(stable=True)
        every = torch.arange(num_experts + 1, device=chosen.device, dtype=torch.int32)
        return order.int(), torch.searchsorted(experts, every, out_int32=True)
    order = torch.empty(num_slots, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=chosen.device)
    num_programs = triton.cdiv(num_slots, _SLOTS) + triton.cdiv(num_experts + 1, _SLOTS)
    _arrange[(num_programs,)](chosen.contiguous(), order, starts, num_slots, num_experts, SLOTS=_SLOTS, OTHERS=_OTHERS)
    return order, starts


def _parts(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers and their scales; in place of scales that are not there, something that is not read."""
    return (matrix.codes, matrix.scales) if isinstance(matrix, ScaledCodes) else (matrix, matrix)


def _tile_and_grid(
    tiles: tuple[tuple[int, _Tile], ...],
    matrix: Tensor,
    num_slots: int,
    num_experts: int,
    num_placed: int,
    num_columns: int,
) -> tuple[_Tile, tuple[int, int]]:
    """Return the tile for a step, and the programs for all tiles that there can be.

    The slots are those of `num_placed` experts, of which `num_experts` are here. All tiles for codes have one depth,
    because a sum of that many products gets its scale, and no sum may pass the end of a group.
    """
    tile = next(one for most, one in tiles if num_slots <= most * num_placed)
    if isinstance(matrix, ScaledCodes):
        depth = math.gcd(_DEPTH_OF_CODES, matrix.group) if matrix.scales.shape[1] > 1 else _DEPTH_OF_CODES
        tile = replace(tile, columns=min(tile.columns, 128), depth=depth, stages=tile.stages - 1)
    most_tiles = min(num_slots, num_slots // tile.rows + num_experts)
    return tile, (most_tiles, triton.cdiv(num_columns, tile.columns))


@triton.jit
def _choose(
    logits, bias, chosen, shares, epsilon, least_sum, factor,
    NUM: tl.constexpr, BINS: tl.constexpr, NUM_CHOSEN: tl.constexpr, CHOSEN_BINS: tl.constexpr,
    IS_SOFTMAX: tl.constexpr, SCORES_CHOSEN: tl.constexpr, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_BINS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BEST_OF_GROUP: tl.constexpr, RENORMALISES: tl.constexpr,
) -> None:  # fmt: skip
    """Choose the experts of one token."""
    token = tl.program_id(0).to(tl.int64)
    experts, ranks = tl.arange(0, BINS), tl.arange(0, CHOSEN_BINS)
    is_expert = experts < NUM
    numbers = tl.load(logits + token * NUM + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    scores = numbers
    if not SCORES_CHOSEN:
        scores = _scores(numbers, IS_SOFTMAX)
    ranked = scores
    if HAS_BIAS:
        ranked += tl.load(bias + experts, mask=is_expert, other=0.0).to(tl.float32)
    ranked = tl.where(is_expert, ranked, float("-inf"))
    if GROUPS > 1:
        groups, own = tl.arange(0, GROUP_BINS), experts // (NUM // GROUPS)
        of_groups = tl.full((GROUP_BINS,), float("-inf"), tl.float32)
        for group in tl.static_range(GROUPS):
            inside = tl.where(own == group, ranked, float("-inf"))
            best = tl.max(inside, 0)
            if BEST_OF_GROUP > 1:
                first = tl.min(tl.where(inside == best, experts, BINS), 0)
                best += tl.max(tl.where(experts == first, float("-inf"), inside), 0)
            of_groups = tl.where(groups == group, best, of_groups)
        is_better = (of_groups[None, :] > of_groups[:, None]) | (
            (of_groups[None, :] == of_groups[:, None]) & (groups[None, :] < groups[:, None])
        )
        is_chosen = tl.sum(is_better.to(tl.int32), 1) < CHOSEN_GROUPS
        kept = own < 0
        for group in tl.static_range(GROUPS):
            kept = kept | ((own == group) & (tl.sum(((groups == group) & is_chosen).to(tl.int32), 0) > 0))
        ranked = tl.where(kept, ranked, float("-inf"))
    places = tl.zeros((CHOSEN_BINS,), dtype=tl.int32)
    values = tl.full((CHOSEN_BINS,), float("-inf"), tl.float32)
    for rank in tl.static_range(NUM_CHOSEN):
        best = tl.max(ranked, 0)
        place = tl.minimum(tl.min(tl.where(ranked == best, experts, NUM - 1), 0), NUM - 1)
        places = tl.where(ranks == rank, place, places)
        values = tl.where(ranks == rank, tl.sum(tl.where(experts == place, scores, 0.0), 0), values)
        ranked = tl.where(experts == place, float("-inf"), ranked)
    if SCORES_CHOSEN:
        values = _scores(values, IS_SOFTMAX)
    values = tl.where(ranks < NUM_CHOSEN, values, 0.0)
    if RENORMALISES:
        values = values / tl.maximum(tl.sum(values, 0) + epsilon, least_sum)
    is_rank = ranks < NUM_CHOSEN
    tl.store(chosen + token * NUM_CHOSEN + ranks, places, mask=is_rank)
    tl.store(shares + token * NUM_CHOSEN + ranks, values * factor, mask=is_rank)


@triton.jit
def _scores(numbers, IS_SOFTMAX: tl.constexpr) -> tl.tensor:
    if IS_SOFTMAX:
        exponents = tl.exp(numbers - tl.max(numbers, 0))
        scores = exponents / tl.sum(exponents, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-numbers))
    return scores


@triton.jit
def _arrange(chosen, order, starts, num_slots, num_experts, SLOTS: tl.constexpr, OTHERS: tl.constexpr) -> None:
    """Count the slots before some slots, or before some experts, in the order of experts."""
    num_slot_programs = (num_slots + SLOTS - 1) // SLOTS
    program = tl.program_id(0)
    places = tl.arange(0, OTHERS)
    if program < num_slot_programs:
        slots = program * SLOTS + tl.arange(0, SLOTS)
        own = tl.load(chosen + slots, mask=slots < num_slots, other=num_experts)
        before = tl.zeros((SLOTS,), dtype=tl.int32)
        for first in range(0, num_slots, OTHERS):
            others = first + places
            experts = tl.load(chosen + others, mask=others < num_slots, other=num_experts)
            is_before = (experts[None, :] < own[:, None]) | (
                (experts[None, :] == own[:, None]) & (others[None, :] < slots[:, None])
            )
            before += tl.sum(is_before.to(tl.int32), 1)
        tl.store(order + before, slots, mask=slots < num_slots)
    else:
        own = (program - num_slot_programs) * SLOTS + tl.arange(0, SLOTS)
        before = tl.zeros((SLOTS,), dtype=tl.int32)
        for first in range(0, num_slots, OTHERS):
            others = first + places
            experts = tl.load(chosen + others, mask=others < num_slots, other=num_experts)
            before += tl.sum((experts[None, :] < own[:, None]).to(tl.int32), 1)
        tl.store(starts + own, before, mask=own <= num_experts)


@triton.jit
def find_tile(starts, num_experts, BINS: tl.constexpr, ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the expert of this program's tile, the first place of the tile, and the end of the expert's places."""
    tile, bins = tl.program_id(0), tl.arange(0, BINS)
    firsts = tl.load(starts + bins, mask=bins < num_experts, other=0)
    ends = tl.load(starts + bins + 1, mask=bins < num_experts, other=0)
    tiles = (ends - firsts + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    own = bins == expert
    before = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    first = tl.sum(tl.where(own, firsts, 0), 0) + (tile - before) * ROWS
    return expert.to(tl.int64), first, tl.sum(tl.where(own, ends, 0), 0)


@triton.jit
def _gated(
    x, weight, scales, bias, out, order, starts, shares, num_experts, size, num_chosen, GROUP: tl.constexpr,
    INPUTS: tl.constexpr, BINS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHS: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of the activation: both projections of the rows of some slots, which lie in `x` by token.

    Without activation, write both side by side to the places of the slots.
    """
    expert, first, end = find_tile(starts, num_experts, BINS, ROWS)
    if first >= end:
        return
    places, columns, deep = (
        first + tl.arange(0, ROWS),
        tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS),
        tl.arange(0, DEPTH),
    )
    has_row, has_column = places < end, columns < size
    slots = tl.load(order + places, mask=has_row, other=0)
    x_places = x + (slots // num_chosen).to(tl.int64)[:, None] * INPUTS + deep[None, :]
    gate_places = weight + (expert * 2 * size + columns[None, :]) * INPUTS + deep[:, None]
    up_places = weight + ((expert * 2 + 1) * size + columns[None, :]) * INPUTS + deep[:, None]
    gate, up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32), tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if WEIGHS:
        factors = tl.load(shares + slots, mask=has_row, other=0.0).to(x.dtype.element_ty)
    for start in range(0, INPUTS, DEPTH):
        is_inside = start + deep < INPUTS
        is_weight = has_column[None, :] & is_inside[:, None]
        left = tl.load(x_places, mask=has_row[:, None] & is_inside[None, :], other=0.0)
        if WEIGHS:
            left = left * factors[:, None]
        gate_weight = tl.load(gate_places, mask=is_weight, other=0.0)
        up_weight = tl.load(up_places, mask=is_weight, other=0.0)
        gate = _add(gate, left, gate_weight, scales, expert * 2 * size + columns, has_column, start, INPUTS, GROUP)
        up = _add(up, left, up_weight, scales, (expert * 2 + 1) * size + columns, has_column, start, INPUTS, GROUP)
        x_places += DEPTH
        gate_places += DEPTH
        up_places += DEPTH
    if HAS_BIAS:
        own = bias + expert * 2 * size + columns
        gate += tl.load(own, mask=has_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(own + size, mask=has_column, other=0.0).to(tl.float32)[None, :]
    is_inside = has_row[:, None] & has_column[None, :]
    if ACTIVATION == "none":
        both = out + slots[:, None].to(tl.int64) * 2 * size + columns[None, :]
        tl.store(both, gate, mask=is_inside)
        tl.store(both + size, up, mask=is_inside)
    else:
        result = _activate(gate, up, ACTIVATION, ALPHA, LIMIT).to(out.dtype.element_ty)
        tl.store(out + places[:, None].to(tl.int64) * size + columns[None, :], result, mask=is_inside)


@triton.jit
def _activated(
    gate_up, out, size, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Compute the activation of some columns of a slot."""
    slot = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own, is_inside = gate_up + slot * 2 * size + columns, columns < size
    gate, up = tl.load(own, mask=is_inside, other=0.0), tl.load(own + size, mask=is_inside, other=0.0)
    result = _activate(gate, up, ACTIVATION, ALPHA, LIMIT)
    tl.store(out + slot * size + columns, result.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _add(total, left, right, scales, rows, has_row, start, INPUTS: tl.constexpr, GROUP: tl.constexpr) -> tl.tensor:
    """Add products of inputs from `start` on; a code is a number of 16 bits too, and the sum of them gets its scale."""
    if GROUP:
        own = tl.load(scales + rows * ((INPUTS + GROUP - 1) // GROUP) + start // GROUP, mask=has_row, other=0.0)
        part = tl.dot(left, right.to(left.dtype), input_precision="ieee")
        total = tl.fma(part, tl.broadcast_to(own[None, :], part.shape), total)
    else:
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "silu":
        result = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-2.0 * inner)) * up
    else:
        tl.static_assert(ACTIVATION == "clamped")
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        result = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    return result


@triton.jit
def _down(
    x, weight, scales, bias, out, order, starts, num_experts, num_columns, GROUP: tl.constexpr,
    INPUTS: tl.constexpr, BINS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, BY_SLOT: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of results, from rows in the order of experts or slots; write each to the place of its slot."""
    expert, first, end = find_tile(starts, num_experts, BINS, ROWS)
    if first >= end:
        return
    places, columns, deep = (
        first + tl.arange(0, ROWS),
        tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS),
        tl.arange(0, DEPTH),
    )
    has_row, has_column = places < end, columns < num_columns
    slots = tl.load(order + places, mask=has_row, other=0).to(tl.int64)
    x_rows = slots if BY_SLOT else places.to(tl.int64)
    x_places = x + x_rows[:, None] * INPUTS + deep[None, :]
    weight_places = weight + (expert * num_columns + columns[None, :]) * INPUTS + deep[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, INPUTS, DEPTH):
        is_inside = start + deep < INPUTS
        left = tl.load(x_places, mask=has_row[:, None] & is_inside[None, :], other=0.0)
        right = tl.load(weight_places, mask=has_column[None, :] & is_inside[:, None], other=0.0)
        sums = _add(sums, left, right, scales, expert * num_columns + columns, has_column, start, INPUTS, GROUP)
        x_places += DEPTH
        weight_places += DEPTH
    if HAS_BIAS:
        sums += tl.load(bias + expert * num_columns + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    result = sums.to(out.dtype.element_ty)
    tl.store(out + slots[:, None] * num_columns + columns[None, :], result, mask=has_row[:, None] & has_column[None, :])


@triton.jit
def _sum(results, shares, out, width, NUM_CHOSEN: tl.constexpr, WEIGHS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Add the results of a token's experts, in the order in which they were chosen."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(NUM_CHOSEN):
        slot = token * NUM_CHOSEN + rank
        result = tl.load(results + slot * width + columns, mask=is_inside, other=0.0).to(tl.float32)
        if WEIGHS:
            result = result * tl.load(shares + slot)
        total += result
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=is_inside)
