"""Attention over latents in pieces, in plain torch: the reference for `kernels.latents_triton`, slow, for any device.

A context is divided into pieces of a fixed number of positions. Each is attended to on its own, and the results are
merged in the order of positions. A query token looks up its own position. So a token's bits do not depend on its step,
and a step may have tokens whose positions only the device knows.

Legend: T tokens of a step, H heads, C elements of a latent, R elements of its rotated key, P page_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib
import logging
from typing import Protocol

import torch
from torch import Tensor

from pagewood.engine.runner.cuda.attention import Places

_log = logging.getLogger(__name__)

PIECE = 512
"""Positions of a piece."""
WORKSPACE_BYTES = 128 << 20
"""Size of the buffer for the results of pieces; kernels compute as many tokens at a time as have room."""


class AttendInPieces(Protocol):
    """Attends over latents."""

    def __call__(
        self, q: Tensor, memory: Tensor, places: Places, *, rank: int, scale: float, longest: int, workspace: Tensor
    ) -> Tensor:
        """Return the attention `[T, H, C]` of `q`.

        Args:
            q: `[T, H, C + R]`, absorbed queries.
            memory: `[pages, P, C + R]`, of the dtype of `q`; a page may be followed by other memory.
            places: of the tokens, each of which sees the positions up to its own.
            rank: C.
            scale: multiplies the products of queries and latents.
            longest: no position is as large.
            workspace: `[numbers] float32`, with room for one token, see `numbers_of_token`.
        """
        ...


def numbers_of_token(num_heads: int, rank: int, longest: int) -> int:
    """Return how many numbers the pieces of a token leave: of each head a maximum, a total, and a sum of latents."""
    return -(-longest // PIECE) * num_heads * (rank + 2)


def kernel_for(device: torch.device) -> AttendInPieces:
    """Return the function for a device: Triton's, if it has Triton."""
    if device.type == "cpu":
        return attend
    try:
        return importlib.import_module("pagewood.engine.runner.cuda.kernels.latents_triton").attend
    except ImportError as error:
        _log.warning("attention over latents in pieces is slow without Triton (%s)", error)
        return attend


def attend(
    q: Tensor,
    memory: Tensor,
    places: Places,
    *,
    rank: int,
    scale: float,
    longest: int,
    workspace: Tensor,
    piece: int = PIECE,
) -> Tensor:
    """Return the attention of `q`, one token after the other; see `AttendInPieces`. `workspace` is not used."""
    page_size, last = memory.shape[1], len(places.kv_indices) - 1
    firsts = places.kv_indptr.index_select(0, places.grants)
    offsets = torch.arange(piece, dtype=torch.int32, device=q.device)
    results = torch.empty(len(q), q.shape[1], rank, dtype=q.dtype, device=q.device)
    for token in range(len(q)):
        queries = q[token].float()
        maxima = torch.full((q.shape[1], 1), -torch.inf, device=q.device)
        totals, sums = torch.zeros_like(maxima), torch.zeros(q.shape[1], rank, device=q.device)
        for begin in range(0, longest, piece):
            positions = offsets + begin
            is_seen = positions <= places.positions[token]
            indices = (firsts[token] + positions // page_size).clamp_(max=last)
            pages = places.kv_indices.index_select(0, indices).long()
            latents = torch.where(is_seen[:, None], memory[pages, (positions % page_size).long()].float(), 0.0)
            scores = (queries @ latents.T * scale).masked_fill(~is_seen, -torch.inf)
            own = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - own)
            largest = torch.maximum(maxima, own)
            before, now = torch.exp(maxima - largest), torch.exp(own - largest)
            merged = sums * before + (weights @ latents[:, :rank]) * now
            total = totals * before + weights.sum(-1, keepdim=True) * now
            has_any = is_seen[:1]  # a piece is seen from its first position on
            maxima = torch.where(has_any, largest, maxima)
            totals, sums = torch.where(has_any, total, totals), torch.where(has_any, merged, sums)
        results[token] = (sums / totals).to(q.dtype)
    return results
