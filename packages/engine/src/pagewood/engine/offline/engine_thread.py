"""An engine in a thread of its own, for the calls of one asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterable, Sequence

from pagewood.engine.api import Abort, Delta, EngineConfig
from pagewood.engine.core.loop import Engine, EngineInfo
from pagewood.engine.images.prompts import image_prompts
from pagewood.engine.links import ThreadInbox, ThreadOutbox
from pagewood.engine.model_folder.folder import default_sampling, model_folder
from pagewood.engine.model_folder.vector_recipe import read_vector_recipe
from pagewood.engine.offline.arguments import Arguments
from pagewood.engine.offline.calls import Call, EngineFailedError, LLMClosedError, Question, Router
from pagewood.engine.text import Tokenizer

_log = logging.getLogger(__name__)

_NOT_STARTED = "an AsyncLLM must be started before it is used: async with AsyncLLM(...) as llm"


class EngineThread:
    """Builds an engine in a new thread and runs it there.

    Invariant: only the event loop's thread touches the calls, only the engine's thread touches the engine; between them
    are an inbox, an outbox and an event. Methods must be called in the event loop that called `start`, unless they say
    otherwise.

    Args:
        config: what to build.
    """

    __slots__ = (
        "_arguments", "_config", "_ended", "_failure", "_inbox", "_info", "_is_closed", "_loop", "_ready",
        "_router", "_stopping", "_thread",
    )  # fmt: skip

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._router = Router()
        self._inbox = ThreadInbox()
        self._stopping = threading.Event()
        """Set when the engine's thread must end."""
        self._loop: asyncio.AbstractEventLoop | None = None  # written by: start
        self._thread: threading.Thread | None = None  # written by: start
        self._ready: asyncio.Future[None] | None = None
        """Done when the engine is built, or the build has failed."""  # written by: start
        self._ended: asyncio.Future[None] | None = None
        """Done when the engine is closed."""  # written by: start
        self._arguments: Arguments | None = None
        """None until the engine is built."""  # written by: _begin
        self._info: EngineInfo | None = None
        """None until the engine is built."""  # written by: _begin
        self._failure: BaseException | None = None
        """The exception that ended the engine."""  # written by: _end
        self._is_closed = False  # written by: _stop, close, _end

    @property
    def arguments(self) -> Arguments:
        """Turns the arguments of calls into requests for this engine.

        Raises:
            RuntimeError: the engine cannot be used, or not in this event loop.
        """
        self.check()
        if self._arguments is None:
            raise RuntimeError(_NOT_STARTED)
        self._check_loop()
        return self._arguments

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine.

        Raises:
            RuntimeError: it is not built yet.
        """
        if self._info is None:
            raise RuntimeError(_NOT_STARTED)
        return self._info

    async def start(self) -> None:
        """Build the engine; returns when it runs.

        Raises:
            RuntimeError: it was started before.
            Exception: what `build_engine` raises.
        """
        if self._thread is not None:
            raise RuntimeError("an AsyncLLM can be started only once; make another one")
        self.check()
        self._loop = asyncio.get_running_loop()
        self._ready, self._ended = self._loop.create_future(), self._loop.create_future()
        # A daemon, so that a program that forgets to close the engine can end.
        self._thread = threading.Thread(target=self._live, args=(self._loop,), name="pagewood-engine", daemon=True)
        self._thread.start()
        try:
            await asyncio.shield(self._ready)
        except asyncio.CancelledError:
            self._stop()
            raise

    async def close(self) -> None:
        """Stop the engine and release its memory; open calls raise `LLMClosedError`. May be called twice."""
        if self._thread is None or self._ended is None:
            self._is_closed = True
            return
        self._check_loop()
        self._stop()
        await asyncio.shield(self._ended)
        self._thread.join()

    def check(self) -> None:
        """Raise if the engine cannot be used.

        Raises:
            EngineFailedError: it has failed.
            LLMClosedError: it is closed.
        """
        if self._failure is not None:
            raise EngineFailedError(f"the engine has failed: {self._failure!r}") from self._failure
        if self._is_closed:
            raise LLMClosedError("the AsyncLLM is closed")

    def submit(self, call: Call) -> None:
        """Start the requests of a call."""
        self._router.open(call)
        for submit in call.submits:
            self._inbox.put(submit)

    async def ask(self, question: Question) -> Delta:
        """Return the answer to a question, when it has come."""
        self.check()
        self._check_loop()
        news = asyncio.Event()
        question.notify = news.set
        self._router.ask(question)
        self._inbox.put(question.command)
        while question.answer is None:
            await news.wait()
            news.clear()
            if question.answer is None:
                self.check()
        return question.answer

    def leave(self, request_ids: Iterable[str]) -> None:
        """Abort those of the requests that the engine still computes."""
        for abort in self._router.leave(request_ids):
            self._inbox.put(abort)

    def end_later(self, abort: Abort) -> None:
        """Abort a request. Safe at any moment and in any thread, so finalizers may call it."""
        self._inbox.put(abort)

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "an AsyncLLM must be used in the event loop that started it; elsewhere, use "
                "asyncio.run_coroutine_threadsafe"
            )

    def _stop(self) -> None:
        self._is_closed = True
        self._stopping.set()
        self._inbox.wake()
        self._wake_calls()

    def _wake_calls(self) -> None:
        """Wake every waiting call, so that it ends with an error."""
        for call in self._router.clear():
            call.notify()

    def _begin(self, arguments: Arguments, info: EngineInfo) -> None:
        """Note, in the event loop, that the engine is built."""
        assert self._ready is not None
        self._arguments, self._info = arguments, info
        self._ready.set_result(None)

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        """Pass answers, in the event loop, to the calls that wait for them."""
        for abort in self._router.deliver(deltas):
            self._inbox.put(abort)

    def _end(self, error: BaseException | None) -> None:
        """Note, in the event loop, that the engine is closed, and the exception if it failed."""
        assert self._ready is not None
        assert self._ended is not None
        self._is_closed = True
        if self._ready.done():
            self._failure = error
        else:
            self._ready.set_exception(error or LLMClosedError("the AsyncLLM is closed"))
            self._ready.exception()  # the caller of `start` may have been cancelled
        self._wake_calls()
        self._ended.set_result(None)

    def _live(self, loop: asyncio.AbstractEventLoop) -> None:
        """Build the engine and run it until `stop`; the body of the thread."""
        failure: BaseException | None = None
        try:
            self._run(loop)
        except _StoppedError:
            pass
        except BaseException as error:  # the callers get every exception
            failure = error
        if loop.is_closed():  # no caller is left
            return
        if failure is not None and self._arguments is not None:
            _log.error("the engine has failed", exc_info=failure)
        with contextlib.suppress(RuntimeError):  # the loop was closed at this moment
            loop.call_soon_threadsafe(self._end, failure)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        from pagewood.engine.build import build_engine  # imports torch, which takes seconds

        folder = model_folder(self._config.model)
        tokenizer, sampling, recipe = (
            Tokenizer.from_folder(folder),
            default_sampling(folder),
            read_vector_recipe(folder),
        )
        outbox = ThreadOutbox(loop.call_soon_threadsafe, self._deliver)
        engine: Engine = build_engine(self._config, inbox=self._inbox, outbox=outbox, progress=self._progress)
        try:
            arguments = Arguments(
                tokenizer,
                default_sampling=sampling,
                vocab_size=engine.info.vocab_size,
                eos_token_ids=engine.info.eos_token_ids,
                recipe=recipe,
                pictures=image_prompts(folder, tokenizer),
            )
            loop.call_soon_threadsafe(self._begin, arguments, engine.info)
            # Answers scheduled in a closed loop are silently lost, so sending them does not show that it is closed.
            engine.run(lambda: self._stopping.is_set() or loop.is_closed())
        finally:
            engine.close()

    def _progress(self, what: str, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise _StoppedError


class _StoppedError(Exception):
    """`close` was called before the engine was built."""
