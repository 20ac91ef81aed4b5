"""A runner whose tokens are hashes of seeds and positions: it has no KV, so a large step takes microseconds.

For measurements of the host; the echo model checks the KV.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import EXCLUDED, StepResult
from pagewood.engine.runner.splitmix import row_keys, uniform

_ACCEPTS = 0x5EED
"""Changes a seed, so that whether a draft is accepted does not depend on its token."""


def made_up_token(seed: int, position: int, vocab_size: int) -> int:
    """Return the token at a position of the request with this seed, if no grammar forbids it."""
    key = row_keys(np.array([seed], np.int64), np.array([position], np.int32))
    return int(key[0] % np.uint64(vocab_size))


class MadeUpTokens:
    """Draws tokens from seeds and positions alone; satisfies `core.loop.Runner`.

    A request with a grammar gets some token that it allows. A step is computed when it is waited for.

    Args:
        num_rows: rows of the tables.
        vocab_size: token ids are below it.
        acceptance: probability with which a draft is accepted, given that those before it are.
    """

    def __init__(self, *, num_rows: int, vocab_size: int, acceptance: float = 0.5) -> None:
        self._vocab_size = vocab_size
        self._acceptance = acceptance
        self._lengths = np.zeros(num_rows, np.int32)
        """[num_rows], tokens of each row."""  # contents written by: made_up_tokens

    def launch(self, batch: Batch) -> MadeUpStep:
        """Return a step that is computed later."""
        return MadeUpStep(self, batch)

    def close(self) -> None:
        """Do nothing."""

    def compute(self, batch: Batch, masks: Int32) -> StepResult:
        """Return the result of the next step in launch order.

        Args:
            batch: of the step.
            masks: `[M, words of a mask]`, one for each of `Batch.constrained`.
        """
        lengths = self._lengths
        if len(batch.token_rows):
            lengths[batch.admitted_rows()] = 0
            np.maximum.at(lengths, batch.token_rows, batch.token_positions + 1)
        rows, seeds = batch.rows[batch.sampled], batch.sampling.seeds
        first = lengths[rows]
        if (batch.num_promised == 1).all():
            lengths[rows] = first + 1
            tokens = self._tokens(seeds, first)
            self._obey(masks, batch.constrained, tokens)
            return StepResult.of_one_each(tokens)
        places = np.arange(int(batch.num_promised.max()), dtype=np.int32)
        positions = (first[:, None] + places).ravel()
        is_accepted = uniform(np.repeat(seeds ^ _ACCEPTS, len(places)), positions) < self._acceptance
        is_accepted = is_accepted.reshape(-1, len(places)) & (places < batch.num_promised[:, None] - 1)
        is_accepted[batch.constrained] = False
        counts = 1 + np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1, dtype=np.int32)
        tokens = self._tokens(np.repeat(seeds, len(places)), positions).reshape(-1, len(places))
        self._obey(masks, batch.constrained, tokens[:, 0])
        counts[tokens[:, 0] < 0] = 0
        lengths[rows] = first + counts
        num_drafted = batch.num_promised - 1
        num_drafted[batch.constrained] = 0
        return StepResult(
            tokens=tokens[places < counts[:, None]],
            counts=counts,
            excluded=np.flatnonzero(counts == 0).tolist(),
            num_drafted=num_drafted,
        )

    def _tokens(self, seeds: np.ndarray[tuple[int], np.dtype[np.int64]], positions: Int32) -> Int32:
        return (row_keys(seeds, positions) % np.uint64(self._vocab_size)).astype(np.int32)

    def _obey(self, masks: Int32, constrained: Int32, tokens: Int32) -> None:
        """Replace the tokens of grants with a grammar by allowed ones, in place; `EXCLUDED` where none is allowed."""
        for row, index in enumerate(constrained.tolist()):
            words = masks[row].view(np.uint32)
            start = int(tokens[index]) // 32
            found = np.flatnonzero(np.roll(words, -start))
            if not len(found):
                tokens[index] = EXCLUDED
                continue
            word = (start + int(found[0])) % len(words)
            bits = int(words[word])
            tokens[index] = word * 32 + (bits & -bits).bit_length() - 1


class MadeUpStep:
    """A launched step; satisfies `core.loop.ConstrainedHandle`."""

    def __init__(self, runner: MadeUpTokens, batch: Batch) -> None:
        self._runner = runner
        self._batch = batch
        self._masks: Int32 = np.empty((0, 0), np.int32)  # written by: constrain
        self._result: StepResult | None = None  # written by: wait

    def drafts(self) -> Sequence[Sequence[int]]:
        """Return no drafts for each of the constrained grants."""
        return [()] * len(self._batch.constrained)

    def constrain(self, masks: Int32) -> None:
        """Keep the masks."""
        self._masks = masks[: len(self._batch.constrained)].copy()

    def wait(self) -> StepResult:
        """Return the result; the steps before it must have been waited for."""
        if self._result is None:
            self._result = self._runner.compute(self._batch, self._masks)
        return self._result
