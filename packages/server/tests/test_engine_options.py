"""The engine's configuration from the options of the command line."""

from __future__ import annotations

import argparse

import pytest

from pagewood.engine.api import EngineConfig, TenantQuota
from pagewood.server.cli import main
from pagewood.server.cli.options.engine import engine_config
from pagewood.server.cli.options.page import Page
from pagewood.server.cli.serve import add_options


def parse(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_options(Page(parser=parser))
    options = parser.parse_args(arguments)
    return engine_config(options, model=options.model)


def test_no_option_is_the_default_configuration() -> None:
    assert parse() == EngineConfig()


def test_options_of_cuda() -> None:
    options = [
        "--device",
        "cuda",
        "--dtype",
        "float16",
        "--mem-fraction",
        "0.5",
        "--cuda-graph-max-batch",
        "8",
        "--batch-invariant",
    ]
    experts = parse("--device", "cuda", "--expert-kernels", "flashinfer")
    assert experts == EngineConfig(device="cuda", expert_kernels="flashinfer")
    assert parse(*options) == EngineConfig(
        device="cuda",
        dtype="float16",
        mem_fraction=0.5,
        cuda_graph_max_batch=8,
        batch_invariant=True,
    )
    assert parse("--disable-cuda-graph") == EngineConfig(cuda_graph=False)


def test_options_of_ranks() -> None:
    options = ["--tensor-parallel-size", "2", "--expert-parallel", "--enable-dp-attention"]
    assert parse(*options) == EngineConfig(tensor_parallel_size=2, expert_parallel=True, enable_dp_attention=True)


def test_options_of_weights() -> None:
    options = ["--weights", "bfloat16", "--activations", "bfloat16"]
    assert parse(*options) == EngineConfig(weights="bfloat16", activations="bfloat16")


def test_options_of_speculation() -> None:
    options = [
        "--speculative",
        "eagle",
        "--speculative-model",
        "head",
        "--speculative-num-tokens",
        "8",
        "--speculative-control",
        "fixed",
    ]
    assert parse(*options) == EngineConfig(
        speculative="eagle",
        speculative_model="head",
        speculative_num_tokens=8,
        speculative_control="fixed",
    )
    rejection = ["--speculative", "draft", "--speculative-verify", "rejection"]
    assert parse(*rejection) == EngineConfig(speculative="draft", speculative_verify="rejection")
    with pytest.raises(ValueError, match="speculative_model must come with speculative draft or eagle"):
        parse("--speculative", "ngram", "--speculative-model", "head")


def test_options_of_structured_output() -> None:
    options = ["--grammar-backend", "xgrammar", "--grammar-timeout", "2.5"]
    assert parse(*options) == EngineConfig(grammar_backend="xgrammar", grammar_timeout_s=2.5)
    with pytest.raises(ValueError, match=r"grammar_timeout_s must be > 0, got 0\.0"):
        parse("--grammar-timeout", "0")


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_wrong_option_of_speculation_is_a_usage_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [command] if command == "serve" else [command, "Hello"]
    assert main([*words, "--speculative", "ngram", "--speculative-num-tokens", "65"]) == 2
    assert capsys.readouterr().err == "pagewood: error: speculative_num_tokens must be <= 64, got 65\n"
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--speculative", "magic"])
    assert "invalid choice: 'magic'" in capsys.readouterr().err


def test_logits_processors(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--logits-processor", "ban=mine.processors:ban", "--logits-processor", "x=y:z"]
    assert parse(*options) == EngineConfig(logits_processors=(("ban", "mine.processors:ban"), ("x", "y:z")))
    with pytest.raises(ValueError, match=r"places like package.module:function, got 'os.system' for 'x'"):
        parse("--logits-processor", "x=os.system")
    with pytest.raises(SystemExit, match="2"):
        parse("--logits-processor", "mine.processors:ban")
    assert "expected NAME=PACKAGE.MODULE:FUNCTION, got 'mine.processors:ban'" in capsys.readouterr().err


def test_an_option_out_of_range_names_itself() -> None:
    with pytest.raises(ValueError, match="mem_fraction must be in"):
        parse("--mem-fraction", "1.5")


def test_options_of_limits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quota", "a:b:max_running=4,max_kv_tokens=100", "--quota", "*:max_tokens_in_flight=9", "--refuse-late"]
    more = ["--schedule-preset", "stall-free", "--stream-interval", "4", "--prefill-max-requests", "2"]
    assert parse(*options, *more, "--max-prefill-tokens", "64") == EngineConfig(
        quotas=(TenantQuota("a:b", max_running=4, max_kv_tokens=100), TenantQuota("*", max_tokens_in_flight=9)),
        refuse_late=True,
        schedule_preset="stall-free",
        stream_interval=4,
        max_prefills=2,
        chunked_prefill_size=64,
    )
    for wrong in ("a", "a:", "a:max_running", "a:max_running=x", "a:most=1", "a:max_running=1,max_running=2"):
        with pytest.raises(SystemExit, match="2"):
            parse("--quota", wrong)
        assert (
            "must be TENANT:LIMIT=N,... with limits of max_running, max_tokens_in_flight, max_kv_tokens, each once, "
            f"got {wrong!r}"
        ) in capsys.readouterr().err
    with pytest.raises(ValueError, match="quotas must have max_running >= 1, got 0 for 'a'"):
        parse("--quota", "a:max_running=0")
