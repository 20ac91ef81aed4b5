"""The race by which a token is drawn, in plain torch: about 60 kernels on a device, so `race_triton` is used there.

Half of the operations hash one number of each row, the other half all tokens. torch has no unsigned arithmetic, so
shifts are masked.

Legend: S rows, V vocab_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import torch
from torch import Tensor

from pagewood.engine.runner.splitmix import GOLDEN, TOKEN_FACTORS


def first_to_arrive(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return `[S] int64`: the token of each row that wins the race, the first of equal ones.

    Args:
        weights: `[S, V] float32`, probabilities up to a factor; 0: the token cannot win.
        seeds: `[S] int64`.
        positions: `[S] int32`, position of the token that is drawn.
    """
    tokens = torch.arange(weights.shape[1], dtype=torch.int32, device=weights.device)
    return (exponentials(row_keys(seeds, positions), tokens) / weights).argmin(-1)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return `splitmix.row_keys` of `seeds` `[S] int64` and `positions` `[S] int32` as `[S] int64`."""
    golden = _signed(GOLDEN, 64)
    return _mix(_mix(seeds + golden) + positions.long() * golden)


def exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return `splitmix.exponentials` of `keys` `[S] int64` and `tokens` `[V] int32` as `[S, V] float32`."""
    low, high = keys.int()[:, None], (keys >> 32).int()[:, None]
    factors = [_signed(factor, 32) for factor in TOKEN_FACTORS]
    bits = tokens * factors[0] + low
    bits = _folded(bits, 16, 32) * factors[1]
    bits = _folded(bits, 13, 32) + high
    bits = _folded(bits, 16, 32) * factors[2]
    bits = _folded(bits, 15, 32)
    hashes = bits.long() & 0xFFFFFFFF
    below, above = ((number.float() + 0.5) * 2.0**-32 for number in (hashes, 0xFFFFFFFF - hashes))  # x and 1 - x
    return -torch.where(below < 0.5, torch.log1p(-below), above.log())  # float32 has few digits near 1


def _mix(bits: Tensor) -> Tensor:
    """Return `splitmix.mix` of int64."""
    bits = _folded(bits, 30, 64) * _signed(0xBF58476D1CE4E5B9, 64)
    bits = _folded(bits, 27, 64) * _signed(0x94D049BB133111EB, 64)
    return _folded(bits, 31, 64)


def _folded(bits: Tensor, shift: int, size: int) -> Tensor:
    return bits ^ ((bits >> shift) & ((1 << (size - shift)) - 1))


def _signed(number: int, size: int) -> int:
    """Return the signed number of `size` bits that has the bits of `number`."""
    return number - (1 << size) if number >> (size - 1) else number
