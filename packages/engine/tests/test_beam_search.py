"""Beam search: alone against all sequences, and over engines against `generate(num_beams=...)` of `transformers`."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.engine import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    BeamSearchResult,
    FinishReason,
    LLMClosedError,
    SamplingParams,
)
from pagewood.engine.beam_search import BeamSearch
from pagewood.engine.model_folder.folder import model_folder as embedded_folder
from pagewood.engine.offline.shared_engine import SharedEngine
from seeded_faults import Edit, seed_fault
from tiny_models import model_folder

ERROR = 1e-3
OPTIONS: dict[str, Any] = {"max_total_tokens": 4096, "max_running": 16, "max_prefills": 16, "num_threads": 1}
TINY_PROMPTS = [[9, 8, 7, 3, 9, 8, 30, 31, 5, 6, 57, 12], [4], list(range(1, 40))]
QUESTIONS = ["Tell me about the moon", "What is 12 + 7?", "Reverse the word: stone", "Count from 1 to 5"]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, in whose texts any token may come next; with a tokenizer, which has more tokens."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    shutil.copytree(model_folder("llama"), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_folder(None) / name, folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, **OPTIONS) as model:
        yield model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as model:
        yield model


def engine_of(llm: LLM) -> SharedEngine:
    return llm._engine


def assert_at_rest(llm: LLM) -> None:
    counters = llm.counters()
    assert counters.num_running + counters.num_waiting + counters.num_draining == 0
    assert engine_of(llm).violation() is None
    assert engine_of(llm)._router.num_open == 0


@cache
def reference(folder: Path) -> Any:
    """Return the model of `transformers`."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def expected(
    model: Any, prompt: list[int], params: BeamSearchParams, eos: tuple[int, ...]
) -> list[tuple[tuple[int, ...], float]]:
    """Return the answers of `transformers` without their stop tokens, with their scores; `eos` end a sequence."""
    stops = None if params.ignore_eos and not params.stop_token_ids else [*eos, *params.stop_token_ids]
    model.generation_config.eos_token_id = stops
    model.generation_config.pad_token_id = -1 if stops is None else stops[0]
    found = model.generate(
        torch.tensor([prompt]), num_beams=params.beam_width, num_return_sequences=params.beam_width, do_sample=False,
        max_new_tokens=params.max_tokens, length_penalty=params.length_penalty, early_stopping=params.early_stopping,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    answers = []
    for row, indices, score in zip(found.sequences, found.beam_indices, found.sequences_scores, strict=True):
        tokens = row[len(prompt) : len(prompt) + int((indices >= 0).sum())].tolist()
        answers.append((tuple(tokens[:-1] if stops and tokens[-1] in stops else tokens), float(score)))
    return answers


def check(result: BeamSearchResult, answers: list[tuple[tuple[int, ...], float]], params: BeamSearchParams) -> None:
    assert result.refusal is None
    assert [sequence.tokens for sequence in result.sequences] == [tokens for tokens, _ in answers]
    assert [one.score for one in result.sequences] == pytest.approx([score for _, score in answers], abs=ERROR)
    for one in result.sequences:
        length = len(one.tokens) + (one.finish is FinishReason.STOP)
        assert one.score == pytest.approx(one.cumulative_logprob / length**params.length_penalty)
        assert one.finish is FinishReason.STOP or length == params.max_tokens


def compare(llm: LLM, folder: Path, prompts: list[list[int]], params: BeamSearchParams) -> list[BeamSearchResult]:
    """Compare a search with that of `transformers`."""
    model = reference(folder)
    results = llm.beam_search(prompts, params)
    for prompt, result in zip(prompts, results, strict=True):
        check(result, expected(model, prompt, params, llm.info.eos_token_ids), params)
    return results


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
def test_results_are_those_of_transformers_where_any_token_may_come_next(
    tiny: LLM, tiny_folder: Path, early_stopping: Any, length_penalty: float
) -> None:
    for width, stops in ((2, ()), (3, (5, 9, 17)), (8, (5, 9, 17)), (31, (5,))):
        params = BeamSearchParams(
            beam_width=width, max_tokens=12, length_penalty=length_penalty, early_stopping=early_stopping,
            stop_token_ids=stops,
        )  # fmt: skip
        results = compare(tiny, tiny_folder, TINY_PROMPTS, params)
        if stops and length_penalty < 2:  # otherwise only the longest are left
            finishes = {sequence.finish for result in results for sequence in result.sequences}
            assert FinishReason.STOP in finishes


_IN_SHORT = ((2, "never"), (4, True), (7, False))
"""Each width and each way to stop once, with a real model; above, each way to stop meets four widths."""


@pytest.mark.parametrize(
    ("width", "early_stopping"),
    [
        pytest.param(*case, marks=[] if case in _IN_SHORT else [pytest.mark.slow])
        for case in itertools.product((2, 4, 7), (True, False, "never"))
    ],
)
def test_results_are_those_of_transformers_for_questions(llm: LLM, early_stopping: Any, width: int) -> None:
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]).tolist() for text in QUESTIONS]
    params = BeamSearchParams(beam_width=width, max_tokens=20, early_stopping=early_stopping)
    results = compare(llm, embedded_folder(None), prompts, params)
    assert "19" in results[1].sequences[0].text
    for result in results:
        for sequence in result.sequences:
            assert sequence.text == llm.tokenizer.decode(sequence.tokens)


def test_stop_tokens_may_be_ignored(tiny: LLM, tiny_folder: Path) -> None:
    for stops in ((), (5,)):
        params = BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True, stop_token_ids=stops)
        model = reference(tiny_folder)
        for prompt, result in zip(TINY_PROMPTS, tiny.beam_search(TINY_PROMPTS, params), strict=True):
            check(result, expected(model, prompt, params, ()), params)


def test_a_beam_of_one_is_greedy(llm: LLM) -> None:
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": QUESTIONS[0]}])
    (plain,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=40, logprobs=0))
    (result,) = llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=40))
    (sequence,) = result.sequences
    assert (sequence.tokens, sequence.text, sequence.finish) == (plain.tokens, plain.text, plain.finish)


TABLE = st.lists(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3), min_size=4, max_size=4)


@settings(max_examples=200, deadline=None)
@given(table=TABLE, penalty=st.sampled_from([-1.0, 0.0, 0.7, 1.0, 3.0]), max_tokens=st.integers(1, 4))
def test_a_beam_with_room_for_everything_finds_all_sequences(
    table: list[list[float]], penalty: float, max_tokens: int
) -> None:
    """The probability of a token depends on the one before it; token 0 ends a sequence."""
    rows = [[math.log(value / sum(row)) for value in row] for row in table]
    found: dict[tuple[int, ...], float] = {}
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(3), repeat=length):
            if 0 not in tokens[:-1] and (tokens[-1] == 0 or length == max_tokens):
                total = sum(rows[before][token] for before, token in itertools.pairwise((3, *tokens)))
                found[tokens] = total / length**penalty
    width = 60
    params = BeamSearchParams(beam_width=width, length_penalty=penalty, early_stopping="never")
    search = BeamSearch(params, stop_ids=frozenset({0}), max_tokens=max_tokens)
    num_steps = 0
    while sequences := search.sequences:
        follow = [rows[tokens[-1] if tokens else 3] for tokens in sequences]
        search.take([sorted(enumerate(row), key=lambda one: -one[1]) for row in follow])
        num_steps += 1
    assert num_steps == max_tokens
    beams = {(*beam.tokens, 0) if beam.finish is FinishReason.STOP else beam.tokens: beam.score for beam in search.best}
    assert beams == pytest.approx(found)
    assert [beam.score for beam in search.best] == sorted(beams.values(), reverse=True)
    assert {beam.num_output_tokens for beam in search.best} <= set(range(1, max_tokens + 1))


def test_what_the_beams_share_is_computed_once(tiny_folder: Path) -> None:
    """With pages of one token, every step computes one token for each open sequence, after the prompt."""
    with LLM(tiny_folder, page_size=1, **OPTIONS) as llm:
        prompt, width, num_tokens = list(range(1, 50)), 4, 10
        (result,) = llm.beam_search(prompt, BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True))
        counters = llm.counters()
        assert len(result.sequences) == width
        assert result.num_cached_tokens == 0
        assert counters.num_tokens == len(prompt) + width * (num_tokens - 1)
        assert counters.num_steps == num_tokens
        (again,) = llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=1))
        assert again.num_cached_tokens == len(prompt) - 1


def test_all_prompts_run_together(tiny: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    alone = [tiny.beam_search(prompt, params)[0].sequences for prompt in TINY_PROMPTS]
    before = tiny.counters().num_steps
    together = tiny.beam_search(TINY_PROMPTS, params, priority=[0, 1, 2])
    assert [result.sequences for result in together] == alone
    assert tiny.counters().num_steps - before == 10
    assert tiny.beam_search([], params) == []


def test_a_prompt_that_is_too_long_is_refused_and_the_others_are_answered(tiny: LLM) -> None:
    most = tiny.info.max_length
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    long, short = tiny.beam_search([[1] * (most - 2), [1, 2]], params)
    assert (long.sequences, long.num_prompt_tokens) == ((), most - 2)
    (plain,) = tiny.generate([[1] * (most - 2)], SamplingParams(max_tokens=3))
    assert long.refusal == plain.refusal
    assert len(short.sequences) == 2
    assert short.refusal is None
    (fits,) = tiny.beam_search([[1] * (most - 3)], params)
    assert len(fits.sequences) == 2


def test_without_a_limit_a_search_takes_what_the_engine_has(tiny: LLM) -> None:
    prompt = [1] * (tiny.info.max_length - 3)
    (result,) = tiny.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=None, ignore_eos=True))
    assert [len(sequence.tokens) for sequence in result.sequences] == [3, 3]
    (plain,) = tiny.generate([[*prompt, 1, 1, 1]], SamplingParams(max_tokens=None))
    (refused,) = tiny.beam_search([[*prompt, 1, 1, 1]], BeamSearchParams(beam_width=2, max_tokens=None))
    assert plain.refusal is not None
    assert refused.refusal == plain.refusal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, r"beam_width must be in \[1, 64\], got 0"),
        ({"beam_width": 65}, r"beam_width must be in \[1, 64\], got 65"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"beam_width": 2, "length_penalty": 11.0}, r"length_penalty must be in \[-10, 10\], got 11.0"),
        ({"beam_width": 2, "length_penalty": math.nan}, "length_penalty must be in"),
        ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping must be True, False or 'never', got 'soon'"),
    ],
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**options)


def test_arguments_are_checked_before_anything_is_computed(tiny: LLM) -> None:
    before = tiny.counters().num_steps
    wide = BeamSearchParams(beam_width=63, stop_token_ids=(5,))
    with pytest.raises(ValueError, match="beam_width must be at most 61, which is 64 less the number of stop tokens"):
        tiny.beam_search([1], wide)
    with pytest.raises(TypeError, match="params must be BeamSearchParams, got"):
        tiny.beam_search([1], SamplingParams())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="priority must have one entry for each of 1 prompts, got 2"):
        tiny.beam_search([1], BeamSearchParams(beam_width=2), priority=[1, 2])
    with pytest.raises(ValueError, match="prompts must hold at least one token"):
        tiny.beam_search("", BeamSearchParams(beam_width=2))
    assert tiny.counters().num_steps == before


def test_an_exception_leaves_the_llm_usable(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=6)
    usual = tiny.beam_search(TINY_PROMPTS, params)
    for owner, name in ((SharedEngine, "_step"), (BeamSearch, "take")):
        original, num_calls = getattr(owner, name), 0

        def interrupted(*args: Any, original: Any = original) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 3:
                raise KeyboardInterrupt
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                tiny.beam_search(TINY_PROMPTS, params)
        assert_at_rest(tiny)
        assert [one.sequences for one in tiny.beam_search(TINY_PROMPTS, params)] == [one.sequences for one in usual]


def test_async_searches_run_together_and_can_be_cancelled(tiny: LLM, tiny_folder: Path) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=10)
    usual = [result.sequences for result in tiny.beam_search(TINY_PROMPTS, params)]

    async def main() -> None:
        async with AsyncLLM(tiny_folder, **OPTIONS) as llm:
            long = BeamSearchParams(beam_width=4, max_tokens=200, ignore_eos=True)
            cancelled = asyncio.create_task(llm.beam_search([1, 2, 3], long))
            singles = [llm.beam_search(prompt, params) for prompt in TINY_PROMPTS]
            together, *alone = await asyncio.gather(llm.beam_search(TINY_PROMPTS, params), *singles)
            assert [result.sequences for result in together] == [result.sequences for (result,) in alone] == usual
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert llm._engine._router.num_open == 0
            (again,) = await llm.beam_search([TINY_PROMPTS[0]], params)
            assert again.sequences == usual[0]
            with pytest.raises(ValueError, match="beam_width must be at most"):
                await llm.beam_search([1], BeamSearchParams(beam_width=64))
            open_ = asyncio.create_task(llm.beam_search([1, 2, 3], long))
            while not llm._engine._router.num_open:
                await asyncio.sleep(0.001)
        with pytest.raises(LLMClosedError):
            await open_

    asyncio.run(asyncio.wait_for(main(), 120))


def check_all(llm: LLM, folder: Path) -> None:
    """Compare searches that must find every fault."""
    for early_stopping, length_penalty in itertools.product((True, False), (-1.0, 0.0, 1.0, 2.5)):
        params = BeamSearchParams(
            beam_width=3, max_tokens=12, length_penalty=length_penalty, early_stopping=early_stopping,
            stop_token_ids=(5, 9, 17),
        )  # fmt: skip
        compare(llm, folder, TINY_PROMPTS, params)


FAULTS: dict[str, list[Edit]] = {
    "ends beyond the beam count": [(BeamSearch, "take", "place < width", "True")],
    "a stop token is continued": [(BeamSearch, "take", "token in self._stop_ids or", "")],
    "ends with the first ended sequence": [(BeamSearch, "take", "len(self._ended) == width and", "self._ended and")],
    "the stop token has no length": [
        (BeamSearch, "_beam", "(total, length)", "(total, length - (finish is FinishReason.STOP) * 0.5)")
    ],
    "an open sequence is judged by its longest end": [
        (BeamSearch, "_can_improve", 'early_stopping == "never" and', "length_penalty and")
    ],
    "early stopping is ignored": [(BeamSearch, "_can_improve", "early_stopping is True", "early_stopping == 1.5")],
    "candidates in the order of their sequences": [(BeamSearch, "take", "-candidate[0]", "0")],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tiny: LLM, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault(FAULTS[fault], monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        check_all(tiny, tiny_folder)
