"""Speculative decoding with trees: which requests of a step get one."""

from collections.abc import Sequence
from itertools import repeat

from pagewood.schedpolicy.drafting.acceptance import Estimate
from pagewood.schedpolicy.drafting.control import LEAST, MARGIN, D, DraftControl, Reason
from pagewood.schedpolicy.drafting.step_cost import StepCost


class TreeControl(DraftControl[D]):
    """Decides which decoding requests of a step get a tree of drafts; all trees have the same shape.

    The lengths of `DraftControl` are depths here: 0 or `max_tokens`. Acceptance by position is acceptance by depth: the
    rate of a depth is the probability that one of its nodes is accepted, given that one of the depth before was. A tree
    is worth the sum of its survival over all depths, and costs the tokens of all its nodes. Requests with the most
    weighted survival get trees first, as many as give the most expected tokens per second. The account, the probes and
    the plain steps in between are those of `DraftControl`.
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
        if num_nodes < depth:
            raise ValueError(f"num_nodes must be >= depth, got {num_nodes} with depth {depth}")
        super().__init__(depth, cost, **options)  # pyright: ignore[reportArgumentType]
        self.num_nodes = num_nodes

    def _decide(self, requests: Sequence[D], num_other_tokens: int) -> tuple[Reason, list[int]]:
        reason, lengths = super()._decide(requests, num_other_tokens)
        return reason, [self.max_tokens if length else 0 for length in lengths]  # probes are whole trees too

    def _num_computed(self, lengths: Sequence[int]) -> int:
        """Return the nodes of trees of these depths; one that is less deep, at the end of a text, counts as whole."""
        return self.num_nodes * (len(lengths) - list(lengths).count(0))

    def _best(
        self, requests: Sequence[D], estimates: list[Estimate], cost: StepCost, num_plain: int, plain_s: float
    ) -> tuple[list[int] | None, Reason]:
        """Return the lengths with the most expected tokens per second, or None and why there are none."""
        token_s = cost.seconds(len(estimates)) / len(estimates)
        weights = self._weights(requests) or repeat(1.0)
        gains = [sum(estimate.survival) * estimate.fill for estimate in estimates]
        keys = [gain * weight for gain, weight in zip(gains, weights, strict=False)]
        order = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
        risk_s = plain_s + self.account_s / 2
        value_s, best, num, best_gain_s, best_extra_s = plain_s, 0.0, 0, 0.0, 0.0
        reason: Reason = "acceptance"
        for count, index in enumerate(order, 1):
            value_s += gains[index] * token_s
            step_s = self._step_s(cost, num_plain, count)
            rate = value_s / step_s
            if rate > best:
                if step_s > risk_s:
                    reason = "account" if rate >= MARGIN else reason
                    continue
                best, num, best_gain_s, best_extra_s = rate, count, value_s - plain_s, step_s - plain_s
        if best >= MARGIN or (num and best_gain_s > max(2 * best_extra_s, LEAST * plain_s)):
            self._gain = max(0.0, best - 1)
            chosen = set(order[:num])
            return [self.max_tokens if index in chosen else 0 for index in range(len(keys))], "gain"
        if reason != "account":
            length, _ = self._best_alone(estimates[order[0]], cost, 1, cost.seconds(1), float("inf"))
            reason = "load" if length else "acceptance"
        return None, reason

    def _best_alone(
        self, estimate: Estimate, cost: StepCost, num_plain: int, plain_s: float, risk_s: float
    ) -> tuple[int, Reason]:
        """Return what `_best` does, for a single request: its length, or 0."""
        gain_s = sum(estimate.survival) * estimate.fill * cost.seconds(1)
        step_s = self._step_s(cost, num_plain, 1)
        is_worth = (plain_s + gain_s) / step_s >= MARGIN or gain_s > max(2 * (step_s - plain_s), LEAST * plain_s)
        if not is_worth:
            return 0, "acceptance"
        if step_s > risk_s:
            return 0, "account"
        self._gain = max(0.0, (plain_s + gain_s) / step_s - 1)
        return self.max_tokens, "gain"

    def _probe_s(self, cost: StepCost, num_plain: int, plain_s: float, num_requests: int, length: int) -> float:
        """Return the seconds that a probe costs if nothing is accepted."""
        return self._step_s(cost, num_plain, num_requests) - plain_s

    def _step_s(self, cost: StepCost, num_plain: int, num_trees: int) -> float:
        """Return the seconds of a step with trees."""
        num = num_trees * self.num_nodes
        return cost.seconds(num_plain + num, has_drafts=True) + self._drafting_s(self.max_tokens, num)
