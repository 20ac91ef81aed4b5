"""Drafts on the CPU: they change how many tokens a step yields, and neither the tokens nor the logits.

Drafts come from a lookup that knows the text and errs at random.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cpu.drafts.drafting import LookupDrafter
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.storage import storage_for
from row_driver import DrivenSequence, RowDriver
from scratch import scratch_folder
from stand_ins.knowing_lookup import KnowingLookup

DIM = 16
NUM_PAGES, MAX_LENGTH = 4000, 96
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95)


@cache
def model(window: int | None = None, nan_token: int | None = None) -> Decoder[Buffer]:
    """Return a model; the embedding of `nan_token` is NaN."""
    folder = scratch_folder()
    torch.manual_seed(3)
    config: Any = transformers.Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=DIM, initializer_range=0.3, tie_word_embeddings=False,
        use_sliding_window=window is not None, sliding_window=window or 64,
        layer_types=["full_attention", "full_attention" if window is None else "sliding_attention"],
    )  # fmt: skip
    reference = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        if nan_token is not None:
            reference.model.embed_tokens.weight[nan_token] = torch.nan
    reference.save_pretrained(folder)
    return load_model(folder, CPUOps())


class Bench:
    """A runner over memory of its own, and the driver that feeds it."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        int8: bool = False,
        num_threads: int = 2,
        window: int | None = None,
        make_lookup: Callable[[Int32], LookupDrafter] | None = None,
        nan_token: int | None = None,
    ) -> None:
        config = model(window).config
        layout = config.memory_layout(page_size=page_size, dtype="int8" if int8 else "float32", order="HND")
        self.runner = CPURunner(
            model(window, nan_token), storage_for(layout, NUM_PAGES), warm_up(layout), max_rows=10,
            max_length=MAX_LENGTH, num_threads=num_threads, make_lookup=make_lookup,
        )  # fmt: skip
        self.driver = RowDriver(self.runner, num_pages=NUM_PAGES, page_size=page_size)

    def prefilled(self, prompts: list[list[int]]) -> list[DrivenSequence]:
        """Return sequences of which only the last token is not computed."""
        sequences = [self.driver.add(prompt, sampling=SAMPLING, seed=7 + i) for i, prompt in enumerate(prompts)]
        self.driver.generate(sequences, num_tokens=1, chunk=64)
        return sequences

    def step(self, sequences: list[DrivenSequence], drafts: list[int]) -> tuple[list[int], list[int]]:
        """Compute a step with drafts; return how many tokens each sequence got, and how many drafts were verified."""
        result = self.runner.launch(self.driver.batch([(one, 1) for one in sequences], drafts=drafts)).wait()
        for sequence, tokens in zip(sequences, result.by_grant(), strict=True):
            take(sequence, tokens)
        assert result.num_drafted is not None
        return result.counts.tolist(), result.num_drafted.tolist()


def take(sequence: DrivenSequence, tokens: tuple[int, ...]) -> None:
    """Append tokens that a step has yielded."""
    sequence.tokens.extend(tokens)
    sequence.num_computed = len(sequence.tokens) - 1


def prompts_of(num: int) -> list[list[int]]:
    return [np.random.default_rng(i).integers(0, 40, 3 + 5 * i).tolist() for i in range(num)]


@cache
def plain(num: int, length: int, int8: bool) -> tuple[tuple[int, ...], ...]:
    """The outputs of plain decoding."""
    bench = Bench(int8=int8)
    sequences = [bench.driver.add(prompt, sampling=SAMPLING, seed=7 + i) for i, prompt in enumerate(prompts_of(num))]
    bench.driver.generate(sequences, num_tokens=length, chunk=64)
    bench.runner.close()
    return tuple(tuple(one.output) for one in sequences)


@settings(max_examples=20, deadline=None)
@given(int8=st.booleans(), data=st.data())
def test_chains_do_not_change_the_tokens(int8: bool, data: st.DataObject) -> None:
    """With any batch, number of drafts, quality of drafts, page size and threads."""
    num, length = data.draw(st.integers(1, 8)), 30
    quality = data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    expected = plain(8, length, int8)[:num]
    texts = [[*prompt, *output] for prompt, output in zip(prompts_of(num), expected, strict=True)]
    seed = data.draw(st.integers(0, 100))
    bench = Bench(
        int8=int8,
        page_size=data.draw(st.sampled_from([1, 4, 16])),
        num_threads=data.draw(st.sampled_from([1, 2])),
        make_lookup=lambda tokens: KnowingLookup(tokens, texts, quality=quality, seed=seed),
    )
    sequences = bench.prefilled(prompts_of(num))
    while live := [one for one in sequences if len(one.output) < length]:
        drafts = [min(data.draw(st.integers(1, 8)), length - len(one.output)) for one in live]
        bench.step(live, drafts)
    bench.runner.close()
    assert [tuple(one.output[:length]) for one in sequences] == list(expected)


def test_right_drafts_are_all_accepted_and_counted() -> None:
    [expected] = plain(1, 30, False)
    text = [*prompts_of(1)[0], *expected]
    bench = Bench(make_lookup=lambda tokens: KnowingLookup(tokens, [text], quality=1.0, seed=0, full=True))
    [sequence] = bench.prefilled(prompts_of(1))
    assert bench.step([sequence], [5]) == ([6], [5])
    assert bench.step([sequence], [3]) == ([4], [3])
    bench.runner.close()
    assert tuple(sequence.output) == expected[:11]


def test_a_chain_ends_at_the_first_wrong_draft() -> None:
    [expected] = plain(1, 30, False)
    for wrong in range(5):
        text = [*prompts_of(1)[0], *expected]
        text[3 + 1 + wrong] = (text[3 + 1 + wrong] + 1) % 40
        bench = Bench(make_lookup=lambda tokens, t=text: KnowingLookup(tokens, [t], quality=1.0, seed=0, full=True))
        [sequence] = bench.prefilled(prompts_of(1))
        assert bench.step([sequence], [5]) == ([1 + wrong], [5])
        assert bench.step([sequence], [5])[0] == [6]
        bench.runner.close()
        assert tuple(sequence.output) == expected[: len(sequence.output)]


def test_drafts_beside_prompts_and_plain_grants() -> None:
    expected = plain(4, 30, False)
    texts = [[*prompt, *output] for prompt, output in zip(prompts_of(4), expected, strict=True)]
    bench = Bench(make_lookup=lambda tokens: KnowingLookup(tokens, texts, quality=0.8, seed=1))
    first, second = bench.prefilled(prompts_of(2))
    third, fourth = (bench.driver.add(prompts_of(4)[i], sampling=SAMPLING, seed=7 + i) for i in (2, 3))
    sequences = [first, second, third, fourth]
    while min(len(one.output) for one in sequences) < 30:
        live = [one for one in sequences if len(one.output) < 30]
        num_drafts = [0 if one is second else 4 for one in live]
        batch = bench.driver.batch([(one, 3) for one in live], drafts=num_drafts)
        result = bench.runner.launch(batch).wait()
        sampled = [live[i] for i in batch.sampled.tolist()]
        for one, tokens in zip(sampled, result.by_grant(), strict=True):
            take(one, tokens)
    bench.runner.close()
    assert [tuple(one.output[:30]) for one in sequences] == list(expected)


@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
def test_steps_are_launched_before_accepted_counts_are_known(quality: float) -> None:
    """Step N+1 is launched with upper bounds of its starts before step N is waited for."""
    expected = plain(3, 40, False)
    texts = [[*prompt, *output] for prompt, output in zip(prompts_of(3), expected, strict=True)]
    lookups: list[KnowingLookup] = []

    def make(tokens: Int32) -> KnowingLookup:
        lookups.append(KnowingLookup(tokens, texts, quality=quality, seed=2, full=True))
        return lookups[0]

    bench = Bench(make_lookup=make)
    sequences = bench.prefilled(prompts_of(3))
    pending = None
    for _ in range(6):
        following = bench.runner.launch(bench.driver.batch([(one, 1) for one in sequences], drafts=[4] * 3))
        bounds = [len(one.tokens) for one in sequences]
        for one in sequences:
            take(one, (-1,) * 5)
        if pending is not None:
            settle(sequences, pending, bounds)
        pending = following
    assert pending is not None
    settle(sequences, pending, [len(one.tokens) for one in sequences])
    bench.runner.close()
    for one, tokens in zip(sequences, expected, strict=True):
        assert tuple(one.output) == tokens[: len(one.output)]
        assert len(one.output) == (31 if quality == 1.0 else len(one.output))
    assert sorted(set(lookups[0].advanced)) == sorted(lookups[0].advanced)  # each step is noted once


def settle(sequences: list[DrivenSequence], handle: Any, bounds: list[int]) -> None:
    """Replace the five unknown tokens before the bounds by those of a step."""
    for one, tokens, end in zip(sequences, handle.wait().by_grant(), bounds, strict=True):
        one.tokens[end - 5 : end] = tokens
        one.num_computed = len(one.tokens) - 1


def test_a_run_ends_before_logits_that_are_not_numbers() -> None:
    """Plain decoding would yield the tokens before them, and then nothing."""
    [prompt], [expected] = prompts_of(1), plain(1, 30, False)
    text = [*prompt, *expected]
    last = next(i for i in range(3, 8) if expected[i] not in text[: len(prompt) + i])  # the next logits are NaN
    bench = Bench(
        nan_token=expected[last],
        make_lookup=lambda tokens: KnowingLookup(tokens, [text], quality=1.0, seed=0, full=True),
    )
    [sequence] = bench.prefilled([prompt])
    assert bench.step([sequence], [8]) == ([last], [8])
    assert tuple(sequence.output) == expected[: last + 1]
    for _ in range(2):  # and once more, as if launched ahead
        assert bench.step([sequence], [3]) == ([0], [3])
    bench.runner.close()


def test_the_error_of_a_lookup_is_raised_by_the_wait_for_its_step() -> None:
    text = [*prompts_of(1)[0], *plain(1, 30, False)[0]]
    lookups: list[KnowingLookup] = []

    def make(tokens: Int32) -> KnowingLookup:
        lookups.append(KnowingLookup(tokens, [text], quality=1.0, seed=0, full=True))
        return lookups[0]

    bench = Bench(make_lookup=make)
    [sequence] = bench.prefilled(prompts_of(1))
    lookups[0].texts = []
    broken = bench.runner.launch(bench.driver.batch([(sequence, 1)], drafts=[4]))
    with pytest.raises(IndexError):
        broken.wait()
    lookups[0].texts = [text]
    take(sequence, ())
    assert bench.step([sequence], [4]) == ([5], [4])
    bench.runner.close()
    assert sequence.tokens == text[: len(sequence.tokens)]
