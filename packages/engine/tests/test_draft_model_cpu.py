"""A draft model on the CPU: drafts of a model like the target are accepted, and any other model changes only how many.

A draft model with the target's weights computes the target's logits, to the bit, so each of its drafts is accepted; one
that is not shows a position, a slot or a token that is wrong.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.engine.api import SamplingParams
from pagewood.engine.model_folder.folder import FoundDrafter
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cpu.drafts.draft_model import DraftModel
from pagewood.engine.runner.cpu.drafts.loaded_drafter import load_drafter
from pagewood.engine.runner.cpu.drafts.valid_slots import drafter_layouts
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.division import RequestDivision
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.program.passes import RowTables
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.kvpool import JointLayout, MultiHeadLayout
from pagewood.kvpool.memory import allocate_joint
from pagewood.kvpool.storage import KVStorage
from row_driver import DrivenSequence, RowDriver
from scratch import scratch_folder

DIM = 16
NUM_PAGES, MAX_LENGTH, MAX_TOKENS = 2000, 96, 5
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95)
ROOT = -77


@cache
def folder_of(seed: int, head_dim: int, scale: float) -> Path:
    folder = scratch_folder()
    torch.manual_seed(seed)
    config: Any = transformers.Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, initializer_range=scale, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@cache
def model(seed: int = 3, head_dim: int = DIM, scale: float = 0.3) -> Decoder[Buffer]:
    return load_model(folder_of(seed, head_dim, scale), CPUOps())


def layout_of(decoder: Decoder[Buffer], page_size: int) -> MultiHeadLayout:
    layout = decoder.config.memory_layout(page_size=page_size, order="HND")
    assert isinstance(layout, MultiHeadLayout)
    return layout


class Bench:
    """A runner with a draft model, whose memory is joined with the target's."""

    def __init__(
        self, draft: Decoder[Buffer] | None, *, page_size: int = 4, num_threads: int = 2, max_rebuilt: int = 512
    ) -> None:
        target = model()
        dim = None if draft is None else draft.config.attentions[0].head_dim
        layout, own = layout_of(target, page_size), layout_of(draft or target, page_size)
        parts = JointLayout(parts=(layout, *drafter_layouts(own)))
        self.memory, (for_target, tags, for_drafter) = allocate_joint(parts, NUM_PAGES)
        target_storage = KVStorage(layout, NUM_PAGES, memory=for_target)
        draft_storage = KVStorage(own, NUM_PAGES, memory=for_drafter)
        self.tags = tags.array(0, "tags")
        self.drafter: DraftModel

        def make(rows: RowTables, _: RequestDivision | None) -> DraftModel:
            assert draft is not None
            self.drafter = DraftModel(
                draft, draft_storage, tags, rows, max_tokens=MAX_TOKENS, max_rebuilt=max_rebuilt,
                root=ROOT,
            )  # fmt: skip
            return self.drafter

        self.runner = CPURunner(
            target, target_storage, warm_up(DIM, drafter=dim or DIM), max_rows=20, max_length=MAX_LENGTH,
            num_threads=num_threads, make_drafter=make if draft else None,
        )  # fmt: skip
        self.driver = RowDriver(self.runner, num_pages=NUM_PAGES, page_size=page_size)

    def add(self, prompt: list[int], seed: int = 7, **share: Any) -> DrivenSequence:
        sequence = self.driver.add(prompt, sampling=SAMPLING, seed=seed, **share)
        sequence.num_sent_tokens = 0  # a drafter needs all tokens of a row
        return sequence

    def prefilled(self, prompts: list[list[int]]) -> list[DrivenSequence]:
        """Return sequences of which only the last token is not computed."""
        sequences = [self.add(prompt, seed=7 + i) for i, prompt in enumerate(prompts)]
        self.driver.generate(sequences, num_tokens=1, chunk=64)
        return sequences

    def step(self, sequences: list[DrivenSequence], drafts: list[int]) -> tuple[list[int], list[int]]:
        """Compute a step with drafts; return how many tokens each sequence got, and how many drafts were verified."""
        work = [(one, 1) for one in sequences]
        result = self.runner.launch(self.driver.batch(work, drafts=drafts)).wait()
        for sequence, tokens in zip(sequences, result.by_grant(), strict=True):
            sequence.tokens.extend(tokens)
            sequence.num_computed = len(sequence.tokens) - 1
        drafted = [0] * len(sequences) if result.num_drafted is None else result.num_drafted.tolist()
        return result.counts.tolist(), drafted


def prompts_of(num: int) -> list[list[int]]:
    return [np.random.default_rng(i).integers(0, 40, 3 + 5 * i).tolist() for i in range(num)]


@cache
def plain(num: int, length: int) -> tuple[tuple[int, ...], ...]:
    """The outputs of plain decoding."""
    bench = Bench(None)
    sequences = [bench.add(prompt, seed=7 + i) for i, prompt in enumerate(prompts_of(num))]
    bench.driver.generate(sequences, num_tokens=length, chunk=64)
    bench.runner.close()
    return tuple(tuple(one.output) for one in sequences)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_drafts_of_an_equal_model_are_all_accepted(data: st.DataObject) -> None:
    """Whatever the batch, the page size and the numbers of drafts, which change from step to step."""
    num, length = data.draw(st.integers(1, 8)), 30
    bench = Bench(
        model(), page_size=data.draw(st.sampled_from([1, 4, 16])), num_threads=data.draw(st.sampled_from([1, 2]))
    )
    sequences = bench.prefilled(prompts_of(num))
    while live := [one for one in sequences if len(one.output) < length]:
        drafts = [min(data.draw(st.integers(0, MAX_TOKENS)), length - len(one.output)) for one in live]
        yielded, drafted = bench.step(live, drafts)
        assert drafted == drafts
        assert yielded == [n + 1 for n in drafts]
    bench.runner.close()
    expected = plain(8, length)[:num]
    assert [tuple(one.output[:length]) for one in sequences] == list(expected)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_another_model_changes_no_token(data: st.DataObject) -> None:
    num, length = data.draw(st.integers(1, 8)), 30
    other = model(4, data.draw(st.sampled_from([DIM, 8])), data.draw(st.sampled_from([0.05, 0.3])))
    bench = Bench(other, page_size=data.draw(st.sampled_from([1, 4, 16])))
    sequences = bench.prefilled(prompts_of(num))
    num_yielded = num_steps = 0
    while live := [one for one in sequences if len(one.output) < length]:
        yielded, _ = bench.step(live, [data.draw(st.integers(0, MAX_TOKENS)) for _ in live])
        num_yielded, num_steps = num_yielded + sum(yielded), num_steps + len(yielded)
    bench.runner.close()
    expected = plain(8, length)[:num]
    assert [tuple(one.output[:length]) for one in sequences] == list(expected)
    assert num_steps <= num_yielded


def test_a_shared_prefix_is_not_computed_again() -> None:
    bench = Bench(model())
    prompt = prompts_of(8)[7]
    first = bench.prefilled([prompt])[0]
    bench.step([first], [3])
    counts = bench.drafter.counts
    assert (counts.num_ready, counts.num_rebuilt, counts.num_postponed) == (0, len(prompt), 0)
    second = bench.add(prompt, seed=7, share=first, num_shared_pages=len(prompt) // 4)
    bench.driver.generate([second], num_tokens=1, chunk=64)
    assert bench.step([second], [5]) == ([6], [5])
    assert bench.drafter.counts.num_rebuilt == len(prompt) + len(prompt) % 4
    assert bench.step([second], [5]) == ([6], [5])  # lacks its last draft only
    assert bench.step([second], [2]) == ([3], [2])
    counts = bench.drafter.counts
    assert (counts.num_ready, counts.num_rebuilt) == (2, len(prompt) + len(prompt) % 4)
    bench.runner.close()
    assert second.output == list(plain(8, 30)[7][: len(second.output)]) or second.output[:4] == first.output[:4]


def test_slots_that_are_not_valid_are_computed_again() -> None:
    """Also after steps without drafts, and when the pages hold another prefix, or what another model has computed."""
    bench = Bench(model())
    [sequence] = bench.prefilled(prompts_of(4)[3:])
    assert bench.step([sequence], [5]) == ([6], [5])
    for _ in range(4):
        bench.step([sequence], [0])
    assert bench.step([sequence], [5]) == ([6], [5])
    bench.drafter._slots.begin(0)  # as if admitted again
    assert bench.step([sequence], [2]) == ([3], [2])
    ready = bench.drafter.counts.num_rebuilt
    bench.drafter._slots.begin(0)
    bench.tags[sequence.pages[1]] ^= 1
    assert bench.step([sequence], [2]) == ([3], [2])
    assert bench.drafter.counts.num_rebuilt == ready + len(sequence.tokens) - 3 - 4 - 1
    bench.runner.close()


def test_a_long_prefix_is_computed_in_parts_before_anything_is_drafted() -> None:
    bench = Bench(model(), max_rebuilt=7)
    first, second = bench.prefilled([prompts_of(8)[7], prompts_of(2)[1]])
    length = len(first.tokens) - 1
    num_postponed = 0
    for _ in range(length // 7 + 1):
        yielded, drafted = bench.step([first, second], [3, 3])
        if drafted == [3, 3]:
            assert yielded == [4, 4]
            break
        assert (drafted[0], yielded[0]) == (0, 1)
        num_postponed += drafted.count(0)
    assert bench.drafter.counts.num_postponed == num_postponed >= 4
    bench.runner.close()
    assert first.output == list(plain_of(prompts_of(8)[7], 7, len(first.output)))


def test_results_say_what_the_drafter_lacked() -> None:
    bench = Bench(model(), max_rebuilt=20)
    prompt = prompts_of(8)[7]
    sequence = bench.add(prompt)
    before, results = bench.drafter.counts, []
    results.append(bench.runner.launch(bench.driver.batch([(sequence, 64)])).wait())
    sequence.tokens.extend(results[0].tokens.tolist())
    for _ in range(4):
        results.append(bench.runner.launch(bench.driver.batch([(sequence, 1)], drafts=[3])).wait())
        sequence.tokens.extend(results[-1].tokens.tolist())
        sequence.num_computed = len(sequence.tokens) - 1
    bench.runner.close()
    assert before.num_rebuilt == results[0].num_rebuilt == 0
    assert [one.num_postponed for one in results] == [0, 1, 0, 0, 0]
    assert [one.num_rebuilt for one in results] == [0, 20, len(prompt) + 1 - 20, 0, 0]
    assert sum(one.num_rebuilt for one in results) == bench.drafter.counts.num_rebuilt


def plain_of(prompt: list[int], seed: int, length: int) -> list[int]:
    bench = Bench(None)
    sequence = bench.add(prompt, seed=seed)
    bench.driver.generate([sequence], num_tokens=length, chunk=64)
    bench.runner.close()
    return sequence.output


@pytest.mark.parametrize("quality", ["equal", "other"])
def test_steps_are_launched_before_accepted_counts_are_known(quality: str) -> None:
    bench = Bench(model() if quality == "equal" else model(4))
    sequences = bench.prefilled(prompts_of(3))
    pending = []
    for _ in range(4):
        pending.append(bench.runner.launch(bench.driver.batch([(one, 1) for one in sequences], drafts=[4] * 3)))
        for one in sequences:
            one.tokens.extend([-1] * 5)
            one.num_computed = len(one.tokens) - 1
    outputs: list[list[int]] = [[] for _ in sequences]
    for handle in pending:
        for output, tokens in zip(outputs, handle.wait().by_grant(), strict=True):
            output.extend(tokens)
    bench.runner.close()
    for output, expected in zip(outputs, plain(3, 40), strict=True):
        assert tuple(output) == expected[1 : 1 + len(output)]
        assert len(output) == 20 or quality == "other"


def test_a_drafter_from_its_folder() -> None:
    target, folder = model(), folder_of(3, DIM, 0.3)
    found = FoundDrafter(kind="draft", folder=folder)
    loaded = load_drafter(found, target, folder)
    memory = loaded.memory.allocate(layout_of(target, 4), 100)
    assert memory.whole.layout == loaded.memory.layout(layout_of(target, 4))
    assert memory.whole.layout.bytes_per_page == 2 * layout_of(target, 4).bytes_per_page + 4 * 8
    runner = CPURunner(
        target, memory.target, warm_up(DIM, drafter=DIM), max_rows=3, max_length=MAX_LENGTH, num_threads=1,
        make_drafter=loaded.maker(memory, max_tokens=4),
    )  # fmt: skip
    driver = RowDriver(runner, num_pages=100, page_size=4)
    sequence = driver.add(prompts_of(3)[2])
    driver.generate([sequence], num_tokens=1, chunk=64)
    result = runner.launch(driver.batch([(sequence, 1)], drafts=[4])).wait()
    runner.close()
    assert result.counts.tolist() == [5]
