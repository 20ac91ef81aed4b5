"""What one step of 64 running requests costs on each link, and what one token costs on its way to a client."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagewood.engine.api import Delta
from pagewood.server.messages import wire
from pagewood.server.protocols.common.fields import StreamOptions
from pagewood.server.protocols.openai.chat import ChatFormat, parse_chat
from pagewood.server.protocols.openai.completions import CompletionFormat
from pagewood.server.protocols.openai.stream import Chunks

STEP = wire.Step(
    tuple(
        Delta(request_id=f"req-{n:032x}", tokens=(n,), num_prompt_tokens=100, num_cached_tokens=96, num_output_tokens=n)
        for n in range(64)
    )
)
ANSWERS = wire.Answers(
    tuple(wire.Answer(delta.request_id, " word", None, False, None, 100, 96, 5) for delta in STEP.deltas)
)
PROMPT = wire.Generate(
    request_id="req", prompt=wire.TokenPrompt(tokens=bytes(4 * 8192)), text=wire.TextOptions(stop=("\n\n",))
)


@pytest.mark.parametrize("message", [STEP, ANSWERS, PROMPT], ids=["step-64", "answers-64", "prompt-8192"])
def test_encode(benchmark: Any, message: Any) -> None:
    benchmark(wire.encode, message)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [(wire.from_engine, STEP), (wire.to_http, ANSWERS), (wire.to_tokenizer, PROMPT)],
    ids=["step-64", "answers-64", "prompt-8192"],
)
def test_decode(benchmark: Any, decoder: Any, message: Any) -> None:
    benchmark(decoder.decode, wire.encode(message))


@pytest.mark.parametrize("format", [ChatFormat, CompletionFormat])
def test_chunk(benchmark: Any, format: Any) -> None:
    looks: Chunks = format(id="chatcmpl-" + "0" * 32, created=1, model="pagewood-demo", options=StreamOptions())
    benchmark(looks.text, 0, " word", None, msgspec.UNSET)


def test_parse_chat(benchmark: Any) -> None:
    body = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "%b"}]}' % (b"word " * 200)
    benchmark(parse_chat, body)
