"""What users of SGLang suffer from, as far as scheduling is concerned: a test for each, named after it.

The numbers are those of our list of pains. `ELSEWHERE` says which other tests show that a pain cannot happen.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from echo_bench import PAGE, EchoBench, expected, submit
from pagewood.engine.api import FinishReason, Grammar
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.testing.echo_grammar import EchoCompiler
from pagewood.engine.testing.random_drafting import RandomDrafting
from pagewood.kvpool.tiers import ArrayPages, HostTier, TieredIndex
from pagewood.radixcache import RadixCache

ELSEWHERE = {
    "1 zombie requests, aborts that free nothing": [
        "test_aborts.py::test_an_abort_ends_a_request_in_every_stage",
        "test_aborts.py::test_an_abort_ends_a_request_whose_prefix_is_recalled",
        "test_aborts.py::test_an_id_that_begins_another_ends_its_own_request_only",
    ],
    "2 a leak ends the server": ["test_pains.py::test_2_wrong_accounting_is_healed_and_the_engine_goes_on"],
    "3 a long prompt blocks all others": ["test_pains.py::test_3_a_short_prompt_starts_beside_a_long_one"],
    "4 a request that does not fit blocks the queue": [
        "test_pains.py::test_4_small_requests_pass_one_that_does_not_fit_but_not_for_ever",
    ],
    "5 starvation by prefix matching, silent change of policy": [
        "test_pains.py::test_5_prefix_matching_stays_so_in_a_long_queue",
        "test_pains.py::test_5_prefix_matching_does_not_starve_a_request",
    ],
    "6 retraction storms": [
        "test_pains.py::test_6_a_load_of_four_times_the_memory_computes_few_tokens_twice",
        "test_aborts.py::test_an_abort_ends_a_request_in_every_stage",
    ],
    "7 speculation loses cached prefixes": ["test_pains.py::test_7_speculation_finds_the_same_prefixes"],
    "8 speculation with grammars hangs": [
        "test_scenarios.py::test_the_output_is_what_the_grammar_allows",
        "test_scenarios.py::test_no_token_is_drawn_behind_a_draft_where_the_matcher_fails",
        "test_scenarios.py::test_a_seeded_fault_is_found",
    ],
    "9 ranks that decide differently, health that lies": [
        "test_pains.py::test_9_the_same_commands_give_the_same_batches_at_any_speed",
        "test_watchdog.py::test_an_admission_that_stands_still_is_logged_once_and_reported",
    ],
    "13 buffers of steps in flight are overwritten": [
        "test_pains.py::test_13_a_batch_in_flight_shares_no_memory_with_another",
        "test_scenarios.py::test_a_seeded_fault_is_found",
        "test_scenarios.py::test_the_overlapped_loop_launches_all_steps_but_the_first_ahead_and_wastes_none",
    ],
    "14 a cache hit changes the text": [
        "test_pains.py::test_14_hits_chunks_and_company_do_not_change_the_text",
        "test_scenarios.py::test_output_equals_that_of_the_sequential_oracle",
    ],
    "16 tenants see each other's prefixes": ["test_pains.py::test_16_namespaces_share_nothing_in_any_tier"],
    "20 one bad request ends the server": [
        "test_pains.py::test_20_a_grammar_that_is_wrong_ends_its_own_request_only",
        "test_pains.py::test_20_a_stream_sends_each_token_once",
    ],
}
"""Pain -> the tests that show that it cannot happen."""


def test_every_pain_of_scheduling_has_its_tests() -> None:
    assert {int(pain.split()[0]) for pain in ELSEWHERE} == {*range(1, 10), 13, 14, 16, 20}
    for place in itertools.chain.from_iterable(ELSEWHERE.values()):
        file, name = place.split("::")
        assert re.search(rf"^def {name}\(", (Path(__file__).parent / file).read_text(), re.MULTILINE), place


@pytest.mark.parametrize("overlap", [False, True])
def test_2_wrong_accounting_is_healed_and_the_engine_goes_on(overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang's check of its pools at idle ends the server. Here the cache is dropped, and work goes on."""
    bench = EchoBench(overlap=overlap)
    bench.answer(submit("a", [1] * 20, max_tokens=4))
    bench.kv._allocator.alloc(3)  # a leak  # pyright: ignore[reportPrivateUsage]
    for _ in range(2):  # the second pass without a command looks
        bench.engine.advance(None)
    assert bench.engine.counters().num_violations == 1
    assert "KV accounting is wrong" in caplog.text
    bench.answer(submit("b", [2] * 60, max_tokens=4))
    assert bench.tokens("b") == expected([2] * 60, 4)
    assert bench.engine.counters().num_pages == 32


@pytest.mark.parametrize("overlap", [False, True])
def test_3_a_short_prompt_starts_beside_a_long_one(overlap: bool) -> None:
    """SGLang computes one prompt in chunks at a time. Here prompts in progress leave a part of each step to others."""
    bench = EchoBench(num_pages=64, max_running=4, overlap=overlap, chunked_prefill_size=16)
    long = [(7 * place) % 50 for place in range(60)]
    bench.step(submit("long 1", long, max_tokens=2), submit("long 2", [9, *long], max_tokens=2))
    bench.step(submit("short", [3, 4], max_tokens=2))
    bench.until(lambda: bench.tokens("short"))
    assert not bench.tokens("long 1")
    assert not bench.tokens("long 2")
    bench.until(lambda: bench.finish("long 1") and bench.finish("long 2"))
    assert bench.tokens("long 2") == expected([9, *long], 2)


def test_4_small_requests_pass_one_that_does_not_fit_but_not_for_ever() -> None:
    """SGLang stops at the first request without room. Here smaller ones pass it, in a bounded number of steps."""
    bench = EchoBench(num_pages=20, max_running=4)
    bench.step(submit("first", [1] * 20, max_tokens=20))
    bench.step(submit("large", [2] * 60, max_tokens=2))
    names = [f"small {number}" for number in range(300)]
    for number, name in enumerate(names):  # without a bound they would take all memory again and again
        bench.step(submit(name, [3 + number % 40] * 5, max_tokens=12))
        if bench.tokens("large"):
            break
    assert bench.tokens("large")
    assert sum(bench.finish(name) is not None for name in names) > 5
    bench.until(lambda: bench.finish("large"))
    assert bench.tokens("large") == expected([2] * 60, 2)


def queue_of(bench: EchoBench, number: int) -> None:
    """Fill the queue with requests that have nothing in common, while one request runs."""
    bench.step(submit("running", [0] * 4, max_tokens=30))
    bench.step(*(submit(f"other {index}", [index % 50, index // 50, 9, 9], max_tokens=1) for index in range(number)))


def test_5_prefix_matching_stays_so_in_a_long_queue() -> None:
    """Beyond 128 waiting requests SGLang's lpm becomes fcfs without a word. Here matches are watched."""
    bench = EchoBench(num_pages=64, max_running=1, schedule_policy="lpm")
    bench.answer(submit("warm", [7] * 24, max_tokens=1))
    queue_of(bench, 300)
    bench.step(submit("matches", [7] * 24 + [1], max_tokens=1))
    bench.until(lambda: bench.finish("matches"))
    assert bench.finish("running") is not None
    assert not any(bench.tokens(f"other {index}") for index in range(300))


@pytest.mark.parametrize("step_s", [0.0, 0.01])
def test_5_prefix_matching_does_not_starve_a_request(step_s: float) -> None:
    """In SGLang requests with a cached prefix can pass one without for ever. Here a second of waiting is worth 1,000
    tokens of match, so it ends; only with a clock that stands still it does not."""
    bench = EchoBench(num_pages=64, max_running=1, schedule_policy="lpm")
    bench.answer(submit("warm", [7] * 24, max_tokens=1))
    bench.step(submit("running", [0] * 4, max_tokens=4), submit("unlucky", [1] * 8, max_tokens=1))
    for index in range(60):  # always some wait that match
        bench.now_s += step_s
        bench.step(submit(f"lucky {index}", [7] * 24 + [index % 50], max_tokens=1))
    assert bool(bench.tokens("unlucky")) == (step_s > 0)
    assert bench.tokens("lucky 0")


def test_6_a_load_of_four_times_the_memory_computes_few_tokens_twice() -> None:
    """SGLang's retraction can throw away most of what was computed. Here a preempted request keeps its KV in the cache,
    and less is admitted after a preemption."""
    bench = EchoBench(num_pages=128, max_running=32)
    rng = random.Random(1)
    prompts = [[rng.randrange(50) for _ in range(16)] for _ in range(32)]
    for index, prompt in enumerate(prompts):
        bench.inbox.put(submit(str(index), prompt, max_tokens=48))
    bench.until(lambda: sum(bench.finish(str(index)) is not None for index in range(32)) == 32, limit=4000)
    num_needed = 32 * (16 + 48 - 1)
    assert num_needed > 3.9 * 128 * PAGE
    assert bench.engine.counters().num_tokens <= 1.05 * num_needed
    assert bench.tokens("7") == expected(prompts[7], 48)


def test_7_speculation_finds_the_same_prefixes() -> None:
    """With EAGLE SGLang finds half of the prefixes. Here drafts change no page that is published."""

    def cached(**options: Any) -> list[int]:
        bench = EchoBench(num_pages=64, **options)
        found: list[int] = []
        text = [*range(1, 20)]
        for turn in range(4):
            name = f"turn {turn}"
            found.append(bench.answer(submit(name, text, max_tokens=6)).num_cached_tokens)
            text = [*text, *bench.tokens(name), 40 + turn, 41]
        return found

    plain = cached()
    assert sum(plain) > 60
    assert cached(drafting=RandomDrafting(max_tokens=4, seed=1)) == plain


class Recorded:
    """Keeps the bytes of every batch that is launched."""

    def __init__(self, bench: EchoBench) -> None:
        self.frames: list[bytes] = []
        self.batches: list[Batch] = []
        runner = bench.engine._runner  # pyright: ignore[reportPrivateUsage]
        launch = runner.launch

        def recorded(batch: Batch) -> Any:
            self.frames.append(b"|".join(array.tobytes() for array in arrays_of(batch)))
            self.batches.append(batch)
            return launch(batch)

        runner.launch = recorded  # type: ignore[method-assign]


def arrays_of(batch: Batch) -> list[NDArray[Any]]:
    """Return the arrays of a batch."""
    values = (getattr(batch, name) for name in type(batch).__dataclass_fields__)
    return [value for value in values if isinstance(value, np.ndarray)]


@pytest.mark.parametrize("overlap", [False, True])
def test_9_the_same_commands_give_the_same_batches_at_any_speed(overlap: bool) -> None:
    """SGLang's ranks time out apart from each other. Here a plan is a function of the commands, not of the clock."""
    recorded: list[list[bytes]] = []
    for seed in (1, 2):
        rng, now_s = random.Random(seed), [0.0]

        def clock(rng: random.Random = rng, now_s: list[float] = now_s) -> float:
            now_s[0] += rng.choice((0.0, 0.001, 30.0))
            return now_s[0]

        bench = EchoBench(num_pages=24, max_running=4, overlap=overlap, clock=clock, schedule_conservativeness=0.1)
        record = Recorded(bench)
        for index in range(12):
            bench.step(submit(str(index), [index % 3] * (5 + index), max_tokens=20))
        bench.until(lambda bench=bench: sum(bench.finish(str(index)) is not None for index in range(12)) == 12)
        assert bench.engine.counters().num_preempted > 0
        recorded.append(record.frames)
    assert recorded[0] == recorded[1]


def test_13_a_batch_in_flight_shares_no_memory_with_another() -> None:
    """Buffers that a step in flight still reads were overwritten by the next. Here batches alias nothing."""
    bench = EchoBench(num_pages=24, max_running=4, overlap=True)
    record = Recorded(bench)
    for index in range(6):
        bench.step(submit(str(index), [index] * (5 + index), max_tokens=12))
    bench.steps(30)
    assert len(record.batches) > 20
    for batch, following in itertools.pairwise(record.batches):
        for one, other in itertools.product(arrays_of(batch), arrays_of(following)):
            assert not (one.size and other.size and np.shares_memory(one, other) and one.flags.writeable)
    for batch, frame in zip(record.batches, record.frames, strict=True):  # nothing has written to them since
        assert b"|".join(array.tobytes() for array in arrays_of(batch)) == frame


def test_14_hits_chunks_and_company_do_not_change_the_text() -> None:
    """With a radix hit SGLang changes half of the greedy texts. Here a text depends on prompt and parameters only; the
    same is shown of the logits' bits on a CPU by test_invariance_cpu.py."""
    prompt = [(5 * place) % 50 for place in range(40)]
    alone = EchoBench(num_pages=64)
    alone.answer(submit("a", prompt, max_tokens=12))
    again = alone.answer(submit("b", prompt, max_tokens=12))
    assert again.num_cached_tokens == 36
    company = EchoBench(num_pages=64, max_running=4, chunked_prefill_size=7)
    company.step(*(submit(f"other {index}", [index, *prompt], max_tokens=12) for index in range(3)))
    company.answer(submit("a", prompt, max_tokens=12))
    assert alone.tokens("a") == alone.tokens("b") == company.tokens("a") == expected(prompt, 12)


@pytest.mark.parametrize("has_host", [False, True])
def test_16_namespaces_share_nothing_in_any_tier(has_host: bool) -> None:
    """A layer below SGLang's tree dropped the salt. Here the device's tree and the keys of lower tiers have it."""

    def make_caches(memory: NDArray[np.uint64]) -> Callable[[], TieredIndex]:
        device = ArrayPages([[memory.view(np.uint8).reshape(-1, PAGE * 8)]])
        host = HostTier(page_bytes=PAGE * 8, num_pages=200)
        return lambda: TieredIndex(RadixCache(PAGE), device=device, host=host, page_size=PAGE)

    bench = EchoBench(make_caches=make_caches if has_host else None)
    text = [*range(1, 25)]
    bench.answer(submit("mine", text, max_tokens=1, namespace="mine"))
    for index in range(5):
        bench.answer(submit(f"evicts {index}", [index] * 50, max_tokens=8))
    yours = bench.answer(submit("yours", text, max_tokens=1, namespace="yours"))
    nobody = bench.answer(submit("nobody", text, max_tokens=1))
    assert (yours.num_cached_tokens, nobody.num_cached_tokens) == (0, 0)
    mine = bench.answer(submit("mine again", text, max_tokens=1, namespace="mine"))
    assert mine.num_cached_tokens == (20 if has_host else 0)
    bench.engine.close()


def test_20_a_grammar_that_is_wrong_ends_its_own_request_only() -> None:
    """An error in a grammar ended the server. Here it refuses the request, and others do not notice."""
    bench = EchoBench(max_running=4, compiler=EchoCompiler(random.Random(1), 50))
    bench.step(submit("good", [1] * 8, max_tokens=12), submit("bad", [2] * 8, grammar=Grammar.lark("0 6 999 1")))
    bench.until(lambda: bench.finish("good") and bench.finish("bad"))
    assert bench.finish("bad") is FinishReason.REFUSED
    assert bench.tokens("good") == expected([1] * 8, 12)
    bench.step()
    bench.check_empty()


def test_20_a_stream_sends_each_token_once() -> None:
    """SGLang's streams repeat the whole text in each chunk. Here a Delta has what is new."""
    bench = EchoBench()
    bench.answer(submit("a", [1] * 8, max_tokens=12))
    assert sum(len(delta.tokens) for delta in bench.deltas["a"]) == 12
    assert [delta.num_output_tokens for delta in bench.deltas["a"]] == list(range(1, 13))
