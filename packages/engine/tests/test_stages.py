"""Processes that compute a model in stages: their answers, and what happens when one of them is lost or differs."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from group_in_threads import ranks_are_threads
from pagewood.engine.api import EngineConfig, Grammar, LogitsProcessor, PoolingParams, SamplingParams
from pagewood.engine.assembly import rank_process
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.observe.profiling import Profile
from pagewood.engine.offline.calls import EngineFailedError
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.cpu.compiled.exchange import LINE, NUM_LANES, PIECE, lanes
from pagewood.engine.runner.cpu.compiled.hand_over import _copy, _place
from pagewood.engine.runner.cpu.compiled.instruction import NumRows, Part, Unit, instruction
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import fetch_add, longs, read_shared, wait_for_rank
from pagewood.engine.runner.cpu.drafts.draft_model import DraftModel
from pagewood.engine.runner.cpu.program import relay
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.weights import loaded_model
from pagewood.engine.runner.ranks import following
from pagewood.engine.runner.ranks.rank_names import RankNames
from ranked_engines import PROMPTS, engine_of, generate_for, group_of, is_alive, mixed_sampling, one_process
from seeded_faults import Edit, seed_fault, slow_ones

WAIT_S = 60


def in_stages(**options: Any) -> LLM:
    whole: dict[str, Any] = {"pipeline_parallel_size": 2, "num_threads": 2, "max_running": 8, **options}
    return LLM(**whole)


@pytest.fixture(scope="module")
def stages() -> Iterator[LLM]:
    with in_stages() as llm:
        yield llm


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with one_process() as llm:
        yield llm


def test_tokens_are_those_of_one_process_with_and_without_hits(stages: LLM, alone: LLM) -> None:
    prompts = PROMPTS * 2
    expected = [one.tokens for one in alone.generate(prompts, mixed_sampling(len(prompts)))]
    for _ in range(2):  # the second time, prompts are cached
        assert [one.tokens for one in stages.generate(prompts, mixed_sampling(len(prompts)))] == expected
    assert stages.counters().num_cached_pages > 0


def test_grammars_bind_the_last_stage(stages: LLM, alone: LLM) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=3, grammar=Grammar(kind="regex", text="(ab|cd)+ef"))
    expected = [one.tokens for one in alone.generate(PROMPTS, sampling)]
    assert [one.tokens for one in stages.generate(PROMPTS, sampling)] == expected


def test_log_probabilities_are_the_same(stages: LLM, alone: LLM) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=1)
    found, expected = (llm.generate(PROMPTS, sampling) for llm in (stages, alone))
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == other.logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


def test_vectors_are_the_same(stages: LLM, alone: LLM) -> None:
    vectors = [llm.embed(PROMPTS, PoolingParams(kind="mean")) for llm in (stages, alone)]
    np.testing.assert_array_equal(vectors[0], vectors[1])


def test_a_profile_has_all_stages(stages: LLM) -> None:
    profile = Profile(engine_of(stages))
    profile.start()
    stages.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
    recorded = profile.stop()
    names = [{span.name for span in recorded.spans if span.details.get("rank", 0) == rank} for rank in range(2)]
    assert "send_rows" in names[0] - names[1]
    assert {"receive_rows", "draw"} <= names[1] - names[0]


def test_a_lost_rank_of_the_second_stage_ends_the_group_with_a_typed_error(stages: LLM) -> None:
    """The last test of these processes."""
    (pid,) = group_of(stages).pids()
    timer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(RunnerLostError, match=r"rank 1 \(stage 1\) has ended with code -9"):
        generate_for(stages, WAIT_S)
    with pytest.raises(EngineFailedError, match="rank 1"):
        stages.generate(PROMPTS)
    assert not is_alive(pid)


@pytest.mark.slow
@pytest.mark.parametrize("speculative", ["suffix", "eagle"])
def test_a_lost_last_stage_ends_the_group_with_its_drafts(speculative: str) -> None:
    with in_stages(speculative=speculative, speculative_control="fixed") as llm:
        llm.generate(PROMPTS, mixed_sampling(len(PROMPTS), 60))
        counts = llm.counters().speculation
        assert counts is not None
        assert counts.num_accepted > 20
        (pid,) = group_of(llm).pids()
        timer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(RunnerLostError, match=r"rank 1 \(stage 1\) has ended with code -9"):
            generate_for(llm, WAIT_S)
        with pytest.raises(EngineFailedError, match="rank 1"):
            llm.generate(PROMPTS)
    assert not is_alive(pid)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_any_lost_rank_of_stages_of_ranks_ends_the_group(rank: int, number: signal.Signals) -> None:
    if not rank:
        return  # test_ranks kills rank 0
    with in_stages(tensor_parallel_size=2, num_threads=4) as llm:
        pids = group_of(llm).pids()
        timer = threading.Timer(0.3 * rank, os.kill, (pids[rank - 1], number))
        timer.start()
        with pytest.raises(RunnerLostError, match=f"rank {rank}"):
            generate_for(llm, WAIT_S)
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_a_rank_that_is_lost_while_idle_is_noticed() -> None:
    with in_stages() as llm:
        (pid,) = group_of(llm).pids()
        os.kill(pid, signal.SIGKILL)
        group = group_of(llm)
        while group.segment.ended[0] == 0:
            time.sleep(0.01)
        with pytest.raises(RunnerLostError, match=r"rank 1 \(stage 1\) has ended with code -9"):
            engine_of(llm).runner.check()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_threads": 4}, id="two threads each"),
        pytest.param({"pipeline_parallel_size": 3, "num_threads": 3}, id="three stages"),
        pytest.param({"tensor_parallel_size": 2, "num_threads": 4}, id="two ranks each"),
        pytest.param({"overlap": True}, id="overlap"),
        pytest.param({"overlap": True, "tensor_parallel_size": 2, "num_threads": 4}, id="overlap, two ranks each"),
        pytest.param({"speculative": "ngram"}, id="ngram"),
        pytest.param({"speculative": "ngram", "speculative_control": "fixed"}, id="always ngram"),
        pytest.param({"speculative": "draft", "speculative_control": "fixed"}, id="draft"),
        pytest.param(
            {"speculative": "draft", "speculative_control": "fixed", "tensor_parallel_size": 2, "num_threads": 4},
            id="draft, two ranks each",
        ),
        pytest.param(
            {
                "speculative": "draft",
                "speculative_control": "fixed",
                "max_total_tokens": 256,
                "host_cache_gb": 0.01,
                "max_length": 120,
            },
            id="draft, host cache",
        ),
        pytest.param({"speculative": "suffix"}, id="suffix"),
        pytest.param({"speculative": "suffix", "speculative_control": "fixed", "overlap": True}, id="always suffix"),
        pytest.param({"speculative": "eagle"}, id="eagle"),
        pytest.param(
            {
                "speculative": "auto",
                "speculative_control": "fixed",
                "weights": "int8",
                "activations": "float32",  # those of eight bits have a scale for the part of each rank
                "tensor_parallel_size": 2,
                "num_threads": 4,
            },
            id="eagle, two ranks each, int8",
        ),
        pytest.param(
            {
                "speculative": "eagle",
                "speculative_control": "fixed",
                "max_total_tokens": 256,
                "host_cache_gb": 0.01,
                "max_length": 120,
                "pipeline_parallel_size": 4,
                "num_threads": 4,
            },
            id="eagle, host cache, four stages",
        ),
        pytest.param({"weights": "int8"}, id="int8"),
        pytest.param({"kv_cache_dtype": "int8", "chunked_prefill_size": 7}, id="int8 KV, chunks"),
        pytest.param({"max_total_tokens": 256, "host_cache_gb": 0.01, "max_length": 120}, id="host cache"),
    ],
)
def test_everything_else_works_with_stages(options: dict[str, Any]) -> None:
    prompts = PROMPTS * 2
    outputs: list[list[Any]] = []
    for make in (one_process, in_stages):
        own = {name: value for name, value in options.items() if make is in_stages or "parallel" not in name}
        with make(**own) as llm:
            outputs.append([])
            for num in range(2):
                found = llm.generate(prompts, mixed_sampling(len(prompts), 20 + num))
                outputs[-1] += [one.tokens for one in found]
            pids = [] if make is one_process else group_of(llm).pids()
        assert not any(map(is_alive, pids))
    assert outputs[0] == outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("speculative", ["ngram", "suffix", "draft", "eagle"])
def test_drafts_of_grammars_are_verified_by_the_last_stage(speculative: str) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0.0, grammar=Grammar(kind="regex", text="[ab ]{60}"))
    found: list[list[Any]] = []
    for make in (one_process, in_stages):
        with make(speculative=speculative, speculative_control="fixed") as llm:
            found.append([one.tokens for one in llm.generate(PROMPTS, sampling)])
            counts = llm.counters().speculation
            assert counts is not None
            assert counts.num_accepted > 0
    assert found[0] == found[1]


@pytest.mark.slow
def test_processors_are_called_by_the_last_stage(alone: LLM) -> None:
    sampling = SamplingParams(max_tokens=10, logits_processors=(LogitsProcessor(name="follow"),), ignore_eos=True)
    found: list[list[Any]] = []
    for make in (one_process, in_stages):
        with make(logits_processors=(("follow", "logits_functions:follow_text"),)) as llm:
            found.append([one.tokens for one in llm.generate(PROMPTS, sampling)])
    assert found[0] == found[1]
    assert found[0] != [one.tokens for one in alone.generate(PROMPTS, mixed_sampling(4, 10))]


@pytest.mark.slow
@pytest.mark.usefixtures("patient_requests")
def test_pages_of_all_stages_come_back_from_host_and_disk(tmp_path: Path) -> None:
    """KV that another engine has computed is read by all stages; wrong KV would change the tokens."""
    options = {"disk_cache_path": str(tmp_path), "disk_cache_gb": 0.05, "host_cache_gb": 0.02, "max_total_tokens": 256}
    prompt, others = list(range(100, 200)), [list(range(start, start + 100)) for start in range(200, 400, 50)]
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found: list[tuple[tuple[int, ...], int]] = []
    for _ in range(2):
        with in_stages(**options, max_length=200) as llm:
            found += [(one.tokens, one.num_cached_tokens) for one in llm.generate(prompt, sampling)]
            llm.generate(others, sampling)  # evicts it
            found += [(one.tokens, one.num_cached_tokens) for one in llm.generate(prompt, sampling)]
    assert [num for _, num in found] == [0, 96, 96, 96]
    assert len({tokens for tokens, _ in found}) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be >= 1, got 0"),
        (
            {"num_threads": 3, "tensor_parallel_size": 2},
            "num_threads must be at least tensor_parallel_size 2 times pipeline_parallel_size 2, got 3",
        ),
        ({"model_impl": "transformers"}, "model_impl must be auto or native with pipeline_parallel_size 2, got"),
        ({"num_continuous_decode_steps": 2}, "num_continuous_decode_steps must be 1 with pipeline_parallel_size 2"),
        ({"expert_load": "ranks"}, "expert_load must be off with pipeline_parallel_size 2, got 'ranks'"),
        (
            {"enable_dp_attention": True, "tensor_parallel_size": 2},
            "enable_dp_attention must be False with pipeline_parallel_size 2, got True",
        ),
        ({"target_step_s": 0.1}, "target_step_s must be None with pipeline_parallel_size 2, got 0.1"),
        ({"refuse_late": True}, "refuse_late must be False with pipeline_parallel_size 2, got True"),
        ({"decision_log": "a.log"}, "decision_log must be None with pipeline_parallel_size 2, got 'a.log'"),
    ],
)
def test_what_stages_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"pipeline_parallel_size": 2, **options})


def test_more_stages_than_layers_are_refused_before_a_process_is_started() -> None:
    with pytest.raises(ValueError, match=r"pipeline_parallel_size must be at most .* got 50"):
        LLM(pipeline_parallel_size=50, num_threads=50)


def test_ranks_are_named_with_their_stages() -> None:
    names = RankNames(4, 2)
    assert [names[rank] for rank in (1, 2)] == ["rank 1 (stage 0)", "rank 2 (stage 1)"]
    assert names.joined([2, 3]) == "ranks 2, 3 (stage 1)"
    assert names.joined([1, 2]) == "ranks 1, 2 (stages 0, 1)"
    assert [names.label(rank) for rank in (1, 2)] == ["1-stage-0", "2-stage-1"]
    assert RankNames(4, 2, 2).joined([1, 2, 3]) == "node 0 rank 1 (stage 0), node 1 ranks 2, 3 (stage 1)"
    assert [RankNames(2).label(1), RankNames(2)[1], RankNames(2).joined([0, 1])] == ["1", "rank 1", "ranks 0, 1"]


@instruction(lanes)
@inlined
def receive_last(
    out_at: Any, size: Any, places_at: Any, sent_at: Any, taken_at: Any, ended_at: Any, num_rows: NumRows, part: Part
) -> None:  # fmt: skip
    """Like `receive_rows`, but it reads what was sent before."""
    start, end, own = part * PIECE, num_rows * size, LINE * part
    sent, taken = longs(sent_at, 0), longs(taken_at, 0)
    while start < end:
        num, number = min(PIECE, end - start), read_shared(taken, own)
        if not wait_for_rank(sent, own, number + 1, longs(ended_at, 1)):
            break
        _copy(_place(places_at, part, max(0, number - 1)), out_at + 4 * start, num)
        fetch_add(taken, own, 1)
        start += NUM_LANES * PIECE


STALE = Unit("stale", receive_last)
_SKIP = """number += 1
                if number == 9:
                    continue"""
_OLD_PAGES = """assert isinstance(batch, Batch)
                batch.page_ids[:] = 0"""
_OTHER_SEED = """assert isinstance(batch, Batch)
                batch.sampling.words[:, 0] += 1"""
FAULTS: dict[str, tuple[list[Edit], str]] = {
    "a stage skips a batch": (
        [(following, "_follow", "number += 1", _SKIP)], "rank 1 has computed another batch than rank 0 in step 9"
    ),
    "a stage takes the hidden states of the step before": (
        [
            (relay.ChannelRelay, "receive", "hand_over.receive_rows", "hand_over.receive_last"),
            (loaded_model, "_load", "EXCHANGE, HAND_OVER", "EXCHANGE, HAND_OVER, hand_over.STALE"),
        ],
        "rank 1 has received other hidden states than rank 0 sent in step",
    ),
    "tokens are not fed back": (
        [(CPURunner, "learn", "places[:] = result.tokens[at : at + num]", "pass")],
        "rank 1 has other tokens or hidden states than rank 0 after step",
    ),
    "lengths are not fed back": (
        [(CPURunner, "learn", "rows.lengths[row] = first + num", "pass")],
        "rank 1 has other tables of rows than rank 0 after step 16",
    ),
    "page tables are old": (
        [(following, "_follow", "assert isinstance(batch, Batch)", _OLD_PAGES)],
        "rank 1 has other tables of rows than rank 0 after step 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_ones(FAULTS, "a stage takes the hidden states of the step before"))
def test_a_stage_that_differs_ends_its_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edits, message = FAULTS[name]
    monkeypatch.setattr(relay.hand_over, "receive_last", receive_last, raising=False)  # for the code of the faults
    monkeypatch.setattr(relay.hand_over, "STALE", STALE, raising=False)
    monkeypatch.setattr(loaded_model, "hand_over", relay.hand_over, raising=False)
    ranks_are_threads(monkeypatch)
    seed_fault(edits, monkeypatch)
    with in_stages(max_total_tokens=1024) as llm, pytest.raises(RunnerLostError, match=message):
        llm.generate(PROMPTS, mixed_sampling(len(PROMPTS), 40))


def test_a_layer_that_two_stages_compute_is_found_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)
    fault: Edit = (rank_process, "_runner", "stages_of(begin.cuts,", "stages_of([begin.cuts[0] - 1],")
    seed_fault([fault], monkeypatch)
    with pytest.raises(ValueError, match=r"rank 1 must have layers \d+ to \d+ of \d+, got layers"):
        in_stages()


@pytest.mark.slow
def test_another_draft_in_the_last_stage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be compared with the tokens that the target draws behind the drafts of the first stage."""
    ranks_are_threads(monkeypatch)
    noted = "tape.write(passes.note, scope.sampled, scope=scope, drawn=drawn, shift=0)"
    edit: Edit = (DraftModel, "record_drafts", noted, f"self._target.stage.is_last or {noted}")
    seed_fault([edit], monkeypatch)
    with (
        in_stages(speculative="draft", speculative_control="fixed", max_total_tokens=1024) as llm,
        pytest.raises(RunnerLostError, match="rank 1 has other tokens or drafts than rank 0 in step"),
    ):
        llm.generate(PROMPTS, mixed_sampling(len(PROMPTS), 40))


@pytest.mark.slow
def test_another_seed_in_the_last_stage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of its ranks draws with it; with all of them, the tokens would be those of that seed."""
    ranks_are_threads(monkeypatch)
    edit: Edit = (
        following, "_follow", "assert isinstance(batch, Batch)",
        """assert isinstance(batch, Batch)
                if rank == 3:
                    batch.sampling.words[:, 0] += 1""",
    )  # fmt: skip
    seed_fault([edit], monkeypatch)
    with (
        in_stages(tensor_parallel_size=2, num_threads=4, max_total_tokens=1024) as llm,
        pytest.raises(RunnerLostError, match="rank 3 has other tokens or hidden states than rank 0"),
    ):
        llm.generate(PROMPTS, mixed_sampling(len(PROMPTS), 40))
