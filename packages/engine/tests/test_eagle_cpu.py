"""A drafting head on the CPU: its drafts are those of the head in plain torch, and the text is that of plain decoding.

`test_head.py` compares the head in plain torch with `transformers`.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagewood.engine.api import SamplingParams
from pagewood.engine.model_folder.folder import FoundDrafter
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.runner.cpu.drafts.eagle import PATIENCE, EagleDrafter
from pagewood.engine.runner.cpu.drafts.loaded_drafter import load_drafter
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.division import RequestDivision
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.program.passes import RowTables
from pagewood.engine.runner.cpu.runner import CPURunner
from row_driver import DrivenSequence, RowDriver
from stand_ins.tiny_heads import KINDS, drafted, folders_of, prompts_of

ALL_KINDS = [*KINDS, "latents"]
NUM_PAGES, MAX_LENGTH, MAX_TOKENS = 2000, 96, 5


class Bench:
    """A runner with a head, whose memory is joined with the target's."""

    def __init__(self, kind: str, sampling: SamplingParams, *, page_size: int = 4, num_threads: int = 2) -> None:
        target_folder, head_folder = folders_of(kind)
        target = load_model(target_folder, CPUOps())
        loaded = load_drafter(FoundDrafter(kind="eagle", folder=head_folder), target, target_folder)
        layout = target.config.memory_layout(page_size=page_size, order="HND")
        kernel = warm_up(layout, drafter=loaded.memory.memory_layout(layout), others=loaded.units)
        memory = loaded.memory.allocate(layout, NUM_PAGES)
        self.sampling = sampling
        self.vocab_size = target.config.vocab_size
        self.tags = memory.tags.array(0, "tags")
        self.drafter: EagleDrafter

        def make(rows: RowTables, division: RequestDivision | None) -> EagleDrafter:
            drafter = loaded.maker(memory, max_tokens=MAX_TOKENS)(rows, division)
            assert isinstance(drafter, EagleDrafter)
            self.drafter = drafter
            return drafter

        self.runner = CPURunner(
            target, memory.target, kernel, max_rows=20, max_length=MAX_LENGTH, num_threads=num_threads,
            make_drafter=make,
        )  # fmt: skip
        self.driver = RowDriver(self.runner, num_pages=NUM_PAGES, page_size=page_size)

    def add(self, prompt: list[int], seed: int = 7, **share: Any) -> DrivenSequence:
        sequence = self.driver.add(prompt, sampling=self.sampling, seed=seed, **share)
        sequence.num_sent_tokens = 0  # a drafter needs all tokens of a row
        return sequence

    def prefilled(self, prompts: list[list[int]], *, chunk: int = 7) -> list[DrivenSequence]:
        """Return sequences of which only the last token is not computed."""
        sequences = [self.add(prompt, seed=7 + i) for i, prompt in enumerate(prompts)]
        self.driver.generate(sequences, num_tokens=1, chunk=chunk)
        return sequences

    def step(self, sequences: list[DrivenSequence], drafts: list[int], *, is_followed: bool = True) -> list[list[int]]:
        """Compute a step with drafts; return the drafts of each sequence."""
        work = [(one, 1) for one in sequences]
        batch = replace(self.driver.batch(work, drafts=drafts), is_followed=is_followed)
        result = self.runner.launch(batch).wait()
        assert (drafts if result.num_drafted is None else result.num_drafted.tolist()) == drafts
        assert result.num_drafted is not None or not any(drafts)
        verified = self.runner._program.inputs[0].view(np.int32)[: batch.num_tokens, 0]
        for sequence, tokens in zip(sequences, result.by_grant(), strict=True):
            sequence.tokens.extend(tokens)
            sequence.num_computed = len(sequence.tokens) - 1
        return [part[1:].tolist() for part in np.split(verified.copy(), np.cumsum(batch.counts)[:-1])]


def assert_state(bench: Bench, kind: str, sequence: DrivenSequence, *, begin: int = 0) -> None:
    """Compare the state that the runner keeps for a row with that of plain torch."""
    kept = torch.from_numpy(bench.drafter._states[sequence.row])
    torch.testing.assert_close(kept, drafted(kind, sequence.tokens, begin=begin)[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_drafts_are_those_of_the_head(kind: str, page_size: int) -> None:
    """After a prompt in chunks, after accepted and rejected drafts, and after steps without drafts."""
    bench = Bench(kind, SamplingParams(temperature=0.0), page_size=page_size)
    sequences = bench.prefilled(prompts_of(4))
    for drafts in ([5, 3, 0, 1], [5, 5, 5, 5], [0, 0, 0, 0], [1, 5, 2, 4]):
        expected = [drafted(kind, one.tokens, n)[0] if n else [] for one, n in zip(sequences, drafts, strict=True)]
        assert bench.step(sequences, drafts) == expected
        for one in sequences:
            assert_state(bench, kind, one)
    assert bench.drafter.counts.num_short == 0
    bench.runner.close()


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(kind: str, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=0.95)
    texts: list[list[list[int]]] = []
    for drafts in (0, 1, 5):
        bench = Bench(kind, sampling)
        sequences = bench.prefilled(prompts_of(6))
        while live := [one for one in sequences if len(one.output) < 25]:
            bench.step(live, [drafts] * len(live))
        bench.runner.close()
        texts.append([one.output[:25] for one in sequences])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_cached_prefix_keeps_the_context(kind: str) -> None:
    bench = Bench(kind, SamplingParams(temperature=0.0))
    prompt = prompts_of(8)[7]
    [first] = bench.prefilled([prompt])
    shared = bench.add(prompt, share=first, num_shared_pages=5)
    bench.driver.generate([shared], num_tokens=1, chunk=7)
    assert bench.step([shared], [4]) == [drafted(kind, shared.tokens[: len(prompt) + 1], 4)[0]]
    assert_state(bench, kind, shared)
    assert not bench.drafter._slots.begins.any()
    bench.tags[first.pages[2]] = 0
    other = bench.add(prompt, share=first, num_shared_pages=5)
    bench.driver.generate([other], num_tokens=1, chunk=7)
    assert bench.drafter._slots.begins[other.row] == 12  # its attention begins behind the page whose tags are wrong
    for _ in range(2):
        expected, _ = drafted(kind, other.tokens, 4, begin=12)
        assert bench.step([other], [4]) == [expected]
        assert_state(bench, kind, other, begin=12)
        with pytest.raises(AssertionError):
            assert_state(bench, kind, other)
    assert bench.drafter._slots.begins[other.row] == 12
    bench.runner.close()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_row_without_a_state_drafts_nothing(kind: str) -> None:
    bench = Bench(kind, SamplingParams(temperature=0.0))
    sequence = bench.add([3, 4, 5])
    result = bench.runner.launch(bench.driver.batch([(sequence, 2)])).wait()
    assert len(result.counts) == 0
    result = bench.runner.launch(bench.driver.batch([(sequence, 1)], drafts=[3])).wait()
    assert result.num_drafted is not None
    assert (result.counts.tolist(), result.num_drafted.tolist()) == ([1], [0])
    assert bench.drafter.counts.num_postponed == 1
    bench.runner.close()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_rows_that_decoded_without_drafts_catch_up(kind: str) -> None:
    """The head is left out after some steps; then each row catches up when it gets drafts, and has its full context."""
    bench = Bench(kind, SamplingParams(temperature=0.0))
    sequences = bench.prefilled(prompts_of(3))
    bench.step(sequences, [2, 0, 3])
    for _ in range(PATIENCE + 6):
        bench.step(sequences, [0, 0, 0])
    assert (bench.drafter._missing[[one.row for one in sequences]] >= 0).all()
    for drafts in ([4, 0, 0], [2, 0, 3], [3, 5, 1], [5, 5, 5]):
        expected = [drafted(kind, one.tokens, n)[0] if n else [] for one, n in zip(sequences, drafts, strict=True)]
        assert bench.step(sequences, drafts) == expected
        for one, n in zip(sequences, drafts, strict=True):
            if n:
                assert_state(bench, kind, one)
    counts = bench.drafter.counts
    assert (counts.num_postponed, counts.num_short) == (0, 0)
    assert counts.num_rebuilt >= 18
    bench.runner.close()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_row_that_is_far_behind_starts_with_a_shorter_context(kind: str) -> None:
    bench = Bench(kind, SamplingParams(temperature=0.0))
    [sequence] = bench.prefilled(prompts_of(2)[1:])
    depth = bench.drafter._depth
    for _ in range(PATIENCE + depth + 3):
        bench.step([sequence], [0])
    begin = len(sequence.tokens) - 1 - depth
    expected, _ = drafted(kind, sequence.tokens, 4, begin=begin)
    assert bench.step([sequence], [4]) == [expected]
    assert_state(bench, kind, sequence, begin=begin)
    assert bench.drafter.counts.num_short == 1
    bench.runner.close()


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("num_idle", [0, PATIENCE + 2])
def test_a_head_that_slept_begins_where_it_was_woken(kind: str, num_idle: int) -> None:
    """Steps that need not be followed leave nothing behind: what it remembers from before them is not used."""
    bench = Bench(kind, SamplingParams(temperature=0.0))
    sequences = bench.prefilled(prompts_of(3))
    bench.step(sequences, [2, 0, 3])
    for _ in range(num_idle):
        bench.step(sequences, [0, 0, 0])
    for _ in range(6):
        bench.step(sequences, [0, 0, 0], is_followed=False)
        assert bench.runner._now is bench.runner._plain
    begins = [len(one.tokens) - 1 for one in sequences]
    for _ in range(3):
        bench.step(sequences, [0, 0, 0])
    assert not bench.drafter.has_rest
    assert bench.runner._now is bench.runner._full
    for drafts in ([4, 0, 2], [5, 5, 0]):
        expected = [
            drafted(kind, one.tokens, n, begin=begin)[0] if n else []
            for one, n, begin in zip(sequences, drafts, begins, strict=True)
        ]
        assert bench.step(sequences, drafts) == expected
    assert_state(bench, kind, sequences[0], begin=begins[0])
    counts = bench.drafter.counts
    assert (counts.num_postponed, counts.num_short) == (0, 3)
    bench.runner.close()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_head_that_is_woken_by_drafts_first_makes_none(kind: str) -> None:
    bench = Bench(kind, SamplingParams(temperature=0.0))
    [sequence] = bench.prefilled(prompts_of(2)[1:])
    for _ in range(4):
        bench.step([sequence], [0], is_followed=False)
    begin = len(sequence.tokens) - 1
    batch = bench.driver.batch([(sequence, 1)], drafts=[3])
    result = bench.runner.launch(batch).wait()
    assert (result.counts.tolist(), result.num_drafted.tolist(), result.num_postponed) == ([1], [0], 1)  # type: ignore[union-attr]
    sequence.tokens.extend(result.tokens.tolist())
    sequence.num_computed = len(sequence.tokens) - 1
    expected = [drafted(kind, sequence.tokens, 4, begin=begin)[0]]
    assert bench.step([sequence], [4]) == expected
    assert_state(bench, kind, sequence, begin=begin)
    bench.runner.close()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_logits_are_computed_beside_drafts(kind: str) -> None:
    """`forward` lays out no pass of the head, and leaves its states."""
    bench = Bench(kind, SamplingParams(temperature=0.0))
    sequences = bench.prefilled(prompts_of(3))
    before = bench.drafter._states.copy()
    batch = bench.driver.batch([(one, 1) for one in sequences])
    assert bench.runner.forward(batch).shape == (3, bench.vocab_size)
    assert np.array_equal(bench.drafter._states, before)
    bench.runner.close()
