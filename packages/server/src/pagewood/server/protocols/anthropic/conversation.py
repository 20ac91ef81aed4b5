"""From messages of blocks to the messages that chat templates read."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.protocols.anthropic.blocks import (
    Block,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from pagewood.server.protocols.anthropic.fields import AnthropicMessage, PromptFields, template_kwargs
from pagewood.server.protocols.common.tools import Tools

_BILLING_LINE = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE)
"""Claude Code writes such a line into its system prompt. It differs in every request, so with it no request would find
its conversation in the cache."""
_ALLOWED = {
    "system": frozenset({"text"}),
    "user": frozenset({"text", "image", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "redacted_thinking", "tool_use"}),
}


def num_parts(request: PromptFields) -> int:
    """Return how many blocks a conversation has."""
    return sum(len(message.content) for message in request.messages)


def chat_prompt(request: PromptFields, tools: Tools | None) -> wire.ChatPrompt:
    """Return the conversation in the form that the model's chat template reads. A last message of the assistant is
    continued.

    Raises:
        ApiError: a block does not suit the role of its message, a result has no call, or the last message ends with a
            call.
    """
    _check(request.messages)
    system = _system(request.system)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    names = _names(request.messages)
    for role, turn in itertools.groupby(request.messages, key=lambda message: message.role):
        blocks = [block for message in turn for block in message.content]
        if role == "assistant":
            messages.append(_assistant(blocks))
        elif role == "user":
            messages += _user(blocks, names)
        elif text := _system(block for block in blocks if isinstance(block, TextBlock)):
            messages.append({"role": "system", "content": text})
    is_continued = request.messages[-1].role == "assistant"
    return wire.ChatPrompt(
        messages=tuple(messages),
        tools=() if tools is None else tools.offered,
        template_kwargs=template_kwargs(request),
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
    )


def _check(messages: Sequence[AnthropicMessage]) -> None:
    called: set[str] = set()
    for index, message in enumerate(messages):
        for place, block in enumerate(message.content):
            param = f"messages[{index}].content[{place}]"
            if block.type not in _ALLOWED[message.role]:
                raise _invalid(param, f"blocks of type '{block.type}' do not belong to the role '{message.role}'")
            if isinstance(block, ToolUseBlock):
                called.add(block.id)
            if isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                raise _invalid(f"{param}.tool_use_id", f"no 'tool_use' before it has the id '{block.tool_use_id}'")
    last = messages[-1]
    if last.role == "assistant":
        param = f"messages[{len(messages) - 1}]"
        if any(isinstance(block, ToolUseBlock) for block in last.content):
            raise _invalid(param, "a 'tool_use' in the last message has no 'tool_result' after it")
        if not _text(last.content):
            raise _invalid(param, "the last message is continued by the answer, so it must have a text")


def _invalid(param: str, rule: str) -> ApiError:
    return ApiError(f"Invalid value for '{param}': {rule}.", param=param, code="invalid_value")


def _names(messages: Sequence[AnthropicMessage]) -> Mapping[str, str]:
    """Return id -> name of all calls."""
    blocks = itertools.chain.from_iterable(message.content for message in messages)
    return {block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)}


def _system(blocks: Iterable[TextBlock]) -> str:
    texts = [_BILLING_LINE.sub("", block.text) for block in blocks]
    return "\n".join([text for text in texts if text])


def _text(blocks: Iterable[Block]) -> str:
    return "\n".join([block.text for block in blocks if isinstance(block, TextBlock)])


def _shown(blocks: Sequence[Block]) -> str | list[dict[str, str]]:
    """Return the texts of a turn, or its parts if there are images among them."""
    if not any(isinstance(block, ImageBlock) for block in blocks):
        return _text(blocks)
    shown = [block for block in blocks if isinstance(block, TextBlock | ImageBlock)]
    return [{"type": "text", "text": one.text} if isinstance(one, TextBlock) else one.part for one in shown]


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return an answer: its text, its reasoning and its calls, each in their order."""
    found: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        found["tool_calls"] = calls
    return found


def _user(blocks: Sequence[Block], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the results and the texts of a turn in their order; texts between two results are one message."""
    found: list[dict[str, Any]] = []
    for is_result, run in itertools.groupby(blocks, key=lambda block: isinstance(block, ToolResultBlock)):
        if not is_result:
            found.append({"role": "user", "content": _shown(list(run))})
            continue
        for block in run:
            assert isinstance(block, ToolResultBlock)
            text = _text(block.content)
            found.append(
                {
                    "role": "tool",
                    "content": f"Error: {text}" if block.is_error else text,
                    "tool_call_id": block.tool_use_id,
                    "name": names[block.tool_use_id],
                }
            )
    return found
