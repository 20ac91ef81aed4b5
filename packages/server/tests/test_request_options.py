"""Options that nothing between a protocol and its reader reads pass as one value: only their two ends name them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pagewood.server
from pagewood.engine.api import PoolingParams, RequestOptions, SamplingParams, Submit
from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire
from pagewood.server.stages.tokenizing import commands

SOURCE = Path(str(pagewood.server.__file__)).parent
READ_ON_THE_WAY = {
    "adapter", "deadline_s", "sampling", "pooling", "priority", "namespace", "tenant", "is_paused", "names",
    "is_search",
}  # fmt: skip
"""Options for the engine that the HTTP process or the tokenizer reads, too."""
FILLED_IN = {"prefix", "first_token", "prompt_tokens", "reading", "begun", "keeps_output"}
"""Options for the detokenizer that depend on the prompt, or are for the HTTP process itself."""


def modules_that_name(option: str) -> set[str]:
    """Return the modules between the protocols and the engine that read an option, or pass it by its name."""
    found: set[str] = set()
    for room in ("messages", "requests", "stages", "keys"):
        for path in (SOURCE / room).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                is_read = isinstance(node, ast.Attribute) and node.attr == option
                if is_read or (isinstance(node, ast.Call) and any(one.arg == option for one in node.keywords)):
                    found.add(f"{room}/{path.stem}")
    return found


@pytest.mark.parametrize("option", sorted({*RequestOptions.__struct_fields__} - READ_ON_THE_WAY))
def test_no_module_on_the_way_names_an_option_of_the_engine(option: str) -> None:
    assert modules_that_name(option) == set()


@pytest.mark.parametrize("option", sorted({*wire.TextOptions.__struct_fields__} - FILLED_IN))
def test_only_the_detokenizer_names_an_option_of_its_own(option: str) -> None:
    assert modules_that_name(option) == {"stages/detokenizing"}


def test_all_options_arrive(tokenizer: Tokenizer) -> None:
    values: dict[str, Any] = {
        "sampling": SamplingParams(max_tokens=3),
        "pooling": PoolingParams(kind="mean"),
        "priority": 3,
        "deadline_s": 9.5,
        "namespace": "n",
        "tenant": "t",
        "explain": True,
        "explain_admission": True,
        "service_class": "gold",
        "tag": "adapter",
        "adapter": "tone",
        "is_search": True,
        "retain_s": 2.0,
        "is_paused": True,
        "cache_hit_threshold": 0.5,
        "handover": "await",
        "names": ("a", "b"),
        "keep_stop_token": True,
    }
    options = RequestOptions(**values)
    assert all(getattr(options, name) != getattr(RequestOptions(), name) for name in RequestOptions.__struct_fields__)
    text = wire.TextOptions(stop=("x",), stop_regex=("y",), is_scoring=True, reports_tokens=True)
    message = wire.Generate(
        request_id="a", prompt=wire.TextPrompt(text="Hi"), options=options, text=text, sibling_ids=("b",)
    )
    for submit in commands(tokenizer, msgspec.msgpack.decode(wire.encode(message), type=wire.Generate)):
        assert isinstance(submit, Submit)
        assert {name: getattr(submit, name) for name in RequestOptions.__struct_fields__} == values
        assert wire.carried.decode(submit.carry) == text
