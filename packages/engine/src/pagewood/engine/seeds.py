"""The seeds of requests: by their arrival, and of several answers to one prompt. Standard library only."""

from __future__ import annotations

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd: neighbouring arrivals get distant seeds."""
_TAG = 0x5349424C494E4753
"""Separates the seeds of answers from the hashes that the sampler makes of a seed ("SIBLINGS" in ASCII)."""
_STRIDE = 0xD1342543DE82EF95
"""Odd, so that all answers to a prompt have different seeds (Steele and Vigna, 2021)."""


def arrival_seed(seed: int, number: int) -> int:
    """Return the seed of a request without one, in [0, 2**63).

    Args:
        seed: of the process that takes requests.
        number: of the arrival, counted from 1.
    """
    return (seed + number * _GOLDEN) & (2**63 - 1)


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


def _mix(word: int) -> int:
    """Return the hash of 64 bits: `runner.splitmix.mix` of a Python number."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
