"""Policies of the caller's own decide in place of those that the configuration names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_bench import echo_engine
from pagewood.engine.api import Delta, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.assembly.policies import Policies
from pagewood.engine.core.request import Request
from pagewood.engine.decision_log.replay import replay
from pagewood.schedpolicy import InBatchDeferral, NewTokenRatio, SkipAhead, budget_named

NUM_PAGES = 64


@dataclass
class NewestFirst:
    """An order that is no subclass of anything and needs nothing of schedpolicy."""

    waiting: list[Request] = field(default_factory=list[Request])

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        self.waiting.remove(request)

    def park(self, request: Request) -> None:
        self.waiting.remove(request)

    def admit(self, request: Request) -> None:
        self.waiting.remove(request)

    def stop(self, request: Request) -> None: ...

    def update(self, request: Request) -> None: ...

    def ordered(self, now_s: float) -> Iterator[Request]:
        yield from reversed(self.waiting)


class Served:
    """An engine with an echo model."""

    def __init__(self, policies: Policies | None = None, *, max_running: int = 1, **options: Any) -> None:
        self.engine, self.inbox, self.outbox = echo_engine(
            num_pages=NUM_PAGES, max_length=128, vocab_size=100, max_running=max_running,
            parts={"policies": policies}, **options,
        )  # fmt: skip

    def submit(self, name: str, *, num_prompt: int = 10, max_tokens: int = 8) -> None:
        tokens = np.full(num_prompt, ord(name[0]) % 90, "<i4").tobytes()
        self.inbox.put(Submit(request_id=name, tokens=tokens, sampling=SamplingParams(max_tokens=max_tokens)))

    def run(self, num_requests: int) -> list[Delta]:
        """Step until `num_requests` requests have ended."""
        found: list[Delta] = []
        pending = None
        while sum(delta.finish is not None for delta in found) < num_requests:
            pending = self.engine.advance(pending)
            found += self.outbox.take()
        return found

    def ends(self, num_requests: int) -> list[str]:
        return [delta.request_id for delta in self.run(num_requests) if delta.finish is not None]


def test_an_order_decides_who_is_next() -> None:
    for policies, expected in ((None, ["a", "b", "c"]), (Policies(order=NewestFirst()), ["c", "b", "a"])):
        served = Served(policies)
        for name in "abc":
            served.submit(name)
        assert served.ends(3) == expected


def test_an_order_that_reads_matches_has_them_kept_up_to_date() -> None:
    class MostCachedFirst(NewestFirst):
        def ordered(self, now_s: float) -> Iterator[Request]:
            yield from sorted(self.waiting, key=lambda request: -request.num_matched)

    served = Served(Policies(order=MostCachedFirst(), reads_matches=True))
    served.submit("x", num_prompt=40)
    assert served.ends(1) == ["x"]
    served.submit("a")
    served.submit("xx", num_prompt=41)
    assert served.ends(2) == ["xx", "a"]


def test_victim_reserve_skip_ahead_and_budget_are_asked() -> None:
    victims: list[str] = []

    def newest(running: Sequence[Request]) -> Request | None:
        victim = max(running, key=lambda request: request.arrival, default=None)
        victims.append("" if victim is None else victim.request_id)
        return victim

    class NoReserve(NewTokenRatio):
        num_steps = 0

        def on_step(self, num_steps: int = 1) -> None:
            NoReserve.num_steps += num_steps

    policies = Policies(
        victim=newest,
        reserve=NoReserve(scale=1e-9),
        skip_ahead=SkipAhead(max_skipped=0, max_passes=1),
        budget=budget_named("decode-first", max_running=8, max_prefill_tokens=64, max_prefills=8),
    )
    served = Served(policies, max_running=8)
    for name in "abcdefgh":
        served.submit(name, num_prompt=12, max_tokens=60)
    assert sorted(served.ends(8)) == list("abcdefgh")
    assert victims
    assert NoReserve.num_steps > 0


def test_decisions_of_own_policies_are_taken_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    served = Served(Policies(order=NewestFirst()), decision_log=str(log))
    for name in "abc":
        served.submit(name)
    served.run(3)
    served.engine.close()
    again = replay(log, assemble=partial(assemble, policies=Policies(order=NewestFirst())))
    assert again.difference is None
    assert again.num_plans > 10
    assert replay(log, assemble=assemble).difference is not None


ORDER, RESERVE = Policies(order=NewestFirst()), Policies(reserve=NewTokenRatio())


@pytest.mark.parametrize(
    ("changes", "policies", "name", "got"),
    [
        ({"schedule_policy": "lpm"}, ORDER, "order", "'lpm'"),
        ({"schedule_ageing_s": 1.0}, ORDER, "order", "1.0"),
        ({"schedule_conservativeness": 0.5}, RESERVE, "reserve", "0.5"),
        ({"refuse_late": True}, RESERVE, "reserve", "True"),
    ],
)
def test_what_contradicts_is_refused(changes: dict[str, Any], policies: Policies, name: str, got: str) -> None:
    (changed,) = changes
    message = re.escape(f"{changed} must have its default with a policies.{name}, got {got}")
    with pytest.raises(ValueError, match=message):
        Served(policies, **changes)


def test_matches_are_read_by_an_order() -> None:
    with pytest.raises(ValueError, match="reads_matches must be false without an order"):
        Served(Policies(reads_matches=True))


def test_a_deferral_needs_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match=r"policies\.deferral must be None without a prefix cache"):
        Served(Policies(deferral=InBatchDeferral[Request](page_size=4)), prefix_cache=False)
