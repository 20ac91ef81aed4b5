# pyright: basic
"""Runs hostile grammars in a process that may crash; `test_hostile.py` starts it.

Prints a line of JSON for each: what the compiler said, how long it took, and how the first steps went.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from pagewood.engine.api import Grammar, Refusal
from pagewood.engine.grammar import Backend, GrammarCompiler, Matcher, mask_words, open_backend
from pagewood.engine.model_folder.folder import model_folder

MANY = 60_000
_MEGABYTE = 1 << 20


def schema(value: object) -> tuple[str, str]:
    return "json_schema", json.dumps(value)


def chain(length: int, link: Callable[[str], object]) -> dict[str, object]:
    definitions = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


def doubled(levels: int, *, in_rules: bool = False) -> str:
    a, b = ("a", "b") if in_rules else ("A", "B")
    lines = [f'start: "x" {"z" if in_rules else "Z"}', f"{'z' if in_rules else 'Z'}: {a}0 {b}0"]
    lines += [f"{name}{i}: {name}{i + 1} {name}{i + 1}" for name in (a, b) for i in range(levels)]
    return "\n".join([*lines, f'{a}{levels}: "a"?', f'{b}{levels}: "a"'])


def objects(i: int, names: int) -> list[object]:
    return [{"type": "object", "properties": {f"k{i}_{j}": {}}, "required": [f"k{i}_{j}"]} for j in range(names)]


def tag(**fields: object) -> tuple[str, str]:
    return "structural_tag", json.dumps({"type": "structural_tag", "format": fields})


def nested_tag(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "const_string", "value": "a"}
    for _ in range(depth):
        inner = {"type": "sequence", "elements": [inner]}
    return inner


CASES: dict[str, Callable[[], tuple[str, str]]] = {
    "schema brackets": lambda: ("json_schema", '{"items":' * MANY + "{}" + "}" * MANY),
    "schema open brackets": lambda: ("json_schema", "[" * MANY),
    "schema brackets in enum": lambda: ("json_schema", '{"enum":' + "[" * MANY + "]" * MANY + "}"),
    "schema not json": lambda: ("json_schema", '{"type": "object"'),
    "schema not a schema": lambda: ("json_schema", "[1, 2]"),
    "schema false": lambda: ("json_schema", "false"),
    "schema of a megabyte": lambda: schema({"enum": ["x" * _MEGABYTE]}),
    "schema with a lone surrogate": lambda: ("json_schema", '{"const": "\ud800"}'),
    "schema with an escaped surrogate": lambda: ("json_schema", '{"const": "\\ud800"}'),
    "schema with NaN": lambda: ("json_schema", '{"const": NaN}'),
    "schema with a long number": lambda: ("json_schema", '{"minimum": ' + "1" * 5000 + "}"),
    "least integer": lambda: schema({"enum": [[1, -(2**63)]]}),
    "least integer as a bound": lambda: schema({"type": "integer", "minimum": -(2**63), "maximum": 5}),
    "least number as a bound": lambda: schema({"type": "number", "minimum": -1e300, "maximum": -1e299}),
    "schema with white space only": lambda: ("json_schema", " " * 1000),
    "reference to itself": lambda: schema({"$ref": "#"}),
    "references in a circle": lambda: schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "required recursion": lambda: schema({"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}),
    "reference to nothing": lambda: schema({"$ref": "#/$defs/x"}),
    "remote reference": lambda: schema({"$ref": "https://example.com/x.json"}),
    "reference to a file": lambda: schema({"$ref": "file:///etc/passwd"}),
    "chain of references": lambda: schema(chain(1_900, lambda to: {"$ref": to})),
    "long chain of references": lambda: schema(chain(9_000, lambda to: {"$ref": to})),
    "chain of objects": lambda: schema(chain(1_900, lambda to: {"properties": {"a": {"$ref": to}}})),
    "chain of deep objects": lambda: schema(
        chain(1_000, lambda to: {"allOf": [{"items": {"anyOf": [{"items": {"allOf": [{"$ref": to}]}}, {}]}}]})
    ),
    "references that double": lambda: schema(
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                **{f"d{i}": {"prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2} for i in range(40)},
                "d40": {"type": "string"},
            },
        }
    ),
    "enum of 100,000": lambda: schema({"enum": [f"v{i}" for i in range(100_000)]}),
    "enum of 20,000": lambda: schema({"enum": [f"v{i}" for i in range(20_000)]}),
    "product of unions": lambda: schema({"allOf": [{"anyOf": objects(i, 30)} for i in range(5)]}),
    "49,000 properties": lambda: schema({"properties": {f"p{i}": {} for i in range(49_000)}}),
    "1,500 properties": lambda: schema({"properties": {f"p{i}": {} for i in range(1_500)}}),
    "2,100 properties": lambda: schema({"properties": {f"p{i}": {} for i in range(2_100)}}),
    "2,100 references": lambda: schema({"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(2_101)]}),
    "60,000 nodes": lambda: schema({"enum": [[]] * 60_000}),
    "300 patternProperties": lambda: schema({"patternProperties": {f"^x{i}_.*$": {} for i in range(300)}}),
    "large multipleOf": lambda: schema({"type": "integer", "multipleOf": 1_000_003}),
    "intersected multipleOf": lambda: schema(
        {"allOf": [{"type": "integer", "multipleOf": 2_973}, {"multipleOf": 2_971}, {"multipleOf": 2_969}]}
    ),
    "many items": lambda: schema({"type": "array", "minItems": 1_000_000}),
    "long constant": lambda: schema({"const": {"a": ["x" * 200_000]}}),
    "long name": lambda: schema({"properties": {"x" * 200_000: {}}}),
    "many long constants": lambda: schema({"enum": [f"{i}" + "x" * 16_000 for i in range(15)]}),
    "long string": lambda: schema({"type": "string", "minLength": 1_000_000, "maxLength": 100_000_000}),
    "unsupported not": lambda: schema({"not": {"type": "string"}}),
    "unsupported uniqueItems": lambda: schema({"type": "array", "uniqueItems": True}),
    "unsupported if": lambda: schema({"if": {"type": "string"}, "then": {"minLength": 1}}),
    "unknown format": lambda: schema({"type": "string", "format": "wibble"}),
    "lenient": lambda: schema({"not": {"type": "string"}, "x-guidance": {"lenient": True}}),
    "unsatisfiable": lambda: schema({"enum": []}),
    "pattern with look-around": lambda: schema({"type": "string", "pattern": "^(?=a)a$"}),
    "evil pattern": lambda: schema({"type": "string", "pattern": "^(a{1,500}){1,500}$"}),
    "long pattern": lambda: schema({"type": "string", "pattern": "a?" * 4_000 + "a" * 4_000}),
    "many patterns": lambda: schema({"anyOf": [{"type": "string", "pattern": f"a{{{i}}}" * 800} for i in range(30)]}),
    "regex brackets": lambda: ("regex", "(" * MANY + "a" + ")" * MANY),
    "regex of 1,000 brackets": lambda: ("regex", "(" * 1_000 + "a" + ")" * 1_000),
    "regex classes": lambda: ("regex", "[" * 2_000 + "a" + "]" * 2_000),
    "regex of nested counts": lambda: ("regex", "(a{1,500}){1,500}"),
    "regex of thrice nested counts": lambda: ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "regex of options": lambda: ("regex", "x" + "a?" * 1_300 + "a" * 1_300),
    "regex of a megabyte": lambda: ("regex", "a" * _MEGABYTE),
    "regex of large counts": lambda: ("regex", "(.*a.{200}b)|(.*c.{3000}d)|.*(x.{1000}){30}"),
    "regex that is wrong": lambda: ("regex", "(a"),
    "regex with a back reference": lambda: ("regex", r"(a)\1"),
    "regex with a lone surrogate": lambda: ("regex", "\ud800"),
    "lark brackets": lambda: ("lark", "start: " + "(" * MANY + '"a"' + ")" * MANY),
    "lark square brackets": lambda: ("lark", "start: " + "[" * 30_000 + '"a"' + "]" * 30_000),
    "lark conditions": lambda: ("lark", 'start: p::0\np::_: "a" %if ' + "not(" * 15_000 + "true" + ")" * 1_000),
    "lark of 4,900 conditions": lambda: (
        "lark",
        'start: p::0\np::_: "a" %if ' + "not(" * 4_900 + "true" + ")" * 4_900,
    ),
    "lark chain that ends in nothing": lambda: (
        "lark",
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(190)),
    ),
    "lark long chain that ends in nothing": lambda: (
        "lark",
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4_000)),
    ),
    "lark lazy rule of terminals": lambda: (
        "lark",
        'start: "x" a\na[lazy]: A A A A A A\nA: ' + '"a"? ' * 1_000,
    ),
    "lark regex": lambda: ("lark", 'start: "x" /' + "a?" * 3_000 + "a" * 3_000 + "/"),
    "lark chain of defined rules": lambda: (
        "lark",
        "start: r0\n" + "".join(f'r{i}: r{i + 1} "b"?\n' for i in range(3_000)) + 'r3000: "a"\n',
    ),
    "lark chain of terminals": lambda: (
        "lark",
        "start: R0\n" + "".join(f'R{i}: R{i + 1} "a" | "b"\n' for i in range(190)) + 'R190: "a"\n',
    ),
    "lark terminals that double": lambda: ("lark", doubled(15)),
    "lark terminals that double a little": lambda: ("lark", doubled(10)),
    "lark rules that double": lambda: ("lark", doubled(40, in_rules=True)),
    "lark terminal in a circle": lambda: ("lark", 'start: A\nA: B "a"\nB: A "b"'),
    "lark rule in a circle": lambda: ("lark", "start: start"),
    "lark terminal that matches nothing": lambda: ("lark", 'start: "a" T | "b"\nT: "x" U\nU: /c/ & /d/'),
    "lark lazy rule that matches nothing": lambda: ("lark", 'start: "a" t | "b"\nt[lazy]: U "x"\nU: /c/ & ~/(?s:.*)/'),
    "lark many intersections": lambda: (
        "lark",
        "start: " + " | ".join(f"T{i}" for i in range(2_000)) + "".join(f"\nT{i}: /x{i}/ & /.*/" for i in range(2_000)),
    ),
    "lark ambiguous": lambda: ("lark", 'start: start start | "a"' + ' | "b"' * 800),
    "lark many alternatives": lambda: ("lark", "start: " + " | ".join(f'"w{i}"' for i in range(8_000))),
    "lark huge counts": lambda: ("lark", 'start: (("a"{1,1000}){1,1000}){1,1000000000}'),
    "lark empty": lambda: ("lark", " \n "),
    "lark with a file": lambda: ("lark", "%import .etc.passwd\nstart: passwd"),
    "lark with max_tokens": lambda: ("lark", "start: a\na[max_tokens=5]: /.*/"),
    "lark with stop": lambda: ("lark", 'start: a "x"\na[capture, stop="end"]: /.*/'),
    "lark with deep JSON": lambda: ("lark", "start: %json " + '{"items":' * 5_000 + "{}" + "}" * 5_000),
    "lark with a hostile schema": lambda: ("lark", 'start: "a" %json {"type":"integer","multipleOf":1000003}'),
    "lark with lenient JSON": lambda: ("lark", 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'),
    "lark with substrings": lambda: ("lark", 'start: S\nS: %regex {"substring_chars": "' + "ab" * 30_000 + '"}'),
    "lark that is a list of grammars": lambda: ("lark", '{"grammars": [{"lark_grammar": "start: /(/"}]}'),
    "lark nested": lambda: ("lark", "start: " + "%lark {\nstart: " * 3_000 + '"a"' + "\n}" * 3_000),
    "lark of a megabyte": lambda: ("lark", "\n" * _MEGABYTE),
    "choice not a list": lambda: ("choice", '{"a": 1}'),
    "choice of numbers": lambda: ("choice", "[1, 2]"),
    "choice of nothing": lambda: ("choice", "[]"),
    "choice of an empty string": lambda: ("choice", '[""]'),
    "choice twice": lambda: ("choice", '["a", "a"]'),
    "choice of too many": lambda: ("choice", json.dumps([str(i) for i in range(20_000)])),
    "choice of 10,000": lambda: ("choice", json.dumps([f"choice {i}" for i in range(10_000)])),
    "choice of a long string": lambda: ("choice", json.dumps(["x" * 200_000])),
    "choice brackets": lambda: ("choice", "[" * MANY + "]" * MANY),
    "tag brackets": lambda: ("structural_tag", '{"format":' * MANY + "}" * MANY),
    "tag of 40 levels": lambda: tag(**nested_tag(40)),
    "tag of 90 levels": lambda: tag(**nested_tag(90)),
    "tag with a token": lambda: tag(type="token", token=5),
    "tag with a hostile schema": lambda: tag(
        type="json_schema", json_schema={"type": "integer", "multipleOf": 1_000_003}
    ),
    "tag with a hostile regex": lambda: tag(type="regex", pattern="a?" * 4_000 + "a" * 4_000),
    "tag with a hostile grammar": lambda: tag(type="grammar", grammar=doubled(15)),
    "tag with many excludes": lambda: tag(type="any_text", excludes=[f"<word number {i}>" for i in range(400)]),
}
"""Kind and text of each grammar, made when it is asked for."""


def drive(matcher: Matcher, vocab_size: int, seen: dict[str, Any]) -> None:
    """Take 40 random steps, with everything that the engine calls; note the longest call and the error."""
    draws = random.Random(0)
    rows = np.zeros((3, mask_words(vocab_size)), np.int32)
    for _ in range(40):
        began = time.perf_counter()
        matcher.fill(rows[0])
        seen["worst_s"] = max(seen["worst_s"], time.perf_counter() - began)
        seen["error"] = matcher.error
        choices = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little")).tolist()
        if matcher.error is not None or matcher.is_finished or not choices:
            break
        token = draws.choice(choices)
        matcher.forced()
        matcher.accepts([token, token])
        matcher.copy().fill_ahead([token, token], rows)
        if not matcher.advance([token]):
            seen["error"] = matcher.error
            break
        seen["num_steps"] += 1


def run(name: str, backend: Backend) -> dict[str, Any]:
    kind, text = CASES[name]()
    compiler = GrammarCompiler(lambda: backend, deadline_s=60.0)
    seen: dict[str, Any] = {"name": name, "message": None, "code": None, "error": None, "worst_s": 0.0, "num_steps": 0}
    began = time.perf_counter()
    kind = cast('Literal["json_schema", "regex", "lark", "choice", "structural_tag"]', kind)
    pending = compiler.compile(Grammar(kind=kind, text=text), end_tokens=frozenset({1}))
    pending.wait()
    seen["compile_s"] = time.perf_counter() - began
    match pending.result():
        case Refusal(message=message, code=code):
            seen |= {"message": message, "code": code}
        case matcher:
            threading.stack_size(512 << 10)  # the thread of an engine has no large stack
            thread = threading.Thread(target=drive, args=(matcher, 512, seen))
            thread.start()
            thread.join()
    compiler.close()
    return seen | {"peak_bytes": _peak_bytes()}


def _peak_bytes() -> int:
    """Return the most memory that this process has had; `getrusage` would count that of the process that started it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def main(names: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    backend = open_backend("llguidance", model_folder(None), vocab_size=512, eos_token_ids=(1,))
    for name in names:
        print(json.dumps(run(name, backend)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
