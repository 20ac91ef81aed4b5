"""What the engine answers: deltas, refusals, and explanations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import msgspec


class FinishReason(Enum):
    """Why a request ended; the values are those of OpenAI's API where it has them."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REFUSED = "refused"
    ERROR = "error"
    CACHE_THRESHOLD = "cache_threshold"
    """Less of its prompt was cached than `RequestOptions.cache_hit_threshold` asks for, so nothing was computed."""


class TokenLogprob(NamedTuple):
    """How probable one token was, and which tokens were most probable in its place."""

    token: int
    logprob: float
    """Natural logarithm of its probability; minus infinity if it had none."""
    rank: int
    """1 for the most probable token; equally probable ones share the smaller rank."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with their log probabilities, best first, of equal ones the smaller id first."""
    kept: bytes | None = None
    """The tokens that the filters had left when it was drawn, int32, little-endian, ascending; see
    `SamplingParams.kept_tokens`. None: they are not reported."""


class Rows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Values of consecutive positions of a request, as bytes, so that a reader needs no numpy. There is at least one.

    Source: routing replay of trainers, as in SGLang and vLLM.
    """

    shape: tuple[int, ...]
    """The number of positions, then the shape of the values of one."""
    data: bytes
    """In the order of the positions, little-endian: int32 for experts, float32 for hidden states."""

    def without_last(self, num: int) -> Rows | None:
        """Return the rows of all but the last `num` positions; None: of no position."""
        left = self.shape[0] - num
        if left <= 0:
            return None
        return Rows((left, *self.shape[1:]), self.data[: len(self.data) // self.shape[0] * left])

    @staticmethod
    def joined(parts: Sequence[Rows | None]) -> Rows | None:
        """Return the rows of consecutive parts as one; None: of no position."""
        rows = [part for part in parts if part is not None]
        if len(rows) < 2:
            return rows[0] if rows else None
        num = sum(part.shape[0] for part in rows)
        return Rows((num, *rows[0].shape[1:]), b"".join(part.data for part in rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """The lengths of a request that does not fit the longest sequence of the engine."""

    num_prompt: int
    """Tokens of the prompt."""
    max_length: int
    """Longest prompt plus output, in tokens."""
    max_tokens: int | None = None
    """Most output tokens that the request asks for; None: it asks for no number."""
    is_counted: bool = True
    """False: the prompt has at least `num_prompt` tokens; it was not encoded as a whole."""

    def refusal(self) -> Refusal:
        """Return the refusal of the request."""
        at_least = "" if self.is_counted else "at least "
        wanted = "" if self.max_tokens is None else f" and max_tokens asks for {self.max_tokens} more"
        return Refusal(
            message=(
                f"This model's maximum context length is {self.max_length} tokens, "
                f"but the prompt has {at_least}{self.num_prompt} tokens{wanted}"
            ),
            param="prompt" if self.max_tokens is None else "max_tokens",
            code="context_length_exceeded",
            overflow=self,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is refused: a text for people, the name of the wrong parameter, a code for programs."""

    message: str
    param: str | None = None
    code: str | None = None
    overflow: Overflow | None = None
    """With the code `context_length_exceeded`: the lengths, for protocols with words of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """Why the cached prefix of a prompt was not longer when its request was admitted.

    It depends on the request's own namespace only, so it reveals nothing about others.
    """

    cause: Literal[
        "complete", "page_rounding", "evicted", "window_evicted", "snapshot_evicted", "no_snapshot", "never_seen",
        "no_cache",
    ]  # fmt: skip
    """complete: all that can be reused was cached; page_rounding: the cached text goes on within the next page, and
    only whole pages are cached; evicted: more was cached before; window_evicted: more is cached, but in layers with a
    window, the memory of the pages before its end was used for something else; snapshot_evicted and no_snapshot: more
    is cached, but not the state of recurrent layers at its end; never_seen: no longer prefix is cached,
    or remembered; no_cache: the engine keeps no prefixes."""
    num_reusable_tokens: int
    """Most tokens of the prompt that could come from a cache: all but the last one, whose logits are needed, and fewer
    if log probabilities or states of the prompt are asked for."""
    num_tokens: int
    """Length of the cached prefix, whole pages."""
    first_difference: int
    """Position of the first token after it that differs from everything cached there."""
    num_possible_tokens: int
    """Its length without the cause: with a page size of 1, or if nothing had been evicted."""
    evicted_by: str | None = None
    """What evicted it: the name of the policy, "clear" or "release"; None for other causes."""
    evicted_s: float | None = None
    """When that was, on the engine's clock; None for other causes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What happened to a request before its first token. Times are seconds on the engine's clock, `time.monotonic`."""

    prefix: CachedPrefix
    arrived_s: float
    """When the engine took it from its inbox."""
    admitted_s: float
    """When it was first given memory, and its first step was planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """When things happened to a request. Times are seconds on the engine's clock, `time.monotonic`."""

    arrived_s: float
    """When the engine took it from its inbox."""
    queued_s: float | None
    """When it was put into the queue, which is later if its grammar had to be compiled; None: it was never queued."""
    admitted_s: float | None
    """When it was first given memory, and its first step was planned; None: it was never admitted."""
    chunks: tuple[tuple[float, int], ...] = ()
    """When a step was planned that computes a part of its prompt, and the tokens of that part: at most the first 256.
    After a preemption, what is not cached is computed again."""
    num_preempted: int = 0
    preempted_s: tuple[float, ...] = ()
    """When it was preempted, at most the first 256 times."""
    first_token_s: float | None
    """When its first token was sent; None: no token was sent."""
    finished_s: float
    """When its last answer was made."""


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of one step for one request. A msgspec struct, because there may be one for every token.

    The last Delta of a request has a `finish`; every request gets exactly one such Delta. The first one has `first`
    set, and only it has a `carry`. The token that stopped a request (end of sequence or a stop token) is not in
    `tokens`, but `num_output_tokens` counts it.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    refusal: Refusal | None = None
    first: bool = False
    carry: bytes = b""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_drafted_tokens: int = 0
    """Draft tokens that were verified for the request so far."""
    num_accepted_tokens: int = 0
    """Draft tokens that were accepted so far; one that follows the end of the request may be among them."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `tokens`, if they were asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each prompt token that they were asked for, in the `Delta` with the first output tokens."""
    vector: bytes = b""
    """float32, little-endian: what `Submit.pooling` has asked for, in the last `Delta`; it finishes with STOP."""
    explanation: Explanation | None = None
    """In the first `Delta`, if `Submit.explain` asks for it and the request was admitted."""
    timings: RequestTimings | None = None
    """In the last `Delta`, if `Submit.explain` asks for it and the request was not refused at once."""
    weights: str = ""
    """The version of the weights that have computed `tokens`; empty: those that the engine began with."""
    experts: Rows | None = None
    """`[positions, layers, experts of a token] int32`, what routers have chosen at the positions computed since the
    last `Delta` that `SamplingParams.routed_experts_from` asks for. With all tokens so far, all are known but that of
    the last drawn one. None: nothing new."""
    states: Rows | None = None
    """`[positions, hidden size] float32`, the same for `SamplingParams.hidden_states_from`."""
