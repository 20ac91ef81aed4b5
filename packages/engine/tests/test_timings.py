"""`Submit.explain`: when things happened to a request, in its last answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from echo_bench import echo_engine
from pagewood.engine.api import Abort, Delta, RequestTimings, SamplingParams, Submit


class Echo:
    """An engine with the echo model, on a clock that goes on by a second for each step."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 10.0
        self.deltas: list[Delta] = []
        fields: dict[str, Any] = {"overlap": False, "max_running": 1, **options}
        self.engine, self.inbox, self.outbox = echo_engine(
            vocab_size=100, parts={"clock": lambda: self.now_s}, **fields
        )

    def submit(self, name: str, num: int, *, max_tokens: int, explain: bool = True, **options: Any) -> None:
        tokens = np.arange(num, dtype="<i4").tobytes()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.inbox.put(Submit(request_id=name, tokens=tokens, sampling=sampling, explain=explain, **options))

    def steps(self, num: int) -> None:
        for _ in range(num):
            self.engine.advance(None)
            self.deltas += self.outbox.take()
            self.now_s += 1.0

    def timings(self, name: str) -> RequestTimings | None:
        *others, last = [delta for delta in self.deltas if delta.request_id == name]
        assert last.finish is not None
        assert all(delta.timings is None for delta in others)
        return last.timings


@pytest.mark.parametrize("chunk", [8, 64])
def test_chunks_and_waiting(chunk: int) -> None:
    echo = Echo(chunked_prefill_size=chunk, prefix_cache=False)
    echo.submit("a", 20, max_tokens=3)
    echo.submit("b", 5, max_tokens=1)
    echo.submit("c", 5, max_tokens=1, explain=False)
    echo.steps(12)
    sizes = [8, 8, 4] if chunk == 8 else [20]
    chunks = tuple((10.0 + i, size) for i, size in enumerate(sizes))
    first_s = 10.0 + len(sizes) - 1
    assert echo.timings("a") == RequestTimings(
        arrived_s=10.0, queued_s=10.0, admitted_s=10.0, chunks=chunks, first_token_s=first_s, finished_s=first_s + 2
    )
    began_s = first_s + 3
    assert echo.timings("b") == RequestTimings(
        arrived_s=10.0, queued_s=10.0, admitted_s=began_s, chunks=((began_s, 5),), first_token_s=began_s,
        finished_s=began_s,
    )  # fmt: skip
    assert echo.timings("c") is None


def test_a_preemption_and_an_end_before_admission() -> None:
    echo = Echo(preemption_threshold=0, prefix_cache=False)
    echo.submit("low", 8, max_tokens=9)
    echo.steps(3)
    echo.submit("high", 8, max_tokens=2, priority=1)
    echo.submit("never", 8, max_tokens=2)
    echo.steps(1)
    echo.inbox.put(Abort(request_id="never"))
    echo.steps(20)
    low, never = echo.timings("low"), echo.timings("never")
    assert low is not None
    assert (low.admitted_s, low.first_token_s, low.preempted_s) == (10.0, 10.0, (14.0,))
    assert low.num_preempted == 1
    assert low.chunks == ((10.0, 8), (16.0, 11))  # it gives way in the step that it is chosen in
    assert never == RequestTimings(arrived_s=13.0, queued_s=13.0, admitted_s=None, first_token_s=None, finished_s=14.0)


def test_a_request_that_is_refused_at_once_has_no_times() -> None:
    echo = Echo()
    echo.submit("long", 60, max_tokens=60)
    echo.steps(1)
    assert echo.timings("long") is None
