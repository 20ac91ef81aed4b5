"""Drafts of a known quality: a drafter that has seen the answers, and spoils each token with some probability."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from unittest.mock import patch

from pagewood.engine.assembly.cpu import rank as cpu_rank
from pagewood.engine.core.messages.arrays import Int32
from speculation.engines import System


class Answers:
    """The greedy answers of a model to prompts of one length, by prompt."""

    def __init__(self) -> None:
        self.num_prompt = 0
        """Tokens of each prompt."""
        self.by_prompt: dict[tuple[int, ...], Sequence[int]] = {}

    def know(self, plain: System, prompts: Sequence[Sequence[int]], *, num_tokens: int) -> None:
        """Generate the answers to some prompts with an engine of the model that does not draft."""
        run = plain.run(prompts, concurrency=len(prompts), max_tokens=num_tokens, ignore_eos=True)
        self.num_prompt = len(prompts[0])
        self.by_prompt.update(zip(map(tuple, prompts), run.outputs, strict=True))


class KnowingDrafter:
    """Drafts the known answers; satisfies `runner.cpu.drafts.drafting.LookupDrafter`.

    Args:
        tokens: `[rows, positions]`, the runner's table.
        answers: what it knows; other requests get no drafts.
        accepted: probability with which a draft token is right.
    """

    follows = False

    def __init__(self, tokens: Int32, *, answers: Answers, accepted: float) -> None:
        self._tokens = tokens
        self._answers = answers
        self._accepted = accepted

    def begin(self, row: int, namespace: int, num_prompt: int) -> None:
        """Do nothing."""

    def advance(self, rows: Int32, ends: Int32) -> None:
        """Do nothing."""

    def draft(self, rows: Int32, ends: Int32, most: Int32, counts: Int32) -> None:
        """Write what comes next in the answers, and a wrong token in some of its places."""
        num_prompt = self._answers.num_prompt
        for index, (row, end, num) in enumerate(zip(rows.tolist(), ends.tolist(), most.tolist(), strict=True)):
            prompt = tuple(self._tokens[row, :num_prompt].tolist())
            right = self._answers.by_prompt.get(prompt, ())[end - num_prompt :][:num]
            self._tokens[row, end : end + len(right)] = [
                token if self._is_right(prompt, end + place) else max(token - 1, 1 - token)
                for place, token in enumerate(right)
            ]
            counts[index] = len(right)

    def _is_right(self, prompt: tuple[int, ...], position: int) -> bool:
        """Return a draw that depends on prompt and position alone, so that all runs have the same right drafts."""
        return random.Random(hash((prompt, position))).random() < self._accepted


def drafts_of(answers: Answers, *, accepted: float) -> AbstractContextManager[object]:
    """Let engines for `speculative="ngram"` that are built meanwhile draft these answers."""
    knowing = partial(KnowingDrafter, answers=answers, accepted=accepted)
    return patch.dict(cpu_rank.LOOKUPS, ngram=knowing)
