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


def glm_4_7(message: Message) -> str:
    """Return a message of GLM 4.7, which has no line feeds around calls."""
    calls = [
        f"<tool_call>{name}"
        + "".join(f"<arg_key>{key}</arg_key><arg_value>{_text(value)}</arg_value>" for key, value in arguments.items())
        + "</tool_call>"
        for name, arguments in message.calls
    ]
    return f"{_think(message)}{message.content}{''.join(calls)}<|user|>"


def exaone_4(message: Message) -> str:
    """Return a message of EXAONE 4."""
    calls = [
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"
        for name, arguments in message.calls
    ]
    parts = [message.content] if message.content else []
    return _think(message) + "\n".join([*parts, *calls]) + "[|endofturn|]\n"


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


def _json_list(message: Message) -> str:
    """Return calls as a list in JSON, with the keys of OpenAI."""
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in message.calls], ensure_ascii=False)


def granite_3(message: Message) -> str:
    """Return a message of Granite 3.0 or 3.1."""
    return message.content + (f"<|tool_call|>{_json_list(message)}" if message.calls else "") + "<|end_of_text|>"


def granite_3_2(message: Message) -> str:
    """Return a message of Granite 3.2."""
    reasoning = f"Here is my thought process:\n{message.reasoning}\nHere is my response:\n" if message.reasoning else ""
    return reasoning + granite_3(message)


def granite_3_3(message: Message) -> str:
    """Return a message of Granite 3.3."""
    if not message.reasoning:
        return granite_3(message)
    answer = granite_3(message).removesuffix("<|end_of_text|>")
    return f"<think>{message.reasoning}</think><response>{answer}</response><|end_of_text|>"


def cohere_command(message: Message) -> str:
    """Return a message of Command R7B or Command A."""
    reasoning = f"<|START_THINKING|>{message.reasoning}<|END_THINKING|>" if message.reasoning else ""
    content = f"<|START_RESPONSE|>{message.content}<|END_RESPONSE|>" if message.content else ""
    calls = [
        f'    {{"tool_call_id": "{index}", "tool_name": {json.dumps(name)}, "parameters": {json.dumps(arguments)}}}'
        for index, (name, arguments) in enumerate(message.calls)
    ]
    joined = ",\n".join(calls)
    action = f"<|START_ACTION|>[\n{joined}\n]<|END_ACTION|>" if calls else ""
    return f"{reasoning}{content}{action}<|END_OF_TURN_TOKEN|>"


def phi_4_mini(message: Message) -> str:
    """Return a message of Phi-4 mini."""
    calls = f"<|tool_call|>{_json_list(message)}<|/tool_call|>" if message.calls else ""
    return f"{_think(message)}{message.content}{calls}<|end|>"


def functools(message: Message) -> str:
    """Return a message of Phi-4 mini with the chat template that asks for a word before calls."""
    return _think(message) + message.content + (f"functools{_json_list(message)}" if message.calls else "") + "<|end|>"


def seed_oss(message: Message) -> str:
    """Return a message of Seed-OSS."""
    reasoning = f"<seed:think>{message.reasoning}</seed:think>\n" if message.reasoning else ""
    calls = [
        f"\n<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{_text(value)}</parameter>\n" for key, value in arguments.items())
        + "</function>\n</seed:tool_call>"
        for name, arguments in message.calls
    ]
    return f"{reasoning}{message.content}{''.join(calls)}<seed:eos>"


def ernie_4_5(message: Message) -> str:
    """Return a message of ERNIE 4.5 Thinking."""
    content = f"<response>\n{message.content}\n</response>\n" if message.content else ""
    calls = [
        f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>\n"
        for name, arguments in message.calls
    ]
    return f"{_think(message)}{content}{''.join(calls)}<|im_end|>"


def hunyuan(message: Message) -> str:
    """Return a message of Hunyuan A13B."""
    calls = f"<tool_calls>{_json_list(message)}</tool_calls>" if message.calls else ""
    return f"<think>\n{message.reasoning}\n</think>\n<answer>\n{message.content}{calls}\n</answer><|eos|>"


def hunyuan_dense(message: Message) -> str:
    """Return a message of Hunyuan 0.5B to 4B."""
    calls = [
        f"<tool_call>{name}\n```json\n{json.dumps(arguments, ensure_ascii=False)}\n```</tool_call>"
        for name, arguments in message.calls
    ]
    joined = "\n".join(calls)
    section = f"<tool_calls>{joined}</tool_calls>" if calls else ""
    return (
        f"<think>\n{message.reasoning}\n</think>\n<answer>\n{message.content}{section}\n</answer>"
        "<｜hy_place▁holder▁no▁2｜>"
    )


def olmo_3(message: Message) -> str:
    """Return a message of OLMo 3."""
    calls = [
        f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})"
        for name, arguments in message.calls
    ]
    joined = "\n".join(calls)
    section = f"<function_calls>{joined}</function_calls>" if calls else ""
    return f"{_think(message)}{message.content}{section}<|im_end|>"


def apertus(message: Message) -> str:
    """Return a message of Apertus."""
    reasoning = f"<|inner_prefix|>{message.reasoning}<|inner_suffix|>" if message.reasoning else ""
    calls = json.dumps([{name: arguments} for name, arguments in message.calls], ensure_ascii=False)
    section = f"<|tools_prefix|>{calls}<|tools_suffix|>" if message.calls else ""
    return f"{reasoning}{message.content}{section}<|assistant_end|>"


def nemotron(message: Message) -> str:
    """Return a message of Nemotron Nano 2 or Llama Nemotron."""
    calls = f"\n\n<TOOLCALL>{_json_list(message)}</TOOLCALL>" if message.calls else ""
    return f"{_think(message)}{message.content}{calls}\n<SPECIAL_12>"


WRITERS: dict[str, Callable[[Message], str]] = {
    writer.__name__: writer
    for writer in (
        hermes, qwen3_coder, llama3, llama4, mistral, deepseek_v3, deepseek_v3_2, minimax_m2, kimi_k2, glm_4, glm_4_7,
        exaone_4,
        harmony, gemma_4, granite_3, granite_3_2, granite_3_3, cohere_command, phi_4_mini, functools,
        seed_oss, ernie_4_5, hunyuan, hunyuan_dense, olmo_3, apertus, nemotron,
    )
}  # fmt: skip
