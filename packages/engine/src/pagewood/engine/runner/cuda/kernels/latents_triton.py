"""Attention over latents in pieces, in two kernels: one program for each piece of a token's context, then their merge.

All heads of a token share its latents, so a tile of heads fills tensor cores with a single token. The sizes of tiles
depend on the model only, and the merge adds pieces in the order of positions. So a token has the same bits in every
step: decoded, prefilled, verified, alone or with others, in a graph or not.

A program whose piece begins behind the token ends at once, so a graph may have programs for the longest context.

Legend: T tokens of a step, H heads, C elements of a latent, R elements of its rotated key, P page_size.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# Triton comes only with torch's CUDA build.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewood.engine.runner.cuda.attention import Places
from pagewood.engine.runner.cuda.latents import PIECE, numbers_of_token

_MOST_HEADS = 32  # of a tile, which then needs 76 KB of shared memory for latents of 512 and keys of 64
_LEAST_HEADS = 16  # rows of the smallest tile of tensor cores
_KEYS = 32  # positions that a program attends to at a time
_MOST_TOKENS = 65_535  # programs along the last axis of a grid


def attend(
    q: Tensor, memory: Tensor, places: Places, *, rank: int, scale: float, longest: int, workspace: Tensor
) -> Tensor:
    """Return the attention of `q`; see `latents.AttendInPieces`. C and R are powers of 2, at least 16."""
    num_tokens, num_heads, size = q.shape
    num_pieces = triton.cdiv(longest, PIECE)
    out = torch.empty(num_tokens, num_heads, rank, dtype=q.dtype, device=q.device)
    at_once = min(workspace.numel() // numbers_of_token(num_heads, rank, longest), _MOST_TOKENS)
    heads = min(_MOST_HEADS, max(_LEAST_HEADS, triton.next_power_of_2(num_heads)))
    q = q.contiguous()
    for first in range(0, num_tokens, at_once):
        count = min(at_once, num_tokens - first)
        num_parts = count * num_pieces * num_heads
        sums, totals = workspace[: num_parts * rank], workspace[num_parts * rank : num_parts * (rank + 2)]
        positions = places.positions[first : first + count]
        _pieces[(triton.cdiv(num_heads, heads), num_pieces, count)](
            q[first : first + count], memory, positions, places.grants[first : first + count], places.kv_indptr,
            places.kv_indices, sums, totals, scale * math.log2(math.e), num_pieces, memory.stride(0),
            NUM_HEADS=num_heads, RANK=rank, ROPE=size - rank, PAGE_SIZE=memory.shape[1], PIECE=PIECE, HEADS=heads,
            KEYS=_KEYS, num_warps=8 if heads > _LEAST_HEADS else 4, num_stages=2,
        )  # fmt: skip
        _merge[(num_heads, count)](
            sums, totals, positions, out[first : first + count], num_pieces, NUM_HEADS=num_heads, RANK=rank,
            PIECE=PIECE, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_pieces"])
def _pieces(
    q, memory, positions, grants, kv_indptr, kv_indices, sums, totals, scale, num_pieces, page_stride,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr, PIECE: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
) -> None:  # fmt: skip
    """Attend to one piece of a token's context with some heads; leave sums that are not divided by their totals."""
    piece, token = tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + token)
    num_seen = position + 1 - piece * PIECE
    if num_seen <= 0:
        return
    first_page = tl.load(kv_indptr + tl.load(grants + token))
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    has_head = heads < NUM_HEADS
    elements, rotated, keys = tl.arange(0, RANK), tl.arange(0, ROPE), tl.arange(0, KEYS)
    rows = q + (token.to(tl.int64) * NUM_HEADS + heads[:, None]) * (RANK + ROPE)
    plain = tl.load(rows + elements[None, :], mask=has_head[:, None], other=0.0)
    turned = tl.load(rows + RANK + rotated[None, :], mask=has_head[:, None], other=0.0)
    maxima = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), dtype=tl.float32)
    result = tl.zeros((HEADS, RANK), dtype=tl.float32)
    num_seen = tl.minimum(num_seen, PIECE)
    for start in range(0, num_seen, KEYS):
        is_seen = start + keys < num_seen
        places = piece * PIECE + start + keys
        pages = tl.load(kv_indices + first_page + places // PAGE_SIZE, mask=is_seen, other=0).to(tl.int64)
        slots = memory + pages * page_stride + (places % PAGE_SIZE) * (RANK + ROPE)
        latents = tl.load(slots[:, None] + elements[None, :], mask=is_seen[:, None], other=0.0)
        of_keys = tl.load(slots[:, None] + RANK + rotated[None, :], mask=is_seen[:, None], other=0.0)
        scores = tl.dot(plain, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(of_keys), scores, input_precision="ieee")
        scores = tl.where(is_seen[None, :], scores * scale, float("-inf"))
        largest = tl.maximum(maxima, tl.max(scores, 1))
        weights = tl.exp2(scores - largest[:, None])
        before = tl.exp2(maxima - largest)
        total = total * before + tl.sum(weights, 1)
        result = tl.dot(weights.to(latents.dtype), latents, result * before[:, None], input_precision="ieee")
        maxima = largest
    parts = (token.to(tl.int64) * num_pieces + piece) * NUM_HEADS + heads
    tl.store(sums + parts[:, None] * RANK + elements[None, :], result, mask=has_head[:, None])
    tl.store(totals + parts * 2, maxima, mask=has_head)
    tl.store(totals + parts * 2 + 1, total, mask=has_head)


@triton.jit(do_not_specialize=["num_pieces"])
def _merge(
    sums, totals, positions, out, num_pieces,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, PIECE: tl.constexpr,
) -> None:  # fmt: skip
    """Merge the pieces of one head of a token in the order of positions."""
    head, token = tl.program_id(0), tl.program_id(1)
    elements = tl.arange(0, RANK)
    maximum, total = float("-inf"), 0.0
    result = tl.zeros((RANK,), dtype=tl.float32)
    for piece in range(tl.load(positions + token) // PIECE + 1):
        part = (token.to(tl.int64) * num_pieces + piece) * NUM_HEADS + head
        own = tl.load(totals + part * 2)
        largest = tl.maximum(maximum, own)
        before, now = tl.exp2(maximum - largest), tl.exp2(own - largest)
        result = result * before + tl.load(sums + part * RANK + elements) * now
        total = total * before + tl.load(totals + part * 2 + 1) * now
        maximum = largest
    place = (token.to(tl.int64) * NUM_HEADS + head) * RANK + elements
    tl.store(out + place, (result / total).to(out.dtype.element_ty))
