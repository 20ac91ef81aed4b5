"""What a policy needs of the shape of drafts, chains or trees; and why the drafts of a step are what they are."""

from collections.abc import Sequence
from typing import Literal, Protocol

from pagewood.schedpolicy.drafting.acceptance import Estimate
from pagewood.schedpolicy.drafting.step_cost import DraftCost, StepCost

Reason = Literal[
    "gain", "load", "acceptance", "account", "probe", "sample", "trial", "cores", "cost unknown", "fixed", "idle"
]
"""Why the lengths of a step are what they are:

- gain: they have the most expected tokens per second.
- load: no drafts, because they cost too much at this load; the same requests alone would get some.
- acceptance: no drafts, because too few would be accepted.
- account: no drafts, because a step could lose more time than speculation may lose now.
- probe: a few drafts, to measure acceptance or the cost of drafting.
- sample: no drafts in this step, to measure what a plain step costs.
- trial: no drafts in this period, to compare whole periods, or because those without drafts are faster.
- cores: no drafts, because other work takes the cores that compute them.
- cost unknown: no drafts without a table of costs.
- fixed: the mode is "fixed".
- idle: no request decodes.
"""

Choice = tuple[list[int] | None, Reason, float]
"""The lengths of a step and "gain", or None and why there are none; and the expected speedup of the lengths."""

MIN_SPEEDUP = 1.02
"""Expected tokens per second relative to plain decoding, from which drafts are worth it whatever they cost."""
_MIN_GAIN = 0.005


def is_worth(speedup: float, gained_s: float, extra_s: float, plain_s: float) -> bool:
    """Return whether drafts are worth it: they gain 2%, or 0.5% and twice what they cost.

    Args:
        speedup: Expected tokens per second, relative to plain decoding; 0: there are no drafts.
        gained_s: What the expected accepted tokens would take in plain steps.
        extra_s: Seconds that the step takes longer than the plain one.
        plain_s: Seconds of the plain step.
    """
    return speedup >= MIN_SPEEDUP or (speedup > 0 and gained_s > max(2 * extra_s, _MIN_GAIN * plain_s))


class DraftShape(Protocol):
    """What drafts may look like: which lengths there are, what they cost, and which have most tokens per second."""

    @property
    def max_tokens(self) -> int:
        """Most draft tokens of a request that can be accepted in a step."""
        ...

    @property
    def probe_lengths(self) -> tuple[int, int]:
        """The longer and the shorter length of a probe."""
        ...

    def num_computed(self, lengths: Sequence[int]) -> int:
        """Return how many tokens drafts of these lengths add to a step."""
        ...

    def probe_s(
        self,
        cost: StepCost,
        draft_cost: DraftCost,
        num_plain: int,
        plain_s: float,
        num_requests: int,
        length: int,
        num_prompt: int,
    ) -> float:
        """Return the seconds that a probe costs if nothing is accepted.

        Args:
            cost: Cost of steps.
            draft_cost: Cost of drafting.
            num_plain: Tokens of the step without drafts.
            plain_s: Its seconds.
            num_requests: Requests that take part.
            length: Their draft tokens, one of `probe_lengths`.
            num_prompt: Prompt tokens of the step.
        """
        ...

    def best(
        self,
        estimates: list[Estimate],
        weights: list[float] | None,
        cost: StepCost,
        draft_cost: DraftCost,
        num_plain: int,
        plain_s: float,
        risk_s: float,
    ) -> Choice:
        """Return the lengths with the most expected tokens per second.

        Args:
            estimates: Of the acceptance of each request.
            weights: Of the requests, with a mean of 1; None: all are equal.
            cost: Cost of steps.
            draft_cost: Cost of drafting.
            num_plain: Tokens of the step without drafts.
            plain_s: Its seconds.
            risk_s: Most seconds that the step may take if nothing is accepted.
        """
        ...

    def best_alone(
        self, estimate: Estimate, cost: StepCost, draft_cost: DraftCost, risk_s: float
    ) -> tuple[int, Reason, float]:
        """Return what `best` does for a step of one request and nothing else: its length, or 0."""
        ...
