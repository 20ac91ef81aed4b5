"""Sampling parameters from the fields of a request, and from the model's folder for missing fields."""

from __future__ import annotations

from pagewood.engine.api import SamplingParams
from pagewood.server.openai_chat import ChatRequest, parse_chat
from pagewood.server.openai_fields import sampling

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


def test_defaults_of_the_folder() -> None:
    assert meant(b"") == SamplingParams(max_tokens=7, temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)


def test_top_p_zero_is_greedy() -> None:
    assert meant(b', "top_p": 0').temperature == 0
