"""Sampling parameters from the fields of a request, and from the model's folder for missing fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagewood.engine.api import LogitsProcessor, SamplingParams
from pagewood.server.http.errors import ApiError
from pagewood.server.protocols.common.fields import sampling, stop_expressions
from pagewood.server.protocols.native.fields import parse_generate
from pagewood.server.protocols.openai.chat import ChatRequest, parse_chat

DEFAULTS = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)


def chat(fields: bytes) -> ChatRequest:
    return parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "x"}]%b}' % fields)


def meant(fields: bytes) -> SamplingParams:
    return sampling(chat(fields), DEFAULTS, max_tokens=7, vocab_size=100)


def test_fields_of_a_request() -> None:
    said = b', "temperature": 1, "top_k": 3, "top_p": 0.5, "min_p": 0, "seed": -4, "ignore_eos": true'
    assert meant(said + b', "stop_token_ids": [5, 99]') == SamplingParams(
        max_tokens=7, temperature=1.0, top_k=3, top_p=0.5, min_p=0.0, seed=-4, ignore_eos=True, stop_token_ids=(5, 99)
    )


def test_typical_p_of_a_request_and_of_the_folder() -> None:
    assert meant(b', "typical_p": 0.5').typical_p == 0.5
    assert meant(b', "typical_p": null').typical_p == 1.0
    folder = SamplingParams(typical_p=0.2)
    assert sampling(chat(b""), folder, max_tokens=7, vocab_size=100).typical_p == 0.2


def test_top_n_sigma_of_a_request() -> None:
    assert meant(b', "top_n_sigma": 1.5').top_n_sigma == 1.5
    for off in (b"-1", b"0", b"null"):
        assert meant(b', "top_n_sigma": ' + off).top_n_sigma == 0.0
    native = parse_generate(b'{"text": "x", "sampling_params": {"top_n_sigma": 2}}').sampling_params
    assert native is not None
    assert sampling(native, DEFAULTS, max_tokens=7, vocab_size=100).top_n_sigma == 2.0


def test_texts_that_stop_or_are_forbidden() -> None:
    fields = chat(b', "bad_words": ["x", " y"], "stop_regex": "a{1,3}b", "stop": "c"')
    assert fields.bad_words == ["x", " y"]
    assert stop_expressions(fields) == ("a{1,3}b",)
    assert stop_expressions(chat(b', "stop_regex": ["a", "[bc]d"]')) == ("a", "[bc]d")
    none = chat(b', "bad_words": null, "stop_regex": null')
    assert (none.bad_words, stop_expressions(none)) == ([], ())


def test_logits_processors() -> None:
    said = ["ban", {"name": "bias", "arguments": {"biases": [[5, 1.5]], "ä": None}}, {"name": "x"}]
    fields = chat(b', "logits_processors": %b' % json.dumps(said).encode())
    assert sampling(fields, DEFAULTS, max_tokens=7, vocab_size=100).logits_processors == (
        LogitsProcessor("ban"), LogitsProcessor("bias", '{"biases":[[5,1.5]],"ä":null}'), LogitsProcessor("x"),
    )  # fmt: skip
    assert meant(b', "logits_processors": null').logits_processors == ()
    assert meant(b', "logits_processors": []').logits_processors == ()


WRONG_PROCESSORS: list[tuple[Any, str]] = [
    ("ban", "expected an array of names and objects, but got a string instead"),
    ([3], "expected a name or an object with a name and arguments, but got an integer instead"),
    ([""], "name must have 1 to 128 characters, got 0"),
    (["x"] * 9, "expected at most 8 logits processors, but got 9"),
    ([{"arguments": {}}], "expected a string as 'name' of a logits processor, but got null instead"),
    ([{"name": "x", "arguments": "{}"}], "expected an object as 'arguments' of 'x', but got a string instead"),
    ([{"name": "x", "qualname": "os.system"}], "expected 'name' and 'arguments' only, but got 'qualname'"),
    ([{"name": "x", "arguments": {"y": "z" * 4090}}], "arguments must have at most 4096 bytes, got 4098"),
]


@pytest.mark.parametrize(("said", "message"), WRONG_PROCESSORS)
def test_wrong_logits_processors(said: Any, message: str) -> None:
    with pytest.raises(ApiError, match="logits_processors") as error:
        chat(b', "logits_processors": %b' % json.dumps(said).encode())
    assert message in str(error.value)


def test_defaults_of_the_folder() -> None:
    assert meant(b"") == SamplingParams(max_tokens=7, temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)


def test_top_p_zero_is_greedy() -> None:
    assert meant(b', "top_p": 0').temperature == 0
