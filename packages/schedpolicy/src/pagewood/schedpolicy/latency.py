"""A linear model of the duration of a step, fitted to measurements; for chunk sizes, deadlines and simulations."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class StepSample(NamedTuple):
    """One measured step."""

    num_prefill: int
    """Prompt tokens computed."""
    num_decode: int
    """Requests that generated a token."""
    num_kv: int
    """Tokens of KV that these requests read."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Seconds of a step: `base_s + prefill_s * num_prefill + decode_s * num_decode + kv_s * num_kv`.

    Attributes:
        base_s: Seconds of any step (reading weights, launching kernels), >= 0.
        prefill_s: Seconds per prompt token, > 0.
        decode_s: Seconds per request that generates a token, >= 0.
        kv_s: Seconds per token of KV that those requests read, >= 0.
    """

    base_s: float
    prefill_s: float
    decode_s: float
    kv_s: float

    def __post_init__(self) -> None:
        for name in ("base_s", "prefill_s", "decode_s", "kv_s"):
            value: float = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {value}")
        if self.prefill_s == 0:
            raise ValueError(f"prefill_s must be > 0, got {self.prefill_s}")

    def step_s(self, *, num_prefill: int, num_decode: int, num_kv: int) -> float:
        """Return the seconds that a step takes."""
        return self.base_s + self.prefill_s * num_prefill + self.decode_s * num_decode + self.kv_s * num_kv

    def chunk_tokens(self, target_s: float, *, num_decode: int, num_kv: int) -> int:
        """Return how many prompt tokens, >= 0, fit into a step of `target_s` next to its decodes."""
        room_s = target_s - self.step_s(num_prefill=0, num_decode=num_decode, num_kv=num_kv)
        return max(0, math.floor(room_s / self.prefill_s))

    @classmethod
    def fitted(cls, samples: Iterable[StepSample]) -> "StepModel":
        """Return the model with the least squared error on measured steps.

        A coefficient with a negative fit is set to 0, and the others are fitted again.

        Raises:
            ValueError: The samples do not determine `prefill_s`.
        """
        rows = [((1.0, s.num_prefill, s.num_decode, s.num_kv), s.seconds) for s in samples]
        columns = [0, 1, 2, 3]
        while rows and columns:
            solution = _least_squares([([row[c] for c in columns], seconds) for row, seconds in rows])
            worst = min(range(len(columns)), key=solution.__getitem__)
            if solution[worst] >= 0:
                found = dict(zip(columns, solution, strict=True))
                if found.get(1, 0.0) > 0:
                    base_s, prefill_s, decode_s, kv_s = (found.get(c, 0.0) for c in range(4))
                    return cls(base_s=base_s, prefill_s=prefill_s, decode_s=decode_s, kv_s=kv_s)
                break
            del columns[worst]
        raise ValueError(f"samples must have steps with different numbers of prompt tokens, got {len(rows)} samples")


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
