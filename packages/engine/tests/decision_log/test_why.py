"""What `why` says of a request is what happened to it, and each reason is the one that decided."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_bench import echo_engine
from logged_scenarios import scenario_of
from pagewood.engine.api import Abort, Delta, Pause, Resume, SamplingParams, Submit, TenantQuota
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import Pending
from pagewood.engine.decision_log.replay import replay
from pagewood.engine.decision_log.why import Line, why
from scenarios.running import run_scenario


class Echo:
    """An engine with the echo model and a log, on a clock that goes on by a second for each step."""

    def __init__(self, path: Path, *, num_pages: int = 64, max_length: int = 128, **options: Any) -> None:
        self.path = path
        self.now_s = 100.0
        self.deltas: list[Delta] = []
        self._pending: Pending | None = None
        fields: dict[str, Any] = {"overlap": False, "decision_log": str(path), **options}
        self.engine, self.inbox, self.outbox = echo_engine(
            num_pages=num_pages, max_length=max_length, vocab_size=100, parts={"clock": lambda: self.now_s}, **fields
        )

    def submit(self, name: str, tokens: list[int], *, max_tokens: int = 4, **options: Any) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.inbox.put(Submit(request_id=name, tokens=np.array(tokens, "<i4").tobytes(), sampling=sampling, **options))

    def steps(self, num: int = 60) -> None:
        for _ in range(num):
            self._pending = self.engine.advance(self._pending)
            self.deltas += self.outbox.take()
            self.now_s += 1.0

    def texts(self, name: str) -> list[str]:
        self.engine.close()
        assert replay(self.path, assemble=assemble).difference is None
        return [f"{line.after_s:g} {line.text}" for line in why(self.path, name)]


@pytest.fixture
def echo(tmp_path: Path) -> Callable[..., Echo]:
    return partial(Echo, tmp_path / "log")


def prompt(first: int, num: int) -> list[int]:
    return [(first + i) % 100 for i in range(num)]


def test_a_request_that_has_no_place(echo: Callable[..., Echo]) -> None:
    here = echo(max_running=1)
    here.submit("a", prompt(0, 9), max_tokens=3)
    here.submit("b", prompt(50, 9), max_tokens=2, names=("chatcmpl-7",))
    here.steps()
    assert here.texts("chatcmpl-7") == [
        "0 arrived with a prompt of 9 tokens, and asks for at most 2 more",
        "0 waited 3.000 s (3 plans): 1 request was running, as many as may",
        "3 was admitted: 0 tokens of it were cached, and its first step computes the other 9",
        "3 the cache had 0 of 8 tokens: from position 0 on, its prompt differs from everything that is remembered",
        "3 9 tokens of its prompt were computed in one step",
        "3 its first token was sent",
        "4 ended, because it was as long as it may be, after 2 tokens of output in 2 steps, 1000.0 ms from token to "
        "token",
    ]
    with pytest.raises(ValueError, match="request must be one that arrived in the log, got 'nobody'"):
        why(here.path, "nobody")


def test_a_prompt_in_chunks_and_one_behind_it(echo: Callable[..., Echo]) -> None:
    here = echo(chunked_prefill_size=16, max_prefills=1)
    here.submit("a", prompt(0, 40), max_tokens=1)
    here.submit("b", prompt(50, 5), max_tokens=1)
    here.steps()
    text = "0 40 tokens of its prompt were computed in 3 steps, of 16, 16, 8 tokens: a step had no more for it"
    assert here.texts("a")[3] == text
    assert here.texts("b")[1:3] == [
        "0 waited 1.000 s (one plan): the step had no prompt tokens left",
        "1 waited 2.000 s (2 plans): the prompts in progress took all prompt tokens of the step",
    ]


def test_a_request_that_does_not_fit(echo: Callable[..., Echo]) -> None:
    here = echo(num_pages=12, max_length=48, max_running=3, schedule_conservativeness=0.01)
    here.submit("a", prompt(0, 24), max_tokens=8)
    here.steps(2)
    here.submit("large", prompt(30, 32), max_tokens=4, names=("cmpl-9",))
    here.submit("small", prompt(70, 4), max_tokens=4)
    here.steps()
    lines = here.texts("large")
    assert "8 pages were needed and 1 reserved for other requests, but 5 were available" in lines[1]
    assert lines[1].endswith("so requests behind it could go first")
    assert here.texts("small")[1].startswith("0 was admitted")


def test_a_place_is_left_to_a_parked_request_of_higher_priority(echo: Callable[..., Echo]) -> None:
    here = echo(chunked_prefill_size=32)
    here.submit("low", prompt(0, 80), max_tokens=4)
    here.steps(1)
    here.submit("high", prompt(0, 80), max_tokens=4, priority=2)
    here.submit("middle", prompt(90, 4), max_tokens=4, priority=1)
    here.steps()
    (line,) = [line for line in here.texts("middle") if "left" in line]
    assert "the free places were left to requests of higher priority, as high, that will go on before it" in line


def test_a_repeat_is_parked_and_then_cached(echo: Callable[..., Echo]) -> None:
    here = echo(chunked_prefill_size=32)
    here.submit("a", prompt(0, 80), max_tokens=4)
    here.steps(1)
    here.submit("b", prompt(0, 80), max_tokens=4)
    here.steps()
    lines = here.texts("b")
    assert "it was parked, because request a was computing the prompt that it repeats" in lines[1]
    assert "was admitted: 60 tokens of it were cached, and its first step computes 12 of the other 20" in lines[2]


def test_a_request_waits_for_its_tenant(echo: Callable[..., Echo]) -> None:
    here = echo(quotas=(TenantQuota("*", max_running=1),))
    here.submit("a", prompt(0, 9), max_tokens=3, tenant="t")
    here.submit("b", prompt(50, 9), max_tokens=2, tenant="t")
    here.submit("c", prompt(30, 9), max_tokens=2, tenant="u")
    here.steps()
    assert here.texts("b")[1] == "0 waited 3.000 s (3 plans): its tenant ran as much as it may"
    assert here.texts("c")[1].startswith("0 was admitted")
    assert replay(here.path, assemble=assemble).difference is None


def test_who_evicted_what_and_when(echo: Callable[..., Echo]) -> None:
    here = echo(num_pages=8, max_length=32)
    here.submit("first", prompt(0, 17), max_tokens=1)
    here.steps(10)
    here.submit("req-5", prompt(50, 25), max_tokens=1, names=("cmpl-1234", "other"))
    here.steps(10)
    here.submit("again", prompt(0, 17), max_tokens=1)
    here.steps(10)
    (line,) = [line for line in here.texts("again") if "evicted" in line]
    assert line == (
        "0 the cache had 4 of 16 tokens: those from 4 to 16 had been evicted 10.000 s before by LRU, "
        "to make room for request other"
    )


def test_preemption_for_priority_and_by_a_pause(echo: Callable[..., Echo]) -> None:
    here = echo(max_running=1, preemption_threshold=0)
    here.submit("low", prompt(0, 9), max_tokens=30)
    here.steps(3)
    here.submit("high", prompt(50, 9), max_tokens=2, priority=5)
    here.steps(8)
    here.inbox.put(Pause(request_id="p", retract=True))
    here.steps(3)
    here.inbox.put(Resume(request_id="p"))
    here.steps(2)
    here.inbox.put(Abort(request_id="low"))
    here.steps()
    lines = here.texts("low")
    assert any("was preempted for request high, which waited and has a much higher priority" in line for line in lines)
    assert any("was preempted, because the engine was paused and its memory wanted" in line for line in lines)
    assert any("the engine was resumed" in line for line in lines)
    assert lines[-2].endswith("its client ended it")


def test_a_refusal(echo: Callable[..., Echo]) -> None:
    here = echo(max_queue_s=5.0, max_running=1)
    here.submit("a", prompt(0, 9), max_tokens=30)
    here.submit("late", prompt(50, 9))
    here.submit("long", prompt(0, 99), max_tokens=99)
    here.steps()
    assert here.texts("late")[-1] == "5 was refused: queue_timeout"
    assert here.texts("long")[-1] == "0 was refused: context_length_exceeded"


def lines_of(path: Path, num_requests: int) -> list[list[Line]]:
    return [why(path, str(index)) for index in range(num_requests)]


@pytest.mark.parametrize("seed", range(12))
def test_the_lines_add_up_to_what_the_engine_counted(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    mix = ("plain", "drafts", "interruptions", "grammars", "all", "faults")[seed % 6]
    scenario = scenario_of(seed, mix, tmp_path / "log")
    report = run_scenario(scenario)
    counts: Counter[str] = Counter()
    for lines in lines_of(tmp_path / "log", len(scenario.arrivals)):
        kinds = [line.kind for line in lines]
        assert kinds[0] == "arrived"
        assert kinds[-1] == "ended"
        assert kinds.count("ended") == 1
        admitted = kinds.count("admitted")
        assert kinds.count("cache") == min(1, admitted)
        assert admitted - kinds.count("preempted") in ((0, 1) if admitted else (0,))
        assert all(one.after_s <= other.after_s for one, other in pairwise(lines))
        counts.update(kinds)
        counts["cached"] += sum(int(line.numbers["cached_tokens"]) for line in lines if line.kind == "cache")
        counts["refused"] += lines[-1].numbers.get("reason") == "refused"
    assert counts["preempted"] == report.num_preempted
    assert counts["cached"] == report.num_cached_tokens
    assert counts["refused"] == report.num_refused
