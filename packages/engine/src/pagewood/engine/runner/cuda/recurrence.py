"""What recurrent layers do with the states of a step, in plain torch: the reference for `kernels.recurrence_triton`.

A recurrence has blocks with borders at absolute positions. What a token answers is computed from the state at the last
border and from the tokens of its block up to it, which its request's row keeps while the block is open; the state
changes at borders only. So a token's bits depend on its text, and neither on chunks nor on what else is in a step. The
size of blocks divides that of pages, so prefixes with a snapshot end at borders, and a snapshot has no open block.

A row keeps its tokens in a ring, by position, and its place has the state at a border up to which nothing can be
rejected. So drafts need not be taken back: a rejected one is replaced in the ring, or it is behind what is read. A step
that goes on beyond such a border first closes the blocks that have become certain, from what the ring has of them. The
inputs of convolutions lie in a ring too.

It is slow, for any device. Its functions and sums are computed in float64 and rounded once: how torch divides an array
among vector instructions then shows in no bit.

Legend: T tokens of a step, G grants with tokens, C channels of a convolution, W tokens that it reads, H heads of values
`[V]`, K elements of a key.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.ops import Convolution, RecurrentHeads

_log = logging.getLogger(__name__)

LEAST_SQUARES = 1e-6
"""Added to sums of squares of queries and keys."""
LARGEST_BLOCK = 16
"""Tokens of a block, at most."""
LEAST_DECAY = -60.0
"""Logarithm of what is left of a state behind one token, at least: what is less counts for nothing beside a number of
float32, and sums over a block stay small enough to be exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStates:
    """Where the grants of a step find their states and leave them, on the device; all int32."""

    places: Tensor
    """[2 G], of each grant the place that it reads, -1: zeros, and the one that it writes; see `Batch.states`."""
    saves: Tensor
    """[T], the place that gets a copy of the state behind each token; -1: no place."""
    grants: Tensor
    """[T], the grant of each token."""
    offsets: Tensor
    """[>= G + 1], the first token of each grant."""
    sources: Tensor
    """[T], the row of each token's request times `tokens_per_row`, plus the token's position."""
    tokens_per_row: int
    longest: int
    """No grant has more tokens."""
    borders: Tensor | None = None
    """[G], the position of the border that the place of each grant has the state at; None: the last one before it."""
    certain: Tensor | None = None
    """[G], how many of the tokens of each grant no later step takes back; None: all."""


class RecurrentKernels(Protocol):
    """Computes with states, and changes them. The last place is the runner's own, and what it holds has no meaning."""

    def convolve(
        self, x: Tensor, column: int, convolution: Convolution, tails: Tensor, latest: Tensor, step: StepStates
    ) -> Tensor:
        """Return the convolution `[T, C]`, of the dtype of `x`, of columns of `x` `[T, n]` from `column` on.

        Args:
            x: see there.
            column: see there.
            convolution: what is computed.
            tails: `[places, W - 1, C] float32`, the inputs before the end of cached prefixes.
            latest: `[rows + 1, R, C] float32`, the latest inputs of each request, by position modulo R, which is
                `W - 1` and as much as may be rejected of a grant, or more. The last row has no meaning.
            step: a grant that reads another place than it writes goes on from that, others from `latest`.
        """
        ...

    def recur(
        self, x: Tensor, gates: Tensor, heads: RecurrentHeads, matrices: Tensor, opened: Tensor, size: int,
        step: StepStates,
    ) -> Tensor:  # fmt: skip
        """Return the results `[T, H V]`, of the dtype of `x`; see `models.ops.Recurrence.recur`.

        Args:
            x: `[T, 2 G K + H V]`.
            gates: see there.
            heads: what is computed.
            matrices: `[places, H, K, V] float32`, the states at the last border of blocks.
            opened: `[rows + 1, R, G K + D + H V] float32`, of each request its tokens behind the border that its place
                has the state at, by position modulo R: keys, D numbers that say how fast the state decays, and changes.
                R is a multiple of the size of blocks, and if tokens may be rejected, one block more than these fill.
                The last row has no meaning.
            size: tokens of a block, at most `LARGEST_BLOCK`.
            step: a grant that reads another place than it writes begins at a border, and copies are made at borders.
        """
        ...


def kernels_for(device: torch.device) -> RecurrentKernels:
    """Return the functions for a device: Triton's, if it has Triton."""
    if device.type != "cpu":
        try:
            kernels: Any = importlib.import_module("pagewood.engine.runner.cuda.kernels.recurrence_triton")
        except ImportError as error:
            _log.warning("recurrent layers are slow without Triton, which comes with torch for CUDA (%s)", error)
        else:
            return kernels
    return cast(RecurrentKernels, sys.modules[__name__])


def convolve(
    x: Tensor, column: int, convolution: Convolution, tails: Tensor, latest: Tensor, step: StepStates
) -> Tensor:
    """Return the convolution of columns of `x`; see `RecurrentKernels`."""
    (width, channels), spare, ring = convolution.weight.shape, len(tails) - 1, latest.shape[1]
    own, grants = x[:, column : column + channels].float(), step.grants.long()
    sources, targets = step.places.view(-1, 2).long().unbind(1)
    offsets = step.offsets[: len(targets) + 1].long()
    rows, starts = _begins(step, offsets)
    before = (starts[:, None] + torch.arange(1 - width, 0, device=x.device)) % ring
    is_new = sources != targets
    old = torch.where(is_new[:, None, None], _at(tails, sources), latest[rows[:, None], before])
    tokens = torch.arange(len(x), device=x.device)
    index = tokens - offsets.index_select(0, grants)
    behind: list[Tensor] = []
    for back in range(width - 1, -1, -1):
        earlier = old[grants, (width - 1 + index - back).clamp(0, width - 2)]
        behind.append(torch.where((index >= back)[:, None], own[(tokens - back).clamp(min=0)], earlier))
    out = torch.zeros_like(own) if convolution.bias is None else convolution.bias.expand_as(own)
    for weight, row in zip(convolution.weight, behind, strict=True):
        out = out + weight * row
    if convolution.activates:
        out = functional.silu(out.double()).float()
    tails.index_copy_(0, torch.where(step.saves < 0, spare, step.saves).long(), torch.stack(behind[1:], 1))
    latest[torch.where(is_new, rows, -1)[:, None], before] = old
    is_kept = index >= offsets.diff().index_select(0, grants) - ring
    places = (starts.index_select(0, grants) + index) % ring
    latest[torch.where(is_kept, rows.index_select(0, grants), -1), places] = own
    return out.to(x.dtype)


def recur(
    x: Tensor, gates: Tensor, heads: RecurrentHeads, matrices: Tensor, opened: Tensor, size: int, step: StepStates
) -> Tensor:
    """Return the results of heads; see `RecurrentKernels`."""
    num_tokens, spare, ring = len(x), len(matrices) - 1, opened.shape[1]
    sources, targets = step.places.view(-1, 2).long().unbind(1)
    offsets = step.offsets[: len(targets) + 1].long()
    firsts, counts = offsets[:-1], offsets.diff()
    rows, positions = _begins(step, offsets)
    borders = positions // size * size if step.borders is None else step.borders.long()
    state, every = _at(matrices, sources), torch.arange(size, device=x.device)
    for _ in range(ring // size - 1):  # blocks that have become certain
        block = opened[rows[:, None], borders[:, None] % ring + every]
        is_closed = borders + size <= positions
        nothing = (x.index_select(0, firsts), gates.index_select(0, firsts))
        closed = _token(state, block, torch.full_like(rows, size - 1), *nothing, heads, is_old=True)[0]
        state = torch.where(is_closed[:, None, None, None], closed, state)
        borders = torch.where(is_closed, borders + size, borders)
    block, kept = opened[rows[:, None], borders[:, None] % ring + every], state
    ends = positions + (counts if step.certain is None else step.certain.long())
    out = x.new_empty(num_tokens + 1, heads.value_size)  # the last row is of grants that have ended
    for index in range(step.longest):
        is_inside = index < counts
        tokens = torch.where(is_inside, firsts + index, 0)
        places = (positions + index) % size
        own = x.index_select(0, tokens), gates.index_select(0, tokens)
        changed, filled, result = _token(state, block, places, *own, heads)
        state = torch.where(is_inside[:, None, None, None], changed, state)
        kept = torch.where((positions + index < ends)[:, None, None, None], state, kept)
        block = torch.where(is_inside[:, None, None], filled, block)
        out.index_copy_(0, torch.where(is_inside, tokens, num_tokens), result.flatten(1).to(x.dtype))
        saves = step.saves.index_select(0, tokens)
        matrices.index_copy_(0, torch.where(is_inside & (saves >= 0), saves, spare).long(), state)
        opened[torch.where(is_inside, rows, -1), (positions + index) % ring] = block[
            torch.arange(len(rows), device=x.device), places
        ]
    matrices.index_copy_(0, targets, kept)
    return out[:num_tokens]


def _begins(step: StepStates, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row of each grant and its first position, `[G] int64`."""
    at = step.sources.long().index_select(0, offsets[:-1])
    return at // step.tokens_per_row, at % step.tokens_per_row


def _token(
    state: Tensor, block: Tensor, places: Tensor, x: Tensor, gates: Tensor, heads: RecurrentHeads, *,
    is_old: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what is behind a token of each grant: states `[G, H, K, V]`, blocks, and its results `[G, H, V]`.

    `places` says which token of its block it is. The state before a block changes only behind its last token. If it
    `is_old`, the block has it already, and its results have no meaning.
    """
    num_decays, size, every = len(heads.bias), block.shape[1], torch.arange(len(x), device=x.device)
    q, k, v = (
        x[:, start : start + width].float()
        for start, width in zip(heads.columns, (heads.key_size, heads.key_size, heads.value_size), strict=True)
    )
    block = block.clone()
    if not is_old:
        block[every, places] = torch.cat([k, gates[:, -num_decays:].float(), torch.zeros_like(v)], 1)
    keys, numbers, changes = block.double().split([heads.key_size, num_decays, heads.value_size], 2)
    index = torch.arange(size, device=x.device)
    is_known = (index <= places[:, None])[:, :, None, None]
    steps = functional.softplus(numbers + heads.bias).unflatten(2, (heads.num_heads, -1))
    since = torch.where(is_known, (heads.rate[:, None] * steps).clamp(min=LEAST_DECAY), 0.0).cumsum(1)
    before = since[every, places]  # the logarithm of what is left of the state, [G, H, K or 1]
    keys, queries = keys.unflatten(2, (-1, heads.key_dim)), q.double().unflatten(1, (-1, heads.key_dim))
    strengths = torch.ones_like(gates[:, : heads.num_heads, None], dtype=torch.float64)
    if heads.corrects:
        keys, queries = (
            one * torch.rsqrt(one.square().sum(-1, keepdim=True) + LEAST_SQUARES) for one in (keys, queries)
        )
        queries = queries * heads.key_dim**-0.5
        strengths = (torch.sigmoid(gates[:, : heads.num_heads].double()) * heads.most_strength)[..., None]
    group = heads.num_heads // heads.num_key_heads
    keys, queries = keys.repeat_interleave(group, 2), queries.repeat_interleave(group, 1)
    keys = keys if heads.corrects else keys * steps
    decayed = torch.where(is_known, keys * torch.exp((before[:, None] - since).clamp(max=0.0)), 0.0)
    old = state.double() * torch.exp(before)[..., None]
    change = v.double().unflatten(1, (heads.num_heads, -1))
    changes = changes.unflatten(2, (heads.num_heads, -1))

    def answer(to: Tensor) -> Tensor:
        weights = (decayed * to[:, None]).sum(-1, keepdim=True)
        return (old * to[..., None]).sum(2) + (weights * changes).sum(1)

    skipped = 0.0 if heads.skip is None else heads.skip[:, None] * change
    if heads.corrects:
        change = (change - answer(keys[every, places])) * strengths
    changes = changes.clone()
    if not is_old:
        block[every, places, -heads.value_size :] = change.flatten(1).float()
        changes[every, places] = change.float().double()
    result = answer(queries) + skipped
    changed = old + torch.einsum("gbhk,gbhv->ghkv", decayed, changes)
    is_last = (places == size - 1)[:, None, None, None]
    return torch.where(is_last, changed.float(), state), block, result.float()


def _at(states: Tensor, places: Tensor) -> Tensor:
    """Return the states at `places`; zeros where that is -1."""
    found = states.index_select(0, places.clamp(min=0))
    return found.masked_fill_((places < 0).view(-1, *[1] * (states.ndim - 1)), 0)
