"""The fields of beam search, and the fields that a beam search cannot follow."""

from __future__ import annotations

from typing import Any

from pagewood.engine.beam_search import BeamSearchParams
from pagewood.server import wire
from pagewood.server.errors import ApiError
from pagewood.server.openai.fields import Extent, GenerationFields, check_tokens
from pagewood.server.structured import StructuredFields, constraint

_FOLLOWED = frozenset(
    {
        "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "best_of", "ignore_eos",
        "stop_token_ids", "seed", "priority", "use_beam_search", "length_penalty", "early_stopping",
    }
)  # fmt: skip
"""Fields that may have any value. `seed` is among them because nothing is drawn."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),  # nothing is drawn; the probabilities are those of the model
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "typical_p": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "top_logprobs": (0,),
    "logprobs_kind": ("raw",),
}
"""Other fields -> the values that ask for nothing, besides null, false and an empty array."""


def check_beams(fields: GenerationFields) -> None:
    """Check that the fields of a request agree about beam search.

    Raises:
        ApiError: a field asks for something that a beam search does not do, or that only a beam search does.
    """
    if fields.use_beam_search:
        for name in sorted(fields.model_fields_set - _FOLLOWED - StructuredFields.model_fields.keys()):
            value = getattr(fields, name)
            if not (value is None or value is False or value == [] or value in _NEUTRAL.get(name, ())):
                raise _not_available(name)
        structured = constraint(fields)
        if structured is not None:
            raise _not_available(structured.param)
        return
    for name, neutral in (("length_penalty", (None, 1)), ("early_stopping", (None, False))):
        if getattr(fields, name) not in neutral:
            raise ApiError(
                f"The '{name}' parameter is only allowed when 'use_beam_search' is enabled.",
                param=name,
                code="invalid_value",
            )


def _not_available(name: str) -> ApiError:
    message = f"The '{name}' parameter is not available when 'use_beam_search' is enabled."
    return ApiError(message, param=name, code="invalid_value")


def params(fields: GenerationFields, extent: Extent, model: wire.Model) -> BeamSearchParams:
    """Return how to search for the answers to a request. The width of the beam is the number of answers computed.

    Raises:
        ApiError: a stop token is not in the vocabulary, or the beam is too wide.
    """
    stop_token_ids = tuple(fields.stop_token_ids or ())
    check_tokens(stop_token_ids, param="stop_token_ids", vocab_size=model.vocab_size)
    try:
        found = BeamSearchParams(
            beam_width=extent.num_answers,
            max_tokens=extent.max_tokens,
            length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
            early_stopping=fields.early_stopping or False,
            ignore_eos=bool(fields.ignore_eos),
            stop_token_ids=stop_token_ids,
        )
        found.stop_ids(model.eos_token_ids)
    except ValueError as error:  # of the width: all else was checked with the fields
        param = "n" if extent.num_answers == extent.num_choices else "best_of"
        raise ApiError(f"Invalid value for '{param}': {error}.", param=param, code="invalid_value") from error
    return found
