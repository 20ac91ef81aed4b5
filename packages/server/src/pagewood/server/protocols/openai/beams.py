"""The fields of beam search, and the fields that a beam search cannot follow."""

from __future__ import annotations

from typing import Any

from pagewood.engine.api import SAMPLING_PARAMETERS, SamplingParams
from pagewood.engine.beam_search import BeamSearchParams
from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.protocols.common.fields import Extent, GenerationFields, sampling, stop_expressions
from pagewood.server.protocols.common.sampling_fields import neutral_values
from pagewood.server.protocols.common.structured import StructuredFields, constraint

_FOLLOWED = frozenset(
    {
        "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "best_of", "ignore_eos",
        "stop_token_ids", "seed", "priority", "use_beam_search", "length_penalty", "early_stopping", "stop",
        "stop_regex", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "bad_words",
        "min_tokens", "logits_processors",
    }
)  # fmt: skip
"""Fields that may have any value. `seed` is among them because a beam search draws no random numbers."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: neutral_values(name) for name in SAMPLING_PARAMETERS},
    "temperature": (0, 1),  # no random draws; the probabilities are those of the model
    "top_logprobs": (0,),
    "logprobs_kind": ("raw",),
    "cache_hit_threshold": (0,),
    "kv_transfer_params": ({},),
}
"""Other fields -> their neutral values, besides null, false and an empty array."""


_REASONS = {"stream": ": which sequences are the best is known at the end of the search only"}
"""Why a field is refused, if the reason is not obvious."""


def check_beams(fields: GenerationFields) -> None:
    """Check that the fields of a request fit together for beam search.

    Raises:
        ApiError: a field needs a feature that beam search lacks, or that only beam search has.
    """
    if fields.use_beam_search:
        for name in sorted(fields.model_fields_set - _FOLLOWED - StructuredFields.model_fields.keys()):
            value = getattr(fields, name)
            if not (value is None or value is False or value == [] or value in _NEUTRAL.get(name, ())):
                raise _not_available(name)
        return
    for name, neutral in (("length_penalty", (None, 1)), ("early_stopping", (None, False))):
        if getattr(fields, name) not in neutral:
            raise ApiError(
                f"The '{name}' parameter is only allowed when 'use_beam_search' is enabled.",
                param=name,
                code="invalid_value",
            )


def _not_available(name: str) -> ApiError:
    why = _REASONS.get(name, "")
    message = f"The '{name}' parameter is not available when 'use_beam_search' is enabled{why}."
    return ApiError(message, param=name, code="invalid_value")


def params(fields: GenerationFields, extent: Extent, model: wire.Model) -> BeamSearchParams:
    """Return the search parameters of a request. The width of the beam is the number of answers computed.

    Raises:
        ApiError: a token is not in the vocabulary, the beam is too wide, or the grammar or a stop expression is wrong.
    """
    structured = constraint(fields)
    asked = sampling(
        fields,
        SamplingParams(),
        max_tokens=extent.max_tokens,
        vocab_size=model.vocab_size,
        grammar=None if structured is None else structured.grammar,
    )
    stop_regex = stop_expressions(fields)
    try:
        found = BeamSearchParams(
            beam_width=extent.num_answers,
            max_tokens=extent.max_tokens,
            length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
            early_stopping=fields.early_stopping or False,
            ignore_eos=asked.ignore_eos,
            stop_token_ids=asked.stop_token_ids,
            stop=tuple(fields.stop),
            stop_regex=stop_regex,
            repetition_penalty=asked.repetition_penalty,
            frequency_penalty=asked.frequency_penalty,
            presence_penalty=asked.presence_penalty,
            logit_bias=asked.logit_bias,
            min_tokens=asked.min_tokens,
            grammar=asked.grammar,
            logits_processors=asked.logits_processors,
        )
        found.stop_ids(model.eos_token_ids)
    except ValueError as error:  # the width is wrong: all else was checked with the fields
        param = "n" if extent.num_answers == extent.num_choices else "best_of"
        raise ApiError(f"Invalid value for '{param}': {error}.", param=param, code="invalid_value") from error
    return found
