"""The result that a runner returns for one step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.logprobs import Logprobs

EXCLUDED = -2
"""Stands for a token if all logits are minus infinity; any other negative number means that logits are not numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The tokens that a step has yielded.

    Legend: S sampled grants of the batch, N tokens, P pooled grants, E elements of a hidden state.

    Invariant: the tokens of one grant are consecutive, and the grants are in the order of `Batch.sampled`.
    """

    tokens: Int32
    """[N] int32, token ids."""
    counts: Int32
    """[S] int32, number of tokens of each grant, at most `num_promised`; 0 if none could be drawn, or if the grant was
    left out because its row had ended."""
    excluded: Collection[int] = ()
    """The sampled grants for which changes of the logits have excluded every token. The logits of other grants without
    a token were not numbers."""
    logprobs: Logprobs | None = None
    """Log probabilities of the N tokens; None: no request wants them."""
    prompt_logprobs: Logprobs | None = None
    """Log probabilities of the prompt tokens of `Batch.scored`, one grant after the other; None: no prompt tokens."""
    num_drafted: Int32 | None = None
    """[S] int32, draft tokens of each grant that were verified, at most `num_promised` - 1. None: no drafts."""
    draft_s: float = 0.0
    """Seconds that the device spent on the drafter, in steps without drafts too; 0: not measured."""
    verify_s: float = 0.0
    """Seconds that the device spent on the rest of the step; 0: not measured."""
    num_rebuilt: int = 0
    """Positions that a draft model computed before its drafts because its KV there was missing or of other tokens."""
    num_postponed: int = 0
    """Grants that got no drafts, because the drafter was not ready for their rows."""
    num_short: int = 0
    """Rows for which a drafting head attends to a part of the text only, because its KV of the rest was missing."""
    ahead: Int32 | None = None
    """[S, D] int32, drafts for the next step of the row of each grant, -1 behind the last: what the last stage of a
    model gives all others. The engine does not read them. None: no drafts."""
    vectors: NDArray[np.float32] | None = None
    """[P, E] float32, the sum of hidden states of each of `Batch.pooled`; None: no vectors."""
    experts: Int32 | None = None
    """[rows, L, K] int32, the K experts of each of L layers, 0 in layers without experts, at the positions of
    `Batch.routed`, one grant after the other; `num_rows_of` says how many each has. None: no experts."""
    states: NDArray[np.float32] | None = None
    """[rows, E] float32, hidden states behind the last norm, of `Batch.stated`; None: no states."""

    def by_grant(self) -> list[tuple[int, ...]]:
        """Return the tokens of each of the S grants."""
        tokens: list[int] = self.tokens.tolist()
        if len(tokens) == len(self.counts) and (self.counts == 1).all():
            return list(zip(tokens, strict=True))
        ends = np.cumsum(self.counts).tolist()
        return [tuple(tokens[end - count : end]) for end, count in zip(ends, self.counts.tolist(), strict=True)]

    @classmethod
    def of_one_each(cls, tokens: Int32) -> StepResult:
        """Return the result of a step in which each sampled grant yields one token.

        Args:
            tokens: `[S] int32`; `EXCLUDED` where every token was excluded, and another negative number where the
                logits were not numbers.
        """
        is_token = tokens >= 0
        if is_token.all():
            return cls(tokens=tokens, counts=is_token.astype(np.int32))
        excluded = np.flatnonzero(tokens == EXCLUDED).tolist()
        return cls(tokens=tokens[is_token], counts=is_token.astype(np.int32), excluded=excluded)
