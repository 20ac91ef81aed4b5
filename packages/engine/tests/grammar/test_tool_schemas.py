# pyright: basic
# ruff: noqa: RUF001 (marks of models)
# jsonschema is not typed.
"""Schemas of tools in all formats: what is allowed is read back as arguments that obey them, or they are refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammars.drawn_calls import calls_of, say
from grammars.libraries import llguidance_for
from grammars.vocabularies import embedded
from pagewood.engine.api import Grammar
from pagewood.engine.grammar.llguidance_backend import LLGuidanceBackend
from pagewood.engine.text import ResponseParser, ResponseTemplate, calls_or, tool_grammar
from responses.formats import FORMATS

NAMES = ResponseTemplate.names()
SOME = ("hermes", "mistral", "apertus")
TAGS = ("qwen3_coder", "glm_4", "glm_4_7", "minimax_m2", "deepseek_v3_2", "llama4", "gemma_4")
INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
A_OR_B = {"enum": ["a", "b"]}


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return llguidance_for(embedded())


def tool(name: str, schema: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def sampled(backend: LLGuidanceBackend, template: str, name: str, schema: Any, *, num: int) -> list[dict[str, Any]]:
    """Return the arguments of calls that the grammar allows, as they are read; each obeys the schema.

    Raises:
        ValueError: the schema or the name is refused.
    """
    tools = [tool(name, schema)]
    grammar = tool_grammar(ResponseTemplate.named(template), tools, "required", parallel=False)
    assert grammar is not None
    matcher = backend.compile(grammar).matcher(frozenset(embedded().eos_token_ids))
    found: list[dict[str, Any]] = []
    for seed in range(num):
        text = say(template, matcher.copy(), embedded(), seed)
        parser = ResponseParser(ResponseTemplate.named(template), tools=tools)
        parts = [*parser.feed(text), *parser.finish()]
        assert {part.kind for part in parts} == {"tool_call", "arguments", "call_end"}, text
        ((called, arguments),) = calls_of(parts)
        assert called == name
        assert isinstance(arguments, dict)
        jsonschema.Draft202012Validator(schema).validate(arguments)
        found.append(arguments)
    return found


def outcome(backend: LLGuidanceBackend, template: str, name: str, schema: Any, *, num: int) -> list[dict] | str:
    """Return what `sampled` does, or why it is refused."""
    try:
        return sampled(backend, template, name, schema, num=num)
    except ValueError as error:
        return str(error)


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


TWO = {"a": INTEGER, "b": A_OR_B}
ROOTS: dict[str, Any] = {
    "anyOf of required": {"type": "object", "properties": TWO, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "anyOf of objects": {"anyOf": [of(a=INTEGER), of(b={"type": "string"})]},
    "anyOf of any": {"anyOf": [{**of(a=INTEGER, b=INTEGER), "additionalProperties": False}, of(a={}, c=A_OR_B)]},
    "anyOf of types": {"anyOf": [of(a={"type": "string"}), of(a=INTEGER, b=A_OR_B), {"type": "null"}]},
    "allOf": {"allOf": [of(a=INTEGER), of(b=A_OR_B)]},
    "allOf of one key": {"allOf": [of(a=INTEGER), of(a={"maximum": 3})]},
    "allOf that is closed": {
        "allOf": [{**of(a=INTEGER), "additionalProperties": False}, {"properties": {"b": INTEGER}}]
    },
    "oneOf": {"oneOf": [of(a=INTEGER), of(b=A_OR_B)]},
    "oneOf with null": {"oneOf": [of(a=INTEGER), {"type": "null"}]},
    "$ref": {"$ref": "#/$defs/x", "$defs": {"x": of(a=INTEGER)}},
    "$ref and more": {
        "$ref": "#/$defs/x",
        "$defs": {"x": of(a=INTEGER)},
        "properties": {"b": A_OR_B},
        "required": ["b"],
    },
    "$ref to nothing": {"$ref": "#/$defs/y"},
    "types": {"type": ["object", "null"], "properties": TWO, "required": ["a"]},
    "type of no object": {"type": "array"},
    "no type": {"properties": TWO, "required": ["a"]},
    "empty": {},
    "any object": {"type": "object"},
    "required without a property": {"properties": {"a": INTEGER}, "required": ["a", "c"]},
    "required and forbidden": {"properties": {"a": INTEGER}, "required": ["c"], "additionalProperties": False},
    "property that is false": {"properties": {"a": INTEGER, "b": False}, "required": ["a"]},
    "required property that is false": {"properties": {"b": False}, "required": ["b"]},
    "minProperties": {"properties": TWO, "minProperties": 1},
    "minProperties of required": {**of(**TWO), "minProperties": 2},
    "maxProperties": {"properties": TWO, "maxProperties": 1},
    "patternProperties": {"patternProperties": {"^x": INTEGER}, "minProperties": 1},
    "propertyNames": {"properties": TWO, "propertyNames": {"const": "a"}},
    "not": {"properties": TWO, "not": {"required": ["a"]}},
    "if": {"properties": TWO, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "dependentRequired": {"properties": TWO, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"properties": TWO, "dependentSchemas": {"a": {"required": ["b"]}}},
    "additionalProperties": {"type": "object", "additionalProperties": INTEGER},
    "unevaluatedProperties": {"properties": TWO, "unevaluatedProperties": False},
    "enum": {"enum": [{"a": 1}]},
    "const": {"const": {"a": 1}},
}
"""Schemas of arguments."""
VALUES: dict[str, Any] = {
    "string": {"type": "string"},
    "any": {},
    "true": True,
    "string or null": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "types": {"type": ["string", "integer"]},
    "types and bounds": {"type": ["string", "integer"], "minLength": 2, "maxLength": 3, "minimum": 3, "maximum": 7},
    "number or a bounded string": {"type": ["string", "number"], "maxLength": 3, "minimum": 3},
    "number or string": {"type": ["number", "string"], "maxLength": 4},
    "boolean or string": {"type": ["boolean", "string"], "pattern": "^[a-z]{2,5}$"},
    "constants": {"enum": ["a", 1, None, True, 2.5]},
    "constants that read alike": {"enum": ["1", 1]},
    "constant with a mark": {"enum": ['</parameter>\n</arg_value></｜DSML｜parameter><|"|>']},
    "constants and length": {"type": "string", "enum": ["a", "bbb"], "minLength": 2},
    "constants and type": {"type": "string", "enum": ["a", 1]},
    "empty enum": {"enum": []},
    "allOf": {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]},
    "allOf of one": {"allOf": [{"$ref": "#/$defs/word"}], "description": "A word"},
    "$ref and more": {"$ref": "#/$defs/word", "maxLength": 3},
    "oneOf of constants": {"oneOf": [{"const": "a"}, {"const": "b", "title": "B"}]},
    "oneOf of strings": {"oneOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 3}]},
    "oneOf of types": {"oneOf": [{"type": "string"}, INTEGER]},
    "no type, length": {"minLength": 2, "maxLength": 3},
    "no type, minimum": {"minimum": 5},
    "not": {"type": "string", "not": {"const": "a"}},
    "if": {"type": "string", "if": {"minLength": 2}, "then": {"maxLength": 3}},
    "integer": INTEGER,
    "boolean that is true": {"const": True},
    "booleans": {"type": "boolean", "enum": [False]},
    "object": {"type": "object"},
    "object of any": {"type": "object", "additionalProperties": {"type": "integer"}},
    "object with more": {"type": "object", "required": ["z"], "additionalProperties": INTEGER},
    "object or null": {"anyOf": [of(a=INTEGER), {"type": "null"}]},
    "anyOf beside properties": {
        "type": "object",
        "properties": TWO,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "object with minProperties": {"type": "object", "minProperties": 1},
    "object with patterns": {"type": "object", "patternProperties": {"^x": INTEGER}, "minProperties": 1},
    "recursive": {"$ref": "#/$defs/tree"},
    "to the root": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    "to a property": {"$ref": "#/properties/other"},
    "encoded": {"$ref": "#/$defs/a%20b~1c"},
    "array": {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [INTEGER, {"type": "null"}], "minItems": 2, "maxItems": 2},
    "uniqueItems": {"type": "array", "items": INTEGER, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 5}},
    "multipleOf": {"type": "integer", "multipleOf": 7},
    "patterns that exclude each other": {"type": "string", "pattern": "^a", "allOf": [{"pattern": "^b"}]},
    "lengths that exclude each other": {"allOf": [{"type": "string", "minLength": 1}, {"maxLength": 0}]},
    "an alternative without a length": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 1}, A_OR_B]},
    "an alternative without a text": {"anyOf": [{"type": "string", "pattern": "^aa$", "maxLength": 1}, INTEGER]},
    "a constant that is too long": {"enum": ["ab"], "maxLength": 1},
    "anyOf and a bound": {"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 5},
    "unknown keyword": {"type": "integer", "x-order": 3},
    "unknown type": {"type": "wibble"},
    "false": False,
}
"""Schemas of a required argument."""
DEFINITIONS = {
    "word": {"type": "string", "minLength": 2},
    "a b/c": {"type": "integer", "maximum": 5, "minimum": 0},
    "tree": {
        "type": "object",
        "properties": {"x": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
        "required": ["x"],
        "additionalProperties": False,
    },
}


def with_value(value: Any) -> dict[str, Any]:
    properties = {"value": value, "other": INTEGER}
    return {"type": "object", "properties": properties, "required": ["value"], "$defs": DEFINITIONS}


CASES = [*ROOTS, *(f"value: {name}" for name in VALUES)]
ALL = [(template, case) for template in NAMES for case in CASES]
OTHERS = [template for template in NAMES if template not in TAGS]
"""Formats whose arguments are one JSON text, with the same rules, and those with the same rules as one of TAGS."""
IN_SHORT = {
    *((TAGS[(index + step) % len(TAGS)], case) for index, case in enumerate(CASES) for step in (0, 1, 3)),
    *((OTHERS[index % len(OTHERS)], case) for index, case in enumerate(CASES)),
}
"""Every case in three of the formats with rules of their own, and in one of the others, by turns.

Any two formats with rules of their own share cases: 0, 1 and 3 differ by every number below 7.
"""


@pytest.mark.parametrize(
    ("template", "case"), [pytest.param(*one, marks=[] if one in IN_SHORT else [pytest.mark.slow]) for one in ALL]
)
def test_a_schema_is_kept_or_refused_by_name(backend: LLGuidanceBackend, template: str, case: str) -> None:
    name = case.removeprefix("value: ")
    schema = ROOTS[case] if case in ROOTS else with_value(VALUES[name])
    found = outcome(backend, template, "f", schema, num=4)
    if isinstance(found, str):
        is_value = case not in ROOTS and VALUES[name] is not False
        assert found.startswith(f"tools[0] (f): parameters{'.properties.value' if is_value else ''}")
        assert (template, case) not in KEPT, found


COMMON = ["anyOf of required", "anyOf of objects", "allOf", "$ref", "$ref and more", "types", "no type", "empty"]
COMMON += ["any object", "required without a property", "minProperties of required"]
COMMON += [
    f"value: {name}"
    for name in (
        *("string", "any", "string or null", "types", "allOf of one", "constants and type", "integer", "object"),
        *(
            "boolean that is true",
            "booleans",
            "object of any",
            "object or null",
            "recursive",
            "to a property",
            "encoded",
        ),
        *("array", "multipleOf", "unknown keyword"),
    )
]
KEPT = {(template, case) for template in NAMES for case in COMMON}
"""What is not refused."""


COUNTS = {"integer": ("minimum", "maximum"), "string": ("minLength", "maxLength")}


@st.composite
def bounded(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    low, high = COUNTS[kind]
    least = draw(st.integers(0, 3))
    bounds = {low: least, high: draw(st.integers(least, 12))}
    return {"type": kind, **{key: value for key, value in bounds.items() if draw(st.booleans())}}


def leaves() -> st.SearchStrategy[Any]:
    constants = st.lists(st.sampled_from(["a", "é<", "x y", 1, 2.5, None, True, False]), min_size=1, unique=True)
    return st.one_of(
        bounded("integer"), bounded("string"), bounded("string"),
        st.sampled_from([{"type": name} for name in ("boolean", "null", "number", "string", "object")]),
        st.sampled_from([{"type": ["string", "null"]}, {"type": ["integer", "string"]}, {"$ref": "#/$defs/word"}, {}]),
        st.builds(lambda values: {"enum": values}, constants),
    )  # fmt: skip


def inner(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(part, min_size=1, max_size=2)
    return st.one_of(
        st.builds(lambda schemas: {"anyOf": schemas}, some),
        st.builds(lambda schemas: {"allOf": schemas}, some),
        st.builds(lambda schemas: {"oneOf": schemas}, some),
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, part),
        objects(part),
    )


@st.composite
def objects(draw: st.DrawFn, part: st.SearchStrategy[Any]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(["a", "$b", "c-d", "@e", "ö"]), max_size=3, unique=True))
    schema: dict[str, Any] = {"type": "object", "properties": {name: draw(part) for name in names}}
    if draw(st.booleans()):
        schema["required"] = draw(st.lists(st.sampled_from([*names, "a"]), unique=True))
    if draw(st.integers(0, 3)) == 0:
        schema["additionalProperties"] = False
    return schema


@pytest.mark.parametrize("template", [*TAGS, *SOME])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_random_schemas_are_kept_or_refused(template: str, data: st.DataObject) -> None:
    check_random_schemas(template, data)


@pytest.mark.slow
@pytest.mark.parametrize("template", NAMES)
@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_more_random_schemas_are_kept_or_refused(template: str, data: st.DataObject) -> None:
    check_random_schemas(template, data)


def check_random_schemas(template: str, data: st.DataObject) -> None:
    backend = llguidance_for(embedded())
    schema = data.draw(objects(st.recursive(leaves(), inner, max_leaves=4)))
    if data.draw(st.integers(0, 2)) == 0:
        schema = {
            key: [schema, data.draw(objects(leaves()))] for key in (data.draw(st.sampled_from(["anyOf", "allOf"])),)
        }
    schema = {**schema, "$defs": DEFINITIONS}
    found = outcome(backend, template, "f", schema, num=3)
    assert not isinstance(found, str) or found.startswith("tools[0] (f): parameters"), found


TOOL_NAMES = (
    "get weather",
    "a.b",
    "a-b",
    "$filter",
    "a/b",
    'a"b',
    "über",
    "f>",
    "</tool_call>",
    "x:1",
    "f(",
    "[f]",
    " f",
    "functions.f",
)
KEYS = (
    "$filter",
    "@type",
    "a/b",
    "a b",
    'a"b',
    "über",
    "x>",
    "x<y",
    "</arg_key>",
    "a=b",
    "a:b",
    "a,b",
    "",
    " a",
    "a.b",
    "|",
)


@pytest.mark.parametrize(
    "template", [*TAGS, *(pytest.param(one, marks=[pytest.mark.slow] * (one not in SOME)) for one in OTHERS)]
)
def test_names_are_read_back_or_refused(backend: LLGuidanceBackend, template: str) -> None:
    num_read = 0
    message = "must have a name that calls of this model can have, got"
    for name in TOOL_NAMES:
        found = outcome(backend, template, name, of(a=INTEGER), num=1)
        assert found == f"tools[0] {message} {name!r}" or not isinstance(found, str)
        num_read += not isinstance(found, str)
    for key in KEYS:
        found = outcome(backend, template, "f", of(**{key: INTEGER, "other": A_OR_B}), num=1)
        if isinstance(found, str):
            assert found == f"tools[0] (f): parameters.properties {message} {key!r}"
        else:
            assert list(found[0]) == [key, "other"]
            num_read += 1
    assert len(KEYS) // 2 < num_read < len(KEYS) + len(TOOL_NAMES)


@pytest.mark.parametrize("key", ["$filter", "@type", "a/b"])
@pytest.mark.parametrize("template", [*TAGS, *SOME])
def test_names_of_other_languages_are_read(backend: LLGuidanceBackend, template: str, key: str) -> None:
    (arguments,) = sampled(backend, template, "f", of(**{key: INTEGER}), num=1)
    assert list(arguments) == [key]


def test_names_with_special_tokens_are_refused() -> None:
    template = ResponseTemplate.named("hermes")
    with pytest.raises(ValueError, match=r"tools\[0\] must have names without special tokens of the model, got 'a<s>'"):
        tool_grammar(template, [tool("a<s>", {})], "required", special_tokens={"<s>": 5})


WRITTEN = {name: form.as_text for name, form in FORMATS.items() if not form.is_typed}
READ: dict[str, tuple[Any, dict[str, str]]] = {
    "string": (
        {"type": "string"},
        {"01234": '"01234"', "1.10": '"1.10"', "true": '"true"', "null": '"null"', "{}": '"{}"'},
    ),
    "string or number": (
        {"type": ["string", "number"]},
        {"01234": '"01234"', "1.10": '"1.10"', "1.1": "1.1", "5": "5", "-0": '"-0"', "1e3": '"1e3"', "0": "0",
         " 5": '" 5"', "123456789012345678901": "123456789012345678901"},
    ),
    "number or string": (
        {"anyOf": [{"type": "number"}, {"type": "string"}]},
        {"1.10": '"1.10"', "-2.5": "-2.5", "+5": '"+5"'},
    ),
    "integer or string": ({"type": ["integer", "string"]}, {"7": "7", "7.5": '"7.5"', "07": '"07"'}),
    "string or null": ({"type": ["string", "null"]}, {"null": "null", "None": '"None"', "nulls": '"nulls"'}),
    "string or boolean": ({"type": ["string", "boolean"]}, {"true": "true", "True": '"True"', "1": '"1"'}),
    "string or object": (
        {"type": ["string", "object"]},
        {'{"x": 1.10}': '{"x": 1.10}', "{x}": '"{x}"', "[1]": '"[1]"'},
    ),
    "number": (
        {"type": "number"},
        {"1.10": "1.10", "01234": '"01234"', "1e3": "1e3", "5": "5", "x": '"x"', "1e999": "1e999"},
    ),
    "integer": ({"type": "integer"}, {"5": "5", "5.0": "5.0", "05": '"05"', "5.5": '"5.5"'}),
    "boolean": ({"type": "boolean"}, {"True": "true", "false": "false", "1": "true"}),
    "object": ({"type": "object"}, {'{"x": 1.10, "y": [6E9559]}': '{"x": 1.10, "y": [6E9559]}', "{": '"{"'}),
    "no type": ({}, {"5": '"5"', "null": '"null"'}),
    "encoded": ({"$ref": "#/$defs/a%20b~1c"}, {"5": "5"}),
    "allOf": ({"allOf": [{"type": ["integer", "string"]}, {"type": ["string", "null"]}]}, {"5": '"5"'}),
}  # fmt: skip
"""Schemas of a parameter, and texts with the JSON that they are."""


@pytest.mark.parametrize("template", WRITTEN)
@pytest.mark.parametrize("case", READ)
def test_texts_are_read_as_they_are_written(backend: LLGuidanceBackend, template: str, case: str) -> None:
    value, texts = READ[case]
    schema = {**of(a=value), "$defs": DEFINITIONS}
    tools = [tool("f", schema)]
    grammar = tool_grammar(ResponseTemplate.named(template), tools, "f")
    assert grammar is not None
    matcher = backend.compile(grammar).matcher(frozenset(embedded().eos_token_ids))
    for text, expected in texts.items():
        said = WRITTEN[template].format(name="f", key="a", value=text)
        parser = ResponseParser(ResponseTemplate.named(template), tools=tools)
        parts = [*parser.feed(said), *parser.finish()]
        assert "".join(part.text for part in parts if part.kind == "arguments") == f'{{"a": {expected}}}'
        tokens = [*embedded().tokenizer.encode(said, add_special_tokens=False).ids, 1]
        if matcher.accepts(tokens) == len(tokens):
            jsonschema.Draft202012Validator(schema).validate({"a": json.loads(expected)})


BESIDE: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "or null": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ("null", "None", "a b", "nullx", ""), ()),
    "bounded": (
        {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}]},
        ("5", "-123456", "abc", "06", "1.5", "true"), ("abcde", "123456.5"),
    ),
    "constants": ({"enum": ["a", 1, None, True, 2.5]}, ("a", "1", "null", "true", "2.5"), ("b", "2", "false", "2.50")),
    "types": (
        {"type": ["string", "number", "boolean"], "minLength": 3},
        ("1", "1.5", "1.50", "true", "abc"), ("ab", "x"),
    ),
    "or array": (
        {"anyOf": [{"type": "string", "minLength": 2}, {"type": "array", "items": {"type": "integer"}}]},
        ("ab", "[1, 2]", "[]", "12"), ("a", '["a"]', "[1"),
    ),
    "or object": ({"type": ["object", "string"]}, ("ab", "{}", '{"a": "b"}', ""), ('{"a"',)),
}  # fmt: skip
"""Schemas of strings beside other types; texts that are allowed, and others."""


@pytest.mark.parametrize("template", WRITTEN)
@pytest.mark.parametrize("case", BESIDE)
def test_a_string_beside_other_types(backend: LLGuidanceBackend, template: str, case: str) -> None:
    value, allowed, others = BESIDE[case]
    grammar = tool_grammar(ResponseTemplate.named(template), [tool("f", of(a=value))], "f")
    assert grammar is not None
    matcher = backend.compile(grammar).matcher(frozenset(embedded().eos_token_ids))
    for text in (*allowed, *others):
        said = WRITTEN[template].format(name="f", key="a", value=text)
        tokens = [*embedded().tokenizer.encode(said, add_special_tokens=False).ids, 1]
        assert (matcher.accepts(tokens) == len(tokens)) == (text in allowed), text


def test_empty_arguments_are_none() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": ""}\n</tool_call>'
    parser = ResponseParser(ResponseTemplate.named("hermes"), tools=[tool("f", {})])
    assert calls_of([*parser.feed(text), *parser.finish()]) == [("f", {})]


def test_an_error_names_the_tool_and_the_path_in_its_schema(backend: LLGuidanceBackend) -> None:
    deep = of(x={"type": "array", "items": of(y={"type": "array", "items": {"type": "integer", "not": {"const": 3}}})})
    tools = [tool("now", of(a=INTEGER)), tool("f", deep)]
    place = "tools[1] (f): parameters.properties.x.items.properties.y.items"
    for name in NAMES:
        found = outcome_of(backend, name, tools)
        assert found.startswith(place)
        assert "not" in found
        assert "%json" not in found
    many = of(x={"type": "integer", "multipleOf": 1_000_003})
    found = outcome_of(backend, "hermes", [tool("f", many)])
    assert found.startswith("tools[0] (f): parameters: schema multipleOf must add up")


def outcome_of(backend: LLGuidanceBackend, template: str, tools: list[dict[str, Any]]) -> str:
    """Return why tools are refused, where an answer is one of their calls or another text."""
    try:
        grammar = tool_grammar(ResponseTemplate.named(template), tools, "required")
        assert grammar is not None
        backend.compile(calls_or(Grammar.regex("a"), grammar))
    except ValueError as error:
        return str(error)
    return ""


def test_remarks_of_a_client_are_no_places(backend: LLGuidanceBackend) -> None:
    for remark in ("// a remark", "//", "// 5"):
        with pytest.raises(ValueError, match="Unimplemented keys") as caught:
            backend.compile(Grammar.lark(f'start: r\n{remark}\nr: %json {{"not": {{}}}}'))
        assert "at 3(4)" in str(caught.value)
