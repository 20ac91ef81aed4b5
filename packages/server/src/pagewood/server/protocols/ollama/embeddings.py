"""`POST /api/embed` and the older `/api/embeddings`: the bodies of requests, and the JSON of their answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

import msgspec
import numpy as np
from pydantic import BeforeValidator, Field

from pagewood.engine.model_folder.vector_recipe import VectorRecipe
from pagewood.server.http.validation import WHOLE, kind, parse
from pagewood.server.messages import wire
from pagewood.server.protocols.common.collected import Collected, PromptUsage, Work
from pagewood.server.protocols.common.sampling_fields import INT32_MAX
from pagewood.server.protocols.common.vectors import MAX_INPUTS, vector_request
from pagewood.server.protocols.ollama.keep_alive import KeepAlive
from pagewood.server.protocols.ollama.lenient import Lenient
from pagewood.server.protocols.ollama.options import OptionsField


def _texts(value: Any) -> list[str]:
    """Return the texts of a string or of an array of strings; an empty string gives no texts, as in Ollama."""
    if isinstance(value, str):
        return [value] if value else []
    texts = cast("list[Any]", value)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected a string or an array of strings, but got {kind(value)} instead")
    if len(texts) > MAX_INPUTS:
        raise ValueError(f"expected at most {MAX_INPUTS} texts, but got {len(texts)}")
    return texts


class OllamaEmbedRequest(Lenient):
    """The body of a request to `/api/embed`."""

    model: str
    input: Annotated[list[str], BeforeValidator(_texts, str | Annotated[list[str], Field(max_length=MAX_INPUTS)])]
    truncate: bool | None = None
    """Whether a text that is too long loses its end; None: yes. If false, the request is refused."""
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = None
    options: OptionsField = None
    """Without effect."""
    keep_alive: KeepAlive = None
    """As in `/api/chat`."""


class OllamaEmbeddingsRequest(Lenient):
    """The body of a request to `/api/embeddings`."""

    model: str
    prompt: str | None = None
    options: OptionsField = None
    """Without effect."""
    keep_alive: KeepAlive = None
    """As in `/api/chat`."""


class OllamaEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of all texts, each of length 1."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    """In nanoseconds."""
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, frozen=True):
    """The vector of one text, with the length that the model's folder gives; empty without a text."""

    embedding: list[float]


def parse_embed(body: bytes) -> OllamaEmbedRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong or missing.
    """
    return parse(OllamaEmbedRequest, body, neutral={}, ignored=frozenset())


def parse_embeddings(body: bytes) -> OllamaEmbeddingsRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong or missing.
    """
    return parse(OllamaEmbeddingsRequest, body, neutral={}, ignored=frozenset())


def embed(
    request: OllamaEmbedRequest,
    recipe: VectorRecipe,
    model: wire.Model,
    *,
    started_s: float,
    load_s: float,
) -> Work:
    """Return the content of a request to `/api/embed`.

    Args:
        request: its body.
        recipe: of the model.
        model: which it is.
        started_s: when it came, on the monotonic clock.
        load_s: how long it waited for the load of the model.
    """
    pooling = replace(recipe.pooling, normalize=True)
    if request.dimensions is not None:
        pooling = replace(pooling, dimensions=request.dimensions)

    def render(found: Sequence[Collected], usage: PromptUsage) -> bytes:
        answer = OllamaEmbeddings(
            model=request.model,
            embeddings=[_numbers(one) for one in found],
            total_duration=max(0, round((time.monotonic() - started_s) * 1e9)),
            load_duration=round(load_s * 1e9),
            prompt_eval_count=usage.prompt_tokens,
        )
        return msgspec.json.encode(answer)

    requests = [
        vector_request(
            text, recipe, model, pooling=pooling, prompt_name=None, priority=0, param="input",
            cut=None if request.truncate is False else -1,
        )
        for text in request.input
    ]  # fmt: skip
    return Work(requests=requests, prompt_param="input", render=render)


def embeddings(request: OllamaEmbeddingsRequest, recipe: VectorRecipe, model: wire.Model) -> Work:
    """Return the content of a request to `/api/embeddings`."""

    def render(found: Sequence[Collected], usage: PromptUsage) -> bytes:
        return msgspec.json.encode(OllamaEmbedding(_numbers(found[0]) if found else []))

    texts = [request.prompt] if request.prompt else []
    requests = [
        vector_request(text, recipe, model, pooling=recipe.pooling, prompt_name=None, priority=0, param="prompt")
        for text in texts
    ]
    return Work(requests=requests, prompt_param="prompt", render=render)


def _numbers(one: Collected) -> list[float]:
    return np.frombuffer(one.vector, "<f4").tolist()
