"""What one token costs in the detokenizer, early and late in a text, with and without stop strings."""

from __future__ import annotations

from typing import Any

import pytest

from echo_folder import write_echo_folder
from pagewood.engine.api import RequestOptions, SamplingParams
from pagewood.engine.text import TextStream, Tokenizer
from pagewood.server.messages import wire
from pagewood.server.stages.tokenizing import commands


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("echo")
    write_echo_folder(folder)
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("num_before", [0, 10_000])
@pytest.mark.parametrize("num_stops", [0, 1, 4])
def test_token(benchmark: Any, tokenizer: Tokenizer, num_before: int, num_stops: int) -> None:
    stream = TextStream(tokenizer, stop=[f"\n\nuser {n}:" for n in range(num_stops)])
    tokens = tokenizer.encode("some text and\n\nmore ").tolist()
    stream.push(tokens * (num_before // len(tokens)))
    benchmark(stream.push, (tokens[0],))


def test_tokenize_chat(benchmark: Any, tokenizer: Tokenizer) -> None:
    messages = tuple({"role": "user", "content": "word " * 40} for _ in range(10))
    generate = wire.Generate(
        request_id="a",
        prompt=wire.ChatPrompt(messages=messages),
        options=RequestOptions(sampling=SamplingParams(max_tokens=1)),
    )
    benchmark(commands, tokenizer, generate)
