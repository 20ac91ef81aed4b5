"""Arguments of callers: every error names the argument, the rule and the value, and is raised before anything runs."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pagewood.engine import LLM, SamplingParams
from pagewood.engine.offline.arguments import engine_config, stop_strings


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_total_tokens=1024, max_running=4) as model:
        yield model
        assert model.counters().num_tokens == 0  # no test of this file submits anything


PROMPTS: list[tuple[Any, type[Exception], str]] = [
    ("", ValueError, "prompts must hold at least one token, got ''"),
    (["a", ""], ValueError, "prompts[1] must hold at least one token, got ''"),
    ([[]], ValueError, "prompts[0] must hold at least one token, got []"),
    ([1, 2.5], TypeError, "prompts[1] must be an int token id, got 2.5"),
    ([1.0, 2], TypeError, "prompts[0] must be an int token id, got 1.0"),
    ([[1], [2, True]], TypeError, "prompts[1][1] must be an int token id, got True"),
    ([[1, "a"]], TypeError, "prompts[0][1] must be an int token id, got 'a'"),
    ([1, "a"], TypeError, "prompts[1] must be an int token id, got 'a'"),
    ([1, -1], ValueError, "prompts[1] must be a token id in [0, 512), got -1"),
    (["a", [1, 2, 512]], ValueError, "prompts[1][2] must be a token id in [0, 512), got 512"),
    ([10**30], ValueError, "prompts[0] must be a token id in [0, 512), got 1000000000000000000000000000000"),
    (np.array([1.5]), TypeError, "prompts must be a row of integers, got float64 of shape (1,)"),
    (np.array([1, 5000]), ValueError, "prompts[1] must be a token id in [0, 512), got 5000"),
    (np.zeros((2, 2, 2), int), TypeError, "prompts[0] must be a row of integers, got int64 of shape (2, 2)"),
    (["a", None], TypeError, "prompts[1] must be text or a sequence of token ids, got None"),
    (["a", 5], TypeError, "prompts[1] must be text or a sequence of token ids, got 5"),
    (None, TypeError, "prompts must be text, token ids, or a sequence of those, got None"),
    (b"abc", TypeError, "prompts must be text, token ids, or a sequence of those, got b'abc'"),
    ({"a": 1}, TypeError, "prompts must have a 'prompt' that is text and 'images', got {'a': 1}"),
    ("ab\ud800c", ValueError, r"prompts must be Unicode text, got '\ud800' at index 2"),
    (["x", "\udfff"], ValueError, r"prompts[1] must be Unicode text, got '\udfff' at index 0"),
]


@pytest.mark.parametrize(("prompts", "kind", "message"), PROMPTS)
def test_prompts_that_cannot_be_computed(llm: LLM, prompts: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        llm.generate(prompts)


def test_options_that_a_call_does_not_have(llm: LLM) -> None:
    made: Any = llm
    messages = [{"role": "user", "content": "a"}]
    for name, ask in (
        ("stopp", lambda: made.generate("a", stopp="b")),
        ("stopp", lambda: made.chat(messages, stopp="b")),
        ("make_stops", lambda: made.generate("a", make_stops=None)),
        ("n", lambda: made.stream("a", n=2)),
        ("n", lambda: made.stream_chat(messages, n=2)),
    ):
        with pytest.raises(TypeError, match=f"'{name}'"):
            ask()


CONVERSATIONS: list[tuple[Any, type[Exception], str]] = [
    ("hello", TypeError, "conversations must be a sequence of messages, or of conversations, got 'hello'"),
    ({"role": "user"}, TypeError, "conversations must be a sequence of messages, or of conversations, got {"),
    (["hello"], TypeError, "conversations[0] must be a sequence of messages, got 'hello'"),
    ([[]], ValueError, "conversations[0] must hold at least one message, got []"),
    ([[{"role": "user", "content": "a"}], ["b"]], TypeError, "conversations[1][0] must be a mapping with 'role'"),
    ([{"content": "a"}], ValueError, "conversations[0] must have a 'role' that is text, got None"),
    ([{"role": 5, "content": "a"}], ValueError, "conversations[0] must have a 'role' that is text, got 5"),
    ([{"role": "user"}], ValueError, "conversations[0] must have a 'content', got {'role': 'user'}"),
    ([{"role": "user", "content": 5}], TypeError, "conversations[0]['content'] must be text or a list of parts"),
    ([{"role": "user", "content": "\ud800"}], ValueError, r"conversations must be Unicode text, got '\ud800'"),
]


@pytest.mark.parametrize(("conversations", "kind", "message"), CONVERSATIONS)
def test_conversations_that_cannot_be_answered(
    llm: LLM, conversations: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        llm.chat(conversations)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"sampling": {"temperature": 0}}, TypeError, "sampling must be SamplingParams, got {'temperature': 0}"),
        ({"sampling": [SamplingParams()]}, ValueError, "sampling must have one entry for each of 2 prompts, got 1"),
        ({"sampling": [SamplingParams(), 5]}, TypeError, "sampling[1] must be SamplingParams, got 5"),
        ({"priority": "high"}, TypeError, "priority must be an int, got 'high'"),
        ({"priority": 1.5}, TypeError, "priority must be an int, got 1.5"),
        ({"priority": [1, True]}, TypeError, "priority[1] must be an int, got True"),
        ({"priority": []}, ValueError, "priority must have one entry for each of 2 prompts, got 0"),
        ({"adapter": 1}, TypeError, "adapter must be a string or None, got 1"),
        ({"adapter": ["a"]}, ValueError, "adapter must have one entry for each of 2 prompts, got 1"),
        ({"stop": ["a", ""]}, ValueError, "stop must hold no empty string, got ['a', '']"),
        ({"stop": ""}, ValueError, "stop must hold no empty string, got ('',)"),
        ({"stop": 5}, TypeError, "stop must be a string or a sequence of strings, got 5"),
        ({"stop": b"a"}, TypeError, "stop must be a string or a sequence of strings, got b'a'"),
        ({"stop": ["a", 5]}, TypeError, "stop[1] must be a string, got 5"),
        ({"stop_regex": 5}, TypeError, "stop_regex must be a string or a sequence of strings, got 5"),
        ({"stop_regex": ["a", None]}, TypeError, "stop_regex[1] must be a string, got None"),
        ({"stop_regex": "a*b"}, ValueError, "stop_regex must match at most 256 characters"),
        ({"stop_regex": ["a", ""]}, ValueError, "stop_regex must hold expressions of 1 to 512 characters, got 0"),
    ],
)
def test_other_arguments(llm: LLM, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        llm.generate(["a", "b"], **options)


def test_the_arguments_of_a_stream_have_the_names_of_one(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt\[1\] must be a token id in \[0, 512\), got -1"):
        llm.stream([1, -1])
    with pytest.raises(ValueError, match=r"messages\[0\] must have a 'content'"):
        llm.stream_chat([{"role": "user"}])
    with pytest.raises(TypeError, match="sampling must be SamplingParams, got 5"):
        llm.stream("a", 5)  # pyright: ignore[reportArgumentType]


def test_an_unknown_option_is_named_with_a_close_one_and_all_others() -> None:
    with pytest.raises(TypeError, match=r"max_total_tokens.*got 'page_sise' \(did you mean 'page_size'\?\)"):
        LLM(page_sise=16)
    with pytest.raises(TypeError, match=r"got 'zzz'$"):
        LLM(zzz=16)
    with pytest.raises(TypeError, match="model must be the path of a folder, or None, got 5"):
        LLM(5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="page_size must be >= 1, got 0"):
        engine_config(None, {"page_size": 0})


def test_one_stop_string_may_be_given_as_it_is() -> None:
    assert stop_strings("END") == stop_strings(["END"]) == stop_strings(("END",)) == ("END",)
    assert stop_strings(()) == ()
