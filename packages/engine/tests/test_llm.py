"""The offline API over the model that ships inside."""

from collections.abc import Iterator

import pytest

from pagewood.engine import LLM, FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_total_tokens=4096, max_running=8) as model:
        yield model


def test_one_prompt_and_several_give_the_same_completions(llm: LLM) -> None:
    prompts = ["What is", "Repeat after me: tree", "The capital of France"]
    together = llm.generate(prompts, ENDLESS)
    alone = [llm.generate(prompt, ENDLESS)[0] for prompt in prompts]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert all(len(c.tokens) == 24 and c.finish is FinishReason.LENGTH for c in together)


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    (completion,) = llm.generate("Reverse the word: stone", ENDLESS)
    assert completion.text == llm.tokenizer.decode(completion.tokens)


def test_token_ids_are_a_prompt_like_their_text(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("Say hello").tolist()
    assert llm.generate(tokens, ENDLESS)[0].tokens == llm.generate("Say hello", ENDLESS)[0].tokens


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    short, long = llm.generate(
        ["a", "b"],
        [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 7)],
    )
    assert (len(short.tokens), len(long.tokens)) == (2, 7)
    with pytest.raises(ValueError, match="sampling must have one entry for each of 1 prompts, got 2"):
        llm.generate("a", [GREEDY, GREEDY])


def test_a_higher_priority_is_computed_first(llm: LLM) -> None:
    for first_token, priority, num_cached in ((5, 0, [0, 64]), (6, [0, 1], [64, 0])):
        shared = [first_token, *range(100, 164)]  # whoever goes first computes it for the other
        completions = llm.generate([[*shared, 7], [*shared, 8]], ENDLESS, priority=priority)
        assert [completion.num_cached_tokens for completion in completions] == num_cached
    with pytest.raises(ValueError, match="priority must have one entry for each of 1 prompts, got 0"):
        llm.generate("a", GREEDY, priority=[])


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate("Count from 1 to 20", ENDLESS)[0].text
    stop = whole[5:8]
    (completion,) = llm.generate("Count from 1 to 20", ENDLESS, stop=[stop])
    assert completion.text == whole[: whole.index(stop)]
    assert completion.finish is FinishReason.STOP


def test_a_stream_is_the_completion_in_pieces(llm: LLM) -> None:
    pieces = list(llm.stream("Count from 1 to 20", ENDLESS))
    assert len(pieces) > 5
    assert "".join(pieces) == llm.generate("Count from 1 to 20", ENDLESS)[0].text


def test_a_stream_that_is_left_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("Count from 1 to 20", SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    counters = llm._engine.counters()  # pyright: ignore[reportPrivateUsage]
    assert (counters.num_running, counters.num_waiting, counters.num_draining) == (0, 0, 0)


def test_a_second_question_reuses_the_prefix(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Repeat after me: the quick brown fox jumps over the lazy dog"}]
    first = llm.chat(conversation, GREEDY)[0]
    again = llm.chat(conversation, GREEDY)[0]
    assert again.tokens == first.tokens
    assert again.num_cached_tokens >= 16


def test_what_is_too_long_is_refused_with_both_lengths_and_the_rest_is_answered(llm: LLM) -> None:
    longest = llm._engine.info.max_length  # pyright: ignore[reportPrivateUsage]
    refused, answered = llm.generate([[1] * (longest + 1), "a"], GREEDY)
    assert refused.finish is FinishReason.REFUSED
    assert refused.refusal is not None
    assert str(longest) in refused.refusal.message
    assert str(longest + 1) in refused.refusal.message
    assert answered.finish is not FinishReason.REFUSED
    with pytest.raises(ValueError, match="maximum context length"):
        next(llm.stream([1] * (longest + 1), GREEDY))
