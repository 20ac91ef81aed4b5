"""The offline API: prompts in, completions out, computed in the thread of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from tqdm import tqdm

from pagewood.engine.api import PoolingParams, SamplingParams
from pagewood.engine.beam_search import BeamSearchParams
from pagewood.engine.core.loop import Counters, EngineInfo
from pagewood.engine.images.prompts import image_prompts
from pagewood.engine.model_folder.folder import default_sampling, model_folder
from pagewood.engine.model_folder.vector_recipe import read_vector_recipe
from pagewood.engine.offline.arguments import Arguments, Conversation, Conversations, Prompt, Prompts, engine_config
from pagewood.engine.offline.beam_search import BeamSearches, BeamSearchResult
from pagewood.engine.offline.calls import Call, Completion, LLMAsleepError
from pagewood.engine.offline.options import CallOptions, Each, Sampling
from pagewood.engine.offline.shared_engine import SharedEngine
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

_PROGRESS_AFTER_S = 2.0


class LLM:
    """A model that answers in this process; use it as a context manager, or call `close`.

    The prompts of one call run together, and shared prefixes are computed once. The prefix cache lives as long as the
    LLM. Calls and streams of one thread may be interleaved in any way: each step of the engine serves all of them, no
    matter which call asked for it, and an answer that is not read yet waits in memory (at most `max_tokens` tokens).

    A call that ends with an exception, Ctrl-C included, aborts its requests, and the LLM stays usable. Ctrl-C takes
    effect between two steps; only a second one during the same step interrupts the step, and then the LLM can only be
    closed. Call an LLM from one thread at a time: a call during a call of another thread raises `LLMBusyError`. For
    many callers, use `AsyncLLM`.

    Args:
        model: folder of a Hugging Face model, or a GGUF file; None: the embedded model.
        options: fields of `EngineConfig`.

    Raises:
        TypeError: an option does not exist.
        ValueError: an option or the model is not supported.
        FileNotFoundError: the folder lacks a file.
    """

    __slots__ = ("_arguments", "_engine")

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        config = engine_config(model, options)
        folder = model_folder(config.model)
        tokenizer, sampling, recipe = (
            Tokenizer.from_folder(folder),
            default_sampling(folder),
            read_vector_recipe(folder),
        )
        self._engine = SharedEngine(config)
        self._arguments = Arguments(
            tokenizer,
            default_sampling=sampling,
            vocab_size=self._engine.info.vocab_size,
            eos_token_ids=self._engine.info.eos_token_ids,
            recipe=recipe,
            pictures=image_prompts(folder, tokenizer),
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._arguments.tokenizer

    @property
    def default_sampling(self) -> SamplingParams:
        """The sampling parameters that the model's folder recommends."""
        return self._arguments.default_sampling

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine: longest request, size of the vocabulary, pages of KV memory."""
        return self._engine.info

    def counters(self) -> Counters:
        """Return the engine's counters: its work so far, and its present state."""
        return self._engine.counters()

    @overload
    def generate(
        self, prompts: Prompts, sampling: Sampling = None, *, n: None = None, **options: Unpack[CallOptions[Each]]
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompts: Prompts, sampling: Sampling = None, *, n: int, **options: Unpack[CallOptions[Each]]
    ) -> list[list[Completion]]: ...

    def generate(
        self, prompts: Prompts, sampling: Sampling = None, *, n: int | None = None, **options: Unpack[CallOptions[Each]]
    ) -> list[Completion] | list[list[Completion]]:
        """Complete prompts. A progress bar appears if it takes longer than two seconds.

        Args:
            prompts: one prompt or several, each text, token ids, or a text with images (`PicturedPrompt`).
            sampling: for all prompts, or one for each; None: what the model's folder recommends.
            n: answers to each prompt, which is computed once. If `sampling` has a seed, the first answer has that seed,
                and the others have seeds derived from it (`seeds.answer_seed`). None: one answer.
            options: `stop` and `stop_regex` end a text, and `priority` and `adapter` are for all prompts, or one for
                each; see `CallOptions`.

        Returns:
            One completion for each prompt, in the order of the prompts. If `n` is given, also if it is 1, a list of n
            completions for each prompt instead. If the engine refuses one of several prompts, for example because it is
            too long, its `Completion.refusal` says why and the others are answered.

        Raises:
            TypeError: an argument has the wrong type. Nothing was computed.
            ValueError: an argument has a wrong value. Nothing was computed.
            LLMClosedError: the LLM is closed.
            LLMBusyError: another thread is using it.
            RunnerLostError: a process that computes with this one is lost; the LLM can only be closed.
            EngineFailedError: the engine has failed.
        """
        self._engine.check()
        call = self._arguments.call(self._arguments.pictured_prompts(prompts), sampling, n, **options)
        return self._answered(call).results()

    @overload
    def chat(
        self,
        conversations: Conversations,
        sampling: Sampling = None,
        *,
        n: None = None,
        **options: Unpack[CallOptions[Each]],
    ) -> list[Completion]: ...

    @overload
    def chat(
        self, conversations: Conversations, sampling: Sampling = None, *, n: int, **options: Unpack[CallOptions[Each]]
    ) -> list[list[Completion]]: ...

    def chat(
        self,
        conversations: Conversations,
        sampling: Sampling = None,
        *,
        n: int | None = None,
        **options: Unpack[CallOptions[Each]],
    ) -> list[Completion] | list[list[Completion]]:
        """Answer one conversation or several, by the model's chat template; otherwise like `generate`.

        Args:
            conversations: lists of `{"role": ..., "content": ...}`. A content is a text, or parts such as `{"type":
                "text", "text": ...}` and `{"type": "image", "image": ...}` with a picture of Pillow, the path of a
                file, its bytes or a data URL.
            sampling: see `generate`.
            n: see `generate`.
            options: see `generate`.
        """
        self._engine.check()
        call = self._arguments.call(self._arguments.conversations(conversations), sampling, n, **options)
        return self._answered(call).results()

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[CallOptions[int]]
    ) -> Stream:
        """Return an iterator over the text of one completion, in pieces as they are computed.

        The request takes part in every step from now on; a stop string ends it when it is read. Raises what `generate`
        raises; if the engine refuses the prompt, the first `next` raises a ValueError.
        """
        self._engine.check()
        tokens = self._arguments.prompt("prompt", prompt)
        return Stream(self._engine, self._arguments.call([tokens], sampling, **options))

    def stream_read(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        *,
        make_stops: Callable[[], ReadStops],
        priority: int = 0,
    ) -> Stream:
        """Return a stream as `stream` does; the result of `make_stops` finds the end of the text."""
        self._engine.check()
        submits = self._arguments.submits([self._arguments.prompt("prompt", prompt)], sampling, priority)
        return Stream(self._engine, Call(submits, tokenizer=self.tokenizer, make_stops=make_stops))

    def stream_chat(
        self, messages: Conversation, sampling: SamplingParams | None = None, **options: Unpack[CallOptions[int]]
    ) -> Stream:
        """Return an iterator over the text of the answer to a conversation; otherwise like `stream`."""
        self._engine.check()
        tokens = self._arguments.conversation("messages", messages)
        return Stream(self._engine, self._arguments.call([tokens], sampling, **options))

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, *, priority: int | Sequence[int] = 0
    ) -> list[BeamSearchResult]:
        """Search the most probable answers to prompts, with a beam for each. The beams of all prompts run together.

        The prompt of a conversation is `tokenizer.encode_chat(messages)`.

        Args:
            prompts: one prompt or several, each text or token ids.
            params: of the search.
            priority: for all prompts, or one for each.

        Returns:
            One result for each prompt, in the order of the prompts. If a prompt is too long, its `refusal` says so and
            the others are answered.

        Raises what `generate` raises.
        """
        self._engine.check()
        tokens = self._arguments.prompts(prompts)
        searches = BeamSearches(tokens, params, priority, arguments=self._arguments, info=self.info)
        while submits := searches.submits():
            call = Call(submits, tokenizer=self.tokenizer)
            self._engine.complete(call, lambda _: None)
            searches.take(call.completions())
        return searches.results()

    def embed(
        self,
        prompts: Prompts,
        pooling: PoolingParams | None = None,
        *,
        prompt_name: str | None = None,
        truncate: bool = False,
        priority: int | Sequence[int] = 0,
    ) -> Vectors:
        """Return the vectors of texts.

        Args:
            prompts: one prompt or several, each text or token ids.
            pooling: how hidden states become a vector; None: the pooling of the model's folder, or else the last state,
                normalised.
            prompt_name: name of the prompt of the model's folder to put before each text, such as `query`; None: its
                default, if it has one.
            truncate: whether a text that is too long loses its end, as in sentence-transformers; otherwise it is an
                error.
            priority: for all prompts, or one for each.

        Returns:
            `[num_prompts, dim] float32`, in the order of the prompts.

        Raises what `generate` raises; a prompt that is too long is a ValueError, too.
        """
        self._engine.check()
        requests = VectorRequests(self._arguments, self.info)
        submits = requests.of_prompts(prompts, pooling, prompt_name, priority, truncate=truncate)
        return requests.vectors(self._answered(Call(submits, tokenizer=self.tokenizer)))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: bool = False,
        priority: int = 0,
    ) -> list[RankedDocument]:
        """Return documents in the order of their relevance for a query, the best first.

        A reranker (a folder with a `LogitScore` module, `classifier_from_token` in its config.json, or a head with one
        label) reads each document with the query. Any other model compares their vectors.

        Args:
            query: the text to search for.
            documents: the texts that may answer it.
            top_n: number of documents to return; None: all.
            instruction: for a reranker, about the query; None: the reranker's own.
            truncate: whether texts that are too long lose their ends; of a pair, the longer text. Otherwise they are an
                error.
            priority: of the requests.

        Raises what `generate` raises; a text that is too long is a ValueError, too.
        """
        self._engine.check()
        requests = VectorRequests(self._arguments, self.info)
        submits = requests.of_query(query, documents, instruction, priority, top_n=top_n, truncate=truncate)
        return requests.ranked(self._answered(Call(submits, tokenizer=self.tokenizer)), top_n)

    def update_weights(
        self,
        tensors: Iterable[tuple[str, Tensor]] | str | Path,
        *,
        version: str | None = None,
        old_kv: OldKV = "drop",
    ) -> str:
        """Let later steps compute with other weights; streams go on, with old and new ones.

        Args:
            tensors: names and tensors of the model, all or some of them; or the folder of a whole model. Names are
                those of its files, or of its parameters in `transformers`. A pair `NAME.sparse_indices` and
                `NAME.sparse_values` replaces some elements of a tensor.
            version: name of the version; None: the number of updates.
            old_kv: see `UpdateWeights`.

        Returns:
            The version.

        Raises:
            TypeError: an item is not a name with a tensor.
            ValueError: a tensor is not that of the model, or the engine cannot change its weights; the old ones stay.
            LLMClosedError: the LLM is closed.
            EngineFailedError: the engine has failed.
        """
        self._engine.check()
        with weight_update(tensors, version=version, old_kv=old_kv) as question:
            return answered_version(self._engine.ask(question))

    def sleep(self, level: int = 1) -> None:
        """Give memory back to the operating system until `wake_up`; nothing is computed meanwhile.

        Open streams go on afterwards. What is asked meanwhile raises `LLMAsleepError`.

        Args:
            level: 0: nothing is computed, and memory stays; 1: KV is dropped, and weights that are in no file are
                written to the cache folder; 2: weights are dropped too, so that `update_weights` must replace all of
                them after waking.

        Raises:
            ValueError: the level is another one, or this engine cannot give its memory back; it is awake then.
            LLMClosedError: the LLM is closed.
            EngineFailedError: the engine has failed.
        """
        self._engine.check()
        check_done(self._engine.ask(sleep_question(level)))

    def wake_up(self, tags: Sequence[SleepTag] | None = None) -> None:
        """Take memory again that `sleep` has given back, and compute when neither weights nor KV sleep.

        Args:
            tags: what wakes up, of weights, kv_cache and scheduling; None: everything.

        Raises:
            ValueError: a tag is unknown, or weights cannot be read back; they sleep on then.
            LLMClosedError: the LLM is closed.
            EngineFailedError: the engine has failed.
        """
        self._engine.check()
        check_done(self._engine.ask(wake_question(tags)))

    @property
    def is_sleeping(self) -> bool:
        """Whether something sleeps, or dropped weights have not been updated."""
        return self._engine.is_asleep

    def close(self) -> None:
        """Release threads and memory; open streams raise `LLMClosedError`. May be called twice."""
        self._engine.close()

    def __enter__(self) -> LLM:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _answered(self, call: Call) -> Call:
        """Return a call when it has all answers."""
        unit = "prompt" if call.num_each is None else "answer"
        with tqdm(total=call.num_open, unit=unit, disable=None, delay=_PROGRESS_AFTER_S, leave=False) as bar:
            self._engine.complete(call, bar.update)
        return call


class Stream:
    """The text of one completion, in pieces. Invariant: its request is alive only as long as it may be read.

    Closing or dropping it, or an exception in `next`, ends the request. May be used as a context manager.

    Args:
        engine: computes the answer.
        call: one request, not yet submitted.
    """

    __slots__ = ("__weakref__", "_call", "_engine", "_is_done")

    def __init__(self, engine: SharedEngine, call: Call) -> None:
        self._engine = engine
        self._call = call
        self._is_done = False  # written by: __next__, close
        engine.end_if_dropped(self, call.request_ids[0])
        engine.submit(call)

    @property
    def completion(self) -> Completion | None:
        """The whole answer, once it is complete; None before."""
        return None if self._call.num_open else self._call.completions()[0]

    @property
    def is_ready(self) -> bool:
        """Whether a part of the answer was computed since the last `next`, or nothing more will come."""
        return self._is_done or self._call.has_news

    def __iter__(self) -> Stream:
        """Return itself."""
        return self

    def __next__(self) -> str:
        """Return the text computed since the last piece; step the engine until there is some.

        Raises:
            ValueError: the engine refused the prompt.
            LLMClosedError: the LLM was closed.
            LLMBusyError: another thread is using the LLM; the stream can continue later.
            LLMAsleepError: the LLM sleeps; the stream can continue later.
            EngineFailedError: the engine has failed.
        """
        if self._is_done:
            raise StopIteration
        turn = self._engine.turn()
        try:
            text = self._engine.read(self._call, turn)
        except LLMAsleepError:
            raise
        except BaseException:
            self._is_done = True
            raise
        if text:
            return text
        self._is_done = True
        if self.completion is not None and self.completion.refusal is not None:
            raise ValueError(self.completion.refusal.message)
        raise StopIteration

    def close(self) -> None:
        """End the request; after the end of the stream this does nothing."""
        if not self._is_done:
            self._is_done = True
            self._engine.end(self._call)

    def __enter__(self) -> Stream:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()
