"""What an engine shows of itself is true at every step of random traffic, and costs little."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from echo_bench import echo_engine
from pagewood.engine.api import SamplingParams, Submit
from pagewood.engine.core.loop import Engine, Pending
from pagewood.engine.observe.view import EngineView
from scenarios.drawing import random_scenario, with_drafts, with_grammars, with_interruptions
from scenarios.running import run_scenario

HELD = ("running", "paused", "draining")


@dataclass
class Audit:
    """Compares each view with the engine's own counters, page lists and tree."""

    seen: Counter[str] = field(default_factory=Counter[str])
    num_tokens: int = 0
    num_steps: int = 0
    before: tuple[int, int] | None = None

    def __call__(self, engine: Engine) -> None:
        counters = engine.counters()
        if self.before is None:
            self.before = (counters.num_steps, counters.num_tokens)
            engine.watch(is_on=True)
        view = engine.view(shows_tree=True, shows_tokens=True)
        self.check_requests(engine, view)
        self.check_pool(engine, view)
        self.check_tree(engine, view)
        self.num_steps += len(view.steps)
        self.num_tokens += sum(step.num_decode_tokens + step.num_prompt_tokens for step in view.steps)

    def check_requests(self, engine: Engine, view: EngineView) -> None:
        counters, state = engine.counters(), engine._state  # pyright: ignore[reportPrivateUsage]
        stages = Counter(request.stage for request in view.requests)
        self.seen += Counter(request.stage for request in view.requests)
        assert len(view.requests) == view.num_requests
        assert stages["running"] + stages["paused"] == counters.num_running
        assert (stages["paused"] > 0) == (state.paused != "no" and counters.num_running > 0)
        assert stages["draining"] == counters.num_draining
        assert stages["waiting"] + stages["parked"] + stages["recalling"] == counters.num_waiting
        assert stages["compiling"] == len(state.compiling)
        for shown in view.requests:
            assert bool(shown.why) == (shown.stage not in HELD)
            request = state.by_id.get(shown.request_id)
            if request is not None:
                assert shown.num_output == request.num_known - request.num_prompt
                is_parked = request in state.waiting and state.waiting.is_parked(request)
                assert (shown.stage == "parked") == (is_parked and state.paused == "no")
                if "rows are taken" in shown.why:
                    assert counters.num_running + counters.num_draining == engine.config.num_rows
        queued = [request for request in view.requests if request.stage not in HELD]
        sign = -1 if engine.config.low_priority_first else 1
        ranks = [-sign * request.priority for request in queued]
        assert ranks == sorted(ranks)

    def check_pool(self, engine: Engine, view: EngineView) -> None:
        counters, pool = engine.counters(), view.pool
        cache = engine.prefix_cache
        assert pool.num_free == counters.num_free_pages
        assert pool.num_cached + pool.num_locked == counters.num_cached_pages
        assert pool.num_locked == cache.num_locked
        assert pool.num_free + pool.num_cached + pool.num_locked + pool.num_private == pool.num_pages
        cells = np.frombuffer(pool.cells, np.uint8).reshape(-1, 3)
        assert pool.pages_per_cell == 1  # so a cell is a page, and has one owner
        assert (cells.astype(int).sum(axis=1) <= 255).all()
        num_cached, num_locked, num_private = (cells == 255).sum(axis=0).tolist()
        assert (num_cached + num_locked, num_private) == (pool.num_cached + pool.num_locked, pool.num_private)
        state = engine._state  # pyright: ignore[reportPrivateUsage]
        num_own = sum(end - start for one in (*state.running, *state.draining) for start, end in one.duplicates)
        assert num_locked <= pool.num_locked <= num_locked + num_own
        self.seen["locked"] += num_locked

    def check_tree(self, engine: Engine, view: EngineView) -> None:
        if view.tree is None:
            assert not engine.config.prefix_cache
            return
        num_tokens = sum(branch.num_total for branch in view.tree.branches if branch.parent < 0)
        assert num_tokens == engine.counters().num_cached_pages * engine.config.page_size
        for branch in view.tree.branches:
            assert 4 * min(branch.num_tokens, 48) == len(branch.tokens)
            self.seen["hits"] += branch.num_hits
            self.seen["leases"] += branch.num_leases


def test_views_are_true_at_every_step_of_random_traffic() -> None:
    seen: Counter[str] = Counter()
    for seed in (*range(24), 41):
        rng = random.Random(seed)
        scenario = random_scenario(rng, overlap=seed % 2 == 0, bursts=0.6)
        for more in (with_interruptions, with_grammars if seed % 3 else with_drafts):
            scenario = more(scenario, rng)
        audit = Audit()
        report = run_scenario(scenario, after_step=audit)
        assert audit.before is not None
        # A step in flight at the first view was launched before anybody watched; the last call of `step` is not seen.
        assert audit.num_steps == report.num_steps - audit.before[0]
        seen += audit.seen
    for stage in ("compiling", "waiting", "parked", "running", "paused", "draining", "hits", "leases", "locked"):
        assert seen[stage], stage


def test_tokens_of_steps_add_up() -> None:
    for seed in range(8):
        audit, last = Audit(), [0]

        def check(engine: Engine, audit: Audit = audit, last: list[int] = last) -> None:
            audit(engine)
            last[0] = engine.counters().num_tokens

        run_scenario(random_scenario(random.Random(seed), overlap=seed % 2 == 0), after_step=check)
        assert audit.before is not None
        assert audit.num_tokens == last[0] - audit.before[1]


class Echo:
    """An engine with the echo model and a clock that steps advance."""

    def __init__(self, *, num_pages: int = 64, max_running: int = 2, page_size: int = 4, **options: Any) -> None:
        self.now_s = 10.0
        self.pending: Pending | None = None
        self.engine, self.inbox, _ = echo_engine(
            num_pages=num_pages, page_size=page_size, max_length=200, max_running=max_running,
            parts={"clock": lambda: self.now_s}, **options,
        )  # fmt: skip

    def submit(self, name: str, *, num_tokens: int = 8, max_tokens: int = 40, **fields: object) -> None:
        tokens = (np.arange(num_tokens, dtype="<i4") + len(name) + ord(name[0])) % 50
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.inbox.put(Submit(request_id=name, tokens=tokens.tobytes(), sampling=sampling, **fields))  # type: ignore[arg-type]

    def advance(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.pending = self.engine.advance(self.pending)
            self.now_s += 1.0


def test_a_request_that_waits_says_why() -> None:
    echo = Echo(num_pages=50)
    echo.engine.watch(is_on=True, clock=lambda: echo.now_s)
    for name in ("a", "b", "c"):
        echo.submit(name, priority=1 if name == "c" else 0, deadline_s=40.0, namespace="n" * 100, tag="t")
    echo.advance(3)
    shown = {request.request_id: request for request in echo.engine.view().requests}
    assert [(shown[name].stage, shown[name].why) for name in ("a", "b")] == [
        ("running", ""),
        ("waiting", "All 2 rows are taken."),
    ]
    assert (shown["c"].stage, shown["c"].priority, shown["c"].left_s, shown["c"].age_s) == ("running", 1, 27.0, 3.0)
    assert (shown["c"].tenant, shown["c"].num_prompt, shown["c"].max_output) == ("n" * 64, 8, 40)
    assert shown["c"].num_cached == 0
    assert shown["b"].num_cached is None

    full = Echo(num_pages=50, max_running=4, schedule_conservativeness=0.05)
    full.submit("a", num_tokens=150, max_tokens=20)
    full.submit("b", num_tokens=150, max_tokens=20)
    full.advance(2)
    assert [request.why for request in full.engine.view().requests] == [
        "",
        f"It needs 38 pages, and {50 - 38} are available.",
    ]


def test_a_view_is_bounded_and_names_the_first_requests() -> None:
    echo = Echo()
    for number in range(30):
        echo.submit(f"r{number}", priority=number == 29)
    echo.advance(2)
    view = echo.engine.view(max_requests=5)
    assert view.num_requests == 30
    assert [request.request_id for request in view.requests] == ["r29", "r0", "r1", "r2", "r3"]
    assert [request.stage for request in view.requests] == ["running", "running", "waiting", "waiting", "waiting"]
    wanted = echo.engine.view(max_requests=5, wanted=["r20", "r0", "gone"]).requests
    assert [(request.request_id, request.why) for request in wanted[5:]] == [("r20", "All 2 rows are taken.")]


def test_steps_are_recorded_only_while_somebody_watches() -> None:
    echo = Echo(overlap=False)
    echo.submit("a", max_tokens=30)
    echo.advance(3)
    assert echo.engine.view().steps == ()
    echo.engine.watch(is_on=True, clock=lambda: echo.now_s)
    echo.submit("b")
    echo.advance(2)
    view = echo.engine.view()
    assert [(step.num_decodes, step.num_prompt_tokens, step.num_admitted) for step in view.steps] == [
        (1, 8, 1),
        (2, 0, 0),
    ]
    assert view.first_tokens_s == (0.0,)
    assert echo.engine.view().steps == ()
    echo.engine.watch(is_on=False)
    echo.advance(2)
    assert echo.engine.view().steps == ()


def test_hits_are_those_of_admissions_since_watching_began() -> None:
    echo = Echo(overlap=False)
    echo.engine.watch(is_on=True, clock=lambda: echo.now_s)
    for _ in range(3):
        echo.submit("same", num_tokens=20, max_tokens=2)
        echo.advance(6)
    tree = echo.engine.view(shows_tree=True).tree
    assert tree is not None
    assert [(branch.start, branch.num_hits) for branch in tree.branches][:1] == [(0, 2)]
    assert all(branch.tokens == b"" for branch in tree.branches)


@pytest.mark.slow
def test_a_view_of_a_large_engine_is_made_in_milliseconds() -> None:
    """256 running requests, 1,000 waiting, 100,000 pages; prints what each part takes."""
    echo = Echo(num_pages=100_000, max_running=256, page_size=1, chunked_prefill_size=8192, max_prefills=64)
    rng = np.random.default_rng(0)
    for number in range(1256):
        tokens = rng.integers(0, 50, 120, dtype="<i4").tobytes()
        sampling = SamplingParams(temperature=0.0, max_tokens=20 if number < 400 else 60)
        echo.inbox.put(Submit(request_id=f"r{number}", tokens=tokens, sampling=sampling))
    for _ in range(60):
        echo.advance()
    echo.engine.watch(is_on=True, clock=lambda: echo.now_s)
    for shows_tree in (False, True):
        took_s: list[float] = []
        for _ in range(20):
            began_s = time.perf_counter()
            echo.engine.view(shows_tree=shows_tree)
            took_s.append(time.perf_counter() - began_s)
        print(f"{'with' if shows_tree else 'without'} tree: {1e3 * float(np.median(took_s)):.2f} ms")
        assert np.median(took_s) < 0.1
