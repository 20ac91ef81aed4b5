"""The common fields of chat completions and completions, and their meaning for the engine."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from pagewood.engine.api import (
    MAX_LOGIT_BIAS,
    MAX_LOGITS_PROCESSORS,
    MAX_LOGPROBS,
    MAX_PROCESSOR_NAME,
    Grammar,
    LogitsProcessor,
    SamplingParams,
)
from pagewood.server.http.errors import ApiError
from pagewood.server.http.field_limits import (
    MAX_STOP_EXPRESSION_LENGTH,
    MAX_STOP_EXPRESSIONS,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_WORD_LENGTH,
    MAX_WORDS,
    IdleSeconds,
    Salt,
    StopString,
)
from pagewood.server.http.validation import WHOLE, kind
from pagewood.server.protocols.common.sampling_fields import INT32_MAX, allowed, chosen
from pagewood.server.protocols.common.shared_kv import SharedKVFields
from pagewood.server.protocols.common.structured import StructuredFields

MAX_ANSWERS = 128
"""Most answers of one HTTP request, to all its prompts together."""

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
"""Fields about accounts and storage of a hosted service. They have no effect here, whatever their value."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # vLLM, SGLang and other servers: sampling
    "allowed_token_ids": (None,),
    "custom_logit_processor": (None,),
    "thinking_token_budget": (None,),
    # grammars
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    # text of prompt and answer
    "detokenize": (None, True),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
    "no_stop_trim": (None, False),
    "truncate_prompt_tokens": (None,),
    "return_hidden_states": (None, False),
    # ids, caches and adapters
    "request_id": (None,),
    "rid": (None,),
    "lora_path": (None,),
    "session_params": (None, {}),
    "vllm_xargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
}
"""Fields that this server does not support -> their neutral values, which have no effect and are accepted."""


def _strings(value: Any, most: int, name: str, *, longest: int) -> list[str]:
    if value is None or isinstance(value, str):
        value = [] if value is None else [value]
    strings = cast("list[Any]", value)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in strings):
        raise ValueError(f"expected a string or an array of strings, but got {kind(value)} instead")
    if len(strings) > most:
        raise ValueError(f"expected at most {most} {name}s, but got {len(strings)}")
    if not all(strings):
        raise ValueError(f"a {name} must not be empty")
    length = max(map(len, strings), default=0)
    if length > longest:
        raise ValueError(f"expected at most {longest} characters in a {name}, but got {length}")
    return strings


def _stops(value: Any) -> list[str]:
    return _strings(value, MAX_STOPS, "stop string", longest=MAX_STOP_LENGTH)


def _expressions(value: Any) -> list[str]:
    return _strings(value, MAX_STOP_EXPRESSIONS, "stop expression", longest=MAX_STOP_EXPRESSION_LENGTH)


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        raise ValueError("expected an array of strings, but got a string instead")
    return _strings(value, MAX_WORDS, "bad word", longest=MAX_WORD_LENGTH)


def _biases(value: Any) -> list[tuple[int, float]]:
    if value is None:
        return []
    if not isinstance(value, dict):
        raise ValueError(f"expected an object of token ids and numbers, but got {kind(value)} instead")
    biases = cast("dict[str, Any]", value)
    if len(biases) > MAX_LOGIT_BIAS:
        raise ValueError(f"expected at most {MAX_LOGIT_BIAS} tokens, but got {len(biases)}")
    found: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit()) or int(key[:11]) > INT32_MAX:
            raise ValueError(f"expected token ids as keys, but got {key[:20]!r}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"expected a number in [-100, 100] for token {int(key)}, but got {str(bias)[:20]}")
        found[int(key)] = float(bias)  # "5" and "05" are one token
    return list(found.items())


def _early_stopping(value: Any) -> Any:
    if not (value is None or isinstance(value, bool) or value == "never"):
        raise ValueError("expected true, false or 'never'")
    return value


def _processors(value: Any) -> list[LogitsProcessor]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"expected an array of names and objects, but got {kind(value)} instead")
    processors = cast("list[Any]", value)
    if len(processors) > MAX_LOGITS_PROCESSORS:
        raise ValueError(f"expected at most {MAX_LOGITS_PROCESSORS} logits processors, but got {len(processors)}")
    return [_processor(one) for one in processors]


def _processor(value: Any) -> LogitsProcessor:
    if isinstance(value, str):
        return LogitsProcessor(value)
    if not isinstance(value, dict):
        raise ValueError(f"expected a name or an object with a name and arguments, but got {kind(value)} instead")
    said = cast("dict[str, Any]", value)
    name, arguments = said.get("name"), said.get("arguments", {})
    if not isinstance(name, str):
        raise ValueError(f"expected a string as 'name' of a logits processor, but got {kind(name)} instead")
    if not isinstance(arguments, dict):
        raise ValueError(f"expected an object as 'arguments' of {name[:20]!r}, but got {kind(arguments)} instead")
    unknown = sorted(said.keys() - {"name", "arguments"})
    if unknown:
        raise ValueError(f"expected 'name' and 'arguments' only, but got {unknown[0][:20]!r}")
    try:
        return LogitsProcessor(name, json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))
    except RecursionError as error:
        raise ValueError(f"expected fewer levels in 'arguments' of {name[:20]!r}") from error


def false_as_null(value: Any) -> Any:
    """Return None for false: some clients switch log probabilities off with it where a number is expected."""
    return None if value is False else value


# The types that these validators accept, for the schemas of bodies.
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE]
NumTop = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None
_Stops = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None
_Expression = Annotated[str, Field(min_length=1, max_length=MAX_STOP_EXPRESSION_LENGTH)]
_Expressions = _Expression | Annotated[list[_Expression], Field(max_length=MAX_STOP_EXPRESSIONS)] | None
_Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_LENGTH)]
_Words = Annotated[list[_Word], Field(max_length=MAX_WORDS)] | None
_Biases = (
    Annotated[
        dict[str, float],
        WithJsonSchema(
            {
                "type": "object",
                "patternProperties": {"^[0-9]+$": {"type": "number", "minimum": -100, "maximum": 100}},
                "additionalProperties": False,
                "maxProperties": MAX_LOGIT_BIAS,
            }
        ),
    ]
    | None
)


class NamedProcessor(BaseModel):
    """A logits processor with arguments."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=MAX_PROCESSOR_NAME)]
    arguments: dict[str, Any] = Field(default_factory=dict[str, Any])


_Processors = (
    Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_PROCESSOR_NAME)] | NamedProcessor],
        Field(max_length=MAX_LOGITS_PROCESSORS),
    ]
    | None
)


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(StructuredFields):
    """Fields that choose tokens and end the answer."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops, _Stops)] = Field(default_factory=list[str])
    frequency_penalty: Annotated[float, allowed("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, allowed("presence_penalty")] | None = None
    logit_bias: Annotated[list[tuple[int, float]], BeforeValidator(_biases, _Biases)] = Field(
        default_factory=list[tuple[int, float]]
    )
    """From an object whose keys are token ids."""
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS), WHOLE] | None = None

    # Beyond OpenAI's API; OpenAI's clients send these with `extra_body`.
    top_k: Annotated[int, allowed("top_k", low=-1), WHOLE] | None = None
    """-1 and 0 both switch the filter off."""
    min_p: Annotated[float, allowed("min_p")] | None = None
    typical_p: Annotated[float, allowed("typical_p")] | None = None
    top_n_sigma: Annotated[float, allowed("top_n_sigma", low=-1)] | None = None
    """-1 and 0 both switch the filter off."""
    bad_words: Annotated[list[str], BeforeValidator(_words, _Words)] = Field(default_factory=list[str])
    stop_regex: Annotated[list[str], BeforeValidator(_expressions, _Expressions)] = Field(default_factory=list[str])
    logits_processors: Annotated[list[LogitsProcessor], BeforeValidator(_processors, _Processors)] = Field(
        default_factory=list[LogitsProcessor]
    )
    """From names, and objects with a name and arguments."""
    repetition_penalty: Annotated[float, allowed("repetition_penalty")] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    logprobs_kind: Literal["raw", "processed"] | None = None


class GenerationFields(SamplingFields, SharedKVFields):
    """The fields of `SamplingFields`, and fields for further results and the form of the answer."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Beyond OpenAI's API, too.
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), WHOLE] | None = None
    cache_salt: Salt | None = None
    """Requests share cached prefixes only with requests that have the same one."""
    return_timings: bool | None = None
    """Whether each choice says when it was queued, admitted, computed and preempted, in its last chunk of a stream."""
    prompt_logprobs: Annotated[NumTop, BeforeValidator(false_as_null, NumTop | Literal[False])] = None
    return_token_ids: bool | None = None
    """Whether choices have the ids of their tokens, with the one that ended them, and those of the prompt."""
    return_tokens_as_token_ids: bool | None = None
    """Whether log probabilities name tokens as `token_id:ID`."""
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    ttl: IdleSeconds | None = None
    """How long one of several models stays loaded when no request uses it, as in LM Studio."""
    early_stopping: Annotated[Any, BeforeValidator(_early_stopping, bool | Literal["never"] | None)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The amounts to compute and to show for a request."""

    max_tokens: int | None
    """Longest answer; None: as many tokens as fit."""
    max_tokens_param: str | None = None
    """The client's name of that field; None: `max_tokens`."""
    num_answers: int = 1
    """Answers to compute for each prompt."""
    num_choices: int = 1
    """Number of best answers to show for each prompt."""
    logprobs: int | None = None
    """Alternatives that are computed for each output token."""
    prompt_logprobs: int | None = None
    """Alternatives that are computed for each prompt token."""
    echo: bool = False
    """Whether the text of the prompt is shown."""
    is_scoring: bool = False
    """Whether nothing but the prompt is shown."""

    def check(self, num_prompts: int, *, param: str) -> None:
        """Check that there are not too many answers; `param` is the field that asks for several.

        Raises:
            ApiError: there are.
        """
        if num_prompts * self.num_answers > MAX_ANSWERS:
            raise ApiError(
                f"Invalid value for '{param}': expected at most {MAX_ANSWERS} answers to all prompts together, but got "
                f"{num_prompts} x {self.num_answers} instead.",
                param=param,
                code="invalid_value",
            )


def prompt_logprobs(fields: GenerationFields) -> int | None:
    """Return the number of alternatives for each prompt token.

    Raises:
        ApiError: the answer is streamed, and streams have no place for them.
    """
    if fields.prompt_logprobs is not None and fields.stream:
        raise not_in_streams("prompt_logprobs")
    return fields.prompt_logprobs


def check_token_ids(fields: GenerationFields) -> None:
    """Check that the ids of tokens have a place in the answer.

    Raises:
        ApiError: they were asked for, and the answer is streamed.
    """
    if fields.return_token_ids and fields.stream:
        raise not_in_streams("return_token_ids")


def not_in_streams(param: str) -> ApiError:
    """Return the error of a request for a stream with a parameter for which streams have no place."""
    message = f"The '{param}' parameter is not available when 'stream' is enabled."
    return ApiError(message, param=param, code="invalid_value")


def stop_ids(fields: SamplingFields, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that end an answer."""
    return (*(() if fields.ignore_eos else eos_token_ids), *(fields.stop_token_ids or ()))


class _Streamed(Protocol):
    stream: bool | None
    stream_options: StreamOptions | None


def stream_options(fields: _Streamed) -> StreamOptions:
    """Return the options of the stream; all are off if the request has none.

    Raises:
        ApiError: the request has options for a stream, but does not ask for one.
    """
    if fields.stream_options is None:
        return StreamOptions()
    if not fields.stream:
        raise ApiError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
            code="invalid_value",
        )
    return fields.stream_options


def stop_expressions(fields: SamplingFields) -> tuple[str, ...]:
    """Return the stop expressions.

    Raises:
        ApiError: a stream cannot be searched for them.
    """
    if not fields.stop_regex:
        return ()
    from pagewood.engine.text import StopExpressions  # imported when it is needed: it takes 0.1 s

    try:
        StopExpressions(fields.stop_regex, strings=fields.stop)
    except ValueError as error:
        message = f"Invalid value for 'stop_regex': {str(error).removeprefix('stop_regex ')}."
        raise ApiError(message, param="stop_regex", code="invalid_value") from error
    return tuple(fields.stop_regex)


def sampling(
    fields: SamplingFields,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    vocab_size: int,
    logprobs: int | None = None,
    kept_tokens: int | None = None,
    prompt_logprobs: int | None = None,
    routed_experts_from: int | None = None,
    hidden_states_from: int | None = None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Return the sampling parameters of the engine.

    Args:
        fields: the request.
        defaults: values of fields that the request leaves out.
        max_tokens: longest answer; None: as many tokens as fit.
        vocab_size: number of token ids of the model.
        logprobs: alternatives for each output token; None: no log probabilities.
        kept_tokens: most tokens that are reported as left by the filters; None: none are.
        prompt_logprobs: alternatives for each prompt token; None: no log probabilities.
        routed_experts_from: first position whose experts are reported; None: none are.
        hidden_states_from: first position whose hidden state is reported; None: none are.
        grammar: of the answer; None: no restriction.

    Raises:
        ApiError: a token is not in the vocabulary, or the answer could not be as long as it must be.
    """
    stop_token_ids = tuple(fields.stop_token_ids or ())
    check_tokens(stop_token_ids, param="stop_token_ids", vocab_size=vocab_size)
    check_tokens([token for token, _ in fields.logit_bias], param="logit_bias", vocab_size=vocab_size)
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise ApiError(
            f"Invalid value for 'min_tokens': expected at most the longest answer, {max_tokens}, but got {min_tokens}.",
            param="min_tokens",
            code="invalid_value",
        )
    return dataclasses.replace(
        chosen(defaults, fields),
        max_tokens=max_tokens,
        seed=fields.seed,
        logit_bias=tuple(fields.logit_bias),
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        logprobs_kind=fields.logprobs_kind or "raw",
        kept_tokens=kept_tokens,
        prompt_logprobs=prompt_logprobs,
        routed_experts_from=routed_experts_from,
        hidden_states_from=hidden_states_from,
        grammar=grammar,
        logits_processors=tuple(fields.logits_processors),
    )


def check_tokens(tokens: tuple[int, ...] | list[int], *, param: str, vocab_size: int) -> None:
    """Check that all ids are in the vocabulary.

    Raises:
        ApiError: an id is not in [0, vocab_size).
    """
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ApiError(
            f"Invalid value for '{param}': token ids must be in [0, {vocab_size}), but got {wrong} instead.",
            param=param,
            code="invalid_value",
        )
