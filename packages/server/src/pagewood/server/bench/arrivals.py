"""When requests are sent: a number at a time, or at times that do not depend on the answers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import repeat


def steady(rate: float) -> Iterator[float]:
    """Yield gaps of 1 / rate seconds, without end.

    Raises:
        ValueError: `rate` is not positive.
    """
    return repeat(1 / _checked(rate))


def irregular(rate: float, *, burstiness: float = 1.0, seed: int) -> Iterator[float]:
    """Yield gaps with a mean of 1 / rate seconds from a gamma distribution, without end.

    Args:
        rate: requests per second.
        burstiness: shape of the distribution, as in vLLM: 1 is a Poisson process, less comes in bursts, more is even.
        seed: makes the gaps.

    Raises:
        ValueError: `rate` or `burstiness` is not positive.
    """
    _checked(rate)
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ValueError(f"burstiness must be positive, got {burstiness}")
    rng = random.Random(seed)

    def gaps() -> Iterator[float]:
        while True:
            yield rng.gammavariate(burstiness, 1 / (rate * burstiness))

    return gaps()


def _checked(rate: float) -> float:
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"rate must be positive, got {rate}")
    return rate
