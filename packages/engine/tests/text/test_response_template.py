"""Templates: what is refused, where they are found, and expressions that would take long elsewhere."""

# pyright: basic
# ruff: noqa: E501 (marks of models)
from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import regex

from pagewood.engine.text import ResponseParser, ResponseTemplate
from pagewood.engine.text.response import expressions
from pagewood.engine.text.response.expressions import Expression
from responses.formats import FORMATS

CALL = {"open": "<c>", "close": "</c>", "content": "json", "transform": {"function": "{content}"}}
XML = {
    "open_pattern": "<c (?P<name>[^>]+)>",
    "close": "</c>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<p (?P<key>\w+)>(?P<value>.*?)</p>"},
    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
}


def template(**fields: Any) -> dict[str, Any]:
    return {"start_anchor": "A", "fields": fields}


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ([], "response_template must be a JSON object"),
    "version": ({"version": 2, "start_anchor": "A", "fields": {}}, "version must be 1, got 2"),
    "unknown key": ({"start_anchor": "A", "fields": {"content": {}}, "x": 1}, "keys that are known, got 'x'"),
    "unknown key of a field": (template(content={"closes": "x"}), "fields.content must have only keys that are known"),
    "unknown argument": (template(content={"content_args": {"x": 1}}), "content_args must have only keys"),
    "no fields": ({"start_anchor": "A", "fields": {}}, "must hold 1 to 32 fields, got 0"),
    "no anchor": ({"fields": {"content": {}}}, "must have a start_anchor"),
    "two anchors": (template(content={}) | {"start_anchor_pattern": "A"}, "must not have both"),
    "empty literal": (template(content={"close": ""}), "fields.content.close must be a text"),
    "empty list": (template(content={"close": []}), "fields.content.close must be a text"),
    "no text": (template(content={"close": 5}), "fields.content.close must be a text"),
    "two outside": (template(content={}, thinking={"close": "x"}), "at most one field may lack an open"),
    "content": (template(content={"content": "json"}), "content must be one of text, int, float, bool"),
    "content of calls": (template(tool_calls={**CALL, "content": "yaml"}), "must be one of json, xml-inline"),
    "join": (template(content={"join": "x"}), "needs repeats: true"),
    "flag": (template(content={"repeats": 1}), "fields.content.repeats must be true or false"),
    "transform of content": (template(content={"transform": "{content}"}), "supported for tool_calls only"),
    "no close": (template(tool_calls={k: v for k, v in XML.items() if k != "close"}), "must have a close"),
    "no open": (template(tool_calls={**CALL, "open": "<c>"} | {"open": None}), "tool_calls.open must be a text"),
    "no name": (template(tool_calls={**XML, "transform": {"function": {}}}), "must be a placeholder"),
    "text in a transform": (
        template(tool_calls={**CALL, "transform": {"function": {"name": "x{content}", "arguments": "{content}"}}}),
        "must be a placeholder such as {content}",
    ),
    "other transform": (
        template(tool_calls={**CALL, "transform": {"function": {"name": "{x}", "arguments": "{content}"}}}),
        "must name the content or a group",
    ),
    "no tag_pattern": (template(tool_calls={**XML, "content_args": {}}), "tag_pattern must be a regular expression"),
    "no key": (template(tool_calls={**XML, "content_args": {"tag_pattern": "<p>"}}), "a group named key"),
    "lookahead": (template(content={"close_pattern": "a(?=b)"}), "a group of another kind at 1"),
    "empty match": (template(content={"close_pattern": "a*"}), "must match at least one character"),
    "wide match": (template(content={"close_pattern": "((ab)+c)+"}), "must match at most 4096 characters"),
    "large": (template(content={"close_pattern": "a" * 1025}), "at most 1024 characters"),
    "unbalanced": (template(content={"close_pattern": "(a"}), "an unbalanced parenthesis"),
    "open class": (template(content={"close_pattern": "[a"}), "without an end"),
    "escape": (template(content={"close_pattern": r"a\b"}), r"the escape \b"),
    "transform of keys": (
        template(tool_calls={**CALL, "content_args": {"name_as_key": True}}),
        "tool_calls must have no transform and no groups, because name_as_key says where names are",
    ),
    "bare lines": (
        template(tool_calls={"bare": True, "content": "pythonic", "content_args": {"in_lines": True}}),
        "tool_calls must not be bare",
    ),
    "lines of JSON": (
        template(tool_calls={**CALL, "content_args": {"in_lines": True}}),
        "content_args must have only keys",
    ),
    "flag of arguments": (
        template(tool_calls={"open": "<c>", "content": "pythonic", "content_args": {"in_lines": 1}}),
        "content_args.in_lines must be true or false, got 1",
    ),
    "write": (template(tool_calls={**CALL, "write": {"x": ""}}), "tool_calls.write must have only keys"),
    "detect": (template(content={}) | {"detect": {"chat_template": "x"}}, "must be a list of lists"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        ResponseTemplate.from_json(value)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"must be one of apertus, .*, got 'x'"):
        ResponseTemplate.named("x")


def calls(spec: dict[str, Any], text: str) -> list[tuple[str, Any]]:
    parser = ResponseParser(ResponseTemplate.from_json(spec))
    parts = [*parser.feed(text), *parser.finish()]
    names = [part.text for part in parts if part.kind == "tool_call"]
    return [
        (name, json.loads("".join(part.text for part in parts if part.kind == "arguments" and part.index == index)))
        for index, name in enumerate(names)
    ]


def test_parameters_that_are_read_at_the_end() -> None:
    merged = {**XML, "content_args": {**XML["content_args"], "merge_duplicates": True}}
    text = "<c f><p a>1</p><p b>2</p><p a>3</p></c>"
    assert calls(template(tool_calls=merged), text) == [("f", {"a": ["1", "3"], "b": "2"})]
    typed = {"tag_pattern": r"<p (?P<key>\w+)>(?P<value>.*?)</p>", "value_parser": {"name": "json"}}
    assert calls(template(tool_calls={**XML, "content_args": typed}), text) == [("f", {"a": 3, "b": 2})]
    other = {"tag_pattern": r"(?P<key>\w+)='(?P<value>[^']*)'"}
    assert calls(template(tool_calls={**XML, "content_args": other}), "<c f>a='1' b='x'</c>") == [
        ("f", {"a": "1", "b": "x"})
    ]
    lines = {**XML, "content": "kv-lines", "content_args": {"kv_sep": "="}}
    assert calls(template(tool_calls=lines), "<c f>\na = 1\nno pair\nb=x=y\n</c>") == [("f", {"a": "1", "b": "x=y"})]


def test_fields_of_other_names_are_text() -> None:
    spec = template(citations={"open": "<q>", "close": "</q>", "content": "json"}, content={})
    parser = ResponseParser(ResponseTemplate.from_json(spec))
    assert [part.text for part in [*parser.feed("a <q>1</q>"), *parser.finish()]] == ["a <q>1</q>"]


def test_spaces_are_kept_where_the_template_says_so() -> None:
    spec = template(
        reasoning={"open": "<t>", "close": "</t>", "content_args": {"strip": False}},
        content={"content_args": {"strip": False}, "repeats": True, "join": "|"},
    )
    parser = ResponseParser(ResponseTemplate.from_json(spec))
    parts = [*parser.feed(" a <t> b\n</t> c "), *parser.finish()]
    assert [(part.kind, part.text) for part in parts] == [
        ("content", " a "),
        ("reasoning", " b\n"),
        ("content", "| c "),
    ]


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ResponseTemplate.names())
def test_a_chat_template_shows_the_format(tmp_path: Path, name: str) -> None:
    write(tmp_path, tokenizer_config={"chat_template": FORMATS[name].chat_template}, config={"model_type": "qwen2"})
    assert ResponseTemplate.from_folder(tmp_path) is ResponseTemplate.named(name)
    write(tmp_path, tokenizer_config={"chat_template": [{"name": "default", "template": FORMATS[name].chat_template}]})
    assert ResponseTemplate.from_folder(tmp_path) is ResponseTemplate.named(name)
    write(tmp_path, tokenizer_config={})
    (tmp_path / "chat_template.jinja").write_text(FORMATS[name].chat_template, encoding="utf-8")
    assert ResponseTemplate.from_folder(tmp_path) is ResponseTemplate.named(name)


COVERED = {
    "Granite 4": ("hermes", '<|start_of_role|>system<|end_of_role|> <tool_call>\\n{"name": <function-name>'),
    "EXAONE 4": ("exaone_4", '[|assistant|] \'[|endofturn|]\' <tool_call>{"name": "function_1" </think>'),
    "SmolLM3": ("hermes", '<|im_start|>system <tool_call>\\n{"name": <function-name> python_tools <code> </think>'),
    "GLM 4.5": ("glm_4", "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value> </think>"),
    "GLM 4.7": ("glm_4_7", "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value> </think>"),
    "Nemotron 3": ("qwen3_coder", "<|im_start|>assistant <tool_call>\\n<function=example_function_name> </think>"),
    "Ministral 3": (
        "mistral",
        "[SYSTEM_PROMPT] [AVAILABLE_TOOLS] '[TOOL_CALLS]' + name + '[ARGS]' + arguments [THINK]",
    ),
    "Llama 3.2 with calls in Python": (
        "llama4",
        "<|start_header_id|>system Respond in the format [func_name1(params_name1=params_value1, params_name2=x), f()]",
    ),
}
"""Families that write as another one does, and what their chat templates have."""


@pytest.mark.parametrize("family", COVERED)
def test_families_that_another_format_covers(tmp_path: Path, family: str) -> None:
    name, chat_template = COVERED[family]
    write(tmp_path, tokenizer_config={"chat_template": chat_template})
    assert ResponseTemplate.from_folder(tmp_path) is ResponseTemplate.named(name)


MODEL_TYPES = {
    "apertus": "apertus", "cohere2": "cohere_command", "granite": "granite_3", "granitemoehybrid": "hermes",
    "exaone4": "exaone_4", "smollm3": "hermes", "hunyuan_v1_moe": "hunyuan", "olmo3": "olmo_3", "seed_oss": "seed_oss",
    "ministral3": "mistral", "glm4_moe": "glm_4", "glm4_moe_lite": "glm_4_7", "kimi_k2": "kimi_k2",
    "deepseek_v3": "deepseek_v3", "deepseek_v32": "deepseek_v3_2", "minimax_m2": "minimax_m2", "llama4": "llama4",
    "mistral3": "mistral", "hunyuan_v1_dense": "hunyuan", "qwen3_vl": "hermes", "qwen3_vl_moe": "hermes",
    "qwen2_5_vl": "hermes", "gemma4": "gemma_4", "gemma4_unified": "gemma_4", "granitemoe": "granite_3",
}  # fmt: skip


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_type_of_model_shows_the_format(tmp_path: Path, model_type: str) -> None:
    write(tmp_path, config={"model_type": model_type}, tokenizer_config={"chat_template": "plain"})
    assert ResponseTemplate.from_folder(tmp_path) is ResponseTemplate.named(MODEL_TYPES[model_type])


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert ResponseTemplate.from_folder(tmp_path) is None
    write(tmp_path, config={"model_type": "llama"}, tokenizer_config={"chat_template": "plain"})
    assert ResponseTemplate.from_folder(tmp_path) is None
    write(tmp_path, config={"model_type": "gpt_oss"})
    assert ResponseTemplate.from_folder(tmp_path) is ResponseTemplate.named("harmony")
    write(tmp_path, tokenizer_config={"response_template": template(content={"close": "x"})})
    found = ResponseTemplate.from_folder(tmp_path)
    assert found is not None
    assert [field.name for field in found.fields] == ["content"]
    write(tmp_path, response_template=template(thinking={}))
    found = ResponseTemplate.from_folder(tmp_path)
    assert found is not None
    assert [field.name for field in found.fields] == ["thinking"]
    write(tmp_path, response_template={"version": 3})
    with pytest.raises(ValueError, match=f"{tmp_path.name}.*version must be 1"):
        ResponseTemplate.from_folder(tmp_path)
    (tmp_path / "response_template.json").write_text("{")
    with pytest.raises(ValueError, match="must hold JSON"):
        ResponseTemplate.from_folder(tmp_path)


PATTERNS = [
    r"<a>", r"a|ab|abc", r"(?:a|b)+c", r"<(?P<n>[^>\n]+)>", r"\s*<a\s+b>", r"a{2,3}b?", r"(ab)*?c", r"[a-c\d]\w\.",
    r"x(?:y|\Z)", r"é+ü", r"\[a\]\(\{", r"a[^\S]b".replace(r"[^\S]", r"\S"), r"\x61\u0062\n", r"a?b?c", r"[\s]a",
]  # fmt: skip
TEXTS = ["", "<", "<a", "<a>", "ab", "abc", "abbac", "aab", "aaab", "<a\n>", "  <a   b>", "xy", "x", "éééü", "[a]({", "a1_",
         "b٣é.", "a b", "a\u3000b", "axb", "ab\n", "c", "bc", " a", "\u2003a", "<ab>c"]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_expressions_match_as_in_transformers(pattern: str) -> None:
    ours = Expression("x", expressions.parse("x", pattern))
    theirs = regex.compile(pattern.replace(r"|\Z", ""), regex.DOTALL)
    for text in TEXTS:
        expected, found = theirs.match(text), ours.match(text)
        assert (found and found.length) == (expected and expected.end()), text
        if found and expected:
            assert found.groups == expected.groupdict(), text
        longer = any(
            theirs.fullmatch(text + more) for more in ("a", "b", "c", "ab", "bc", ">", "b>", "1_.", ".", "_.", "x.")
        )
        if longer:
            assert ours.may_continue(text), text
        assert ours.may_begin(text) or not (found or longer), text
        if not theirs.fullmatch(text, partial=True):
            assert not ours.may_continue(text), text


def test_expressions_take_linear_time() -> None:
    spec = template(
        tool_calls={**CALL, "open_pattern": r"<c(?:(?:a|a)*(?:a|b)*){1,2}>"} | {"open": None},
        content={},
    )
    del spec["fields"]["tool_calls"]["open"]
    parser = ResponseParser(ResponseTemplate.from_json(spec))
    start = time.process_time()
    parser.feed(("<c" + "a" * 100) * 100)
    parser.finish()
    assert time.process_time() - start < 5  # a search that goes back would not end
