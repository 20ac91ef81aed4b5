"""The compiler: one compilation for many requests, deadlines, bounds, and what is remembered.

Most tests put a library of their own behind the `Backend` Protocol, whose compilations end when the test says so.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from pagewood.engine.api import Grammar, Refusal
from pagewood.engine.grammar import Backend, GrammarCompiler, Mask, Matcher, open_backend
from pagewood.engine.model_folder.folder import model_folder

ENDS = frozenset({1})


class Slow:
    """A library whose grammars are compiled when they are released, and then say their own text."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.prototypes: list[Simple] = []
        self.is_busy = threading.Event()

    def hold(self, *texts: str) -> None:
        for text in texts:
            self.gates[text] = threading.Event()

    def compile(self, grammar: Grammar) -> Simple:
        self.started.append(grammar.text)
        self.is_busy.set()
        if grammar.text in self.gates:
            assert self.gates[grammar.text].wait(20)
        match grammar.text:
            case "wrong":
                raise ValueError("this grammar is wrong " + "x" * 5000)
            case "panic":
                raise BaseException("panicked")
            case text:
                self.prototypes.append(Simple(text))
                return self.prototypes[-1]


class Simple:
    """A prototype whose matchers have no tokens."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_spoiled = False

    def matcher(self, end_tokens: frozenset[int]) -> SimpleMatcher:
        return SimpleMatcher(self.text, end_tokens)


class SimpleMatcher:
    """A matcher that is known by its text."""

    def __init__(self, text: str, end_tokens: frozenset[int]) -> None:
        self.text = text
        self.end_tokens = end_tokens

    def fill(self, row: Mask) -> None: ...
    def fill_ahead(self, drafts: Sequence[int], rows: Mask) -> int:
        return 1

    def advance(self, tokens: Sequence[int]) -> bool:
        return False

    def accepts(self, tokens: Sequence[int]) -> int:
        return 0

    def forced(self) -> tuple[int, ...]:
        return ()

    is_finished = False
    can_end = False
    error: str | None = None
    slow_ms = 0

    def copy(self) -> SimpleMatcher:
        return self


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def grammar(text: str) -> Grammar:
    return Grammar(kind="regex", text=text)


def threads_of_compilers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("grammar-")]


@pytest.fixture(autouse=True)
def no_threads_of_earlier_tests() -> None:
    for thread in threads_of_compilers():
        thread.join(20)
        assert not thread.is_alive(), "an earlier test has closed its compiler"


@pytest.fixture
def library() -> Iterator[Slow]:
    library = Slow()
    yield library
    for gate in library.gates.values():
        gate.set()


def code_of(result: Matcher | Refusal) -> str | None:
    assert isinstance(result, Refusal), result
    assert result.param == "grammar"
    return result.code


def text_of(result: Matcher | Refusal) -> str:
    assert isinstance(result, SimpleMatcher), result
    return result.text


def test_a_grammar_becomes_a_matcher(library: Slow) -> None:
    compiler = GrammarCompiler(lambda: library)
    library.hold("a")
    pending = compiler.compile(grammar("a"), end_tokens=ENDS)
    assert not pending.done()
    with pytest.raises(RuntimeError, match="being compiled"):
        pending.result()
    assert not pending.wait(0.01)
    library.gates["a"].set()
    assert pending.wait()
    result = pending.result()
    assert isinstance(result, SimpleMatcher)
    assert result.end_tokens == ENDS
    assert pending.result() is result
    compiler.close()


def test_the_same_grammar_is_compiled_once(library: Slow) -> None:
    compiler = GrammarCompiler(lambda: library, num_threads=4)
    library.hold("a")
    pendings = [compiler.compile(grammar("a"), end_tokens=ENDS) for _ in range(5)]
    other = compiler.compile(Grammar(kind="lark", text="a"), end_tokens=ENDS)  # another grammar
    library.gates["a"].set()
    assert all(pending.wait() for pending in [*pendings, other])
    assert len({id(pending.result()) for pending in pendings}) == 5
    again = compiler.compile(grammar("a"), end_tokens=frozenset())
    assert again.done()
    result = again.result()
    assert isinstance(result, SimpleMatcher)
    assert result.end_tokens == frozenset()
    assert library.started == ["a", "a"]
    compiler.close()


def test_failures_are_remembered_and_their_messages_short(library: Slow) -> None:
    compiler = GrammarCompiler(lambda: library)
    for _ in range(2):
        pending = compiler.compile(grammar("wrong"), end_tokens=ENDS)
        assert pending.wait()
        result = pending.result()
        assert code_of(result) == "invalid_grammar"
        assert isinstance(result, Refusal)
        assert result.message.startswith("this grammar is wrong x")
        assert len(result.message) < 1100
    assert library.started == ["wrong"]
    compiler.close()


def test_a_panic_is_a_refusal_and_the_thread_goes_on(library: Slow) -> None:
    compiler = GrammarCompiler(lambda: library, num_threads=1)
    pending = compiler.compile(grammar("panic"), end_tokens=ENDS)
    assert pending.wait()
    assert code_of(pending.result()) == "invalid_grammar"
    after = compiler.compile(grammar("a"), end_tokens=ENDS)
    assert after.wait()
    assert text_of(after.result()) == "a"
    compiler.close()


def test_every_grammar_has_a_deadline_also_in_the_queue(library: Slow) -> None:
    clock = Clock()
    compiler = GrammarCompiler(lambda: library, num_threads=1, deadline_s=10.0, clock=clock)
    library.hold("slow")
    slow = compiler.compile(grammar("slow"), end_tokens=ENDS)
    assert library.is_busy.wait(20)
    clock.now_s = 6.0
    queued = compiler.compile(grammar("queued"), end_tokens=ENDS)
    late = compiler.compile(grammar("slow"), end_tokens=ENDS)
    clock.now_s = 9.9
    assert not slow.done()
    clock.now_s = 10.0
    assert slow.done()
    assert code_of(slow.result()) == "grammar_timeout"
    assert not queued.done()
    assert not late.done()
    clock.now_s = 16.0
    assert code_of(queued.result()) == "grammar_timeout"
    assert code_of(late.result()) == "grammar_timeout"
    library.gates["slow"].set()
    again = compiler.compile(grammar("slow"), end_tokens=ENDS)  # the thread went on
    assert again.wait()
    assert text_of(again.result()) == "slow"
    assert code_of(slow.result()) == "grammar_timeout"  # what was said stays said
    retried = compiler.compile(grammar("queued"), end_tokens=ENDS)  # running out of time is not remembered
    assert retried.wait()
    assert text_of(retried.result()) == "queued"
    assert library.started == ["slow", "queued"]
    compiler.close()


def test_the_queue_is_bounded(library: Slow) -> None:
    compiler = GrammarCompiler(lambda: library, num_threads=1, max_queued=2)
    library.hold("slow")
    slow = compiler.compile(grammar("slow"), end_tokens=ENDS)
    assert library.is_busy.wait(20)
    queued = [compiler.compile(grammar(text), end_tokens=ENDS) for text in "ab"]
    refused = compiler.compile(grammar("c"), end_tokens=ENDS)
    assert refused.done()
    assert code_of(refused.result()) == "grammar_queue_full"
    assert not compiler.compile(grammar("a"), end_tokens=ENDS).done()  # joins the one in the queue
    library.gates["slow"].set()
    assert all(pending.wait() for pending in [slow, *queued])
    assert [text_of(pending.result()) for pending in queued] == ["a", "b"]
    compiler.close()


def test_the_least_recently_used_is_forgotten(library: Slow) -> None:
    compiler = GrammarCompiler(lambda: library, num_threads=1, max_remembered=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        assert compiler.compile(grammar(text), end_tokens=ENDS).wait()
    assert library.started == ["a", "b", "c", "b"]
    compiler.close()
    nothing = GrammarCompiler(lambda: library, max_remembered=0)
    for _ in range(2):
        assert nothing.compile(grammar("d"), end_tokens=ENDS).wait()
    assert library.started[-2:] == ["d", "d"]
    nothing.close()


def test_long_grammars_count_by_their_length(library: Slow) -> None:
    compiler = GrammarCompiler(lambda: library, num_threads=1)
    for index in range(3):
        assert compiler.compile(grammar(f"{index}" * 1_900_000), end_tokens=ENDS).wait()
    assert compiler.compile(grammar("2" * 1_900_000), end_tokens=ENDS).done()
    assert len(library.started) == 3
    assert compiler.compile(grammar("0" * 1_900_000), end_tokens=ENDS).wait()
    assert len(library.started) == 4
    compiler.close()


def test_a_spoiled_prototype_is_compiled_again(library: Slow) -> None:
    compiler = GrammarCompiler(lambda: library)
    assert compiler.compile(grammar("a"), end_tokens=ENDS).wait()
    library.prototypes[0].is_spoiled = True
    assert compiler.compile(grammar("a"), end_tokens=ENDS).wait()
    assert compiler.compile(grammar("a"), end_tokens=ENDS).wait()
    assert library.started == ["a", "a"]
    compiler.close()


def test_a_library_that_cannot_be_opened_is_tried_again(library: Slow) -> None:
    attempts: list[int] = []

    def open_it() -> Backend:
        attempts.append(1)
        if len(attempts) == 1:
            raise ImportError("no such library")
        return library

    compiler = GrammarCompiler(open_it, num_threads=1)
    pending = compiler.compile(grammar("a"), end_tokens=ENDS)
    assert pending.wait()
    result = pending.result()
    assert code_of(result) == "grammar_unavailable"
    assert isinstance(result, Refusal)
    assert "ImportError: no such library" in result.message
    again = compiler.compile(grammar("a"), end_tokens=ENDS)
    assert again.wait()
    assert text_of(again.result()) == "a"
    compiler.close()


def test_closing_refuses_what_waits(library: Slow) -> None:
    compiler = GrammarCompiler(lambda: library, num_threads=1)
    library.hold("slow")
    slow = compiler.compile(grammar("slow"), end_tokens=ENDS)
    assert library.is_busy.wait(20)
    queued = compiler.compile(grammar("a"), end_tokens=ENDS)
    (thread,) = threads_of_compilers()
    compiler.close()
    compiler.close()
    assert code_of(queued.result()) == "grammar_unavailable"
    assert code_of(compiler.compile(grammar("b"), end_tokens=ENDS).result()) == "grammar_unavailable"
    library.gates["slow"].set()
    assert slow.wait()
    thread.join(20)
    assert not thread.is_alive()


def test_it_starts_as_many_threads_as_there_are_grammars(library: Slow) -> None:
    compiler = GrammarCompiler(lambda: library, num_threads=3)
    assert not threads_of_compilers()
    library.hold("a", "b", "c", "d")
    pendings = [compiler.compile(grammar(text), end_tokens=ENDS) for text in "ab"]
    assert len(threads_of_compilers()) == 2
    pendings += [compiler.compile(grammar(text), end_tokens=ENDS) for text in "cd"]
    assert len(threads_of_compilers()) == 3
    for gate in library.gates.values():
        gate.set()
    assert all(pending.wait() for pending in pendings)
    assert threading.stack_size() == 0  # as other threads have it
    compiler.close()


def test_many_threads_ask_at_once() -> None:
    folder = model_folder(None)
    compiler = GrammarCompiler(lambda: open_backend("llguidance", folder, vocab_size=512, eos_token_ids=(1,)))
    results: list[Matcher | Refusal] = []

    def ask(first: int) -> None:
        for index in range(first, first + 20):
            pending = compiler.compile(grammar(f"[a-z]{{{index % 10 + 1}}}"), end_tokens=ENDS)
            while not pending.done():
                time.sleep(0.001)
            results.append(pending.result())

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 160
    assert not any(isinstance(result, Refusal) for result in results)
    assert len({id(result) for result in results}) == 160
    compiler.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_threads": 0}, "num_threads must be >= 1, got 0"),
        ({"max_queued": 0}, "max_queued must be >= 1, got 0"),
        ({"max_remembered": -1}, "max_remembered must be >= 0, got -1"),
        ({"deadline_s": 0.0}, "deadline_s must be > 0, got 0.0"),
        ({"deadline_s": float("nan")}, "deadline_s must be > 0, got nan"),
    ],
)
def test_wrong_options(options: dict[str, float], message: str, library: Slow) -> None:
    with pytest.raises(ValueError, match=message):
        GrammarCompiler(lambda: library, **options)  # pyright: ignore[reportArgumentType]


def test_an_end_token_that_does_not_exist_is_refused() -> None:
    folder = model_folder(None)
    compiler = GrammarCompiler(lambda: open_backend("llguidance", folder, vocab_size=512, eos_token_ids=(1,)))
    pending = compiler.compile(grammar("a"), end_tokens=frozenset({512}))
    assert pending.wait()
    assert code_of(pending.result()) == "invalid_grammar"
    compiler.close()


def test_importing_it_loads_no_library() -> None:
    heavy = {"llguidance", "xgrammar", "torch", "tokenizers"}
    loaded = f"import sys, pagewood.engine.grammar; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
