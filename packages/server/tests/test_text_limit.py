"""A text with too many tokens is refused before the library has all of them in memory at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memory_server import MAX_LENGTH, MemoryServer
from pagewood.engine.api import Overflow, PassOn, PoolingParams, Refuse, RequestOptions, Submit
from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire
from pagewood.server.stages import text_limit
from pagewood.server.stages.text_limit import MAX_TOKENS, PART
from pagewood.server.stages.tokenizing import commands

SMALL = 50_000
"""`MAX_TOKENS` in tests of what does not depend on its value."""


class Watching:
    """A tokenizer that records the lengths of what it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lengths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        self.lengths.append(len(text))
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def watched(tokenizer: Tokenizer, message: wire.WithPrompt) -> tuple[Any, list[int]]:
    """Return the command for a message, and the lengths of what was encoded for it."""
    watching: Any = Watching(tokenizer)
    (found,) = commands(watching, message)
    return found, watching.lengths


def messages(text: str, **options: Any) -> list[wire.WithPrompt]:
    """Return a message of each kind."""
    prompt = wire.TextPrompt(text=text)
    return [
        wire.Encode(request_id="a", prompt=prompt, **options),
        wire.Encode(request_id="a", prompt=wire.ChatPrompt(messages=({"role": "user", "content": text},)), **options),
        wire.RetainText(request_id="a", prompt=prompt, seconds=1.0, **options),
        wire.Generate(request_id="a", prompt=prompt, **options),
    ]


def test_what_is_encoded_of_a_refused_text_is_small(tokenizer: Tokenizer) -> None:
    for text in ("1" * (MAX_TOKENS + 1), "é1 " * (MAX_TOKENS // 3)):  # the second has two bytes in a character
        found, lengths = watched(tokenizer, wire.Encode(request_id="a", prompt=wire.TextPrompt(text=text)))
        assert isinstance(found, Refuse)
        assert found.refusal.code == "text_too_long"
        assert found.refusal.message.startswith(
            f"the text must have at most {MAX_TOKENS} tokens, got more in its first "
        )
        assert max(lengths, default=0) <= PART
        assert sum(lengths) <= MAX_TOKENS + PART


def test_a_text_at_the_limit_is_encoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_limit, "MAX_TOKENS", SMALL)
    for text in ("é" * (SMALL // 2), "1" * SMALL):
        for message in messages(text)[:1] + messages(text)[2:]:
            found, lengths = watched(tokenizer, message)
            assert not isinstance(found, Refuse)
            assert lengths == [len(text)]  # its bytes say that it has no more tokens


def test_a_long_text_of_few_tokens_is_counted_and_encoded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_limit, "MAX_TOKENS", SMALL)
    special = max(tokenizer.special_tokens, key=len)
    text = special * (SMALL // 2)
    assert len(text) > SMALL
    found, lengths = watched(tokenizer, wire.Encode(request_id="a", prompt=wire.TextPrompt(text=text)))
    assert isinstance(found, PassOn)
    assert lengths[-1] == sum(lengths[:-1]) == len(text)
    encoded = wire.carried.decode(found.carry)
    assert isinstance(encoded, wire.Encoded)
    ids = np.frombuffer(encoded.tokens, "<i4")
    assert ids.tolist() == tokenizer.encode(text).tolist()


def test_every_kind_of_message_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_limit, "MAX_TOKENS", SMALL)
    text = "1" * (SMALL + 1)
    for message in messages(text):
        found, lengths = watched(tokenizer, message)
        assert isinstance(found, Refuse)
        assert (found.refusal.code, found.refusal.param) == ("text_too_long", "prompt")
        assert max(lengths) <= PART
        assert len(lengths) == 1


def test_the_limit_grows_with_the_longest_text_of_the_model(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a prompt that fits the model is encoded, and a count of tokens goes beyond what fits."""
    monkeypatch.setattr(text_limit, "MAX_TOKENS", SMALL)
    text = "1" * (2 * SMALL)
    for message in messages(text, max_length=SMALL):
        found, _ = watched(tokenizer, message)
        is_chat = isinstance(message, wire.Encode) and isinstance(message.prompt, wire.ChatPrompt)
        assert (found.refusal.code if isinstance(found, Refuse) else None) == (
            "text_too_long" if is_chat else None  # a template adds tokens
        )
    (submit,) = commands(tokenizer, messages("1" * (2 * SMALL - 200), max_length=2 * SMALL)[3])
    assert isinstance(submit, Submit)


def test_a_prompt_with_too_many_tokens_does_not_fit_the_model(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes alone do not say so; clients know this refusal, and shorten the conversation."""
    monkeypatch.setattr(text_limit, "MAX_TOKENS", SMALL)
    message = messages("a" * (2 * SMALL), max_length=SMALL // 2)[3]
    found, lengths = watched(tokenizer, message)
    expected = Overflow(num_prompt=SMALL // 2 + 1, max_length=SMALL // 2, max_tokens=128, is_counted=False)
    assert isinstance(found, Refuse)
    assert found.refusal == expected.refusal()
    assert max(lengths) <= PART


def test_a_text_that_would_be_cut_is_refused_too(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_limit, "MAX_TOKENS", SMALL)
    options = RequestOptions(pooling=PoolingParams())
    for number, code in ((SMALL, None), (SMALL + 1, "text_too_long")):
        prompt = wire.TextPrompt(text="1" * number)
        message = wire.Generate(request_id="a", prompt=prompt, options=options, max_length=100, cuts_prompt=True)
        found, lengths = watched(tokenizer, message)
        assert (found.refusal.code if isinstance(found, Refuse) else None) == code
        assert code is None or max(lengths) <= PART


@pytest.mark.anyio
@pytest.mark.parametrize(
    "path",
    [
        *("/tokenize", "/apply_template", "/retain", "/generate", "/v1/messages/count_tokens", "/v1/embeddings"),
        *("/v1/completions", "/api/embed", "/rerank", "/v1/score"),
    ],
)
async def test_every_endpoint_refuses_by_name(server: MemoryServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_limit, "MAX_TOKENS", SMALL)
    monkeypatch.setattr(text_limit, "PART", 4_096)
    assert 2 * MAX_LENGTH < SMALL
    text = "é1 " * (SMALL // 4 + 1)
    said = [{"role": "user", "content": text}]
    bodies: dict[str, dict[str, Any]] = {
        "/tokenize": {"text": text},
        "/apply_template": {"messages": said},
        "/retain": {"text": text, "seconds": 1},
        "/generate": {"text": ["a", text]},
        "/v1/messages/count_tokens": {"messages": said},
        "/v1/embeddings": {"input": ["a", text]},
        "/v1/completions": {"prompt": ["a", text]},
        "/api/embed": {"input": ["a", text]},
        "/rerank": {"query": "a", "documents": ["b", text]},
        "/v1/score": {"text_1": "a", "text_2": ["b", text]},
    }
    lengths: list[int] = []
    encode = Tokenizer.encode

    def watched_encode(self: Tokenizer, text: str, **options: Any) -> Any:
        lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched_encode)
    body = {"model": server.service.model_name, **bodies[path]}
    response = await server.admin.post(path, json=body)
    assert response.status_code == 400, response.text
    assert f"at most {SMALL} tokens" in response.text or "maximum context length" in response.text
    assert max(lengths, default=0) < len(text)
