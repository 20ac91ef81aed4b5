"""How the logits of some requests are changed before tokens are drawn: penalties, biases, bad words and the like.

A runner gets this once, when a request is admitted. It finds the tokens of the text in its own table, so a step carries
none of this, and the changes depend on the text and the position alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.messages.arrays import Int32

_NEVER = 2**31 - 1


class Admitted(Protocol):
    """The attributes of an admitted request that `Adjustments`, `Reports` and `Processors` read."""

    @property
    def row(self) -> int:
        """Its row in the device tables."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """Its parameters."""
        ...

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """The changes for J admitted requests, with N biases and K bad words; `api.SamplingParams` says what they mean."""

    rows: Int32
    """[J], row of each request."""
    penalties: NDArray[np.float32]
    """[J, 3] float32, repetition, frequency and presence."""
    num_prompt: Int32
    """[J], tokens before the output, which count for repetition only."""
    num_biases: Int32
    """[J], number of biases of each; their sum is N."""
    ids: Int32
    """[N], token of each bias."""
    values: NDArray[np.float32]
    """[N] float32, what is added to its logit."""
    ends: Int32
    """[N], the bias applies to tokens drawn at positions below this."""
    num_words: Int32
    """[J], number of bad words of each; their sum is K."""
    word_sizes: Int32
    """[K], tokens of each bad word."""
    words: Int32
    """[sum of word_sizes], the tokens of the bad words, in order."""

    @classmethod
    def of(cls, requests: Sequence[Admitted]) -> Adjustments | None:
        """Return the changes for the requests that have any, or None if no request has any."""
        adjusted = [one for one in requests if one.sampling.changes_logits]
        if not adjusted:
            return None
        penalties = [
            (one.sampling.repetition_penalty, one.sampling.frequency_penalty, one.sampling.presence_penalty)
            for one in adjusted
        ]
        biases = [_biases(one) for one in adjusted]
        flat = [bias for some in biases for bias in some]
        words = [word for one in adjusted for word in one.sampling.bad_words]
        return cls(
            rows=np.array([one.row for one in adjusted], np.int32),
            penalties=np.array(penalties, np.float32),
            num_prompt=np.array([one.num_prompt for one in adjusted], np.int32),
            num_biases=np.array([len(some) for some in biases], np.int32),
            ids=np.array([token for token, _, _ in flat], np.int32),
            values=np.array([value for _, value, _ in flat], np.float32),
            ends=np.array([end for _, _, end in flat], np.int32),
            num_words=np.array([len(one.sampling.bad_words) for one in adjusted], np.int32),
            word_sizes=np.array([len(word) for word in words], np.int32),
            words=np.array([token for word in words for token in word], np.int32),
        )


def _biases(request: Admitted) -> list[tuple[int, float, int]]:
    """Return the token, the value and the end of each bias."""
    biases = [(token, value, _NEVER) for token, value in request.sampling.logit_bias]
    if request.sampling.min_tokens:
        end = request.num_prompt + request.sampling.min_tokens
        biases += [(token, -math.inf, end) for token in sorted(request.stop_ids)]
    return biases
