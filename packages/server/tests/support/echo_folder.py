"""A model folder without weights, for an engine with an echo model."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

EOS_ID = 257
EOS = "<|end|>"
TOOLS_TEMPLATE = """\
{%- if tools %}{{ '<|start|>tools\\n' + tools | tojson + '<|end|>' }}{% endif %}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '\\n' }}
    {%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
    {{- message['content'] }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {{- '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}{{ '<think>\\n' }}{% endif %}
{%- endif %}"""
"""Shows tools, calls, results and reasoning; begins with reasoning if `enable_thinking` is true."""
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message['content'] == 'refuse me' %}{{ raise_exception('I refuse') }}{% endif %}
    {{- '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""


def write_echo_folder(
    folder: Path, *, chat_template: str = CHAT_TEMPLATE, template: str | dict[str, Any] | None = None
) -> None:
    """Write a model folder without weights: a byte-level tokenizer, a chat template, greedy sampling by default.

    Args:
        folder: exists.
        chat_template: Jinja.
        template: a response template, or the name of one that ships with the engine; None: answers are plain text.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(code) for code in (*printable, *range(256, 512 - len(printable)))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": id, "content": text, **flags} for id, text in ((EOS_ID - 1, "<|start|>"), (EOS_ID, EOS))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {piece: id for id, piece in enumerate(alphabet)}, "merges": []},
    }
    settings: dict[str, Any] = {"bos_token": "<|start|>", "eos_token": EOS, "chat_template": chat_template}
    if template is not None:
        if isinstance(template, str):
            template = json.loads(
                (files("pagewood.engine.text.response") / "templates" / f"{template}.json").read_text()
            )
        settings["response_template"] = {**cast("dict[str, Any]", template), "start_anchor": "<|start|>assistant\n"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"do_sample": false}')
