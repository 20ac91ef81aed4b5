"""Beam search without an engine: it chooses sequences to continue, and gets the most probable tokens after each.

Standard library only. The engine knows nothing of it: a step of a search is one request of one token for each sequence,
with log probabilities. The prefix cache makes the text that sequences share cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pagewood.engine.api import MAX_LOGPROBS, FinishReason, Grammar, LogitsProcessor, Overflow, Refusal, SamplingParams

Alternatives = Sequence[tuple[int, float]]
"""Tokens that may follow a sequence, with their log probabilities, the most probable first."""

_COMPLETE = -1
"""In place of a stop token: the grammar of the sequence is complete, so only the end can follow."""

NO_SEQUENCE = Refusal(
    message="the biases, the bad words and the grammar of this search leave no sequence", code="all_tokens_excluded"
)
"""Why a search that has begun has no result."""

_MAX_LENGTH_PENALTY = 10.0
"""Keeps powers of lengths within the range of a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """The parameters of a search. The results are those of `generate(num_beams=...)` of `transformers`.

    The score of a sequence is the sum of the log probabilities of its tokens, divided by their number to the power of
    `length_penalty`. The token that ended it counts in both; where a grammar is complete, its end counts as such a
    token, with a probability of 1. Nothing is drawn, so there is no temperature and no filter. The log probabilities
    are those of the model's own distribution; with penalties, biases, bad words, `min_tokens`, a grammar or processors,
    which are those of `SamplingParams` and follow the text of each sequence by itself, they are those of the
    distribution after these, as with `renormalize_logits` of `transformers`.

    Raises:
        ValueError: a field is out of its range.
    """

    beam_width: int
    """Sequences that are continued in each step, and sequences in the result. Together with the number of stop tokens
    at most `MAX_LOGPROBS`, because that many alternatives are needed for each sequence."""
    max_tokens: int | None = 128
    """Most output tokens; None: as many as the engine's `max_length` leaves."""
    length_penalty: float = 1.0
    """In [-10, 10]. Scores are negative, so above 0 it favours long sequences, below 0 short ones."""
    early_stopping: bool | Literal["never"] = False
    """When a search ends before `max_tokens`. True: as soon as `beam_width` sequences have ended. False: when the best
    open sequence would not be better than the worst of these if it ended now. "never": when it cannot become better any
    more; a later end is then estimated with `max_tokens` if `length_penalty` is above 0."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Strings that end a sequence when its text holds one."""
    stop_regex: tuple[str, ...] = ()
    """Expressions that end a sequence when its text holds a match."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    """The grammar of each sequence; None: no restriction. A sequence without a token that may follow is dropped."""
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 1 <= self.beam_width <= MAX_LOGPROBS:
            raise ValueError(f"beam_width must be in [1, {MAX_LOGPROBS}], got {self.beam_width}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not -_MAX_LENGTH_PENALTY <= self.length_penalty <= _MAX_LENGTH_PENALTY:
            raise ValueError(
                f"length_penalty must be in [-{_MAX_LENGTH_PENALTY:g}, {_MAX_LENGTH_PENALTY:g}], "
                f"got {self.length_penalty}"
            )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(f"early_stopping must be True, False or 'never', got {self.early_stopping!r}")
        if not 0 <= self.min_tokens < 2**31 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            limit = "2**31" if self.max_tokens is None else f"max_tokens ({self.max_tokens})"
            raise ValueError(f"min_tokens must be >= 0 and at most {limit}, got {self.min_tokens}")
        self.step_sampling(frozenset())

    def stop_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end a sequence, given those that end a text of the model.

        Raises:
            ValueError: there are too many for the width of the beam.
        """
        found = frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_token_ids)
        if self.beam_width + len(found) > MAX_LOGPROBS:
            raise ValueError(
                f"beam_width must be at most {MAX_LOGPROBS - len(found)}, which is {MAX_LOGPROBS} less the number of "
                f"stop tokens, got {self.beam_width}"
            )
        return found

    def longest(self, *, num_prompt: int, max_length: int) -> int | Refusal:
        """Return the most output tokens after a prompt; or the engine's refusal of a prompt that is too long for that.

        Args:
            num_prompt: tokens of the prompt.
            max_length: longest prompt plus output of the engine.
        """
        num_left = max_length - num_prompt
        if num_left >= (self.max_tokens or 1):
            return num_left if self.max_tokens is None else self.max_tokens
        return Overflow(num_prompt=num_prompt, max_length=max_length, max_tokens=self.max_tokens).refusal()

    @property
    def changes_logits(self) -> bool:
        """Whether the log probabilities are not those of the model's own distribution."""
        return self.min_tokens > 0 or self._changes().changes_logits

    def step_sampling(
        self, stop_ids: frozenset[int], *, num_output: int = 0, has_bad_words: bool = False
    ) -> SamplingParams:
        """Return the parameters of a request for the tokens that may follow one sequence.

        Its own token is not used. If `changes_logits`, the request is a search (`RequestOptions.is_search`), and the
        sequence is its `Submit.output`; otherwise the sequence is the end of its prompt.

        Args:
            stop_ids: tokens that end a sequence.
            num_output: tokens of the sequence, if it is the output of the request.
            has_bad_words: whether the request gets further bad words, whose tokens are not known here; the logits then
                change in any case.
        """
        # `beam_width` alternatives that end nothing are enough: no more can be continued.
        num_alternatives = self.beam_width + len(stop_ids)
        if self.stop or self.stop_regex:  # any of them may end a sequence
            num_alternatives = min(MAX_LOGPROBS, num_alternatives + self.beam_width)
        if not (self.changes_logits or has_bad_words):
            return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=num_alternatives)
        return replace(
            self._changes(),
            seed=0,
            ignore_eos=True,
            stop_token_ids=tuple(sorted(stop_ids)),
            max_tokens=num_output + 1,
            min_tokens=min(self.min_tokens, num_output + 1),
            logprobs=num_alternatives,
            logprobs_kind="processed",
        )

    def _changes(self) -> SamplingParams:
        """Return the parameters of one token with the changes of its logits, but for `min_tokens`."""
        return SamplingParams(
            max_tokens=1,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=self.logit_bias,
            bad_words=self.bad_words,
            grammar=self.grammar,
            logits_processors=self.logits_processors,
        )


def alternatives_of(top: Alternatives | None, finish: FinishReason) -> Alternatives:
    """Return the tokens that may follow a sequence, for `BeamSearch.take`, from the answer to its request.

    Args:
        top: the tokens reported with the token of the answer; None: it has no token.
        finish: how the answer ended, if it has no token: see `RequestOptions.is_search`.
    """
    if top is None:
        return ((_COMPLETE, 0.0),) if finish is FinishReason.STOP else ()
    return [(token, logprob) for token, logprob in top if logprob > -math.inf]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """A sequence that has ended."""

    tokens: tuple[int, ...]
    """Without the stop token that ended it, with the token that completed a stop string."""
    num_output_tokens: int
    """Number of its tokens, with the stop token."""
    finish: FinishReason
    """STOP or LENGTH."""
    cumulative_logprob: float
    """Sum of the log probabilities of its tokens and of its stop token."""
    score: float
    """`cumulative_logprob` divided by the length to the power of `length_penalty`; by it, sequences are ranked."""


class BeamSearch:
    """The search after one prompt.

    Invariant: open sequences are distinct, of the same length, at most `beam_width`, the most probable first; ended
    ones are at most `beam_width`, the best first.

    Args:
        params: of the search.
        stop_ids: tokens that end a sequence.
        max_tokens: longest sequence.
        stops: returns whether the text of a sequence has ended; None: only tokens end it.
    """

    __slots__ = ("_ended", "_is_done", "_max_tokens", "_open", "_params", "_stop_ids", "_stops")

    def __init__(
        self,
        params: BeamSearchParams,
        *,
        stop_ids: frozenset[int],
        max_tokens: int,
        stops: Callable[[tuple[int, ...]], bool] | None = None,
    ) -> None:
        self._params = params
        self._stops = stops
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._open: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        """Sequences to continue, with the sums of their log probabilities."""  # written by: take
        self._ended: list[Beam] = []  # written by: take
        self._is_done = False  # written by: take

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """The sequences of output tokens to continue in the next step; empty once the search is over."""
        return [] if self._is_done else [tokens for tokens, _ in self._open]

    @property
    def best(self) -> tuple[Beam, ...]:
        """The sequences that have ended so far, the best first."""
        return tuple(self._ended)

    def take(self, alternatives: Sequence[Alternatives]) -> None:
        """Do one step.

        Args:
            alternatives: for each of `sequences`, the `step_sampling(...).logprobs` most probable tokens, or all that
                may follow; see `alternatives_of`.
        """
        width = self._params.beam_width
        candidates = [
            (total + logprob, tokens, token)
            for (tokens, total), follow in zip(self._open, alternatives, strict=True)
            for token, logprob in follow
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        length = len(self._open[0][0]) + 1
        self._open = []
        for place, (total, tokens, token) in enumerate(candidates):
            if place >= width and len(self._open) == width:
                break
            is_stop = token in self._stop_ids or token == _COMPLETE
            is_over = is_stop or (self._stops is not None and self._stops((*tokens, token)))
            if is_over or length == self._max_tokens:
                # One that ends counts only if it is among the best of all, as in `transformers`.
                if place < width:
                    finish = FinishReason.STOP if is_over else FinishReason.LENGTH
                    self._ended.append(self._beam(tokens if is_stop else (*tokens, token), finish, total, length))
            elif len(self._open) < width:
                self._open.append(((*tokens, token), total))
        self._ended.sort(key=lambda beam: -beam.score)
        del self._ended[width:]
        self._is_done = not self._open or (len(self._ended) == width and not self._can_improve(length))

    def _beam(self, tokens: tuple[int, ...], finish: FinishReason, total: float, length: int) -> Beam:
        return Beam(
            tokens=tokens,
            num_output_tokens=length,
            finish=finish,
            cumulative_logprob=total,
            score=self._score(total, length),
        )

    def _can_improve(self, length: int) -> bool:
        """Return whether open sequences of that length may still replace one of `beam_width` ended ones."""
        if self._params.early_stopping is True:
            return False
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length = self._max_tokens
        return self._score(self._open[0][1], length) > self._ended[-1].score

    def _score(self, total: float, length: int) -> float:
        return total / length**self._params.length_penalty
