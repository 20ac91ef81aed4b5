"""The decisions of a simulated replica, step by step, for a comparison with an engine or for display."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The grants of a step, or of several steps in succession in which the same requests decode.

    Invariant: `num_steps` is 1 if there are prompts.

    Attributes:
        replica: Number of the replica.
        began_s: Time when the first of the steps began.
        num_steps: Number of steps.
        running: Requests that hold memory, by arrival number, ascending.
        decodes: The arrival number of each request that decodes, ascending, and the position that its first step
            computes; each further step computes the next one.
        prompts: For each request with prompt tokens in the step, in the order of the grants: its arrival number, the
            first position, and the number of tokens.
    """

    replica: int
    began_s: float
    num_steps: int
    running: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int, int], ...]


OnDecision = Callable[[Decision], None]
"""Called for each decision when its steps have ended."""
