"""The fields of native requests; their names are SGLang's where SGLang has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.engine.api import MAX_LOGPROBS
from pagewood.server.http.errors import ApiError
from pagewood.server.http.field_limits import Id, Label, Name, Salt
from pagewood.server.http.validation import WHOLE, integers, kind, parse
from pagewood.server.messages import wire
from pagewood.server.messages.token_ids import bytes_of
from pagewood.server.protocols.common.fields import INT32_MAX, MAX_ANSWERS, SamplingFields, TokenId, check_tokens
from pagewood.server.protocols.common.messages import Message, ToolFields
from pagewood.server.protocols.common.prompts import MAX_PROMPTS
from pagewood.server.protocols.common.shared_kv import SharedKVFields
from pagewood.server.protocols.common.tools import MAX_TOOLS

DEFAULT_MAX_TOKENS = 128
MAX_DEADLINE_S = 1e6
"""Longest `deadline`."""
MAX_RETAIN_S = 1e6
"""Longest `retain`."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # SGLang
    "input_embeds": (None,),
    "image_data": (None,),
    "video_data": (None,),
    "audio_data": (None,),
    "token_ids_logprob": (None,),
    "session_params": (None, {}),
    "extra_key": (None,),
    "custom_logit_processor": (None,),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "data_parallel_rank": (None,),
}
"""Fields of `/generate` that are not supported -> their neutral values, which have no effect and are accepted."""
IGNORED = frozenset({"log_metrics", "no_logs", "custom_labels", "external_trace_header"})
"""Fields about SGLang's own logs and metrics; they do not change an answer."""

SAMPLING_NAMES: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
"""Fields of `SamplingFields` -> their names here."""


PARAM_NAMES: Mapping[str, str] = {
    **{name: f"sampling_params.{SAMPLING_NAMES.get(name, name)}" for name in SamplingFields.model_fields},
    "kept_tokens": "sampling_params.custom_params.return_top_p_token_ids",
    "routed_experts_from": "return_routed_experts",
    "hidden_states_from": "return_hidden_states",
}
"""Sampling parameters as the rest of the server calls them -> the client's names of them, for errors."""


def _one_or_many(value: Any, what: str, parse_one: Callable[[Any], Any]) -> Any:
    """Return a prompt or a list of prompts; `parse_one` returns a prompt, or None if a value is not a prompt."""
    one = parse_one(value)
    if value is None or one is not None:
        return one
    items = [parse_one(item) for item in cast("list[Any]", value)] if isinstance(value, list) else []
    if not items or None in items:
        raise ValueError(f"expected {what}")
    if len(items) > MAX_PROMPTS:
        raise ValueError(f"expected at most {MAX_PROMPTS} prompts, but got {len(items)}")
    return items


def _texts(value: Any) -> Any:
    what = "a string or a non-empty array of strings"
    return _one_or_many(value, what, lambda item: item if isinstance(item, str) else None)


def _inputs(value: Any) -> Any:
    what = "a non-empty array of token ids, or of non-empty arrays of token ids"
    return _one_or_many(value, what, lambda item: integers(item) or None)


def _token_ids(value: Any) -> list[int]:
    found = integers(value)
    if found is None:
        raise ValueError(
            f"expected an array of token ids{'' if isinstance(value, list) else f', but got {kind(value)}'}"
        )
    return found


_Ids = Annotated[list[TokenId], Field(min_length=1)]
_Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)] | None
_Inputs = _Ids | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_PROMPTS)] | None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CustomParams(_Strict):
    """What slime asks for in the place where SGLang has parameters of its users."""

    return_top_p_token_ids: bool | None = None


class NativeSampling(SamplingFields):
    """`sampling_params`."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(default=None, alias="max_new_tokens")
    """128 by default."""
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = Field(default=None, alias="min_new_tokens")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] | None = Field(default=None, alias="sampling_seed")
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS), WHOLE] | None = None
    """Answers to each prompt."""

    no_stop_trim: bool | None = None
    """Whether the stop token that ends an answer is one of its tokens, with its text and log probability."""
    skip_special_tokens: bool | None = None
    """true by default."""
    spaces_between_special_tokens: bool | None = None
    """Accepted for compatibility: there are no such spaces."""

    custom_params: CustomParams | None = None

    @property
    def has_kept(self) -> bool:
        """Whether answers have what the filters have left for each of their tokens."""
        return self.custom_params is not None and bool(self.custom_params.return_top_p_token_ids)


class Conversation(_Strict):
    """The fields of a conversation for the model's chat template."""

    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the template may show to the model; answers are not searched for calls."""
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the template."""
    add_generation_prompt: bool | None = None
    """true by default: the prompt ends with the beginning of the assistant's turn."""
    continue_final_message: bool | None = None

    def chat(self) -> wire.ChatPrompt | None:
        """Return the conversation; None: there are no messages.

        Raises:
            ApiError: a message or a combination of fields is wrong.
        """
        if self.messages is None:
            for name in Conversation.model_fields.keys() - {"messages"}:
                if getattr(self, name) is not None:
                    message = f"The '{name}' parameter is only allowed with 'messages'."
                    raise ApiError(message, param=name, code="invalid_value")
            return None
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
                param="continue_final_message",
                code="invalid_value",
            )
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")
        return wire.ChatPrompt(
            messages=tuple(message.for_template() for message in self.messages),
            tools=tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ()),
            documents=tuple(self.documents or ()),
            template_kwargs=self.chat_template_kwargs or {},
            add_generation_prompt=self.add_generation_prompt is not False and not self.continue_final_message,
            continue_final_message=bool(self.continue_final_message),
        )


class GenerateRequest(Conversation, SharedKVFields):
    """The body of `/generate`: one of `text`, `input_ids` and `messages`, and how to continue it."""

    text: Annotated[Any, BeforeValidator(_texts, _Texts)] = None
    """A text, or several."""
    input_ids: Annotated[Any, BeforeValidator(_inputs, _Inputs)] = None
    """The token ids of a text, or of several."""
    model: str | None = None
    lora_path: Name | None = None
    """The name of an adapter of `model`."""
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    rid: Name | None = None
    """Name of the request: the `id` of its answers, by which it can be aborted."""
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    """Position of the first prompt token whose log probability is returned; -1 (default): none is returned."""
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    """Most probable tokens that are returned in the place of each token."""
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    """Whether answers have the experts of each token of prompt and answer, but for the last one."""
    routed_experts_start_len: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    """Position of the first token whose experts are returned; 0 by default, -1: the last one of the prompt."""
    return_hidden_states: bool | None = None
    """The same for the hidden states behind the last norm."""
    hidden_states_start_len: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    return_timings: bool | None = None
    """Whether answers have the times of the request, of its first token, and of its end."""
    explain: bool | None = None
    """Whether answers say why no more of the prompt was cached, and have those times and the times of arrival and
    admission in the engine."""
    deadline: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)] | None = None
    """Seconds after its arrival within which the request must be complete; otherwise it ends with an error."""
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), WHOLE] | None = None
    service_class: Label | None = None
    """Classes take turns where the server schedules by `wrr`."""
    tag: Label | None = None
    """Requests run next to others with the same tag where the server schedules by `tag`."""
    cache_salt: Salt | None = None
    """Requests share cached prefixes only with requests that have the same one."""
    retain: Annotated[float, Field(ge=0, le=MAX_RETAIN_S)] | None = None
    """Seconds after its end for which its text is likely to return; 0: it is done."""

    def prompts(self, *, vocab_size: int) -> tuple[list[wire.Prompt], str, bool]:
        """Return the prompts, the name of their field, and whether the client sent an array of them.

        Raises:
            ApiError: there is not exactly one of the fields, or an id is not in the vocabulary.
        """
        chat = self.chat()
        check_one({"text": self.text, "input_ids": self.input_ids, "messages": self.messages})
        if chat is not None:
            return [chat], "messages", False
        if self.text is not None:
            texts = [self.text] if isinstance(self.text, str) else self.text
            return [wire.TextPrompt(text=text) for text in texts], "text", not isinstance(self.text, str)
        is_many = isinstance(self.input_ids[0], list)
        prompts: list[wire.Prompt] = []
        for ids in self.input_ids if is_many else [self.input_ids]:
            check_tokens(ids, param="input_ids", vocab_size=vocab_size)
            prompts.append(wire.TokenPrompt(tokens=bytes_of(ids)))
        return prompts, "input_ids", is_many


def parse_generate(body: bytes) -> GenerateRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong, missing, unknown or not supported.
    """
    found = parse(GenerateRequest, body, neutral=NEUTRAL, ignored=IGNORED)
    if not found.return_logprob:
        for name in ("logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"):
            if getattr(found, name) not in (None, False, 0, -1):
                raise ApiError(
                    f"The '{name}' parameter is only allowed when 'return_logprob' is enabled.",
                    param=name,
                    code="invalid_value",
                )
    for wish, start in (
        ("return_routed_experts", "routed_experts_start_len"), ("return_hidden_states", "hidden_states_start_len"),
    ):  # fmt: skip
        if getattr(found, start) and not getattr(found, wish):
            message = f"The '{start}' parameter is only allowed when '{wish}' is enabled."
            raise ApiError(message, param=start, code="invalid_value")
    chosen = found.sampling_params
    if chosen is not None and chosen.no_stop_trim and (chosen.stop or chosen.stop_regex):
        raise ApiError(
            "The 'no_stop_trim' parameter keeps stop tokens only; it is not available with 'stop' or 'stop_regex'.",
            param="sampling_params.no_stop_trim",
            code="invalid_value",
        )
    return found


def check_one(fields: Mapping[str, Any]) -> None:
    """Check that exactly one of some fields was sent.

    Raises:
        ApiError: none was, or several were.
    """
    given = [name for name, value in fields.items() if value is not None]
    names = " or ".join(f"'{name}'" for name in fields)
    if not given:
        param = next(iter(fields))
        raise ApiError(f"Missing required parameter: {names}.", param=param, code="missing_required_parameter")
    if len(given) > 1:
        message = f"'{given[0]}' and '{given[1]}' cannot both be sent."
        raise ApiError(message, param=given[1], code="invalid_value")


class TokenizeRequest(Conversation):
    """The body of `/tokenize`: `text` (or vLLM's name for it, `prompt`) or `messages`."""

    model: str | None = None
    text: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own tokens, such as the beginning of a text; by default to texts only."""
    return_pieces: bool | None = None
    """Whether the answer has the text of each token; for at most 8,192 tokens."""


class DetokenizeRequest(_Strict):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], BeforeValidator(_token_ids, list[TokenId])]
    skip_special_tokens: bool | None = None
    """true by default."""


class TemplateRequest(Conversation):
    """The body of `/apply_template`."""

    model_config = ConfigDict(json_schema_extra={"required": ["messages"]})

    model: str | None = None


class AbortRequest(_Strict):
    """The body of `/abort`."""

    rid: Id
    """The id of a request or of its answers."""


class PauseRequest(_Strict):
    """The body of `/pause`."""

    mode: Literal["in_place", "retract", "abort"] = "in_place"
    """in_place: running requests keep their memory; retract: they give it back, as if they were preempted; abort: all
    requests end first."""
    rid: Id | None = None
    """The id of a request or of its answers: only this one is paused. Without it the whole engine is paused."""


class ResumeRequest(_Strict):
    """The body of `/resume`."""

    rid: Id | None = None
    """The id of a request or of its answers that is paused alone."""


class FlushRequest(_Strict):
    """The body of `/flush_cache`."""

    when: Literal["now", "idle"] = "now"
    """now: drop KV that no request uses; idle: drop all KV as soon as no request is left."""


class RetainRequest(Conversation):
    """The body of `/retain`: `text`, `input_ids` or `messages`, and for how long they are likely to return."""

    text: str | None = None
    input_ids: _Ids | None = None
    model: str | None = None
    seconds: Annotated[float, Field(ge=0, le=MAX_RETAIN_S)]
    """0: the text will not return, and its KV that no other cached text needs is dropped."""
    cache_salt: Salt | None = None

    def prompt(self, *, vocab_size: int) -> tuple[wire.Prompt, str]:
        """Return the text, and the name of its field.

        Raises:
            ApiError: there is not exactly one of the fields, or an id is not in the vocabulary.
        """
        chat = self.chat()
        check_one({"text": self.text, "input_ids": self.input_ids, "messages": self.messages})
        if chat is not None:
            return chat, "messages"
        if self.text is not None:
            return wire.TextPrompt(text=self.text), "text"
        ids = self.input_ids or []
        check_tokens(ids, param="input_ids", vocab_size=vocab_size)
        return wire.TokenPrompt(tokens=bytes_of(ids)), "input_ids"
