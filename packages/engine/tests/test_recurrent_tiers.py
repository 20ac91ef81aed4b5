"""Models with recurrent layers on ranks, in stages and over hosts, with tiers and drafts.

Answers are those of one process, which computes alone. Ranks and other hosts are threads. The faults in `FAULTS` are
seeded one at a time, and each is found.
"""

# pyright: basic
# It reads private parts of ranks.

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from families.case import build
from families.changed import with_next_prediction
from families.registry import CASES, deep
from group_in_threads import ranks_are_threads
from node_threads import following, free_port
from pagewood.engine.api import EngineConfig, SamplingParams
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.runner.cpu.compiled.layout import Outcome
from pagewood.engine.runner.cpu.program.drafted_runs import DraftedRuns
from pagewood.engine.runner.cpu.program.passes import Grants
from pagewood.engine.runner.ranks.messages import MovePages
from pagewood.engine.runner.ranks.ranked_pages import FollowedPages, RankedStore
from pagewood.kvpool.tiers.pages import states as pages_of_states
from pagewood.kvpool.tiers.pages.device import ChainedPages
from pagewood.kvpool.tiers.pages.states import StatePages
from seeded_faults import Edit, seed_fault
from sides import Side
from speculating import Drafter, Report, mixed_load, plain_engines, random_drafting, run

PAGE, LENGTH, NUM_OUTPUT = 16, 70, 16
NUM_WHOLE = (LENGTH - 1) // PAGE * PAGE
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_OUTPUT, ignore_eos=True)
SMALL: dict[str, Any] = {
    "max_total_tokens": 256, "max_running": 1, "state_places": 3, "host_cache_gb": 0.02, "chunked_prefill_size": 32,
}  # fmt: skip
BY_REQUEST: dict[str, Any] = {
    "tensor_parallel_size": 2, "enable_dp_attention": True, "state_places": 6, "max_running": 2
}  # fmt: skip
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"tensor_parallel_size": 2}, "rfrf"),
    "stages": ({"pipeline_parallel_size": 2}, "rfrf"),
    "both": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "rfrf"),
    "hosts": ({"tensor_parallel_size": 2, "nnodes": 2}, "rfrf"),
    "a host has most of a state": ({"pipeline_parallel_size": 2, "nnodes": 2}, "frrrrf"),
    "a host has no state": ({"pipeline_parallel_size": 2, "nnodes": 2}, "rfff"),
    "hosts of stages of ranks": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nnodes": 2}, "rfrf"),
    "by request": (BY_REQUEST, "rfrf"),
    "by request on hosts": ({**BY_REQUEST, "nnodes": 2}, "rfrf"),
}
"""Options, and the layers of the model."""
FEW = {("qwen3-next", "both"), ("qwen3-next", "a host has most of a state"), ("mamba2", "by request")}
pytestmark = pytest.mark.usefixtures("patient_requests")


@pytest.fixture(scope="module", autouse=True)
def oracles() -> Iterator[None]:
    """Keep the plain engines until the last test."""
    with plain_engines():
        yield


def options_of(form: str) -> dict[str, Any]:
    options = FORMS[form][0]
    num_ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    num_nodes = options.get("nnodes", 1)
    address = {"master_addr": f"127.0.0.1:{free_port()}"} if num_nodes > 1 else {}
    return {**options, **address, "num_threads": num_ranks // num_nodes}


def prompt(seed: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 90 for i in range(LENGTH)]


def answered(folder: Path, *, num_turns: int = 1, **options: Any) -> list[tuple[list[int], int]]:
    """Return the answers of an engine to prompts that do not fit beside each other, and their numbers of cached tokens.

    Two are asked at a time, so that each rank has one by request. Afterwards, everything is stored.
    """
    options = {"model": str(folder), **SMALL, **options}
    found: list[tuple[list[int], int]] = []
    with following(EngineConfig(**options)) if "nnodes" in options else nullcontext([]) as errors:
        side = Side(**options)
        try:
            for turn, first in product(range(num_turns), (0, 2)):
                side.submit(f"{turn} {first}", prompt(first), SAMPLED)
                side.answer(f"{turn} {first + 1}", prompt(first + 1), SAMPLED)
                side.until(lambda: len(side.ends) % 2 == 0)
                names = [f"{turn} {first + one}" for one in range(2)]
                found += [(side.tokens[name], side.ends[name].num_cached_tokens) for name in names]
        finally:
            side.engine.close()
    assert not errors
    return found


def check_tiers(folder: Path, form: str, disk: Path, *, lose: Callable[[], object] | None = None) -> None:
    """Check hits of the host, and after a restart of the disk.

    With `lose`, what is stored first is of no use; it is called before more is stored.
    """
    whole = [tokens for tokens, _ in answered(folder, prefix_cache=False, host_cache_gb=None, num_threads=1)]
    stored: dict[str, Any] = {"disk_cache_path": str(disk), "disk_cache_gb": 0.05}
    first = answered(folder, num_turns=2, **options_of(form), **stored)
    assert first == [*((tokens, 0) for tokens in whole), *((tokens, NUM_WHOLE) for tokens in whole)]
    if lose is not None:
        lose()
        assert answered(folder, **options_of(form), **stored) == [(tokens, 0) for tokens in whole]
    assert answered(folder, **options_of(form), **stored) == [(tokens, NUM_WHOLE) for tokens in whole]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if (name, form) in FEW else pytest.mark.slow)
        for name in ("qwen3-next", "granite4-groups", "mamba2")
        for form in FORMS
    ],
)
def test_pages_and_states_come_back(name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a model without attention in parts that are larger than its pages."""
    if name == "mamba2":
        monkeypatch.setattr(pages_of_states, "_MOST_PARTS", 4)
    ranks_are_threads(monkeypatch)
    build(deep(name, FORMS[form][1]), tmp_path / "model")
    check_tiers(tmp_path / "model", form, tmp_path / "disk")


def check_losses(folder: Path, form: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a state that one host has not stored its part of, although all have stored all pages."""
    moved, of_states, is_lossy = FollowedPages._moved, set[int](), {True}

    def lossy(pages: FollowedPages, message: MovePages) -> list[bool]:
        """Store pages only: slots that ids below 0 were copied to last have states."""
        if message.store is None:
            for slot, page in zip(message.slots, message.pages, strict=True):
                (of_states.add if page < 0 else of_states.discard)(slot)
        elif message.is_out and is_lossy:
            kept = [index for index, slot in enumerate(message.slots) if slot not in of_states]
            slots, keys = [message.slots[index] for index in kept], [message.keys[index] for index in kept]
            message = MovePages(number=message.number, is_out=True, slots=slots, keys=keys, store=message.store)
        return moved(pages, message)

    monkeypatch.setattr(FollowedPages, "_moved", lossy)
    check_tiers(folder, form, disk, lose=is_lossy.clear)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hosts", "a host has no state"])
def test_a_state_that_lacks_the_part_of_a_host_is_computed_and_stored_again(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_are_threads(monkeypatch)
    build(deep("qwen3-next", FORMS[form][1]), tmp_path / "model")
    check_losses(tmp_path / "model", form, tmp_path / "disk", monkeypatch)


def served(seed: int, kind: str, folder: Path, form: str) -> Report:
    """Serve more than fits, with drafts and tiny tiers; every answer must be that of plain decoding, alone."""
    rng, options = random.Random(seed), options_of(form)
    drafter = Drafter(kind=kind, folder=folder.parent / "draft" if kind == "draft" else None)
    load = mixed_load(seed, overlap=seed % 2 > 0)
    if "tensor_parallel_size" in options:  # ranks add in another order than one process, so only tokens are the same
        arrivals = [
            replace(one, pooling=None, sampling=replace(one.sampling, logprobs=None, prompt_logprobs=None))
            for one in load.arrivals
        ]
        load = replace(load, arrivals=tuple(arrivals))
    places = rng.choice((5, 7, None))
    if "enable_dp_attention" in options:
        load, places = replace(load, num_pages=2 * load.num_pages), places and places + 1
    return run(
        load, model=folder, drafter=None if kind == "off" else drafter, num_tokens=rng.choice((2, 3, 6)),
        make_drafting=random_drafting(rng), host_cache_gb=rng.choice((0.0003, 0.003)),
        **{**options, "state_places": places, "max_running": load.config.max_running},
    )  # fmt: skip


def check_traffic(kind: str, form: str, seeds: range, folder: Path) -> list[Report]:
    build(deep("qwen3-next", FORMS[form][1]), folder / "plain")
    build(CASES["llama"], folder / "draft")  # a draft model has no recurrent layers
    model = with_next_prediction(folder / "plain", folder / "model")
    return [served(seed, kind, model, form) for seed in seeds]


@pytest.mark.parametrize(
    ("kind", "form", "seeds"),
    [
        ("eagle", "both", range(1)), ("eagle", "by request", range(1)),
        *(
            pytest.param(kind, form, seeds, marks=pytest.mark.slow)
            for kind, form, seeds in [
                ("off", "both", range(1, 4)), ("ngram", "ranks", range(1, 4)), ("suffix", "ranks", range(4, 7)),
                ("draft", "ranks", range(3)), ("eagle", "ranks", range(3, 6)), ("ngram", "stages", range(3)),
                ("draft", "stages", range(3, 6)), ("suffix", "both", range(3)), ("suffix", "hosts", range(3)),
                ("eagle", "hosts of stages of ranks", range(2)), ("draft", "a host has no state", range(2)),
                ("off", "by request", range(3)), ("ngram", "by request", range(3)), ("suffix", "by request", range(3)),
                ("draft", "by request", range(3)), ("eagle", "by request", range(1, 4)),
                ("eagle", "by request on hosts", range(2)), ("off", "by request on hosts", range(2)),
            ]
        ),
    ],
)  # fmt: skip
def test_more_than_fits_with_drafts_and_tiny_tiers(
    kind: str, form: str, seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, with hits, preemption, aborts, grammars and tiers that are soon full."""
    ranks_are_threads(monkeypatch)
    reports = check_traffic(kind, form, seeds, tmp_path)
    assert kind == "off" or sum(report.counts.num_drafted - report.counts.num_accepted for report in reports) > 0
    assert sum(report.num_preempted for report in reports) > 0
    assert sum(report.num_cached_tokens for report in reports) > 0
    assert all(report.num_aborted for report in reports)


FAULTS: dict[str, tuple[str, Edit]] = {
    "a part of a state of another prefix": (
        "ranks", (StatePages, "read", "array[place, piece",
                  "array[(place + (id(piece) in map(id, pieces[len(pieces) // 2 :]))) % len(piece.array), piece")
    ),
    "a state half written": (
        "both", (StatePages, "write", "self._pieces[part]:", "self._pieces[part][len(self._pieces[part]) // 2 :]:")
    ),
    "a host's part of a state of another prefix": (
        "hosts", (FollowedPages, "_moved", "read(message.pages",
                  "read([one + (one < -self._own.num_parts) * self._own.num_parts for one in message.pages]"),
    ),
    "a host's part of a state half written": (
        "a host has most of a state", (FollowedPages, "_moved", "self._own.write(message.pages, images, slots",
                                       "half = -self._own.num_parts // 2; "
                                       "self._own.write(message.pages[:half], images, slots[:half]"),
    ),
    "a part of a state of another rank": (
        "by request", (ChainedPages, "_divided", "number, own = divmod(-1 - page, self._num_parts)",
                       "number, own = 0, (-1 - page) % self._num_parts")
    ),
    "a state is there when rank 0 has it": ("losses", (RankedStore, "get", "return [all", "return found or [all")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_part_of_a_state_that_is_wrong_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, edit = FAULTS[name]
    seed_fault([edit], monkeypatch)
    ranks_are_threads(monkeypatch)
    own = "hosts" if form == "losses" else form
    build(deep("qwen3-next", FORMS[own][1]), tmp_path / "model")
    check = partial(check_losses, monkeypatch=monkeypatch) if form == "losses" else check_tiers
    with pytest.raises(AssertionError, match=r"\[\(\["):
        check(tmp_path / "model", own, tmp_path / "disk")


@pytest.mark.parametrize("form", ["ranks", pytest.param("stages", marks=pytest.mark.slow)])
def test_a_rank_that_goes_back_to_another_position_ends_its_group(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every two ranks, one computes a token twice. All draw from the same sums, so hidden states do not show it."""
    lay_out, all_runs = DraftedRuns.lay_out, list[DraftedRuns]()

    def other(runs: DraftedRuns, scopes: Any, counts: Any, grants: Grants, **others: Any) -> Outcome:
        outcome = lay_out(runs, scopes, counts, grants, **others)
        if runs not in all_runs:
            all_runs.append(runs)
        if all_runs.index(runs) % 2 and outcome == Outcome.DONE:
            runs._reached[grants.rows[grants.counts == 1]] -= 1
        return outcome

    monkeypatch.setattr(DraftedRuns, "lay_out", other)
    ranks_are_threads(monkeypatch)
    with pytest.raises(RunnerLostError, match="rank 1 has other tables of rows than rank 0 after step"):
        check_traffic("eagle", form, range(1), tmp_path)
    assert len(all_runs) == 2
