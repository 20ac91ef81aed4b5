"""Decides the draft lengths of a step, from what the other parts know; it learns nothing itself."""

from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

from pagewood.schedpolicy.drafting.acceptance import Estimate
from pagewood.schedpolicy.drafting.account import DraftAccount
from pagewood.schedpolicy.drafting.host_time import HostTime
from pagewood.schedpolicy.drafting.kept_lengths import KeptLengths
from pagewood.schedpolicy.drafting.plain_samples import PlainSamples
from pagewood.schedpolicy.drafting.request_estimates import Decoding, RequestEstimates
from pagewood.schedpolicy.drafting.rest_clock import RestClock
from pagewood.schedpolicy.drafting.shape import DraftShape, Reason
from pagewood.schedpolicy.drafting.step_cost import Costs, StepCost
from pagewood.schedpolicy.drafting.trial import Trial
from pagewood.schedpolicy.urgency import relative_weights

Mode = Literal["adaptive", "fixed"]

_PROBE_SHARE = 0.4
_FREE = 0.01
_PROBED_PART = 8

D = TypeVar("D", bound=Decoding)


class Decisions(Generic[D]):
    """Decides how many tokens are drafted for each request of a step.

    It asks in this order: is this a period of rest, is the step a sample of plain decoding, may it take the lengths of
    an earlier decision, which drafts have the most expected tokens per second that the account can pay for, and, if
    there are none, is a probe due that can be paid for. In a probe a few requests (all, where padding makes that free)
    draft one or two tokens in two steps, for at most 0.4 of `max_slowdown`, with what readying the drafters takes.
    Invariant: no drafts risk more than half of the account, but for the single token that measures an unknown drafter.
    """

    __slots__ = (
        "_account",
        "_clock",
        "_costs",
        "_estimates",
        "_host",
        "_kept",
        "_mode",
        "_num_prompt",
        "_num_quick",
        "_probe_share",
        "_samples",
        "_shape",
        "_trial",
        "_weight",
    )

    def __init__(
        self,
        *,
        shape: DraftShape,
        mode: Mode,
        max_slowdown: float,
        weight: Callable[[D], float],
        costs: Costs,
        account: DraftAccount,
        clock: RestClock,
        estimates: RequestEstimates,
        host: HostTime,
        samples: PlainSamples,
        trial: Trial,
    ) -> None:
        """Decide from these parts.

        Args:
            shape: What drafts look like.
            mode: "adaptive", or "fixed" for always the most.
            max_slowdown: Part of the time that speculation may lose, in (0, 1).
            weight: Weight of a request, > 0.
            costs: Of steps and of drafting.
            account: What may be lost.
            clock: Which steps rest, and when a probe is due.
            estimates: What will be accepted.
            host: Time of the host for decisions.
            samples: Which steps are plain to be measured.
            trial: In which periods nothing is drafted.
        """
        self._shape, self._mode, self._weight, self._costs = shape, mode, weight, costs
        self._account, self._clock, self._estimates, self._host = account, clock, estimates, host
        self._samples, self._trial, self._probe_share = samples, trial, _PROBE_SHARE * max_slowdown
        self._kept = KeptLengths()
        """The lengths of the latest decision that drafted."""
        self._num_prompt = 0
        """Prompt tokens of the step of the latest decision."""  # written by: Decisions
        self._num_quick = 0
        """Steps since then that were like that one, and took its lengths."""  # written by: Decisions

    def decide(self, requests: Sequence[D], num_other_tokens: int) -> tuple[Reason, list[int]]:
        """Return the draft tokens of each request, and why they are what they are.

        Args:
            requests: All requests that decode in the step.
            num_other_tokens: Prompt tokens that the step computes as well.
        """
        size = len(requests)
        if not size:
            return "idle", []
        if self._mode == "fixed":
            return "fixed", [self._shape.max_tokens] * size
        cost = self._costs.steps
        if cost is None:
            return "cost unknown", [0] * size
        trial = self._trial
        if trial.is_resting:
            if not trial.note_load(size):
                self._note_load(size)
                self._samples.decline()
                self._clock.withdraw()
                return "trial", [0] * size
            self._clock.end_period()
        num_plain, kept = size + num_other_tokens, self._kept
        if kept.are_of(size, num_plain, self._account.balance_s / 2):
            self._num_quick += 1
            return kept.reason, self._take(requests)
        plain_s = cost.seconds(num_plain)
        if self._samples.takes(cost, num_plain, plain_s):
            return "sample", [0] * size
        host = self._host
        decision_s = host.decision_s(size)
        is_paid = host.decisions.covers((1 + self._num_quick) * plain_s, decision_s)
        self._num_quick = 0
        if kept.num_left or (kept.is_held and kept.reason == "gain" and not is_paid):
            loss_s = self._loss_s(cost, num_plain, plain_s, kept.total_of(size))
            if (kept.fit(size, loss_s) or not is_paid) and loss_s <= self._account.balance_s / 2:
                return kept.reason, self._take(requests)
        kept.drop()
        began_s = host.now_s()
        host.decisions.spend(decision_s)
        self._num_prompt = num_other_tokens
        self._note_load(size)
        choice = self._choose(requests, cost, num_plain, plain_s, decision_s)
        host.note_decision(size, began_s)
        return choice

    def _note_load(self, num_requests: int) -> None:
        """Note the requests of a decision."""
        if num_requests != self._clock.num_requests:
            self._account.wake.scale(self._clock.note_load(num_requests))  # drafters read each request

    def _take(self, requests: Sequence[D]) -> list[int]:
        """Return the lengths that are kept, and count the step; if no request gets drafts any more, it is the last."""
        kept = self._kept
        kept.take()
        if kept.reason == "gain":
            self._samples.draft()
        lengths = self._estimates.latest_lengths(requests, kept.usual)
        if not any(lengths):
            kept.drop()
        return lengths

    def _choose(
        self, requests: Sequence[D], cost: StepCost, num_plain: int, plain_s: float, decision_s: float
    ) -> tuple[Reason, list[int]]:
        """Return the lengths with the most expected tokens per second, those of a probe, or none, and why."""
        size, account, clock = len(requests), self._account, self._clock
        draft_cost = self._costs.drafts
        lets_draft = account.lets_draft(plain_s, clock.num_idle - clock.num_withdrawn)
        estimates = self._estimates.current(requests)
        if size <= 2 and self._estimates.has_new:  # it is most of the batch
            clock.hasten()
        lengths: list[int] | None = None
        reason: Reason = "account"
        speedup = 1.0
        if lets_draft:
            risk_s = plain_s + account.balance_s / 2
            if num_plain == 1:
                length, reason, speedup = self._shape.best_alone(estimates[0], cost, draft_cost, risk_s)
                lengths = [length] if length else None
            else:
                weights = relative_weights(requests, self._weight)
                lengths, reason, speedup = self._shape.best(
                    estimates, weights, cost, draft_cost, num_plain, plain_s, risk_s
                )
        self._trial.speedup = speedup
        if lengths is not None:
            self._samples.speedup = speedup
            if not draft_cost.is_known:
                return "probe", [self._shape.probe_lengths[1]] + [0] * (size - 1)
            self._keep(estimates, lengths, cost, num_plain, plain_s, "gain", self._host.num_kept(decision_s, plain_s))
            clock.draft()
            self._samples.draft()
            return "gain", lengths
        clock.decline(reason)
        self._samples.decline()
        if clock.is_probe_due or not clock.is_priced:
            lengths = self._probe(estimates, cost, num_plain, plain_s)
            if lengths is not None:
                self._keep(estimates, lengths, cost, num_plain, plain_s, "probe", 1)
                clock.probe()
                return "probe", lengths
        num_resting = 0
        if clock.is_settled:
            num_resting = self._host.num_resting(decision_s, plain_s)
        elif reason == "account" or not self._host.decisions.covers(0.0, decision_s):
            num_resting = self._host.num_kept(decision_s, plain_s)
        clock.rest(num_resting)
        return reason, [0] * size

    def _keep(
        self,
        estimates: list[Estimate],
        lengths: list[int],
        cost: StepCost,
        num_plain: int,
        plain_s: float,
        reason: Reason,
        most: int,
    ) -> None:
        """Keep the lengths of a decision for at most `most` more steps."""
        for estimate, length in zip(estimates, lengths, strict=True):
            estimate.length = length
        total = self._shape.num_computed(lengths)
        loss_s = self._loss_s(cost, num_plain, plain_s, total)
        least = 1 if reason == "probe" else 0  # the first step after a rest says little of the cost
        self._kept.keep(
            lengths, total, num_plain=num_plain, plain_s=plain_s, loss_s=loss_s, reason=reason, least=least, most=most
        )

    def _loss_s(self, cost: StepCost, num_plain: int, plain_s: float, num: int) -> float:
        """Return the seconds that `num` positions of drafts cost if nothing is accepted."""
        draft_s = self._costs.drafts.seconds(self._shape.max_tokens, num, self._num_prompt)
        return cost.seconds(num_plain + num, has_drafts=True) - plain_s + draft_s

    def _probe(self, estimates: list[Estimate], cost: StepCost, num_plain: int, plain_s: float) -> list[int] | None:
        """Return a few drafts for the requests of which least is known, or put the probe off until it is paid for.

        Where steps are padded, the least probe may pay for many tokens; then all requests take part. Until a probe is
        paid for, drafters need not follow the text; otherwise they would spend what is to be saved.
        """
        size, share_s, shape, wake = len(estimates), self._probe_share * plain_s, self._shape, self._account.wake
        clock, draft_cost, num_prompt = self._clock, self._costs.drafts, self._num_prompt
        long, short = shape.probe_lengths
        least_s = shape.probe_s(cost, draft_cost, num_plain, plain_s, 1, short, num_prompt)
        ready_s, balance_s = wake.usual_s + wake.following_s, self._account.balance_s
        paid_at = int((2 * least_s + ready_s) / share_s) + 1  # two steps
        if wake.owed_s > 0:
            paid_at = max(paid_at, clock.num_idle + wake.num_steps_to_pay(plain_s))
        if balance_s < 2 * least_s:
            saved_s = 2 * least_s + wake.following_s
            paid_at = max(paid_at, clock.num_idle + self._account.num_steps_to_save(saved_s, plain_s))
        clock.postpone(paid_at)
        if not clock.is_probe_due:
            return None
        most_s = min(balance_s / 2, (share_s * clock.num_idle - ready_s) / 2)
        for num_requests, length in ((size, long), (size, short), (max(1, size // _PROBED_PART), long), (1, short)):
            risk_s = shape.probe_s(cost, draft_cost, num_plain, plain_s, num_requests, length, num_prompt)
            if risk_s <= most_s and (num_requests < size or size == 1 or risk_s <= least_s + _FREE * plain_s):
                least = sorted(range(size), key=lambda index: estimates[index].num_observations)
                lengths = [0] * size
                for index in least[:num_requests]:
                    lengths[index] = length
                return lengths
        return None
