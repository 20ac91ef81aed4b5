"""The same program gives the same texts on an engine in this process and on a server."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import pagewood.engine
from pagewood.engine import AsyncLLM, Grammar
from pagewood.engine.program import (
    Backend,
    DeadlineExceededError,
    LocalBackend,
    RemoteBackend,
    State,
    VariableError,
    program,
    run_many,
)

MODEL = "pagewood-demo"
FOLDER = Path(pagewood.engine.__file__).parent / "demo"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def local() -> Iterator[LocalBackend]:
    with LocalBackend(AsyncLLM(max_total_tokens=8192)) as backend:
        yield backend


@pytest.fixture(scope="module")
def remote(url: str) -> Iterator[RemoteBackend]:
    with RemoteBackend(url, model=MODEL, tokenizer=FOLDER) as backend:
        yield backend


@program
def plain(s: State) -> list[str]:
    s.add("1, 2, 3,")
    s.gen("greedy", max_tokens=12, temperature=0)
    branches = s.fork(6)
    for index, branch in enumerate(branches):
        branch.add(f" {index}:")
    branches[0].gen("x", max_tokens=16, temperature=1.3, seed=11, top_k=40, top_p=0.95)
    branches[1].gen("x", temperature=0, stop=["5", "\n"], stop_regex="[67]")
    branches[2].gen("x", temperature=0.7, seed=3, regex="[a-z]{2,9}")
    branches[3].gen("x", temperature=0.7, seed=3, json_schema=SCHEMA)
    branches[4].gen("x", temperature=0, choice=["one", "two"])
    branches[5].gen("x", temperature=0, grammar=Grammar.lark('start: "<" /[0-9]/ ">"'))
    s.join(branches)
    s.select("best", [" 9", " four", " 10, 11"])
    return [branch["x"] for branch in branches]


@program
def talk(s: State) -> None:
    s.system("You help.")
    s.user("What is 12 + 7?")
    with s.assistant():
        s.add("12 + 7")
        s.gen("sum", temperature=0, max_tokens=8)
        s.add(" ! ")
        s.gen("more", temperature=0.9, seed=4, max_tokens=8)
    s.user("Reverse: stone")
    s.select("word", ["stone", "enots"])


def test_plain_programs_are_the_same(local: LocalBackend, remote: RemoteBackend, url: str) -> None:
    expected = plain.run(on=local)
    with RemoteBackend(f"{url}/v1/", model=MODEL, api_key="any") as without_tokenizer:
        for backend in (remote, without_tokenizer):
            found = plain.run(on=backend)
            assert (found.value, found.text) == (expected.value, expected.text)
            assert found.answer("best").scores == pytest.approx(expected.answer("best").scores, abs=1e-5)
            assert found.answer("greedy").finish == expected.answer("greedy").finish == "length"


def test_conversations_are_the_same(local: LocalBackend, remote: RemoteBackend) -> None:
    expected, found = talk.run(on=local), talk.run(on=remote, priority=2)
    assert found.text == expected.text
    assert found["word"] == "enots"
    assert found.answer("word").scores == pytest.approx(expected.answer("word").scores, abs=1e-5)
    assert found.answer("sum").usage.num_prompt_tokens == expected.answer("sum").usage.num_prompt_tokens


def test_streams_and_the_cache_work_over_http(local: LocalBackend, remote: RemoteBackend) -> None:
    @program
    def count(s: State) -> None:
        s.add("1, 2, 3,")
        # Longer than a client that gets no processor time for a while falls behind: its pieces are merged.
        s.gen("more", max_tokens=1900, temperature=0, regex="[0-9, ]{2000}")

    started = count().start(on=remote)
    pieces = list(started.stream("more"))
    assert len(pieces) > 1
    expected = count.run(on=local)
    assert "".join(pieces) == started["more"] == expected["more"]
    assert started.usage.num_output_tokens > 500

    @program
    def long(s: State) -> None:
        s.add("one two three four five six seven. " * 10)
        s.gen("x", max_tokens=1)

    results = [long.run(on=remote) for _ in range(2)]
    assert results[1].usage.hit_rate > 0.8
    assert results[1].usage.num_cached_tokens > results[0].usage.num_cached_tokens


def test_many_programs_share_a_server(local: LocalBackend, remote: RemoteBackend) -> None:
    calls = [talk() for _ in range(6)]
    texts = {result.text for backend in (local, remote) for result in run_many(calls, on=backend)}
    assert len(texts) == 1


def broken(backend: Backend) -> str:
    @program
    def one(s: State) -> None:
        s.add("x")
        s.gen("bad", regex="(")

    with pytest.raises(VariableError) as caught:
        one.run(on=backend)
    return str(caught.value)


def test_the_server_says_what_is_wrong(local: LocalBackend, remote: RemoteBackend, url: str) -> None:
    assert "variable 'bad' failed: the server answered 400: " in broken(remote)
    assert "variable 'bad' failed: " in broken(local)
    with RemoteBackend(url, model="other") as wrong:
        assert "answered 404" in broken(wrong)
    with (
        RemoteBackend(url, model=MODEL) as no_template,
        pytest.raises(VariableError, match="pass tokenizer= to Remote"),
    ):
        talk.run(on=no_template)


def ready(url: str) -> dict[str, Any]:
    """Return what the server says of itself."""
    with urllib.request.urlopen(f"{url}/ready", timeout=60) as response:
        return json.loads(response.read())


def tokens_at_rest(url: str) -> int:
    """Wait until the server holds no request, and return how many tokens its engine has computed."""
    end_s = time.monotonic() + 60
    while any(ready(url)["requests"].values()):
        assert time.monotonic() < end_s, "the server still computes a request of the program"
        time.sleep(0.01)
    ended_s = time.monotonic()
    while (now := ready(url))["seconds_since_pulse"] > time.monotonic() - ended_s:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return now["engine"]["num_tokens"]


def test_cancelling_ends_the_request_at_the_server(remote: RemoteBackend, url: str) -> None:
    @program
    def endless(s: State) -> None:
        s.add("x")
        s.gen("long", max_tokens=1800, temperature=0, regex="[a-z]{4000}")

    for _ in range(10):
        before = tokens_at_rest(url)
        result = endless().start(on=remote)
        next(result.stream("long"))
        result.cancel()
        with suppress(VariableError):
            result.wait()
        if tokens_at_rest(url) - before < 1800:  # otherwise it has ended before it was cancelled
            break
    else:
        raise AssertionError("the server has computed the whole text each time")
    with pytest.raises(VariableError, match="cancelled"):
        result.wait()
    assert talk.run(on=remote)["word"] == "enots"


@program
def call_tools(s: State, choice: str) -> list[str]:
    s.user("What is the weather in Paris?")
    s.gen("call", tools=[WEATHER], tool_choice=choice, temperature=0)
    found = [f"{call.name} {call.arguments}" for call in s.answer("call").calls]
    s.tool('{"temperature": 21, "sky": "sunny"}')
    s.gen("answer", tools=[WEATHER], temperature=0)
    return [*found, s["call"], s["answer"]]


@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
def test_tools_on_both(local: LocalBackend, remote: RemoteBackend, choice: str) -> None:
    on_server = call_tools.run(choice, on=remote).value
    assert on_server[0] == "get_weather {'city': 'Paris'}"
    assert on_server == call_tools.run(choice, on=local).value
    streamed = call_tools(choice).start(on=remote)
    assert "".join(streamed.stream("call")) == on_server[1]
    assert streamed.value == on_server


def test_a_deadline_ends_what_the_server_computes(remote: RemoteBackend, url: str) -> None:
    @program
    def endless(s: State) -> None:
        s.add("Once")
        for number in range(1000):
            s.gen(f"part {number}", max_tokens=200, regex="[a-z ]{200}")

    with pytest.raises(DeadlineExceededError, match=r"after 0.3 s"):
        endless.run(on=remote, deadline_s=0.3)
    tokens_at_rest(url)
