"""An echo model: a runner whose next token is a hash of all the KV that it can read, and its sequential oracle.

It has no weights, but a token table, page rows and KV memory like any runner. So a wrong page, a page that is reused
too early, a token at the wrong position and KV that is read before it is written all change the output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.arrays import Int32
from pagewood.engine.core.batch import Batch
from pagewood.engine.core.result import StepResult
from pagewood.engine.runner.splitmix import mix

_UInt64 = NDArray[np.uint64]
_GARBAGE = np.uint64(0xDEADBEEF)


def oracle_tokens(
    prompt: Sequence[int], sampling: SamplingParams, *, vocab_size: int, stop_ids: frozenset[int], max_length: int
) -> list[int]:
    """Generate one request alone, without cache, pages, batch or loop; the output does not contain the stop token."""
    limit = max_length - len(prompt) if sampling.max_tokens is None else sampling.max_tokens
    tokens = list(prompt)
    output: list[int] = []
    while len(output) < limit:
        kv = _kv_of(np.array(tokens, np.int32), np.arange(len(tokens), dtype=np.int32))
        token = _next_token(_sum(kv), len(tokens), sampling.temperature, sampling.seed or 0, vocab_size)
        if token in stop_ids:
            break
        tokens.append(token)
        output.append(token)
    return output


class EchoRunner:
    """Runs the echo model; satisfies `core.loop.Runner`.

    A launched step is computed as late as possible: when a caller waits for it or for a later one, or calls `catch_up`.
    A step reads all KV of earlier steps before it writes any.

    Args:
        num_rows: rows of the tables.
        max_length: longest prompt plus output.
        num_pages: pages of KV memory.
        page_size: positions per page.
        vocab_size: token ids are below it.
        held_pages: returns the pages that are not free; a step that uses another page raises. None: no check.
        memory: `[num_pages * page_size] uint64`, the KV memory; None: allocate it.
        broken: returns the grants of a batch whose KV is to be wrong and that yield no token. None: none are.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_length: int,
        num_pages: int,
        page_size: int,
        vocab_size: int,
        held_pages: Callable[[], Int32] | None = None,
        memory: _UInt64 | None = None,
        broken: Callable[[Batch], Sequence[int]] | None = None,
    ) -> None:
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._held_pages = held_pages
        self._broken = broken
        self._tokens = np.full((num_rows, max_length + 1), -1, np.int32)
        self._pages = np.full((num_rows, -(-max_length // page_size)), -1, np.int32)
        self._kv = np.empty(num_pages * page_size, np.uint64) if memory is None else memory
        self._kv.fill(_GARBAGE)
        self._queue: deque[EchoStep] = deque()
        self.num_launched = 0
        self.num_launched_ahead = 0
        """Steps launched while another was in flight."""
        self.closed = False

    @property
    def num_in_flight(self) -> int:
        """Launched steps that no caller has waited for."""
        return len(self._queue)

    def launch(self, batch: Batch) -> EchoStep:
        """Queue a step."""
        self.num_launched += 1
        self.num_launched_ahead += any(not step.waited for step in self._queue)
        step = EchoStep(self, batch)
        self._queue.append(step)
        return step

    def catch_up(self) -> None:
        """Compute all launched steps."""
        for step in self._queue:
            if step.tokens is None:
                step.tokens = self._compute(step.batch)

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True

    def finish(self, step: EchoStep) -> StepResult:
        """Compute the launched steps up to this one, in order; return its result."""
        while True:
            head = self._queue.popleft()
            if head.tokens is None:
                head.tokens = self._compute(head.batch)
            if head is step:
                return StepResult.of_one_each(head.tokens)

    def _compute(self, batch: Batch) -> Int32:
        self._pages[batch.page_rows, batch.page_columns] = batch.page_ids
        self._tokens[batch.token_rows, batch.token_positions] = batch.token_ids
        earlier: list[int] = [
            _sum(self._kv[self._slots(row, 0, start)])
            for row, start in zip(batch.rows.tolist(), batch.starts.tolist(), strict=True)
        ]
        sums: list[int] = []  # sum of all KV up to the end of each grant
        for row, start, count, total in zip(
            batch.rows.tolist(), batch.starts.tolist(), batch.counts.tolist(), earlier, strict=True
        ):
            tokens = self._tokens[row, start : start + count]
            assert (tokens >= 0).all(), f"row {row} computes unknown tokens in [{start}, {start + count})"
            kv = _kv_of(tokens, np.arange(start, start + count, dtype=np.int32))
            self._kv[self._slots(row, start, start + count)] = kv
            sums.append((total + _sum(kv)) % 2**64)
        sampling = batch.sampling
        sampled: list[int] = []
        for index, grant in enumerate(map(int, batch.sampled)):
            position = int(batch.starts[grant] + batch.counts[grant])
            token = _next_token(
                sums[grant], position, float(sampling.temperatures[index]), int(sampling.seeds[index]), self._vocab_size
            )
            self._tokens[batch.rows[grant], position] = token
            sampled.append(token)
        tokens = np.array(sampled, np.int32)
        for grant in () if self._broken is None else self._broken(batch):
            row, start, count = int(batch.rows[grant]), int(batch.starts[grant]), int(batch.counts[grant])
            self._kv[self._slots(row, start, start + count)] = _GARBAGE
            tokens[batch.sampled == grant] = -1
            self._tokens[row, start + count] = 0  # the next step may have been launched already, and reads it
        return tokens

    def _slots(self, row: int, start: int, end: int) -> NDArray[np.int64]:
        positions = np.arange(start, end)
        pages = self._pages[row, positions // self._page_size].astype(np.int64)
        if self._held_pages is not None:
            assert np.isin(pages, self._held_pages()).all(), f"row {row} touches a free page"
        return pages * self._page_size + positions % self._page_size


class EchoStep:
    """A launched step; satisfies `core.loop.StepHandle`."""

    def __init__(self, runner: EchoRunner, batch: Batch) -> None:
        self._runner = runner
        self.batch = batch
        self.tokens: Int32 | None = None  # written by: echo
        self.waited = False

    def wait(self) -> StepResult:
        """Return one token for each sampled grant."""
        self.waited = True
        return self._runner.finish(self)


def _kv_of(tokens: Int32, positions: Int32) -> _UInt64:
    return mix((tokens.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64) + np.uint64(1))


def _sum(kv: _UInt64) -> int:
    return int(np.add.reduce(kv))


def _next_token(kv_sum: int, position: int, temperature: float, seed: int, vocab_size: int) -> int:
    salt = seed % 2**64 if temperature > 0 else 0
    word = np.array([(kv_sum + salt * 3 + position) % 2**64], np.uint64)
    return int(mix(mix(word))[0] % np.uint64(vocab_size))
