"""Beam search as a search: it says which sequences to continue, and gets what is most probable after each.

Standard library only. The engine knows nothing of it: a step of a search is one request of one token for each sequence,
with log probabilities. The prefix cache makes the text that sequences share cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pagewood.engine.api import MAX_LOGPROBS, FinishReason, Refusal, SamplingParams

Alternatives = Sequence[tuple[int, float]]
"""Tokens that may follow a sequence, with their log probabilities, the most probable first."""

_MAX_LENGTH_PENALTY = 10.0
"""Keeps powers of lengths within the range of a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How a search goes, and when it ends. The results are those of `generate(num_beams=...)` of `transformers`.

    The score of a sequence is the sum of the log probabilities of its tokens, divided by their number to the power of
    `length_penalty`. The token that ended it counts in both. The log probabilities are those of the model's own
    distribution: nothing is drawn, so there is no temperature and no filter.

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
        wanted = "" if self.max_tokens is None else f" and max_tokens asks for {self.max_tokens} more"
        return Refusal(
            message=(
                f"This model's maximum context length is {max_length} tokens, "
                f"but the prompt has {num_prompt} tokens{wanted}"
            ),
            param="prompt" if self.max_tokens is None else "max_tokens",
            code="context_length_exceeded",
        )

    def step_sampling(self, stop_ids: frozenset[int]) -> SamplingParams:
        """Return the parameters of a request that asks what may follow one sequence.

        Its own token is not used. Nothing ends it early, so that its log probabilities are always reported.
        """
        # `beam_width` alternatives that end nothing are enough: no more can be continued.
        num_alternatives = self.beam_width + len(stop_ids)
        return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=num_alternatives)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """A sequence that has ended."""

    tokens: tuple[int, ...]
    """Without the stop token that ended it."""
    finish: FinishReason
    """STOP or LENGTH."""
    cumulative_logprob: float
    """Sum of the log probabilities of its tokens and of its stop token."""
    score: float
    """`cumulative_logprob` divided by the length to the power of `length_penalty`; by it, sequences are ranked."""

    @property
    def num_output_tokens(self) -> int:
        """Number of its tokens, with the stop token."""
        return len(self.tokens) + (self.finish is FinishReason.STOP)


class BeamSearch:
    """The search after one prompt.

    Invariant: open sequences are distinct, of the same length, at most `beam_width`, the most probable first; ended
    ones are at most `beam_width`, the best first.

    Args:
        params: how to search.
        stop_ids: tokens that end a sequence.
        max_tokens: longest sequence.
    """

    __slots__ = ("_ended", "_is_done", "_max_tokens", "_open", "_params", "_stop_ids")

    def __init__(self, params: BeamSearchParams, *, stop_ids: frozenset[int], max_tokens: int) -> None:
        self._params = params
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._open: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        """Sequences to continue, with the sums of their log probabilities."""  # written by: take
        self._ended: list[Beam] = []  # written by: take
        self._is_done = False  # written by: take

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """The sequences of output tokens to ask about in the next step; none once the search is over."""
        return [] if self._is_done else [tokens for tokens, _ in self._open]

    @property
    def best(self) -> tuple[Beam, ...]:
        """The sequences that have ended so far, the best first."""
        return tuple(self._ended)

    def take(self, alternatives: Sequence[Alternatives]) -> None:
        """Do one step.

        Args:
            alternatives: for each of `sequences`, the `step_sampling(...).logprobs` most probable tokens, or all.
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
            if token in self._stop_ids or length == self._max_tokens:
                # One that ends counts only if it is among the best of all, as in `transformers`.
                if place < width:
                    self._ended.append(self._beam(tokens, token, total))
            elif len(self._open) < width:
                self._open.append(((*tokens, token), total))
        self._ended.sort(key=lambda beam: -beam.score)
        del self._ended[width:]
        self._is_done = not self._open or (len(self._ended) == width and not self._can_improve(length))

    def _beam(self, tokens: tuple[int, ...], token: int, total: float) -> Beam:
        is_stop = token in self._stop_ids
        return Beam(
            tokens=tokens if is_stop else (*tokens, token),
            finish=FinishReason.STOP if is_stop else FinishReason.LENGTH,
            cumulative_logprob=total,
            score=self._score(total, len(tokens) + 1),
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
