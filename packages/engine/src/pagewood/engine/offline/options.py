"""The options that the calls of `LLM` and `AsyncLLM` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypedDict, TypeVar

from pagewood.engine.api import SamplingParams

Priority = TypeVar("Priority")
"""The priority of one request, or of each."""
Each = int | Sequence[int]
"""One number for all prompts, or one for each."""
Sampling = SamplingParams | Sequence[SamplingParams] | None
"""Sampling parameters for all prompts, or for each; None: what the model's folder recommends."""


class CallOptions(TypedDict, Generic[Priority], total=False):
    """When a text ends, and how urgent it is. All may be left out."""

    stop: str | Sequence[str]
    """String or strings at which a text ends."""
    stop_regex: str | Sequence[str]
    """Regular expression or expressions of RE2 at whose first match a text ends. A match must be limited to 256
    characters; as many as the longest match may have are held back in a stream."""
    priority: Priority
    """0 by default. If not all requests can run at once, higher priorities go first."""
    keep_stop_token: bool
    """Whether `Completion.tokens` has the stop token that ends an answer, and its log probability, as trainers need
    it; its text is not shown."""
    adapter: str | Sequence[str | None] | None
    """The name of the adapter of all prompts, or of each; None, by default: the model alone."""
