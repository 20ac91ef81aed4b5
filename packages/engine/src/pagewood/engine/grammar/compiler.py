"""Compiles grammars in threads of its own, so that the caller's thread only asks whether one is done."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from queue import SimpleQueue

from pagewood.engine.api import Grammar, Refusal
from pagewood.engine.grammar.entry import Marks, TokenTexts
from pagewood.engine.grammar.later import LaterPrototype
from pagewood.engine.grammar.matcher import Backend, Matcher, Prototype

_STACK_BYTES = 256 << 20
"""Stack of a thread that compiles. llguidance compiles references by recursion, and a few hundred of them
need more than the usual 8 MiB. The system provides the memory as it is used."""
_MAX_CHARACTERS = 4_000_000
"""Characters of all grammars that are remembered: a bound on their memory, which is 100 to 1,000 bytes for each."""
_MAX_MARKS = 8
"""Sets of marks from `Grammar.after`, for which the tokens with the marks' ends are remembered."""
_MAX_MESSAGE = 1_000
_TOO_LATE = "the grammar was not compiled in time"
_stack_size_lock = threading.Lock()


class Pending:
    """A grammar that is being compiled for one request. One thread at a time may use it.

    Invariant: once it is done, it stays done, with the same result.
    """

    __slots__ = ("_clock", "_deadline", "_end_tokens", "_job", "_result")

    def __init__(
        self,
        job: _Job,
        *,
        end_tokens: frozenset[int],
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        self._job = job
        self._end_tokens = end_tokens
        self._deadline = deadline
        self._clock = clock
        self._result: Matcher | Refusal | None = None

    def prefer(self, priority: int) -> None:
        """Raise the priority of the compilation to that of its request, if it has become higher."""
        self._job.priority = max(self._job.priority, priority)

    def done(self) -> bool:
        """Return whether there is a result: a matcher, or the reason why there is none. Takes microseconds."""
        if self._result is None:
            outcome = self._job.outcome
            if isinstance(outcome, Refusal):
                self._result = outcome
            elif outcome is not None:
                try:
                    self._result = outcome.matcher(self._end_tokens)
                except ValueError as error:
                    self._result = _refusal(str(error), "invalid_grammar")
            elif self._clock() >= self._deadline:
                self._result = _refusal(_TOO_LATE, "grammar_timeout")
        return self._result is not None

    def result(self) -> Matcher | Refusal:
        """Return a matcher for this request only, or why the grammar is refused.

        The codes of a `Refusal` are invalid_grammar, grammar_timeout, grammar_queue_full and grammar_unavailable.

        Raises:
            RuntimeError: it is not done.
        """
        if not self.done() or self._result is None:
            raise RuntimeError("the grammar is being compiled; ask done() first")
        return self._result

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, at most `timeout_s` and at most until its deadline; return whether it is."""
        left_s = max(0.0, self._deadline - self._clock())
        self._job.finished.wait(left_s if timeout_s is None else min(left_s, timeout_s))
        return self.done()


class GrammarCompiler:
    """Compiles each grammar once, within a bounded time, in a bounded number of threads, and remembers the latest.

    Invariant: every `Pending` is done at its deadline at the latest, for any grammar. Grammars wait for a thread by
    priority, then in the order in which they came; one that is being compiled is finished first. Requests for a grammar
    that waits or is being compiled share that work, with the highest of their priorities. Failures are remembered like
    grammars, except for running out of time. No thread starts, and no library is loaded, before the first grammar. Safe
    to use from all threads.

    A thread cannot be stopped from outside. A compilation that takes longer than its deadline goes on, and its result
    is remembered. If all threads are busy in this way, other grammars run out of time until a thread returns.
    """

    def __init__(
        self,
        backend: Callable[[], Backend],
        *,
        token_texts: Callable[[], TokenTexts] | None = None,
        num_threads: int = 2,
        deadline_s: float = 10.0,
        max_queued: int = 256,
        max_remembered: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing.

        Args:
            backend: opens the grammar library; called once, in a thread of the compiler, at the first grammar.
            token_texts: returns the bytes of the model's tokens; called once, in a thread of the compiler, at the first
                grammar with `after`. None: such grammars are refused.
            num_threads: grammars that are compiled at the same time.
            deadline_s: seconds from `compile` to a result, the time in the queue and for loading the library included.
            max_queued: grammars that wait for a thread; more are refused.
            max_remembered: compiled grammars and failures that are kept; the least recently used goes first.
            clock: seconds; for tests.

        Raises:
            ValueError: a number is out of its range.
        """
        for name, number in (("num_threads", num_threads), ("max_queued", max_queued)):
            if number < 1:
                raise ValueError(f"{name} must be >= 1, got {number}")
        if max_remembered < 0:
            raise ValueError(f"max_remembered must be >= 0, got {max_remembered}")
        if not deadline_s > 0:  # true of NaN
            raise ValueError(f"deadline_s must be > 0, got {deadline_s}")
        self._open = backend
        self._backend: Backend | None = None
        self._read_texts = token_texts
        self._texts: TokenTexts | None = None
        self._marks = lru_cache(maxsize=_MAX_MARKS)(self._look_for)
        self._opening = threading.Lock()
        self._num_threads = num_threads
        self._deadline_s = deadline_s
        self._max_remembered = max_remembered
        self._clock = clock
        self._lock = threading.Lock()
        self._turns: SimpleQueue[bool] = SimpleQueue()
        """One True for each job that waits, so that a thread takes one; False ends a thread."""
        self._jobs: list[_Job] = []
        """Waiting jobs, in the order of their arrival."""  # written by: compiler
        self._max_queued = max_queued
        self._current: dict[bytes, _Job] = {}
        self._remembered: OrderedDict[bytes, _Job] = OrderedDict()
        self._num_characters = 0
        """Characters of all texts that are remembered."""
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def compile(self, grammar: Grammar, *, end_tokens: frozenset[int], priority: int = 0) -> Pending:
        """Begin to compile `grammar` for one request. Takes microseconds.

        Args:
            grammar: of the output.
            end_tokens: tokens that end the request; empty for one that ignores the end of sequence.
            priority: of the request, higher first.

        Returns:
            A `Pending`, which may be done at once.
        """
        # A key of 32 bytes, since texts are up to a quarter of a megabyte.
        parts = (grammar.kind, *grammar.after, grammar.text)
        key = sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
        deadline = self._clock() + self._deadline_s
        with self._lock:
            job = self._known(key)
            if job is None:
                job = self._start(key, grammar, deadline, priority)
            job.deadline = max(job.deadline, deadline)
            job.priority = max(job.priority, priority)
        return Pending(job, end_tokens=end_tokens, deadline=deadline, clock=self._clock)

    def close(self) -> None:
        """Refuse all waiting jobs, and make the threads end after their present grammar; does not wait for them."""
        with self._lock:
            self._is_closed = True
            for job in self._jobs:
                self._end(job, _refusal("the engine is being closed", "grammar_unavailable"), remembers=False)
            self._jobs.clear()
            for _ in self._threads:
                self._turns.put(False)
            self._remembered.clear()
            self._num_characters = 0

    def _known(self, key: bytes) -> _Job | None:
        """Return a job for a grammar that is remembered or being compiled."""
        job = self._remembered.get(key)
        if job is None:
            return self._current.get(key)
        if isinstance(job.outcome, Refusal) or (job.outcome is not None and not job.outcome.is_spoiled):
            self._remembered.move_to_end(key)
            return job
        self._forget(key)
        return self._current.get(key)

    def _start(self, key: bytes, grammar: Grammar, deadline: float, priority: int) -> _Job:
        if self._is_closed:
            return _Job.ended(key, grammar, _refusal("the engine is being closed", "grammar_unavailable"))
        if len(self._jobs) >= self._max_queued:
            message = f"at most {self._max_queued} grammars may wait to be compiled; try again later"
            return _Job.ended(key, grammar, _refusal(message, "grammar_queue_full"))
        job = _Job(key, grammar)
        job.deadline, job.priority = deadline, priority
        self._jobs.append(job)
        self._current[key] = job
        self._turns.put(True)
        if len(self._threads) < min(self._num_threads, len(self._current)):
            self._threads.append(_start_thread(self._work, f"grammar-{len(self._threads)}"))
        return job

    def _work(self) -> None:
        while self._turns.get():
            with self._lock:
                if not self._jobs:  # it was closed
                    continue
                job = max(self._jobs, key=lambda job: job.priority)
                self._jobs.remove(job)
            outcome, remembers = self._compiled(job)
            with self._lock:
                self._end(job, outcome, remembers=remembers)
            del job, outcome  # a waiting thread must not keep a grammar alive

    def _compiled(self, job: _Job) -> tuple[Prototype | Refusal, bool]:
        """Return the result of a job, and whether the same grammar would always have this result."""
        if self._clock() >= job.deadline:
            return _refusal(_TOO_LATE, "grammar_timeout"), False
        try:
            backend = self._opened()
        except Exception as error:
            return _refusal(
                f"grammars are not available: {type(error).__name__}: {error}", "grammar_unavailable"
            ), False
        try:
            prototype = backend.compile(job.grammar)
            return LaterPrototype(prototype, self._marks(after)) if (after := job.grammar.after) else prototype, True
        except ValueError as error:
            return _refusal(str(error), "invalid_grammar"), True
        except BaseException as error:  # the thread must go on after any exception of a library
            return _refusal(f"the grammar library failed: {type(error).__name__}: {error}", "invalid_grammar"), False

    def _opened(self) -> Backend:
        """Return the library; open it at the first call, and again if that failed."""
        with self._opening:
            if self._backend is None:
                self._backend = self._open()
            return self._backend

    def _look_for(self, marks: tuple[str, ...]) -> Marks:
        """Return the finder of some marks in the tokens of the model.

        Raises:
            ValueError: the texts of the tokens are not known.
        """
        with self._opening:
            if self._read_texts is None:
                raise ValueError("grammar.after must be empty: the texts of the model's tokens are not known")
            if self._texts is None:
                self._texts = self._read_texts()
        return Marks(marks, self._texts)

    def _end(self, job: _Job, outcome: Prototype | Refusal, *, remembers: bool) -> None:
        self._current.pop(job.key, None)
        job.outcome = outcome
        job.finished.set()
        if remembers and not self._is_closed:
            self._remembered[job.key] = job
            self._num_characters += job.num_characters
            while len(self._remembered) > self._max_remembered or self._num_characters > _MAX_CHARACTERS:
                self._forget(next(iter(self._remembered)))

    def _forget(self, key: bytes) -> None:
        self._num_characters -= self._remembered.pop(key).num_characters


class _Job:
    """One grammar to compile, for all requests that ask for it meanwhile."""

    __slots__ = ("deadline", "finished", "grammar", "key", "num_characters", "outcome", "priority")

    def __init__(self, key: bytes, grammar: Grammar) -> None:
        self.key = key
        self.grammar = grammar
        self.num_characters = len(grammar.text)
        self.deadline = 0.0  # written by: GrammarCompiler
        """The latest of its requests."""
        self.priority = 0  # written by: GrammarCompiler, Pending
        """The highest of its requests."""
        self.outcome: Prototype | Refusal | None = None  # written by: GrammarCompiler, _Job.ended
        self.finished = threading.Event()

    @staticmethod
    def ended(key: bytes, grammar: Grammar, outcome: Prototype | Refusal) -> _Job:
        """Return a job that is already done."""
        job = _Job(key, grammar)
        job.outcome = outcome
        job.finished.set()
        return job


def _refusal(message: str, code: str) -> Refusal:
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]} ..."
    return Refusal(message=message, param="grammar", code=code)


def _start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread with a large stack; the size is a setting of the process, which others may need."""
    with _stack_size_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
