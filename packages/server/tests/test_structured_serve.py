# pyright: basic
# jsonschema is not typed.
"""Structured output of `pagewood serve`: real processes, the real OpenAI client and the embedded model.

The judge of JSON is the `jsonschema` package. An answer that `max_tokens` cuts must be the beginning of one.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from openai import APIStatusError, AsyncOpenAI, LengthFinishReasonError
from pydantic import BaseModel

from pagewood.engine.api import Grammar
from pagewood.engine.grammar import Backend, open_backend
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.text import Tokenizer
from serving import LIMIT_S, MODEL, Server, command

EOS = 1
TIMEOUT_S = 6.0
"""`--grammar-timeout` of the server."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A server for tests that leave it intact."""
    server = Server(tmp_path_factory.mktemp("structured"), "--grammar-timeout", str(TIMEOUT_S))
    yield server
    server.until_idle()
    server.close()


@pytest.fixture(scope="module")
def backend() -> Backend:
    return open_backend("llguidance", model_folder(None), vocab_size=512, eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(model_folder(None))


def ask(server: Server, text: str = "Answer.", **options: Any) -> Any:
    create: Any = server.openai.chat.completions.create
    return create(model=MODEL, messages=[{"role": "user", "content": text}], **options)


def together(server: Server, bodies: list[dict[str, Any]]) -> list[Any]:
    """Send chats at the same time; return answers or errors in their order."""

    async def send() -> list[Any]:
        options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
        async with AsyncOpenAI(**options, timeout=LIMIT_S) as client:
            create: Any = client.chat.completions.create
            return await asyncio.gather(*[create(model=MODEL, **body) for body in bodies], return_exceptions=True)

    return asyncio.run(send())


def chat(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **options}


def obj(**properties: Any) -> dict[str, Any]:
    return obj_of(properties, required=list(properties))


def obj_of(properties: dict[str, Any], *, required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


WORD = {"type": "string", "maxLength": 8}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -5, "maximum": 17},
    {"type": "integer", "exclusiveMinimum": 100, "exclusiveMaximum": 1000},
    {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 5},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    {"type": "string", "pattern": "^(north|south)(east|west)?$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "time"},
    {"enum": ["red", "green", 7, None, {"a": [1]}]},
    {"const": {"fixed": ["naïve", "日本", "🎉"]}},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"anyOf": [DIGIT, WORD, {"type": "null"}]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    {"allOf": [{"type": "integer", "minimum": 3, "maximum": 90}, {"maximum": 50}]},
    {"type": "array", "items": DIGIT, "maxItems": 4},
    {"type": "array", "items": WORD, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [DIGIT, WORD, {"type": "boolean"}], "items": False, "minItems": 3},
    {"type": "array", "items": {"type": "array", "items": DIGIT, "maxItems": 2}, "maxItems": 3},
    {"type": "array", "items": obj(x=DIGIT, y=DIGIT), "minItems": 1, "maxItems": 2},
    obj(name=WORD, age=DIGIT),
    obj(city=WORD, country=WORD, population={"type": "integer", "minimum": 1, "maximum": 10**7}),
    obj_of({"id": DIGIT, "note": WORD, "done": {"type": "boolean"}}, required=["id"]),
    obj_of({"a": DIGIT, "b": DIGIT, "c": DIGIT}, required=[]),
    obj(user=obj(name=WORD, tags={"type": "array", "items": WORD, "maxItems": 2})),
    obj(level=obj(level=obj(level=obj(value=DIGIT)))),
    obj(kind={"const": "point"}, at=obj(x={"type": "number", "minimum": -1, "maximum": 1})),
    obj(when={"type": "string", "format": "date"}, color={"enum": ["red", "green", "blue"]}),
    obj_of({'a "quoted" key': DIGIT, "clé": DIGIT, "🎉": DIGIT, "": DIGIT}, required=["clé", ""]),
    {"type": "object", "additionalProperties": DIGIT, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^[xy][0-9]$": DIGIT}, "additionalProperties": False, "maxProperties": 2},
    {"$ref": "#/$defs/pair", "$defs": {"pair": obj(left={"$ref": "#/$defs/digit"}, right=WORD), "digit": DIGIT}},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": obj(value=DIGIT, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}),
        },
    },
    obj(shape={"anyOf": [obj(type={"const": "circle"}, radius=DIGIT), obj(type={"const": "box"}, side=DIGIT)]}),
    obj(price={"type": "number", "minimum": 0, "maximum": 99.5}, currency={"enum": ["EUR", "USD"]}),
    obj(steps={"type": "array", "items": obj(do=WORD, ok={"type": "boolean"}), "maxItems": 2}, answer=WORD),
    obj(grade={"type": "string", "enum": ["A", "B"]}, comment={"type": ["string", "null"], "maxLength": 10}),
    obj(title={"type": "string"}, body={"type": "string"}),
    {"type": "object"},
    {"type": "array", "items": {"type": "string"}},
]
FORMATS = jsonschema.FormatChecker(formats=["ipv4", "uuid"])


def fields_for(index: int, schema: dict[str, Any]) -> dict[str, Any]:
    """Return fields that ask for a schema, in one of the forms of the clients."""
    match index % 4:
        case 0:
            form = {"type": "json_schema", "json_schema": {"name": "task", "schema": schema, "strict": index % 8 == 0}}
            return {"response_format": form}
        case 1:
            return {"extra_body": {"structured_outputs": {"json": schema}}}
        case 2:
            return {"extra_body": {"guided_json": json.dumps(schema)}}
        case _:
            return {"extra_body": {"json_schema": json.dumps(schema)}}


def is_beginning(text: str, grammar: Grammar, backend: Backend, tokenizer: Tokenizer) -> bool:
    """Return whether the grammar allows a text, which may end within a character."""
    tokens = tokenizer.encode(text.rstrip("\ufffd")).tolist()
    return backend.compile(grammar).matcher(frozenset({EOS})).accepts(tokens) == len(tokens)


def test_every_answer_is_an_instance_or_the_beginning_of_one(
    server: Server, backend: Backend, tokenizer: Tokenizer
) -> None:
    tasks = [(schema, temperature) for schema in SCHEMAS for temperature in (0, 1)]
    bodies = [
        chat(f"Give me task {i}.", temperature=temperature, seed=i, max_tokens=80, **fields_for(i // 2 + i, schema))
        for i, (schema, temperature) in enumerate(tasks)
    ]
    num_complete = num_cut = 0
    for (schema, temperature), answer in zip(tasks, together(server, bodies), strict=True):
        assert not isinstance(answer, BaseException), (schema, answer)
        choice = answer.choices[0]
        text = choice.message.content
        if choice.finish_reason == "stop":
            num_complete += 1
            validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
            errors = [error.message for error in validator.iter_errors(json.loads(text))]
            assert not errors, (schema, temperature, text, errors)
        else:
            num_cut += 1
            assert choice.finish_reason == "length"
            assert answer.usage.completion_tokens == 80
            assert is_beginning(text, Grammar.json_schema(schema), backend, tokenizer), (schema, text)
    assert len(SCHEMAS) >= 40
    assert num_complete >= 60
    assert num_cut >= 1


class Person(BaseModel):
    """A schema with a reference, an enumeration and a list."""

    class Pet(BaseModel):
        """A part of it."""

        kind: Literal["cat", "dog"]
        legs: int

    name: str
    is_tall: bool
    pets: list[Pet]


def test_openais_client_parses_answers(server: Server) -> None:
    client: Any = server.openai.chat.completions
    messages = [{"role": "user", "content": "Who is it?"}]
    num_parsed = 0
    for seed in range(6):
        options = {"seed": seed, "temperature": 0.7, "max_tokens": 200}
        try:
            whole = client.parse(model=MODEL, messages=messages, response_format=Person, **options)
        except LengthFinishReasonError:
            continue
        num_parsed += 1
        person = whole.choices[0].message.parsed
        assert isinstance(person, Person)
        with client.stream(model=MODEL, messages=messages, response_format=Person, **options) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == person
    assert num_parsed >= 2


def test_the_snippet_of_the_readme_runs(server: Server) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert "http://127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", server.url).replace(
        '"pagewood-demo",', '"pagewood-demo", temperature=0,'
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "name='get_weather'" in done.stdout


def test_json_mode_is_any_object(server: Server, backend: Backend, tokenizer: Tokenizer) -> None:
    num_complete = 0
    for seed in range(8):
        choice = ask(server, temperature=1, seed=seed, max_tokens=150, response_format={"type": "json_object"}).choices[
            0
        ]
        if choice.finish_reason == "stop":
            num_complete += 1
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert is_beginning(choice.message.content, Grammar.json_schema({"type": "object"}), backend, tokenizer)
    assert num_complete >= 2


KINDS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
    ({"regex": "(ab|cd){2}"}, r"(ab|cd){2}"),
    ({"structured_outputs": {"choice": ["tea", "coffee", "grüner Tee"]}}, "tea|coffee|grüner Tee"),
    ({"guided_choice": ["only"]}, "only"),
    ({"structured_outputs": {"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,5}/'}}, "<[a-z]{1,5}>"),
    ({"ebnf": 'root ::= item ("," item){2}\nitem ::= [0-9] | "none"'}, "([0-9]|none)(,([0-9]|none)){2}"),
    ({"guided_grammar": 'root ::= [a-c]{0,5} "end"'}, "[a-c]{0,5}end"),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<f>",
                    "content": {"type": "json_schema", "json_schema": {"type": "integer", "maximum": 9, "minimum": 0}},
                    "end": "</f>",
                },
            }
        },
        "<f>[0-9]</f>",
    ),
]


@pytest.mark.parametrize(("fields", "expression"), KINDS)
def test_other_grammars_in_chats_and_completions(server: Server, fields: dict[str, Any], expression: str) -> None:
    create: Any = server.openai.completions.create
    for seed in range(4):
        options = {"temperature": 1, "seed": seed, "max_tokens": 60, "extra_body": fields}
        choice = ask(server, **options).choices[0]
        assert (choice.finish_reason, bool(re.fullmatch(expression, choice.message.content))) == ("stop", True), choice
        prompt = "Here it is: "
        echoed = create(model=MODEL, prompt=[prompt, "x"], echo=True, **options).choices
        for one, start in zip(echoed, (prompt, "x"), strict=True):
            assert one.text.startswith(start)
            assert re.fullmatch(expression, one.text.removeprefix(start)), one
            assert one.finish_reason == "stop"


ITEM = obj(name=WORD, price=DIGIT)
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "item", "schema": ITEM}}


def test_streams_several_answers_and_log_probabilities(server: Server) -> None:
    options: dict[str, Any] = {"response_format": FORMAT, "temperature": 2, "seed": 3, "max_tokens": 300, "n": 3}
    whole = ask(server, **options).choices
    texts, reasons = [""] * 3, [""] * 3
    for chunk in ask(server, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole]
    assert reasons == [choice.finish_reason for choice in whole] == ["stop"] * 3
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), ITEM)
    for kind, is_certain in (("raw", False), ("processed", True)):
        scored = ask(server, logprobs=True, top_logprobs=3, extra_body={"logprobs_kind": kind}, **options).choices
        assert [choice.message.content for choice in scored] == texts
        for choice in scored:
            entries = choice.logprobs.content
            assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
            assert all(entry.logprob <= 1e-6 for entry in entries)
        forced = ask(server, logprobs=True, extra_body={"logprobs_kind": kind, "guided_regex": "Q"}).choices[0]
        # The mask leaves one token, which is certain after it, and was not before it.
        (entry,) = forced.logprobs.content
        assert (forced.message.content, abs(entry.logprob) < 1e-6) == ("Q", is_certain)


def test_stop_strings_and_lengths_end_structured_answers(server: Server) -> None:
    whole = ask(server, response_format=FORMAT, temperature=0).choices[0].message.content
    stop = whole[4:8]
    cut = ask(server, response_format=FORMAT, temperature=0, stop=stop).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    short = ask(server, response_format=FORMAT, temperature=0, max_tokens=4)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 4
    assert whole.startswith(short.choices[0].message.content)
    for limit, reason in ((19, "length"), (20, "stop"), (21, "stop")):
        exact = ask(server, max_tokens=limit, extra_body={"guided_regex": "[0-9]{20}"}).choices[0]
        assert (len(exact.message.content), exact.finish_reason) == (min(limit, 20), reason)
    last = [chunk.choices[0].finish_reason for chunk in ask(server, response_format=FORMAT, max_tokens=4, stream=True)]
    assert last[-1] == "length"


def test_other_fields_hold_beside_a_grammar(server: Server) -> None:
    options: dict[str, Any] = {"temperature": 1, "seed": 5, "max_tokens": 30}
    numbers = {"guided_regex": "[0-9]{20}"}
    plain = ask(server, extra_body=numbers, **options).choices[0].message.content
    digit = plain[0]
    other = ask(server, extra_body={**numbers, "bad_words": [digit]}, **options).choices[0].message.content
    assert digit not in other
    assert re.fullmatch("[0-9]{20}", other)
    ignoring = ask(server, extra_body={**numbers, "ignore_eos": True}, **options).choices[0]
    assert (ignoring.finish_reason, len(ignoring.message.content)) == ("stop", 20)
    best = server.openai.completions.create(
        model=MODEL, prompt="1", best_of=4, n=2, extra_body=numbers, **options
    ).choices
    assert all(re.fullmatch("[0-9]{20}", choice.text) for choice in best)


def test_neighbours_get_the_same_text(server: Server) -> None:
    plain = [chat(f"What is {i} + {i}?", temperature=0.8, seed=i, max_tokens=60) for i in range(6)]
    alone = [together(server, [body])[0].choices[0].message.content for body in plain]
    structured = [
        chat(f"Task {i}", temperature=1, seed=i, max_tokens=60, **fields_for(i, schema))
        for i, schema in enumerate(SCHEMAS[24:34])
    ]
    mixed = [body for pair in zip(plain, structured[:6], strict=True) for body in pair] + structured[6:]
    answers = together(server, mixed)
    assert [answer.choices[0].message.content for answer in answers[:12:2]] == alone


def doubled(levels: int) -> str:
    return "\n".join(['start: "x" A0', *(f"A{i}: A{i + 1} A{i + 1}" for i in range(levels)), f'A{levels}: "a"?'])


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "(((a{100}){100}){100}){100}"}, "guided_regex"),
    ({"guided_regex": "(?=x)y"}, "guided_regex"),
    ({"regex": "(x+x+)+y" * 1000}, "regex"),
    ({"regex": "[^a]" * 60_000}, "regex"),
    ({"guided_json": {"type": "strange"}}, "guided_json"),
    ({"guided_json": {"not": {"type": "null"}}}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": nested(150)}, "guided_json"),
    ({"guided_json": {"$ref": "https://example.com/schema.json"}}, "guided_json"),
    ({"guided_json": {"enum": []}}, "guided_json"),
    (
        {"guided_json": {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}}},
        "guided_json",
    ),
    ({"json_schema": json.dumps(obj_of({f"p{i}": {} for i in range(5000)}, required=[]))}, "json_schema"),
    ({"structured_outputs": {"grammar": doubled(30)}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar"),
    ({"ebnf": "root ::= " + "(" * 90 + '"a"' + ")*" * 90}, "ebnf"),
    ({"ebnf": 'root ::= "' + "a" * 60_000 + '"'}, "ebnf"),
    ({"guided_choice": ["a", "a"]}, "guided_choice"),
    ({"guided_choice": [str(i) for i in range(10_001)]}, "guided_choice"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "mystery"}}}, "response_format"),
]


def test_hostile_grammars_are_refused_while_others_are_served(server: Server) -> None:
    neighbours = [chat(f"What is {i} + 1?", temperature=0, max_tokens=20) for i in range(10)]
    expected = [answer.choices[0].message.content for answer in together(server, neighbours)]
    hostile = [chat("x", max_tokens=20, extra_body=fields) for fields, _ in HOSTILE]
    answers = together(server, hostile + neighbours)
    assert [answer.choices[0].message.content for answer in answers[len(hostile) :]] == expected
    for (fields, param), error in zip(HOSTILE, answers, strict=False):
        assert isinstance(error, APIStatusError), (str(fields)[:200], error)
        statuses = {"invalid_grammar": 400, "grammar_timeout": 400, "grammar_failed": 422}
        assert (error.status_code, error.param) == (statuses[str(error.code)], param), (str(fields)[:200], error)
    # Streams are refused with a status, too, and the server goes on.
    with pytest.raises(APIStatusError) as refused:
        ask(server, stream=True, n=4, extra_body={"guided_regex": "("})
    assert (refused.value.status_code, refused.value.code) == (400, "invalid_grammar")
    assert ask(server, extra_body={"guided_choice": ["fine"]}).choices[0].message.content == "fine"


@pytest.mark.slow
@pytest.mark.parametrize("speculative", ["ngram", "eagle"])
def test_speculation_changes_no_structured_answer(server: Server, tmp_path: Path, speculative: str) -> None:
    bodies = [
        chat(f"Task {i}", temperature=i % 2, seed=i, max_tokens=60, **fields_for(i, schema))
        for i, schema in enumerate(SCHEMAS[20:36])
    ] + [chat("What is 2 + 3?", temperature=0, max_tokens=20)]
    plain = together(server, bodies)
    options = ["--speculative", speculative, "--speculative-control", "fixed"]
    speculating = Server(tmp_path, *options)
    try:
        drafted = together(speculating, bodies)
        speculating.until_idle()
    finally:
        speculating.close()
    assert [one.choices[0].message.content for one in drafted] == [one.choices[0].message.content for one in plain]
    assert [one.choices[0].finish_reason for one in drafted] == [one.choices[0].finish_reason for one in plain]


def test_generate_without_a_server(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(obj(answer={"type": "integer", "minimum": 0, "maximum": 99})))

    questions = ("What is 2 + 3?", "How much is 2 plus 3?")
    done = command("generate", *questions, "--json-schema", str(schema), "--temperature", "0")
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert set(json.loads(line)) == {"answer"}
    wrong = command("generate", "x", "--regex", "(")
    assert wrong.returncode == 1
    assert "unclosed group" in wrong.stderr
    missing = command("generate", "x", "--json-schema", str(tmp_path / "none.json"))
    assert missing.returncode == 2
    assert "none.json" in missing.stderr
