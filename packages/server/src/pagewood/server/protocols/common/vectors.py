"""The request for one vector, in any protocol."""

from __future__ import annotations

from pagewood.engine.api import PoolingParams, RequestOptions
from pagewood.engine.model_folder.vector_recipe import VectorRecipe
from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.protocols.common.prompts import prompt_of
from pagewood.server.requests.live import new_request_id

MAX_INPUTS = 2048
"""As in OpenAI's API."""


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
) -> wire.Generate:
    """Return the request for the vector of a text or of token ids; see `wire.Generate.cuts_prompt`.

    Raises:
        ApiError: a token id is not in the vocabulary, or there is no prompt with this name.
    """
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
        max_length=recipe.longest(model.max_length),
        cuts_prompt=cuts_prompt,
    )
