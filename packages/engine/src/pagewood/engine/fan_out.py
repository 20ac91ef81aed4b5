"""Several answers to one prompt: requests that differ in their ids and seeds only. Standard library and msgspec only.

The engine knows nothing of it. It computes a prompt that several requests share once: it parks the later ones until the
KV of the first is published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from pagewood.engine.api import Submit
from pagewood.engine.seeds import answer_seed

ROW_STARTS = ("routed_experts_from", "hidden_states_from")
"""Sampling parameters that say from which position on a request has rows."""


def num_prompt_rows(submit: Submit, start: str) -> int:
    """Return how many of the rows that a request asks for only its first answer has; `start` is of `ROW_STARTS`."""
    first: int | None = getattr(submit.sampling, start)
    return 0 if first is None or first == -1 else max(0, len(submit.tokens) // 4 - 1 - first)


def fan_out(submit: Submit, request_ids: Sequence[str], *, carry: bytes = b"") -> list[Submit]:
    """Return the requests for several answers to the prompt of `submit`: itself, and one for each of `request_ids`.

    Only the first is asked for log probabilities, experts and hidden states of the prompt, which are the same for all;
    the others have these rows from the last token of the prompt on. Without a seed, the engine gives each request its
    own.

    Args:
        submit: the request for answer 0.
        request_ids: of the answers from 1 on.
        carry: of the answers from 1 on.
    """
    own = {name: -1 for name in ROW_STARTS if num_prompt_rows(submit, name)}
    sampling = replace(submit.sampling, prompt_logprobs=None, **own)
    siblings: list[Submit] = []
    for index, request_id in enumerate(request_ids, start=1):
        if sampling.seed is not None:
            assert submit.sampling.seed is not None
            sampling = replace(sampling, seed=answer_seed(submit.sampling.seed, index))
        siblings.append(msgspec.structs.replace(submit, request_id=request_id, sampling=sampling, carry=carry))
    return [submit, *siblings]
