"""The engine's configuration from the options of the command line."""

from __future__ import annotations

import argparse

import pytest

from pagewood.engine.api import EngineConfig
from pagewood.server.cli.engine_options import add_engine_options, engine_config


def parse(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return engine_config(parser.parse_args(arguments))


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
        "--disable-cuda-graph",
        "--cuda-graph-max-batch",
        "8",
        "--batch-invariant",
    ]
    assert parse(*options) == EngineConfig(
        device="cuda",
        dtype="float16",
        mem_fraction=0.5,
        cuda_graph=False,
        cuda_graph_max_batch=8,
        batch_invariant=True,
    )


def test_an_option_out_of_range_names_itself() -> None:
    with pytest.raises(ValueError, match="mem_fraction must be in"):
        parse("--mem-fraction", "1.5")
