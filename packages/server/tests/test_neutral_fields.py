"""Fields of other servers: values that ask for nothing are accepted, all others are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagewood.engine.api import SamplingParams
from pagewood.server.http.errors import ApiError
from pagewood.server.protocols.common.fields import sampling
from pagewood.server.protocols.common.structured import constraint
from pagewood.server.protocols.openai import chat as openai_chat
from pagewood.server.protocols.openai import completions as openai_completions
from pagewood.server.protocols.openai.chat import parse_chat
from pagewood.server.protocols.openai.completions import parse_completion

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}

BOTH: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0,
    "top_k": -1,
    "min_p": 0,
    "typical_p": 1,
    "top_n_sigma": -1,
    "min_tokens": 0,
    "logit_bias": {},
    "logprobs": None,
    "echo": False,
    "use_beam_search": False,
    "early_stopping": False,
    "ignore_eos": False,
    "stop": None,
    "stop_token_ids": [],
    "stop_regex": [],
    "bad_words": [],
    "logits_processors": [],
    "allowed_token_ids": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
    "request_id": None,
    "rid": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": [],
    "guided_grammar": None,
    "guided_decoding_backend": None,
    "structured_outputs": {"json_object": False, "disable_fallback": True, "whitespace_pattern": None},
    "structural_tag": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "response_format": {"type": "text"},
    "seed": 5,
    "stream": False,
    "stream_options": None,
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
}
ONLY_CHAT: dict[str, Any] = {
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning_effort": "none",
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "max_completion_tokens": None,
}
ONLY_COMPLETIONS: dict[str, Any] = {"logprobs": False, "suffix": "", "add_special_tokens": True}


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        *[(parse_chat, {**CHAT, name: value}) for name, value in [*BOTH.items(), *ONLY_CHAT.items()]],
        *[
            (parse_completion, {**COMPLETION, name: value})
            for name, value in [*BOTH.items(), *ONLY_COMPLETIONS.items()]
        ],
        (parse_chat, {**CHAT, **BOTH, **ONLY_CHAT}),
        (parse_completion, {**COMPLETION, **BOTH, **ONLY_COMPLETIONS}),
    ],
)
def test_what_asks_for_nothing_is_accepted(parse: Any, body: dict[str, Any]) -> None:
    fields = parse(json.dumps(body).encode())
    meant = sampling(fields, SamplingParams(), max_tokens=None, vocab_size=10)
    assert meant == SamplingParams(max_tokens=None, seed=body.get("seed"))
    assert constraint(fields) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", True),
        ("detokenize", False),
        ("allowed_token_ids", [1]),
        ("guided_decoding_backend", "xgrammar"),
        ("guided_whitespace_pattern", "[ ]?"),
    ],
)
def test_what_asks_for_something_unsupported_is_refused_by_name(name: str, value: Any) -> None:
    for parse, body in ((parse_chat, CHAT), (parse_completion, COMPLETION)):
        with pytest.raises(ApiError, match=f"'{name}' is not supported") as error:
            parse(json.dumps({**body, name: value}).encode())
        assert error.value.code == "unsupported_parameter"


def test_changes_of_logits_reach_the_engine() -> None:
    asked = {
        "frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.2, "min_tokens": 3,
        "logit_bias": {"5": -100, "07": 1.5},
    }  # fmt: skip
    for parse, body in ((parse_chat, CHAT), (parse_completion, COMPLETION)):
        fields = parse(json.dumps({**body, **asked}).encode())
        meant = sampling(fields, SamplingParams(repetition_penalty=1.1), max_tokens=4, vocab_size=10)
        assert (meant.frequency_penalty, meant.presence_penalty, meant.repetition_penalty) == (0.5, -1.0, 1.2)
        assert (meant.logit_bias, meant.min_tokens) == (((5, -100.0), (7, 1.5)), 3)
        left_out = sampling(parse(json.dumps(body).encode()), meant, max_tokens=4, vocab_size=10)
        assert left_out.repetition_penalty == 1.2  # of the model's folder
        assert (left_out.frequency_penalty, left_out.presence_penalty, left_out.min_tokens) == (0.5, -1.0, 0)
        with pytest.raises(ApiError, match="expected at most the longest answer, 2, but got 3"):
            sampling(fields, SamplingParams(), max_tokens=2, vocab_size=10)
        with pytest.raises(ApiError, match=r"'logit_bias': token ids must be in \[0, 6\), but got 7"):
            sampling(fields, SamplingParams(), max_tokens=9, vocab_size=6)


def test_what_is_reported_reaches_the_engine() -> None:
    chat = parse_chat(json.dumps({**CHAT, "logprobs": True, "top_logprobs": 3, "n": 2}).encode())
    wanted = openai_chat.extent(chat)
    assert (wanted.logprobs, wanted.prompt_logprobs) == (3, None)
    assert (wanted.num_answers, wanted.num_choices) == (2, 2)
    for said, logprobs, prompt_logprobs in (
        ({}, None, None),
        ({"logprobs": 0}, 0, None),
        ({"logprobs": 7, "prompt_logprobs": 2}, 7, 2),
        ({"logprobs": 7, "prompt_logprobs": 2, "echo": True}, 7, 7),
        ({"logprobs": 1, "prompt_logprobs": 2, "echo": True}, 1, 2),
        ({"best_of": 3}, 0, None),
        ({"best_of": 1}, None, None),
        ({"best_of": 3, "logprobs": 2}, 2, None),
    ):
        completion = parse_completion(json.dumps({**COMPLETION, **said, "logprobs_kind": "processed"}).encode())
        wanted = openai_completions.extent(completion)
        assert (wanted.logprobs, wanted.prompt_logprobs) == (logprobs, prompt_logprobs), said
        meant = sampling(
            completion,
            SamplingParams(),
            max_tokens=None,
            vocab_size=9,
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
        )
        assert (meant.logprobs, meant.logprobs_kind, meant.prompt_logprobs) == (logprobs, "processed", prompt_logprobs)


def test_no_field_is_both_supported_and_declared_neutral() -> None:
    for neutral, model in (
        (openai_chat.NEUTRAL, openai_chat.ChatRequest),
        (openai_completions.NEUTRAL, openai_completions.CompletionRequest),
    ):
        assert not set(neutral) & set(model.model_fields)
        assert all(None in values for values in neutral.values())
