"""A step while it is planned: what is left of its budget and of memory, and the grants so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.core.steps.policies import StepBudget
from pagewood.engine.core.steps.shortage import Shortage


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """A step that is being planned. Invariant: each request has at most one grant, and an excluded one has none."""

    state: EngineState
    now_s: float
    budget: StepBudget
    shortage: Shortage
    grants: list[Grant] = field(default_factory=list[Grant])  # contents written by: plan, steps.prompts, admission
    num_decodes: int = 0  # written by: plan
    """How many of them are for one position of a request that was admitted before; they come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The grants of one step. Invariant: each request has at most one."""

    grants: tuple[Grant, ...]
    num_preempted: int = 0
    is_decode: bool = False
    """Whether every grant is for one position of a request that was admitted before, and promises one token."""
