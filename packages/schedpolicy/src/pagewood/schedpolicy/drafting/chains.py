"""Drafts as chains: a request may get any number of tokens up to the most."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise, repeat
from math import inf
from operator import add, neg

from pagewood.schedpolicy.drafting.acceptance import Estimate
from pagewood.schedpolicy.drafting.shape import MIN_SPEEDUP, Choice, Reason, is_worth
from pagewood.schedpolicy.drafting.step_cost import DraftCost, StepCost

_ALL_FOUND = 0.97


class Chains:
    """Chooses the lengths of chains, by the most expected tokens per second; satisfies `DraftShape`.

    All pairs (request, position) are taken in descending order of the probability that the draft survives up to there,
    times the weight of the request, up to the prefix for which (tokens of plain decoding + expected accepted tokens) /
    (seconds of the step) is greatest. All prefixes are compared, because the cost of a step need not be convex.
    Invariant: with weights too, the expected tokens per second of the batch do not fall below plain decoding.
    """

    __slots__ = ("_computes_padding", "max_tokens", "probe_lengths")

    def __init__(self, max_tokens: int, *, computes_padding: bool = False) -> None:
        """Choose among lengths up to `max_tokens`.

        Args:
            max_tokens: Most draft tokens of a request in a step, >= 1.
            computes_padding: Whether a granted token that the drafter does not find is computed nevertheless.
        """
        self.max_tokens, self._computes_padding = max_tokens, computes_padding
        self.probe_lengths = min(2, max_tokens), 1
        """The longer and the shorter length of a probe."""

    def num_computed(self, lengths: Sequence[int]) -> int:
        """Return how many tokens drafts of these lengths add to a step."""
        return sum(lengths)

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
        num = num_requests * length
        return cost.seconds(num_plain + num, has_drafts=True) - plain_s + draft_cost.seconds(length, num, num_prompt)

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
        """Return the lengths with the most expected tokens per second; see `DraftShape`."""
        size, max_tokens = len(estimates), self.max_tokens
        num_pairs = size * max_tokens
        token_s = cost.seconds(size) / size
        is_found = min([estimate.fill for estimate in estimates]) > _ALL_FOUND
        keys: list[float] = []  # of all pairs, by request and position
        for estimate in estimates:
            keys += estimate.survival
        if weights is not None:
            keys = [key * weight for key, weight in zip(keys, _repeated(weights, max_tokens), strict=True)]
        # From here on lists are in descending order of the keys: `shares` are expected accepted tokens with their
        # weights, and `gains` without.
        fills: list[float] | None = None
        if weights is None and is_found:
            gains = shares = ranked = sorted(keys, reverse=True)
        else:
            order = sorted(range(num_pairs), key=keys.__getitem__, reverse=True)
            gains = shares = ranked = [keys[index] for index in order]
            if not is_found:
                found = _repeated([estimate.fill for estimate in estimates], max_tokens)
                fills = [found[index] for index in order]
                gains = shares = [key * fill for key, fill in zip(ranked, fills, strict=True)]
            if weights is not None:
                repeated = _repeated(weights, max_tokens)
                gains = [share / repeated[index] for share, index in zip(shares, order, strict=True)]
        full_s = step_s = cost.after(num_plain, num_pairs)
        if fills is not None and not self._computes_padding:
            # Either the drafter finds a draft or it does not: the chord is exact for one request.
            empty_s = cost.seconds(num_plain, has_drafts=True)
            step_s = [
                empty_s + (value - empty_s) * found / num
                for num, value, found in zip(range(1, num_pairs + 1), full_s, accumulate(fills), strict=True)
            ]
        drafts_s = _drafts_s(draft_cost, keys, ranked, max_tokens, num_plain - size)
        step_s = list(map(add, step_s, drafts_s))
        values = list(accumulate(shares, initial=plain_s / token_s))
        del values[0]
        rates = [value / cost_s for value, cost_s in zip(values, step_s, strict=True)]
        best = max(rates)
        num = rates.index(best) + 1
        reason: Reason = "acceptance"
        if weights is not None or full_s[num - 1] + drafts_s[num - 1] > risk_s:
            at_worst_s = map(add, full_s, drafts_s)
            rates = [
                rate if total * token_s >= cost_s - plain_s and worst_s <= risk_s else 0.0
                for rate, total, cost_s, worst_s in zip(rates, accumulate(gains), step_s, at_worst_s, strict=True)
            ]
            affordable = max(rates)
            if best * token_s >= MIN_SPEEDUP > affordable * token_s:
                reason = "account"
            best = affordable
            num = rates.index(best) + 1
        speedup = best * token_s
        if is_worth(speedup, values[num - 1] * token_s - plain_s, step_s[num - 1] - plain_s, plain_s):
            return _lengths(estimates, weights, num, ranked[num - 1]), "gain", speedup
        if reason != "account":
            likeliest = max(estimates, key=lambda estimate: estimate.survival[0])
            length, _, _ = self.best_alone(likeliest, cost, draft_cost, inf)
            reason = "load" if length else "acceptance"
        return None, reason, 1.0

    def best_alone(
        self, estimate: Estimate, cost: StepCost, draft_cost: DraftCost, risk_s: float
    ) -> tuple[int, Reason, float]:
        """Return what `best` does for a step of one request and nothing else: its length, or 0."""
        fill, plain_s = estimate.fill, cost.seconds(1)
        chord = 1.0 if self._computes_padding else fill
        draft_s, pass_s = draft_cost.per_step_s, draft_cost.per_pass_s + draft_cost.per_token_s
        best, num, gained_s, extra_s = 0.0, 0, 0.0, 0.0
        reason: Reason = "acceptance"
        value_s, empty_s = plain_s, cost.seconds(1, has_drafts=True)
        for length, (survival, full_s) in enumerate(
            zip(estimate.survival, cost.after(1, self.max_tokens), strict=True), start=1
        ):
            value_s += survival * fill * plain_s
            draft_s += pass_s
            step_s = empty_s + (full_s - empty_s) * chord + draft_s
            rate = value_s / step_s
            if rate > best:
                if full_s + draft_s > risk_s:
                    if rate >= MIN_SPEEDUP:
                        reason = "account"
                    continue
                best, num, gained_s, extra_s = rate, length, value_s - plain_s, step_s - plain_s
        if is_worth(best, gained_s, extra_s, plain_s):
            return num, "gain", best
        return 0, reason, 1.0


def _drafts_s(cost: DraftCost, keys: list[float], ranked: list[float], max_tokens: int, num_prompt: int) -> list[float]:
    """Return the seconds of drafting of all prefixes of the pairs.

    Args:
        cost: Of drafting.
        keys: [pairs], by request and position.
        ranked: [pairs], the same in descending order.
        max_tokens: Positions.
        num_prompt: Prompt tokens of the step.
    """
    fixed_s = cost.per_step_s + cost.per_other_s * num_prompt
    seconds: list[float] = []
    if cost.per_pass_s:
        # A prefix has one more pass from where the best pair of the next position comes into it.
        starts = [bisect_left(ranked, -max(keys[index::max_tokens]), key=neg) for index in range(max_tokens)]
        for num_passes, (start, end) in enumerate(pairwise([*starts, len(ranked)]), start=1):
            seconds += [fixed_s + cost.per_pass_s * num_passes] * (end - start)
    else:
        seconds = [fixed_s] * len(ranked)
    if cost.per_token_s:
        seconds = list(map(add, seconds, accumulate(repeat(cost.per_token_s, len(seconds)))))
    return seconds


def _repeated(values: list[float], num: int) -> list[float]:
    return list(chain.from_iterable(map(repeat, values, repeat(num))))


def _lengths(estimates: list[Estimate], weights: list[float] | None, num: int, least: float) -> list[int]:
    """Return how many of the first `num` pairs, of which the last has the key `least`, belong to each request."""
    lengths: list[int] = []
    for estimate, weight in zip(estimates, weights or repeat(1.0), strict=weights is not None):
        length = 0
        for survival in estimate.survival:
            if survival * weight < least:
                break
            length += 1
        lengths.append(length)
    num_ties = sum(lengths) - num
    for index in range(len(lengths) - 1, -1, -1):
        if num_ties <= 0:
            break
        survival, weight = estimates[index].survival, weights[index] if weights else 1.0
        while num_ties > 0 and lengths[index] and survival[lengths[index] - 1] * weight == least:
            lengths[index] -= 1
            num_ties -= 1
    return lengths
