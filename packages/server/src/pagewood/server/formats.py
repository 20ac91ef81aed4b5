"""The JSON of answers: each endpoint has a format, and the code that sends answers depends only on its Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Counts of one prompt, taken from its answers."""

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


def usage(tallies: Sequence[Tally], *, is_speculating: bool) -> Usage:
    """Return the tokens of all prompts of a request together, with draft tokens if the engine speculates."""
    num_prompt = sum(tally.num_prompt_tokens for tally in tallies)
    num_output = sum(tally.num_output_tokens for tally in tallies)
    cached = PromptTokensDetails(sum(tally.num_cached_tokens for tally in tallies))
    if not is_speculating:
        return Usage(num_prompt, num_output, num_prompt + num_output, cached)
    num_drafted = sum(tally.num_drafted_tokens for tally in tallies)
    num_accepted = sum(tally.num_accepted_tokens for tally in tallies)
    drafts = CompletionTokensDetails(num_accepted, num_drafted - num_accepted)
    return Usage(num_prompt, num_output, num_prompt + num_output, cached, drafts)


class Format(Protocol):
    """The answers of one HTTP request; every method returns the JSON of one object."""

    def begin(self, index: int, usage: ChunkUsage) -> bytes | None:
        """Return the chunk that comes before the text of prompt `index`, or None if there is none."""
        ...

    def text(self, index: int, text: str, usage: ChunkUsage) -> bytes:
        """Return the chunk with the next text of prompt `index`."""
        ...

    def end(self, index: int, reason: str, usage: ChunkUsage) -> bytes:
        """Return the chunk that ends prompt `index`."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices that ends the stream."""
        ...

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: Usage) -> bytes:
        """Return the complete answer to all prompts."""
        ...
