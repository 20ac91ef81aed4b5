"""The API for asyncio programs: many callers, one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from pagewood.engine.api import Abort, PoolingParams, SamplingParams
from pagewood.engine.beam_search import BeamSearchParams
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.offline.arguments import Conversation, Conversations, Prompt, Prompts, engine_config
from pagewood.engine.offline.beam_search import BeamSearches, BeamSearchResult
from pagewood.engine.offline.calls import Call, Completion, Question, QuestionCommand
from pagewood.engine.offline.engine_thread import EngineThread
from pagewood.engine.offline.options import CallOptions, Each, Sampling
from pagewood.engine.offline.vectors import RankedDocument, VectorRequests, Vectors
from pagewood.engine.offline.weight_update import (
    answered_version,
    check_done,
    sleep_question,
    wake_question,
    weight_update,
)
from pagewood.engine.text import ReadStops, Tokenizer
from pagewood.engine.weight_commands import OldKV, SleepTag

if TYPE_CHECKING:
    from torch import Tensor


class AsyncLLM:
    """A model that answers many callers of one event loop; the engine runs in a thread of its own.

    Use it as `async with AsyncLLM(...) as llm`, or call `start` and `close`. It belongs to the event loop that started
    it; a call in another loop raises a RuntimeError. Other threads use `asyncio.run_coroutine_threadsafe`.

    All calls run together in one engine. Cancelling a call aborts its requests. A slow reader of a stream delays no
    other caller, and its answer waits in memory: at most `max_tokens` tokens, because that is where the engine ends the
    request. An error of the engine makes every call raise `EngineFailedError`; `close` makes every open call raise
    `LLMClosedError`.

    Args:
        model: folder of a Hugging Face model; None: the embedded model.
        options: fields of `EngineConfig`.

    Raises:
        TypeError: an option does not exist.
        ValueError: an option is out of its range.
    """

    __slots__ = ("_engine",)

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self._engine = EngineThread(engine_config(model, options))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; only after `start`."""
        return self._engine.arguments.tokenizer

    @property
    def default_sampling(self) -> SamplingParams:
        """The sampling parameters that the model's folder recommends; only after `start`."""
        return self._engine.arguments.default_sampling

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine: longest request, size of the vocabulary, pages of KV memory; only after `start`."""
        return self._engine.info

    async def start(self) -> None:
        """Load the model, and start the engine.

        Raises:
            ValueError: the model is not supported, or does not fit the options.
            FileNotFoundError: the model's folder lacks a file.
            RuntimeError: it was started before.
        """
        await self._engine.start()

    async def close(self) -> None:
        """Stop the engine and release its memory; open calls raise `LLMClosedError`. May be called twice."""
        await self._engine.close()

    async def __aenter__(self) -> AsyncLLM:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close."""
        await self.close()

    @overload
    async def generate(
        self, prompts: Prompts, sampling: Sampling = None, *, n: None = None, **options: Unpack[CallOptions[Each]]
    ) -> list[Completion]: ...

    @overload
    async def generate(
        self, prompts: Prompts, sampling: Sampling = None, *, n: int, **options: Unpack[CallOptions[Each]]
    ) -> list[list[Completion]]: ...

    async def generate(
        self, prompts: Prompts, sampling: Sampling = None, *, n: int | None = None, **options: Unpack[CallOptions[Each]]
    ) -> list[Completion] | list[list[Completion]]:
        """Complete prompts; arguments and result are those of `LLM.generate`.

        Raises:
            TypeError: an argument has the wrong type. Nothing was computed.
            ValueError: an argument has a wrong value. Nothing was computed.
            LLMClosedError: the LLM is closed, or was closed meanwhile.
            EngineFailedError: the engine has failed.
            RuntimeError: the LLM was not started, or in another event loop.
        """
        # In another thread, because tokenizing a long text takes long.
        tokens = await asyncio.to_thread(self._engine.arguments.pictured_prompts, prompts)
        return (await self._answered(self._engine.arguments.call(tokens, sampling, n, **options))).results()

    @overload
    async def chat(
        self,
        conversations: Conversations,
        sampling: Sampling = None,
        *,
        n: None = None,
        **options: Unpack[CallOptions[Each]],
    ) -> list[Completion]: ...

    @overload
    async def chat(
        self, conversations: Conversations, sampling: Sampling = None, *, n: int, **options: Unpack[CallOptions[Each]]
    ) -> list[list[Completion]]: ...

    async def chat(
        self,
        conversations: Conversations,
        sampling: Sampling = None,
        *,
        n: int | None = None,
        **options: Unpack[CallOptions[Each]],
    ) -> list[Completion] | list[list[Completion]]:
        """Answer one conversation or several, by the model's chat template; otherwise like `generate`."""
        tokens = await asyncio.to_thread(self._engine.arguments.conversations, conversations)
        return (await self._answered(self._engine.arguments.call(tokens, sampling, n, **options))).results()

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[CallOptions[int]]
    ) -> AsyncStream:
        """Return an asynchronous iterator over the text of one completion, in pieces as they are computed.

        The prompt is tokenized before this returns, and computed from now on, whether the stream is read or not; a stop
        string ends the request when it is read. Raises what `generate` raises; if the engine refuses the prompt, the
        first read raises a ValueError.
        """
        arguments = self._engine.arguments
        return AsyncStream(self._engine, arguments.call([arguments.prompt("prompt", prompt)], sampling, **options))

    def stream_read(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        *,
        make_stops: Callable[[], ReadStops],
        priority: int = 0,
    ) -> AsyncStream:
        """Return a stream as `stream` does; the result of `make_stops` finds the end of the text."""
        arguments = self._engine.arguments
        submits = arguments.submits([arguments.prompt("prompt", prompt)], sampling, priority)
        return AsyncStream(self._engine, Call(submits, tokenizer=self.tokenizer, make_stops=make_stops))

    def stream_chat(
        self, messages: Conversation, sampling: SamplingParams | None = None, **options: Unpack[CallOptions[int]]
    ) -> AsyncStream:
        """Return an asynchronous iterator over the text of the answer to a conversation; otherwise like `stream`."""
        arguments = self._engine.arguments
        tokens = arguments.conversation("messages", messages)
        return AsyncStream(self._engine, arguments.call([tokens], sampling, **options))

    async def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, *, priority: int | Sequence[int] = 0
    ) -> list[BeamSearchResult]:
        """Search the most probable answers to prompts; arguments and result are those of `LLM.beam_search`.

        Raises what `generate` raises.
        """
        arguments = self._engine.arguments
        tokens = await asyncio.to_thread(arguments.prompts, prompts)
        searches = BeamSearches(tokens, params, priority, arguments=arguments, info=self.info)
        while submits := searches.submits():
            call = await self._answered(Call(submits, tokenizer=self.tokenizer))
            searches.take(call.completions())
        return searches.results()

    async def embed(
        self,
        prompts: Prompts,
        pooling: PoolingParams | None = None,
        *,
        prompt_name: str | None = None,
        truncate: bool = False,
        priority: int | Sequence[int] = 0,
    ) -> Vectors:
        """Return the vectors of texts; arguments and result are those of `LLM.embed`.

        Raises what `generate` raises.
        """
        requests = VectorRequests(self._engine.arguments, self.info)
        submits = await asyncio.to_thread(
            requests.of_prompts, prompts, pooling, prompt_name, priority, truncate=truncate
        )
        return requests.vectors(await self._answered(Call(submits, tokenizer=self.tokenizer)))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: bool = False,
        priority: int = 0,
    ) -> list[RankedDocument]:
        """Return documents in the order of their relevance; arguments and result are those of `LLM.rerank`.

        Raises what `generate` raises.
        """
        requests = VectorRequests(self._engine.arguments, self.info)
        submits = await asyncio.to_thread(
            requests.of_query, query, documents, instruction, priority, top_n=top_n, truncate=truncate
        )
        return requests.ranked(await self._answered(Call(submits, tokenizer=self.tokenizer)), top_n)

    async def update_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]] | str | Path,
        *,
        version: str | None = None,
        old_kv: OldKV = "drop",
    ) -> str:
        """Let later steps compute with other weights; arguments and result are those of `LLM.update_weights`.

        Steps go on while they are read. The caller may cancel the wait, but not the update.
        """
        update = weight_update(tensors, version=version, old_kv=old_kv)
        question = await asyncio.to_thread(update.__enter__)
        try:
            return answered_version(await self._engine.ask(question))
        finally:
            update.__exit__(None, None, None)

    async def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`, see `LLM.sleep`; requests wait meanwhile, and go on afterwards."""
        check_done(await self._engine.ask(sleep_question(level)))

    async def wake_up(self, tags: Sequence[SleepTag] | None = None) -> None:
        """Take memory again, see `LLM.wake_up`."""
        check_done(await self._engine.ask(wake_question(tags)))

    async def tell(self, command: QuestionCommand) -> str:
        """Carry out a command such as `Pause`, `Flush` or a `Sleep` of some tags; its id must be new.

        Returns:
            The version of the weights, if it has changed them.

        Raises:
            ValueError: it was refused.
        """
        answer = await self._engine.ask(Question(command))
        check_done(answer)
        return answer.weights

    async def _answered(self, call: Call) -> Call:
        """Return a call when it has all answers; an exception or a cancellation aborts its requests."""
        news = asyncio.Event()
        call.notify = news.set
        self._engine.submit(call)
        try:
            while call.num_open:
                await news.wait()
                news.clear()
                self._engine.check()
                self._engine.leave(call.read().ended)
        finally:
            self._engine.leave(call.request_ids)
        return call


class AsyncStream:
    """The text of one completion, in pieces. Invariant: its request is alive only as long as it may be read.

    Closing or dropping it, or an exception or cancellation while it is read, ends the request. May be used as an
    asynchronous context manager.

    Args:
        engine: computes the answer.
        call: one request, not yet submitted.
    """

    __slots__ = ("_abort", "_call", "_engine", "_is_done", "_news")

    def __init__(self, engine: EngineThread, call: Call) -> None:
        self._engine = engine
        self._call = call
        self._news = asyncio.Event()
        """Set when the call has something to read, or the engine has ended."""
        call.notify = self._news.set
        self._abort = Abort(request_id=call.request_ids[0])
        self._is_done = False  # written by: aclose
        engine.submit(call)

    @property
    def completion(self) -> Completion | None:
        """The whole answer, once it is complete; None before."""
        return None if self._call.num_open else self._call.completions()[0]

    def __aiter__(self) -> AsyncStream:
        """Return itself."""
        return self

    async def __anext__(self) -> str:
        """Return the next piece of text: all that was computed since the last one.

        Raises:
            ValueError: the engine refused the prompt.
            LLMClosedError: the LLM was closed.
            EngineFailedError: the engine has failed.
        """
        if self._is_done:
            raise StopAsyncIteration
        try:
            while True:
                self._engine.check()
                news = self._call.read()
                self._engine.leave(news.ended)
                if news.text:
                    return news.text
                if self.completion is not None:
                    break
                await self._news.wait()
                self._news.clear()
        except BaseException:
            await self.aclose()
            raise
        self._is_done = True
        if self.completion.refusal is not None:
            raise ValueError(self.completion.refusal.message)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the request, before the engine's next step; returns at once."""
        self._is_done = True
        self._engine.leave(self._call.request_ids)

    async def __aenter__(self) -> AsyncStream:
        """Return itself."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close."""
        await self.aclose()

    def __del__(self) -> None:
        """End the request; this may run in any thread."""
        if not self._is_done:
            self._engine.end_later(self._abort)
