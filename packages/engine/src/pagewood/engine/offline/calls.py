"""The calls of an engine's users: the requests of each call, and their answers so far."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import (
    Abort,
    Delta,
    FinishReason,
    Flush,
    Pause,
    Refusal,
    Resume,
    Rows,
    Submit,
    TokenLogprob,
)
from pagewood.engine.fan_out import ROW_STARTS, num_prompt_rows
from pagewood.engine.text import ReadStops, TextStream, Tokenizer
from pagewood.engine.weight_commands import NameVersion, Sleep, UpdateWeights, WakeUp
from pagewood.engine.weight_spans import WeightSpan, add_span, spans_shown

ENDS_OF_TEXT = (None, FinishReason.STOP, FinishReason.LENGTH)
"""States of a request in which a match at the end of its text still counts."""


class LLMClosedError(RuntimeError):
    """The LLM was closed before the call, or while it was waiting."""


class LLMBusyError(RuntimeError):
    """The LLM was called during another call: by a second thread, or from inside a step."""


class LLMAsleepError(RuntimeError):
    """The LLM was called while it sleeps: `wake_up` comes first, and an update if its weights were dropped."""


class EngineFailedError(RuntimeError):
    """The engine stopped with an error and cannot be used any more; the cause is attached."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Completion:
    """One answer to a prompt.

    `tokens` are the tokens that the model generated, without the end-of-sequence or stop token that ended them (but
    see `CallOptions.keep_stop_token`), and `text` is their text. After a stop string or expression they differ: `text`
    ends before the match, `tokens` ends with the token that completed it. `refusal` says why there is no answer if
    `finish` is REFUSED or ERROR.

    If the sampling parameters ask for them, `logprobs` has one entry for each of `tokens`, also for those of a stop
    string, and `prompt_logprobs` one for each prompt token from `SamplingParams.prompt_logprobs_start` on.

    `num_drafted_tokens` counts the draft tokens that were verified for this prompt, and `num_accepted_tokens` the
    accepted ones among them. Both are 0 if the engine does not speculate.

    `routed_experts` `[positions, layers, experts of a token] int32` and `hidden_states` `[positions, hidden size]
    float32` are of the positions from `SamplingParams.routed_experts_from` and `hidden_states_from` on, up to the one
    from which the last token was drawn. They are None if there are none. The numbers of layers without experts are 0.

    `weight_versions` says which weights have computed which of `tokens`; it is empty if they were never updated.
    """

    text: str
    tokens: tuple[int, ...]
    finish: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    refusal: Refusal | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    weight_versions: tuple[WeightSpan, ...] = ()
    routed_experts: NDArray[np.int32] | None = field(default=None, compare=False)
    hidden_states: NDArray[np.float32] | None = field(default=None, compare=False)

    @property
    def kept_tokens(self) -> tuple[NDArray[np.int32] | None, ...]:
        """For each of `tokens`, which tokens the filters had left, ascending, if `SamplingParams.kept_tokens` asks for
        them; None: it does not, or they would be more in all than it allows."""
        return tuple(None if one.kept is None else np.frombuffer(one.kept, "<i4") for one in self.logprobs)

    def __repr__(self) -> str:
        """Return the beginning of the text, the number of tokens, and how it ended."""
        refusal = "" if self.refusal is None else f", refusal={self.refusal.message!r}"
        drafts = ""
        if self.num_drafted_tokens:
            drafts = f", {self.num_accepted_tokens} of {self.num_drafted_tokens} draft tokens accepted"
        return (
            f"Completion({reprlib.repr(self.text)}, {len(self.tokens)} tokens, finish={self.finish.value}"
            f", {self.num_prompt_tokens} prompt tokens, {self.num_cached_tokens} of them cached{drafts}{refusal})"
        )


def by_prompt(completions: Sequence[Completion], submits: Sequence[Submit], num_each: int) -> list[list[Completion]]:
    """Return the `num_each` completions of each prompt, given all in the order of the prompts, with their requests.

    The engine reports what it has computed of a prompt with its first answer only; the others get it here. If that was
    refused, all are.
    """
    groups: list[list[Completion]] = []
    for i in range(0, len(completions), num_each):
        first, *others = completions[i : i + num_each]
        groups.append([first, *(_with_prompt(one, first, submits[i]) for one in others)])
    return groups


def _with_prompt(one: Completion, first: Completion, submit: Submit) -> Completion:
    """Return an answer with what the `first` one, to `submit`, has of their prompt."""
    if first.finish is FinishReason.REFUSED:
        return first
    experts, states = (num_prompt_rows(submit, start) for start in ROW_STARTS)
    return replace(
        one,
        prompt_logprobs=first.prompt_logprobs,
        routed_experts=_behind(first.routed_experts, one.routed_experts, experts),
        hidden_states=_behind(first.hidden_states, one.hidden_states, states),
    )


def _behind(first: NDArray[Any] | None, own: NDArray[Any] | None, num: int) -> NDArray[Any] | None:
    """Return rows behind the first `num` rows of another answer."""
    return own if first is None or own is None or not num else np.concatenate([first[:num], own])


@dataclass(frozen=True, slots=True)
class News:
    """The news of a call since the last call of `read`."""

    text: str
    """New text of all its requests, in order of arrival."""
    ended: tuple[str, ...]
    """Requests whose answer is now complete; after a stop string, the engine may still be computing them."""


class Call:
    """The requests of one call and their answers so far.

    Deltas are only queued when they arrive, and decoded by `read`: a caller pays for the decoding of
    its own answers, and its errors stay its own. Memory is bounded by the `max_tokens` of the requests.

    Args:
        submits: the requests, in the order of the prompts.
        tokenizer: decodes the answers.
        num_each: how many answers each prompt gets, which then are lists in the result; None: one, which is no list.
        stop: strings at which a text ends.
        stop_regex: regular expressions at whose matches a text ends.
        make_stops: makes a finder of the end of a text in place of both; None: no finder.
        eos_token_ids: stop tokens of the model, whose text is not shown where they are answered.
    """

    __slots__ = ("_answers", "_deltas", "notify", "num_each", "num_open", "submits")

    def __init__(
        self,
        submits: Sequence[Submit],
        *,
        tokenizer: Tokenizer,
        num_each: int | None = None,
        stop: Sequence[str] = (),
        stop_regex: Sequence[str] = (),
        make_stops: Callable[[], ReadStops] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.submits = submits
        self.num_each = num_each
        self.notify: Callable[[], None] = lambda: None
        """Called after each Delta that arrives, and when the call can expect no more."""
        # written by: async_llm, engine_thread
        self.num_open = len(submits)
        """Requests whose answers are not complete."""  # written by: calls
        self._answers = {
            submit.request_id: _Answer(
                TextStream(
                    tokenizer,
                    stop=stop,
                    stop_regex=stop_regex,
                    hidden=_hidden(submit, eos_token_ids),
                    stops=None if make_stops is None else make_stops(),
                )
            )
            for submit in submits
        }
        self._deltas: deque[Delta] = deque()  # written by: calls

    @property
    def request_ids(self) -> list[str]:
        """Ids of its requests, in order."""
        return list(self._answers)

    @property
    def has_news(self) -> bool:
        """Whether `read` has something to read, or nothing more will come."""
        return bool(self._deltas) or not self.num_open

    def receive(self, delta: Delta) -> None:
        """Queue the result of a step for one of the requests."""
        self._deltas.append(delta)
        self.notify()

    def read(self) -> News:
        """Decode the Deltas that have arrived since the last call."""
        texts: list[str] = []
        ended: list[str] = []
        while self._deltas:
            delta = self._deltas.popleft()
            answer = self._answers[delta.request_id]
            if answer.last is None:
                texts.append(answer.take(delta))
                if answer.last is not None:
                    ended.append(delta.request_id)
        self.num_open -= len(ended)
        return News("".join(texts), tuple(ended))

    def ends(self) -> list[Delta]:
        """Return the last answer to each request, in the order of the prompts; all must be complete."""
        return [answer.last for answer in self._answers.values() if answer.last is not None]

    def completions(self) -> list[Completion]:
        """Return the complete answers, in the order of the prompts."""
        return [answer.completion() for answer in self._answers.values()]

    def results(self) -> list[Completion] | list[list[Completion]]:
        """Return the complete answers as the caller of `generate` gets them."""
        return (
            self.completions() if self.num_each is None else by_prompt(self.completions(), self.submits, self.num_each)
        )


def _hidden(submit: Submit, eos_token_ids: Sequence[int]) -> frozenset[int]:
    """Return the tokens of an answer whose text is not shown: those that may end it, if they are answered."""
    if not submit.keep_stop_token:
        return frozenset()
    return frozenset(submit.sampling.stop_token_ids).union(() if submit.sampling.ignore_eos else eos_token_ids)


QuestionCommand: TypeAlias = UpdateWeights | Sleep | WakeUp | NameVersion | Pause | Resume | Flush
"""Commands that are no requests, and have one answer."""


class Question:
    """A command to the engine that has one answer and is no request.

    Args:
        command: its id is the command's.
    """

    __slots__ = ("answer", "command", "notify")

    def __init__(self, command: QuestionCommand) -> None:
        self.command = command
        self.notify: Callable[[], None] = lambda: None
        """Called when the answer arrives, and when none can be expected."""  # written by: async_llm, engine_thread
        self.answer: Delta | None = None  # written by: calls

    @property
    def request_ids(self) -> list[str]:
        """The id of the command."""
        return [self.command.request_id]

    def receive(self, delta: Delta) -> None:
        """Keep the answer."""
        self.answer = delta
        self.notify()


class Router:
    """Passes each Delta to the call that its request belongs to, no matter which call stepped the engine.

    Invariant: a request is registered here before it is submitted, until its last Delta arrives or its call is
    abandoned.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[str, Call | Question] = {}  # written by: calls

    @property
    def num_open(self) -> int:
        """Requests whose last Delta has not arrived."""
        return len(self._calls)

    def open(self, call: Call) -> None:
        """Expect answers to the requests of a call."""
        for submit in call.submits:
            self._calls[submit.request_id] = call

    def ask(self, question: Question) -> None:
        """Expect the answer to a question."""
        self._calls[question.command.request_id] = question

    def deliver(self, deltas: Iterable[Delta]) -> list[Abort]:
        """Pass Deltas to their calls; return aborts for requests that are still computed but belong to no call."""
        unknown: list[Abort] = []
        for delta in deltas:
            call = self._calls.get(delta.request_id)
            if delta.finish is not None:
                self._calls.pop(delta.request_id, None)
            if call is not None:
                call.receive(delta)
            elif delta.finish is None:
                unknown.append(Abort(request_id=delta.request_id))
        return unknown

    def leave(self, request_ids: Iterable[str]) -> list[Abort]:
        """Expect no more answers to requests; return aborts for those whose last Delta has not arrived."""
        return [Abort(request_id=one) for one in request_ids if self._calls.pop(one, None) is not None]

    def clear(self) -> list[Call | Question]:
        """Expect no more answers; return the calls that still waited for answers."""
        calls = list({id(call): call for call in self._calls.values()}.values())
        self._calls.clear()
        return calls


class _Answer:
    """One answer to a prompt so far."""

    __slots__ = (
        "_experts", "_logprobs", "_prompt_logprobs", "_spans", "_states", "_stream", "_texts", "_tokens", "last",
    )  # fmt: skip

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._spans: list[WeightSpan] = []
        self._logprobs: list[TokenLogprob] = []
        self._experts: list[Rows | None] = []
        self._states: list[Rows | None] = []
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()  # written by: take
        self.last: Delta | None = None
        """The Delta that completed it."""  # written by: take

    def take(self, delta: Delta) -> str:
        """Add the tokens of one step; return the new text."""
        # One by one, so that the answer ends with the token that completes a stop string.
        text = ""
        num_known = len(self._tokens)
        for token in delta.tokens:
            self._tokens.append(token)
            text += self._stream.push((token,))
            if self._stream.stopped_by is not None:
                break
        self._logprobs += delta.logprobs[: len(self._tokens) - num_known]
        add_span(self._spans, delta.weights, len(self._tokens) - num_known)
        self._experts.append(delta.experts)
        self._states.append(delta.states)
        if delta.prompt_logprobs:
            self._prompt_logprobs = delta.prompt_logprobs
        if delta.finish is not None and self._stream.stopped_by is None:
            text += self._stream.finish()
        if delta.finish is not None or self._stream.stopped_by is not None:
            self.last = delta
        self._texts.append(text)
        return text

    def completion(self) -> Completion:
        """Return the complete answer."""
        assert self.last is not None
        stopped = self._stream.stopped_by is not None and self.last.finish in ENDS_OF_TEXT
        num_behind = self.last.num_output_tokens - len(self._tokens) if stopped else 0
        return Completion(
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish=FinishReason.STOP if stopped or self.last.finish is None else self.last.finish,
            num_prompt_tokens=self.last.num_prompt_tokens,
            num_cached_tokens=self.last.num_cached_tokens,
            num_drafted_tokens=self.last.num_drafted_tokens,
            num_accepted_tokens=self.last.num_accepted_tokens,
            refusal=self.last.refusal,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            weight_versions=spans_shown(self._spans),
            routed_experts=_array(self._experts, num_behind, "<i4"),
            hidden_states=_array(self._states, num_behind, "<f4"),
        )


def _array(parts: Sequence[Rows | None], num_behind: int, dtype: str) -> NDArray[Any] | None:
    """Return the rows of an answer, whose last `num_behind` positions are behind its end; None: there are none."""
    joined = Rows.joined(parts)
    rows = None if joined is None else joined.without_last(num_behind)
    return None if rows is None else np.frombuffer(rows.data, dtype).reshape(rows.shape)
