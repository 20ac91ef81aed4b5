"""Programs on the embedded model: their texts are those of plain calls with the same prompts."""

# pyright: basic

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from pagewood.engine import LLM, AsyncLLM, Grammar, SamplingParams
from pagewood.engine.program import (
    Answer,
    DeadlineExceededError,
    LocalBackend,
    ProgramCancelledError,
    Prompt,
    State,
    Usage,
    VariableError,
    program,
    run_many,
    run_many_async,
)
from pagewood.engine.text import ChatTemplateError

OPTIONS: dict[str, Any] = {"max_total_tokens": 8192, "max_running": 16, "page_size": 4}
LONG = "one two three four five six seven eight nine ten. " * 12


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as model:
        yield model


@pytest.fixture(scope="module")
def backend() -> Iterator[LocalBackend]:
    with LocalBackend(AsyncLLM(**OPTIONS)) as found:
        yield found


@pytest.fixture(scope="module")
def llm_backend(llm: LLM) -> Iterator[LocalBackend]:
    with LocalBackend(llm) as found:
        yield found


class Watched:
    """A backend that passes everything on, and remembers the prompts; `gate` holds the first requests back."""

    def __init__(self, inner: LocalBackend, *, gate: int = 0) -> None:
        self.inner = inner
        self.prompts: list[str] = []
        self.priorities: list[int] = []
        self._gate = gate
        self._held: list[Callable[[], None]] = []

    def render(self, prompt: Prompt) -> str:
        return self.inner.render(prompt)

    def complete(self, prompt: Prompt, sampling: Any, priority: int, *, on_text: Any = None) -> Future[Answer]:
        self._note(prompt, priority)
        return self._pass(lambda: self.inner.complete(prompt, sampling, priority, on_text=on_text))

    def score(self, prompt: Prompt, choices: Sequence[str], priority: int) -> Future[Answer]:
        self._note(prompt, priority)
        return self._pass(lambda: self.inner.score(prompt, choices, priority))

    def _note(self, prompt: Prompt, priority: int) -> None:
        self.prompts.append(self.inner.render(prompt))
        self.priorities.append(priority)

    def _pass(self, ask: Callable[[], Future[Answer]]) -> Future[Answer]:
        if not self._gate:
            return ask()
        answer: Future[Answer] = Future()
        self._held.append(lambda: ask().add_done_callback(lambda one: answer.set_result(one.result())))
        if len(self._held) == self._gate:
            self._gate = 0
            for release in self._held:
                release()
        return answer


def plain_answers(llm: LLM) -> list[tuple[dict[str, Any], str]]:
    """Return arguments of `gen`, and what a plain call makes of the same."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    cases: list[tuple[dict[str, Any], SamplingParams, dict[str, Any]]] = [
        ({"max_tokens": 12}, SamplingParams(temperature=0, max_tokens=12), {}),
        (
            {"max_tokens": 12, "temperature": 0.9, "seed": 5, "top_k": 20, "top_p": 0.9},
            SamplingParams(temperature=0.9, seed=5, top_k=20, top_p=0.9, max_tokens=12),
            {},
        ),
        ({"stop": "5"}, SamplingParams(temperature=0), {"stop": "5"}),
        ({"stop_regex": "[45]"}, SamplingParams(temperature=0), {"stop_regex": "[45]"}),
        ({"regex": "[a-c]{3}"}, SamplingParams(temperature=0, grammar=Grammar.regex("[a-c]{3}")), {}),
        ({"choice": ["x", "yz"]}, SamplingParams(temperature=0, grammar=Grammar.choice(["x", "yz"])), {}),
        ({"json_schema": schema}, SamplingParams(temperature=0, grammar=Grammar.json_schema(schema)), {}),
        (
            {"grammar": Grammar.lark('start: "<" /[0-9]/ ">"')},
            SamplingParams(temperature=0, grammar=Grammar.lark('start: "<" /[0-9]/ ">"')),
            {},
        ),
    ]
    return [(asked, llm.generate("1, 2, 3,", params, **stops)[0].text) for asked, params, stops in cases]


@pytest.mark.parametrize("name", ["backend", "llm_backend"])
def test_texts_are_those_of_plain_calls(name: str, llm: LLM, request: pytest.FixtureRequest) -> None:
    expected = plain_answers(llm)

    @program
    def every(s: State) -> None:
        s.add("1, 2, 3,")
        for index, branch in enumerate(s.fork(len(expected))):
            branch.gen(f"text {index}", **expected[index][0])
            texts.append(branch)

    texts: list[State] = []
    every.run(on=request.getfixturevalue(name))
    assert [branch[f"text {index}"] for index, branch in enumerate(texts)] == [text for _, text in expected]
    assert texts[2].answer("text 2").finish == "stop"
    assert texts[0].answer("text 0").finish == "length"


def test_what_follows_continues_the_whole_text(backend: LocalBackend, llm: LLM) -> None:
    @program
    def count(s: State) -> None:
        s.add("1, 2, 3,")
        s.gen("first", max_tokens=4, temperature=0)
        s.add(" and then")
        s.gen("second", max_tokens=6, temperature=0)

    result = count.run(on=backend)
    greedy = SamplingParams(temperature=0, max_tokens=4)
    (first,) = llm.generate("1, 2, 3,", greedy)
    text = f"1, 2, 3,{first.text} and then"
    (second,) = llm.generate(text, SamplingParams(temperature=0, max_tokens=6))
    assert (result["first"], result["second"], result.text) == (first.text, second.text, text + second.text)
    assert result.usage.num_output_tokens == len(first.tokens) + len(second.tokens)
    assert result.usage.num_prompt_tokens == first.num_prompt_tokens + second.num_prompt_tokens


def turn(role: str, content: str) -> str:
    """Return a turn as the template of the embedded model renders it; it strips the content."""
    return f"<|{role}|>{content}<|end|>"


def test_prompts_are_those_of_the_chat_template(backend: LocalBackend) -> None:
    watched = Watched(backend)

    @program
    def talk(s: State) -> None:
        s.system(" You help. ")
        s.user("What is 2 + 3?")
        with s.assistant():
            s.add("  The sum is ")
            s.gen("sum", temperature=0, regex="[0-9]")
            s.add(" .  ")
            s.gen("why", temperature=0, max_tokens=3)
            s.add("  ")
        s.user("Reverse: stone")
        s.gen("word", temperature=0)
        s.user("Good?")
        s.select("verdict", ["yes", "no"])

    result = talk.run(on=watched)
    before = turn("system", "You help.") + turn("user", "What is 2 + 3?")
    said = f"  The sum is {result['sum']} .  {result['why']}  "
    expected = [f"{before}<|assistant|>  The sum is ", f"{before}<|assistant|>  The sum is {result['sum']} .  "]
    before += turn("assistant", said.strip()) + turn("user", "Reverse: stone")
    expected.append(f"{before}<|assistant|>")
    before += turn("assistant", result["word"]) + turn("user", "Good?")
    expected.append(f"{before}<|assistant|>")
    assert watched.prompts == expected
    assert result.text == expected[-1] + result["verdict"]
    assert "enots" in result["word"]


def test_branches_run_at_the_same_time(backend: LocalBackend) -> None:
    """A program that waited for a branch before it began the next would wait forever."""

    @program
    def forking(s: State) -> list[str]:
        s.add(LONG)
        branches = s.fork(3)
        for index, branch in enumerate(branches):
            branch.add(f" Number {index}:")
            branch.gen("number", max_tokens=4, temperature=0)
        s.join(branches)
        return [branch["number"] for branch in branches]

    found = forking().start(on=Watched(backend, gate=3)).value
    assert len(found) == 3


def test_asking_for_what_follows_does_not_wait(backend: LocalBackend) -> None:
    """The first text is computed only when the third is asked for, and the second follows the first in a branch."""

    @program
    def following(s: State) -> str:
        s.add("1, 2, 3,")
        one, other = s.fork(2)
        one.gen("first", max_tokens=2, temperature=0)
        (branch,) = one.fork(1)
        branch.gen("second", max_tokens=2, temperature=0)
        other.gen("third", max_tokens=4, temperature=0)
        return branch.text if other["third"] == one["first"] + branch["second"] else ""

    assert following().start(on=Watched(backend, gate=2)).value.startswith("1, 2, 3, 4")


def test_branches_compute_their_prefix_once(backend: LocalBackend) -> None:
    @program
    def forking(s: State) -> None:
        s.add("Once upon a time. " + LONG)
        branches = s.fork(8)
        for index, branch in enumerate(branches):
            branch.add(f" Number {index}:")
            branch.gen("number", max_tokens=2, temperature=0)
        s.join(branches)
        s.select("which", ["the first", "the second one", "none"])

    usage = forking.run(on=backend).usage
    tokenizer = backend.tokenizer
    prefix = len(tokenizer.encode("Once upon a time. " + LONG))
    branch = len(tokenizer.encode(" Number 0:"))
    computed = usage.num_prompt_tokens - usage.num_cached_tokens
    page = OPTIONS["page_size"]
    assert prefix > 100
    assert prefix <= computed <= prefix + 8 * (branch + page) + 3 * (8 + page)
    assert usage.hit_rate == pytest.approx(1 - computed / usage.num_prompt_tokens)
    assert usage.hit_rate > 0.85


def test_variables_of_the_parent_are_read_in_branches_and_branches_are_apart(backend: LocalBackend) -> None:
    @program
    def forking(s: State) -> None:
        s.add("1, 2,")
        s.gen("more", max_tokens=3, temperature=0)
        one, two = s.fork(2)
        one.gen("own", max_tokens=1)
        (inner,) = two.fork(1)
        inner.gen("own", max_tokens=1)
        assert one["more"] == two["more"] == inner["more"] == s["more"]
        assert "own" in one
        assert "own" not in two
        assert one.text == s.text + one["own"]
        with pytest.raises(KeyError, match=r"variable of this state \(more\), got 'own'"):
            s["own"]

    result = forking.run(on=backend)
    with pytest.raises(KeyError, match="got 'own'"):
        result["own"]


def test_the_error_of_a_branch_comes_out_where_it_is_joined_or_read(backend: LocalBackend) -> None:
    def broken(s: State) -> list[State]:
        s.add("1, 2,")
        branches = s.fork(2)
        branches[0].gen("fine", max_tokens=1)
        branches[1].gen("mark", regex="(")
        branches[1].add(" so")
        branches[1].gen("after", max_tokens=1)
        return branches

    @program
    def joining(s: State) -> None:
        branches = broken(s)
        assert branches[0]["fine"]
        s.join(branches)
        raise AssertionError

    @program
    def reading(s: State) -> str:
        return broken(s)[1]["after"]

    @program
    def handling(s: State) -> str:
        branches = broken(s)
        with pytest.raises(VariableError):
            branches[1]["mark"]
        return branches[0]["fine"]

    @program
    def ignoring(s: State) -> None:
        broken(s)

    for failing in (joining, ignoring):
        with pytest.raises(VariableError, match=r"^variable 'mark' of branch 1 failed: ") as caught:
            failing.run(on=backend)
        assert caught.value.name == "mark"
        assert isinstance(caught.value.__cause__, ValueError)
    message = "variable 'after' of branch 1 was not computed, because variable 'mark' of branch 1 failed: "
    with pytest.raises(VariableError, match=message):
        reading.run(on=backend)
    assert handling.run(on=backend).value


def test_a_long_chain_of_variables_fails_as_a_whole(backend: LocalBackend) -> None:
    @program
    def chain(s: State) -> None:
        s.add("x")
        s.gen("0", regex="(")
        for index in range(1, 3000):
            s.gen(str(index))
        with pytest.raises(VariableError, match="'2999' was not computed, because variable '0' failed"):
            s["2999"]

    chain.run(on=backend)


def test_a_template_that_rejects_the_messages_fails_the_variable(backend: LocalBackend) -> None:
    @program
    def talk(s: State) -> None:
        with s.assistant():
            s.gen("first")

    with pytest.raises(VariableError, match="at least one message") as caught:
        talk.run(on=backend)
    assert isinstance(caught.value.__cause__, ChatTemplateError)


def inside_the_block(s: State) -> None:
    s.user("x")
    with s.assistant():
        s.user("y")


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (lambda s: s.add(3), TypeError, "text must be text, got 3"),
        (lambda s: s.gen(""), ValueError, "name must not be empty"),
        (lambda s: (s.gen("a", max_tokens=1), s.gen("a")), ValueError, "name must be new in this state, got 'a' again"),
        (lambda s: s.gen("a", max_tokens=0), ValueError, "max_tokens must be >= 1, got 0"),
        (lambda s: s.gen("a", temperature="hot"), TypeError, "temperature must be a number, got 'hot'"),
        (lambda s: s.gen("a", top_k=1.5), TypeError, "top_k must be a number without a fraction, got 1.5"),
        (lambda s: s.gen("a", top_p=2.0), ValueError, r"top_p must be in \(0, 1\], got 2.0"),
        (lambda s: s.gen("a", stop=""), ValueError, "stop must hold no empty string"),
        (lambda s: s.gen("a", stop_regex="x*"), ValueError, "stop_regex"),
        (lambda s: s.gen("a", regex="a", choice=["b"]), ValueError, "at most one of .* got regex and choice"),
        (lambda s: s.select("a", []), ValueError, "at least one choice"),
        (lambda s: s.select("a", "yes"), TypeError, "choices must be a sequence of strings, got 'yes'"),
        (lambda s: s.select("a", ["x", "x"]), ValueError, r"choices\[1\] must be a new text"),
        (lambda s: s.select("a", ["x", 1]), TypeError, r"choices\[1\] must be a string, got 1"),
        (lambda s: s.fork(0), ValueError, "count must be >= 1, got 0"),
        (lambda s: (s.add("x"), s.user("y")), ValueError, "user must not follow plain text"),
        (inside_the_block, ValueError, "user must come after the assistant's block, got it inside"),
    ],
)
def test_wrong_arguments_are_named(
    act: Callable[[State], Any], error: type[Exception], match: str, backend: LocalBackend
) -> None:
    with pytest.raises(error, match=match):
        program(act).run(on=backend)


def test_programs_check_themselves_and_their_arguments(backend: LocalBackend) -> None:
    async def waiting(s: State) -> None: ...

    def nothing() -> None: ...

    def essay(s: State, topic: str) -> None: ...

    with pytest.raises(TypeError, match="plain function, got the coroutine function"):
        program(waiting)
    with pytest.raises(TypeError, match="State as its first parameter"):
        program(nothing)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="essay: missing a required argument: 'topic'"):
        program(essay).run(on=backend)
    with pytest.raises(TypeError, match="priority must be an int, got 'high'"):
        program(essay).run("x", on=backend, priority="high")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"deadline_s must be > 0 and at most [0-9]+, got 0"):
        program(essay).run("x", on=backend, deadline_s=0)
    with pytest.raises(ValueError, match="max_running must be >= 1, got 0"):
        run_many([], on=backend, max_running=0)
    with pytest.raises(TypeError, match=r"calls\[0\] must be a program with its arguments, got 'x'"):
        run_many(["x"], on=backend)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="llm must be an AsyncLLM or an LLM, got 'x'"):
        LocalBackend("x")  # type: ignore[arg-type]


def test_priorities_reach_the_backend(backend: LocalBackend) -> None:
    @program
    def both(s: State) -> None:
        s.add("x")
        s.gen("a", max_tokens=1)
        s.fork(1)[0].select("b", ["x", "y"])

    watched = Watched(backend)
    both.run(on=watched, priority=3, deadline_s=60)  # which is not reached
    assert watched.priorities == [3, 3]


@pytest.mark.parametrize("name", ["backend", "llm_backend"])
def test_a_program_ends_at_its_deadline(request: pytest.FixtureRequest, name: str) -> None:
    backend: LocalBackend = request.getfixturevalue(name)

    @program
    def endless(s: State, goes_on: bool) -> None:
        s.add("Once")
        number = 0
        while True:
            s.gen(f"part {number}", max_tokens=100)
            number += 1
            try:
                s[f"part {number - 1}"]
            except VariableError:
                if not goes_on:
                    raise

    @program
    def short(s: State) -> None:
        s.add("Once")
        s.gen("x", max_tokens=3)

    start_s = time.monotonic()
    for goes_on in (False, True):  # whether the program handles the error of its variable
        with pytest.raises(DeadlineExceededError, match=r"not complete at its deadline, after 0.2 s"):
            endless.run(goes_on, on=backend, deadline_s=0.2)
    assert time.monotonic() - start_s < 20
    assert short.run(on=backend, deadline_s=60)["x"]  # the engine goes on


@pytest.mark.parametrize("make", [AsyncLLM, LLM])
def test_programs_of_high_priority_go_first(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request runs at a time; of those that wait, the urgent one is next although it came last."""
    ended: list[str] = []
    num_sent, stream = 0, make.stream

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_sent
        num_sent += 1
        return stream(*arguments, **options)

    monkeypatch.setattr(make, "stream", counted)

    @program
    def one(s: State, name: str, length: int) -> None:
        s.add(f"{name}:")
        s.gen("text", max_tokens=length, temperature=0, regex=f"[a-z]{{{length}}}")
        s["text"]
        ended.append(name)

    llm = make(max_total_tokens=4096, max_running=1)
    with LocalBackend(llm) as backend:
        for _ in range(5):  # the first one may end before the others have come, if this thread stands still
            ended.clear()
            num_sent = 0
            first = one("first", 800).start(on=backend)
            next(first.stream("text"))
            results = [first]
            # Those that end later are long, so that the thread of the one before has time to say that it has ended.
            for name, length, priority in (("low", 400, 0), ("high", 400, 5)):
                results.append(one(name, length).start(on=backend, priority=priority))
                while num_sent < len(results):
                    time.sleep(0.001)
                time.sleep(0.02)  # it reaches the engine in another thread
            for result in results:
                result.wait()
            if ended == ["first", "high", "low"]:
                break
    if isinstance(llm, LLM):
        llm.close()
    assert ended == ["first", "high", "low"]


def test_many_programs_run_at_once_up_to_a_limit(backend: LocalBackend, llm: LLM) -> None:
    lock, running, most = threading.Lock(), 0, 0

    @program
    def one(s: State, number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        s.add(f"{number},")
        s.gen("next", max_tokens=3, temperature=0)
        s["next"]
        with lock:
            running -= 1
        if number == 4:
            raise LookupError("four")
        return number

    results = run_many([one(number) for number in range(9)], on=backend, max_running=3)
    assert most == 3
    expected = llm.generate([f"{number}," for number in range(9)], SamplingParams(temperature=0, max_tokens=3))
    assert [result["next"] for result in results] == [answer.text for answer in expected]
    assert isinstance(results[4].error, LookupError)
    with pytest.raises(LookupError, match="four"):
        results[4].wait()
    assert [result.value for index, result in enumerate(results) if index != 4] == [0, 1, 2, 3, 5, 6, 7, 8]


def test_texts_are_streamed(backend: LocalBackend, llm_backend: LocalBackend) -> None:
    @program
    def count(s: State) -> str:
        s.add("1, 2, 3,")
        s.gen("more", max_tokens=300, temperature=0, regex="[0-9, ]{300}")
        s.select("end", [".", "!"])
        return "done"

    whole = count.run(on=backend)
    assert list(whole.stream("more")) == [whole["more"]]
    for each in (backend, llm_backend):
        result = count().start(on=each)
        pieces = list(result.stream("more"))
        assert "".join(pieces) == whole["more"]
        assert len(pieces) > 1
        assert list(result.stream("end")) == [whole["end"]]
        assert (result.value, result.is_done) == ("done", True)


def test_a_started_program_that_fails_raises_where_it_is_read(backend: LocalBackend) -> None:
    @program
    def failing(s: State) -> None:
        s.add("x")
        s.gen("early", max_tokens=2)
        s["early"]
        raise LookupError("why")

    result = failing().start(on=backend)
    assert result["early"] is not None
    with pytest.raises(LookupError, match="why"):
        result["late"]
    with pytest.raises(LookupError, match="why"):
        result.stream("late")
    with pytest.raises(LookupError, match="why"):
        assert result.text


@pytest.mark.parametrize("name", ["backend", "llm_backend"])
def test_a_cancelled_program_ends(name: str, request: pytest.FixtureRequest) -> None:
    backend: LocalBackend = request.getfixturevalue(name)

    @program
    def endless(s: State) -> None:
        s.add("x")
        s.gen("long", max_tokens=1500, temperature=0, regex="[a-z]{4000}")
        s.gen("longer", max_tokens=1500)
        s["longer"]

    result = endless().start(on=backend)
    next(result.stream("long"))
    began_s = time.monotonic()
    result.cancel()
    with pytest.raises(VariableError, match="cancelled") as caught:
        result.wait()
    assert isinstance(caught.value.__cause__, ProgramCancelledError)
    assert time.monotonic() - began_s < 5
    with pytest.raises(VariableError, match="'longer' was not computed"):
        result["longer"]
    assert result.usage == Usage()


def test_programs_run_in_the_event_loop_of_an_async_llm() -> None:
    @program
    def count(s: State, number: int) -> str:
        s.add(f"{number}, {number + 1},")
        branches = s.fork(2)
        for branch in branches:
            branch.gen("more", max_tokens=4, temperature=0)
        return branches[0]["more"] + branches[1]["more"]

    @program
    def endless(s: State) -> None:
        s.add("x")
        s.gen("long", max_tokens=1500, temperature=0, regex="[a-z]{4000}")

    async def cut_off(start: Callable[[], Awaitable[Any]]) -> None:
        """Let a call be cancelled before it ends, which is sooner on a fast machine."""
        for limit_s in (0.3, 0.1, 0.03, 0.01):
            try:
                await asyncio.wait_for(start(), limit_s)
            except TimeoutError:
                return
        raise AssertionError("no call was cancelled")

    async def main() -> None:
        async with AsyncLLM(**OPTIONS) as llm:
            backend = LocalBackend(llm)
            (answer,) = await llm.generate("1, 2,", SamplingParams(temperature=0, max_tokens=4))
            assert (await count(1).run_async(on=backend)).value == answer.text * 2
            # More programs than asyncio's own executor has threads.
            results = await run_many_async([count(1) for _ in range(40)], on=backend, max_running=40)
            assert [result.value for result in results] == [answer.text * 2] * 40
            with pytest.raises(RuntimeError, match="use run_async"):
                count(1).run(on=backend)
            with pytest.raises(RuntimeError, match="run_many_async"):
                run_many([count(1)], on=backend)
            await cut_off(lambda: endless().run_async(on=backend))
            await cut_off(lambda: run_many_async([endless(), endless()], on=backend))
            assert (await count(1).run_async(on=backend)).value == answer.text * 2
            backend.close()

    asyncio.run(asyncio.wait_for(main(), 100))


def test_programs_may_call_each_other(backend: LocalBackend) -> None:
    @program
    def inner(s: State, number: int) -> str:
        s.add(f"{number},")
        s.gen(f"more {number}", max_tokens=2, temperature=0)
        return s[f"more {number}"]

    @program
    def outer(s: State) -> list[str]:
        return [inner.function(s, number) for number in (1, 2)]

    result = outer.run(on=backend)
    assert result.text == f"1,{result.value[0]}2,{result.value[1]}"


def test_closing_the_backend_ends_its_programs() -> None:
    @program
    def endless(s: State) -> None:
        s.add("x")
        s.gen("long", max_tokens=1500, temperature=0, regex="[a-z]{4000}")

    for make in (AsyncLLM, LLM):
        llm = make(**OPTIONS)
        backend = LocalBackend(llm)
        result = endless().start(on=backend)
        next(result.stream("long"))
        backend.close()
        backend.close()
        with pytest.raises(VariableError, match=r"closed|cancelled"):
            result.wait()
        with pytest.raises(VariableError, match="closed"):
            endless.run(on=backend)
        if isinstance(llm, LLM):
            llm.close()


def test_ctrl_c_ends_a_program_and_the_backend_stays_usable(backend: LocalBackend) -> None:
    @program
    def endless(s: State) -> None:
        s.add("x")
        s.gen("long", max_tokens=1500, temperature=0, regex="[a-z]{4000}")
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        s["long"]

    for call in (lambda: endless.run(on=backend), lambda: run_many([endless()], on=backend)):
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # on a fast machine, it comes after the call
            call()
            time.sleep(60)
    assert count_up.run(on=backend)["more"]


@program
def count_up(s: State) -> None:
    s.add("1, 2,")
    s.gen("more", max_tokens=2, temperature=0)


def test_importing_programs_imports_no_torch() -> None:
    code = "import sys, pagewood.engine.program; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
