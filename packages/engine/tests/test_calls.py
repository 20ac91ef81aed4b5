"""The answers of a call, from the deltas that arrive for its requests."""

from __future__ import annotations

import pytest

from pagewood.engine.api import Delta, FinishReason, Submit, TokenLogprob
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.offline.calls import Call, Completion, by_prompt
from pagewood.engine.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(model_folder(None))


def complete(tokenizer: Tokenizer, *deltas: Delta, stop: str = "never") -> Completion:
    call = Call([Submit(request_id="a", tokens=b"")], tokenizer=tokenizer, stop=(stop,))
    for delta in deltas:
        call.receive(delta)
    assert call.read().ended == ("a",)
    return call.completions()[0]


def test_a_completion_has_the_draft_tokens_of_its_last_delta(tokenizer: Tokenizer) -> None:
    first = Delta("a", (1, 2), first=True, num_drafted_tokens=4, num_accepted_tokens=1)
    last = Delta("a", (3,), FinishReason.LENGTH, num_drafted_tokens=7, num_accepted_tokens=2)
    completion = complete(tokenizer, first, last)
    assert (completion.num_drafted_tokens, completion.num_accepted_tokens) == (7, 2)
    assert repr(completion).endswith("0 of them cached, 2 of 7 draft tokens accepted)")


def test_a_completion_without_speculation_has_no_draft_tokens(tokenizer: Tokenizer) -> None:
    completion = complete(tokenizer, Delta("a", (1,), FinishReason.LENGTH, first=True))
    assert (completion.num_drafted_tokens, completion.num_accepted_tokens) == (0, 0)
    assert "draft" not in repr(completion)


def test_a_stop_string_inside_a_run_of_tokens_ends_the_answer(tokenizer: Tokenizer) -> None:
    ids = tuple(tokenizer.encode("one two three", add_special_tokens=False).tolist())
    end = next(n for n in range(len(ids) + 1) if "two" in tokenizer.decode(ids[:n]))
    assert end < len(ids)
    for finish in (None, FinishReason.LENGTH, FinishReason.STOP):
        run = Delta("a", ids, finish, first=True, num_drafted_tokens=9, num_accepted_tokens=8)
        completion = complete(tokenizer, run, stop="two")
        assert completion.text == "one "
        assert completion.tokens == ids[:end]
        assert completion.finish is FinishReason.STOP
        assert completion.num_accepted_tokens == 8


def test_log_probabilities_are_those_of_the_tokens_up_to_the_stop_string(tokenizer: Tokenizer) -> None:
    ids = tuple(tokenizer.encode("one two three", add_special_tokens=False).tolist())
    entries = tuple(TokenLogprob(token, -float(i), i + 1) for i, token in enumerate(ids))
    prompt = (TokenLogprob(5, -0.5, 1),)
    for cut in range(len(ids) + 1):
        first = Delta("a", ids[:cut], first=True, logprobs=entries[:cut], prompt_logprobs=prompt)
        last = Delta("a", ids[cut:], FinishReason.LENGTH, logprobs=entries[cut:])
        whole = complete(tokenizer, first, last)
        assert (whole.logprobs, whole.prompt_logprobs) == (entries, prompt)
        stopped = complete(tokenizer, first, last, stop="two")
        assert 0 < len(stopped.tokens) < len(ids)
        assert stopped.logprobs == entries[: len(stopped.tokens)]
    assert complete(tokenizer, Delta("a", ids, FinishReason.LENGTH, first=True)).logprobs == ()


def test_answers_to_a_prompt_have_its_log_probabilities(tokenizer: Tokenizer) -> None:
    call = Call([Submit(request_id=name, tokens=b"") for name in "abcd"], tokenizer=tokenizer, stop=())
    for i, name in enumerate("abcd"):
        prompt = (TokenLogprob(i, -0.5, 1),) if i % 2 == 0 else ()
        call.receive(Delta(name, (i,), FinishReason.LENGTH, first=True, prompt_logprobs=prompt))
    call.read()
    groups = by_prompt(call.completions(), call.submits, 2)
    assert [[one.tokens for one in group] for group in groups] == [[(0,), (1,)], [(2,), (3,)]]
    assert [[one.prompt_logprobs[0].token for one in group] for group in groups] == [[0, 0], [2, 2]]
