import re
from dataclasses import replace
from typing import Any

import pytest

from pagewood.engine.api import EngineConfig, Grammar, SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("max_tokens", 0, "max_tokens must be >= 1, got 0"),
        ("temperature", -0.1, r"temperature must be in \[0, 100\], got -0.1"),
        ("temperature", float("nan"), "temperature must be"),
        ("top_k", -1, r"top_k must be in \[0, 2147483647\], got -1"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\], got 0.0"),
        ("min_p", 1.5, r"min_p must be in \[0, 1\], got 1.5"),
        ("typical_p", 0.0, r"typical_p must be in \(0, 1\], got 0.0"),
        ("bad_words", ((),), "bad_words must hold sequences of 1 to 32 tokens, got 0"),
        ("bad_words", ((1,) * 33,), "bad_words must hold sequences of 1 to 32 tokens, got 33"),
        ("bad_words", ((1,),) * 257, "bad_words must hold at most 256 sequences, got 257"),
        ("bad_words", ((1, -2),), r"bad_words must hold token ids in \[0, 2\*\*31\), got -2"),
        ("seed", 2**63, "seed must fit in 64 signed bits"),
    ],
)
def test_sampling_out_of_range_names_argument_rule_and_value(field: str, value: float, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"page_size": 0}, "page_size must be >= 1, got 0"),
        ({"max_running": 0}, "max_running must be >= 1, got 0"),
        ({"max_length": 1}, "max_length must be >= 2, for a prompt and an output of a token each, got 1"),
        ({"max_total_tokens": 8, "page_size": 16}, "max_total_tokens must hold at least one page of 16, got 8"),
        ({"schedule_conservativeness": 0.0}, "schedule_conservativeness must be > 0 and finite, got 0.0"),
        ({"schedule_conservativeness": float("nan")}, "schedule_conservativeness must be > 0 and finite, got nan"),
        ({"schedule_conservativeness": float("inf")}, "schedule_conservativeness must be > 0 and finite, got inf"),
        (
            {"cuda_graph": False, "cuda_graph_max_batch": 8},
            "cuda_graph_max_batch must be None without cuda_graph, got 8",
        ),
        (
            {"overlap": True, "num_continuous_decode_steps": 2},
            "overlap must be None or False with num_continuous_decode_steps > 1, got True with 2",
        ),
        (
            {"prefix_cache": False, "cache_history_tokens": 9},
            "cache_history_tokens must be 0 without prefix_cache, got 9",
        ),
        ({"decision_log_tokens": True}, "decision_log_tokens must be False without decision_log, got True"),
        (
            {"schedule_weights": (("a", 2.0),), "schedule_policy": "edf"},
            "schedule_weights must be empty unless schedule_policy is fair or wrr, got .* with edf",
        ),
        ({"device": "tpu"}, "device must be auto, cpu or cuda, got 'tpu'"),
        ({"host_cache_gb": float("nan")}, "host_cache_gb must be > 0, got nan"),
        ({"page_size": 1.5}, "page_size must be an int, got 1.5"),
        ({"max_running": "4"}, "max_running must be an int, got '4'"),
        ({"num_threads": 0}, "num_threads must be >= 1, got 0"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size must be >= 1, got 0"),
    ],
)
def test_a_wrong_configuration_names_argument_rule_and_value(options: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        EngineConfig(**options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (
            {"speculative": "magic"},
            "speculative must be one of off, ngram, suffix, draft, eagle, auto, got 'magic'",
        ),
        (
            {"speculative_control": "none"},
            "speculative_control must be one of adaptive, fixed, got 'none'",
        ),
        (
            {"speculative_verify": "tree"},
            "speculative_verify must be one of exact, rejection, got 'tree'",
        ),
        (
            {"speculative": "ngram", "speculative_model": "head"},
            "speculative_model must come with speculative draft or eagle, got 'head' with ngram",
        ),
        (
            {"speculative_model": "head"},
            "speculative_model must come with speculative draft or eagle, got 'head' with off",
        ),
        (
            {"speculative": "auto", "speculative_verify": "rejection"},
            "speculative_verify must be exact unless speculative is draft or eagle, got rejection with auto",
        ),
        ({"speculative_num_tokens": 0}, "speculative_num_tokens must be >= 1, got 0"),
        ({"speculative_num_tokens": 65}, "speculative_num_tokens must be <= 64, got 65"),
        ({"speculative_num_tokens": 2.0}, "speculative_num_tokens must be an int, got 2.0"),
        ({"speculative_num_tokens": None}, "speculative_num_tokens must be an int, got None"),
    ],
)
def test_a_wrong_option_of_speculation_names_argument_rule_and_value(options: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        EngineConfig(**options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "options",
    [
        {"speculative": "ngram", "speculative_num_tokens": 64, "speculative_control": "fixed"},
        {"speculative": "suffix"},
        {"speculative": "auto"},
        {"speculative": "draft", "speculative_model": "small", "speculative_verify": "rejection"},
        {"speculative": "eagle", "speculative_model": "head", "speculative_num_tokens": 16},
    ],
)
def test_options_of_speculation_that_go_together(options: dict[str, object]) -> None:
    config = EngineConfig(**options)  # pyright: ignore[reportArgumentType]
    assert config.resolved().resolved() == config.resolved()
    for device in ("cpu", "cuda"):  # speculation has no default that depends on the device
        resolved = replace(config, device=device).resolved()
        assert {name: getattr(resolved, name) for name in options} == options


def test_no_speculation_is_the_default() -> None:
    config = EngineConfig()
    assert (config.speculative, config.speculative_model) == ("off", None)


def test_a_resolved_configuration_has_the_defaults_of_its_device() -> None:
    def resolved(**options: object) -> tuple[object, ...]:
        config = EngineConfig(**options).resolved()  # pyright: ignore[reportArgumentType]
        assert config.resolved() == config
        assert (config.num_rows, config.max_chunk_tokens) == (config.max_running, config.chunked_prefill_size)
        return config.device, config.dtype, config.kv_cache_dtype, config.max_running, config.chunked_prefill_size

    assert resolved() == ("cpu", "float32", "float32", 64, 512)
    assert resolved(kv_cache_dtype="int8") == ("cpu", "float32", "int8", 64, 512)
    assert resolved(device="cuda") == ("cuda", "bfloat16", "bfloat16", 256, 2048)
    chosen = resolved(device="cuda", dtype="float16", max_running=3, chunked_prefill_size=7)
    assert chosen == ("cuda", "float16", "float16", 3, 7)


def test_constructors_of_grammars() -> None:
    schema = {"type": "object", "properties": {"b": {"const": "é"}, "a": {}}}
    text = '{"type":"object","properties":{"b":{"const":"é"},"a":{}}}'
    assert Grammar.json_schema(schema) == Grammar.json_schema(text) == Grammar(kind="json_schema", text=text)
    assert Grammar.regex("[0-9]+") == Grammar(kind="regex", text="[0-9]+")
    assert Grammar.choice(("yes", "no")) == Grammar(kind="choice", text='["yes","no"]')
    assert Grammar.lark('start: "x"') == Grammar(kind="lark", text='start: "x"')
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    assert Grammar.structural_tag(tag) == Grammar(
        kind="structural_tag", text='{"type":"structural_tag","format":{"type":"any_text"}}'
    )


@pytest.mark.parametrize(
    ("make", "value", "error", "rule"),
    [
        (Grammar.json_schema, {"enum": {1, 2}}, TypeError, "schema must be a JSON value or its text"),
        (Grammar.json_schema, {"const": float("nan")}, ValueError, "schema must be a JSON value or its text"),
        (Grammar.json_schema, "", ValueError, "grammar.text must not be empty"),
        (Grammar.choice, "yes", TypeError, "choices must be a sequence of strings, got 'yes'"),
        (Grammar.choice, ["yes", 1], TypeError, "choices must be a sequence of strings"),
        (Grammar.structural_tag, {"type": {1}}, TypeError, "tag must be a JSON value or its text"),
        (Grammar.regex, "", ValueError, "grammar.text must not be empty"),
    ],
)
def test_a_wrong_grammar_names_the_argument(make: Any, value: Any, error: type[Exception], rule: str) -> None:
    with pytest.raises(error, match=rule):
        make(value)
