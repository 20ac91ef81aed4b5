"""Drafts of models with recurrent layers on the CPU: tokens, states and copies have the bits of plain decoding.

Drafts come from a lookup that knows the text and errs at random. A row's place has the state behind all computed tokens
after each step in which it has no drafts.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from families.case import build
from families.registry import CASES
from pagewood.engine.api import SamplingParams
from pagewood.engine.core.loop import StepHandle
from pagewood.engine.model_folder.load import check_draft, load_model
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.compiled.units import STASHES
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program import passes
from pagewood.engine.runner.cpu.program.drafted_runs import DraftedRuns
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.storage import storage_for
from pagewood.kvpool.memory import allocate
from row_driver import MOST_ROWS, DrivenSequence, RowDriver
from scratch import scratch_folder
from seeded_faults import Edit, seed_fault
from stand_ins.knowing_lookup import KnowingLookup

NAMES = ("qwen3-next", "granite4-states", "lfm2")
"""Heads that correct; heads that only decay; convolutions alone."""
PAGE_SIZE, NUM_PAGES, MAX_DRAFTS, LENGTH = 4, 300, 5, 34
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95)
PROMPTS = [np.random.default_rng(i).integers(1, 40, size).tolist() for i, size in enumerate((9, 3, 14, 5))]
COPIES = MOST_ROWS // 2
"""The first place of copies that these tests ask for: behind those of rows."""


@cache
def loaded(name: str) -> tuple[Decoder[Buffer], StepKernel]:
    folder, ops = scratch_folder(), CPUOps()
    build(CASES[name], folder)
    model = load_model(folder, ops)
    layout = model.config.memory_layout(page_size=PAGE_SIZE, dtype="float32", order="HND")
    return model, warm_up(layout, head_dims=model.config.head_dims, others=[*ops.units, STASHES])


class Bench:
    """A runner over memory of its own, and the driver that feeds it."""

    def __init__(self, name: str, *, quality: float | None = None, seed: int = 0, full: bool = False) -> None:
        """Draft with some quality; None: nothing is drafted."""
        model, kernel = loaded(name)
        config = model.config
        assert config.states is not None
        self.memory = allocate(config.states, 2 * MOST_ROWS)
        for place in range(2 * MOST_ROWS):
            for array in self._arrays(place):
                array[:] = 7.0 + place  # what nothing has written
        layout = config.memory_layout(page_size=PAGE_SIZE, dtype="float32", order="HND")
        make = None
        if quality is not None:
            texts, rate = [one.text for one in plain(name)], quality
            make = lambda tokens: KnowingLookup(tokens, texts, quality=rate, seed=seed, full=full)  # noqa: E731
        self.runner = CPURunner(
            model, storage_for(layout, NUM_PAGES), kernel, max_rows=8, max_length=96, num_threads=2, make_lookup=make,
            max_drafts=0 if make is None else MAX_DRAFTS, states=self.memory,
        )  # fmt: skip
        self.driver = RowDriver(self.runner, num_pages=NUM_PAGES, page_size=PAGE_SIZE, has_states=True)

    def add(self, index: int, **share: Any) -> DrivenSequence:
        return self.driver.add(PROMPTS[index], sampling=SAMPLING, seed=7 + index, **share)

    def state(self, place: int) -> bytes:
        """Return the bits of a state."""
        return b"".join(array.tobytes() for array in self._arrays(place))

    def has(self, place: int, state: bytes) -> bool:
        """Return whether a place has a state: pytest would take minutes to say where they differ."""
        return self.state(place) == state

    def launch(
        self, work: Sequence[tuple[DrivenSequence, int]], copies: Sequence[tuple[int, int, int]] = ()
    ) -> StepHandle:
        """Launch a step with numbers of drafts, and copies like `Batch.state_copies` beside those of prompts."""
        batch = self.driver.batch([(one, 1) for one, _ in work], drafts=[num for _, num in work])
        more = np.array(copies, np.int32).reshape(-1, 3)
        return self.runner.launch(replace(batch, state_copies=np.concatenate([batch.state_copies, more])))

    def _arrays(self, place: int) -> list[np.ndarray]:
        layout = self.memory.layout
        return [
            self.memory.array(layer, array.name)[place].numpy()
            for layer in range(layout.num_layers)
            for array in layout.arrays
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What plain decoding makes of a prompt."""

    text: list[int]
    """Prompt and output."""
    states: dict[int, bytes]
    """By number of tokens before it, behind the prompt."""


@cache
def plain(name: str) -> tuple[Plain, ...]:
    """Return the texts of all prompts, decoded plainly."""
    found: list[Plain] = []
    for index in range(len(PROMPTS)):
        bench, states = Bench(name), {}
        sequence = bench.add(index)
        for num in range(1, LENGTH + 1):
            bench.driver.generate([sequence], num_tokens=num, chunk=64)
            states[sequence.num_computed] = bench.state(sequence.row)
        bench.runner.close()
        found.append(Plain(text=sequence.tokens, states=states))
    return tuple(found)


def take(sequence: DrivenSequence, tokens: tuple[int, ...]) -> None:
    sequence.tokens.extend(tokens)
    sequence.num_computed = len(sequence.tokens) - 1


def check_random_steps(name: str, seed: int) -> None:
    """With any drafts beside each other, and any of their positions copied."""
    rng, expected = np.random.default_rng(seed), plain(name)
    bench = Bench(name, quality=(0.0, 0.5, 0.9, 1.0)[seed % 4], seed=seed)
    sequences = [bench.add(index) for index in range(1 + seed % len(PROMPTS))]
    bench.driver.generate(sequences, num_tokens=1, chunk=int(rng.integers(1, 9)))
    ends = {one.row: len(PROMPTS[one.row]) + LENGTH - 8 for one in sequences}
    while live := [one for one in sequences if len(one.tokens) < ends[one.row]]:
        work = [(one, int(rng.choice((0, 2, MAX_DRAFTS)))) for one in live]
        copies = [
            (grant, one.num_computed + int(rng.integers(0, num + 3)), COPIES + one.row)
            for grant, (one, num) in enumerate(work)
        ]
        before = [bench.state(place) for _, _, place in copies]
        starts = [one.num_computed for one in live]
        result = bench.launch(work, copies).wait()
        drafted = [0] * len(live) if result.num_drafted is None else result.num_drafted.tolist()
        for (one, _), tokens, num, start, (_, length, place), old in zip(
            work, result.by_grant(), drafted, starts, copies, before, strict=True
        ):
            take(one, tokens)
            own = expected[one.row]
            assert one.tokens == own.text[: len(one.tokens)]
            if num == 0:
                assert bench.has(one.row, own.states[one.num_computed]), "the state has other bits"
            if start < length <= one.num_computed:
                assert bench.has(place, own.states[length]), "the copy has other bits"
            elif not start < length <= start + 1 + num:
                assert bench.has(place, old), "a copy was made of another position"
    for one, tokens in zip(sequences, bench.launch([(one, 0) for one in sequences]).wait().by_grant(), strict=True):
        take(one, tokens)
        assert bench.has(one.row, expected[one.row].states[one.num_computed]), "the state has other bits"
    bench.runner.close()


def check_steps_ahead(name: str, seed: int) -> None:
    """Each step is launched with upper bounds before the one before it is waited for, and asks for the copy again."""
    expected, bench = plain(name), Bench(name, quality=0.6, seed=seed, full=True)
    sequences = [bench.add(index) for index in range(3)]
    bench.driver.generate(sequences, num_tokens=1, chunk=64)
    length = [len(PROMPTS[one.row]) + 2 + one.row for one in sequences]
    copies = [(one.row, length[one.row], COPIES + one.row) for one in sequences]
    pending: StepHandle | None = None
    while max(len(one.tokens) - len(PROMPTS[one.row]) for one in sequences) < LENGTH - 14:
        following = bench.launch([(one, 4) for one in sequences], copies)
        bounds = [len(one.tokens) for one in sequences]
        for one in sequences:
            take(one, (-1,) * 5)
        if pending is not None:
            settle(sequences, pending, bounds)
        pending = following
    assert pending is not None
    settle(sequences, pending, [len(one.tokens) for one in sequences])
    for one, tokens in zip(sequences, bench.launch([(one, 0) for one in sequences]).wait().by_grant(), strict=True):
        take(one, tokens)
        own = expected[one.row]
        assert one.tokens == own.text[: len(one.tokens)]
        assert bench.has(one.row, own.states[one.num_computed]), "the state has other bits"
        assert one.num_computed >= length[one.row]
        assert bench.has(COPIES + one.row, own.states[length[one.row]]), "the copy has other bits"
    bench.runner.close()


def settle(sequences: list[DrivenSequence], handle: StepHandle, bounds: list[int]) -> None:
    """Replace the five unknown tokens before the bounds by those of a step."""
    for one, tokens, end in zip(sequences, handle.wait().by_grant(), bounds, strict=True):
        one.tokens[end - 5 : end] = tokens
        one.num_computed = len(one.tokens) - 1


def check_rows_of_others(name: str, seed: int) -> None:
    """A row is given away while drafts wait to be taken back; a request whose first step drafts goes on from a copy."""
    expected, bench = plain(name), Bench(name, quality=0.5, seed=seed, full=True)
    first = bench.add(0)  # two whole pages and one token
    bench.driver.generate([first], num_tokens=1, chunk=64)
    for turn in range(2):
        take(first, bench.launch([(first, MAX_DRAFTS)]).wait().by_grant()[0])
        one = bench.add(0, share=first, num_shared_pages=2) if turn else bench.add(0)
        one.row = 0
        if not turn:
            bench.driver.generate([one], num_tokens=1, chunk=64)
        for num in (MAX_DRAFTS, 0, 3, 0):
            take(one, bench.launch([(one, num)]).wait().by_grant()[0])
            assert one.tokens == expected[0].text[: len(one.tokens)]
        assert bench.has(0, expected[0].states[one.num_computed]), "the state has other bits"
        first = one
    bench.runner.close()


CHECKS: dict[str, Callable[[str, int], None]] = {
    "random steps": check_random_steps,
    "steps ahead": check_steps_ahead,
    "rows of others": check_rows_of_others,
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_plain_decoding(name: str, check: str) -> None:
    for seed in range(16):
        CHECKS[check](name, seed)


def test_a_draft_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    for name in ("lfm2", "llama"):
        build(CASES[name], tmp_path / name)
    assert check_draft(tmp_path / "llama", tmp_path / "lfm2").states is None
    with pytest.raises(ValueError, match="a draft model must have no recurrent layers, got Lfm2ForCausalLM"):
        check_draft(tmp_path / "lfm2", tmp_path / "llama")


FAULTS: dict[str, list[Edit]] = {
    "a rejected draft stays in the state": [(DraftedRuns, "lay_out", "states[drafts, 1] = -1", "pass")],
    "one token too few is computed again": [
        (DraftedRuns, "lay_out", "starts - self._reached[rows]", "np.maximum(starts - self._reached[rows] - 1, 0)")
    ],
    "what is computed again begins elsewhere": [
        (DraftedRuns, "lay_out", "= self._reached[of_rank[found]]", "= self._reached[of_rank[found]] + 1")
    ],
    "a row goes on with the drafts of its last request": [
        (DraftedRuns, "admit", "self._reached[batch.admitted_rows()] = batch.starts[batch.admitted]", "pass")
    ],
    "a first step with drafts loses what it goes on from": [
        (DraftedRuns, "lay_out", " | (drafts & (states[:, 0] != states[:, 1]))", "")
    ],
    "drafts leave a state that stays": [
        (DraftedRuns, "lay_out", "np.where(drafts, starts, starts + grants.counts)", "starts + grants.counts")
    ],
    "copies by the position of the plan": [
        (passes, "_lay_out_states", "integers_at(scope[Column.STARTS], num_grants)", "grants.starts")
    ],
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain("qwen3-next")
    seed_fault(FAULTS[fault], monkeypatch)
    for seed in range(8):
        for check in CHECKS.values():
            try:
                check("qwen3-next", seed)
            except AssertionError:
                return
    pytest.fail("the fault was not found")
