"""What an endpoint has to say about how its answers look; the two ways to send them know nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pagewood.server import wire


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where the tokens of the prompts came from."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """What a request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one prompt, from its answers."""

    num_prompt_tokens: int = 0  # written by: add
    num_cached_tokens: int = 0  # written by: add
    num_output_tokens: int = 0  # written by: add

    def add(self, answer: wire.Answer) -> None:
        """Note the counts of the latest answer; they only grow."""
        self.num_prompt_tokens = max(self.num_prompt_tokens, answer.num_prompt_tokens)
        self.num_cached_tokens = max(self.num_cached_tokens, answer.num_cached_tokens)
        self.num_output_tokens = max(self.num_output_tokens, answer.num_output_tokens)


def usage(tallies: Sequence[Tally]) -> Usage:
    """Return what all prompts of a request cost together."""
    num_prompt = sum(tally.num_prompt_tokens for tally in tallies)
    num_output = sum(tally.num_output_tokens for tally in tallies)
    cached = PromptTokensDetails(sum(tally.num_cached_tokens for tally in tallies))
    return Usage(num_prompt, num_output, num_prompt + num_output, cached)


class Format(Protocol):
    """How the answers of one HTTP request look; every method returns the JSON of one object."""

    def begin(self, index: int) -> bytes | None:
        """Return what a stream says before the text of prompt `index`, if anything."""
        ...

    def text(self, index: int, text: str) -> bytes:
        """Return the chunk with the next text of prompt `index`."""
        ...

    def end(self, index: int, reason: str) -> bytes:
        """Return the chunk that ends prompt `index`."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk that ends the stream."""
        ...

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: Usage) -> bytes:
        """Return the one answer to all prompts."""
        ...
