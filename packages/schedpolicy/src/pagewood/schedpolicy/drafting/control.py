"""The policy of draft lengths as an engine calls it: it passes steps to be decided, and their results, to its parts."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Generic, get_args

from pagewood.schedpolicy.drafting.acceptance import Acceptance
from pagewood.schedpolicy.drafting.account import DraftAccount
from pagewood.schedpolicy.drafting.chains import Chains
from pagewood.schedpolicy.drafting.decisions import D, Decisions, Mode
from pagewood.schedpolicy.drafting.decode_pace import DecodePace
from pagewood.schedpolicy.drafting.host_time import HostTime
from pagewood.schedpolicy.drafting.plain_samples import PlainSamples
from pagewood.schedpolicy.drafting.request_estimates import RequestEstimates
from pagewood.schedpolicy.drafting.rest_clock import RestClock
from pagewood.schedpolicy.drafting.shape import DraftShape, Reason
from pagewood.schedpolicy.drafting.step_cost import Costs, DraftCost, StepCost
from pagewood.schedpolicy.drafting.trial import Trial
from pagewood.schedpolicy.urgency import weight_by_priority

_SURPRISE = 1.25
"""Times the expected duration of a step; what is longer counts as an interruption."""


class DraftControl(Generic[D]):
    """Decides how many tokens are drafted for each decoding request of a step.

    In the mode "adaptive" it chooses the drafts with the most expected tokens per second (`Chains`), as far as an
    account of time can pay for them if nothing is accepted (`DraftAccount`). Where steps are short, lengths are kept
    for some more steps (`KeptLengths`), and decisions and learning take a small part of the time (`HostTime`). While
    nothing is drafted most steps rest (`RestClock`). When a probe is due, a few requests (all, where padding makes that
    free) draft one or two tokens in two steps, and not before 0.4 of `max_slowdown` pays for both, with what drafters
    take to follow the text before and to wake (`WakeDebt`). Some steps are plain to measure plain decoding
    (`PlainSamples`).

    All of that happens in periods of drafting. What these yield is compared with what periods of rest yield, and the
    faster kind gets more of the time (`Trial`).

    Weights change which requests get the drafts, and not whether drafting is worth it: the tokens per second of the
    whole batch are never expected to fall below plain decoding. Every request gets its plain token in every step.

    Invariant: with a correct table of costs, decoding takes at most 1 + `max_slowdown` times as long as without drafts,
    plus what the account held at the start.
    """

    __slots__ = (
        "_account",
        "_are_cores_taken",
        "_clock",
        "_computes_padding",
        "_costs",
        "_decisions",
        "_estimates",
        "_host",
        "_num_accepted_lengths",
        "_pace",
        "_samples",
        "_shape",
        "_trial",
        "draft_s",
        "is_far",
        "max_tokens",
        "num_drafted",
        "num_granted",
        "reason",
        "steps_by_reason",
        "verify_s",
    )

    def __init__(
        self,
        max_tokens: int,
        cost: StepCost | None = None,
        *,
        mode: Mode = "adaptive",
        draft_cost: DraftCost | None = None,
        max_slowdown: float = 0.02,
        weight: Callable[[D], float] = weight_by_priority,
        computes_padding: bool = False,
        prior_acceptance: float = 0.6,
        prior_weight: float = 6.0,
        shape: DraftShape | None = None,
        clock: Callable[[], float] | None = None,
        are_cores_taken: Callable[[], bool] | None = None,
    ) -> None:
        """Start without observations.

        Args:
            max_tokens: Most draft tokens of a request in a step, >= 1.
            cost: Cost of steps on this machine; None if not measured yet (nothing is drafted until `set_cost`).
            mode: "adaptive", or "fixed" for always `max_tokens`.
            draft_cost: Cost of drafting; None to learn it from the first steps.
            max_slowdown: Part of the time that speculation may lose against plain decoding, in (0, 1).
            weight: Weight of a request, > 0; read in every decision.
            computes_padding: Whether a granted token that the drafter does not find is computed nevertheless.
            prior_acceptance: Probability of acceptance that is assumed before the first observation, in (0, 1).
            prior_weight: Observations that the average of all requests counts for in the estimate of one, >= 0.
            shape: What drafts look like, with the same `max_tokens`; None: chains.
            clock: Returns seconds, as `time.perf_counter`; measures what decisions and learning take. None: they are
                assumed to take what they take in a loop of their own, and equal calls make equal decisions.
            are_cores_taken: Returns whether other work takes the cores that compute steps; asked in every step of mode
                "adaptive". While it does, nothing is drafted, and durations say nothing of drafts. None: it never does.

        Raises:
            ValueError: An argument is out of its range.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
        if not 0 < max_slowdown < 1:
            raise ValueError(f"max_slowdown must be in (0, 1), got {max_slowdown}")
        if shape is not None and shape.max_tokens != max_tokens:
            raise ValueError(f"shape must have max_tokens {max_tokens}, got {shape.max_tokens}")
        self.max_tokens = max_tokens
        self.reason: Reason = "idle"
        """Why the latest lengths are what they are."""  # written by: DraftControl
        self.steps_by_reason: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        """Steps that rested or were decided, by reason."""  # written by: DraftControl
        self.is_far = False
        """Whether the next steps get no drafts for some time, if the load does not fall."""  # written by: DraftControl
        self.num_granted = 0
        """Draft tokens granted, over all observed steps."""  # written by: DraftControl
        self.num_drafted = 0
        """Draft tokens verified."""  # written by: DraftControl
        self.draft_s = 0.0
        """Measured seconds of drafting."""  # written by: DraftControl
        self.verify_s = 0.0
        """Measured seconds of steps, without drafting."""  # written by: DraftControl
        self._num_accepted_lengths = [0] * (max_tokens + 1)
        """[max_tokens + 1], drafts by how many of their tokens were accepted."""  # written by: DraftControl
        self._computes_padding = computes_padding
        self._shape = shape or Chains(max_tokens, computes_padding=computes_padding)
        self._estimates = RequestEstimates(Acceptance(max_tokens, prior=prior_acceptance, weight=prior_weight))
        self._costs, self._pace = Costs(cost, draft_cost or DraftCost()), DecodePace()
        self._account, self._clock, self._samples = DraftAccount(max_slowdown), RestClock(), PlainSamples()
        self._host = HostTime(max_tokens, clock)
        self._are_cores_taken = are_cores_taken if mode == "adaptive" else None
        self._trial = Trial(self._pace)
        self._decisions = Decisions[D](
            shape=self._shape,
            mode=mode,
            max_slowdown=max_slowdown,
            weight=weight,
            costs=self._costs,
            account=self._account,
            clock=self._clock,
            estimates=self._estimates,
            host=self._host,
            samples=self._samples,
            trial=self._trial,
        )

    @property
    def num_accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(self.accepted_by_position)

    @property
    def accepted_by_position(self) -> list[int]:
        """[max_tokens], accepted draft tokens at each position of a draft."""
        return list(accumulate(self._num_accepted_lengths[:0:-1]))[::-1]

    @property
    def acceptance(self) -> list[float]:
        """[max_tokens], present rate of acceptance at each position, of those before it accepted."""
        return list(self._estimates.everyone.rates)

    @property
    def account_s(self) -> float:
        """Seconds that speculation may lose now."""
        return self._account.balance_s

    @property
    def num_known(self) -> int:
        """Requests of which something is kept; `forget` drops them."""
        return len(self._estimates)

    def set_cost(self, cost: StepCost, draft_cost: DraftCost | None = None) -> None:
        """Replace the costs, for example when they have been measured; None: the cost of drafting stays."""
        self._costs.steps = cost
        self._costs.drafts = draft_cost or self._costs.drafts
        self._account.close()

    def forget(self, request: D) -> None:
        """Drop what is known of a request that has ended."""
        self._estimates.forget(request)

    def rests(self, num_requests: int) -> bool:
        """Return whether a step with this number of requests gets no drafts; the requests themselves are not read.

        While nothing is drafted, that is so in seven of eight steps, or in more if decisions take long; and in all
        steps while other work takes the cores. Call it before `lengths`, which need not be called if it returns True.
        """
        clock = self._clock
        if self._are_cores_taken is not None and self._are_cores_taken():
            self.is_far, self.reason = True, "cores"
        elif clock.rests(num_requests):
            self.is_far, self.reason = clock.is_far, clock.reason
        else:
            return False
        self.steps_by_reason[self.reason] += 1
        return True

    def lengths(self, requests: Sequence[D], num_other_tokens: int) -> list[int]:
        """Return the draft tokens of each request, in [0, max_tokens].

        Call it once for every step that does not rest, before the results of earlier steps if these are not there yet.

        Args:
            requests: All requests that decode in the step.
            num_other_tokens: Prompt tokens that the step computes as well.
        """
        self._clock.is_far = False
        self.reason, lengths = self._decisions.decide(requests, num_other_tokens)
        self.is_far = self._clock.is_far
        self.steps_by_reason[self.reason] += 1
        return lengths

    def observe(
        self,
        requests: Sequence[D],
        granted: Sequence[int],
        drafted: Sequence[int],
        accepted: Sequence[int],
        *,
        num_tokens: int,
        num_others: int = 0,
        num_steps: int = 1,
        num_yielded: int = 0,
        passed_steps: int = 1,
        passed_load: float = 0.0,
        passed_tokens: int = 0,
        passed_s: float = 0.0,
        draft_s: float = 0.0,
        verify_s: float = 0.0,
    ) -> None:
        """Learn from steps that ended: from some with drafts, or from one without that stands for others.

        Args:
            requests: The requests that decoded, once for each step; those that ended meanwhile may be among them.
                Requests without drafts may be left out and counted in `num_others` instead.
            granted: Draft tokens that each was allowed.
            drafted: Draft tokens of each that were verified, at most `granted`.
            accepted: Draft tokens of each that were accepted, at most `drafted`.
            num_tokens: Tokens that the steps computed, with drafts (and padding) and prompt tokens.
            num_others: Requests that decoded without drafts and are not in `requests`.
            num_steps: Steps with drafts, which are alike; or steps without drafts that the observed one stands for.
            num_yielded: Tokens that the observed steps have yielded.
            passed_steps: Steps since those that were observed before, with these, in which requests decoded.
            passed_load: Requests that were to get tokens in each of them, with those that had ended, on average.
            passed_tokens: Tokens that they have yielded.
            passed_s: Their seconds, with all that the host does; 0 if not measured.
            draft_s: Seconds of drafting; 0 if not measured. A head that follows the text takes some in every step.
            verify_s: Seconds of the rest of the steps; 0 if not measured.
        """
        self.draft_s += draft_s
        self.verify_s += verify_s
        cost = self._costs.steps
        if self.reason == "cores":
            if not any(granted):
                self._account.wake.rest(num_steps)
                return
        elif cost is not None and self._trial.observe(passed_load, passed_steps, passed_tokens, passed_s):
            self._clock.end_period()
        if not any(granted):
            if cost is not None and num_tokens >= 1:
                num_requests = len(requests) + num_others
                self._observe_plain(cost, num_requests, num_tokens, num_steps, draft_s, verify_s,
                                    passed_steps, passed_load, passed_tokens, passed_s)  # fmt: skip
            return
        num_accepted = self._count(granted, drafted, accepted)
        host = self._host
        is_learned, began_s = host.may_learn(len(requests), draft_s + verify_s), host.now_s()
        if is_learned:
            self._estimates.observe(requests, granted, drafted, accepted)
        draft_cost, num_computed = self._costs.drafts, self._shape.num_computed
        if cost is None or num_tokens < num_steps:
            return
        num_plain = num_tokens - num_computed(granted if self._computes_padding else drafted)
        if num_steps > 1:  # what follows is of a step
            num_tokens, num_plain = round(num_tokens / num_steps), round(num_plain / num_steps)
            draft_s, verify_s = draft_s / num_steps, verify_s / num_steps
        num_requests, longest = max(1, (len(requests) + num_others) // num_steps), max(granted)
        num_drafts, num_prompt = num_computed(granted) // num_steps, max(0, num_plain - num_requests)
        has_rested = self._account.wake.end_rest()
        self._account.settle_drafts(
            cost.seconds(num_plain),
            num_accepted / num_steps * cost.seconds(num_requests) / num_requests,
            _taken_s(cost, num_tokens, verify_s, has_drafts=True),
            draft_s,
            draft_cost.seconds(longest, num_drafts, num_prompt),
            num_steps,
            has_rested=has_rested,
            is_priced=draft_cost.is_known,
            pace_s=num_yielded / num_steps * (self._pace.token_s(passed_load) or 0.0),
            elapsed_s=draft_s + verify_s,
        )
        self._samples.observe_drafts()
        if not is_learned:
            return
        if verify_s > 0:
            cost.observe(num_tokens, verify_s, has_drafts=True)
        # After a rest, a drafter first reads what it has left out.
        if not (has_rested and draft_cost.is_known):
            draft_cost.observe(longest, num_drafts, draft_s, num_prompt)
        host.note_lesson(len(requests), began_s)

    def _observe_plain(
        self,
        cost: StepCost,
        num_requests: int,
        num_tokens: int,
        num_steps: int,
        draft_s: float,
        verify_s: float,
        passed_steps: int,
        passed_load: float,
        passed_tokens: int,
        passed_s: float,
    ) -> None:
        """Learn from a step without drafts."""
        account = self._account
        account.wake.rest(num_steps)
        if num_requests:
            plain_s = cost.seconds(num_tokens)
            taken_s = _taken_s(cost, num_tokens, verify_s, has_drafts=False)
            if self._trial.is_resting:
                account.settle_rest(plain_s, taken_s, num_steps)
            else:
                account.settle_plain(plain_s, taken_s, draft_s, num_steps)
        follows_plain = self._samples.observe_plain()
        if follows_plain and passed_tokens and passed_s > 0:
            self._pace.observe(passed_load, passed_steps, passed_tokens, passed_s)
        if self._samples.is_typical(cost, num_tokens, num_steps) and verify_s > 0:
            if num_requests:
                self._samples.compare(verify_s / cost.seconds(num_tokens))
            cost.observe(num_tokens, verify_s)

    def _count(self, granted: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]) -> int:
        """Count the drafts of a step, and return how many of their tokens were accepted."""
        num_drafted, num_accepted = sum(drafted), sum(accepted)
        self.num_granted += sum(granted)
        self.num_drafted += num_drafted
        if 2 * num_accepted > num_drafted:
            self._clock.hasten()
        lengths = self._num_accepted_lengths
        for allowed, taken in zip(granted, accepted, strict=True):
            if allowed:
                lengths[taken] += 1
        return num_accepted


def _taken_s(cost: StepCost, num_tokens: int, verify_s: float, *, has_drafts: bool) -> float:
    """Return the seconds that a step took, as far as they are its own work; the expected if it was not measured."""
    if verify_s > 0:
        return cost.credible(num_tokens, verify_s, _SURPRISE, has_drafts=has_drafts)
    return cost.seconds(num_tokens, has_drafts=has_drafts)
