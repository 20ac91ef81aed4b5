"""What an engine measures: stages of a step, histograms, the queue by priority, and what the tiers do."""

from __future__ import annotations

from itertools import accumulate, count
from typing import Any

import numpy as np
import pytest

from echo_bench import echo_engine
from pagewood.engine.api import SamplingParams as Sampling
from pagewood.engine.api import Submit
from pagewood.engine.core.loop import Pending
from pagewood.engine.core.observe.measures import MAX_PRIORITIES, Measures, Stage
from pagewood.engine.observe.histogram import OTHER, Histogram, Labels


class Ticking:
    """An engine with the echo model on a clock that moves by a second whenever it is read."""

    def __init__(self, *, num_pages: int = 64, rows: int = 2, **options: Any) -> None:
        ticks = count()
        self.engine, self.inbox, _ = echo_engine(
            num_pages=num_pages,
            max_running=rows,
            vocab_size=100,
            parts={"clock": lambda: float(next(ticks))},
            **options,
        )
        self.pending: Pending | None = None

    def submit(self, name: str, num_prompt: int, *, max_tokens: int = 2, priority: int = 0) -> None:
        tokens = np.arange(num_prompt, dtype="<i4") + len(name)
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        self.inbox.put(Submit(request_id=name, tokens=tokens.tobytes(), sampling=sampling, priority=priority))

    def advance(self, num: int) -> None:
        for _ in range(num):
            self.pending = self.engine.advance(self.pending)


def test_a_histogram_counts_as_prometheus_does() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    values = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    for value in values:
        histogram.add(value)
    histogram.add(3.0, 2)
    at_most = [sum(value <= bound for value in [*values, 3.0, 3.0]) for bound in histogram.bounds]
    assert list(accumulate(histogram.counts)) == [*at_most, 9]
    assert histogram.total == sum(values) + 6
    with pytest.raises(ValueError, match=r"bounds must ascend, got \[1, 1\]"):
        Histogram((1, 1))


def test_labels_are_bounded_and_do_not_change() -> None:
    labels = Labels(3)
    assert [labels.of(value) for value in (5, 6, 7, 5, 8, 6)] == ["5", "6", OTHER, "5", OTHER, "6"]
    with pytest.raises(ValueError, match="limit must be >= 2, got 1"):
        Labels(1)


@pytest.mark.parametrize("overlap", [False, True])
def test_every_moment_belongs_to_one_stage(overlap: bool) -> None:
    ticking = Ticking(overlap=overlap)
    ticking.engine.measure()
    ticking.submit("a", 10, max_tokens=5)
    ticking.advance(1)
    measures = ticking.engine.measure()
    began = sum(measures.stage_s)
    first = measures._at_s  # pyright: ignore[reportPrivateUsage]
    ticking.advance(4)
    last = measures._at_s  # pyright: ignore[reportPrivateUsage]
    assert sum(measures.stage_s) - began == last - first > 0
    found = ticking.engine.measurement()
    assert found is not None
    assert set(found.stage_s) == {stage.name.lower() for stage in Stage}
    assert all(found.stage_s[name] > 0 for name in ("plan", "build", "launch", "wait", "retire"))
    assert found.num_prefill_tokens == 10


def test_idle_time_is_no_work() -> None:
    ticking = Ticking()
    measures = ticking.engine.measure()
    ticking.advance(50)
    assert sum(measures.stage_s) == 0
    ticking.submit("a", 3)
    ticking.advance(6)
    before = ticking.engine.measurement()
    ticking.advance(9)
    assert ticking.engine.measurement() == before  # so the pulse of an idle server does not change


def test_the_queue_is_counted_by_the_priorities_of_clients() -> None:
    for lowest_first in (False, True):
        ticking = Ticking(rows=1, low_priority_first=lowest_first)
        ticking.engine.measure()
        for index, priority in enumerate((3, 3, -2)):
            ticking.submit("x" * (index + 1), 8, max_tokens=20, priority=priority)
        ticking.advance(2)
        found = ticking.engine.measurement()
        assert found is not None
        served = -2 if lowest_first else 3
        assert found.queue.running == {str(served): 1}
        assert found.queue.waiting == ({"3": 2} if lowest_first else {"3": 1, "-2": 1})
        assert found.queue.oldest_s > 0
        assert not found.preempted


def test_preemptions_and_evictions_are_counted() -> None:
    ticking = Ticking(num_pages=14, rows=2, preemption_threshold=5)
    ticking.engine.measure()
    ticking.submit("low", 20, max_tokens=20, priority=1)
    ticking.advance(3)
    ticking.submit("urgent", 30, max_tokens=10, priority=9)
    ticking.advance(120)
    found = ticking.engine.measurement()
    assert found is not None
    assert found.preempted == {"1": ticking.engine.counters().num_preempted}
    assert found.preempted["1"] > 0
    assert found.num_evicted_pages > 0
    assert found.queue.waiting == found.queue.running == {}


def test_a_request_that_others_have_passed_as_often_as_they_may_is_counted_once() -> None:
    ticking = Ticking(num_pages=20, rows=2, prefix_cache=False, overlap=False)
    ticking.submit("holder", 8, max_tokens=56)
    ticking.advance(1)
    ticking.submit("large", 62)  # does not fit beside the holder
    for number in range(40):
        ticking.submit(f"small {number}", 3, max_tokens=1)
    ticking.advance(20)
    counters = ticking.engine.counters()
    assert counters.num_starved == 0
    assert counters.num_waiting < 41  # small requests pass it
    ticking.advance(20)
    counters = ticking.engine.counters()
    assert counters.num_starved == 1
    assert counters.num_waiting == 1 + 40 - 32  # no other passes it any more
    ticking.advance(80)
    counters = ticking.engine.counters()
    assert (counters.num_starved, counters.num_waiting, counters.num_running) == (1, 0, 0)


def test_there_are_not_more_labels_than_allowed() -> None:
    measures = Measures(lambda: 0.0)
    assert len({measures.priority(priority) for priority in range(1000)}) == MAX_PRIORITIES


def test_nothing_is_measured_unless_it_is_asked_for() -> None:
    ticking = Ticking()
    ticking.submit("a", 3)
    ticking.advance(5)
    assert ticking.engine.measurement() is None


def test_tokens_of_prompts_and_of_outputs_are_told_apart_in_one_step() -> None:
    ticking = Ticking(prefix_cache=False)
    ticking.engine.measure()
    ticking.submit("a", 12, max_tokens=20)
    ticking.advance(4)
    ticking.submit("bb", 9, max_tokens=5)
    ticking.advance(40)
    found = ticking.engine.measurement()
    assert found is not None
    assert found.num_prefill_tokens == 12 + 9
    assert found.num_decode_tokens == ticking.engine.counters().num_tokens - 21 >= 19 + 4
