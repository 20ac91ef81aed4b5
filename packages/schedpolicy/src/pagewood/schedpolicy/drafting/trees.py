"""Drafts as trees: a request gets the whole tree or none."""

from collections.abc import Sequence
from itertools import repeat
from math import inf

from pagewood.schedpolicy.drafting.acceptance import Estimate
from pagewood.schedpolicy.drafting.control import DraftControl
from pagewood.schedpolicy.drafting.decisions import D
from pagewood.schedpolicy.drafting.shape import MIN_SPEEDUP, Choice, Reason, is_worth
from pagewood.schedpolicy.drafting.step_cost import DraftCost, StepCost


class Trees:
    """Chooses which requests get a tree, by the most expected tokens per second; satisfies `DraftShape`.

    Lengths are depths here: 0 or `max_tokens`. A tree is worth the sum of its survival over all depths, and costs the
    tokens of all its nodes. Requests with the most weighted survival get trees first. Invariant: all trees have the
    same shape, those of probes too.
    """

    __slots__ = ("_num_nodes", "max_tokens", "probe_lengths")

    def __init__(self, depth: int, num_nodes: int) -> None:
        """Choose trees of one shape.

        Args:
            depth: Of a tree, >= 1.
            num_nodes: Draft tokens of a tree, >= `depth`.

        Raises:
            ValueError: There are fewer nodes than levels.
        """
        if num_nodes < depth:
            raise ValueError(f"num_nodes must be >= depth, got {num_nodes} with depth {depth}")
        self.max_tokens, self._num_nodes = depth, num_nodes
        self.probe_lengths = depth, depth
        """The longer and the shorter length of a probe."""

    def num_computed(self, lengths: Sequence[int]) -> int:
        """Return the nodes of trees of these depths; one that is less deep, at the end of a text, counts as whole."""
        return self._num_nodes * (len(lengths) - list(lengths).count(0))

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
        """Return the seconds that a probe costs if nothing is accepted; see `DraftShape`."""
        return self._step_s(cost, draft_cost, num_plain, num_requests, num_prompt) - plain_s

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
        """Return the depths with the most expected tokens per second; see `DraftShape`."""
        size = len(estimates)
        token_s = cost.seconds(size) / size
        gains = [sum(estimate.survival) * estimate.fill for estimate in estimates]
        keys = [gain * weight for gain, weight in zip(gains, weights or repeat(1.0), strict=False)]
        order = sorted(range(size), key=keys.__getitem__, reverse=True)
        value_s, best, num, gained_s, extra_s = plain_s, 0.0, 0, 0.0, 0.0
        reason: Reason = "acceptance"
        for count, index in enumerate(order, 1):
            value_s += gains[index] * token_s
            step_s = self._step_s(cost, draft_cost, num_plain, count, num_plain - size)
            rate = value_s / step_s
            if rate > best:
                if step_s > risk_s:
                    reason = "account" if rate >= MIN_SPEEDUP else reason
                    continue
                best, num, gained_s, extra_s = rate, count, value_s - plain_s, step_s - plain_s
        if is_worth(best, gained_s, extra_s, plain_s):
            chosen = set(order[:num])
            return [self.max_tokens if index in chosen else 0 for index in range(size)], "gain", best
        if reason != "account":
            length, _, _ = self._alone(estimates[order[0]], cost, draft_cost, inf, num_plain - size)
            reason = "load" if length else "acceptance"
        return None, reason, 1.0

    def best_alone(
        self, estimate: Estimate, cost: StepCost, draft_cost: DraftCost, risk_s: float
    ) -> tuple[int, Reason, float]:
        """Return what `best` does for a step of one request and nothing else: its depth, or 0."""
        return self._alone(estimate, cost, draft_cost, risk_s, 0)

    def _alone(
        self, estimate: Estimate, cost: StepCost, draft_cost: DraftCost, risk_s: float, num_prompt: int
    ) -> tuple[int, Reason, float]:
        """Return the same for a step whose prompts have `num_prompt` tokens, which the drafter reads too."""
        plain_s = cost.seconds(1)
        gained_s = sum(estimate.survival) * estimate.fill * plain_s
        step_s = self._step_s(cost, draft_cost, 1, 1, num_prompt)
        speedup = (plain_s + gained_s) / step_s
        if not is_worth(speedup, gained_s, step_s - plain_s, plain_s):
            return 0, "acceptance", 1.0
        if step_s > risk_s:
            return 0, "account", 1.0
        return self.max_tokens, "gain", speedup

    def _step_s(self, cost: StepCost, draft_cost: DraftCost, num_plain: int, num_trees: int, num_prompt: int) -> float:
        """Return the seconds of a step with trees."""
        num = num_trees * self._num_nodes
        return cost.seconds(num_plain + num, has_drafts=True) + draft_cost.seconds(self.max_tokens, num, num_prompt)


class TreeControl(DraftControl[D]):
    """Decides which decoding requests of a step get a tree of drafts; all trees have the same shape.

    It is `DraftControl` with another shape of drafts. Lengths are depths: 0 or `max_tokens`. Acceptance by position is
    acceptance by depth: the rate of a depth is the probability that one of its nodes is accepted, given that one of the
    depth before was. Invariant: that of `DraftControl`.
    """

    __slots__ = ("num_nodes",)

    def __init__(self, depth: int, cost: StepCost | None = None, *, num_nodes: int, **options: object) -> None:
        """Start without observations.

        Args:
            depth: Of a tree, >= 1.
            cost: As in `DraftControl`.
            num_nodes: Draft tokens of a tree, >= `depth`.
            options: The other arguments of `DraftControl`.

        Raises:
            ValueError: An argument is out of its range.
        """
        shape = Trees(depth, num_nodes)
        super().__init__(depth, cost, shape=shape, **options)  # pyright: ignore[reportArgumentType]
        self.num_nodes = num_nodes
