"""Integers that a client writes with a fraction of zero: JSON has one type of number."""

from __future__ import annotations

from typing import Any, cast

import pytest

from memory_server import MemoryServer

pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "Hi"}]
BODIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 3, "temperature": 1}, {"seed": 7, "n": 1, "top_k": 5}),
    ("/v1/completions", {"prompt": [72, 105], "max_tokens": 3}, {"prompt": [72.0, 105.0], "stop_token_ids": [9]}),
    ("/v1/completions", {"prompt": [[72, 105]], "max_tokens": 3}, {"prompt": [[72, 105.0]], "priority": 2}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}, {}),
    ("/v1/messages", {"messages": USER, "max_tokens": 3}, {"top_k": 1}),
    ("/api/chat", {"messages": USER, "stream": False, "options": {"num_predict": 3}}, {}),
    ("/generate", {"input_ids": [72, 105], "sampling_params": {"max_new_tokens": 3}}, {"input_ids": [72.0, 105]}),
    ("/generate", {"input_ids": [[72, 105]], "sampling_params": {"max_new_tokens": 3}}, {"input_ids": [[72.0, 105]]}),
    ("/tokenize", {"text": "Hi"}, {}),
    ("/detokenize", {"tokens": [72, 105]}, {"tokens": [72.0, 105.0]}),
    ("/v1/embeddings", {"input": "Hi", "dimensions": 2}, {}),
]


def with_fractions(value: Any) -> Any:
    """Return a JSON value in which integers are written as 5.0."""
    match value:
        case dict():
            return {name: with_fractions(one) for name, one in cast("dict[str, Any]", value).items()}
        case list():
            return [with_fractions(one) for one in cast("list[Any]", value)]
        case int() if not isinstance(value, bool):
            return float(value)
        case _:
            return value


def comparable(answer: Any) -> Any:
    """Return what two equal requests have in common."""
    if isinstance(answer, list):
        return [comparable(one) for one in cast("list[Any]", answer)]
    for name in ("choices", "output", "content", "message", "text", "tokens", "data"):
        if name in answer:
            found = answer[name]
            return [found[0]["content"]] if name == "output" else found
    raise AssertionError(answer)


@pytest.mark.parametrize(("path", "plain", "more"), BODIES)
async def test_5_0_is_5(server: MemoryServer, path: str, plain: dict[str, Any], more: dict[str, Any]) -> None:
    expected = await server.post(path, plain | {name: value for name, value in more.items() if name not in plain})
    found = await server.post(path, with_fractions(plain | more))
    assert (found.status_code, expected.status_code) == (200, 200), found.text
    assert comparable(found.json()) == comparable(expected.json())


@pytest.mark.parametrize("value", [5.5, 1e300, True, "5"])
async def test_other_values_are_refused_by_name(server: MemoryServer, value: Any) -> None:
    said = {"prompt": [72, 105], "max_tokens": value}
    response = await server.post("/v1/completions", said)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
    ids = await server.post("/v1/completions", {"prompt": [72, value], "max_tokens": 3})
    assert ids.status_code == 400
    assert ids.json()["error"]["param"] == "prompt"
