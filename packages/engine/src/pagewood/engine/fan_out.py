"""Several answers to one prompt: requests that differ in their ids and seeds only. Standard library and msgspec only.

The engine knows nothing of it. It computes a prompt that several requests share once: it parks the later ones until the
KV of the first is published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from pagewood.engine.api import Submit

_WORD = 2**64 - 1
_TAG = 0x5349424C494E4753
"""Separates the seeds of answers from the hashes that the sampler makes of a seed ("SIBLINGS" in ASCII)."""
_STRIDE = 0xD1342543DE82EF95
"""Odd, so that all answers to a prompt have different seeds (Steele and Vigna, 2021)."""


def answer_seed(seed: int, index: int) -> int:
    """Return the seed of answer `index`, counted from 0, to a prompt with a seed.

    Answer 0 has the seed itself, so it is the answer that the same request for one answer gets. The others have
    `mix(mix(seed ^ TAG) + index * STRIDE)` of 64 bits, as a signed number, where `mix` is that of `runner.splitmix`.

    Args:
        seed: 64 signed bits.
        index: at least 0.
    """
    if index == 0:
        return seed
    word = _mix((_mix((seed ^ _TAG) & _WORD) + index * _STRIDE) & _WORD)
    return word - 2**64 if word >= 2**63 else word


def fan_out(submit: Submit, request_ids: Sequence[str], *, carry: bytes = b"") -> list[Submit]:
    """Return the requests for several answers to the prompt of `submit`: itself, and one for each of `request_ids`.

    Only the first is asked for log probabilities of the prompt, which are the same for all. Without a seed, the engine
    gives each request its own.

    Args:
        submit: the request for answer 0.
        request_ids: of the answers from 1 on.
        carry: of the answers from 1 on.
    """
    sampling = replace(submit.sampling, prompt_logprobs=None)
    siblings: list[Submit] = []
    for index, request_id in enumerate(request_ids, start=1):
        if sampling.seed is not None:
            assert submit.sampling.seed is not None
            sampling = replace(sampling, seed=answer_seed(submit.sampling.seed, index))
        siblings.append(msgspec.structs.replace(submit, request_id=request_id, sampling=sampling, carry=carry))
    return [submit, *siblings]


def _mix(word: int) -> int:
    """Return the hash of 64 bits: `runner.splitmix.mix` of a Python number."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
