"""The blocks that messages consist of."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.server.http.validation import kind

_MESSAGE_BLOCKS = frozenset({"text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"})
_CacheControl = dict[str, Any] | None
"""All prefixes are cached; if the server retains prefixes, this mark keeps its prefix for a time (see `retention`)."""


def _blocks(value: Any, supported: frozenset[str]) -> Any:
    """Return the blocks of a string or an array of blocks, as pydantic reads them."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError(f"expected a string or an array of blocks, but got {kind(value)} instead")
    blocks = cast("list[Any]", value)
    for index, block in enumerate(blocks):
        found: Any = cast("dict[str, Any]", block).get("type") if isinstance(block, dict) else None
        if not isinstance(found, str):
            raise ValueError(f"expected an object with a type at index {index}, but got {kind(block)} without one")
        if found not in supported:
            raise ValueError(f"blocks of type '{found}', as at index {index}, are not supported here")
    return blocks


def _message_blocks(value: Any) -> Any:
    return _blocks(value, _MESSAGE_BLOCKS)


def _texts(value: Any) -> Any:
    return [] if value is None else _blocks(value, frozenset({"text"}))


class Strict(BaseModel):
    """An object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextBlock(Strict):
    """Text of a message, a result or a system prompt."""

    type: Literal["text"]
    text: str
    cache_control: _CacheControl = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


Texts = Annotated[list[TextBlock], BeforeValidator(_texts, str | list[TextBlock] | None)]
"""From a string, an array of text blocks, or null."""


class Base64Source(Strict):
    """The bytes of an image."""

    type: Literal["base64"]
    media_type: str
    """Without effect: the bytes say what they are."""
    data: str


class UrlSource(Strict):
    """Where an image is, if the operator allows the host."""

    type: Literal["url"]
    url: str


class ImageBlock(Strict):
    """An image in a message of the user."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: _CacheControl = None

    @property
    def part(self) -> dict[str, str]:
        """The part of a message for it."""
        source = self.source
        return {
            "type": "image",
            "image": source.url if isinstance(source, UrlSource) else f"data:;base64,{source.data}",
        }


class ThinkingBlock(Strict):
    """Reasoning of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Strict):
    """Encrypted reasoning of Anthropic's models. No other model can read it, so it is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    cache_control: _CacheControl = None
    caller: dict[str, Any] | None = None
    """The origin of the call; answers have it, and clients send it back."""


class ToolResultBlock(Strict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field(default_factory=list[TextBlock])
    is_error: bool | None = None
    cache_control: _CacheControl = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
Blocks = Annotated[list[Block], BeforeValidator(_message_blocks, str | list[Block])]
"""From a string or an array of blocks."""
