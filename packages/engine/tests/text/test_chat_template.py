"""Conversations with tools, documents and messages to continue: the same text as transformers renders."""

# pyright: basic
# ruff: noqa: E501, RUF001 (templates)
from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from pagewood.engine.text import ChatTemplate, ChatTemplateError, Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a <city> & more",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
DOCUMENTS = [{"title": "Rome", "text": "A city."}]
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content is string %}{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
        {%- if message.content is string %}{{- message.content }}{%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
CODER = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') | trim }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{%- for key, value in call.function.arguments.items() %}
<parameter={{ key }}>
{{ value | tojson if value is mapping or value is sequence and value is not string else value }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if not message.tool_calls|length == 1 %}{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
{%- else %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
BLOCKS = """\
{%- for message in messages %}[{{ message.role }}]
{%- if message.thinking %}<{{ message.thinking }}>{% endif %}
{%- if message.content is string %}{{ message.content }}{% else %}{% for block in message.content or [] %}{{ block.text or block.type }}{% endfor %}{% endif %}[/]
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
SOURCES = {"qwen": QWEN, "coder": CODER, "llama": LLAMA, "blocks": BLOCKS}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Köln <3", "n": [1, None]}},
}
CONVERSATIONS = {
    "question": [{"role": "user", "content": "Hi"}],
    "call": [
        {"role": "user", "content": "Weather?", "name": None},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny & <warm>"},
    ],
    "reasoning": [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "reasoning": "Hm.\n", "content": "Because. "},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "thinking": "So.", "content": "So it is"},
    ],
    "blocks": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two  "}]},
    ],
}
KWARGS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"tools": TOOLS},
    {"tools": []},
    {"documents": DOCUMENTS},
    {"template_kwargs": {"enable_thinking": False}},
    {"continue_final_message": True},
    {"continue_final_message": True, "tools": TOOLS},
]


@pytest.fixture(scope="module")
def reference(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def as_texts(conversation: list) -> list:
    """Return a conversation whose calls have JSON texts as arguments, as OpenAI's clients send them."""
    conversation = copy.deepcopy(conversation)
    for message in conversation:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return conversation


@pytest.mark.parametrize("options", KWARGS, ids=str)
@pytest.mark.parametrize("key", CONVERSATIONS)
@pytest.mark.parametrize("name", SOURCES)
def test_equal_to_transformers(reference, name: str, key: str, options: dict) -> None:
    source, messages = SOURCES[name], CONVERSATIONS[key]
    template = ChatTemplate(source, special_tokens={"bos_token": "<|start|>", "eos_token": "<|end|>"})
    theirs = {name: value for name, value in options.items() if name != "template_kwargs"}
    theirs |= options.get("template_kwargs", {})
    theirs.setdefault("add_generation_prompt", not options.get("continue_final_message", False))
    try:
        text = reference.apply_chat_template(messages, chat_template=source, tokenize=False, **theirs)
    except Exception:
        with pytest.raises(ChatTemplateError):
            template.render(as_texts(messages), **options)
        return
    assert template.render(as_texts(messages), **options) == text
    assert template.render(messages, **options) == text


WITHOUT_CONTENT = """\
{%- for message in messages %}{% if message.role == "user" %}{{ "U" + message.content }}{% endif %}
{%- if message.role == "assistant" %}{% set text = message.content.split("</think>")[-1] %}
{{- "A" + text }}{% for call in message.tool_calls or [] %}<{{ call.function.name }}>{% endfor %}{% endif %}{% endfor %}"""
BY_NULL = """\
{%- for message in messages %}{% if message['role'] == "assistant" and message['content'] is none %}
{{- "<｜tool▁calls▁begin｜>" }}{% for call in message['tool_calls'] %}<{{ call['function']['name'] }}>{% endfor %}
{%- else %}{{ message['content'] }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["absent", "null"])
def test_a_turn_of_calls_without_content(content: dict) -> None:
    """As templates of Qwen 3 and Granite want it, and as those of DeepSeek do."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", **content, "tool_calls": [CALL]}]
    assert ChatTemplate(WITHOUT_CONTENT, special_tokens={}).render(messages) == "UHiA<get_weather>"
    assert ChatTemplate(BY_NULL, special_tokens={}).render(messages) == "Hi<｜tool▁calls▁begin｜><get_weather>"


def test_a_message_is_continued() -> None:
    template = ChatTemplate(QWEN, special_tokens={})
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure, "}]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSure, "
    assert template.render(messages, continue_final_message=True) == text
    trimmed = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nSure,"
    assert ChatTemplate(CODER, special_tokens={}).render(messages, continue_final_message=True) == trimmed


DEEPSEEK = """{%- for message in messages %}{%- for tool in message.tool_calls or [] %}
{{- '<call>' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + '\\n```' }}
{%- endfor %}{%- endfor %}"""


def test_templates_that_append_arguments_to_a_text() -> None:
    text = ChatTemplate(DEEPSEEK, special_tokens={}).render(as_texts(CONVERSATIONS["call"]))
    assert text == '<call>get_weather\n```json\n{"city": "Köln <3", "n": [1, null]}\n```'


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        ([], {}, "at least one message"),
        (call("{"), {}, r"messages\[0\].tool_calls\[0\].function.arguments must be JSON"),
        (call("[1]"), {}, r"function.arguments must be a JSON object, got \[1\]"),
        (call(5), {}, r"function.arguments must be a JSON object, got 5"),
        ([{"role": "assistant", "tool_calls": ["x"]}], {}, r"tool_calls\[0\] must be an object, got 'x'"),
        (
            CONVERSATIONS["question"],
            {"template_kwargs": {"messages": []}},
            "must not set what the engine sets, got messages",
        ),
        (CONVERSATIONS["question"], {"template_kwargs": {"bos_token": "x", "tools": []}}, "got bos_token, tools"),
        (
            CONVERSATIONS["question"],
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt and continue_final_message must not both be true",
        ),
        (call("{}"), {"continue_final_message": True}, "a last message with a text as its content"),
    ],
)
def test_what_is_refused(messages: list, options: dict, error: str) -> None:
    with pytest.raises(ChatTemplateError, match=error):
        ChatTemplate(QWEN, special_tokens={"bos_token": "<s>"}).render(messages, **options)


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    for source in ("{{ messages[0].role }}", "{{ messages[0].content[:1] }}", "{{ messages[0].content | upper }}"):
        with pytest.raises(ChatTemplateError, match="a chat template that repeats the last message"):
            ChatTemplate(source, special_tokens={}).render(CONVERSATIONS["question"], continue_final_message=True)


def test_calls_without_arguments() -> None:
    template = ChatTemplate(QWEN, special_tokens={})
    assert '"arguments": {}}' in template.render(call(""))
    assert '"arguments": {}}' in template.render(call({}))


def test_a_template_for_tools(folder: Path, tmp_path: Path, reference) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    messages = CONVERSATIONS["question"]
    assert tokenizer.render_chat(messages) == "plain"
    assert tokenizer.render_chat(messages, tools=TOOLS) == "1 tools"
    assert (
        tokenizer.encode_chat(messages, tools=TOOLS).tolist()
        == tokenizer.encode("1 tools", add_special_tokens=False).tolist()
    )
