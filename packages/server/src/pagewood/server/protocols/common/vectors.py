"""The request for one vector, in any protocol."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from pagewood.engine.api import PoolingParams, RequestOptions
from pagewood.engine.model_folder.vector_recipe import HeadScoring, VectorRecipe
from pagewood.server.http.errors import ApiError
from pagewood.server.http.validation import WHOLE
from pagewood.server.messages import wire
from pagewood.server.protocols.common.fields import INT32_MAX
from pagewood.server.protocols.common.prompts import prompt_of
from pagewood.server.requests.live import new_request_id

MAX_INPUTS = 2048
"""As in OpenAI's API."""

Cut = Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None
"""The type of `truncate_prompt_tokens`, as in vLLM."""


def limit_of(cut: int | None) -> dict[str, Any]:
    """Return the arguments of `vector_request` for `truncate_prompt_tokens`.

    Raises:
        ApiError: it is 0.
    """
    if cut == 0:
        message = "Invalid value for 'truncate_prompt_tokens': expected -1 or a positive number, but got 0 instead."
        raise ApiError(message, param="truncate_prompt_tokens", code="invalid_value")
    if cut is None:
        return {}
    return {"cuts_prompt": True, "max_tokens": None if cut == -1 else cut}


def vector_request(
    prompt: str | list[int],
    recipe: VectorRecipe,
    model: wire.Model,
    *,
    pooling: PoolingParams,
    prompt_name: str | None,
    priority: int,
    param: str,
    cuts_prompt: bool = False,
    max_tokens: int | None = None,
) -> wire.Generate:
    """Return the request for the vector of a text or of token ids; see `wire.Generate.cuts_prompt`.

    `max_tokens` is the longest text that the client wants; None: the longest that the model takes.

    Raises:
        ApiError: a token id is not in the vocabulary, there is no prompt with this name, or the model makes no vectors.
    """
    if isinstance(recipe.scoring, HeadScoring):
        message = "This model scores pairs of texts and makes no vectors: use /v1/rerank or /v1/score."
        raise ApiError(message, param="model", code="unsupported_parameter")
    end_token = None
    if isinstance(prompt, str):
        end_token = recipe.end_token
        try:
            prompt = recipe.text(prompt, prompt_name=prompt_name)
        except ValueError as error:
            message = f"Invalid value for 'prompt_name': {error}."
            raise ApiError(message, param="prompt_name", code="invalid_value") from error
    return wire.Generate(
        request_id=new_request_id("req"),
        prompt=prompt_of(prompt, vocab_size=model.vocab_size, param=param),
        options=RequestOptions(pooling=pooling, priority=priority, adapter=model.adapter),
        end_token=end_token,
        max_length=min(recipe.longest(model.max_length), max_tokens or model.max_length),
        cuts_prompt=cuts_prompt,
    )
