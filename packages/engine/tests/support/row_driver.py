"""Runs sequences on a runner without an engine: one grant per sequence and step, chunks of a fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.loop import Runner
from pagewood.engine.core.messages.adjustments import Adjustments
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.sampling_table import SamplingArrays


@dataclass(slots=True, kw_only=True)
class DrivenSequence:
    """A sequence that holds a row."""

    row: int
    tokens: list[int]
    """Prompt, then sampled tokens."""  # written by: row_driver
    pages: list[int]  # written by: row_driver
    num_prompt: int
    num_computed: int
    """Positions whose KV is computed, or will be when the last built step is done."""  # written by: row_driver
    num_sent_tokens: int  # written by: row_driver
    num_sent_pages: int = 0  # written by: row_driver
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    seed: int = 0
    is_long: bool = False
    """Whether it has the second set of factors of a model with two."""
    adapter: tuple[int, int, int] | None = None
    """See `Batch.adapters`; None: the runner has no adapters."""
    state: int = -1
    """The place of the state that it has; -1: zeros."""  # written by: row_driver
    is_admitted: bool = False
    """Whether a step for it has been built."""  # written by: row_driver

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that would end it in an engine; here none does."""
        return frozenset(self.sampling.stop_token_ids)

    @property
    def output(self) -> list[int]:
        """Return the sampled tokens."""
        return self.tokens[self.num_prompt :]


MOST_ROWS = 32
"""Rows of a driven runner with recurrent layers, at most; the places of copies are behind theirs."""


class RowDriver:
    """Gives sequences rows and pages, and builds the batches that compute them.

    Invariant: no page belongs to two sequences, except those that `add` shares. Pages are handed out in random order,
    so that a kernel that assumes consecutive pages fails.
    """

    __slots__ = ("_free", "_has_states", "_num_rows", "_page_size", "_runner", "_short_length")

    def __init__(
        self,
        runner: Runner,
        *,
        num_pages: int,
        page_size: int,
        seed: int = 0,
        short_length: int | None = None,
        has_states: bool = False,
    ) -> None:
        self._has_states = has_states
        self._short_length = short_length
        self._runner = runner
        self._page_size = page_size
        self._free = [int(page) for page in np.random.default_rng(seed).permutation(num_pages)]
        self._num_rows = 0

    def add(
        self,
        prompt: Sequence[int],
        *,
        share: DrivenSequence | None = None,
        num_shared_pages: int = 0,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        max_length: int = 0,
        adapter: tuple[int, int, int] | None = None,
    ) -> DrivenSequence:
        """Give a prompt the next row; it may share the first pages of another sequence, as after a cache hit.

        With `adapter`, which all sequences of a runner have or none have, it has that one. It is long if it, or its
        `max_length` with its output, exceeds the runner's `short_length`.
        """
        shared = share.pages[:num_shared_pages] if share else []
        num_cached = len(shared) * self._page_size
        assert share is None or not self._has_states or num_shared_pages == share.num_prompt // self._page_size
        self._num_rows += 1
        return DrivenSequence(
            row=self._num_rows - 1,
            tokens=list(prompt),
            pages=list(shared),
            num_prompt=len(prompt),
            num_computed=num_cached,
            num_sent_tokens=num_cached,
            sampling=sampling or SamplingParams(temperature=0.0),
            seed=seed,
            is_long=self._short_length is not None and max(len(prompt), max_length) > self._short_length,
            adapter=adapter,
            state=-1 if share is None else self._copy_of(share),
        )

    def _copy_of(self, sequence: DrivenSequence) -> int:
        """Return the place of a copy of the state behind the last whole page of a prompt."""
        return MOST_ROWS + sequence.row

    def batch(self, work: Sequence[tuple[DrivenSequence, int]], *, drafts: Sequence[int] | None = None) -> Batch:
        """Build the step that computes the next positions of each sequence, at most the given number.

        A sequence samples when the step computes its last token, whose id may still be unknown to the host.

        Args:
            work: sequences and numbers of positions.
            drafts: for each sequence, how many drafts it computes behind its last token, if that is the only other
                token it computes; None: no drafts.
        """
        pages: list[tuple[int, int, int]] = []
        tokens: list[tuple[int, int, int]] = []
        grants: list[tuple[int, int, int]] = []
        states: list[tuple[int, int]] = []
        copies: list[tuple[int, int, int]] = []
        sampled: list[int] = []
        promised: list[int] = []
        for (sequence, most), num_wanted in zip(work, drafts or [0] * len(work), strict=True):
            start = sequence.num_computed
            count = min(most, len(sequence.tokens) - start)
            is_sampled = start + count == len(sequence.tokens)
            num_drafts = num_wanted if is_sampled and count == 1 else 0
            while len(sequence.pages) * self._page_size < start + count + num_drafts:
                sequence.pages.append(self._free.pop())
            pages += [(sequence.row, i, sequence.pages[i]) for i in range(sequence.num_sent_pages, len(sequence.pages))]
            sequence.num_sent_pages = len(sequence.pages)
            known = range(sequence.num_sent_tokens, sequence.num_prompt)
            tokens += [(sequence.row, i, sequence.tokens[i]) for i in known]
            sequence.num_sent_tokens = max(sequence.num_sent_tokens, sequence.num_prompt)
            sequence.num_computed += count
            if is_sampled:
                sampled.append(len(grants))
                promised.append(1 + num_drafts)
            grants.append((sequence.row, start, count + num_drafts))
            states.append((sequence.state, sequence.row))
            sequence.state = sequence.row
            copied = sequence.num_prompt // self._page_size * self._page_size
            if start < copied <= start + count:
                copies.append((len(grants) - 1, copied, self._copy_of(sequence)))
        chosen = [work[i][0] for i in sampled]
        admitted = [i for i, (sequence, _) in enumerate(work) if not sequence.is_admitted]
        for i in admitted:
            work[i][0].is_admitted = True
        page_rows, page_columns, page_ids = _columns(pages)
        token_rows, token_positions, token_ids = _columns(tokens)
        rows, starts, counts = _columns(grants)
        own: dict[str, Any] = {}
        if self._has_states:
            own["states"] = np.array(states, np.int32)
            own["state_copies"] = np.array(copies, np.int32).reshape(-1, 3)
        return Batch(
            **own,
            admitted=np.array(admitted, np.int32),
            namespaces=np.zeros(len(admitted), np.int64),
            is_long=np.array([] if self._short_length is None else [work[i][0].is_long for i in admitted], np.int32),
            adjustments=Adjustments.of([work[i][0] for i in admitted]),
            adapters=np.array([work[i][0].adapter or () for i in admitted], np.int32).reshape(-1, 3),
            page_rows=page_rows,
            page_columns=page_columns,
            page_ids=page_ids,
            token_rows=token_rows,
            token_positions=token_positions,
            token_ids=token_ids,
            rows=rows,
            starts=starts,
            counts=counts,
            sampled=np.array(sampled, np.int32),
            num_promised=np.array(promised, np.int32),
            sampling=SamplingArrays.of([s.sampling for s in chosen], [s.seed for s in chosen]),
        )

    def generate(self, sequences: Sequence[DrivenSequence], *, num_tokens: int, chunk: int) -> None:
        """Run until every sequence has `num_tokens` output tokens; a step computes up to `chunk` positions of each."""
        while True:
            live: list[DrivenSequence] = [sequence for sequence in sequences if len(sequence.output) < num_tokens]
            if not live:
                return
            batch = self.batch([(sequence, chunk) for sequence in live])
            results = self._runner.launch(batch).wait()
            chosen: list[DrivenSequence] = [live[index] for index in batch.sampled.tolist()]
            for sequence, token in zip(chosen, results.tokens.tolist(), strict=True):
                sequence.tokens.append(token)


def _columns(rows: Sequence[tuple[int, int, int]]) -> tuple[Int32, Int32, Int32]:
    table = np.array(rows, np.int32).reshape(-1, 3)
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()
