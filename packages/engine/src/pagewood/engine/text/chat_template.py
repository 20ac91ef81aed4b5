"""Renders messages with a model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ChatMessage = Mapping[str, Any]
"""`role`, `content` and any other keys that the template reads; plain JSON values."""


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    filters: dict[str, Any] = environment.filters
    filters["tojson"] = _to_json
    return environment


class ChatTemplate:
    """A compiled template in a sandbox: templates come with models, and a model may come from any source.

    Renders the same text as `transformers` for the same messages and special tokens.

    Args:
        source: Jinja template.
        special_tokens: name -> text; variables of the template (`bos_token`, `eos_token`, ...).

    Raises:
        ChatTemplateError: the source is not a template.
    """

    __slots__ = ("_special_tokens", "_template")

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(
                source, globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now}
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"chat template cannot be read: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation; `add_generation_prompt` appends the beginning of the assistant's turn.

        Raises:
            ChatTemplateError: there are no messages, or the template rejects them.
        """
        if not messages:
            raise ChatTemplateError("messages must hold at least one message")
        # Clients send null for an absent key, and templates test whether a key is present.
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=present,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program, and can raise anything
            raise ChatTemplateError(f"chat template failed: {error}") from error
