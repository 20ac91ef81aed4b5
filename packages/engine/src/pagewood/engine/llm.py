"""The offline API: prompts in, completions out, in one process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from pagewood.engine.api import Abort, Delta, EngineConfig, FinishReason, Refusal, SamplingParams, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Pending
from pagewood.engine.folder import default_sampling, model_folder
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.text import ChatMessage, TextStream, Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""

T = TypeVar("T", SamplingParams, int)

_PROGRESS_AFTER_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one prompt; `refusal` says why there is none where `finish` is REFUSED or ERROR."""

    text: str
    tokens: tuple[int, ...]
    finish: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    refusal: Refusal | None = None


class LLM:
    """A model that answers in this process; a context manager, or call `close`.

    Prompts of one call run together, and what they share is computed once; the prefix cache lives as long as the LLM.
    Not thread-safe.

    Args:
        model: folder of a Hugging Face model; None: the model that ships inside.
        options: fields of `EngineConfig`.

    Raises:
        ValueError: an option or the model is not supported.
        FileNotFoundError: the folder lacks a file.
    """

    __slots__ = ("_engine", "_inbox", "_num_submitted", "_outbox", "_pending", "default_sampling", "tokenizer")

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        config = EngineConfig(model=None if model is None else str(model), **options)
        folder = model_folder(config.model)
        self.tokenizer = Tokenizer.from_folder(folder)
        self.default_sampling = default_sampling(folder)
        self._inbox, self._outbox = MemoryInbox(), MemoryOutbox()
        self._engine = build_engine(config, inbox=self._inbox, outbox=self._outbox)
        self._num_submitted = 0  # written by: _submit
        self._pending: Pending | None = None  # written by: _step

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
        priority: int | Sequence[int] = 0,
    ) -> list[Completion]:
        """Complete prompts; a progress bar appears when it takes long.

        Args:
            prompts: one, or several.
            sampling: for all, or one each; None: what the model's folder advises.
            stop: strings at which a text ends.
            priority: for all, or one each; where not all can run at once, higher ones go first.

        Returns:
            One completion for each prompt, in order.

        Raises:
            ValueError: there are not as many sampling parameters or priorities as prompts.
        """
        batch = _several(prompts)
        samplings = _spread("sampling", self.default_sampling if sampling is None else sampling, len(batch))
        priorities = _spread("priority", priority, len(batch))
        ids = [
            self._submit(self._encode(prompt), one, rank)
            for prompt, one, rank in zip(batch, samplings, priorities, strict=True)
        ]
        return self._complete(ids, stop)

    def chat(
        self,
        conversations: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
        priority: int | Sequence[int] = 0,
    ) -> list[Completion]:
        """Answer conversations, lists of `{"role": ..., "content": ...}`, by the model's chat template."""
        if conversations and isinstance(conversations[0], dict):
            conversations = [conversations]  # pyright: ignore[reportAssignmentType]
        tokens = [self.tokenizer.encode_chat(messages).tolist() for messages in conversations]  # pyright: ignore[reportArgumentType]
        return self.generate(tokens, sampling, stop=stop, priority=priority)

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, stop: Sequence[str] = ()
    ) -> Generator[str]:
        """Yield the text of one completion as it comes; closing the iterator ends the request.

        Raises:
            ValueError: the prompt is refused.
        """
        request_id = self._submit(self._encode(prompt), sampling or self.default_sampling)
        answer = _Answer(TextStream(self.tokenizer, stop=stop))
        try:
            while answer.last is None:
                for delta in self._step():
                    if delta.request_id == request_id and (text := answer.take(delta)):
                        yield text
            if answer.last.refusal is not None:
                raise ValueError(answer.last.refusal.message)
        finally:
            if answer.last is None or answer.last.finish is None:
                self._inbox.put(Abort(request_id=request_id))
            self._drain()

    def close(self) -> None:
        """Give back threads and memory."""
        self._engine.close()

    def __enter__(self) -> LLM:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _complete(self, ids: list[str], stop: Sequence[str]) -> list[Completion]:
        answers = {request_id: _Answer(TextStream(self.tokenizer, stop=stop)) for request_id in ids}
        num_open = len(ids)
        with tqdm(total=num_open, unit="prompt", disable=None, delay=_PROGRESS_AFTER_S, leave=False) as bar:
            while num_open:
                for delta in self._step():
                    answer = answers.get(delta.request_id)
                    if answer is None or answer.last is not None:
                        continue
                    answer.take(delta)
                    if answer.last is not None:
                        num_open -= 1
                        bar.update()
                        if delta.finish is None:  # a stop string ended it
                            self._inbox.put(Abort(request_id=delta.request_id))
        self._drain()
        return [answers[request_id].completion() for request_id in ids]

    def _encode(self, prompt: Prompt) -> bytes:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else np.asarray(prompt, "<i4")
        return tokens.astype("<i4").tobytes()

    def _submit(self, tokens: bytes, sampling: SamplingParams, priority: int = 0) -> str:
        self._num_submitted += 1
        request_id = str(self._num_submitted)
        self._inbox.put(Submit(request_id=request_id, tokens=tokens, sampling=sampling, priority=priority))
        return request_id

    def _step(self) -> Sequence[Delta]:
        self._pending = self._engine.advance(self._pending)
        return self._outbox.take()

    def _drain(self) -> None:
        """Leave nothing in flight."""
        while True:
            self._step()
            if self._pending is None:
                return


class _Answer:
    """The answer to one prompt, as it comes."""

    __slots__ = ("_stream", "_texts", "_tokens", "last")

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self.last: Delta | None = None  # written by: take

    def take(self, delta: Delta) -> str:
        """Take in one step; return the new text."""
        self._tokens += delta.tokens
        text = self._stream.push(delta.tokens)
        if delta.finish is not None and self._stream.stopped_by is None:
            text += self._stream.finish()
        if delta.finish is not None or self._stream.stopped_by is not None:
            self.last = delta
        self._texts.append(text)
        return text

    def completion(self) -> Completion:
        """Return the whole answer."""
        assert self.last is not None
        stopped = self._stream.stopped_by is not None
        return Completion(
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish=FinishReason.STOP if stopped or self.last.finish is None else self.last.finish,
            num_prompt_tokens=self.last.num_prompt_tokens,
            num_cached_tokens=self.last.num_cached_tokens,
            refusal=self.last.refusal,
        )


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from several: a string and a sequence of ints are one."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, np.integer))):
        return [prompts]  # pyright: ignore[reportReturnType]
    return list(prompts)  # pyright: ignore[reportReturnType]


def _spread(name: str, values: T | Sequence[T], n: int) -> list[T]:
    """Return one value for each of n prompts."""
    spread: list[T] = list(values) if isinstance(values, Sequence) else [values] * n
    if len(spread) != n:
        raise ValueError(f"{name} must have one entry for each of {n} prompts, got {len(spread)}")
    return spread
