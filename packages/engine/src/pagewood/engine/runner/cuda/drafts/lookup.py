"""Drafts from a row's own text, found on the device: the tokens after an earlier occurrence of its last tokens.

Legend: D rows to draft for, L positions that are searched.
Source: Saxena, Prompt Lookup Decoding, 2023.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import torch
from torch import Tensor

from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cuda.drafts.verify import DraftRequest

MIN_N = 2
"""Shortest n-gram that is looked up by default: drafts after a single token are mostly wrong."""
MAX_N = 8
"""Longest n-gram that is compared by default; each token of it takes three kernels."""


class NgramDrafter:
    """Drafts the tokens after the latest of the longest earlier occurrences of a row's last tokens.

    An occurrence may overlap the last tokens. A draft that is longer than the text after it continues periodically.
    """

    __slots__ = ("_max_n", "_min_n")

    def __init__(self, *, min_n: int = MIN_N, max_n: int = MAX_N) -> None:
        """Compare suffixes of `min_n` to `max_n` tokens."""
        self._min_n = min_n
        self._max_n = max_n

    def note(self, batch: Batch) -> None:
        """Do nothing: the token table has all that is needed."""

    def draft(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Return drafts; see `Drafter`."""
        width = min(request.longest, request.tokens.shape[1])
        text = request.tokens[:, :width].index_select(0, request.rows)
        lengths = request.lengths[:, None]
        device = text.device
        ends = torch.arange(width + 1, dtype=torch.int32, device=device)  # of earlier occurrences
        padded = torch.nn.functional.pad(text, (self._max_n, 0), value=-1)
        alive = (ends < lengths).to(torch.int32)
        matched = torch.zeros_like(alive)
        back = torch.arange(1, self._max_n + 1, dtype=torch.int32, device=device)
        suffix = text.gather(1, (lengths - back).clamp_(min=0).long())
        for n in range(self._max_n):
            first = self._max_n - 1 - n
            alive &= padded[:, first : first + width + 1] == suffix[:, n : n + 1]
            matched += alive
        matched = torch.where(matched >= self._min_n, matched, 0)
        best = (matched.long() * (width + 1) + ends).amax(1, keepdim=True)
        is_found = best > width
        places = torch.where(is_found, best % (width + 1), 0)
        period = (lengths - places).clamp_(min=1)
        steps = torch.arange(request.num_drafts, device=device)
        drafts = text.gather(1, places + steps % period)
        return drafts, torch.where(is_found, request.num_drafts, 0)[:, 0].int()
