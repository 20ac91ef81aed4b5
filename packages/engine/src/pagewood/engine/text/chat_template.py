"""Renders messages with a model's chat template."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, TypedDict, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from pagewood.engine.text.bounded_template import (
    MAX_LENGTH,
    MAX_SECONDS,
    BoundedEnvironment,
    TemplateTooLong,
    indented_json,
)

ChatMessage = Mapping[str, Any]
"""`role`, `content` and any other keys that the template reads; plain JSON values."""


class ChatOptions(TypedDict, total=False):
    """What a conversation has beside its messages; see `ChatTemplate.render`."""

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool


_OWN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception",
     "strftime_now"}
)  # fmt: skip
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(ValueError):
    """The template is invalid, or rejects the messages. Its text is meant for the sender of the messages."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here the block renders its content."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the content of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise ChatTemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # The filter of jinja2 escapes HTML, which would change the prompt.
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return encoder.encode(value) if indent is None else indented_json(value, encoder, indent)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    filters: dict[str, Any] = environment.filters
    filters["tojson"] = _to_json
    return environment


class ChatTemplate:
    """A compiled template in a sandbox: templates come with models, and a model may come from any source.

    Renders the same text as `transformers` for the same messages and special tokens. A rendering that takes longer than
    `max_seconds` of processor time, or writes more than 64 Mi characters, ends with an error.

    Args:
        source: Jinja template.
        special_tokens: name -> text; variables of the template (`bos_token`, `eos_token`, ...).
        max_seconds: longest time of the processor for one rendering.

    Raises:
        ChatTemplateError: the source is not a template.
    """

    __slots__ = ("_absent", "_bounds", "_max_seconds", "_special_tokens", "_template")

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], max_seconds: float = MAX_SECONDS) -> None:
        environment = _environment()
        self._bounds = environment.bounds
        self._max_seconds = max_seconds
        try:
            self._template = environment.bounded(
                source, variables={"raise_exception": _raise_exception, "strftime_now": _strftime_now}
            )
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ChatTemplateError(f"chat template cannot be read: {error}") from error
        self._special_tokens = dict(special_tokens)
        # DeepSeek's templates tell calls by a null; most others join the content to a text, or ask for its parts.
        tells_calls = "<｜tool▁calls▁begin｜>" in source and "['content'] is" in source  # noqa: RUF001
        self._absent: str | None = None if tells_calls else ""

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of a conversation.

        The arguments of tool calls may be JSON texts, as in OpenAI's API, or objects; templates get objects. Reasoning
        under one of the names `reasoning_content`, `thinking` and `reasoning` is available under the first two. A turn
        of the assistant without content, or with null, has an empty text, or null where a template tells calls by it.

        Args:
            messages: the conversation.
            tools: functions that may be called, as in OpenAI's API; None: the template describes no tools.
            documents: texts for the template to quote.
            template_kwargs: more variables of the template, such as `enable_thinking`.
            add_generation_prompt: append the beginning of the assistant's turn; by default, unless
                `continue_final_message`.
            continue_final_message: end the text with the content of the last message, so that the model continues it.

        Raises:
            ChatTemplateError: there are no messages, a variable has a name that is taken, the arguments of a call are
                no JSON object, the last message cannot be continued, or the template rejects the messages, takes too
                long or writes too much.
        """
        if not messages:
            raise ChatTemplateError("messages must hold at least one message")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        elif add_generation_prompt and continue_final_message:
            raise ChatTemplateError("add_generation_prompt and continue_final_message must not both be true")
        variables = dict(template_kwargs or {})
        taken = sorted(variables.keys() & (_OWN_VARIABLES | self._special_tokens.keys()), key=str)
        if taken:
            raise ChatTemplateError(f"chat_template_kwargs must not set what the engine sets, got {', '.join(taken)}")
        present = [_presentable(message, f"messages[{index}]") for index, message in enumerate(messages)]
        last, mark = "", f"continues-here-{secrets.token_hex(8)}"
        if continue_final_message:
            last = _append_to(present[-1], f"{mark} ")
        for message in present:
            if message.get("role") == "assistant":
                message.setdefault("content", self._absent)
        variables |= self._special_tokens
        variables |= {
            "messages": present,
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        self._bounds.begin(self._max_seconds, MAX_LENGTH)
        try:
            text = self._template.render(variables)
        except ChatTemplateError:
            raise
        except TemplateTooLong as error:
            raise ChatTemplateError(f"chat template was ended: {error}") from error
        except Exception as error:  # a template is a program, and can raise anything
            raise ChatTemplateError(f"chat template failed: {error}") from error
        return _cut(text, mark, last) if continue_final_message else text


class _Arguments(dict[str, Any]):
    """The arguments of a call. Older templates append them to a text like a string: then they are JSON."""

    def __add__(self, text: object) -> str:
        return _to_json(self) + text if isinstance(text, str) else NotImplemented

    def __radd__(self, text: object) -> str:
        return text + _to_json(self) if isinstance(text, str) else NotImplemented


def _presentable(message: ChatMessage, where: str) -> dict[str, Any]:
    """Return a message as templates expect it."""
    # Clients send null for an absent key, and templates test whether a key is present.
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in _REASONING if key in present), None)
    if reasoning is not None:
        present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
    calls = present.get("tool_calls")
    if isinstance(calls, list):
        present["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(cast("list[object]", calls))
        ]
    return present


def _call(call: object, where: str) -> object:
    """Return a call with its arguments as an object.

    Raises:
        ChatTemplateError: they are neither an object nor the JSON text of one.
    """
    if not isinstance(call, Mapping):
        raise ChatTemplateError(f"{where} must be an object, got {call!r:.100}")
    fields = dict(cast("Mapping[str, Any]", call))
    function = fields.get("function")
    if isinstance(function, Mapping):
        return fields | {"function": _call(cast("object", function), f"{where}.function")}
    arguments: object = fields.get("arguments")
    if arguments is None:
        return fields
    if isinstance(arguments, str):
        try:
            arguments = cast("object", json.loads(arguments or "{}"))
        except (ValueError, RecursionError) as error:
            raise ChatTemplateError(f"{where}.arguments must be JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise ChatTemplateError(f"{where}.arguments must be a JSON object, got {arguments!r:.100}")
    return fields | {"arguments": _Arguments(cast("Mapping[str, Any]", arguments))}


def _append_to(message: dict[str, Any], mark: str) -> str:
    """Append a mark to the content of a message; return the text that it had.

    Raises:
        ChatTemplateError: it has no text.
    """
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + mark
        return content
    blocks = [dict(cast("Mapping[str, Any]", block)) for block in _list(content) if isinstance(block, Mapping)]
    for block in reversed(blocks):
        if isinstance(text := block.get("text"), str):
            block["text"] = text + mark
            message["content"] = blocks
            return text
    raise ChatTemplateError("continue_final_message needs a last message with a text as its content")


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _cut(text: str, mark: str, last: str) -> str:
    """Return a rendered text up to its mark.

    Raises:
        ChatTemplateError: the mark, or the text of the last message before it, is not there.
    """
    at = text.rfind(mark)
    if at < 0 or last.strip() not in text:
        raise ChatTemplateError("continue_final_message needs a chat template that repeats the last message as it is")
    # A template that drops white space at the ends of messages drops it after the mark, too.
    return text[:at] if text.startswith(f"{mark} ", at) else text[:at].rstrip()
