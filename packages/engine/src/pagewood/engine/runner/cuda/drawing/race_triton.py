"""The race by which a token is drawn, as one kernel: hashes, logarithms and comparison in one pass over the weights.

Blocks of a row are computed in any order. Each offers its first token to one 64-bit number of the row, by an atomic
minimum: the bits of its time of arrival, which are ordered like the time because it is not negative, and below them the
token, so that the first of equal tokens wins. A minimum does not depend on the order.

Legend: S rows, V vocab_size.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton comes only with torch's CUDA build.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewood.engine.runner.splitmix import GOLDEN, TOKEN_FACTORS

_BLOCK = 2048  # tokens of a program
_GOLDEN = tl.constexpr(GOLDEN)
_F0, _F1, _F2 = (tl.constexpr(factor) for factor in TOKEN_FACTORS)
_UNIT = tl.constexpr(2.0**-32)


def first_to_arrive(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return `[S] int64`: the token of each row that wins the race, as `race.first_to_arrive` does."""
    num_rows, num_tokens = weights.shape
    first = torch.full((num_rows,), 2**63 - 1, dtype=torch.int64, device=weights.device)
    _race[(triton.cdiv(num_tokens, _BLOCK), num_rows)](
        weights.contiguous(), seeds, positions, first, num_tokens, BLOCK=_BLOCK, num_warps=4
    )
    return first & 0xFFFFFFFF


@triton.jit
def _mix(bits):  # noqa: ANN202
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit(do_not_specialize=["num_tokens"])
def _race(weights, seeds, positions, first, num_tokens, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64)
    key = _mix(_mix(seed + _GOLDEN) + position * _GOLDEN)
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = tokens.to(tl.uint32) * tl.full([], _F0, tl.uint32) + low
    bits = (bits ^ (bits >> 16)) * tl.full([], _F1, tl.uint32)
    bits = (bits ^ (bits >> 13)) + high
    bits = (bits ^ (bits >> 16)) * tl.full([], _F2, tl.uint32)
    bits = bits ^ (bits >> 15)
    # -log(1 - x). A logarithm near 1 loses digits, so for x below 1/16 it is the series; the next term is 3e-11 of it.
    x = (bits.to(tl.float32) + 0.5) * _UNIT
    tail = 1 / 5 + x * (1 / 6 + x * (1 / 7 + x * (1 / 8)))
    series = x * (1 + x * (1 / 2 + x * (1 / 3 + x * (1 / 4 + x * tail))))
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * _UNIT  # 1 - x with all digits, also near 0
    noise = tl.where(x < 0.0625, series, -tl.log(rest))
    time = noise / tl.load(weights + row * num_tokens + tokens, mask=tokens < num_tokens, other=0.0)
    time = tl.where(time >= 0, time, float("inf"))  # NaN: the row has no token, but the index must be valid
    arrival = (time.to(tl.int32, bitcast=True).to(tl.int64) << 32) | tokens.to(tl.int64)
    tl.atomic_min(first + row, tl.min(arrival, axis=0), sem="relaxed")
