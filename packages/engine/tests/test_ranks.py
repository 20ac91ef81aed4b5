"""Several processes that compute a model together: their answers, and what happens when one of them is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewood.engine.api import EngineConfig, Grammar, LogitsProcessor, PoolingParams, SamplingParams
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.observe.profiling import Profile
from pagewood.engine.offline.calls import EngineFailedError
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.ranks.group import Group
from pagewood.engine.runner.ranks.pulse import HEARTBEAT_S
from ranked_engines import PROMPTS, engine_of, generate_for, group_of, is_alive, mixed_sampling, one_process

PROGRAM = Path(__file__).parent / "support" / "ranked_program.py"
WAIT_S = 60
"""Then a process counts as hung."""


def has_ended(pid: int, *, limit_s: float) -> bool:
    """Return whether a process ends within a time, also if its parent does not know it."""
    ends_s = time.monotonic() + limit_s
    while time.monotonic() < ends_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def two_ranks(**options: Any) -> LLM:
    whole: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 2, "max_running": 8, **options}
    return LLM(**whole)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LLM]:
    with two_ranks() as llm:
        yield llm


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with one_process() as llm:
        yield llm


def test_tokens_are_those_of_one_process_with_and_without_hits(ranks: LLM, alone: LLM) -> None:
    prompts = PROMPTS * 2
    expected = [one.tokens for one in alone.generate(prompts, mixed_sampling(len(prompts)))]
    for _ in range(2):  # the second time, prompts are cached
        assert [one.tokens for one in ranks.generate(prompts, mixed_sampling(len(prompts)))] == expected
    assert ranks.counters().num_cached_pages > 0


def test_grammars_bind_all_ranks(ranks: LLM, alone: LLM) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=3, grammar=Grammar(kind="regex", text="(ab|cd)+ef"))
    expected = [one.tokens for one in alone.generate(PROMPTS, sampling)]
    assert [one.tokens for one in ranks.generate(PROMPTS, sampling)] == expected


def test_log_probabilities_are_close(ranks: LLM, alone: LLM) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=1)
    found, expected = (llm.generate(PROMPTS, sampling) for llm in (ranks, alone))
    for one, other in zip(found, expected, strict=True):
        for own, others in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert own is not None
            assert others is not None
            assert [a.token for a in own if a] == [a.token for a in others if a]
            np.testing.assert_allclose([a.logprob for a in own if a], [a.logprob for a in others if a], atol=1e-3)


def test_vectors_are_close(ranks: LLM, alone: LLM) -> None:
    vectors = [llm.embed(PROMPTS, PoolingParams(kind="mean")) for llm in (ranks, alone)]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-3)


def test_a_profile_has_all_ranks(ranks: LLM) -> None:
    profile = Profile(engine_of(ranks))
    profile.start()
    ranks.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
    recorded = profile.stop()
    names = [{span.name for span in recorded.spans if span.details.get("rank", 0) == rank} for rank in range(2)]
    assert names[0] == names[1]
    assert {"sum_ranks", "gather_ranks"} < names[0]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_threads": 4}, id="two threads each", marks=pytest.mark.slow),
        pytest.param({"speculative": "ngram"}, id="ngram", marks=pytest.mark.slow),
        pytest.param({"speculative": "suffix"}, id="suffix", marks=pytest.mark.slow),
        pytest.param({"speculative": "draft"}, id="draft", marks=pytest.mark.slow),
        pytest.param({"speculative": "eagle"}, id="eagle", marks=pytest.mark.slow),
        pytest.param({"weights": "int8", "activations": "float32"}, id="int8", marks=pytest.mark.slow),
        pytest.param(
            {"kv_cache_dtype": "int8", "overlap": False, "chunked_prefill_size": 7},
            id="int8 KV, no overlap",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"max_total_tokens": 256, "host_cache_gb": 0.01, "max_length": 120}, id="host cache", marks=pytest.mark.slow
        ),
    ],
)
def test_everything_else_works_with_ranks(options: dict[str, Any]) -> None:
    prompts = PROMPTS * 2
    outputs: list[list[Any]] = []
    for make in (one_process, two_ranks):
        with make(**options) as llm:
            outputs.append([])
            for num in range(2):
                found = llm.generate(prompts, mixed_sampling(len(prompts), 20 + num))
                outputs[-1] += [one.tokens for one in found]
            assert make is one_process or all(map(is_alive, group_of(llm).pids()))
            pids = [] if make is one_process else group_of(llm).pids()
        assert not any(map(is_alive, pids))
    assert outputs[0] == outputs[1]


def test_processors_are_called_by_every_rank(alone: LLM) -> None:
    sampling = SamplingParams(max_tokens=10, logits_processors=(LogitsProcessor(name="follow"),), ignore_eos=True)
    with two_ranks(logits_processors=(("follow", "logits_functions:follow_text"),)) as llm:
        found = llm.generate(PROMPTS, sampling)
    assert all(one.refusal is None and len(one.tokens) == 10 for one in found)
    assert [one.tokens for one in found] != [one.tokens for one in alone.generate(PROMPTS, mixed_sampling(4, 10))]


def test_a_rank_that_is_lost_while_it_loads_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def answers(group: Group, *args: Any, **options: Any) -> Any:
        pids.extend(group.pids())
        os.kill(pids[0], signal.SIGKILL)
        return waited_for(group, *args, **options)

    waited_for = Group.answers
    monkeypatch.setattr(Group, "answers", answers)
    with pytest.raises(RunnerLostError, match="rank 1 has ended with code -9"):
        two_ranks()
    assert pids
    assert not is_alive(pids[0])


@pytest.mark.usefixtures("patient_requests")
@pytest.mark.parametrize("speculative", ["off", pytest.param("draft", marks=pytest.mark.slow)])
def test_pages_of_all_ranks_come_back_from_host_and_disk(speculative: str, tmp_path: Path) -> None:
    """KV that another engine has computed is read by all ranks; wrong KV would change the tokens."""
    options = {"disk_cache_path": str(tmp_path), "disk_cache_gb": 0.05, "host_cache_gb": 0.02, "max_total_tokens": 256}
    prompt, others = list(range(100, 200)), [list(range(start, start + 100)) for start in range(200, 400, 50)]
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found: list[tuple[tuple[int, ...], int]] = []
    for _ in range(2):
        with two_ranks(**options, max_length=200, speculative=speculative) as llm:
            found += [(one.tokens, one.num_cached_tokens) for one in llm.generate(prompt, sampling)]
            llm.generate(others, sampling)  # evicts it
            found += [(one.tokens, one.num_cached_tokens) for one in llm.generate(prompt, sampling)]
    assert [num for _, num in found] == [0, 96, 96, 96]
    assert len({tokens for tokens, _ in found}) == 1


MOMENTS = [0.5, *[pytest.param(random.Random(seed).random(), marks=pytest.mark.slow) for seed in range(10)]]
"""Seconds after the first request, under load."""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment_s", MOMENTS)
def test_a_lost_rank_ends_the_group_with_a_typed_error(moment_s: float, number: signal.Signals) -> None:
    with two_ranks() as llm:
        (pid,) = group_of(llm).pids()
        timer = threading.Timer(moment_s, os.kill, (pid, number))
        timer.start()
        with pytest.raises(RunnerLostError, match="rank 1"):
            generate_for(llm, WAIT_S)
        with pytest.raises(EngineFailedError, match="rank 1"):
            llm.generate(PROMPTS)
    assert not is_alive(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arguments", [[], pytest.param(["by request"], marks=pytest.mark.slow)])
def test_other_ranks_end_with_rank_0(arguments: list[str], number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, str(PROGRAM), *arguments], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            pid = int(program.stdout.readline())
            for _ in range(20):  # if it is stopped between two steps, rank 1 waits for nothing
                time.sleep(0.5)
                program.send_signal(number)
                if has_ended(pid, limit_s=HEARTBEAT_S + 3):
                    break
                program.send_signal(signal.SIGCONT)
            assert has_ended(pid, limit_s=WAIT_S)
            if number is signal.SIGSTOP:
                program.send_signal(signal.SIGCONT)
                told = program.stdout.readline()
                assert "rank 0 has given no sign of life for" in told or "rank 0 does not take part in a step" in told
                assert program.wait(WAIT_S) == 0
        finally:
            program.kill()


def test_a_rank_that_is_lost_while_idle_is_noticed() -> None:
    with two_ranks() as llm:
        (pid,) = group_of(llm).pids()
        os.kill(pid, signal.SIGKILL)
        group = group_of(llm)
        while group.segment.ended[0] == 0:
            time.sleep(0.01)
        with pytest.raises(RunnerLostError, match="rank 1 has ended with code -9"):
            engine_of(llm).runner.check()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be >= 1, got 0"),
        ({"tensor_parallel_size": 2, "num_threads": 1}, "num_threads must be at least tensor_parallel_size 2, got 1"),
        (
            {"tensor_parallel_size": 2, "model_impl": "transformers"},
            "tensor_parallel_size must be 1 with model_impl transformers, got 2",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_a_model_that_cannot_be_divided_is_refused_before_a_process_is_started() -> None:
    with pytest.raises(ValueError, match="must be a multiple of tensor_parallel_size 3, got"):
        LLM(tensor_parallel_size=3, num_threads=3)


def test_more_ranks_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewood.engine.assembly.ranks.nodes.num_cores", lambda: 1)
    with pytest.raises(ValueError, match="tensor_parallel_size must be at most the 1 cores"):
        LLM(tensor_parallel_size=2)


def test_nothing_of_a_group_has_a_name() -> None:
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set[Path]()
    with two_ranks() as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1))
        assert not Path("/dev/shm").is_dir() or not [
            one for one in set(Path("/dev/shm").iterdir()) - before if "pagewood" in one.name
        ]
