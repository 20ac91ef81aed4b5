"""An engine that several calls of one thread step in turn; each step serves all of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from pagewood.engine.api import Abort, Delta, EngineConfig
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Counters, Engine, EngineInfo, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.offline.calls import (
    Call,
    EngineFailedError,
    LLMAsleepError,
    LLMBusyError,
    LLMClosedError,
    Question,
    Router,
)
from pagewood.engine.offline.signals import SignalHold


class SharedEngine:
    """Submits the requests of calls and steps the engine until they are answered.

    Invariant: between two calls of a method, the step in flight is known and its requests belong to a call, or are
    about to be aborted. So signal handlers (Ctrl-C) run between two steps, never during a step. If an exception still
    escapes from a step, the state of the engine is unknown: every later call raises `EngineFailedError`.

    Args:
        config: what to build; raises what `build_engine` raises.
    """

    __slots__ = (
        "_dropped", "_engine", "_failure", "_inbox", "_is_closed", "_outbox", "_pending", "_router", "_streams",
        "_turn",
    )  # fmt: skip

    def __init__(self, config: EngineConfig) -> None:
        self._inbox, self._outbox = MemoryInbox(), MemoryOutbox()
        self._engine: Engine = build_engine(config, inbox=self._inbox, outbox=self._outbox)
        self._router = Router()
        self._turn = threading.Lock()
        """Held by the call that steps the engine."""
        self._pending: Pending | None = None
        """The step in flight."""  # written by: _advance
        self._failure: BaseException | None = None
        """The exception that escaped from a step."""  # written by: _advance
        self._is_closed = False  # written by: close
        self._streams: dict[str, weakref.ref[object]] = {}
        """By request: its stream, as long as the request may run."""  # written by: end_if_dropped, _leave, _advance
        self._dropped: dict[str, object] = {}
        """Requests whose streams have gone; the values are not used."""  # written by: end_if_dropped, _advance

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine."""
        return self._engine.info

    def counters(self) -> Counters:
        """Return the engine's counters, in constant time."""
        return self._engine.counters()

    def violation(self) -> str | None:
        """Return a description of an error in the accounting of KV memory, or None; reads the whole pool."""
        return self._engine.violation()

    def check(self) -> None:
        """Raise if the engine cannot be used.

        Raises:
            LLMClosedError: it is closed.
            EngineFailedError: a step has failed.
        """
        if self._is_closed:
            raise LLMClosedError("the LLM is closed")
        if self._failure is not None:
            raise EngineFailedError(f"the engine has failed: {self._failure!r}") from self._failure

    def turn(self) -> threading.Lock:
        """Return the free lock that a call must hold while it steps the engine.

        Raises:
            LLMBusyError: the lock is not free.
        """
        # If another thread takes the lock between this check and its use, this thread waits; nothing is corrupted.
        if self._turn.locked():
            raise LLMBusyError(
                "an LLM must be called by one thread at a time, and not from inside a step (a signal handler or a "
                "finalizer): pass all prompts in one call, or use AsyncLLM"
            )
        return self._turn

    def submit(self, call: Call) -> None:
        """Start the requests of a call.

        Raises:
            LLMBusyError: see `turn`.
        """
        with self.turn(), SignalHold():
            self._open(call)

    def ask(self, question: Question) -> Delta:
        """Return the answer to a question; step the engine until it comes.

        Raises:
            LLMBusyError: see `turn`.
        """
        with self.turn(), SignalHold() as hold:
            self.check()
            self._router.ask(question)
            self._inbox.put(question.command)
            while question.answer is None:
                self._step()
                hold.check()
            return question.answer

    def complete(self, call: Call, progress: Callable[[int], object]) -> None:
        """Start the requests of a call, and step the engine until they are answered; an exception aborts them.

        Args:
            call: the requests to compute.
            progress: gets the number of answers that were completed since it was last called.
        """
        with self.turn(), SignalHold() as hold:
            try:
                self._open(call)
                while call.num_open:
                    self._check_awake()
                    self._step()
                    hold.check()
                    ended = call.read().ended
                    if ended:
                        self._leave(ended)
                        progress(len(ended))
            finally:
                self._leave(call.request_ids)
                self._settle()

    def read(self, call: Call, turn: threading.Lock) -> str:
        """Return the new text of a submitted call, or "" if it is answered; step the engine until one of them holds.

        An exception aborts the requests, but for `LLMAsleepError`.

        Args:
            call: the requests that are being computed.
            turn: from `turn`.
        """
        try:
            with turn, SignalHold() as hold:
                self.check()
                while True:
                    news = call.read()
                    if not call.num_open:
                        self._leave(news.ended)
                        self._settle()
                    if news.text or not call.num_open:
                        return news.text
                    self._check_awake()
                    self._step()
                    hold.check()
        except LLMAsleepError:
            raise
        except BaseException:
            self._leave(call.request_ids)
            raise

    def end(self, call: Call) -> None:
        """Abort the requests of a call; if a step is running, the next one ends them."""
        self._leave(call.request_ids)
        if not self._turn.locked():
            with self._turn, SignalHold():
                self._settle()

    def end_if_dropped(self, stream: object, request_id: str) -> None:
        """Abort a request in the first step after its stream has gone, whichever thread dropped it.

        No Python code runs when the stream goes: what a signal handler raises there (Ctrl-C) would be lost.
        """
        self._streams[request_id] = weakref.ref(stream, partial(self._dropped.setdefault, request_id))

    def close(self) -> None:
        """Release threads and memory; open calls raise `LLMClosedError`. May be called twice."""
        with self.turn(), SignalHold():
            if self._is_closed:
                return
            try:
                for call in self._router.clear():
                    self._abort(Abort(request_id=request_id) for request_id in call.request_ids)
                self._settle()
            finally:
                self._is_closed = True
                self._engine.close()

    @property
    def is_asleep(self) -> bool:
        """Whether the engine launches no steps before it is woken up."""
        return bool(self._engine.asleep)

    def _check_awake(self) -> None:
        if self.is_asleep:
            raise LLMAsleepError(f"the LLM sleeps ({', '.join(sorted(self._engine.asleep))}): call wake_up first")

    def _open(self, call: Call) -> None:
        self.check()
        self._router.open(call)
        for submit in call.submits:
            self._inbox.put(submit)

    def _step(self) -> None:
        self.check()
        self._advance()

    def _advance(self) -> None:
        """Do one step, and pass its answers to the calls that wait for them."""
        try:
            while self._dropped:
                request_id, _ = self._dropped.popitem()
                self._streams.pop(request_id, None)
                self._inbox.put(Abort(request_id=request_id))
            self._pending = self._engine.advance(self._pending)
            self._abort(self._router.deliver(self._outbox.take()))
        except BaseException as error:
            self._failure = error
            self._router.clear()
            raise

    def _leave(self, request_ids: Sequence[str]) -> None:
        """Abort those of the requests that the engine still computes."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        self._abort(self._router.leave(request_ids))

    def _abort(self, aborts: Iterable[Abort]) -> None:
        for abort in aborts:
            self._inbox.put(abort)

    def _settle(self) -> None:
        """If no call waits, step until nothing is in flight, so that ended requests give their memory back."""
        if self._is_closed or self._failure is not None or self._router.num_open:
            return
        self._advance()
        while self._pending is not None:
            self._advance()
