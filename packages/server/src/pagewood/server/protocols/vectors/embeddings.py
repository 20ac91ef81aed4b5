"""`POST /v1/embeddings`: the fields of a request, its prompts, and the JSON of its answer."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.engine.model_folder.vector_recipe import VectorRecipe
from pagewood.server.http.errors import ApiError
from pagewood.server.http.field_limits import IdleSeconds
from pagewood.server.http.validation import WHOLE, parse
from pagewood.server.messages import wire
from pagewood.server.protocols.common.collected import Collected, PromptUsage, Work
from pagewood.server.protocols.common.fields import IGNORED, INT32_MAX, TokenId
from pagewood.server.protocols.common.prompts import parse_prompts
from pagewood.server.protocols.common.vectors import MAX_INPUTS, Cut, vector_request

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, True),
    "normalize": (None,),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "request_id": (None,),
    "rid": (None,),
    "cache_salt": (None, ""),
    "mm_processor_kwargs": (None, {}),
}
"""Fields of other servers that are not supported -> their neutral values, which have no effect and are accepted."""


_Ids = Annotated[list[TokenId], Field(min_length=1)]
_Inputs = str | _Ids | Annotated[list[str] | list[_Ids], Field(min_length=1, max_length=MAX_INPUTS)]
"""The accepted types, for the schema of the body."""


class EmbeddingRequest(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    input: Annotated[Any, BeforeValidator(parse_prompts, _Inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = None
    prompt_name: str | None = None
    """Which of the prompts of the model's folder goes before each text; an addition to OpenAI's API."""
    truncate_prompt_tokens: Cut = None
    """The number of tokens of a text beyond which it loses its end; -1: as many as the model takes. Null: such a text
    is an error. As in vLLM."""
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), WHOLE] | None = None
    ttl: IdleSeconds | None = None
    """As in chat completions."""


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """A text: base64 of float32 numbers, little-endian."""


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of all inputs, in their order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PromptUsage


def parse_embeddings(body: bytes) -> EmbeddingRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong, missing, unknown or not supported.
    """
    request = parse(EmbeddingRequest, body, neutral=NEUTRAL, ignored=IGNORED)
    if len(request.input) > MAX_INPUTS:
        raise ApiError(
            f"Invalid value for 'input': expected at most {MAX_INPUTS} inputs, but got {len(request.input)} instead.",
            param="input",
            code="invalid_value",
        )
    return request


def embeddings(request: EmbeddingRequest, recipe: VectorRecipe, model: wire.Model, *, model_name: str) -> Work:
    """Return the content of a request.

    Raises:
        ApiError: a token id is not in the vocabulary, or there is no prompt with this name.
    """
    pooling = recipe.pooling
    if request.dimensions is not None:
        pooling = replace(pooling, dimensions=request.dimensions)

    def render(found: Sequence[Collected], usage: PromptUsage) -> bytes:
        data = [
            Embedding(index=index, embedding=_encoded(one.vector, request.encoding_format))
            for index, one in enumerate(found)
        ]
        return msgspec.json.encode(Embeddings(data=data, model=model_name, usage=usage))

    return Work(
        requests=[
            vector_request(
                one, recipe, model, pooling=pooling, prompt_name=request.prompt_name, priority=request.priority or 0,
                param="input", cut=request.truncate_prompt_tokens,
            )
            for one in request.input
        ],
        prompt_param="input",
        render=render,
    )  # fmt: skip


def _encoded(vector: bytes, encoding_format: str | None) -> list[float] | str:
    """Return a vector as numbers, or as base64 of its float32 little-endian bytes."""
    if encoding_format == "base64":
        return base64.b64encode(vector).decode()
    return np.frombuffer(vector, "<f4").tolist()
