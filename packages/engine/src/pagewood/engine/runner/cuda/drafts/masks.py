"""Packed masks for verification: which positions each token of a step sees, computed on the device.

The host plans attention for the most positions that a row can have. Only the device knows where a row really ends, so
the mask hides later positions. FlashInfer reads one bit for each token and position of a grant, token by token, the
lowest bit of a byte first; the bits of each grant begin with a new byte.

Legend: T tokens of a step, G grants, B bytes of a mask.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32

_PIECE = 1 << 20  # bytes that are computed at a time: intermediate numbers take about fifty times as much memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskShape:
    """The shape of a step's mask, as far as the host knows it."""

    offsets: Int32
    """[G + 1], first byte of each grant."""
    rows_per_byte: int
    """The most tokens whose bits share a byte."""

    @classmethod
    def of(cls, counts: Int32, kv_lens: Int32) -> MaskShape:
        """Return the shape for grants of `counts` `[G]` tokens that are planned for `kv_lens` `[G]` positions."""
        sizes = (counts.astype(np.int64) * kv_lens + 7) // 8
        offsets = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(sizes, out=offsets[1:])
        shortest = int(kv_lens[counts > 0].min())
        return cls(offsets=offsets, rows_per_byte=(shortest + 6) // shortest + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """The masks of a step, on the device."""

    by_window: dict[int, Tensor]
    """For each window, how many earlier positions a token sees (-1 means all): `[B] uint8`."""
    offsets: Tensor
    """[G + 1] int32, first byte of each grant."""


def packed_masks(
    positions: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    offsets: Tensor,
    windows: Sequence[int],
    *,
    num_bytes: int,
    rows_per_byte: int,
    last_seen: Tensor | None = None,
) -> Masks:
    """Return masks by which each token sees the positions up to its own, and no more than its window.

    Args:
        positions: `[T] int32`, less than the `kv_lens` of its grant.
        qo_indptr: `[G + 1] int32`, first token of each grant.
        kv_lens: `[G] int32`, positions for which each grant is planned.
        offsets: `[G + 1] int32`, see `MaskShape`.
        windows: how many earlier positions a token sees; -1 means all.
        num_bytes: the last of `offsets`.
        rows_per_byte: see `MaskShape`.
        last_seen: `[T] int32`, the last position that each token sees, which may be behind its own; None: its own.
    """
    last_seen = positions if last_seen is None else last_seen
    masks = {window: torch.empty(num_bytes, dtype=torch.uint8, device=positions.device) for window in windows}
    for start in range(0, num_bytes if windows else 0, _PIECE):
        end = min(start + _PIECE, num_bytes)
        places = torch.arange(start, end, dtype=torch.int32, device=positions.device)
        grants = torch.searchsorted(offsets[1:], places, right=True, out_int32=True)
        bits = (places - offsets.index_select(0, grants)) * 8  # first bit of each byte, within its grant
        lengths = kv_lens.index_select(0, grants)
        first_rows = bits.div(lengths, rounding_mode="floor")
        first_tokens = qo_indptr.index_select(0, grants)
        counts = qo_indptr.index_select(0, grants + 1) - first_tokens
        pieces = {window: torch.zeros_like(places) for window in windows}
        one = torch.ones_like(places)
        for more in range(rows_per_byte):
            rows = first_rows + more
            tokens = (first_tokens + rows).clamp_(max=len(positions) - 1)
            seen = positions.index_select(0, tokens)
            shift = rows * lengths - bits  # distance of the row's first bit from the first bit of the byte
            high = torch.where(rows < counts, (shift + last_seen.index_select(0, tokens) + 1).clamp_(0, 8), 0)
            for window, piece in pieces.items():
                first = shift if window < 0 else shift + (seen - window).clamp_(min=0)
                low = torch.minimum(first.clamp(0, 8), high)
                piece |= torch.bitwise_left_shift(one, high) - torch.bitwise_left_shift(one, low)
        for window, piece in pieces.items():
            masks[window][start:end] = piece
    return Masks(by_window=masks, offsets=offsets)
