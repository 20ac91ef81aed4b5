"""The JSON of answers: each endpoint has a format, and the code that sends answers depends only on its Protocol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from pagewood.server import wire


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Prompt tokens by their origin."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Draft tokens that were verified. Rejected ones are not in `completion_tokens`."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """UNSET: the engine does not speculate."""


ChunkUsage = Usage | msgspec.UnsetType | None
"""The `usage` of a chunk: counts, no such field (UNSET), or null."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one answer, taken from its messages."""

    num_prompt_tokens: int = 0  # written by: add
    num_cached_tokens: int = 0  # written by: add
    num_output_tokens: int = 0  # written by: add
    num_drafted_tokens: int = 0  # written by: add
    num_accepted_tokens: int = 0  # written by: add

    def add(self, answer: wire.Answer) -> None:
        """Note the counts of the latest answer; they only grow."""
        self.num_prompt_tokens = max(self.num_prompt_tokens, answer.num_prompt_tokens)
        self.num_cached_tokens = max(self.num_cached_tokens, answer.num_cached_tokens)
        self.num_output_tokens = max(self.num_output_tokens, answer.num_output_tokens)
        if answer.num_drafted_tokens:
            self.num_drafted_tokens = answer.num_drafted_tokens
            self.num_accepted_tokens = answer.num_accepted_tokens


def usage(tallies: Sequence[Tally], *, num_answers: int = 1, is_speculating: bool) -> Usage:
    """Return the tokens of a request, with draft tokens if the engine speculates.

    Each prompt counts once, however many answers it gets, and so do its cached tokens: those that the first of its
    requests found, before the others found what that one had computed.

    Args:
        tallies: of all answers, those to the first prompt first.
        num_answers: to each prompt.
        is_speculating: whether the usage has draft tokens.
    """
    known = [
        [tally for tally in tallies[i : i + num_answers] if tally.num_prompt_tokens]
        for i in range(0, len(tallies), num_answers)
    ]
    num_prompt = sum(answers[0].num_prompt_tokens for answers in known if answers)
    num_output = sum(tally.num_output_tokens for tally in tallies)
    cached = PromptTokensDetails(sum(min(one.num_cached_tokens for one in answers) for answers in known if answers))
    if not is_speculating:
        return Usage(num_prompt, num_output, num_prompt + num_output, cached)
    num_drafted = sum(tally.num_drafted_tokens for tally in tallies)
    num_accepted = sum(tally.num_accepted_tokens for tally in tallies)
    drafts = CompletionTokensDetails(num_accepted, num_drafted - num_accepted)
    return Usage(num_prompt, num_output, num_prompt + num_output, cached, drafts)


@dataclass(slots=True, kw_only=True)
class Choice:
    """A complete answer, put together from its messages."""

    text: str = ""  # written by: add
    finish: str = ""  # written by: add
    tokens: list[wire.TokenEntry] = field(default_factory=list[wire.TokenEntry])  # written by: add
    """Of the tokens of the answer, if their log probabilities are known."""
    prompt: tuple[wire.TokenEntry, ...] = ()  # written by: add
    """Of the tokens of the prompt, if their log probabilities are known."""
    _texts: list[str] = field(default_factory=list[str])  # written by: add

    def add(self, answer: wire.Answer) -> None:
        """Append a message."""
        self._texts.append(answer.text)
        if answer.finish is not None:
            self.finish = answer.finish.value
            self.text = "".join(self._texts)
        if answer.logprobs is not None:
            self.tokens += answer.logprobs.tokens
            self.prompt = self.prompt or answer.logprobs.prompt or ()

    @property
    def score(self) -> float:
        """Mean log probability of its tokens; minus infinity without tokens. The token that ended it does not count."""
        if not self.tokens:
            return -math.inf
        return sum(entry.chosen.logprob for entry in self.tokens) / len(self.tokens)


class Format(Protocol):
    """The answers of one HTTP request; every method returns the JSON of one object."""

    def begin(self, index: int, usage: ChunkUsage) -> bytes | None:
        """Return the chunk that comes before the text of choice `index`, or None if there is none."""
        ...

    def text(self, index: int, text: str, logprobs: wire.Logprobs | None, usage: ChunkUsage) -> bytes:
        """Return the chunk with the next text of choice `index`, and the log probabilities of its tokens."""
        ...

    def end(self, index: int, reason: str, usage: ChunkUsage) -> bytes:
        """Return the chunk that ends choice `index`."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices that ends the stream."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the complete answer, with all its choices in order."""
        ...
