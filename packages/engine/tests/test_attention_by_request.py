"""Attention that ranks divide by request: bits, seeded faults, what is refused, and real processes."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asked_twice import answered, small
from families.case import build
from families.registry import DIVIDED
from group_in_threads import ranks_are_threads
from pagewood.engine.api import EngineConfig, Grammar, PoolingParams, SamplingParams, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine, RunnerLostError
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.offline.calls import EngineFailedError
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.program.division import DividedPass
from pagewood.engine.runner.cpu.program.tape import integers_at
from ranked_engines import generate_for, group_of, is_alive

Scopes = NDArray[np.int64]
WAIT_S = 60
"""Then a process counts as hung."""
PROMPTS = ["Hello, my name is", "The capital of France is", "1 2 3 4 5 6", "Once upon a time, there was a king who"]
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_dp_attention": True, "num_threads": 2, "max_running": 8}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, prompt_logprobs=0, ignore_eos=True)


def mixed_sampling(num: int, max_tokens: int = 20) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=max_tokens, temperature=2.0 * (i % 2), seed=i, ignore_eos=True) for i in range(num)
    ]


@pytest.fixture
def deepseek(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a small model with latent attention and experts; ranks are threads."""
    build(DIVIDED["deepseek3"], tmp_path)
    ranks_are_threads(monkeypatch)
    return tmp_path


LayOut = Callable[[DividedPass, Scopes, Scopes], None]


def sums_elsewhere(original: LayOut, divided: DividedPass, scopes: Scopes, counts: Scopes) -> None:
    """Give the sums of a row to another rank."""
    original(divided, scopes, counts)
    num = int(counts[divided.whole.scope.tokens.index])
    integers_at(scopes[divided.part.scope.index, Column.OWNERS], 2 * num)[::2] ^= 1


def request_on_two_ranks(original: LayOut, divided: DividedPass, scopes: Scopes, counts: Scopes) -> None:
    """Let every rank compute the first request."""
    row, division = integers_at(scopes[divided.whole.scope.index, Column.ROWS], 1)[0], divided.division
    page = division.pages[row, 0]
    division.pages[row, 0] = division.exchange.rank * division.num_pages
    original(divided, scopes, counts)
    division.pages[row, 0] = page


def rows_in_another_order(original: LayOut, divided: DividedPass, scopes: Scopes, counts: Scopes) -> None:
    """Take the rank's own rows backwards."""
    original(divided, scopes, counts)
    num = int(counts[divided.part.scope.tokens.index])
    places = integers_at(scopes[divided.part.scope.index, Column.PLACES], num)
    places[:] = places[::-1].copy()


def page_table_of_another_rank(original: LayOut, divided: DividedPass, scopes: Scopes, counts: Scopes) -> None:
    """Read pages of other requests."""
    division = divided.division
    division.own_pages[:] = division.pages // 2 % division.num_pages
    original(divided, scopes, counts)


FAULTS = (sums_elsewhere, request_on_two_ranks, rows_in_another_order, page_table_of_another_rank)


@pytest.fixture(scope="module")
def expected_of_deepseek(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("deepseek")
    build(DIVIDED["deepseek3"], folder)
    return answered(small(folder))


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_are_found(
    fault: Callable[[LayOut, DividedPass, Scopes, Scopes], None], deepseek: Path,
    expected_of_deepseek: list[list[int]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(DividedPass, "lay_out", partialmethod(partial(fault, DividedPass.lay_out)))
    with suppress(RunnerLostError):
        assert answered(small(deepseek, tensor_parallel_size=2, enable_dp_attention=True)) != expected_of_deepseek


def reports(
    engine: Engine, inbox: MemoryInbox, outbox: MemoryOutbox, prompts: list[list[int]], placed: list[tuple[int, ...]]
) -> list[list[Any]]:
    """Return tokens and log probabilities of some prompts, which come at once; note the free pages of ranks."""
    for index, prompt in enumerate(prompts):
        inbox.put(Submit(request_id=str(index), tokens=np.array(prompt, "<i4").tobytes(), sampling=GREEDY))
    found: dict[str, list[Any]] = {str(index): [] for index in range(len(prompts))}
    num_open, pending = len(prompts), None
    while num_open or pending is not None:
        pending = engine.advance(pending)
        placed.append(engine.counters().free_pages_by_rank)
        for delta in outbox.take():
            found[delta.request_id] += [*delta.tokens, *delta.prompt_logprobs, *delta.logprobs]
            num_open -= delta.finish is not None
    return list(found.values())


def test_bits_depend_neither_on_the_rank_nor_on_the_batch(deepseek: Path) -> None:
    """Without a cache, equal prompts go to the ranks in turn."""
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    config = small(deepseek, tensor_parallel_size=2, enable_dp_attention=True, prefix_cache=False)
    engine = build_engine(config, inbox=inbox, outbox=outbox)
    prompt, placed = list(range(3, 25)), list[tuple[int, ...]]()
    try:
        [alone] = reports(engine, inbox, outbox, [prompt], placed)
        others = reports(engine, inbox, outbox, [prompt, prompt, list(range(40, 57)), prompt, prompt], placed)
    finally:
        engine.close()
    assert alone == others[0] == others[1] == others[3] == others[4]
    assert others[2] != alone
    assert len(alone) == 22 - 1 + 2 * 8
    assert all(min(of_rank) < 128 for of_rank in zip(*placed, strict=True)), "one rank has not been used"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 1}, "enable_dp_attention must be False with tensor_parallel_size 1, got True"),
        ({"preemption_threshold": 0}, "preemption_threshold must be None with enable_dp_attention, got 0"),
        ({"decision_log": "log"}, "decision_log must be None with enable_dp_attention, got 'log'"),
    ],
)
def test_what_does_not_fit_together_is_refused(options: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {"tensor_parallel_size": 2, "enable_dp_attention": True, **options}
    with pytest.raises(ValueError, match=message):
        EngineConfig(**whole)


@pytest.mark.parametrize("options", [{"schedule_policy": "lpm"}, {"eviction_policy": "queue-lru"}])
def test_matches_of_waiting_requests_are_not_watched(options: dict[str, Any], deepseek: Path) -> None:
    config = small(deepseek, tensor_parallel_size=2, enable_dp_attention=True, **options)
    with pytest.raises(ValueError, match="schedule_policy and eviction_policy must not read the matches"):
        build_engine(config, inbox=MemoryInbox(), outbox=MemoryOutbox())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread of rank 1 ends
def test_a_request_must_fit_the_memory_of_one_rank(deepseek: Path) -> None:
    config = small(deepseek, tensor_parallel_size=2, enable_dp_attention=True, max_length=200)
    with pytest.raises(ValueError, match=r"max_length must be at most 128 \(32 pages of 4 tokens"):
        build_engine(replace(config, max_total_tokens=256), inbox=MemoryInbox(), outbox=MemoryOutbox())


@pytest.fixture(scope="module")
def ranks() -> Iterator[LLM]:
    with LLM(**RANKS, speculative="ngram", max_total_tokens=1024, chunked_prefill_size=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM(num_threads=1, max_running=8) as llm:
        yield llm


def test_processes_have_the_tokens_of_one(ranks: LLM, alone: LLM) -> None:
    """With drafts from the text, in chunks, and the second time after hits."""
    prompts = PROMPTS * 2
    expected = [one.tokens for one in alone.generate(prompts, mixed_sampling(len(prompts)))]
    for _ in range(2):
        assert [one.tokens for one in ranks.generate(prompts, mixed_sampling(len(prompts)))] == expected
    counters = ranks.counters()
    assert counters.num_cached_pages > 0
    assert len(counters.free_pages_by_rank) == 2
    assert sum(counters.free_pages_by_rank) == counters.num_free_pages < counters.num_pages
    assert max(counters.free_pages_by_rank) < counters.num_pages // 2, "one rank has not been used"


def test_grammars_reports_and_vectors(ranks: LLM, alone: LLM) -> None:
    bound = SamplingParams(max_tokens=20, temperature=1.0, seed=3, grammar=Grammar(kind="regex", text="(ab|cd)+ef"))
    reported = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=1)
    found, expected = ([llm.generate(PROMPTS, one) for one in (bound, reported)] for llm in (ranks, alone))
    assert [one.tokens for one in found[0]] == [one.tokens for one in expected[0]]
    for one, other in zip(found[1], expected[1], strict=True):
        for own, others in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert own is not None
            assert others is not None
            assert [a.token for a in own if a] == [a.token for a in others if a]
            np.testing.assert_allclose([a.logprob for a in own if a], [a.logprob for a in others if a], atol=1e-3)
    vectors = [llm.embed(PROMPTS, PoolingParams(kind="mean")) for llm in (ranks, alone)]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_threads": 4}, id="two threads each"),
        pytest.param({"speculative": "suffix"}, id="suffix"),
        pytest.param({"speculative": "draft"}, id="draft"),
        pytest.param({"speculative": "eagle", "speculative_control": "fixed"}, id="eagle"),
        pytest.param({"weights": "float32", "batch_invariant": True}, id="float32"),
        pytest.param({"kv_cache_dtype": "int8", "overlap": False, "chunked_prefill_size": 7}, id="int8 KV, no overlap"),
        pytest.param(
            {"max_total_tokens": 320, "max_length": 80, "schedule_conservativeness": 0.05}, id="little memory"
        ),
        pytest.param({"num_continuous_decode_steps": 4}, id="several steps at once"),
        pytest.param({"chunk_align": 8, "chunked_prefill_size": 16, "retained_share": 0.5}, id="aligned chunks"),
    ],
)
@pytest.mark.slow
def test_everything_else_works(options: dict[str, Any]) -> None:
    prompts, outputs = PROMPTS * 2, list[list[Any]]()
    for ranks in ({}, RANKS):
        whole: dict[str, Any] = {"num_threads": 1, "max_running": 8, **options, **ranks}
        with LLM(**whole) as llm:
            outputs.append([])
            for num in range(2):
                found = llm.generate(prompts, mixed_sampling(len(prompts), 20 + num))
                outputs[-1] += [one.tokens for one in found]
    assert outputs[0] == outputs[1]


def shared_memory() -> list[str]:
    """Return the memory of groups of ranks that this process has open."""
    gc.collect()
    links = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return [one for one in links if "pagewood-ranks" in one]


def lose(llm: LLM, rank: int, number: signal.Signals, *, moment_s: float) -> list[int]:
    """Send a signal to a rank under load; the group must end."""
    pids = group_of(llm).pids()
    threading.Timer(moment_s, os.kill, (pids[rank - 1], number)).start()
    with pytest.raises(RunnerLostError, match=f"rank {rank}"):
        generate_for(llm, WAIT_S)
    with pytest.raises(EngineFailedError, match=f"rank {rank}"):
        llm.generate(PROMPTS)
    return pids


def test_a_lost_rank_ends_the_group_with_a_typed_error(ranks: LLM) -> None:
    """The last test of these processes."""
    (pid,) = lose(ranks, 1, signal.SIGKILL, moment_s=0.5)
    assert not is_alive(pid)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_any_rank_may_be_lost_at_any_moment(number: signal.Signals, seed: int, tmp_path: Path) -> None:
    """One of four ranks is lost, which draft. With every other seed, pages are copied to a disk and back meanwhile."""
    rng, before, tiers = random.Random(seed), shared_memory(), dict[str, Any]()
    if seed % 2:
        tiers = {"host_cache_gb": 0.01, "disk_cache_path": str(tmp_path), "disk_cache_gb": 0.05}
        tiers |= {"max_total_tokens": 4 * 128, "max_length": 128}
    options: dict[str, Any] = {**RANKS, "tensor_parallel_size": 4, "num_threads": 4, **tiers}
    options |= {"speculative": ("draft", "eagle")[seed // 2], "speculative_control": "fixed"}
    one: dict[str, Any] = {"num_threads": 1, "max_running": 8}

    found: list[list[Any]] = []
    with LLM(**options) as llm:
        pids = lose(llm, rng.randint(1, 3), number, moment_s=rng.uniform(0, 2))
    assert not any(map(is_alive, pids))
    for whole in (options, one):  # what is on the disk is right
        with LLM(**whole) as llm:
            found.append([answer.tokens for answer in llm.generate(PROMPTS, mixed_sampling(4))])
    assert found[0] == found[1]
    assert shared_memory() == before
