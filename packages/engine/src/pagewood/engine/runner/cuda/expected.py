"""What the host reads when the device has reached the end of a step, and where it is.

Legend: S sampled grants.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.runner.cuda.drafts.verify import Yielded
from pagewood.engine.runner.cuda.drawing.report import PendingReport
from pagewood.engine.runner.cuda.inner_rows import PendingRows
from pagewood.engine.runner.cuda.pool import PendingSums


@dataclass(frozen=True, slots=True, kw_only=True)
class OneEach:
    """The layout of the result of a plain step: one token for each sampled grant."""

    size: int
    """S"""

    def result(self, words: Int32) -> StepResult:
        """Return the result in `words` `[S]`."""
        return StepResult.of_one_each(words)

    def places(self, result: StepResult) -> NDArray[np.int64]:
        """Return the row of logits, of S, from which each token of the result was drawn."""
        return np.flatnonzero(result.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """The layout of the result of a step whose tokens another stage draws."""

    num: int
    """S"""
    size: int = 0
    """Words here."""

    def result(self, words: Int32) -> StepResult:
        """Return a result without tokens."""
        return StepResult(tokens=words, counts=np.zeros(self.num, np.int32))

    def places(self, result: StepResult) -> NDArray[np.int64]:
        """Return nothing: there are no tokens here."""
        return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The results of a step."""

    tokens: OneEach | Yielded | Elsewhere
    drawn: PendingReport | None = None
    """Reports of drawn tokens, by row of logits; None: no reports."""
    scored: PendingReport | None = None
    """Reports of prompt tokens; None: no reports."""
    sums: PendingSums | None = None
    """Sums of hidden states; None: no prompt is pooled."""
    witness: Tensor | None = None
    """`[4] int64`, see `CUDARunner._witnessed`; it follows the tokens in the memory of the result. None: a model of one
    rank needs none."""
    ahead: Tensor | None = None
    """`[S, D] int32`, see `StepResult.ahead`; it comes last in that memory. None: no drafts."""
    inner: PendingRows | None = None
    """Experts and hidden states; None: no position is reported."""

    @property
    def more(self) -> list[Tensor]:
        """What follows the tokens in the memory of the result, as words."""
        parts = [None if self.witness is None else self.witness.view(torch.int32), self.ahead]
        return [part.flatten() for part in parts if part is not None]

    @property
    def size(self) -> int:
        """Words of all that comes in the memory of the result."""
        return self.tokens.size + sum(map(len, self.more))

    def result(self, words: Int32) -> StepResult:
        """Return the result in `words`; the device has reached the end of the step."""
        result = self.tokens.result(words[: self.tokens.size])
        if self.ahead is not None:
            result = replace(result, ahead=words[-self.ahead.numel() :].reshape(self.ahead.shape))
        if self.drawn is not None:
            result = replace(result, logprobs=self.drawn.of(self.tokens.places(result)))
        if self.scored is not None:
            result = replace(result, prompt_logprobs=self.scored.of(np.arange(len(self.scored.places))))
        if self.sums is not None:
            result = replace(result, vectors=self.sums.read())
        if self.inner is not None:
            result = replace(result, **self.inner.read(result.counts))
        return result
