"""Every family in stages of the CPU: its tokens are those of one process, in chunks, batches and after hits."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from asked_twice import outputs
from families.case import build
from families.registry import DIVIDED
from group_in_threads import ranks_are_threads
from pagewood.engine.api import Abort, EngineConfig, FinishReason, SamplingParams, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.models.config import ModelConfig

FEW = ("gemma4-small", "olmo2")
PARAMETERS = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in DIVIDED]


def answered(folder: Path, num_stages: int, *, num_ranks: int = 1, expert_parallel: bool = False) -> list[list[int]]:
    """Return what an engine answers."""
    config = EngineConfig(
        model=str(folder), num_threads=num_stages * num_ranks, pipeline_parallel_size=num_stages,
        tensor_parallel_size=num_ranks, expert_parallel=expert_parallel, max_running=4, chunked_prefill_size=16,
        page_size=4, max_total_tokens=1024,
    )  # fmt: skip
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    return outputs(build_engine(config, inbox=inbox, outbox=outbox), inbox, outbox)


@pytest.mark.parametrize("name", PARAMETERS)
def test_tokens_are_those_of_one_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two stages, with as many as the model allows up to four, and with two of two ranks."""
    build(DIVIDED[name], tmp_path)
    ranks_are_threads(monkeypatch)
    expected = answered(tmp_path, 1)
    most = min(4, 1 + len(ModelConfig.from_folder(tmp_path).cuts))
    assert most > 1
    assert answered(tmp_path, 2) == expected
    if name in FEW:
        return
    if most > 2:
        assert answered(tmp_path, most) == expected
    assert answered(tmp_path, 2, num_ranks=2) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek3"])
def test_stages_of_ranks_with_whole_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(DIVIDED[name], tmp_path)
    ranks_are_threads(monkeypatch)
    assert answered(tmp_path, 2, num_ranks=2, expert_parallel=True) == answered(tmp_path, 1)


def traffic(config: EngineConfig, seed: int) -> tuple[dict[str, list[int]], dict[str, FinishReason], int]:
    """Return tokens and ends of random requests, some of which are aborted, and how many were preempted."""
    rng, inbox, outbox = random.Random(seed), MemoryInbox(), MemoryOutbox()
    engine = build_engine(config, inbox=inbox, outbox=outbox)
    arrivals: list[tuple[int, Submit, int | None]] = []
    shared = [rng.randrange(3, 90) for _ in range(20)]
    for index in range(24):
        prompt = shared[: rng.choice((0, 0, 8, 20))] + [rng.randrange(3, 90) for _ in range(rng.randint(1, 40))]
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 20), temperature=float(index % 2), seed=index, ignore_eos=True,
            logprobs=2 if index % 5 == 0 else None,
        )  # fmt: skip
        submit = Submit(request_id=str(index), tokens=np.array(prompt, "<i4").tobytes(), sampling=sampling)
        step = rng.randrange(30)
        arrivals.append((step, submit, step + rng.randint(1, 25) if rng.random() < 0.2 else None))
    tokens: dict[str, list[int]] = {submit.request_id: [] for _, submit, _ in arrivals}
    ends: dict[str, FinishReason] = {}
    pending: Pending | None = None
    step = 0
    try:
        while len(ends) < len(arrivals) or pending is not None:
            for at, submit, abort_at in arrivals:
                if at == step:
                    inbox.put(submit)
                if abort_at == step:
                    inbox.put(Abort(request_id=submit.request_id))
            pending = engine.advance(pending)
            for delta in outbox.take():
                tokens[delta.request_id] += delta.tokens
                if delta.finish is not None:
                    ends[delta.request_id] = delta.finish
            step += 1
        num_preempted = engine.counters().num_preempted
        assert engine.violation() is None
    finally:
        engine.close()
    return tokens, ends, num_preempted


@pytest.mark.parametrize(
    ("num_stages", "num_ranks", "seeds"),
    [
        (2, 1, range(1)),
        pytest.param(2, 1, range(1, 6), marks=pytest.mark.slow),
        pytest.param(3, 1, range(5), marks=pytest.mark.slow),
        pytest.param(2, 2, range(5), marks=pytest.mark.slow),
    ],
)
def test_random_traffic_with_chunks_preemption_and_aborts(
    num_stages: int, num_ranks: int, seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(DIVIDED["qwen3"], tmp_path)
    ranks_are_threads(monkeypatch)
    small = EngineConfig(
        model=str(tmp_path), num_threads=num_stages * num_ranks, pipeline_parallel_size=num_stages,
        tensor_parallel_size=num_ranks, max_running=6, chunked_prefill_size=8, page_size=4, max_total_tokens=160,
        max_length=80, schedule_conservativeness=0.05,
    )  # fmt: skip
    whole = EngineConfig(model=str(tmp_path), num_threads=1, max_running=6, page_size=4, max_total_tokens=2048)
    num_preempted = 0
    for seed in seeds:
        expected, others, _ = traffic(whole, seed)
        found, ends, num = traffic(small, seed)
        num_preempted += num
        for name, tokens in found.items():
            both = min(len(tokens), len(expected[name]))
            assert tokens[:both] == expected[name][:both]
            if FinishReason.ABORT not in (ends[name], others[name]):
                assert tokens == expected[name]
    assert num_preempted > 0
