"""A linear model of the duration of a step, fitted to measurements; for chunk sizes, deadlines and simulations."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pagewood.schedpolicy.counts import require_real


class StepSample(NamedTuple):
    """One measured step."""

    num_prefill: int
    """Prompt tokens computed."""
    num_decode: int
    """Requests that generated a token."""
    num_kv: int
    """Tokens of KV that these requests read."""
    seconds: float
    num_pairs: int = 0
    """Pairs of a prompt token and a position that it attends to; 0 if they were not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Seconds of a step: a constant, and a part for each of the numbers of `StepSample`.

    Attributes:
        base_s: Seconds of any step (reading weights, launching kernels), >= 0.
        prefill_s: Seconds per prompt token, > 0.
        decode_s: Seconds per request that generates a token, >= 0.
        kv_s: Seconds per token of KV that those requests read, >= 0.
        pair_s: Seconds per pair of a prompt token and a position that it attends to, >= 0. With 0 a prompt token takes
            the same time at the end of a long prompt as at the beginning.
    """

    base_s: float
    prefill_s: float
    decode_s: float
    kv_s: float
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base_s", "prefill_s", "decode_s", "kv_s", "pair_s"):
            value: float = getattr(self, name)
            require_real(name, value)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {value}")
        require_real("prefill_s", self.prefill_s)
        if self.prefill_s == 0:
            raise ValueError(f"prefill_s must be > 0, got {self.prefill_s}")

    def step_s(self, *, num_prefill: int, num_decode: int, num_kv: int, num_pairs: int = 0) -> float:
        """Return the seconds that a step takes."""
        prompts_s = self.prefill_s * num_prefill + self.pair_s * num_pairs
        return self.base_s + prompts_s + self.decode_s * num_decode + self.kv_s * num_kv

    def chunk_tokens(self, target_s: float, *, num_decode: int, num_kv: int) -> int:
        """Return how many prompt tokens, >= 0, fit into a step of `target_s` next to its decodes; counts no pairs."""
        room_s = target_s - self.step_s(num_prefill=0, num_decode=num_decode, num_kv=num_kv)
        return max(0, math.floor(room_s / self.prefill_s))

    @classmethod
    def fitted(cls, samples: Iterable[StepSample], *, relative: bool = False) -> "StepModel":
        """Return the model with the least squared error on measured steps.

        A coefficient with a negative fit is set to 0, and the others are fitted again.

        Args:
            samples: Measured steps.
            relative: Whether the error is counted as a part of each step's seconds, so that steps of a few milliseconds
                count as much as the longest.

        Raises:
            ValueError: The samples do not determine `prefill_s`, or a relative error is wanted of a step of 0 seconds.
        """
        rows = [([1.0, s.num_prefill, s.num_decode, s.num_kv, s.num_pairs], s.seconds) for s in samples]
        if relative:
            if any(seconds <= 0 for _, seconds in rows):
                raise ValueError(f"seconds must be > 0, got {min(seconds for _, seconds in rows)}")
            rows = [([value / seconds for value in row], 1.0) for row, seconds in rows]
        columns = [0, 1, 2, 3, 4]
        while rows and columns:
            solution = _least_squares([([row[c] for c in columns], seconds) for row, seconds in rows])
            worst = min(range(len(columns)), key=solution.__getitem__)
            if solution[worst] >= 0:
                found = dict(zip(columns, solution, strict=True))
                if found.get(1, 0.0) > 0:
                    base_s, prefill_s, decode_s, kv_s, pair_s = (found.get(c, 0.0) for c in range(5))
                    return cls(base_s=base_s, prefill_s=prefill_s, decode_s=decode_s, kv_s=kv_s, pair_s=pair_s)
                break
            del columns[worst]
        raise ValueError(f"samples must have steps with different numbers of prompt tokens, got {len(rows)} samples")


def pairs_of(start: int, count: int) -> int:
    """Return the pairs of the prompt tokens at `start`, ..., `start + count - 1` and the positions up to each."""
    return count * start + count * (count + 1) // 2


def _least_squares(rows: list[tuple[list[float], float]]) -> list[float]:
    """Solve the normal equations by elimination; a column that depends linearly on others gets 0."""
    n = len(rows[0][0])
    scale = [max(abs(row[i]) for row, _ in rows) or 1.0 for i in range(n)]
    scaled = [([value / scale[i] for i, value in enumerate(row)], y) for row, y in rows]
    a = [[sum(row[i] * row[j] for row, _ in scaled) for j in range(n)] for i in range(n)]
    b = [sum(row[i] * y for row, y in scaled) for i in range(n)]
    for i in range(n):
        if a[i][i] <= 1e-9 * len(rows):
            a[i] = [float(j == i) for j in range(n)]
            b[i] = 0.0
        for k in range(n):
            if k != i:
                factor = a[k][i] / a[i][i]
                a[k] = [x - factor * y for x, y in zip(a[k], a[i], strict=True)]
                b[k] -= factor * b[i]
    return [b[i] / a[i][i] / scale[i] for i in range(n)]
