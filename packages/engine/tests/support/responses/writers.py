# ruff: noqa: RUF001 (marks of models)
"""Answers in the format of each family, written without the parser's data, so that they can test it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast


@dataclass(frozen=True)
class Message:
    """What a model says."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])


def _think(message: Message) -> str:
    return f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(message: Message) -> str:
    """Return a message of Qwen 2.5 or 3."""
    calls = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments in message.calls
    ]
    return _think(message) + "\n".join([message.content, *calls]) + "<|im_end|>\n"


def qwen3_coder(message: Message) -> str:
    """Return a message of Qwen 3 Coder."""
    calls = [
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in message.calls
    ]
    return _think(message) + "\n".join([message.content, *calls]) + "<|im_end|>\n"


def llama3(message: Message) -> str:
    """Return a message of Llama 3: calls, or content."""
    calls = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in message.calls]
    return (f"<|python_tag|>{'; '.join(calls)}" if calls else message.content) + "<|eot_id|>"


def llama4(message: Message) -> str:
    """Return a message of Llama 4: calls, or content."""
    calls = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in message.calls
    ]
    return (f"[{', '.join(calls)}]" if calls else message.content) + "<|eot|>"


def mistral(message: Message) -> str:
    """Return a message of Mistral Small 3.2 or Magistral."""
    reasoning = f"[THINK]{message.reasoning}[/THINK]" if message.reasoning else ""
    calls = [
        f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}" for name, arguments in message.calls
    ]
    return f"{reasoning}{message.content}{''.join(calls)}</s>"


def deepseek_v3(message: Message) -> str:
    """Return a message of DeepSeek V3."""
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in message.calls
    ]
    joined = "\n".join(calls)
    section = f"<｜tool▁calls▁begin｜>{joined}<｜tool▁calls▁end｜>" if calls else ""
    return f"{_think(message)}{message.content}{section}<｜end▁of▁sentence｜>"


def deepseek_v3_2(message: Message) -> str:
    """Return a message of DeepSeek V3.2."""
    calls = [
        f'<｜DSML｜invoke name="{name}">\n'
        + "\n".join(
            f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
            f"{_text(value)}</｜DSML｜parameter>"
            for key, value in arguments.items()
        )
        + "\n</｜DSML｜invoke>"
        for name, arguments in message.calls
    ]
    joined = "\n".join(calls)
    section = f"\n\n<｜DSML｜function_calls>\n{joined}\n</｜DSML｜function_calls>" if calls else ""
    return f"{_think(message)}{message.content}{section}<｜end▁of▁sentence｜>"


def minimax_m2(message: Message) -> str:
    """Return a message of MiniMax M2."""
    calls = [
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in message.calls
    ]
    section = f"\n<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>" if calls else ""
    return f"{_think(message)}{message.content}{section}[e~["


def kimi_k2(message: Message) -> str:
    """Return a message of Kimi K2."""
    calls = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(message.calls)
    ]
    section = f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>" if calls else ""
    return f"{_think(message)}{message.content}{section}<|im_end|>"


def glm_4(message: Message) -> str:
    """Return a message of GLM 4.5."""
    calls = [
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in message.calls
    ]
    return _think(message) + "\n".join([message.content, *calls]) + "<|user|>"


def harmony(message: Message) -> str:
    """Return a message of gpt-oss."""
    turns = [f"<|channel|>analysis<|message|>{message.reasoning}<|end|>"] if message.reasoning else []
    if message.content:
        channel, end = ("commentary", "<|end|>") if message.calls else ("final", "<|return|>")
        turns.append(f"<|channel|>{channel}<|message|>{message.content}{end}")
    turns += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
        for name, arguments in message.calls
    ]
    return "<|start|>assistant".join(turns)


def gemma_4(message: Message) -> str:
    """Return a message of Gemma 4."""
    reasoning = f"<|channel>thought\n{message.reasoning}\n<channel|>" if message.reasoning else ""
    calls = [f"<|tool_call>call:{name}{_marked(arguments)}<tool_call|>" for name, arguments in message.calls]
    return f"{reasoning}{message.content}{''.join(calls)}<turn|>"


def _marked(value: Any) -> str:
    match value:
        case dict():
            return f"{{{','.join(f'{key}:{_marked(inner)}' for key, inner in cast('dict[str, Any]', value).items())}}}"
        case list():
            return f"[{','.join(map(_marked, cast('list[Any]', value)))}]"
        case str():
            return f'<|"|>{value}<|"|>'
        case _:
            return json.dumps(value)


WRITERS: dict[str, Callable[[Message], str]] = {
    writer.__name__: writer
    for writer in (
        hermes, qwen3_coder, llama3, llama4, mistral, deepseek_v3, deepseek_v3_2, minimax_m2, kimi_k2, glm_4, harmony,
        gemma_4,
    )
}  # fmt: skip
