"""The request for one vector, in any protocol."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

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


def _not_zero(value: int) -> int:
    if not value:
        raise ValueError("expected -1 or a positive number, but got 0 instead")
    return value


Cut = Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE, AfterValidator(_not_zero)] | None
"""The number of tokens beyond which a text loses its end, as `truncate_prompt_tokens` of vLLM; -1: as many as the model
takes; None: a text that is longer than that is an error."""


def longest(cut: int | None, recipe: VectorRecipe, model: wire.Model) -> int:
    """Return the longest text in tokens that a request may have or keep."""
    most = recipe.longest(model.max_length)
    return most if cut in (None, -1) else min(most, cut)


def vector_request(
    prompt: str | list[int],
    recipe: VectorRecipe,
    model: wire.Model,
    *,
    pooling: PoolingParams,
    prompt_name: str | None,
    priority: int,
    param: str,
    cut: int | None = None,
) -> wire.Generate:
    """Return the request for the vector of a text or of token ids; for `cut` see `Cut`.

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
        max_length=longest(cut, recipe, model),
        cuts_prompt=cut is not None,
    )
