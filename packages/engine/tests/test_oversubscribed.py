"""Loads that need four times the memory: how many tokens are computed twice because requests are preempted."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from echo_bench import echo_engine
from pagewood.engine.api import Delta, SamplingParams, Submit
from pagewood.engine.core.loop import Counters, Pending

PAGE, VOCAB, NUM_REQUESTS = 16, 100, 64


class Bench:
    """An engine whose memory holds a quarter of 64 requests of a given size."""

    def __init__(self, *, num_prompt: int, max_tokens: int, overlap: bool = True) -> None:
        self.num_prompt, self.max_tokens = num_prompt, max_tokens
        max_length = num_prompt + max_tokens
        num_pages = NUM_REQUESTS // 4 * -(-max_length // PAGE)
        self.engine, self.inbox, self.outbox = echo_engine(
            num_pages=num_pages, page_size=PAGE, max_length=max_length, vocab_size=VOCAB, max_running=NUM_REQUESTS,
            overlap=overlap,
        )  # fmt: skip
        self.pending: Pending | None = None

    def send(self, number: int, *, num_prompt: int, max_tokens: int, stop: tuple[int, ...] = ()) -> None:
        """Send one request with a prompt of its own."""
        rng = random.Random(number)
        prompt = [rng.randrange(1, VOCAB) for _ in range(num_prompt)]
        sampling = SamplingParams(seed=number, max_tokens=max_tokens, stop_token_ids=stop)
        self.inbox.put(Submit(request_id=str(number), tokens=np.array(prompt, "<i4").tobytes(), sampling=sampling))

    def steps(self, number: int) -> Sequence[Delta]:
        """Advance the engine and return the answers that end requests."""
        ends: list[Delta] = []
        for _ in range(number):
            self.pending = self.engine.advance(self.pending)
            ends += [delta for delta in self.outbox.take() if delta.finish is not None]
        return ends

    def recomputed(self, *, stop: tuple[int, ...] = ()) -> tuple[float, Counters]:
        """Return which part of the tokens of 64 requests is computed twice, and the counters."""
        before = self.engine.counters().num_tokens
        for number in range(NUM_REQUESTS):
            self.send(number, num_prompt=self.num_prompt, max_tokens=self.max_tokens, stop=stop)
        ends: list[Delta] = []
        while len(ends) < NUM_REQUESTS:
            ends += self.steps(1)
        needed = sum(self.num_prompt + delta.num_output_tokens - 1 - delta.num_cached_tokens for delta in ends)
        counters = self.engine.counters()
        return (counters.num_tokens - before) / needed - 1, counters


SHAPES = [(128, 128), (16, 240), (1, 160), (1, 500)]
"""Tokens of prompts, and of outputs."""
USUAL = {(128, 128, True), (1, 160, False)}


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "overlap"),
    [
        pytest.param(*shape, overlap, marks=() if (*shape, overlap) in USUAL else pytest.mark.slow)
        for shape in SHAPES
        for overlap in (False, True)
    ],
)
def test_no_token_is_computed_twice_if_all_requests_use_their_whole_output(
    num_prompt: int, max_tokens: int, overlap: bool
) -> None:
    part, counters = Bench(num_prompt=num_prompt, max_tokens=max_tokens, overlap=overlap).recomputed()
    assert part == 0
    assert counters.num_preempted == 0


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"), [(64, 192), *(pytest.param(*one, marks=pytest.mark.slow) for one in SHAPES[1::2])]
)
def test_few_tokens_are_computed_twice_if_outputs_end_anywhere(num_prompt: int, max_tokens: int) -> None:
    part, counters = Bench(num_prompt=num_prompt, max_tokens=max_tokens).recomputed(stop=(0,))
    assert part < 0.05
    # More run than would fit if all used their limit: then 4 waves would take all of it.
    assert counters.num_steps < 4 * max_tokens


def test_a_burst_after_staggered_requests_does_not_fill_memory_by_the_room_that_these_made() -> None:
    """While requests start one after the other, those that end make room, so hardly anything is reserved."""
    bench = Bench(num_prompt=128, max_tokens=128)
    for number in range(1000, 1040):
        bench.send(number, num_prompt=1, max_tokens=30)
        bench.steps(20)
    bench.steps(40)
    part, counters = bench.recomputed()
    assert part == 0
    assert counters.num_preempted == 0
