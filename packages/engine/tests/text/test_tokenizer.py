"""Parity with transformers, and errors of broken folders."""

# pyright: basic
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagewood.engine.text import ChatTemplateError, Tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be brief.  "},
        {"role": "user", "content": 'Übergröße 你好 <b>&</b> "quoted" 🎉', "name": None},
        {"role": "assistant", "content": "<|end|> is a token"},
        {"role": "user", "content": "1 + 2?\n"},
    ],
    [{"role": "user", "content": str(n)} for n in range(60)],
]


@pytest.fixture(scope="module")
def reference(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_equals_transformers(folder: Path, reference, messages: list, add_generation_prompt: bool) -> None:
    ours = Tokenizer.from_folder(folder)
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    ids = reference.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)["input_ids"]
    assert ours.render_chat(messages, add_generation_prompt=add_generation_prompt) == text
    encoded = ours.encode_chat(messages, add_generation_prompt=add_generation_prompt)
    assert encoded.dtype == np.int32
    assert encoded.tolist() == ids


@pytest.mark.parametrize("text", ["", "The fox", " a <|start|> b", "🎉é\n\n"])
def test_encode_and_decode_equal_transformers(folder: Path, reference, text: str) -> None:
    ours = Tokenizer.from_folder(folder)
    for special in (False, True):
        assert ours.encode(text, add_special_tokens=special).tolist() == reference.encode(
            text, add_special_tokens=special
        )
    ids = reference.encode(text)
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def _copy_without_template(folder: Path, target: Path) -> dict:
    (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    return config


def test_template_in_its_own_file_or_by_name(folder: Path, tmp_path: Path) -> None:
    config = _copy_without_template(folder, tmp_path)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named {{ eos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    messages = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_folder(tmp_path).render_chat(messages) == "named <|end|>"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert Tokenizer.from_folder(tmp_path).render_chat(messages) == "file <|start|>"


@pytest.mark.parametrize(
    "chat_template",
    [
        "plain {{ eos_token }}",
        [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "{{ tools | length }} listed"}],
        {"default": "named", "tool_use": "{{ tools | length }} named", "rag": "documents"},
    ],
)
@pytest.mark.parametrize("files", [{}, {"chat_template.jinja": "file"}, {"chat_template.json": "legacy"}])
@pytest.mark.parametrize("additional", [False, True])
def test_every_form_of_templates_equals_transformers(
    folder: Path, tmp_path: Path, chat_template: object, files: dict[str, str], additional: bool
) -> None:
    from transformers import AutoTokenizer

    config = _copy_without_template(folder, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": chat_template}))
    for name, text in files.items():
        (tmp_path / name).write_text(text if name.endswith("jinja") else json.dumps({"chat_template": text}))
    if additional:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} in a folder")
    reference = AutoTokenizer.from_pretrained(str(tmp_path))
    ours = Tokenizer.from_folder(tmp_path)
    messages = [{"role": "user", "content": "x"}]
    for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
        try:
            expected = reference.apply_chat_template(messages, tools=tools, tokenize=False)
        except ValueError:  # no template is the default
            with pytest.raises(ChatTemplateError, match="a chat template for tools only"):
                ours.render_chat(messages, tools=tools)
        else:
            assert ours.render_chat(messages, tools=tools) == expected


def test_the_template_of_a_processor_counts_where_there_is_no_other(folder: Path, tmp_path: Path) -> None:
    config = _copy_without_template(folder, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert Tokenizer.from_folder(tmp_path).render_chat([{"role": "user", "content": "x"}]) == "of a processor"


@pytest.mark.parametrize(
    ("chat_template", "rule"),
    [
        (5, "chat_template must be a string, a list of .*, got int"),
        (["plain"], r"chat_template\[0\] must be an object with the strings name and template, got 'plain'"),
        ([{"name": "default"}], r"chat_template\[0\] must be an object with the strings name and template"),
        ([{"name": "default", "template": ["x"]}], r"chat_template\[0\] must be an object with the strings"),
        ({"default": {"template": "x"}}, "chat_template 'default' must be a string, got dict"),
        (
            [{"name": "a", "template": "x"}, {"name": "a", "template": "y"}],
            "chat_template must have one template for each name, got two for 'a'",
        ),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_another_form_of_templates_is_named_with_its_file(
    folder: Path, tmp_path: Path, name: str, chat_template: object, rule: str
) -> None:
    _copy_without_template(folder, tmp_path)
    (tmp_path / name).write_text(json.dumps({"chat_template": chat_template}))
    with pytest.raises(ValueError, match=f"{name}: {rule}"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        ("{{ raise_exception('only users') }}", [{"role": "user"}], "only users"),
        ("{{ messages[3].content.x }}", [{"role": "user"}], "chat template failed: .*no element 3"),
        ("{{ 1 / 0 }}", [{"role": "user"}], "chat template failed: division by zero"),
        ("{{ ''.__class__.__mro__ }}", [{"role": "user"}], "chat template failed: .*unsafe"),
        ("{% set _ = messages.append(1) %}", [{"role": "user"}], "chat template failed: .*unsafe"),
        ("x", [], "at least one message"),
    ],
)
def test_all_failures_of_a_template_have_one_error_type(
    folder: Path, tmp_path: Path, template: str, messages: list, error: str
) -> None:
    _copy_without_template(folder, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ChatTemplateError, match=error):
        Tokenizer.from_folder(tmp_path).render_chat(messages)


def test_a_missing_template_is_an_error(folder: Path, tmp_path: Path) -> None:
    config = _copy_without_template(folder, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_errors_name_the_broken_file(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must hold a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    _copy_without_template(folder, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="chat template cannot be read"):
        Tokenizer.from_folder(tmp_path)
    for text, rule in (("[1]", "must hold a JSON object, got list"), ("{", "must hold JSON")):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ValueError, match=rule):
            Tokenizer.from_folder(tmp_path)


def test_truncation_and_padding_of_the_file_are_ignored(folder: Path, tmp_path: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert len(Tokenizer.from_folder(tmp_path).encode("0123456789")) == 10


def test_torch_and_transformers_are_not_imported() -> None:
    code = "import sys, pagewood.engine.text; print({'torch', 'transformers', 'numba'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_special_tokens(byte_level_tokenizer: Tokenizer) -> None:
    special = byte_level_tokenizer.special_tokens
    assert list(special) == ["<|start|>", "<|end|>"]  # and not " plain é"
    assert [byte_level_tokenizer.encode(text).tolist() for text in special] == [[token] for token in special.values()]
