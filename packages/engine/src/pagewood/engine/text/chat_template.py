"""A model's chat template: messages -> the text that the model was trained to continue."""

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
"""`role`, `content`, and what else the template reads; plain JSON values."""


class ChatTemplateError(ValueError):
    """A template that cannot be read, or messages that it refuses; the text is for the person who sent them."""


class _Generation(Extension):
    """`{% generation %}`: marks what the assistant wrote, for training; here it shows its content."""

    tags = {"generation"}  # noqa: RUF012 (how jinja2 declares it)

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
    # jinja2's own filter escapes HTML, which a model must not see.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    filters: dict[str, Any] = environment.filters
    filters["tojson"] = _to_json
    return environment


class ChatTemplate:
    """A compiled template, in a sandbox: templates come with models, and models come from anywhere.

    Renders what `transformers` renders for the same messages and special tokens.

    Args:
        source: the Jinja template.
        special_tokens: name -> text, visible to the template (`bos_token`, `eos_token`, ...).

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
        """Return the text of a conversation; with `add_generation_prompt` it ends where the assistant begins.

        Raises:
            ChatTemplateError: there are no messages, or the template refuses them.
        """
        if not messages:
            raise ChatTemplateError("messages must hold at least one message")
        # A null is how clients say "absent", and templates test for presence.
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
        except Exception as error:  # a template is a program: it can fail in every way that a program can
            raise ChatTemplateError(f"chat template failed: {error}") from error
