"""An echo model: a runner whose next token is a hash of all the KV that it can read, and its sequential oracle.

It has no weights, but a token table, page rows and KV memory like any runner. So a wrong page, a page that is reused
too early, a token at the wrong position and KV that is read before it is written all change the output.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import PoolingParams, SamplingParams, TokenLogprob
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch, num_rows_of
from pagewood.engine.core.messages.logprobs import Logprobs
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.request import Request
from pagewood.engine.runner.splitmix import mix
from pagewood.engine.testing.echo_drafts import EchoDrafts
from pagewood.engine.testing.echo_grammar import allowed_tokens, read_mask

_UInt64 = NDArray[np.uint64]
_GARBAGE = np.uint64(0xDEADBEEF)
STATE_SIZE = 4
"""Elements of a hidden state."""
EXPERT_SHAPE = (2, 1)
"""Layers, and experts of a token in each."""


def oracle_tokens(
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    stop_ids: frozenset[int],
    max_length: int,
    window: int | None = None,
    adapter: int = 0,
    adapter_start: int = 0,
    weights: int = 0,
    has_states: bool = False,
) -> list[int]:
    """Generate one request alone, without cache, pages, batch or loop; the output does not contain the stop token.

    Args:
        prompt: token ids.
        sampling: of the request.
        vocab_size: token ids are below it.
        stop_ids: tokens that end the output.
        max_length: longest prompt plus output.
        window: positions that a token sees, itself included, if no layer sees all of them; None: one does.
        adapter: what its adapter is made of; 0: it has none.
        adapter_start: the first position that the adapter computes.
        weights: what the model is made of, see `EchoRunner.weights`.
        has_states: whether the model has recurrent layers.
    """
    limit = max_length - len(prompt) if sampling.max_tokens is None else sampling.max_tokens
    tokens = list(prompt)
    output: list[int] = []
    while len(output) < limit:
        made_of = _made_of(np.arange(len(tokens)), weights, adapter, adapter_start)
        kv = _kv_of(np.array(tokens, np.int32), np.arange(len(tokens), dtype=np.int32), made_of)
        allowed = None
        if sampling.grammar is not None:
            allowed = allowed_tokens(sampling.grammar, output, stop_ids, vocab_size)
            if not allowed:
                break
        state = _states_of(kv, 0)[-1] if has_states else 0
        token = _next_token(
            _seen(kv, window) + weights + state,
            len(tokens),
            sampling.temperature,
            sampling.seed or 0,
            allowed or vocab_size,
        )
        if token in stop_ids:
            break
        tokens.append(token)
        output.append(token)
    return output


def oracle_kv(token: int, position: int, weights: int) -> int:
    """Return the KV of a token at a position, computed while `EchoRunner.weights` was `weights`."""
    return _sum(_kv_of(np.array([token], np.int32), np.array([position], np.int32), np.array([weights], np.uint64)))


def oracle_token(kv_sum: int, position: int, weights: int, sampling: SamplingParams, *, vocab_size: int) -> int:
    """Return the token at a position that sees KV of this sum, drawn while `EchoRunner.weights` was `weights`."""
    return _next_token(kv_sum + weights, position, sampling.temperature, sampling.seed or 0, vocab_size)


def oracle_vector(
    prompt: Sequence[int],
    pooling: PoolingParams,
    *,
    window: int | None = None,
    adapter: int = 0,
    start: int = 0,
    has_states: bool = False,
) -> NDArray[np.float32]:
    """Return the vector of a prompt, computed alone; see `oracle_tokens`, also for `start` (`adapter_start`)."""
    states = oracle_states(prompt, window=window, adapter=adapter, start=start, has_states=has_states)
    chosen = {"last": states[-1], "cls": states[0], "mean": states.astype(np.float64).mean(axis=0)}[pooling.kind]
    vector = chosen[: pooling.dimensions].astype(np.float64)
    if pooling.normalize:
        vector /= np.sqrt((vector**2).sum()) or 1.0
    return vector.astype(np.float32)


def oracle_states(
    text: Sequence[int], *, window: int | None, adapter: int, start: int, has_states: bool
) -> NDArray[np.float32]:
    """Return the hidden state at each position of a text, computed alone; see `oracle_vector`."""
    tokens = np.array(text, np.int32)
    kv = _kv_of(tokens, np.arange(len(tokens), dtype=np.int32), _made_of(np.arange(len(tokens)), 0, adapter, start))
    own = _states_of(kv, 0) if has_states else [0] * len(tokens)
    return np.stack([echo_state(_seen(kv[: i + 1], window) + own[i], i) for i in range(len(tokens))])


def echo_experts(states: NDArray[np.float32]) -> Int32:
    """Return the experts `[positions, *EXPERT_SHAPE]` at positions with these hidden states."""
    return np.ascontiguousarray(states[:, : EXPERT_SHAPE[0]], np.int32).reshape(-1, *EXPERT_SHAPE)


def echo_state(kv_sum: int, position: int) -> NDArray[np.float32]:
    """Return the hidden state `[STATE_SIZE]` at a position; the KV that it sees adds up to `kv_sum`.

    It consists of the parts of a hash, small whole numbers, so that sums of them are exact.
    """
    word = mix(np.array([(kv_sum + position + 1) % 2**64], np.uint64))[0]
    return np.array([int(word) >> 16 * part & 0xFFFF for part in range(STATE_SIZE)], np.float32)


def echo_logprob(token: int, position: int, num_top: int, *, has_kept: bool = False) -> TokenLogprob:
    """Return the report of a token at a position; the numbers are made up.

    The alternatives are the tokens from this one down to 0, then those above it. Up to three are kept, this one last.
    """
    kept = np.arange(token - min(token, position % 3), token + 1, dtype="<i4").tobytes() if has_kept else None
    value = -float(int(mix(np.array([token * 4096 + position], np.uint64))[0] % 4096)) / 64.0
    return TokenLogprob(
        token, value, position, tuple((token - i if i <= token else i, value - i) for i in range(num_top)), kept
    )


class EchoRunner:
    """Runs the echo model; satisfies `core.loop.Runner`.

    A launched step is computed as late as possible: when a caller waits for it or for a later one, or calls `catch_up`.
    A step reads all KV of earlier steps before it writes any.

    Grants that speculate get drafts that a guesser makes up: each is the right token with some probability, if the
    guesser's own KV is that of the text (`EchoDrafts`).

    Args:
        num_rows: rows of the tables.
        max_length: longest prompt plus output.
        num_pages: pages of KV memory, or frames.
        page_size: positions per page.
        vocab_size: token ids are below it.
        held_pages: returns the pages that are not free; a step that uses another page raises. None: no check.
        memory: `[num_pages * page_size] uint64`, the KV memory; None: allocate it.
        num_pools: ranks among which pages are divided, as in `EngineInfo.num_pools`. A row's KV is in the memory of the
            rank of its first page; a page of another rank means the page with the same number there. So do places of
            states.
        windows: of the groups of layers, as in `EngineInfo.windows`; there are as many frames in each as pages. Every
            layer has the same KV, so that it changes the tokens if a group lacks any of it. Windows must be equal.
        broken: returns the grants of a batch that get wrong KV and yield no token. None: no grants.
        guess_quality: probability that a draft token is the right one.
        guess_seed: makes the guesses, and how many of the granted drafts there are.
        leaves_out: whether grants of rows that have ended are left out.
        requests: returns the requests that hold a row: the guesser looks at their grammars, `answer` at their prompts.
        answer: returns the tokens that follow a prompt, for texts that a test has chosen. Where they are over, or a
            grammar forbids one, and with None, a token is the hash.
        adapters: returns what the adapter of a number is made of, which changes the KV of its requests; None: there are
            no adapters.
        num_states: places of states, as if layers were recurrent: what follows a text then depends on a state, too,
            which is a hash of the KV in its order. 0: there are none.
        state_memory: `[num_states, words] uint64`, the memory of states, each as often as there are words; None:
            allocate it.
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
        num_pools: int = 1,
        windows: Sequence[int | None] = (None,),
        broken: Callable[[Batch], Sequence[int]] | None = None,
        guess_quality: float = 0.5,
        guess_seed: int = 0,
        leaves_out: bool = False,
        requests: Callable[[], Iterable[Request]] | None = None,
        answer: Callable[[tuple[int, ...]], Sequence[int]] | None = None,
        adapters: Callable[[int], int] | None = None,
        num_states: int = 0,
        state_memory: _UInt64 | None = None,
    ) -> None:
        self._adapters = adapters
        self._states = np.empty((num_states, 1), np.uint64) if state_memory is None else state_memory
        """The state in each place."""  # contents written by: echo
        self._states.fill(_GARBAGE)
        self.weights = 0
        """What the model is made of; it changes the KV and the tokens of later computations."""  # written by: running
        self._slots_of_rows: dict[int, tuple[int, int]] = {}
        """By row: the slot of its adapter, and the first position that it computes."""
        self._in_slots: dict[int, int] = {}
        """By slot: what its adapter is made of."""
        self._requests = requests
        self._answer = answer
        self._page_size = page_size
        self._pool_pages = num_pages // num_pools if num_pools > 1 else None
        """Pages of a rank; None: all ranks have all."""
        self._vocab_size = vocab_size
        self._held_pages = held_pages
        self._broken = broken
        self._guess_quality = guess_quality
        self._guesses = random.Random(guess_seed)
        self._leaves_out = leaves_out
        self._tokens = np.full((num_rows, max_length + 1), -1, np.int32)
        self._lengths = np.zeros(num_rows, np.int32)
        """[num_rows], tokens of each row that are known."""
        self._ends: dict[int, tuple[int, int, frozenset[int]]] = {}
        """By row: tokens at its admission, tokens that end it, and its stop tokens."""
        self._num_top: dict[int, int] = {}
        self._keeping: set[int] = set()
        """By row: alternatives of its tokens, if they are reported."""
        self._allowed: dict[tuple[int, int], list[int]] = {}
        """By sampled grant of the step that is computed and position: the tokens of a mask."""
        self._windows = windows
        self._window = None if None in windows else windows[-1]
        """Positions that a token sees, itself included; None: all."""
        self._num_rows = num_rows
        self._pages = np.full((num_rows * len(windows), -(-max_length // page_size)), -1, np.int32)
        self._kv = np.empty(num_pages * page_size, np.uint64) if memory is None else memory
        self._kv.fill(_GARBAGE)
        self._drafts = EchoDrafts(num_rows=num_rows, num_slots=num_pages * page_size)
        self._num_rebuilt = 0
        """Positions that the step has computed for drafts, because they were missing."""
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
            if step.masks is None:
                return
            if step.result is None:
                step.result = self._compute(step)

    def forget_kv(self) -> None:
        """Lose all KV, as memory that was given back to the system; no step is in flight."""
        assert not self._queue
        self._kv.fill(_GARBAGE)

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True

    def finish(self, step: EchoStep) -> StepResult:
        """Compute the launched steps up to this one, in order; return its result."""
        while True:
            head = self._queue.popleft()
            result = head.result = head.result or self._compute(head)
            if head is step:
                return result

    def _compute(self, step: EchoStep) -> StepResult:
        assert step.masks is not None, "the step has not been given its masks"
        self._allowed = {}
        self._update(step)
        broken = set[int]() if self._broken is None else set(self._broken(step.batch))
        batch = self._in_own_places(step.batch)
        prompt_logprobs = self._prompt_logprobs(batch)
        rows: list[int] = batch.rows.tolist()
        starts: list[int] = np.minimum(batch.starts, self._lengths[batch.rows] - 1).tolist()
        self._read_masks(step, step.masks, rows, starts)
        earlier = [self._past(row, start) for row, start in zip(rows, starts, strict=True)]
        promised = dict(zip(batch.sampled.tolist(), batch.num_promised.tolist(), strict=True))
        indices = {grant: index for index, grant in enumerate(promised)}
        pooled = {grant: (first, num) for grant, first, num in batch.pooled.tolist()}
        vectors: list[NDArray[np.float32]] = []
        yielded: list[list[int]] = []
        drafted: list[int] = []
        asked = {*batch.routed[:, 0].tolist(), *batch.stated[:, 0].tolist()}
        hidden: dict[int, NDArray[np.float32]] = {}
        """By grant that is asked for inner rows: the hidden states of its positions."""
        left: dict[int, int] = {}
        """States that the step leaves, by place."""
        for grant, (row, start, count, past) in enumerate(
            zip(rows, starts, batch.counts.tolist(), earlier, strict=True)
        ):
            if self._leaves_out and grant in promised and self._has_ended(row):
                yielded.append([])
                drafted.append(0)
                continue
            if promised.get(grant, 0) > 1:
                guessed = step.guessed.get(indices[grant])
                state = self._state_before(batch, grant)
                count = self._guess(batch, indices[grant], row, start, count, state) if guessed is None else guessed
            tokens = self._tokens[row, start : start + count]
            assert (tokens >= 0).all(), f"row {row} computes unknown tokens in [{start}, {start + count})"
            positions = np.arange(start, start + count, dtype=np.int32)
            kv = _kv_of(tokens, positions, self._made_of(row, positions))
            if grant in broken:
                self._write(row, start, np.full(count, _GARBAGE, np.uint64))
                self._tokens[row, start + count] = 0  # the next step may have been launched already, and reads it
                self._lengths[row] = max(self._lengths[row], start + count + 1)
            else:
                self._write(row, start, kv)
            states = [0] * count
            if len(self._states):
                states = self._advance_state(batch, grant, start, kv, left, is_broken=grant in broken)
            if grant in asked:
                hidden[grant] = self._hidden(kv, past, states, start, 0, count)
            if grant in pooled:
                vectors.append(self._pool(kv, past, states, start, *pooled[grant], is_broken=grant in broken))
            if grant not in promised:
                continue
            known = np.concatenate([past, kv])
            num_drafts = count - 1 if promised[grant] > 1 else 0
            drafted.append(num_drafts)
            yielded.append([])
            if grant in broken:
                continue
            for end in range(start + count - num_drafts, start + count + 1):
                total = _seen(known[: len(past) + end - start], self._window) + states[end - start - 1]
                token = self._draw(batch, indices[grant], total, end)
                if token is None:
                    break
                is_draft = end < start + count and int(self._tokens[row, end]) == token
                self._tokens[row, end] = token
                self._lengths[row] = end + 1
                yielded[-1].append(token)
                if not is_draft:
                    break
            if len(self._states) and num_drafts:
                left[int(batch.states[grant, 1])] = states[max(len(yielded[-1]), 1) - 1]
        for place, state in left.items():
            self._states[place] = state
        num_rebuilt, self._num_rebuilt = self._num_rebuilt, 0
        counts = np.array([len(tokens) for tokens in yielded], np.int32)
        routed, stated = (_inner_rows(entries, batch, counts, hidden) for entries in (batch.routed, batch.stated))
        return StepResult(
            num_rebuilt=num_rebuilt,
            experts=None if routed is None else echo_experts(routed),
            states=stated,
            tokens=np.array([token for tokens in yielded for token in tokens], np.int32),
            counts=counts,
            num_drafted=np.array(drafted, np.int32),
            logprobs=self._logprobs(batch, yielded),
            prompt_logprobs=prompt_logprobs,
            vectors=np.stack(vectors) if vectors else None,
        )

    def _advance_state(
        self, batch: Batch, grant: int, start: int, kv: _UInt64, left: dict[int, int], *, is_broken: bool
    ) -> list[int]:
        """Return the state behind each token of a grant from `start` on, and note in `left` what it leaves.

        All grants of a step read before any writes, so none may read what another one leaves.
        """
        own = int(batch.states[grant, 1])
        states = _states_of(kv, self._state_before(batch, grant))
        if is_broken:
            states = [int(_GARBAGE)] * len(kv)
        entries: list[list[int]] = batch.state_copies.tolist()
        copies = {
            place: states[length - start - 1]
            for index, length, place in entries
            if index == grant and start < length <= start + len(kv)
        }
        places = [own, *copies]
        others = {int(place) for index, place in enumerate(batch.states[:, 0]) if index != grant}
        assert len({*places}) == len(places), f"grant {grant} leaves two states in one place"
        assert not left.keys() & {*places}, f"grant {grant} leaves a state where another one does"
        assert not others & {*places}, f"grant {grant} leaves a state where another one reads"
        left |= {own: states[-1], **copies}
        return states

    def _state_in(self, place: int) -> int:
        """Return the state in a place; one of which only a part is there is no state."""
        first, *others = self._states[place].tolist()
        return int(_GARBAGE) if any(other != first for other in others) else first

    def _state_before(self, batch: Batch, grant: int) -> int:
        """Return the state before the first position of a grant; 0 if no layer is recurrent."""
        source = int(batch.states[grant, 0]) if len(self._states) else -1
        return 0 if source < 0 else self._state_in(source)

    def _pool(
        self, kv: _UInt64, past: _UInt64, own: Sequence[int], start: int, first: int, num: int, *, is_broken: bool
    ) -> NDArray[np.float32]:
        """Return the sum of the states of `num` tokens of a grant, from its token `first` on.

        Args:
            kv: `[tokens of the grant]`.
            past: the KV before it, see `_past`.
            own: the state behind each of its tokens.
            start: its first position.
            first: of its tokens.
            num: how many.
            is_broken: whether the states are not numbers.
        """
        if is_broken:
            return np.full(STATE_SIZE, np.nan, np.float32)
        return self._hidden(kv, past, own, start, first, num).sum(axis=0)

    def _hidden(
        self, kv: _UInt64, past: _UInt64, own: Sequence[int], start: int, first: int, num: int
    ) -> NDArray[np.float32]:
        """Return the hidden states `[num, STATE_SIZE]` of these tokens of a grant; see `_pool`."""
        known, ends = np.concatenate([past, kv]), range(first + 1, first + 1 + num)
        sums = [_seen(known[: len(past) + end], self._window) + own[end - 1] for end in ends]
        return np.stack([echo_state(total, start + end - 1) for end, total in zip(ends, sums, strict=True)])

    def _logprobs(self, batch: Batch, yielded: Sequence[Sequence[int]]) -> Logprobs | None:
        """Return the reports of the tokens that a step has yielded; the tables have these tokens already."""
        if not self._num_top:
            return None
        entries: list[TokenLogprob | None] = []
        for row, tokens in zip(batch.rows[batch.sampled].tolist(), yielded, strict=True):
            first = int(self._lengths[row]) - len(tokens)
            num_top = self._num_top.get(row)
            entries += [
                None if num_top is None else echo_logprob(token, first + i, num_top, has_kept=row in self._keeping)
                for i, token in enumerate(tokens)
            ]
        return _logprobs_of(entries)

    def _prompt_logprobs(self, batch: Batch) -> Logprobs | None:
        if not len(batch.scored):
            return None
        entries: list[TokenLogprob | None] = []
        for grant, count, num_top in batch.scored.tolist():
            row, start = int(batch.rows[grant]), int(batch.starts[grant])
            entries += [
                echo_logprob(int(self._tokens[row, position]), position, num_top)
                for position in range(start + 1, start + count + 1)
            ]
        return _logprobs_of(entries)

    def _has_ended(self, row: int) -> bool:
        length = int(self._lengths[row])
        first, limit, stop_ids = self._ends[row]
        return length > first and (length >= limit or not stop_ids.isdisjoint(self._tokens[row, first:length].tolist()))

    def _draw(self, batch: Batch, index: int, total: int, position: int) -> int | None:
        """Return the token at a position that sees KV of the sum `total`; None: the mask there allows none."""
        sampling = batch.sampling
        temperature, seed = float(sampling.temperatures[index]), int(sampling.seeds[index])
        allowed = self._allowed.get((index, position))
        chosen = self._chosen(int(batch.rows[batch.sampled[index]]), position)
        if chosen is not None and (allowed is None or chosen in allowed):
            return chosen
        if allowed == []:
            return None
        return _next_token(total + self.weights, position, temperature, seed, allowed or self._vocab_size)

    def _chosen(self, row: int, position: int) -> int | None:
        """Return the token that the test has chosen for a position; None: none, or the request of the row has ended."""
        if self._answer is None or self._requests is None:
            return None
        request = next((request for request in self._requests() if request.row == row), None)
        if request is None:
            return None
        answer = self._answer(tuple(request.tokens[: request.num_prompt].tolist()))
        return answer[position - request.num_prompt] if position - request.num_prompt < len(answer) else None

    def _update(self, step: EchoStep) -> None:
        """Apply the updates of the batch to the tables; a second call does nothing."""
        if step.is_applied:
            return
        step.is_applied, batch = True, step.batch
        self._pages[batch.page_rows, batch.page_columns] = batch.page_ids
        self._tokens[batch.token_rows, batch.token_positions] = batch.token_ids
        self._lengths[batch.token_rows] = 0
        np.maximum.at(self._lengths, batch.token_rows, batch.token_positions + 1)
        for row, limit, stop_ids in zip(
            batch.admitted_rows(), batch.limits.tolist(), batch.stop_ids.tolist(), strict=True
        ):
            self._ends[row] = (int(self._lengths[row]), limit, frozenset(stop_ids))
            self._num_top.pop(row, None)
            self._keeping.discard(row)
        if self._adapters is not None:
            for row, (slot, number, first) in zip(batch.admitted_rows(), batch.adapters.tolist(), strict=True):
                self._slots_of_rows[row] = slot, first
                if slot >= 0:
                    self._in_slots[slot] = self._adapters(number)
        self._drafts.begin(batch.admitted_rows())
        if batch.reports is not None:
            self._num_top.update(zip(batch.reports.rows.tolist(), batch.reports.num_top.tolist(), strict=True))
            self._keeping.update(batch.reports.rows[batch.reports.has_kept].tolist())

    def _read_masks(self, step: EchoStep, masks: Int32, rows: Sequence[int], starts: Sequence[int]) -> None:
        """Note which tokens the masks of a step allow at which positions."""
        batch, at = step.batch, 0
        for index in batch.constrained.tolist():
            grant = int(batch.sampled[index])
            num = step.guessed.get(index, 1)
            first = starts[grant] + (1 if index in step.guessed else int(batch.counts[grant]))
            for offset in range(num):
                self._allowed[index, first + offset] = read_mask(masks[at + offset], self._vocab_size)
            at += num
        assert at <= len(masks), f"{len(masks)} masks for {at} draws"

    def guess_constrained(self, step: EchoStep) -> list[tuple[int, ...]]:
        """Return the drafts of the constrained grants of a step; steps before are computed, and have other requests."""
        rows = set(step.batch.rows[step.batch.sampled[step.batch.constrained]].tolist())
        for earlier in self._queue:
            if earlier is step:
                break
            sampled = earlier.batch.rows[earlier.batch.sampled].tolist()
            assert rows.isdisjoint(sampled), "a step before has not been waited for"
            earlier.result = earlier.result or self._compute(earlier)
        by_row = {request.row: request for request in self._requests()} if self._requests is not None else {}
        self._update(step)
        batch, drafts = self._in_own_places(step.batch), list[tuple[int, ...]]()
        for index in batch.constrained.tolist():
            grant = int(batch.sampled[index])
            row, count = int(batch.rows[grant]), int(batch.counts[grant])
            if batch.num_promised[index] == 1:
                drafts.append(())
                continue
            start = min(int(batch.starts[grant]), int(self._lengths[row]) - 1)
            matcher = by_row[row].matcher
            matcher = None if matcher is None or by_row[row].finish is not None else matcher.copy()
            past, tag = self._drafted(row, start)
            state = self._state_before(batch, grant)
            count = self._guesses.choice((1, count, count))
            for position in range(start, start + count - 1):
                past, tag = self._draft_kv(row, position, past, tag)
                state = self._state_behind(past, state)
                mask = np.full(-(-self._vocab_size // 32), -1, np.int32)
                if matcher is not None:
                    matcher.fill(mask)
                self._allowed[index, position + 1] = read_mask(mask, self._vocab_size)
                token = self._draw(batch, index, _seen(past, self._window) + state, position + 1)
                if token is None or self._guesses.random() >= self._guess_quality:
                    token = self._guesses.randrange(self._vocab_size)
                if matcher is not None:
                    matcher.advance((token,))
                self._tokens[row, position + 1] = token
            step.guessed[index] = count
            drafts.append(tuple(self._tokens[row, start + 1 : start + count].tolist()))
        return drafts

    def _guess(self, batch: Batch, index: int, row: int, start: int, count: int, state: int) -> int:
        """Write up to `count` - 1 drafts after position `start`, before which the row has `state`.

        Returns:
            Their number plus one.
        """
        count = self._guesses.choice((1, count, count))
        past, tag = self._drafted(row, start) if count > 1 else (self._kv[:0], 0)
        for position in range(start, start + count - 1):
            past, tag = self._draft_kv(row, position, past, tag)
            state = self._state_behind(past, state)
            is_right = self._guesses.random() < self._guess_quality
            token = self._draw(batch, index, _seen(past, self._window) + state, position + 1)
            if token is None or not is_right:
                token = self._guesses.randrange(self._vocab_size)
            self._tokens[row, position + 1] = token
        return count

    def _drafted(self, row: int, start: int) -> tuple[_UInt64, int]:
        """Let the guesser catch up; return its KV before position `start` that is seen there, and its tag up to there.

        The layers of the guesser are in the first group.
        """
        positions = np.arange(start, dtype=np.int32)
        kv = _kv_of(self._tokens[row, :start], positions, self._made_of(row, positions))
        past, tag, num_rebuilt = self._drafts.catch_up(row, kv, self._slots(row, self._first_seen(start), start))
        self._num_rebuilt += num_rebuilt
        return past, tag

    def _draft_kv(self, row: int, position: int, past: _UInt64, tag: int) -> tuple[_UInt64, int]:
        """Write the guesser's KV at a position; return that and `past`, what it has before, and the tag up to there."""
        own = self._tokens[row, position : position + 1]
        positions = np.array([position], np.int32)
        kv = _kv_of(own, positions, self._made_of(row, positions))
        [slot] = self._slots(row, position, position + 1).tolist()
        tag += _sum(kv)
        self._drafts.note(slot, _sum(kv), tag)
        return np.concatenate([past, kv]), tag

    def _state_behind(self, kv: _UInt64, state: int) -> int:
        """Return the state behind the last of some positions, before which it is `state`."""
        return _states_of(kv[-1:], state)[-1] if len(self._states) else 0

    def _made_of(self, row: int, positions: Int32) -> _UInt64:
        """Return what computes each position of a row is made of: the model and the adapter in its slot now."""
        slot, first = self._slots_of_rows.get(row, (-1, 0))
        return _made_of(positions, self.weights, self._in_slots.get(slot, 0), first)

    def _first_seen(self, position: int) -> int:
        """Return the first position that the token at `position` sees."""
        return 0 if self._window is None else max(0, position + 1 - self._window)

    def _past(self, row: int, end: int) -> _UInt64:
        """Return the KV of the positions before `end` that the token there sees, and what is wrong with it in a group.

        It is that of the first group, which sees as much as any.
        """
        first = self._first_seen(end)
        own = self._kv[self._slots(row, first, end)]
        past = own.copy()
        for group, window in enumerate(self._windows[1:], 1):
            begin = 0 if window is None else max(0, end + 1 - window)
            found = self._kv[self._slots(row + group * self._num_rows, begin, end)]
            past[begin - first :] += found - own[begin - first :]
        return past

    def _write(self, row: int, start: int, kv: _UInt64) -> None:
        """Write the KV of positions from `start` on to all groups."""
        for group in range(len(self._windows)):
            self._kv[self._slots(row + group * self._num_rows, start, start + len(kv))] = kv

    def _in_own_places(self, batch: Batch) -> Batch:
        """Return a batch whose places of states are in the memory of the rank of each row."""
        if self._pool_pages is None or not len(self._states):
            return batch
        ranks = self._pages[batch.rows, 0] // self._pool_pages
        num = len(self._states) * self._pool_pages * self._page_size // len(self._kv)
        copies, states, firsts = batch.state_copies.copy(), batch.states, ranks[:, None] * num
        copies[:, 2] = ranks[copies[:, 0]] * num + copies[:, 2] % num
        return replace(batch, states=np.where(states < 0, states, firsts + states % num), state_copies=copies)

    def _slots(self, row: int, start: int, end: int) -> NDArray[np.int64]:
        positions = np.arange(start, end)
        pages = self._pages[row, positions // self._page_size].astype(np.int64)
        if self._held_pages is not None:
            assert np.isin(pages, self._held_pages()).all(), f"row {row} touches a free page"
        if self._pool_pages is not None:
            first = int(self._pages[row, 0]) // self._pool_pages * self._pool_pages
            pages = first + pages % self._pool_pages
        return pages * self._page_size + positions % self._page_size


class EchoStep:
    """A launched step; satisfies `core.loop.StepHandle`."""

    def __init__(self, runner: EchoRunner, batch: Batch) -> None:
        self._runner = runner
        self.batch = batch
        self.result: StepResult | None = None  # written by: echo
        self.masks: Int32 | None = None if len(batch.constrained) else np.empty((0, 0), np.int32)
        """None: they are still to come."""  # written by: constrain
        self.is_applied = False  # written by: echo
        self.guessed: dict[int, int] = {}
        """By constrained grant with drafts: their number plus one."""  # contents written by: echo
        self.waited = False

    def drafts(self) -> list[tuple[int, ...]]:
        """Return the drafts of the constrained grants."""
        return self._runner.guess_constrained(self)

    def constrain(self, masks: Int32) -> None:
        """Keep the masks."""
        assert self.masks is None, "a step is given masks once, if it needs any"
        self.masks = masks.copy()

    def wait(self) -> StepResult:
        """Return the tokens of each sampled grant."""
        if not self.waited or self.result is None:
            self.waited = True
            self.result = self._runner.finish(self)
        return self.result


def _inner_rows(
    entries: Int32, batch: Batch, counts: Int32, hidden: dict[int, NDArray[np.float32]]
) -> NDArray[np.float32] | None:
    """Return the hidden states at the positions of `Batch.routed` or `Batch.stated`; None: there are no `entries`."""
    nums = num_rows_of(entries, batch.counts, batch.sampled, batch.num_promised, counts).tolist()
    rows = [
        hidden[grant][first : first + num] for (grant, first), num in zip(entries.tolist(), nums, strict=True) if num
    ]
    return np.concatenate([np.empty((0, STATE_SIZE), np.float32), *rows]) if len(entries) else None


def _logprobs_of(entries: Sequence[TokenLogprob | None]) -> Logprobs:
    most = max((len(entry.top) for entry in entries if entry is not None), default=0)
    found = [TokenLogprob(-1, 0.0, 0) if entry is None else entry for entry in entries]
    tops = [(*entry.top, *[(-1, 0.0)] * (most - len(entry.top))) for entry in found]
    return Logprobs(
        tokens=np.array([entry.token for entry in found], np.int32),
        values=np.array([entry.logprob for entry in found], np.float32),
        ranks=np.array([entry.rank for entry in found], np.int32),
        num_top=np.array([-1 if entry is None else len(entry.top) for entry in entries], np.int32),
        top_ids=np.array([[token for token, _ in top] for top in tops], np.int32).reshape(len(tops), most),
        top_values=np.array([[value for _, value in top] for top in tops], np.float32).reshape(len(tops), most),
        num_kept=np.array([-1 if entry.kept is None else len(entry.kept) // 4 for entry in found], np.int32),
        kept=np.frombuffer(b"".join(entry.kept or b"" for entry in found), "<i4"),
    )


def _kv_of(tokens: Int32, positions: Int32, made_of: _UInt64) -> _UInt64:
    words = (tokens.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64) + np.uint64(1)
    return mix(words) if not made_of.any() else mix(np.where(made_of == 0, words, mix(words) + made_of))


def _made_of(positions: NDArray[np.integer], weights: int, adapter: int, start: int) -> _UInt64:
    """Return what computes each position is made of, where an adapter computes from `start` on."""
    return np.uint64(weights) + np.where(positions >= start, np.uint64(adapter), np.uint64(0))


def _states_of(kv: _UInt64, state: int) -> list[int]:
    """Return the state behind each of some positions, of which the first begins with `state`."""
    states: list[int] = []
    for word in kv.tolist():
        state = int(mix(np.array([(3 * state + word) % 2**64], np.uint64))[0])
        states.append(state)
    return states


def _sum(kv: _UInt64) -> int:
    return int(np.add.reduce(kv))


def _seen(kv: _UInt64, window: int | None) -> int:
    """Return the sum of the KV that the last of some positions sees."""
    return _sum(kv if window is None else kv[-window:])


def _next_token(kv_sum: int, position: int, temperature: float, seed: int, tokens: int | Sequence[int]) -> int:
    """Return the next token: one of some tokens, or below a number."""
    salt = seed % 2**64 if temperature > 0 else 0
    word = np.array([(kv_sum + salt * 3 + position) % 2**64], np.uint64)
    drawn = mix(mix(word))[0]
    return int(drawn % np.uint64(tokens)) if isinstance(tokens, int) else tokens[int(drawn % np.uint64(len(tokens)))]
