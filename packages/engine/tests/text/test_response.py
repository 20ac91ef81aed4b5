"""Answers are divided into the same parts however they come, and into those that transformers finds."""

# pyright: basic
# ruff: noqa: E501, RUF001 (marks of models)
from __future__ import annotations

import json
import random
from functools import cache
from importlib import resources
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from pagewood.engine.text import Part, ResponseParser, ResponseTemplate
from responses.formats import FORMATS
from responses.writers import WRITERS, Message

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "limit": {"type": ["number", "null"]},
        "where": {"type": "object"},
        "tags": {"anyOf": [{"type": "array"}, {"type": "null"}]},
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
NAMES = ResponseTemplate.names()
ALL = {"city": "Rome", "days": 3, "exact": True, "limit": 1.5, "where": {"x": [1, {"y": None}]}, "tags": ["a", "{}"]}
MESSAGES = {
    "content": Message("Hello, world.\n\nIt is < 5, or <b>6</b> {not JSON} [1]."),
    "reasoning": Message("Hello.", "First,\n  then."),
    "one call": Message("", "", [("get_weather", {"city": "Rome"})]),
    "several calls": Message("", "Two.", [("get_weather", ALL), ("now", {}), ("get_weather", {"days": -2})]),
    "content and a call": Message("Let me look.", "", [("get_weather", {"city": "Köln 🎉 “x”\u2028", "limit": None})]),
    "marks in strings": Message(
        "", "", [("get_weather", {"city": 'a </tool_call> b <tool_call> "q" \\d {[( \n <|im_end|> \t\'', "days": 1})]
    ),
    "ends in strings": Message(
        "",
        "",
        [
            (
                "get_weather",
                {
                    "city": "a </arg_value> b</parameter>\nc </｜DSML｜parameter><d </arg_value>",
                    "where": {
                        "x": '\\"</arg_value></tool_call>',
                        "z": ["\n</parameter>\n</function>", "\\"],
                    },
                    "tags": ['</｜DSML｜parameter>\n</｜DSML｜invoke>"', "</arg_value><arg_key>x</arg_key>"],
                    "days": 1,
                },
            )
        ],
    ),
    "unknown": Message("", "", [("sub.way", {"x": "7", "y": "[1]"})]),
    "markup": Message("Use `a</b>` <think> or\n\n```\n<tool\n```"),
}


def can_say(name: str, key: str) -> bool:
    """Some write no reasoning, or content or calls; calls without a mark must be known; marks are not text."""
    message, form = MESSAGES[key], FORMATS[name]
    if (message.reasoning and not form.reasoning_ends) or (message.content and message.calls and form.is_either):
        return False
    if key == "unknown" and name == "llama4":
        return False
    return key != "markup" or "</think>" not in form.reasoning_ends


UNION: list[Any] = [
    {
        "name": "now",
        "parameters": {"properties": {"a": {"type": ["string", "integer"]}, "b": {"type": ["string", "object"]}}},
    }
]
CASES = [(name, key) for name in NAMES for key in MESSAGES if can_say(name, key)]
MALFORMED = {
    "hermes": [
        '<tool_call>{"name": "now", oops}</tool_call> after',
        '<tool_call>\n{"name": "now", "arguments": {"a": 1, "b": [2, "c\\u00',
        '<tool_call>{"name": "now", "arguments": {"a": tru',
        '<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>\n<tool_call>{"arguments": {}, "name": "now"}',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>tail',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": 1 2}}</tool_call>tail <tool_call>{"name": "now"}</tool_call>',
        "<think>never closed <tool_call>",
        "  <tool_call",
        '<tool_call>{"name": "now", "arguments": {"s": "a\nb\x01\\q\\ud83d\\ude00\\ud83d", }}</tool_call>',
    ],
    "qwen3_coder": [
        "<tool_call><function=now><parameter=a>5",
        "<tool_call><function=now>junk<parameter=a>\n5\n</parameter></function>tail",
        "<tool_call><function=>",
        "<function=get_weather><parameter=days>x</parameter><parameter=where>{</parameter></function>",
    ],
    "llama3": ['{"name": "nothing", "parameters": {}}', '{"city": 5}', '{"name": "now"', "<|python_tag|>print(1)"],
    "llama4": ["[now(", "[now(a=1", "[1, 2]", "[now(a=[1, 'x", "[nothing()]", "[now(a=b c, d='e\"')] tail", "[now(1)]"],
    "mistral": [
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"x": 1',
        "[TOOL_CALLS]now",
        '[TOOL_CALLS]now {"a": 1',
    ],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>x", '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": "b'],
    "deepseek_v3_2": [
        "<｜DSML｜function_calls>x",
        '<｜DSML｜invoke name="now"><｜DSML｜parameter name="a" string="false">5',
        '<｜DSML｜invoke name="now"><｜DSML｜parameter name="a" string="true">5',
        '<｜DSML｜invoke name="now"><｜DSML｜parameter name="a" string="false">{oops</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b">6</｜DSML｜parameter></｜DSML｜invoke>',
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="days" string="true">5'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="x" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls> tail",
    ],
    "minimax_m2": [
        "<minimax:tool_call>\n<invoke",
        '<minimax:tool_call><invoke name="now"><parameter name="a">5',
        '<invoke name="now">junk<parameter name="a">5</parameter></invoke></minimax:tool_call>tail',
        '<invoke name="get_weather"><parameter name="days">x</parameter></invoke><invoke name="now"></invoke>',
    ],
    "kimi_k2": ["<|tool_calls_section_begin|>x", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>[]"],
    "glm_4_7": [
        "<tool_call>now<arg_key>a</arg_key><arg_value>b</arg_value> c</arg_value>",
        "<tool_call>get_weather<arg_key>where</arg_key><arg_value>{oops </arg_value> <arg_key>days</arg_key><arg_value>x y"
        "</arg_value></tool_call>",
        '<tool_call>get_weather<arg_key>where</arg_key><arg_value>{"x": "</arg_value></tool_call>',
        "<tool_call>now<arg_key>a</arg_key><arg_value>b</arg_value> \n ",
        "<tool_call>now<arg_key>a</arg_key><arg_value>b</arg_value><arg_k",
    ],
    "glm_4": ["<tool_call>now<arg_key>a</arg_key><arg_value>b", "<tool_call>{}</tool_call>", "<tool_call>now"],
    "harmony": ["plain text", "<|channel|>final", "<|channel|>commentary to=functions.now<|message|>{"],
    "gemma_4": ['<|tool_call>call:now{a:<|"|>x', "<|tool_call>call:now[", '<|tool_call>call:now{a:1,"b":{c:[tru'],
    "granite_3": [
        '<tool_call>[{"name": "now", "arguments": {}}] so',
        '<|tool_call|>{"name": "now", "arguments": {}}',
        '<|tool_call|>[{"name": "now", "arguments": {}}, {"name',
        "<|tool_call|>[]",
    ],
    "granite_3_2": [
        "Here is my thought",
        "Here's my thought process: so\nHere's my response: <b>",
        "Here is my response: x",
    ],
    "granite_3_3": [
        '<think>so</think><response><|tool_call|>[{"name": "now", "arguments": {}}]</response>',
        "<respons",
    ],
    "cohere_command": [
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "param',
        '<|START_ACTION|>[{"tool_name": "now"}]<|END_ACTION|>so',
        '<|START_ACTION|>[{"tool_name": "now", "parameters": {"a": 1}},\n]<|END_ACTION|>',
        "<|START_TEXT|>so<|END_TEXT|>",
        "<|START_RESPONSE|>so",
    ],
    "phi_4_mini": ['<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>so', "<|tool_call|>[<|/tool_call|>"],
    "functools": [
        "import functools\nfunctools.reduce(f, x)",
        'functools [{"name": "now", "arguments": {}}]',
        "functool",
    ],
    "seed_oss": [
        "<seed:think><seed:cot_budget_reflect>none</seed:cot_budget_reflect>\n</seed:think>so",
        "<seed:tool_call>\n<function=now>\n<parameter=a>\n5\n</parameter>\n</function>\n</seed:tool_call>so",
        "<seed:tool_call><function=now><parameter=a>5",
    ],
    "ernie_4_5": ["so</response>", '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<response>\nso'],
    "hunyuan": [
        "<answer>\na <b>\n</answer>",
        "<answer><tool_calls>[1]</tool_calls></answer>",
        '<tool_calls>[{"name": "now", "arguments": "{\\"a\\": 1}"}]',
    ],
    "nemotron": ['<TOOLCALL>[{"name": "now", "arguments": {"a": [}]</TOOLCALL>so', "<TOOLCALL>{}</TOOLCALL>"],
    "olmo_3": [
        "<function_calls>now(a=1)\nnow(",
        "<function_calls>now(a=1) is it</function_calls>so",
        "<function_calls>[now()]</function_calls>",
        "<function_calls></function_calls>",
        "<function_calls>\nnow(a=true, b=None)\n\nnow()\n</function_calls>so",
        "<function_calls>now(a=1), now()</function_calls>",
    ],
    "apertus": [
        '<|tools_prefix|>[{"now": {}, "x": 1}]<|tools_suffix|>so',
        "<|tools_prefix|>[{}]<|tools_suffix|>so",
        '<|tools_prefix|>[{"now": {"a": tru',
        '<|tools_prefix|>[{"now": "{\\"a\\": 1}"}, {"now": null}]',
        '<|tools_prefix|>[{"now": {"a": 1}}, {"now": [1]}]<|tools_suffix|>so',
        '<|tools_prefix|>{"now": {}}<|tools_suffix|>so',
        '<|tools_prefix|>[{"now": {"a": 1}]<|tools_suffix|>so',
    ],
}


def joined(parts: list[Part]) -> list[tuple[str, str, int, str]]:
    """Return parts with neighbours of the same kind and index joined."""
    found: list[list[Any]] = []
    for part in parts:
        if found and part.kind != "tool_call" and found[-1][0] == part.kind and found[-1][2] == part.index:
            found[-1][1] += part.text
        else:
            found.append([part.kind, part.text, part.index, part.id])
    return [tuple(item) for item in found]


def parse(name: str, pieces: list[str], *, tools: list = TOOLS, prompt_tail: str = "") -> list[tuple]:
    parser = ResponseParser(ResponseTemplate.named(name), tools=tools, prompt_tail=prompt_tail)
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


def summary(parts: list[tuple]) -> tuple[str, str, list[tuple[str, dict]]]:
    """Return content, reasoning and complete calls."""
    texts = ["".join(text for kind, text, *_ in parts if kind == one) for one in ("content", "reasoning")]
    calls: list[list[Any]] = []
    inside = False
    for kind, text, index, _ in parts:
        if kind in ("tool_call", "arguments", "call_end"):
            assert index == len(calls) - (kind != "tool_call")
            assert kind == "tool_call" or inside, "the parts of a call stand together"
        inside = kind in ("tool_call", "arguments")
        if kind == "tool_call":
            calls.append([text, "", False])
        elif kind == "arguments":
            calls[index][1] += text
        elif kind == "call_end":
            calls[index][2] = True
    complete = [(name, json.loads(arguments)) for name, arguments, is_complete in calls if is_complete]
    assert all(isinstance(arguments, dict) for _, arguments in complete)
    return texts[0], texts[1], complete


@pytest.mark.parametrize(("name", "key"), CASES)
def test_messages_come_back(name: str, key: str) -> None:
    message = MESSAGES[key]
    content, reasoning, calls = summary(parse(name, [WRITERS[name](message)]))
    assert (content, reasoning) == (message.content, message.reasoning)
    assert calls == message.calls


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "minimax_m2", "glm_4", "glm_4_7"])
@pytest.mark.parametrize("value", ["7", "7 {mark} x", '{{"x": "{mark}"}}', '{{"x": 1}}', 'say "{mark}'])
def test_an_end_mark_in_a_value_of_several_types(name: str, value: str) -> None:
    """A text ends where something follows that can; an object does not end in its strings."""
    mark = "</arg_value>" if name.startswith("glm") else "</parameter>"
    text = value.format(mark=mark)
    written = WRITERS[name](Message("", "", [("now", {"a": text, "b": text})]))
    ((_, arguments),) = summary(parse(name, list(written), tools=UNION))[2]
    is_object = text.startswith("{")
    assert arguments == {"a": 7 if text == "7" else text, "b": json.loads(text) if is_object else text}


def cuts_of(text: str, *, every: int) -> list[list[str]]:
    return [list(text), *([text[:cut], text[cut:]] for cut in range(0, len(text) + 1, every))]


def check_cuts(name: str, text: str, *, every: int) -> None:
    whole = parse(name, [text])
    for pieces in cuts_of(text, every=every):
        assert parse(name, pieces) == whole, pieces
    summary(whole)  # arguments are JSON


@pytest.mark.parametrize(("name", "key"), CASES)
def test_cuts_do_not_change_messages(name: str, key: str) -> None:
    check_cuts(name, WRITERS[name](MESSAGES[key]), every=7)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), CASES)
def test_every_cut(name: str, key: str) -> None:
    check_cuts(name, WRITERS[name](MESSAGES[key]), every=1)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in MALFORMED for text in MALFORMED[name]])
def test_cuts_do_not_change_malformed_answers(name: str, text: str) -> None:
    check_cuts(name, text, every=1)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(NAMES), st.dictionaries(st.text("xyz", min_size=1, max_size=3), VALUES, max_size=3), st.randoms()
)
def test_random_arguments_in_random_pieces(name: str, arguments: dict, draws: random.Random) -> None:
    if not FORMATS[name].is_typed:
        arguments = {key: json.dumps(value) for key, value in arguments.items()}
    text = WRITERS[name](Message("", "", [("now", arguments)]))
    pieces = []
    while text:
        size = draws.randint(1, 12)
        pieces.append(text[:size])
        text = text[size:]
    assert summary(parse(name, pieces)) == ("", "", [("now", arguments)])


ALPHABET = ["<tool_call>", "</tool_call>", '{"name": "now", "arguments": {', "}", '"a": ', '"x', '"', ", ", "1", "[", "]",
            "\\", "\n", "<think>", "</think>", "text", "<", "<|im_end|>", "<function=now>", "<parameter=a>", "</parameter>",
            "</function>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "now(", "a=", ")", "[TOOL_CALLS]", "now",
            "<|tool_call>call:now", '<|"|>', "<tool_call|>", "{", ":", "null", "<|channel|>", "final", "<|message|>"]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), st.lists(st.sampled_from(ALPHABET), max_size=12), st.integers(0, 60))
def test_soup_is_no_error(name: str, soup: list[str], cut: int) -> None:
    text = "".join(soup)
    whole = parse(name, [text])
    summary(whole)
    assert parse(name, [text[:cut], text[cut:]]) == whole
    assert parse(name, list(text)) == whole


@cache
def as_version_1(name: str) -> dict:
    """Return a shipped template without what transformers does not know."""
    file = resources.files("pagewood.engine.text.response") / "templates" / f"{name}.json"
    spec = json.loads(file.read_text(encoding="utf-8"))
    del spec["detect"]
    fields = {key: field for key, field in spec["fields"].items() if "as" not in field}
    for field in fields.values():
        field.pop("write", None)
    return spec | {"fields": fields}


def theirs(spec: dict, text: str) -> tuple[str, str, list[tuple[str, dict]]]:
    message: Any = parse_response(text, spec, prefix="", tools=list(TOOLS))
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message.get("content", ""), message.get("reasoning_content", ""), calls


ORACLE = [
    "hermes",
    "qwen3_coder",
    "deepseek_v3",
    "deepseek_v3_2",
    "minimax_m2",
    "kimi_k2",
    "glm_4",
    "glm_4_7",
    "exaone_4",
    "harmony",
    "gemma_4",
]


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, key in CASES if name in ORACLE])
def test_equal_to_transformers(name: str, key: str) -> None:
    text = WRITERS[name](MESSAGES[key])
    if key == "marks in strings" and name in ("hermes", "glm_4", "glm_4_7", "exaone_4"):
        pytest.skip("transformers ends the section inside the string")
    if key == "ends in strings" and name not in ("deepseek_v3", "kimi_k2", "harmony", "gemma_4"):
        pytest.skip("transformers ends the value or the section inside the string")
    content, reasoning, calls = theirs(as_version_1(name), text)
    ours = summary(parse(name, [text]))
    assert (ours[0], ours[1]) == (content.strip(), reasoning)  # it counts empty sections, too
    assert ours[2] == calls


FALLBACKS = {"qwen2": "hermes", "qwen3_5": "qwen3_coder", "gemma4": "gemma_4"}


@pytest.mark.parametrize("model_type", FALLBACKS)
@pytest.mark.parametrize("key", MESSAGES)
def test_templates_of_transformers(model_type: str, key: str) -> None:
    if key in ("marks in strings", "ends in strings") and model_type != "gemma4":
        pytest.skip("transformers ends the section inside the string")
    spec = next(spec for types, spec in _RESPONSE_TEMPLATE_FALLBACKS.items() if model_type in types)
    if key == "unknown" and model_type == "gemma4":
        pytest.skip("a name with a full stop is none there")
    text = WRITERS[FALLBACKS[model_type]](MESSAGES[key]).rstrip()  # white space at the end would replace the content
    parser = ResponseParser(ResponseTemplate.from_json(spec), tools=TOOLS)
    assert summary(joined(parser.feed(text) + parser.finish())) == theirs(spec, text)


@pytest.mark.parametrize(
    ("name", "tail", "answer", "expected"),
    [
        ("hermes", "<think> in the question<|im_start|>assistant\n<think>\n", "\nso\n</think>\n\nYes", ("Yes", "so", [])),
        ("hermes", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes", ("Yes", "", [])),
        ("hermes", "<|im_start|>assistant\n", "Yes", ("Yes", "", [])),
        ("hermes", "<think>\n", "so</think>Yes", ("Yes", "so", [])),
        ("hermes", "<|im_start|>assistant\nSure, ", " I can", (" I can", "", [])),
        ("deepseek_v3", "<｜User｜>Hi<｜Assistant｜><think>\n", "so</think>Yes", ("Yes", "so", [])),
        ("deepseek_v3", "<｜User｜>Hi<｜Assistant｜></think>", "Yes", ("Yes", "", [])),
        ("deepseek_v3_2", "<｜User｜>Hi<｜Assistant｜></think>", "Yes", ("Yes", "", [])),
        ("deepseek_v3_2", "</result>\n</function_results>\n\n<think>", "so</think>Yes", ("Yes", "so", [])),
        ("minimax_m2", "[e~[\n]~b]ai\n<think>\n", "so\n</think>\n\nYes", ("Yes", "so", [])),
        ("mistral", "[INST]x[/INST][THINK]", "so[/THINK]Yes", ("Yes", "so", [])),
        ("harmony", "<|start|>assistant", "<|channel|>final<|message|>Yes", ("Yes", "", [])),
        ("granite_3_3", "<think>?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>", "Yes", ("Yes", "", [])),
        ("cohere_command", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>", "so<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>", ("Yes", "so", [])),
        ("seed_oss", "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>", "so</seed:cot_budget_reflect>\n</seed:think>Yes", ("Yes", "so</seed:cot_budget_reflect>", [])),
        ("ernie_4_5", "<|im_start|>assistant\n<think>\n", "so\n</think>\n\n<response>\nYes\n</response>\n", ("Yes", "so", [])),
        ("hunyuan", "<|startoftext|><think>?<|extra_0|><think>\n\n</think>\n", "<answer>\nYes\n</answer>", ("Yes", "", [])),
        ("olmo_3", "<|im_start|>assistant\n<think>", "so</think>Yes", ("Yes", "so", [])),
        ("apertus", "<|user_start|><|inner_prefix|>?<|user_end|><|assistant_start|>", "Yes", ("Yes", "", [])),
        ("nemotron", "<SPECIAL_11>Assistant\n<think>\n\n", "so\n</think>\n\nYes", ("Yes", "so", [])),
        ("nemotron", "<|start_header_id|>assistant<|end_header_id|>\n\n<think>\n\n</think>\n\n", "Yes", ("Yes", "", [])),
        ("phi_4_mini", "<|user|><think>?<|end|><|assistant|>", "Yes", ("Yes", "", [])),
        ("exaone_4", "[|user|]\n<think>?[|endofturn|]\n[|assistant|]\n<think>\n", "so\n</think>\n\nYes", ("Yes", "so", [])),
        ("hermes", "<think>?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>", "Yes", ("Yes", "", [])),
        ("glm_4", "<|user|>\n<think>?<|assistant|>\n<think></think>", "\nYes", ("Yes", "", [])),
        ("glm_4", "<|user|><think>?<|assistant|></think>", "Yes", ("Yes", "", [])),
        ("glm_4", "<|user|>Hi<|assistant|><think>", "so</think>Yes", ("Yes", "so", [])),
        ("llama4", "<|start_header_id|>assistant<|end_header_id|>\n\n", "[now()]", ("", "", [("now", {})])),
        ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n", '{"name": "now", "parameters": {}}', ("", "", [("now", {})])),
    ],
)  # fmt: skip
def test_the_end_of_a_prompt(name: str, tail: str, answer: str, expected: tuple) -> None:
    assert summary(parse(name, [answer], prompt_tail=tail)) == expected
    assert summary(parse(name, list(answer), prompt_tail=tail)) == expected


def test_parts_come_as_soon_as_they_can() -> None:
    parser = ResponseParser(ResponseTemplate.named("hermes"), tools=TOOLS)
    said = [
        ("<think>", []),
        ("so", [Part("reasoning", "so")]),
        (" it", [Part("reasoning", " it")]),
        ("\n</think>\n\nI ", [Part("content", "I")]),
        ("am ", [Part("content", " am")]),
        ("<b>", [Part("content", " <b>")]),
        ("\n<tool", []),
        ('_call>\n{"name": "now", ', []),
        ('"arguments": {', [Part("tool_call", "now"), Part("arguments", "{")]),
        ('"a": "x', [Part("arguments", '"a": "x')]),
        ("yz\\", [Part("arguments", "yz")]),
        ('n"', [Part("arguments", '\\n"')]),
        (', "b": 1', []),
        ("2", []),
        ("}", [Part("arguments", ', "b": 12}')]),
        ("}\n</tool_call>", [Part("call_end", "")]),
        (
            '<tool_call>{"name": "now"}',
            [Part("tool_call", "now", 1), Part("arguments", "{}", 1), Part("call_end", "", 1)],
        ),
    ]
    for text, parts in said:
        assert parser.feed(text) == parts, text
    assert parser.finish() == []
    assert parser.finish() == []
    with pytest.raises(RuntimeError, match="after finish"):
        parser.feed("x")


def test_texts_of_parameters_stream() -> None:
    parser = ResponseParser(ResponseTemplate.named("qwen3_coder"), tools=TOOLS)
    assert parser.feed("<function=get_weather>") == [Part("tool_call", "get_weather"), Part("arguments", "{")]
    assert parser.feed("<parameter=city>\nNew ") == [Part("arguments", '"city": "New ')]
    assert parser.feed('"York"\n') == [Part("arguments", '\\"York\\"')]
    assert parser.feed("</parameter><parameter=days>1") == [Part("arguments", '"')]
    assert parser.feed("2</parameter>") == [Part("arguments", ', "days": 12')]


def test_what_malformed_answers_give() -> None:
    expected = {
        ("hermes", 0): ('<tool_call>{"name": "now", oops}</tool_call> after', "", []),
        ("hermes", 1): ("", "", []),
        ("hermes", 2): ("", "", []),
        ("hermes", 3): ("", "", [("now", {"a": 1}), ("now", {})]),
        ("hermes", 5): ('<tool_call>{"arguments": {"a": 1}}</tool_call>tail', "", []),
        ("hermes", 7): ("", "", [("now", {"a": 1})]),
        ("hermes", 8): ("2}}\ntail", "", [("now", {})]),
        ("hermes", 9): ("", "never closed <tool_call>", []),
        ("hermes", 10): ("<tool_call", "", []),
        ("hermes", 11): ("", "", [("now", {"s": "a\nb\x01\\q😀\ufffd"})]),
        ("qwen3_coder", 0): ("", "", []),
        ("qwen3_coder", 1): ("junktail", "", [("now", {"a": "5"})]),
        ("qwen3_coder", 3): ("", "", [("get_weather", {"days": "x", "where": "{"})]),
        ("llama3", 0): ('{"name": "nothing", "parameters": {}}', "", []),
        ("llama3", 1): ('{"city": 5}', "", []),
        ("llama3", 3): ("<|python_tag|>print(1)", "", []),
        ("llama4", 1): ("", "", []),
        ("llama4", 2): ("[1, 2]", "", []),
        ("llama4", 5): ("tail", "", [("now", {"a": "b c", "d": 'e"'})]),
        ("mistral", 0): ('{"x": 1', "", [("now", {})]),
        ("deepseek_v3_2", 1): ("", "", []),
        ("deepseek_v3_2", 2): ("", "", []),
        ("deepseek_v3_2", 4): ("tail", "", [("get_weather", {"days": "5", "x": [1]})]),
        ("minimax_m2", 1): ("", "", []),
        ("minimax_m2", 3): ("", "", [("get_weather", {"days": "x"}), ("now", {})]),
        ("glm_4", 1): ("<tool_call>{}</tool_call>", "", []),
        ("harmony", 0): ("plain text", "", []),
        ("gemma_4", 1): ("<|tool_call>call:now[", "", []),
        ("granite_3", 0): ("so", "", [("now", {})]),
        ("granite_3", 1): ("", "", [("now", {})]),
        ("granite_3", 3): ("<|tool_call|>[]", "", []),
        ("granite_3_2", 1): ("<b>", "so", []),
        ("granite_3_2", 2): ("Here is my response: x", "", []),
        ("granite_3_3", 0): ("", "so", [("now", {})]),
        ("cohere_command", 1): ("so", "", [("now", {})]),
        ("cohere_command", 3): ("so", "", []),
        ("phi_4_mini", 0): ("so", "", [("now", {})]),
        ("functools", 0): ("import functools\nfunctools.reduce(f, x)", "", []),
        ("functools", 1): ("", "", [("now", {})]),
        ("seed_oss", 1): ("so", "", [("now", {"a": "\n5\n"})]),
        ("ernie_4_5", 1): ("so", "", [("now", {})]),
        ("hunyuan", 0): ("a <b>", "", []),
        ("hunyuan", 2): ("", "", [("now", {"a": 1})]),
        ("nemotron", 1): ("<TOOLCALL>{}</TOOLCALL>", "", []),
        ("olmo_3", 0): ("now(", "", [("now", {"a": 1})]),
        ("olmo_3", 1): ("is it\nso", "", [("now", {"a": 1})]),
        ("olmo_3", 2): ("<function_calls>[now()]</function_calls>", "", []),
        ("olmo_3", 4): ("so", "", [("now", {"a": True, "b": None}), ("now", {})]),
        ("apertus", 1): ("<|tools_prefix|>[{}]<|tools_suffix|>so", "", []),
        ("apertus", 3): ("", "", [("now", {"a": 1}), ("now", {})]),
        ("apertus", 5): ("so", "", [("now", {})]),
        ("apertus", 6): ("]\nso", "", []),
    }
    for (name, index), result in expected.items():
        assert summary(parse(name, [MALFORMED[name][index]])) == result, MALFORMED[name][index]


def test_bare_calls_need_tools() -> None:
    text = '{"name": "now", "parameters": {"a": 1}}'
    assert summary(parse("llama3", [text])) == ("", "", [("now", {"a": 1})])
    assert summary(parse("llama3", [text], tools=[])) == (text, "", [])
    assert summary(parse("llama3", [f"See {text}"])) == (f"See {text}", "", [])


def test_ids_of_calls() -> None:
    two = '[TOOL_CALLS][{"id": "a1", "name": "now", "arguments": {}}, {"name": "now", "arguments": {}, "id": "b2"}]'
    assert [part for part in parse("mistral", [two]) if part[0] == "tool_call"] == [
        ("tool_call", "now", 0, "a1"),
        ("tool_call", "now", 1, ""),  # it comes too late
    ]
    cohere = WRITERS["cohere_command"](MESSAGES["several calls"])
    assert [part[3] for part in parse("cohere_command", [cohere]) if part[0] == "tool_call"] == ["0", "1", "2"]
    kimi = WRITERS["kimi_k2"](MESSAGES["one call"])
    assert parse("kimi_k2", [kimi])[0] == ("tool_call", "get_weather", 0, "functions.get_weather:0")


def test_parts_can_be_encoded() -> None:
    parts = parse("hermes", ['<tool_call>{"name": "now", "arguments": {"a": "\\ud800 \ud800"}}</tool_call>\udfff'])
    for kind, text, index, id_ in parts[:-1]:
        assert msgspec.json.decode(msgspec.json.encode(Part(kind, text, index, id_)), type=Part).text == text
    assert summary(parts)[2] == [("now", {"a": "\ufffd ?"})]


def test_long_sections_are_given_up() -> None:
    text = f'<tool_call>{{"arguments": {{"a": "{"x" * 70_000}"}}, "name": "now"}}</tool_call>'
    assert summary(parse("hermes", [text])) == (text, "", [])
    pieces = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    parser = ResponseParser(ResponseTemplate.named("hermes"))
    given = [parser.feed(piece) for piece in pieces]
    assert given[60] == [] != given[68]
    for name, mark in (("hermes", "<tool_call>"), ("apertus", "<|tools_prefix|>[")):
        key = f'{mark}{{"{"x" * 70_000}'
        assert ResponseParser(ResponseTemplate.named(name)).feed(key) == [Part("content", key)]
    deep = f'<tool_call>{{"name": "now", "arguments": {{"a": {"[" * 100_000}'
    assert [part[0] for part in parse("hermes", [deep])] == ["tool_call", "arguments", "content"]
