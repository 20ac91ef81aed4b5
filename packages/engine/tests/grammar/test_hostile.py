"""Every hostile grammar ends in bounded time and memory, with a matcher or a message, and no crash.

They run in other processes, so that a crash is a failure of one test only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from grammars.hostile import CASES

REFUSED = {
    "schema brackets": "at most 262144 characters",
    "schema open brackets": "nested at most 100 levels",
    "schema brackets in enum": "nested at most 100 levels",
    "schema not json": "schema must be JSON: Expecting ',' delimiter",
    "schema not a schema": "must be a JSON object or a boolean, got list",
    "schema false": "must allow something, got false",
    "schema of a megabyte": "at most 262144 characters, got 1048590",
    "schema with a lone surrogate": "lone surrogate U+D800",
    "schema with an escaped surrogate": "lone surrogate U+D800",
    "schema with NaN": "NaN is not a JSON number",
    "schema with a long number": "schema must be JSON: Exceeds the limit",
    "least integer": "schema enum must have integers that are exact as 64-bit floats, got -9223372036854775808 at #",
    "least number as a bound": "schema minimum must be a number with which the grammar can compute exactly, got -1e+",
    "schema with white space only": "Expecting value",
    "reference to itself": "allows no first token",
    "references in a circle": "allows no first token",
    "reference to nothing": "'/$defs/x' does not exist",
    "remote reference": "https://example.com/x.json",
    "reference to a file": "file:///etc/passwd",
    "long chain of references": "at most 262144 characters",
    "enum of 100,000": "at most 262144 characters",
    "product of unions": "schema too large",
    "49,000 properties": "at most 262144 characters",
    "2,100 properties": "at most 2000 properties in an object, got 2100",
    "2,100 references": "refer to at most 2000 targets, got 2101",
    "60,000 nodes": "at most 50000 objects and arrays",
    "300 patternProperties": "at most 10000 pairs of patternProperties, got 90000",
    "large multipleOf": "multipleOf must add up to at most 10000, got 1000003",
    "intersected multipleOf": "product of at most 1000000",
    "unsupported not": '["not"]',
    "unsupported uniqueItems": '["uniqueItems"]',
    "unsupported if": '["if", "then"]',
    "lenient": "got x-guidance",
    "unsatisfiable": "Unsatisfiable schema",
    "pattern with look-around": "look-around",
    "long pattern": "at most 4096 characters, got 12000",
    "many patterns": "at most 65536 characters",
    "long constant": "at most 16384 characters, got 200000",
    "long name": "at most 16384 characters, got 200000",
    "regex brackets": "at most 4096 characters",
    "regex of 1,000 brackets": "invalid regex",
    "regex classes": "invalid regex",
    "regex of a megabyte": "at most 4096 characters",
    "regex that is wrong": "unclosed group",
    "regex with a back reference": "backreferences are not supported",
    "regex with a lone surrogate": "lone surrogate U+D800",
    "lark brackets": "at most 65536 characters",
    "lark square brackets": "too deeply nested",
    "lark conditions": "at most 5000 parentheses, got 15000",
    "lark chain that ends in nothing": 'unknown name: "r190"',
    "lark long chain that ends in nothing": "refer at most 200 levels deep",
    "lark chain of defined rules": "refer at most 200 levels deep",
    "lark chain of terminals": "at most 65536 characters with its terminals expanded",
    "lark terminals that double": "at most 4096 characters with all terminals",
    "lark terminals that double a little": "at most 4096 characters with all terminals",
    "lark lazy rule of terminals": "at most 4096 characters with all terminals",
    "lark regex": "lark regex must have at most 4096 characters",
    "lark terminal in a circle": "circular reference",
    "lark rule in a circle": "allows no first token",
    "lark terminal that matches nothing": "lark T must allow a text, got an expression that allows none",
    "lark lazy rule that matches nothing": "lark t must allow a text, got an expression that allows none",
    "lark many alternatives": "at most 65536 characters",
    "lark empty": "no start rule",
    "lark with a file": ".etc.passwd",
    "lark with max_tokens": "must not have the attribute max_tokens",
    "lark with stop": "must not have the attribute stop",
    "lark with deep JSON": "not nested too deeply",
    "lark with a hostile schema": "multipleOf",
    "lark with lenient JSON": "without lenient",
    "lark with substrings": "lark json must have at most 16384 characters",
    "lark that is a list of grammars": "expecting rule",
    "lark nested": "too deeply nested",
    "lark of a megabyte": "at most 65536 characters",
    "choice not a list": "must be a JSON array of strings, got dict",
    "choice of numbers": "choice[0] must be a string that is not empty, got 1",
    "choice of nothing": "1 to 10000 strings, got 0",
    "choice of an empty string": 'choice[0] must be a string that is not empty, got ""',
    "choice twice": 'distinct strings, got "a" twice',
    "choice of too many": "1 to 10000 strings, got 20000",
    "choice of a long string": "at most 16384 characters",
    "choice brackets": "nested at most 100 levels",
    "tag brackets": "at most 262144 characters",
    "tag of 90 levels": "nested at most 100 levels",
    "tag with a token": 'got "token"',
    "tag with a hostile schema": "multipleOf",
    "tag with a hostile regex": "at most 4096 characters",
    "tag with a hostile grammar": "at most 4096 characters with all terminals",
    "tag with many excludes": "at most 4096 characters",
}
"""What the message of a refusal says. All others give a matcher, which may fail later."""
MOST_SECONDS = 10.0
MOST_SECONDS_OF_A_MASK = 2.0
MOST_BYTES = 500 << 20


def run(names: list[str]) -> tuple[list[dict[str, Any]], str]:
    """Return what was seen of the grammars that a process got through, and what it wrote about its end."""
    command = [sys.executable, "-m", "grammars.hostile", *names]
    # With call stacks in its errors, llguidance takes longest.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RUST_BACKTRACE": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as late:
        return _lines(bytes(late.stdout or b"").decode()), "it took longer than 120 s"
    return _lines(done.stdout), f"exit code {done.returncode}: {done.stderr[-2000:]}"


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any] | str]:
    """Run all of them in one process; a new one goes on after the grammar that ends it."""
    left = list(CASES)
    outcomes: dict[str, dict[str, Any] | str] = {}
    while left:
        seen, end = run(left)
        outcomes |= {one["name"]: one for one in seen}
        left = left[len(seen) :]
        if left:
            outcomes[left.pop(0)] = end
    return outcomes


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_grammar(outcomes: dict[str, dict[str, Any] | str], name: str) -> None:
    seen = outcomes[name]
    assert isinstance(seen, dict), seen
    assert seen["compile_s"] < MOST_SECONDS
    assert seen["worst_s"] < MOST_SECONDS_OF_A_MASK
    assert seen["peak_bytes"] < MOST_BYTES
    if name in REFUSED:
        assert seen["code"] == "invalid_grammar"
        assert REFUSED[name] in seen["message"]
        assert len(seen["message"]) < 1100
        assert "backtrace" not in seen["message"]
    else:
        assert seen["code"] is None, seen["message"]
        assert len(seen["error"] or "") < 1100


def test_a_crash_ends_its_own_grammar_only(outcomes: dict[str, dict[str, Any] | str]) -> None:
    assert list(outcomes) == list(CASES)
    seen, end = run(["choice twice", "no such case", "choice twice"])
    assert len(seen) == 1
    assert "exit code 1" in end


def test_there_is_a_case_for_each_refusal() -> None:
    assert REFUSED.keys() <= CASES.keys()
