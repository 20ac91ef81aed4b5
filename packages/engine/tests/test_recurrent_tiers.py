"""Models with recurrent layers on ranks, in stages and over hosts, with tiers and drafts.

Answers are those of one process, which computes alone. Ranks and other hosts are threads. The faults in `FAULTS` are
seeded one at a time, and each is found.
"""

# pyright: basic
# It reads private parts of ranks.

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from families.case import build
from families.registry import deep
from group_in_threads import ranks_are_threads
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
from speculating import plain_engines
from states_in_tiers import FORMS, check_tiers, check_traffic

FEW = {("qwen3-next", "both"), ("qwen3-next", "a host has most of a state"), ("mamba2", "by request")}
pytestmark = pytest.mark.usefixtures("patient_requests")


@pytest.fixture(scope="module", autouse=True)
def oracles() -> Iterator[None]:
    """Keep the plain engines until the last test."""
    with plain_engines():
        yield


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if (name, form) in FEW else pytest.mark.slow)
        for name in ("qwen3-next", "granite4-groups", "mamba2")
        for form in FORMS
        if form != "alone"
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
    check_traffic(kind, form, seeds, tmp_path)


FAULTS: dict[str, tuple[str, Edit]] = {
    "a part of a state of another prefix": (
        "ranks", (StatePages, "read", "array[place, piece",
                  "array[(place + (id(piece) in map(id, pieces[len(pieces) // 2 :]))) % len(piece.array), piece")
    ),
    "a state half written": (
        "both", (StatePages, "write", "in pieces:", "in pieces[len(pieces) // 2 :]:")
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
    with pytest.raises(AssertionError, match="other answers"):
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
