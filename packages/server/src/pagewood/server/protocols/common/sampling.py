"""How tokens are chosen, where the request of any protocol leaves something out."""

from __future__ import annotations

import dataclasses

from pagewood.engine.api import SamplingParams

INT32_MAX = 2**31 - 1


def chosen(
    defaults: SamplingParams,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    repetition_penalty: float | None = None,
) -> SamplingParams:
    """Return the defaults of a model, with what a request says in their place.

    Args:
        defaults: of the model.
        temperature: 0 is greedy.
        top_k: at most 0 switches the filter off.
        top_p: 0 leaves only the most likely token.
        min_p: 0 switches the filter off.
        typical_p: 1 switches the filter off.
        repetition_penalty: 1 switches it off.
    """
    top_p = defaults.top_p if top_p is None else top_p
    temperature = defaults.temperature if temperature is None else temperature
    return dataclasses.replace(
        defaults,
        temperature=temperature if top_p else 0.0,
        top_k=defaults.top_k if top_k is None else max(top_k, 0),
        top_p=top_p or 1.0,
        min_p=defaults.min_p if min_p is None else min_p,
        typical_p=defaults.typical_p if typical_p is None else typical_p,
        repetition_penalty=defaults.repetition_penalty if repetition_penalty is None else repetition_penalty,
    )
