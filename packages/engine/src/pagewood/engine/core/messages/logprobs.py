"""Log probabilities of tokens: which a step is asked for, and which it has found.

A runner learns once, when a request is admitted, that its output tokens are reported. Prompt tokens are reported grant
by grant, while the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import TokenLogprob
from pagewood.engine.core.messages.adjustments import Admitted
from pagewood.engine.core.messages.arrays import Int32

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Which of the admitted requests want log probabilities of their output tokens; J requests."""

    rows: Int32
    """[J], row of each."""
    num_top: Int32
    """[J], how many of the most probable tokens are reported with each."""
    is_processed: NDArray[np.bool_]
    """[J], whether they are those of the distribution that tokens are drawn from, and not of the model's."""
    has_changes: NDArray[np.bool_]
    """[J], whether something may change the logits before tokens are drawn."""
    has_kept: NDArray[np.bool_]
    """[J], whether all tokens that the filters leave are reported with each."""

    @classmethod
    def of(cls, requests: Sequence[Admitted]) -> Reports | None:
        """Return the reports that requests ask for, or None if no request asks for any."""
        asking = [one for one in requests if one.sampling.logprobs is not None]
        if not asking:
            return None
        return cls(
            rows=np.array([one.row for one in asking], np.int32),
            num_top=np.array([one.sampling.logprobs for one in asking], np.int32),
            is_processed=np.array([one.sampling.logprobs_kind == "processed" for one in asking], np.bool_),
            has_changes=np.array([one.sampling.changes_logits for one in asking], np.bool_),
            has_kept=np.array([one.sampling.kept_tokens is not None for one in asking], np.bool_),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """What was reported of N tokens, with up to K alternatives."""

    tokens: Int32
    """[N], the tokens."""
    values: Float32
    """[N], their log probabilities."""
    ranks: Int32
    """[N], 1 for the most probable token."""
    num_top: Int32
    """[N], alternatives of each; negative: the token was not reported."""
    top_ids: Int32
    """[N, K], the most probable tokens, best first, of equal ones the smaller id first."""
    top_values: Float32
    """[N, K], their log probabilities."""
    num_kept: Int32 | None = None
    """[N], how many tokens the filters have left for each; negative: these are not reported. None: for none are."""
    kept: Int32 | None = None
    """[sum of num_kept], those tokens, in the order of the N, for each ascending."""

    def entries(self, first: int, last: int) -> tuple[TokenLogprob, ...]:
        """Return the reports of tokens [first, last); empty if they were not reported."""
        if first == last or self.num_top[first] < 0:
            return ()
        rows = slice(first, last)
        return tuple(
            [
                TokenLogprob(token, value, rank, tuple(zip(ids[:num], values[:num], strict=True)), kept)
                for token, value, rank, num, ids, values, kept in zip(
                    self.tokens[rows].tolist(), self.values[rows].tolist(), self.ranks[rows].tolist(),
                    self.num_top[rows].tolist(), self.top_ids[rows].tolist(), self.top_values[rows].tolist(),
                    self._kept_of(first, last), strict=True,
                )
            ]
        )  # fmt: skip

    def _kept_of(self, first: int, last: int) -> list[bytes | None]:
        """Return what the filters have left for tokens [first, last), which are of one request."""
        if self.kept is None or self.num_kept is None or self.num_kept[first] < 0:
            return [None] * (last - first)
        ends = np.maximum(self.num_kept[:last], 0).cumsum()[first:]
        return [
            self.kept[end - num : end].astype("<i4").tobytes()
            for num, end in zip(self.num_kept[first:last].tolist(), ends.tolist(), strict=True)
        ]
