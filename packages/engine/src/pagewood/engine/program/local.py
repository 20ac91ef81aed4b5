"""Programs on an engine in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pagewood.engine.api import SamplingParams
from pagewood.engine.offline.async_llm import AsyncLLM, AsyncStream
from pagewood.engine.offline.calls import Completion
from pagewood.engine.program.backend import Answer, OnText, Prompt, Sampling, Usage, best_choice, num_shared
from pagewood.engine.program.options import sampling_params
from pagewood.engine.text import ReadStops, Tokenizer

if TYPE_CHECKING:
    from pagewood.engine.offline.llm import LLM, Stream

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One request to the engine."""

    tokens: list[int]
    sampling: SamplingParams
    priority: int
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    make_stops: Callable[[], ReadStops] | None = None
    """Makes the finder of the end of a text with calls, in place of both."""
    on_text: OnText | None = None


_Requests = Callable[[], Sequence[_Request]]
"""Makes the requests of a variable: renders and encodes its prompt, which takes long for a long text."""
_Read = Callable[[Sequence[Completion]], Answer]
"""Makes the answer of their completions."""


class LocalBackend:
    """Runs programs on an `AsyncLLM` or an `LLM`. Invariant: only one thread calls it, in an event loop.

    Within the event loop that has started an `AsyncLLM`, the backend uses that loop, with other callers. Otherwise it
    runs a loop in a thread of its own: with an `LLM`, which no other code may call while programs run, and with an
    `AsyncLLM` that was made outside an event loop and not started, which it starts there and closes.

    Use it as `with LocalBackend(...) as backend`, or call `close`.

    Args:
        llm: computes the texts.

    Raises:
        TypeError: `llm` is neither.
        RuntimeError: an `AsyncLLM` was started in another event loop, or not started in this one.
        Exception: what `AsyncLLM.start` raises.
    """

    __slots__ = ("_default_sampling", "_encoder", "_llm", "_loop", "_num_begun", "_thread", "tokenizer")

    def __init__(self, llm: AsyncLLM | LLM) -> None:
        from pagewood.engine.offline.llm import LLM

        if not isinstance(llm, (AsyncLLM, LLM)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"llm must be an AsyncLLM or an LLM, got {llm!r:.100}")
        self._llm = llm
        self._num_begun = 0  # written by: _read
        """Streams of an `LLM` that have text and continue."""
        # Not the loop's own executor: its threads may all be waiting for programs.
        self._encoder = ThreadPoolExecutor(1, "pagewood-encode")
        running = _running_loop() if isinstance(llm, AsyncLLM) else None
        self._loop = running or asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        """Runs the loop, if it is the backend's own."""
        if running is not None:
            self.tokenizer, self._default_sampling = llm.tokenizer, llm.default_sampling
            return
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagewood-loop", daemon=True)
        self._thread.start()
        try:
            self.tokenizer, self._default_sampling = self._await(self._start())
        except BaseException:
            self._stop()
            raise

    def render(self, prompt: Prompt) -> str:
        """Return the whole text of a prompt.

        Raises:
            ChatTemplateError: the model has no chat template, or its template rejects the messages.
        """
        return prompt.render(self.tokenizer)

    def complete(
        self, prompt: Prompt, sampling: Sampling, priority: int, *, on_text: OnText | None = None
    ) -> Future[Answer]:
        """Continue a text."""

        tokenizer, offer = self.tokenizer, sampling.offer

        def requests() -> list[_Request]:
            params, make_stops = sampling_params(sampling, self._default_sampling), None
            if offer is not None:
                params = replace(params, grammar=offer.grammar(tokenizer, prompt))
                make_stops = offer.stops(sampling, tokenizer, prompt)
            return [
                _Request(
                    tokens=prompt.encode(tokenizer),
                    sampling=params,
                    priority=priority,
                    stop=sampling.stop,
                    stop_regex=sampling.stop_regex,
                    make_stops=make_stops,
                    on_text=on_text,
                )
            ]

        def read(completions: Sequence[Completion]) -> Answer:
            answer = _answer(completions[0])
            return answer if offer is None else offer.read(answer, tokenizer, prompt)

        return self._call(requests, read)

    def score(self, prompt: Prompt, choices: Sequence[str], priority: int) -> Future[Answer]:
        """Score choices. Each is a request for the log probabilities of its tokens, whose prefix is cached."""
        num_before = 0

        def requests() -> list[_Request]:
            nonlocal num_before
            tokenizer = self.tokenizer
            texts = [prompt.encode(tokenizer, more=choice) for choice in choices]
            num_before = num_shared([prompt.encode(tokenizer), *texts])
            scoring = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=num_before)
            return [_Request(tokens=text, sampling=scoring, priority=priority) for text in texts]

        def read(completions: Sequence[Completion]) -> Answer:
            usage = sum((_usage(completion, num_output=0) for completion in completions), Usage())
            return best_choice(choices, [[one.logprob for one in each.prompt_logprobs] for each in completions], usage)

        return self._call(requests, read)

    def close(self) -> None:
        """End what the backend itself has started; open programs end with an error. May be called twice."""
        self._encoder.shutdown(wait=False)
        if self._thread is not None and not self._loop.is_closed():
            self._stop()

    def __enter__(self) -> LocalBackend:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work in the loop, which runs in another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> tuple[Tokenizer, SamplingParams]:
        if isinstance(self._llm, AsyncLLM):
            await self._llm.start()
        return self._llm.tokenizer, self._llm.default_sampling

    async def _end(self) -> None:
        """End all other tasks of the loop."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if isinstance(self._llm, AsyncLLM):
            await self._llm.close()  # they end with errors
        else:
            for task in others:
                task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _stop(self) -> None:
        assert self._thread is not None
        self._await(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, requests: _Requests, read: _Read) -> Future[Answer]:
        if self._loop.is_closed():
            raise RuntimeError("the LocalBackend is closed")
        return asyncio.run_coroutine_threadsafe(self._answer(requests, read), self._loop)

    async def _answer(self, requests: _Requests, read: _Read) -> Answer:
        made = await self._loop.run_in_executor(self._encoder, requests)
        return read(await asyncio.gather(*map(self._complete, made)))

    async def _complete(self, request: _Request) -> Completion:
        tokens, sampling, priority = request.tokens, request.sampling, request.priority
        if request.make_stops is not None:
            stream = self._llm.stream_read(tokens, sampling, make_stops=request.make_stops, priority=priority)
        else:
            stream = self._llm.stream(
                tokens, sampling, stop=request.stop, stop_regex=request.stop_regex, priority=priority
            )
        on_text = request.on_text or _ignore
        if isinstance(stream, AsyncStream):
            async with stream:
                async for piece in stream:
                    on_text(piece)
        else:
            with stream:
                await self._read(stream, on_text)
        assert stream.completion is not None
        return stream.completion

    async def _read(self, stream: Stream, on_text: OnText) -> None:
        """Read a stream of an `LLM`; reading one that is not ready steps the engine for all."""
        has_begun = False
        try:
            while True:
                # One that waits in the engine's queue may wait for long, and new requests would wait with it.
                while self._num_begun and not (has_begun or stream.is_ready):
                    await asyncio.sleep(0)
                piece = next(stream, None)
                if piece is None:
                    return
                self._num_begun += not has_begun
                has_begun = True
                on_text(piece)
                await asyncio.sleep(0)
        finally:
            self._num_begun -= has_begun


def _usage(completion: Completion, *, num_output: int) -> Usage:
    return Usage(
        num_prompt_tokens=completion.num_prompt_tokens,
        num_cached_tokens=completion.num_cached_tokens,
        num_output_tokens=num_output,
    )


def _answer(completion: Completion) -> Answer:
    usage = _usage(completion, num_output=len(completion.tokens))
    return Answer(text=completion.text, finish=completion.finish.value, usage=usage)


def _ignore(text: str) -> None:
    """Do nothing with a piece of text that is not wanted."""


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
