"""The beam searches of one call: the requests of each step, for all prompts together, and the results."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from pagewood.engine.api import FinishReason, Refusal, Submit
from pagewood.engine.beam_search import NO_SEQUENCE, Beam, BeamSearch, BeamSearchParams, alternatives_of
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.offline.arguments import Arguments
from pagewood.engine.offline.calls import Completion
from pagewood.engine.text import TextStream, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BeamSequence:
    """One answer that a beam search has found. `tokens` do not hold the stop token that ended it."""

    text: str
    tokens: tuple[int, ...]
    """With the token that completed a stop string; `text` ends before the string."""
    finish: FinishReason
    cumulative_logprob: float
    """Sum of the log probabilities of its tokens and its stop token."""
    score: float
    """Answers are ranked by it; see `BeamSearchParams`."""

    def __repr__(self) -> str:
        """Return the beginning of the text, the number of tokens, how it ended, and the score."""
        return (
            f"BeamSequence({reprlib.repr(self.text)}, {len(self.tokens)} tokens, finish={self.finish.value}"
            f", score={self.score:.4f})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchResult:
    """The result of a beam search after one prompt.

    `sequences` are the answers, the best first: `beam_width`, unless the vocabulary is too small for that many.
    `refusal` says why there are none. `num_cached_tokens` counts the prompt tokens that were cached before the search.
    """

    sequences: tuple[BeamSequence, ...]
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    refusal: Refusal | None = None


class BeamSearches:
    """The searches after the prompts of one call.

    A caller runs the requests of `submits` and passes their completions to `take`, until there are no requests.

    Args:
        prompts: token ids of each, int32 little-endian.
        params: of all searches.
        priority: for all prompts, or one for each.
        arguments: makes the requests.
        info: of the engine.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a wrong value.
    """

    __slots__ = ("_arguments", "_first", "_params", "_searches", "_stop_ids", "_text")

    def __init__(
        self, prompts: Sequence[bytes], params: object, priority: object, *, arguments: Arguments, info: EngineInfo
    ) -> None:
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {reprlib.repr(params)}")
        stop_ids = params.stop_ids(info.eos_token_ids)
        self._arguments = arguments
        self._params = params
        self._stop_ids = stop_ids
        self._text = _Text(params, arguments.tokenizer)
        first = arguments.submits(prompts, params.step_sampling(stop_ids), priority)
        self._first: list[Submit] | None = [self._step(submit, b"") for submit in first]
        """The requests of the first step, until `submits` returns them."""  # written by: submits
        self._searches = [
            _Search(submit.tokens, submit.priority, params, stop_ids, info.max_length, self._text) for submit in first
        ]

    def submits(self) -> list[Submit]:
        """Return the requests of the next step; none if all searches are over."""
        if self._first is not None:
            first, self._first = self._first, None
            return [submit for submit, one in zip(first, self._searches, strict=True) if one.refusal is None]
        asked = [(one, tokens) for one in self._searches for tokens in one.sequences]
        ends = [np.array(tokens, "<i4").tobytes() for _, tokens in asked]
        prompts = [one.prompt for one, _ in asked]
        if not self._params.changes_logits:  # nothing depends on where the output begins
            prompts = [prompt + end for prompt, end in zip(prompts, ends, strict=True)]
        sampling = [self._params.step_sampling(self._stop_ids, num_output=len(tokens)) for _, tokens in asked]
        submits = self._arguments.submits(prompts, sampling, [one.priority for one, _ in asked])
        return [self._step(submit, end) for submit, end in zip(submits, ends, strict=True)]

    def take(self, completions: Sequence[Completion]) -> None:
        """Do a step of every search with the answers to `submits`, which are in the same order."""
        answers = iter(completions)
        for one in self._searches:
            one.take([next(answers) for _ in one.sequences])

    def results(self) -> list[BeamSearchResult]:
        """Return the results, in the order of the prompts."""
        return [one.result() for one in self._searches]

    def _step(self, submit: Submit, output: bytes) -> Submit:
        """Return the request of a step after a sequence."""
        return msgspec.structs.replace(submit, is_search=True, output=output) if self._params.changes_logits else submit


class _Text:
    """The text of sequences, up to a stop string or the match of a stop expression.

    Raises:
        ValueError: a stop string is empty, or a stop expression cannot be found in a text.
    """

    __slots__ = ("_params", "_tokenizer")

    def __init__(self, params: BeamSearchParams, tokenizer: Tokenizer) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._stream()

    @property
    def stops(self) -> Callable[[tuple[int, ...]], bool] | None:
        """Finds the end of a text; None: there are no stop strings or expressions."""
        return self._has_ended if self._params.stop or self._params.stop_regex else None

    def of(self, tokens: tuple[int, ...]) -> str:
        """Return the text of a sequence."""
        stream = self._stream()
        return stream.push(tokens) + stream.finish()

    def _has_ended(self, tokens: tuple[int, ...]) -> bool:
        stream = self._stream()
        stream.push(tokens)
        return stream.stopped_by is not None

    def _stream(self) -> TextStream:
        return TextStream(self._tokenizer, stop=self._params.stop, stop_regex=self._params.stop_regex)


class _Search:
    """The search after one prompt, as far as the engine accepts its requests."""

    __slots__ = ("_num_cached_tokens", "_search", "_text", "priority", "prompt", "refusal")

    def __init__(
        self,
        prompt: bytes,
        priority: int,
        params: BeamSearchParams,
        stop_ids: frozenset[int],
        max_length: int,
        text: _Text,
    ) -> None:
        longest = params.longest(num_prompt=len(prompt) // 4, max_length=max_length)
        self.prompt = prompt
        self.priority = priority
        self._text = text
        self.refusal: Refusal | None = longest if isinstance(longest, Refusal) else None  # written by: take
        self._search: BeamSearch | None = None
        """None: it cannot begin."""
        if not isinstance(longest, Refusal):
            self._search = BeamSearch(params, stop_ids=stop_ids, max_tokens=longest, stops=text.stops)
        self._num_cached_tokens: int | None = None  # written by: take

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """The sequences to continue in the next step."""
        return [] if self._search is None or self.refusal is not None else self._search.sequences

    def take(self, answers: Sequence[Completion]) -> None:
        """Do a step, if the search is not over."""
        if self._search is None or not answers:
            return
        if self._num_cached_tokens is None:
            self._num_cached_tokens = answers[0].num_cached_tokens
        self.refusal = next((answer.refusal for answer in answers if answer.refusal is not None), None)
        if self.refusal is None:
            tops = [answer.logprobs[0].top if answer.logprobs else None for answer in answers]
            finishes = [answer.finish for answer in answers]
            self._search.take([alternatives_of(*each) for each in zip(tops, finishes, strict=True)])
            if not self._search.sequences and not self._search.best:
                self.refusal = NO_SEQUENCE

    def result(self) -> BeamSearchResult:
        """Return the result."""
        found = () if self._search is None or self.refusal is not None else self._search.best
        return BeamSearchResult(
            sequences=tuple(self._sequence(beam) for beam in found),
            num_prompt_tokens=len(self.prompt) // 4,
            num_cached_tokens=self._num_cached_tokens or 0,
            refusal=self.refusal,
        )

    def _sequence(self, beam: Beam) -> BeamSequence:
        return BeamSequence(
            text=self._text.of(beam.tokens),
            tokens=beam.tokens,
            finish=beam.finish,
            cumulative_logprob=beam.cumulative_logprob,
            score=beam.score,
        )
