"""Drafts that the last stage of a model makes for all of its stages: what they are, and that they change no answer.

`test_stages.py` has real processes. The faults in `FAULTS` are seeded one at a time, and each is found.
"""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from group_in_threads import ranks_are_threads
from node_threads import free_port
from pagewood.engine.api import SamplingParams
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cpu import runner
from pagewood.engine.runner.cpu.drafts import ahead
from pagewood.engine.runner.cpu.drafts.ahead import HeldDrafts, drafts_of, grants_ahead
from pagewood.engine.runner.cpu.program.passes import Grants, RowTables
from pagewood.engine.runner.cpu.runner import CPURunner
from scenarios.drawing import with_grammars, with_stages
from seeded_faults import Edit, seed_fault
from speculating import (
    Drafter,
    Report,
    arrival,
    make,
    plain_engines,
    random_drafting,
    random_traffic,
    run,
    traffic,
)
from stand_ins.tiny_heads import drafted, folders_of, prompts_of


@pytest.fixture(scope="module", autouse=True)
def oracles() -> Iterator[None]:
    """Keep the plain engines until the last test."""
    with plain_engines():
        yield


def test_held_drafts_belong_to_one_place_of_one_request() -> None:
    tokens, ends = np.zeros((3, 20), np.int32), np.array([5, 7], np.int32)
    held, counts = HeldDrafts(tokens), np.zeros(2, np.int32)

    def found(*most: int) -> list[int]:
        held.draft(np.array([2, 0], np.int32), ends, np.array(most, np.int32), counts)
        return counts.tolist()

    assert found(4, 4) == [0, 0]
    held.hold(2, 5, np.array([8, 9, 3, -1], np.int32))
    held.hold(0, 6, np.array([8, -1], np.int32))
    assert tokens[2, 5:8].tolist() == [8, 9, 3]
    assert found(4, 4) == [3, 0]  # row 0 has got a token since
    assert found(2, 4) == [2, 0]
    held.begin(2, 0, 5)
    assert found(4, 4) == [0, 0]


def test_next_steps_have_rows_with_tokens_and_drafts_in_their_pages() -> None:
    rows = RowTables.allocate(num_rows=4, num_tokens=20, num_pages=5)
    rows.lengths[:] = [9, 12, 6, 19]
    rows.tokens[:] = np.arange(80).reshape(4, 20)
    sampled = np.array([0, 2, 3, 4], np.int32)
    grants = Grants(
        rows=np.array([2, 0, 1, 3, 0], np.int32), starts=np.array([4, 0, 8, 17, 7], np.int32),
        counts=np.array([1, 3, 1, 1, 1], np.int32), sampled=sampled, promised=np.array([1, 5, 1, 4], np.int32),
        sampling=SamplingArrays.of([SamplingParams()] * 4, list(range(4))),
    )  # fmt: skip
    counts = np.array([0, 4, 1, 2], np.int32)
    found, places = grants_ahead(grants, counts, rows, most=6, page_size=4)
    # Row 1 has pages up to 16; row 3 up to 20, but no more tokens than 20; row 0 up to 12.
    assert (places.tolist(), found.rows.tolist()) == ([1, 2, 3], [1, 3, 0])
    assert (found.starts.tolist(), found.counts.tolist()) == ([11, 18, 8], [7, 2, 6])
    assert found.sampling.seeds.tolist() == [1, 2, 3]
    assert grants_ahead(grants, counts, rows, most=6, page_size=None)[0].counts.tolist() == [7, 2, 7]
    found.counts[0] = 3
    assert drafts_of(found, places, rows, num_sampled=4, most=6)[:3].tolist() == [
        [-1] * 6, [32, 33, -1, -1, -1, -1], [79, -1, -1, -1, -1, -1]
    ]  # fmt: skip


def drafts_made(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], tuple[list[int], int]]:
    """Return a table that gets the drafts that are made behind tokens, and where the head's context begins.

    It begins behind the start of a row if a chunk of its prompt was computed in a step without the head, which depends
    on when results arrive.
    """
    made: dict[tuple[int, ...], tuple[list[int], int]] = {}
    draft_ahead = CPURunner._draft_ahead

    def note(self: Any, step: Any, yielded: Any) -> Any:
        ahead, rows = draft_ahead(self, step, yielded), self._rows
        for row, drafts in zip(step.batch.rows[step.batch.sampled].tolist(), ahead.tolist(), strict=True):
            if drafts[0] >= 0:
                tokens = rows.tokens[row, : rows.lengths[row]].tolist()
                made[tuple(tokens)] = [token for token in drafts if token >= 0], int(self._drafter._slots.begins[row])
        return ahead

    monkeypatch.setattr(CPURunner, "_draft_ahead", note)
    return made


def on_hosts(num_nodes: int) -> dict[str, Any]:
    """Return the options of node 0 of several; nothing for one."""
    return {"nnodes": num_nodes, "master_addr": f"127.0.0.1:{free_port()}"} if num_nodes > 1 else {}


def check_drafts(kind: str, num_stages: int, monkeypatch: pytest.MonkeyPatch, *, num_nodes: int = 1) -> None:
    """Compare the drafts of a head behind the last stage with those of the head in plain torch, also after a hit."""
    ranks_are_threads(monkeypatch)
    made, (model, head) = drafts_made(monkeypatch), folders_of(kind)
    prompts = prompts_of(4)[1:]
    arrivals = [
        arrival(prompt, at_step=at_step, max_tokens=9, temperature=0.0) for at_step in (0, 40) for prompt in prompts
    ]
    report = run(
        traffic(arrivals, num_pages=100, page_size=4, chunked_prefill_size=8, pipeline_parallel_size=num_stages),
        model=model, drafter=Drafter(kind="eagle", folder=None if head == model else head), num_tokens=3,
        num_threads=num_stages // num_nodes, **on_hosts(num_nodes),
    )  # fmt: skip
    assert report.num_cached_tokens > 20
    assert report.counts.num_drafted > 20
    assert sum(len(drafts) for drafts, _ in made.values()) > 20
    begins = [begin for _, begin in made.values() if begin]
    assert not begins or report.counts.num_short > 0
    assert len(begins) < len(made) / 2
    for tokens, (drafts, begin) in made.items():
        assert drafts == drafted(kind, list(tokens), len(drafts), begin=begin)[0]


@pytest.mark.parametrize(
    ("kind", "num_stages"),
    [
        ("eagle", 4),
        pytest.param("eagle", 2, marks=pytest.mark.slow),
        ("mtp", 2),
        pytest.param("mtp", 4, marks=pytest.mark.slow),
        pytest.param("experts", 2, marks=pytest.mark.slow),
        pytest.param("latents", 2, marks=pytest.mark.slow),
    ],
)
def test_drafts_are_those_of_the_head(kind: str, num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of the first layers go through all stages to the head."""
    check_drafts(kind, num_stages, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "num_stages", "num_nodes"),
    [
        ("eagle", 4, 2), ("mtp", 2, 2), ("eagle", 2, 2), ("eagle", 4, 4), ("mtp", 4, 2), ("experts", 2, 2),
        ("latents", 2, 2),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_drafts_of_a_head_on_another_host(
    kind: str, num_stages: int, num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of layers on one host go to the head on another one, and its drafts to all stages."""
    check_drafts(kind, num_stages, monkeypatch, num_nodes=num_nodes)


def serve(rng: random.Random, kind: str, architecture: str, num_stages: int, *, num_nodes: int = 1) -> Report:
    """Serve random traffic, in part with grammars, int8 KV and a host cache; check it against plain decoding."""
    model, drafter = make(kind, architecture)
    scenario = with_stages(random_traffic(rng, overlap=rng.random() < 0.3), rng)
    if kind != "cyclic" and rng.random() < 0.4:  # a mask breaks the cycle
        scenario = with_grammars(scenario, rng)
    options: dict[str, Any] = {}
    if rng.random() < 0.25:
        options["kv_cache_dtype"] = "int8"
    if scenario.config.prefix_cache and rng.random() < 0.3:
        options["host_cache_gb"] = rng.choice((0.0002, 0.002))
    config = replace(scenario.config, pipeline_parallel_size=num_stages)
    return run(
        replace(scenario, config=config), **options, model=model, drafter=drafter, num_tokens=rng.choice((1, 2, 4, 8)),
        num_threads=num_stages // num_nodes, make_drafting=random_drafting(rng),
        control=rng.choice(("fixed", "adaptive")), **on_hosts(num_nodes),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "architecture", "seeds", "num_stages", "num_nodes"),
    [
        (*given, 2, 1) for given in (("suffix", "qwen3", range(2)), ("cyclic", "llama", range(3)))
    ] + [
        pytest.param(*given, marks=pytest.mark.slow) for given in (
            ("suffix", "llama", range(12), 2, 1), ("suffix", "gemma3", range(12), 2, 1),
            ("eagle", "qwen2", range(12), 2, 1), ("mtp", "mimo", range(12), 2, 1), ("mtp", "glm4-moe", range(12), 2, 1),
            ("cyclic", "llama", range(3, 40), 2, 1),
            ("suffix", "llama", range(12), 2, 2), ("eagle", "qwen2", range(12), 2, 2),
            ("mtp", "mimo", range(12), 2, 2), ("cyclic", "llama", range(40, 75), 2, 2),
        )
    ],
)  # fmt: skip
def test_answers_are_those_of_plain_decoding(
    kind: str, architecture: str, seeds: range, num_stages: int, num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, in chunks, after hits, preemption and aborts; of "cyclic" it is known which drafts are right,
    and exactly these must be accepted."""
    ranks_are_threads(monkeypatch)
    reports = [serve(random.Random(seed), kind, architecture, num_stages, num_nodes=num_nodes) for seed in seeds]
    assert sum(report.num_preempted for report in reports) > 0
    assert sum(report.num_cached_tokens for report in reports) > 50
    assert sum(report.counts.num_accepted for report in reports) > 3


LATE = "num = int((drafts >= 0).sum())"
FAULTS: dict[str, tuple[str, list[Edit], str]] = {
    "drafts a step late": (
        "cyclic", [(HeldDrafts, "hold", LATE, f"drafts, LATE[id(self), row] = LATE.get((id(self), row), drafts), "
                    f"drafts; {LATE}")], "0 of .* drafts accepted|has other tokens or drafts",
    ),
    "another draft in the last stage": (
        "cyclic", [(CPURunner, "learn", "result.ahead[i]", "result.ahead[i] // (1 + is_last)")],
        "rank 1 has other tokens or drafts than rank 0 in step",
    ),
    "drafts of another row": (
        "cyclic", [(runner, "drafts_of", "rows.tokens[row, end", "rows.tokens[int(grants.rows[0]), end")],
        "drafts accepted",
    ),
    "a state of the layer before": (
        "eagle", [(Decoder, "states", "if index in kept:", "if index + (not is_last) in kept:"),
                  (Decoder, "states", "states[index] = ops", "states[index + (not is_last)] = ops")], r"assert \[",
    ),
    "states in another order": ("eagle", [(Decoder, "_hand_over", "*states", "*states[::-1]")], r"assert \["),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, edits, message = FAULTS[name]
    monkeypatch.setattr(ahead, "LATE", {}, raising=False)
    seed_fault(edits, monkeypatch)

    def try_it() -> None:
        if kind == "eagle":
            check_drafts(kind, 4 if "order" in name else 2, monkeypatch)
        ranks_are_threads(monkeypatch)
        for seed in range(6):
            serve(random.Random(seed), kind, "llama", 2)

    with pytest.raises((AssertionError, RunnerLostError), match=message):
        try_it()
