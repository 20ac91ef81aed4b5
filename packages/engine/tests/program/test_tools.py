"""Tools in programs: calls as data, from texts of the embedded model and from any text."""

# pyright: basic

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from pagewood.engine import LLM, AsyncLLM
from pagewood.engine.program import (
    Answer,
    LocalBackend,
    Prompt,
    RemoteBackend,
    State,
    ToolCall,
    Usage,
    VariableError,
    program,
)
from pagewood.engine.program.tools import offer
from pagewood.engine.text import Tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SUM: dict[str, Any] = {
    "name": "calculate",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"enum": ["1 + 1", "2 + 2"]}},
        "required": ["expression"],
    },
}
TOOLS = [WEATHER, SUM]


@pytest.fixture(scope="module")
def backend() -> Iterator[LocalBackend]:
    with LocalBackend(AsyncLLM(max_total_tokens=8192, max_running=4, page_size=4)) as found:
        yield found


class Saying:
    """A backend whose model says what a test has chosen; the rest is the real one's."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.tokenizer = tokenizer
        self.text = text
        self.prompts: list[str] = []

    def render(self, prompt: Prompt) -> str:
        return prompt.render(self.tokenizer)

    def complete(self, prompt: Prompt, sampling: Any, priority: int, *, on_text: Any = None) -> Future[Answer]:
        self.prompts.append(prompt.render(self.tokenizer))
        answer = Answer(text=self.text, finish="stop", usage=Usage())
        found: Future[Answer] = Future()
        found.set_result(answer if sampling.offer is None else sampling.offer.read(answer, self.tokenizer, prompt))
        return found

    def score(self, prompt: Prompt, choices: Any, priority: int) -> Future[Answer]:
        raise NotImplementedError


@program
def ask(s: State, question: str, tool_choice: str = "auto") -> tuple[ToolCall, ...]:
    s.user(question)
    s.gen("call", tools=TOOLS, tool_choice=tool_choice, temperature=0)
    calls = s.answer("call").calls
    for call in calls:
        s.tool(json.dumps({"temperature": 21, "sky": "sunny", **call.arguments}))
    if calls:
        s.gen("answer", tools=TOOLS, temperature=0)
    return calls


def test_a_model_calls_and_answers_from_the_result(backend: LocalBackend) -> None:
    result = ask.run("What is the weather in Paris?", on=backend)
    assert result.value == (ToolCall("get_weather", {"city": "Paris"}),)
    assert result.answer("call").text.startswith("<tool_call>")
    assert result.answer("call").content == ""
    assert "21" in result["answer"]
    assert result.usage.num_cached_tokens > 40, "the second prompt continues the first text"
    assert ask.run("Hello!", on=backend).value == ()


def test_what_is_streamed_is_the_text(backend: LocalBackend) -> None:
    result = ask("What is the weather in Paris?").start(on=backend)
    assert "".join(result.stream("call")) == result["call"]
    assert [call.name for call in result.answer("call").calls] == ["get_weather"]


def test_a_choice_binds_the_call(backend: LocalBackend) -> None:
    for choice, names in (("required", {"get_weather", "calculate"}), ("calculate", {"calculate"})):
        (call,) = ask.run("Hello!", choice, on=backend).value
        assert call.name in names
        if call.name == "calculate":
            assert call.arguments["expression"] in ("1 + 1", "2 + 2")


TEXTS = {
    "It rains.": ("It rains.", ()),
    'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>': (
        "I look.",
        (ToolCall("get_weather", {"city": "Köln"}),),
    ),
    '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b", "arguments": {"x": [1, "': (
        "",
        (ToolCall("a", {}),),
    ),
    "<tool_call>broken</tool_call>": ("<tool_call>broken</tool_call>", ()),
}


@pytest.mark.parametrize("text", TEXTS)
def test_calls_of_any_text(backend: LocalBackend, text: str) -> None:
    content, calls = TEXTS[text]
    saying = Saying(backend.tokenizer, text)
    result = ask.run("?", on=saying)
    answer = result.answer("call")
    assert (answer.text, answer.content, answer.calls) == (text, content, calls)
    assert all("get_weather" in prompt for prompt in saying.prompts), "every prompt shows the tools"


def test_tools_need_roles_and_a_tokenizer(backend: LocalBackend) -> None:
    @program
    def plain(s: State) -> None:
        s.add("Once")
        s.gen("x", tools=TOOLS)

    with pytest.raises(ValueError, match="tools must come with roles"):
        plain.run(on=backend)
    with RemoteBackend("http://127.0.0.1:9", model="m") as remote, pytest.raises(VariableError, match="tokenizer="):
        ask.run("?", on=remote)


@pytest.mark.parametrize(
    ("tools", "choice", "error", "match"),
    [
        (WEATHER, "auto", TypeError, "tools must be a sequence of objects"),
        ([5], "auto", TypeError, r"tools\[0\] must be an object as in OpenAI's API, got 5"),
        ([{"type": "function"}], "auto", ValueError, r"tools\[0\] must have a function with a new name, got None"),
        ([WEATHER, WEATHER], "auto", ValueError, r"tools\[1\] must have a function with a new name, got 'get_weather'"),
        ([WEATHER], "now", ValueError, "tool_choice must be auto, required or the name of a tool, got 'now'"),
        ([], "required", ValueError, "tool_choice must be auto"),
        ([WEATHER], None, ValueError, "tool_choice must be auto, required"),
    ],
)
def test_wrong_tools_are_named(tools: Any, choice: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        offer(tools, choice)


def test_tools_and_a_grammar_contradict_each_other(backend: LocalBackend) -> None:
    @program
    def both(s: State) -> None:
        s.user("?")
        s.gen("x", tools=TOOLS, regex="a")

    with pytest.raises(ValueError, match="regex must not come with tools"):
        both.run(on=backend)


@program
def stopping(s: State, choice: str = "auto", **options: Any) -> None:
    s.user("What is the weather in Paris?")
    s.gen("call", tools=TOOLS, tool_choice=choice, temperature=0, **options)


@pytest.mark.parametrize("of", [AsyncLLM, LLM])
def test_stop_strings_do_not_end_a_call(of: Any) -> None:
    with LocalBackend(of(max_total_tokens=8192, max_running=4, page_size=4)) as backend:
        plain = stopping.run(on=backend).answer("call")
        assert plain.calls == (ToolCall("get_weather", {"city": "Paris"}),)
        for options in ({"stop": "Paris"}, {"stop": ["\n", '"'], "stop_regex": "[a-z]{3}"}):
            answer = stopping("auto", **options).run(on=backend).answer("call")
            assert (answer.text, answer.calls, answer.finish) == (plain.text, plain.calls, "stop")
        required = stopping("required", stop="\n").run(on=backend).answer("call")
        assert [call.name for call in required.calls] == ["get_weather"]


def test_stop_strings_end_content(backend: LocalBackend) -> None:
    @program
    def hello(s: State, **options: Any) -> None:
        s.user("Hello!")
        s.gen("x", tools=TOOLS, temperature=0, **options)

    plain = hello.run(on=backend).answer("x")
    assert plain.calls == ()
    word = plain.text.split()[1]
    started = hello(stop=word).start(on=backend)
    pieces = "".join(started.stream("x"))
    answer = started.answer("x")
    assert (answer.text, answer.finish) == (plain.text.split(word)[0], "stop")
    assert (pieces, answer.content) == (answer.text, answer.text.strip())
    assert answer.usage.num_output_tokens < plain.usage.num_output_tokens
