"""Several answers to one prompt: their seeds, their requests, and the prompt that is computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.engine import LLM, AsyncLLM, SamplingParams
from pagewood.engine.api import Submit
from pagewood.engine.fan_out import fan_out
from pagewood.engine.runner.splitmix import Domain, mix, row_keys, seeds_of
from pagewood.engine.seeds import answer_seed

SEEDS = st.integers(-(2**63), 2**63 - 1)
SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
LONG_PROMPT = list(range(5, 5 + 200))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_total_tokens=8192, max_running=8) as model:
        yield model


@given(seed=SEEDS, num=st.integers(1, 200))
def test_answers_have_different_seeds_of_64_bits(seed: int, num: int) -> None:
    seeds = [answer_seed(seed, i) for i in range(num)]
    assert seeds[0] == seed
    assert len(set(seeds)) == num
    assert all(-(2**63) <= one < 2**63 for one in seeds)


@given(seed=SEEDS, index=st.integers(1, 1000))
def test_seeds_are_hashed_as_the_docstring_says(seed: int, index: int) -> None:
    with np.errstate(over="ignore"):
        inner = mix(np.array([seed ^ 0x5349424C494E4753], np.int64).view(np.uint64))
        expected = mix(inner + np.array([index], np.uint64) * np.uint64(0xD1342543DE82EF95)).view(np.int64)
    assert answer_seed(seed, index) == int(expected[0])


def test_seeds_of_answers_meet_no_others() -> None:
    """Neither the seeds of other small seeds' answers, nor the hashes that draws are made of."""
    prompts = np.arange(-50, 200)
    seeds = np.array([[answer_seed(int(seed), i) for i in range(16)] for seed in prompts])
    assert len(np.unique(seeds)) == seeds.size
    positions = np.arange(64, dtype=np.int32)
    others = [row_keys(np.full(64, seed), positions).view(np.int64) for seed in prompts]
    others += [seeds_of(prompts, domain) for domain in (Domain.DRAFT, Domain.ACCEPT)]
    assert not np.isin(np.concatenate(others), seeds).any()


def test_requests_differ_in_ids_seeds_and_prompt_logprobs() -> None:
    sampling = SamplingParams(seed=3, logprobs=2, prompt_logprobs=4)
    submit = Submit(request_id="a", tokens=b"1234", sampling=sampling, priority=2, namespace="x", carry=b"first")
    first, second, third = fan_out(submit, ["b", "c"], carry=b"other")
    assert first is submit
    assert (second.request_id, third.request_id) == ("b", "c")
    for index, one in ((1, second), (2, third)):
        assert (one.tokens, one.priority, one.namespace, one.carry) == (b"1234", 2, "x", b"other")
        assert one.sampling == SamplingParams(seed=answer_seed(3, index), logprobs=2)
    assert [one.sampling.seed for one in fan_out(Submit(request_id="a", tokens=b""), ["b"])] == [None, None]


def test_the_prompt_is_computed_once(llm: LLM) -> None:
    prompt = [9, *LONG_PROMPT]  # of no other test
    before = llm.counters().num_tokens
    (answers,) = llm.generate(prompt, SEEDED, n=6)
    num_tokens = llm.counters().num_tokens - before
    assert len({answer.tokens for answer in answers}) == 6
    assert answers[0].num_cached_tokens == 0
    num_shared = (len(prompt) - 1) // 16 * 16
    assert [answer.num_cached_tokens for answer in answers[1:]] == [num_shared] * 5
    # The rest of the last page is computed for each answer, then one position for each token but the last; an
    # overlapped step may compute one more.
    rest = len(prompt) - num_shared
    computed = len(prompt) + 5 * rest + 6 * 11
    assert computed <= num_tokens <= computed + 6


def test_answers_are_those_of_single_requests(llm: LLM) -> None:
    prompts = [LONG_PROMPT, [7, 8, 9]]
    together = llm.generate(prompts, SEEDED, n=3)
    for prompt, answers in zip(prompts, together, strict=True):
        for index, answer in enumerate(answers):
            alone = SamplingParams(temperature=1.0, seed=answer_seed(11, index), max_tokens=12, ignore_eos=True)
            assert answer.tokens == llm.generate([prompt], alone)[0].tokens


def test_greedy_answers_are_equal_and_unseeded_ones_are_not(llm: LLM) -> None:
    (greedy,) = llm.generate("What is", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), n=3)
    assert len({answer.tokens for answer in greedy}) == 1
    (unseeded,) = llm.generate("What is", SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True), n=4)
    assert len({answer.tokens for answer in unseeded}) == 4


def test_log_probabilities(llm: LLM) -> None:
    """Of each answer and of the prompt, which is scored once; greedily, each token is the most probable one."""
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    prompts = [LONG_PROMPT, [7, 8, 9]]
    for prompt, answers in zip(prompts, llm.generate(prompts, sampling, n=3), strict=True):
        assert [[entry.token for entry in answer.logprobs] for answer in answers] == [list(a.tokens) for a in answers]
        assert all(entry.rank == 1 and len(entry.top) == 2 for answer in answers for entry in answer.logprobs)
        for answer in answers:
            assert [entry.token for entry in answer.prompt_logprobs] == prompt[1:]
            assert answer.prompt_logprobs == answers[0].prompt_logprobs
        # The same tokens as a prompt have the same log probabilities.
        (scored,) = llm.generate([*prompt, *answers[0].tokens], sampling)
        again = scored.prompt_logprobs[len(prompt) - 1 :]
        assert [entry.logprob for entry in again] == pytest.approx([entry.logprob for entry in answers[0].logprobs])
    (plain,) = llm.generate("a", SamplingParams(max_tokens=2))
    assert plain.logprobs == plain.prompt_logprobs == ()


def test_the_shape_of_the_result(llm: LLM) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    (plain,) = llm.generate("a", short)
    ((one,),) = llm.generate("a", short, n=1)
    assert one.tokens == plain.tokens
    chats = llm.chat([[{"role": "user", "content": text}] for text in "ab"], short, n=2)
    assert [len(answers) for answers in chats] == [2, 2]
    assert llm.generate([], n=3) == []
    for wrong, error in ((0, ValueError), (True, TypeError), (1.0, TypeError)):
        with pytest.raises(error, match=r"n must be"):
            llm.generate("a", n=cast("Any", wrong))


def test_async_answers_are_the_same(llm: LLM) -> None:
    async def ask() -> list[tuple[int, ...]]:
        async with AsyncLLM(max_total_tokens=4096, max_running=8) as model:
            ((first, second),) = await model.generate([LONG_PROMPT], SEEDED, n=2)
            ((chat,),) = await model.chat([[{"role": "user", "content": "Hi"}]], SEEDED, n=1)
            assert len(chat.tokens) == 12
            assert second.num_cached_tokens == 192
            return [first.tokens, second.tokens]

    assert asyncio.run(ask()) == [answer.tokens for answer in llm.generate([LONG_PROMPT], SEEDED, n=2)[0]]
