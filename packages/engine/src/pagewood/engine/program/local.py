"""Programs on an engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

from pagewood.engine.api import SamplingParams
from pagewood.engine.offline.async_llm import AsyncLLM
from pagewood.engine.offline.calls import Completion
from pagewood.engine.program.backend import (
    Answer,
    OnText,
    Prompt,
    Sampling,
    Urgency,
    Usage,
    best_choice,
    num_shared,
)
from pagewood.engine.program.options import sampling_params
from pagewood.engine.text import Tokenizer

if TYPE_CHECKING:
    from pagewood.engine.offline.llm import LLM, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One request to the engine."""

    tokens: list[int]
    sampling: SamplingParams
    priority: int
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    on_text: OnText | None = None


_Requests = Callable[[], Sequence[_Request]]
"""Makes the requests of a variable: renders and encodes its prompt, which takes long for a long text."""
_Read = Callable[[Sequence[Completion]], Answer]
"""Makes the answer of their completions."""


class LocalBackend:
    """Runs programs on an `AsyncLLM` or an `LLM`. Invariant: only one thread calls it.

    With an `LLM`, a thread of the backend calls it: nothing else may while programs run. With an `AsyncLLM` made
    outside an event loop and not started, the backend runs an event loop in a thread, starts it there and closes it.
    Within the event loop that has started an `AsyncLLM`, the backend uses that loop, with other callers.

    Use it as `with LocalBackend(...) as backend`, or call `close`.

    Args:
        llm: computes the texts.

    Raises:
        TypeError: it is neither.
        RuntimeError: an `AsyncLLM` was started in another event loop, or not started in this one.
        Exception: what `AsyncLLM.start` raises.
    """

    __slots__ = ("_caller", "_llm")

    def __init__(self, llm: AsyncLLM | LLM) -> None:
        self._llm = llm
        self._caller = _LoopCaller(llm) if isinstance(llm, AsyncLLM) else _ThreadCaller(llm)

    @property
    def has_deadlines(self) -> bool:
        """False: the engine has priorities only."""
        return False

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._caller.tokenizer

    def render(self, prompt: Prompt) -> str:
        """Return the whole text of a prompt.

        Raises:
            ChatTemplateError: the model has no chat template, or its template rejects the messages.
        """
        return prompt.render(self._caller.tokenizer)

    def complete(
        self, prompt: Prompt, sampling: Sampling, urgency: Urgency, *, on_text: OnText | None = None
    ) -> Future[Answer]:
        """Continue a text."""

        tokenizer, offer = self._caller.tokenizer, sampling.offer

        def requests() -> list[_Request]:
            params = sampling_params(sampling, self._caller.default_sampling)
            if offer is not None:
                params = replace(params, grammar=offer.grammar(tokenizer, prompt))
            return [
                _Request(
                    tokens=prompt.encode(tokenizer),
                    sampling=params,
                    priority=urgency.priority,
                    stop=sampling.stop,
                    stop_regex=sampling.stop_regex,
                    on_text=on_text,
                )
            ]

        def read(completions: Sequence[Completion]) -> Answer:
            answer = _answer(completions[0])
            return answer if offer is None else offer.read(answer, tokenizer, prompt)

        return self._caller.call(requests, read)

    def score(self, prompt: Prompt, choices: Sequence[str], urgency: Urgency) -> Future[Answer]:
        """Score choices. Each is a request for the log probabilities of its tokens, whose prefix is cached."""
        num_before = 0

        def requests() -> list[_Request]:
            nonlocal num_before
            tokenizer = self._caller.tokenizer
            texts = [prompt.encode(tokenizer, more=choice) for choice in choices]
            num_before = num_shared([prompt.encode(tokenizer), *texts])
            scoring = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=num_before)
            return [_Request(tokens=text, sampling=scoring, priority=urgency.priority) for text in texts]

        def read(completions: Sequence[Completion]) -> Answer:
            usage = sum((_usage(completion, num_output=0) for completion in completions), Usage())
            return best_choice(choices, [[one.logprob for one in each.prompt_logprobs] for each in completions], usage)

        return self._caller.call(requests, read)

    def close(self) -> None:
        """End what the backend has started; open programs end with an error. May be called twice."""
        self._caller.close()

    def __enter__(self) -> LocalBackend:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _usage(completion: Completion, *, num_output: int) -> Usage:
    return Usage(
        num_prompt_tokens=completion.num_prompt_tokens,
        num_cached_tokens=completion.num_cached_tokens,
        num_output_tokens=num_output,
    )


def _answer(completion: Completion) -> Answer:
    usage = _usage(completion, num_output=len(completion.tokens))
    return Answer(text=completion.text, finish=completion.finish.value, usage=usage)


class _LoopCaller:
    """Calls an `AsyncLLM` in its event loop: the running one, or one in a thread of its own."""

    __slots__ = ("_encoder", "_llm", "_loop", "_thread", "default_sampling", "tokenizer")

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._thread: threading.Thread | None = None
        """Runs the loop, if it is the backend's own."""  # written by: close
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="pagewood-loop", daemon=True)
            self._thread.start()
            try:
                asyncio.run_coroutine_threadsafe(llm.start(), self._loop).result()
                self.tokenizer, self.default_sampling = asyncio.run_coroutine_threadsafe(
                    self._facts(), self._loop
                ).result()
            except BaseException:
                self._stop()
                raise
        else:
            self.tokenizer, self.default_sampling = llm.tokenizer, llm.default_sampling
        # Not the loop's own executor: its threads may all be waiting for programs.
        self._encoder = ThreadPoolExecutor(1, "pagewood-encode")

    def call(self, requests: _Requests, read: _Read) -> Future[Answer]:
        if self._loop.is_closed():
            raise RuntimeError("the event loop of the AsyncLLM is closed")
        return asyncio.run_coroutine_threadsafe(self._call(requests, read), self._loop)

    def close(self) -> None:
        self._encoder.shutdown(wait=False)
        if self._thread is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._llm.close(), self._loop).result()
            self._stop()

    def _stop(self) -> None:
        assert self._thread is not None
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _facts(self) -> tuple[Tokenizer, SamplingParams]:
        return self._llm.tokenizer, self._llm.default_sampling

    async def _call(self, requests: _Requests, read: _Read) -> Answer:
        made = await self._loop.run_in_executor(self._encoder, requests)
        return read(await asyncio.gather(*map(self._complete, made)))

    async def _complete(self, request: _Request) -> Completion:
        stream = self._llm.stream(
            request.tokens,
            request.sampling,
            stop=request.stop,
            stop_regex=request.stop_regex,
            priority=request.priority,
        )
        async with stream:
            async for piece in stream:
                if request.on_text is not None:
                    request.on_text(piece)
        assert stream.completion is not None
        return stream.completion


async def _end_tasks() -> None:
    """Wait for all other tasks of the loop, which are about to end with errors."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


class _ThreadCaller:
    """Calls an `LLM` in a thread of its own, whose streams run together."""

    __slots__ = ("_is_closed", "_jobs", "_llm", "_thread", "default_sampling", "tokenizer")

    def __init__(self, llm: LLM) -> None:
        from pagewood.engine.offline.llm import LLM

        if not isinstance(llm, LLM):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"llm must be an AsyncLLM or an LLM, got {llm!r:.100}")
        self._llm = llm
        self.tokenizer, self.default_sampling = llm.tokenizer, llm.default_sampling
        self._jobs = queue.SimpleQueue[_Job | None]()
        """Those that have not begun; None: end."""
        self._is_closed = False  # written by: close
        self._thread = threading.Thread(target=self._live, name="pagewood-llm", daemon=True)
        self._thread.start()

    def call(self, requests: _Requests, read: _Read) -> Future[Answer]:
        if self._is_closed:
            raise RuntimeError("the LocalBackend is closed")
        job = _Job(requests, read)
        self._jobs.put(job)
        return job.answer

    def close(self) -> None:
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join()

    def _live(self) -> None:
        """Begin jobs and advance those that have begun, until the end; the body of the thread."""
        running: list[_Job] = []
        while True:
            while not running or not self._jobs.empty():
                job = self._jobs.get()
                if job is None:
                    for each in [*running, *self._rest()]:
                        each.answer.cancel()
                        each.advance()
                    return
                job.begin(self._llm)
                running.append(job)
            # If none has news, the engine must go on. It does so for all, until the one that is read has news. That
            # takes a step or two, unless it is one that waits, and new jobs would wait with it.
            reading = [job for job in running if job.is_ready]
            for job in reading or [next((job for job in running if job.has_text), running[0])]:
                job.advance()
            running = [job for job in running if not job.is_done]

    def _rest(self) -> Iterator[_Job]:
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                yield job


class _Job:
    """The requests of one variable. Invariant: its streams are open only until its answer is done."""

    __slots__ = ("_open", "_read", "_requests", "_streams", "answer", "has_text", "is_done")

    def __init__(self, requests: _Requests, read: _Read) -> None:
        self._requests = requests
        self._read = read
        self._streams: list[Stream] = []  # written by: begin
        self._open: list[tuple[Stream, OnText | None]] = []
        """Streams that have not ended."""  # written by: begin, _read_streams
        self.answer = Future[Answer]()
        self.has_text = False
        """Whether the engine has begun to compute it."""  # written by: _read_streams
        self.is_done = False  # written by: _end

    @property
    def is_ready(self) -> bool:
        """Whether `advance` need not wait for the engine."""
        return self.is_done or self.answer.cancelled() or any(stream.is_ready for stream, _ in self._open)

    def begin(self, llm: LLM) -> None:
        """Submit its requests."""
        try:
            for request in self._requests():
                stream = llm.stream(
                    request.tokens,
                    request.sampling,
                    stop=request.stop,
                    stop_regex=request.stop_regex,
                    priority=request.priority,
                )
                self._streams.append(stream)
                self._open.append((stream, request.on_text))
        except Exception as error:  # the variable gets every error
            self._end(error)

    def advance(self) -> None:
        """Read what there is of its texts, or wait for more of one of them, which steps the engine for all jobs."""
        if self.is_done:
            return
        try:
            if not self.answer.cancelled():
                self._read_streams()
                if self._open:
                    return
                completions = [stream.completion for stream in self._streams]
                answer = self._read([one for one in completions if one is not None])
                with contextlib.suppress(InvalidStateError):  # it was cancelled meanwhile
                    self.answer.set_result(answer)
            self._end(None)
        except Exception as error:  # the variable gets every error
            self._end(error)

    def _read_streams(self) -> None:
        ready = [one for one in self._open if one[0].is_ready] or self._open[:1]
        for stream, on_text in ready:
            piece = next(stream, None)
            if piece is None:
                self._open.remove((stream, on_text))
                continue
            self.has_text = True
            if on_text is not None:
                on_text(piece)

    def _end(self, error: Exception | None) -> None:
        self.is_done = True
        for stream in self._streams:
            with contextlib.suppress(RuntimeError):  # the engine has failed, or is closed
                stream.close()
        if error is not None:
            with contextlib.suppress(InvalidStateError):
                self.answer.set_exception(error)
