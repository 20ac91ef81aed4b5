"""Sizes of the chunks of a long prompt for which the stages of a model take equal time.

A token of a chunk attends to all tokens before it, so the same number of tokens takes longer the further they are in a
prompt. A stage that computes an early chunk would then wait for the one that computes a later one.

Source: the dynamic chunking of SGLang's pipelines; here it is fitted to the steps that are computed anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil, sqrt
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.steps.grant import Grant

_KEPT = 256
_REFIT_EVERY = 16
_FEWEST = 16
"""Least tokens of a chunk, so that prompts make progress."""


class EqualChunks:
    """Knows how much longer a token takes for each one before it. Invariant: that is 0 until steps have been measured.

    A step takes `base + tokens * t + pairs * p` seconds, where a pair is a token and one that it attends to. Only
    `p / t` is needed: chunks of equal `tokens * t + pairs * p` take equal time.

    Args:
        num_stages: of the model.
    """

    __slots__ = ("_ended_s", "_num_new", "_num_stages", "_samples", "pair_tokens")

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.pair_tokens = 0.0
        """p / t: what a pair takes, as a part of what a token takes."""  # written by: ended
        self._samples: deque[tuple[int, int, float]] = deque(maxlen=_KEPT)
        """Tokens, pairs and seconds of the latest steps."""  # contents written by: ended
        self._num_new = 0  # written by: ended
        self._ended_s = 0.0
        """When the last step ended, on the engine's clock."""  # written by: ended

    def tokens(self, start: int, most: int) -> int:
        """Return how many tokens from position `start` on take no more time than `most` at the start of a prompt."""
        if not self.pair_tokens or most <= _FEWEST:
            return most
        return min(most, max(_FEWEST, int(self._count(start, self._work(0, most)))))

    def worth(self, start: int, count: int) -> int:
        """Return how many tokens at the start of a prompt take as long as `count` from position `start` on."""
        if not self.pair_tokens:
            return count
        return max(count, ceil(self._count(0, self._work(start, count)) * (1 - 1e-12)))

    def ended(self, grants: Sequence[Grant], *, num_beside: int, launched_s: float, now_s: float) -> None:
        """Note that a step has ended.

        Args:
            grants: of the step.
            num_beside: steps that were in flight when it was launched, itself left out.
            launched_s: when it was launched, on the engine's clock.
            now_s: when its end was noticed.
        """
        last_s, self._ended_s = self._ended_s, now_s
        if num_beside >= self._num_stages - 1:  # all stages were busy: a step ends after each time of a stage
            seconds = now_s - max(launched_s, last_s)
        elif not num_beside:
            seconds = (now_s - launched_s) / self._num_stages
        else:
            return
        num_tokens = sum(grant.num_tokens for grant in grants)
        num_pairs = sum(_pairs(grant.start, grant.num_tokens) for grant in grants)
        self._samples.append((num_tokens, num_pairs, seconds))
        self._num_new += 1
        if self._num_new >= _REFIT_EVERY:
            self._num_new = 0
            self._fit()

    def _work(self, start: int, count: int) -> float:
        """Return the time of some tokens, in times of a token without any before it."""
        return count + self.pair_tokens * _pairs(start, count)

    def _count(self, start: int, work: float) -> float:
        """Return how many tokens from position `start` on take this time; the inverse of `_work`."""
        slope = 1 + self.pair_tokens * (start + 0.5)
        return 2 * work / (slope + sqrt(slope * slope + 2 * self.pair_tokens * work))

    def _fit(self) -> None:
        samples = np.array(self._samples, np.float64)
        features = np.column_stack([samples[:, :2], np.ones(len(samples))])
        features /= (scales := features.max(axis=0))
        if np.linalg.matrix_rank(features) < 3:
            features, scales = features[:, :2], scales[:2]  # chunks had one size: the base counts as time of tokens
        if np.linalg.matrix_rank(features) < 2:
            return  # all steps were alike
        solved = cast("NDArray[np.float64]", np.linalg.lstsq(features, samples[:, 2], rcond=None)[0])
        token_s, pair_s = (solved / scales).tolist()[:2]
        if token_s > 0:
            self.pair_tokens = max(0.0, pair_s / token_s)


def _pairs(start: int, count: int) -> int:
    return count * start + count * (count + 1) // 2
