"""The JSON of native answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pagewood.engine.weight_spans import WeightSpan
from pagewood.server.protocols.common.timings import Chunk

TokenLogprob = tuple[float | None, int, str | None]
"""Log probability (null: of the first token of a prompt), id and, if asked for, text of a token."""


class EndReason(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Why an answer ended."""

    type: Literal["stop", "length", "cache_threshold", "abort"]
    length: int | None = None
    """Its tokens, if it reached its longest length."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Unix times in seconds, by the clock of the HTTP process."""

    received_s: float
    """When the head of the request had been read."""
    queued_s: float | msgspec.UnsetType = msgspec.UNSET
    """When the engine got it, if `explain` was requested."""
    admitted_s: float | msgspec.UnsetType = msgspec.UNSET
    """When the engine gave it memory and planned its first step, if `explain` was requested."""
    chunks: tuple[Chunk, ...] | msgspec.UnsetType = msgspec.UNSET
    """The steps that computed its prompt, at most the first 256; once it has ended, if `explain` was requested."""
    preempted_s: tuple[float, ...] | msgspec.UnsetType = msgspec.UNSET
    """When it was preempted, at most the first 256 times; likewise."""
    first_token_s: float
    """When the first token of this answer came."""
    finished_s: float | None
    """When the answer ended; null: it has not ended."""


class CacheExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why no more of a prompt was cached when its request was admitted."""

    cause: Literal[
        "complete", "page_rounding", "evicted", "window_evicted", "snapshot_evicted", "no_snapshot", "never_seen",
        "no_cache",
    ]  # fmt: skip
    reusable_tokens: int
    """Most tokens of the prompt that could come from the cache."""
    cached_tokens: int
    """Tokens that came from the cache."""
    first_difference: int
    """Position of the first token after them that differs from all cached texts."""
    possible_tokens: int
    """Tokens that would have come from the cache without the cause."""
    evicted_by: str | None
    """The policy that evicted the rest, or `clear`; null for other causes."""
    evicted_at_s: float | None
    """Time of the eviction, Unix time; null for other causes."""


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The data of an answer besides its text."""

    id: str
    finish_reason: EndReason | None
    """null: the answer goes on."""
    prompt_tokens: int
    completion_tokens: int
    """Tokens of the answer so far, with the one that ended it."""
    cached_tokens: int
    """Tokens of the prompt whose KV was cached."""
    weight_version: str
    """The version of the weights that have computed its last token; `default`: those that the engine began with."""
    weight_versions: tuple[WeightSpan, ...]
    """Which versions have computed which of its tokens: version, first token, and the one behind the last."""
    output_token_logprobs: list[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[TokenLogprob]] | msgspec.UnsetType = msgspec.UNSET
    input_token_logprobs: list[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[TokenLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: str | msgspec.UnsetType = msgspec.UNSET
    """Base64 of int32, little-endian, `[positions, layers, experts of a token]`; 0 in layers without experts."""
    routed_experts_start_len: int | msgspec.UnsetType = msgspec.UNSET
    """The first of these positions."""
    top_p_token_ids: str | msgspec.UnsetType = msgspec.UNSET
    """Base64 of int32, little-endian: what the filters have left for each token of the answer, one after the other."""
    top_p_token_offsets: str | msgspec.UnsetType = msgspec.UNSET
    """The same of where each begins among them, then their number."""
    hidden_states: list[Any] | msgspec.UnsetType = msgspec.UNSET
    """A list of the vectors of the positions of the prompt, then one vector for each further position."""
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    cache: CacheExplanation | msgspec.UnsetType = msgspec.UNSET
    """In a stream, only in the first event of an answer."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer; in a stream, its new part."""

    text: str
    output_ids: list[int]
    """Without the token that ended the answer, unless `no_stop_trim` asks for it."""
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET
    """Number of the answer, if there are several: answers to the first prompt come first."""


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a text or a conversation."""

    tokens: list[int]
    count: int
    max_model_len: int
    """Longest prompt plus output of the model, in tokens."""
    pieces: list[str] | msgspec.UnsetType = msgspec.UNSET
    """The text of each token; a part of a character is U+FFFD."""


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The text of tokens, under the names of SGLang and of vLLM."""

    text: str
    prompt: str


class Templated(msgspec.Struct, frozen=True, kw_only=True):
    """The text that the model's chat template makes of a conversation."""

    text: str
    count: int
    """Number of its tokens."""


class Aborted(msgspec.Struct, frozen=True):
    """How many HTTP requests were aborted."""

    aborted: int


class Flushed(msgspec.Struct, frozen=True):
    """The tokens that were dropped."""

    flushed_tokens: int
    """Tokens whose KV was dropped from the device."""


class Retained(msgspec.Struct, frozen=True):
    """The tokens that are kept or were dropped."""

    tokens: int
    """Tokens whose KV is kept because of the request, or was dropped from the device."""


class Paused(msgspec.Struct, frozen=True):
    """Whether the engine computes, or one request is computed."""

    paused: bool
    status: Literal["paused", "resumed"] | msgspec.UnsetType = msgspec.UNSET
    """To a request in the words of vLLM."""
    requests: int | msgspec.UnsetType = msgspec.UNSET
    """With `rid`: how many answers of that request are not complete."""


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The KV memory of the device."""

    num_pages: int
    page_size: int
    """Tokens."""
    page_bytes: int
    num_tokens: int
    num_bytes: int


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a trainer may send weights."""

    backend: Literal["gloo", "nccl"]


class VLLMConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What trainers read of the configuration, in the words of vLLM."""

    weight_transfer_config: TransferConfig | None
    """null: they cannot send any."""


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The versions, the configuration and the state of this server."""

    model: str
    started: int
    """Unix time, seconds."""
    versions: dict[str, str]
    status: str
    max_model_len: int
    vocab_size: int
    config: dict[str, Any]
    """Configuration of the engine, with every value that was chosen at its start; folders have their last name only."""
    kv_memory: MemoryPlan
    engine: dict[str, int]
    """Counters of the engine at its last sign of life."""
    vllm_config: VLLMConfig | msgspec.UnsetType = msgspec.UNSET
    """To a query with vLLM's `config_format`."""
