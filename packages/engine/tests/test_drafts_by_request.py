"""Drafts of models and heads where ranks divide attention by request: the same as in one process, and so the answers.

Ranks are threads here; `test_attention_by_request.py` has real processes. The faults in `FAULTS` are seeded one at a
time, and each is found.
"""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asked_twice import outputs
from group_in_threads import ranks_are_threads
from pagewood.engine.api import EngineConfig
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.core.steps.speculation import SpeculationCounts
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.runner.cpu.compiled import exchange
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.drafts import valid_slots
from pagewood.engine.runner.cpu.drafts.draft_model import DraftModel
from pagewood.engine.runner.cpu.drafts.drafting import ProgramDrafter
from pagewood.engine.runner.cpu.drafts.eagle import EagleDrafter
from pagewood.engine.runner.cpu.drafts.valid_slots import ValidSlots
from pagewood.engine.runner.cpu.program.division import DividedPass, RequestDivision
from pagewood.engine.runner.cpu.program.passes import RowTables
from pagewood.engine.runner.cpu.program.tape import integers_at
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.ranks.segment import Segment, segment_bytes
from pagewood.engine.testing.random_drafting import RandomDrafting
from scenarios.drawing import with_grammars, with_pools
from scenarios.scenario import Arrival, Scenario
from seeded_faults import Edit, by_turns, seed_fault
from speculating import (
    Report,
    arrival,
    make,
    plain_answer,
    plain_engines,
    random_drafting,
    random_traffic,
    run,
    traffic,
)

ONE: dict[str, Any] = {}
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "enable_dp_attention": True}
Drafts = list[tuple[list[int], list[int]]]
"""Texts, and what was drafted behind each, in the order of steps."""


@pytest.fixture(scope="module", autouse=True)
def oracles() -> Iterator[None]:
    """Keep the plain engines until the last test."""
    with plain_engines():
        yield


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads."""
    ranks_are_threads(monkeypatch)


# --- what ranks give each other ---


def test_values_come_from_the_ranks_that_have_them() -> None:
    """More than a piece, several times; when the group ends, those of others stay, and nothing waits."""
    count, num = 3, exchange.PIECE + 100
    segment = Segment.in_memory(np.zeros(segment_bytes(count), np.uint8), count)
    exchange.gather_values.compile()
    tables = RowTables.allocate(num_rows=num, num_tokens=1, num_pages=1)
    tables.pages[:, 0] = np.random.default_rng(1).integers(0, 10 * count, num)
    owners, rows = tables.pages[:, 0] // 10, np.arange(num, dtype=np.int32)
    divisions = [RequestDivision.over(segment.exchange(rank), tables, num_pages=10) for rank in range(count)]

    def gathered(rank: int) -> list[np.ndarray]:
        return [divisions[rank].gather(rows * (1 + rank) + turn, rows) for turn in range(4)]

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(gathered, range(count)))
    for of_rank in found:
        for turn, values in enumerate(of_rank):
            np.testing.assert_array_equal(values, rows * (1 + owners) + turn)
    segment.end(2, "seeded")
    np.testing.assert_array_equal(divisions[0].gather(rows, rows), rows)


# --- drafts, one by one ---


def note_drafts(monkeypatch: pytest.MonkeyPatch) -> dict[CPURunner, Drafts]:
    """Return a table that gets the drafts that each rank verifies, if it has a drafter."""
    made: dict[CPURunner, Drafts] = {}
    original = CPURunner._work_through

    def note(self: CPURunner, step: Any, scopes: Any, counts: Any, first: int, last: int | None) -> None:
        original(self, step, scopes, counts, first, last)
        if self._drafter is None:
            return
        scope, grants, own = scopes[self._pass.scope.index], step.grants, made.setdefault(self, [])
        starts, offsets = (integers_at(scope[c], len(grants.rows) + 1) for c in (Column.STARTS, Column.OFFSETS))
        tokens = integers_at(scope[Column.TOKENS], int(offsets[-1]))
        for g, promised in zip(grants.sampled.tolist(), grants.promised.tolist(), strict=True):
            if promised > 1:
                text = self._rows.tokens[grants.rows[g], : starts[g] + 1].tolist()
                own.append((text, tokens[offsets[g] + 1 : offsets[g + 1]].tolist()))

    monkeypatch.setattr(CPURunner, "_work_through", note)
    return made


def repeated(model: Path, num_ranks: int, *, has_answers: bool, **options: Any) -> Scenario:
    """Return traffic of prompts that come again, also with their answers; pages of each rank are enough for all."""
    rng, arrivals = random.Random(1), list[Arrival]()
    for number, size in enumerate((24, 16, 3, 22, 9)):
        prompt = [rng.randrange(1, 40) for _ in range(size)]
        sampling: dict[str, Any] = {"max_tokens": 16, "temperature": 0.8 * (number % 2), "seed": number}
        first = arrival(prompt, at_step=number, **sampling)
        answer = plain_answer(model, False, first.prompt, first.sampling).tokens
        arrivals += [first, arrival(prompt, at_step=50 + number, **sampling)]
        if has_answers:
            arrivals.append(arrival([*prompt, *answer, 3, 5, 8], at_step=100 + number, **sampling))
    if num_ranks > 1:
        options |= {"tensor_parallel_size": num_ranks, "enable_dp_attention": True}
    return traffic(arrivals, num_pages=64 * 4, page_size=4, chunked_prefill_size=16, max_running=8, **options)


def without_times(counts: SpeculationCounts) -> SpeculationCounts:
    return replace(counts, draft_s=0.0, verify_s=0.0)


def check_drafts(
    kind: str, architecture: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch, *, overlap: bool = True,
    is_fixed: bool = True,
) -> Report:  # fmt: skip
    """Compare drafts, and all that is counted of them, with those of one process; return what was counted.

    Requests of a draft model do not come with their answers: by chance they may get pages in which a request before
    them has computed the same, which need not be computed again.
    """
    model, drafter = make(kind, architecture)
    reports, drafts = list[Report](), list[dict[CPURunner, Drafts]]()
    for count in (1, num_ranks):
        with monkeypatch.context() as patch:
            drafts.append(note_drafts(patch))
            scenario = repeated(model, count, has_answers=drafter.kind == "eagle", overlap=overlap)
            report = run(
                scenario, model=model, drafter=drafter, num_tokens=3, num_threads=num_ranks,
                make_drafting=None if is_fixed else lambda config: RandomDrafting(max_tokens=3, seed=4),
            )  # fmt: skip
            reports.append(report)
    (expected,) = drafts[0].values()
    assert sum(len(some) for _, some in expected) > 50
    assert list(drafts[1].values()) == [expected] * num_ranks
    assert without_times(reports[1].counts) == without_times(reports[0].counts)
    assert reports[1].drafter == reports[0].drafter
    assert reports[1].cached == reports[0].cached
    assert reports[1].num_cached_tokens > 40
    return reports[1]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "architecture", "num_ranks"),
    [
        ("perturbed", "qwen2", 2),
        ("mtp", "deepseek3", 2),
        ("eagle", "llama", 4),
        pytest.param("self", "deepseek3", 4, marks=SLOW),
        pytest.param("unrelated", "gemma3", 2, marks=SLOW),
        pytest.param("mtp", "deepseek3", 4, marks=SLOW),
        pytest.param("mtp", "glm4-moe", 2, marks=SLOW),
        pytest.param("mtp", "mimo", 4, marks=SLOW),
        pytest.param("eagle", "qwen3", 2, marks=SLOW),
    ],
)
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=SLOW), True])
def test_drafts_and_counts_are_those_of_one_process(
    kind: str, architecture: str, num_ranks: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, in chunks, after hits, and behind answers."""
    check_drafts(kind, architecture, num_ranks, monkeypatch, overlap=overlap)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("eagle", "llama"), pytest.param("mtp", "deepseek3", marks=SLOW), pytest.param("self", "qwen2", marks=SLOW)],
)
def test_gaps_in_the_context_of_heads_are_counted_on_all_ranks(
    kind: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without drafts, which heads leave out, so that rows catch up or go on with a shorter context."""
    report = check_drafts(kind, architecture, 2, monkeypatch, is_fixed=False)
    assert report.counts.num_rebuilt > 0
    if kind != "self":
        assert report.counts.num_short > 0


# --- random traffic ---


def serve(rng: random.Random, kind: str, architecture: str) -> Report:
    """Serve random traffic, in part with grammars and a host cache; check it against plain decoding."""
    model, drafter = make(kind, architecture)
    scenario = with_pools(random_traffic(rng, overlap=rng.random() < 0.5), rng, 2, 2, 4)
    if kind not in ("self", "cyclic") and rng.random() < 0.4:  # masks come after drafts
        scenario = without_reports(with_grammars(scenario, rng))
    options: dict[str, Any] = {}
    if scenario.config.prefix_cache and rng.random() < 0.4:
        options["host_cache_gb"] = rng.choice((0.0002, 0.002))
        options["cache_write_policy"] = rng.choice(("write_through", "write_through_selective", "write_back"))
    with pytest.MonkeyPatch.context() as patch:
        drafters = all_drafters(patch)
        report = run(
            scenario, **options, model=model, drafter=drafter, num_tokens=rng.choice((1, 2, 4, 8)),
            num_threads=scenario.num_pools, make_drafting=random_drafting(rng),
            control=rng.choice(("fixed", "adaptive")),
        )  # fmt: skip
    assert len(drafters) == scenario.num_pools
    assert {one.counts for one in drafters} == {report.drafter}, "ranks have counted other numbers"
    return report


def without_reports(scenario: Scenario) -> Scenario:
    """Return the scenario without log probabilities, whose last bits depend on the number of ranks."""
    arrivals = [replace(one, sampling=replace(one.sampling, logprobs=None)) for one in scenario.arrivals]
    return replace(scenario, arrivals=tuple(arrivals))


def all_drafters(monkeypatch: pytest.MonkeyPatch) -> list[ProgramDrafter]:
    """Return a list that gets the drafters of all ranks."""
    found: list[ProgramDrafter] = []
    for owner in (DraftModel, EagleDrafter):

        def note(self: Any, *arguments: Any, original: Callable[..., None] = owner.__init__, **options: Any) -> None:
            original(self, *arguments, **options)
            found.append(self)

        monkeypatch.setattr(owner, "__init__", note)
    return found


@pytest.mark.parametrize(
    ("kind", "architecture", "seeds"),
    [
        ("self", "deepseek3", range(3)),
        ("cyclic", "llama", range(3)),
        pytest.param("self", "llama", range(30), marks=SLOW),
        pytest.param("self", "deepseek3", range(3, 30), marks=SLOW),
        pytest.param("perturbed", "gemma3", range(15), marks=SLOW),
        pytest.param("unrelated", "qwen2", range(15), marks=SLOW),
        pytest.param("eagle", "qwen3", range(15), marks=SLOW),
        pytest.param("mtp", "deepseek3", range(15), marks=SLOW),
        pytest.param("mtp", "glm4-moe", range(15), marks=SLOW),
        pytest.param("cyclic", "llama", range(3, 40), marks=SLOW),
    ],
)
def test_answers_are_those_of_plain_decoding(kind: str, architecture: str, seeds: range) -> None:
    """Greedy and sampled, in chunks, after hits, preemption and aborts. All drafts of a model for itself are right, and
    of "cyclic" it is known which; exactly these must be accepted."""
    reports = [serve(random.Random(seed), kind, architecture) for seed in seeds]
    assert sum(report.num_preempted for report in reports) > 0
    assert sum(report.num_cached_tokens for report in reports) > 50
    counts = [report.counts for report in reports]
    assert sum(one.num_accepted for one in counts) > 0
    if kind == "self":
        assert sum(one.num_accepted for one in counts) == sum(one.num_drafted for one in counts)


def test_draft_kv_returns_from_the_host_to_any_rank() -> None:
    """Prompts take the pages of each other; what a model has computed for its drafts comes back with them."""
    rng = random.Random(2)
    prompts = [[rng.randrange(1, 40) for _ in range(97)] for _ in range(4)]
    model, drafter = make("self", "llama")
    arrivals = [arrival(prompts[i % 4], at_step=80 * i, max_tokens=20) for i in range(8)]
    scenario = traffic(arrivals, num_pages=80, page_size=4, tensor_parallel_size=2, enable_dp_attention=True)
    report = run(scenario, model=model, drafter=drafter, host_cache_gb=0.01, cache_write_policy="write_back")
    assert [report.cached[str(i)] for i in range(8)] == [0] * 4 + [96] * 4
    assert report.drafter.num_rebuilt <= 4 * 97


@pytest.mark.parametrize("kind", ["draft", pytest.param("eagle", marks=SLOW)])
def test_rejection_sampling_has_the_tokens_of_one_process(kind: str) -> None:
    found: list[list[list[int]]] = []
    for ranks in ONE, TWO:
        options: dict[str, Any] = {"speculative": kind, **ranks}
        inbox, outbox = MemoryInbox(), MemoryOutbox()
        config = EngineConfig(
            num_threads=2, max_running=4, max_total_tokens=1024, chunked_prefill_size=16,
            speculative_verify="rejection", speculative_num_tokens=3, speculative_control="fixed", **options,
        )  # fmt: skip
        found.append(outputs(build_engine(config, inbox=inbox, outbox=outbox), inbox, outbox))
    assert found[1] == found[0]


# --- seeded faults ---


def follow_any(slots: ValidSlots, rows: Any, tables: RowTables, division: RequestDivision) -> None:
    """Advance the rows of this rank past every slot that has a tag, whatever it is."""
    for row, owner in zip(rows.tolist(), division.owners(rows).tolist(), strict=True):
        while owner == division.exchange.rank and slots.positions[row] < tables.lengths[row] - 1:
            page, slot = divmod(int(slots.positions[row]), slots.page_size)
            tag = slots.tags[int(division.own_pages[row, page]) * slots.page_size + slot]
            if tag == 0:
                break
            slots.chains[row] = tag
            slots.positions[row] += 1


GATHERED, RECORDED = "division.gather(self.positions[places], rows)", "self._slots.record(own)"
FAULTS: dict[str, tuple[str, list[Edit]]] = {
    "drafted from the page of another rank": (
        "self", [(DividedPass, "lay_out", "self.division.num_pages", "self.division.num_pages * "
                  "(1 + 99 * (self.whole.scope.index > 0))")],
    ),
    "old tags accepted": (
        "self", [(ValidSlots, "follow", "follow_rows(", "follow_any(self, rows, tables, division); (")],
    ),
    "tags ignored": ("self", [(ValidSlots, "follow", GATHERED, "tables.lengths[places] - 1")]),
    "no tags": ("self", [(DraftModel, "record_drafts", RECORDED, f"divided or {RECORDED}")]),
    "slots of other ranks unknown": ("self", [(ValidSlots, "follow", GATHERED, "self.positions[places]")]),
    "state of the last position": ("cyclic", [(EagleDrafter, "record_rest", "divided.keep_others(tape)", "pass")]),
    "gaps of other ranks unknown": (
        "eagle", [(ValidSlots, "gather_begins", "division.gather(self.begins[places], rows)", "self.begins[places]")],
    ),
    "no tags of a head": ("eagle", [(EagleDrafter, "_record_pairs", RECORDED, f"divided or {RECORDED}")]),
}  # fmt: skip


@pytest.mark.parametrize("name", by_turns(FAULTS))
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, edits = FAULTS[name]
    monkeypatch.setattr(valid_slots, "follow_any", follow_any, raising=False)
    seed_fault(edits, monkeypatch)

    def try_it() -> None:
        if kind != "cyclic":
            check_drafts(kind, "llama", 2, monkeypatch, is_fixed=kind == "self")
        for seed in range(12):
            serve(random.Random(seed), kind, "llama")

    with pytest.raises((AssertionError, RunnerLostError)):
        try_it()
