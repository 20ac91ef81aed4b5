"""The fields that chat and text completions have in common, and what they mean to the engine."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.engine.api import SamplingParams
from pagewood.server.errors import ApiError
from pagewood.server.validation import kind

INT32_MAX = 2**31 - 1
MAX_STOPS = 16

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Fields about the account and the accounting of a hosted service."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}
"""Fields that are not supported, with the values at which they ask for nothing."""


def _stops(value: Any) -> list[str]:
    if value is None or isinstance(value, str):
        value = [] if value is None else [value]
    stops = cast("list[Any]", value)
    if not isinstance(value, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"expected a string or an array of strings, but got {kind(value)} instead")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"expected at most {MAX_STOPS} stop strings, but got {len(stops)}")
    if not all(stops):
        raise ValueError("a stop string must not be empty")
    return stops


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(BaseModel):
    """What a request may say about how its tokens are chosen, when they end, and how they are sent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []

    # Beyond OpenAI's API; its clients send them with `extra_body`.
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=INT32_MAX)]] | None = None


def include_usage(fields: GenerationFields) -> bool:
    """Return whether the stream ends with a chunk that holds the usage.

    Raises:
        ApiError: there are options for a stream, and no stream.
    """
    if fields.stream_options is None:
        return False
    if not fields.stream:
        raise ApiError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
            code="invalid_value",
        )
    return bool(fields.stream_options.include_usage)


def sampling(
    fields: GenerationFields, defaults: SamplingParams, *, max_tokens: int | None, vocab_size: int
) -> SamplingParams:
    """Return how the engine chooses tokens; `max_tokens` None asks for as many as fit.

    Raises:
        ApiError: a stop token does not exist.
    """
    stop_token_ids = tuple(fields.stop_token_ids or ())
    check_tokens(stop_token_ids, param="stop_token_ids", vocab_size=vocab_size)
    top_p = defaults.top_p if fields.top_p is None else fields.top_p
    temperature = defaults.temperature if fields.temperature is None else fields.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if top_p else 0.0,  # no probability mass at all: only the likeliest token is left
        top_k=defaults.top_k if fields.top_k is None else fields.top_k,
        top_p=top_p or 1.0,
        min_p=defaults.min_p if fields.min_p is None else fields.min_p,
        seed=fields.seed,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
    )


def check_tokens(tokens: tuple[int, ...] | list[int], *, param: str, vocab_size: int) -> None:
    """Check that all ids are in the vocabulary.

    Raises:
        ApiError: one is not.
    """
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ApiError(
            f"Invalid value for '{param}': token ids must be in [0, {vocab_size}), but got {wrong} instead.",
            param=param,
            code="invalid_value",
        )
