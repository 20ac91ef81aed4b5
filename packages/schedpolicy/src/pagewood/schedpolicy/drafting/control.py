"""Speculative decoding: how many tokens are drafted for each request in each step."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise, repeat
from math import inf
from operator import add, neg
from typing import Generic, Literal, Protocol, TypeVar, get_args

from pagewood.schedpolicy.drafting.acceptance import Acceptance, Estimate
from pagewood.schedpolicy.drafting.allowance import Allowance
from pagewood.schedpolicy.drafting.decode_pace import DecodePace
from pagewood.schedpolicy.drafting.kept_lengths import KeptLengths
from pagewood.schedpolicy.drafting.step_cost import DraftCost, StepCost
from pagewood.schedpolicy.urgency import weight_by_priority

Mode = Literal["adaptive", "fixed"]

Reason = Literal["gain", "load", "acceptance", "account", "probe", "sample", "cost unknown", "fixed", "idle"]
"""Why the lengths of a step are what they are:

- gain: they have the most expected tokens per second.
- load: no drafts, because they cost too much at this load; the same requests alone would get some.
- acceptance: no drafts, because too few would be accepted.
- account: no drafts, because a step could lose more time than speculation may lose now.
- probe: a few drafts, to measure acceptance or the cost of drafting.
- sample: no drafts in this step, to measure what a plain step costs.
- cost unknown: no drafts without a table of costs.
- fixed: the mode is "fixed".
- idle: no request decodes.
"""

MARGIN = 1.02
LEAST = 0.005
_FEW = 16
_LEARN_EVERY = 4
_LEARN_S = 1e-5
_LEARN_PER_REQUEST_S = 1.2e-6
_MIN_INTERVAL = 16
_MAX_PROBE_INTERVAL = 512
_MIN_SAMPLE_INTERVAL = 4
_MAX_SAMPLE_INTERVAL = 256
_SAMPLE_SHARE = 1 / 64
_NUM_SAMPLES = 3
_SHORT_S = 2e-3
_NUM_STEPS_KEPT = 400
_SECONDS_KEPT = 1.0
_SKIP_AFTER = 4
_MIN_SKIPPED = 7
_MAX_SKIPPED = 255
_MAX_KEPT = 63
_DECISION_S = 5e-5
_PER_PAIR_S = 6e-7
_DECISION_SHARE = 0.0025
_KEPT_SHARE = 0.01
_NUM_ALLOWED = 4.0
_PROBE_SHARE = 0.4
_WAKE_RATE = 0.5
_NUM_FOLLOWED = 24
_MAX_DELAY = 8192
_MAX_DEBT = 0.25
_SURPRISE = 1.25
_INTERRUPTED = 2.0
_LEAST_REST = 4
_LEAST_WAKE = 4.0
_MOST_WAKE = 64.0
_WAKE_SHARE = 0.25


class Decoding(Protocol):
    """The attributes of a decoding request that `DraftControl` reads."""

    @property
    def arrival(self) -> int:
        """Sequence number of its first arrival, unique."""
        ...

    @property
    def priority(self) -> int:
        """Higher is more urgent."""
        ...


D = TypeVar("D", bound=Decoding)


class DraftControl(Generic[D]):
    """Decides how many tokens are drafted for each decoding request of a step.

    In the mode "adaptive" it chooses the drafts with the most expected tokens per second: all pairs (request, position)
    in descending order of the probability that the draft survives up to there, times the weight of the request, up to
    the prefix for which (tokens of plain decoding + expected accepted tokens) / (seconds of the step) is greatest. All
    prefixes are compared, because the cost of a step need not be convex. If none gains 2%, or 0.5% and twice what it
    costs, nothing is drafted. Where steps take less than a few milliseconds, lengths are kept for some more steps
    (`KeptLengths`). After the first few, decisions take at most 1% of the time, and so does learning from steps with
    drafts, but for every fourth of them; without time for a decision, lengths are kept though the load has changed.

    Speculation pays from an account in seconds. Every step adds a part of its duration, below `max_slowdown`; a step
    that drafts adds what its tokens would have cost in plain steps, and pays what it took. Steps of less than 2 ms cost
    the host about as much as the machine, so the pace of plain decoding (`DecodePace`), once it is known, values their
    tokens too, with all that happens between steps; the lower profit counts. A step risks at most half of
    the account, and the account never holds more than `max_slowdown` of 400 plain steps or of a second, whichever is
    longer, or owes more than a quarter of it.
    What a drafter takes beyond the expected after a rest is paid apart, from a quarter of `max_slowdown` and from what
    drafts then gain; until it is paid, no drafts follow another rest. Other drafts that take twice as long as expected
    count as interrupted, and so does a step that takes a quarter longer than one of its size. Invariant: with a correct
    table of costs, decoding takes at most 1 + `max_slowdown` times as long as without drafts, plus what the account
    held at the start, a quarter of the most.

    If nothing is drafted, a few requests (all, where padding makes that free) draft one or two tokens in two steps
    after 16, then after twice as many, up to 512, and not before 0.4 of `max_slowdown` pays for both steps, with what
    drafters took beyond their usual time in earlier steps after a rest: they read then what they had left out. Between
    probes most steps rest, and drafters need not follow the text until 24 steps before the next one (`is_far`). A step
    of a new size is first taken plain. While drafts are made, one plain step is taken after 16 steps, then up to every
    256, more often where it differs from the table, and never so often that it costs more than a sixty-fourth of what
    drafts gain, to keep the cost of plain decoding measured. If it takes less than 2 ms, three, of which the second
    counts, because the work of the host for the steps around it is part of its time. For the same reason steps with
    drafts have a table of their own (`StepCost`).

    Weights change which requests get the drafts, and not whether drafting is worth it: the tokens per second of the
    whole batch are never expected to fall below plain decoding. Every request gets its plain token in every step.
    """

    __slots__ = (
        "_account_s",
        "_computes_padding",
        "_cost",
        "_decisions",
        "_draft_cost",
        "_estimates",
        "_everyone",
        "_gain",
        "_is_far",
        "_is_stopped",
        "_kept",
        "_kept_reason",
        "_last_plain",
        "_last_sample",
        "_last_size",
        "_lessons",
        "_max_slowdown",
        "_mode",
        "_num_accepted_lengths",
        "_num_decisions",
        "_num_plain",
        "_num_rested",
        "_num_samples",
        "_num_skips",
        "_num_speculated",
        "_num_undrafted",
        "_num_unlearned",
        "_num_zero",
        "_owed_s",
        "_pace",
        "_probe_interval",
        "_sample_interval",
        "_wake_s",
        "_weight",
        "_zero_reason",
        "draft_s",
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

        Raises:
            ValueError: An argument is out of its range.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
        if not 0 < max_slowdown < 1:
            raise ValueError(f"max_slowdown must be in (0, 1), got {max_slowdown}")
        self.max_tokens = max_tokens
        self.reason: Reason = "idle"
        """Why the latest lengths are what they are."""  # written by: DraftControl
        self.steps_by_reason: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        """Calls of `lengths`, by reason."""  # written by: DraftControl
        self.num_granted = 0
        """Draft tokens granted, over all observed steps."""  # written by: DraftControl
        self.num_drafted = 0
        """Draft tokens verified."""  # written by: DraftControl
        self.draft_s = 0.0
        """Measured seconds of drafting."""  # written by: DraftControl
        self.verify_s = 0.0
        """Measured seconds of steps, without drafting."""  # written by: DraftControl
        self._num_accepted_lengths = [0] * (max_tokens + 1)  # written by: DraftControl
        self._mode, self._cost, self._draft_cost = mode, cost, draft_cost or DraftCost()
        self._max_slowdown, self._weight, self._computes_padding = max_slowdown, weight, computes_padding
        self._everyone = Acceptance(max_tokens, prior=prior_acceptance, weight=prior_weight)
        self._estimates: dict[int, Estimate] = {}  # written by: DraftControl
        self._account_s: float | None = None
        """Seconds that may be lost; None before the first decision."""  # written by: DraftControl
        self._pace = DecodePace()
        self._num_decisions = 0  # written by: DraftControl
        self._last_size = 0
        """Requests of the latest decision."""  # written by: DraftControl
        self._last_plain = 0
        """Tokens of its step without drafts."""  # written by: DraftControl
        self._last_sample = 0
        """Size of the latest step that was plain because the size was new."""  # written by: DraftControl
        self._kept = KeptLengths()
        """The lengths of the latest decision that drafted."""
        self._kept_reason: Reason = "gain"
        """Their reason."""  # written by: DraftControl
        self._decisions = Allowance(_KEPT_SHARE, most=_NUM_ALLOWED)
        """Pays for the host's work of decisions."""
        self._lessons = Allowance(_KEPT_SHARE, most=_NUM_ALLOWED)
        """Pays for that of learning from steps with drafts."""
        self._num_unlearned = 0
        """Steps with drafts since the last one that was learned from."""  # written by: DraftControl
        self._num_rested = _LEAST_REST
        """Steps without drafts before the one that is observed."""  # written by: DraftControl
        self._owed_s = 0.0
        """Seconds that drafters took after rests and that are not paid for yet; until then no drafts follow a rest."""
        # written by: DraftControl
        self._is_far = False
        """See `is_far`."""  # written by: DraftControl
        self._wake_s = 0.0
        """Seconds that the first step with drafts after a rest takes beyond what it is expected to."""
        # written by: DraftControl
        self._is_stopped = False
        """Whether nothing is drafted until the account recovers or a probe pays."""  # written by: DraftControl
        self._num_zero = 0
        """Steps without drafts since the last one with drafts."""  # written by: DraftControl
        self._num_undrafted = 0
        """Decisions in succession for no drafts."""  # written by: DraftControl
        self._num_skips = 0
        """Steps until the next decision, while nothing is drafted."""  # written by: DraftControl
        self._zero_reason: Reason = "acceptance"
        """Reason of the latest decision for no drafts."""  # written by: DraftControl
        self._probe_interval = _MIN_INTERVAL  # written by: DraftControl
        self._num_speculated = 0
        """Steps with drafts since the last plain one."""  # written by: DraftControl
        self._num_samples = 0
        """Plain steps that complete a sample."""  # written by: DraftControl
        self._num_plain = 0
        """Plain steps that were observed since the last one with drafts."""  # written by: DraftControl
        self._sample_interval = _MIN_INTERVAL  # written by: DraftControl
        self._gain = 0.0
        """Speedup that is expected of the latest lengths, minus 1."""  # written by: DraftControl

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
        return list(self._everyone.rates)

    @property
    def account_s(self) -> float:
        """Seconds that speculation may lose now."""
        return self._account_s or 0.0

    @property
    def num_known(self) -> int:
        """Requests of which something is kept; `forget` drops them."""
        return len(self._estimates)

    @property
    def is_far(self) -> bool:
        """Whether the next steps get no drafts for some time, if the load does not fall."""
        return self._is_far

    def set_cost(self, cost: StepCost, draft_cost: DraftCost | None = None) -> None:
        """Replace the costs, for example when they have been measured; None: the cost of drafting stays."""
        self._cost, self._account_s = cost, None
        self._draft_cost = draft_cost or self._draft_cost

    def forget(self, request: D) -> None:
        """Drop what is known of a request that has ended."""
        self._estimates.pop(request.arrival, None)

    def rests(self, num_requests: int) -> bool:
        """Return whether a step with this number of requests gets no drafts; the requests themselves are not read.

        While nothing is drafted, that is so in seven of eight steps, or in more if decisions take long. Call it before
        `lengths`, which need not be called if it returns True.
        """
        if not self._num_skips or 4 * num_requests < 3 * self._last_size:  # not at a much lower load
            return False
        self._num_skips -= 1
        self._num_zero += 1
        self._is_far = self._num_zero + _NUM_FOLLOWED < self._probe_interval
        self.reason = self._zero_reason
        self.steps_by_reason[self.reason] += 1
        return True

    def lengths(self, requests: Sequence[D], num_other_tokens: int) -> list[int]:
        """Return the draft tokens of each request, in [0, max_tokens].

        Call it once for every step that does not rest, before the results of earlier steps if these are not there yet.

        Args:
            requests: All requests that decode in the step.
            num_other_tokens: Prompt tokens that the step computes as well.
        """
        self._is_far = False
        self.reason, lengths = self._decide(requests, num_other_tokens)
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
        load: int = 0,
        num_yielded: int = 0,
        elapsed_s: float = 0.0,
        draft_s: float = 0.0,
        verify_s: float = 0.0,
    ) -> None:
        """Learn from a step that ended, with or without drafts.

        Args:
            requests: The requests that decoded; those that ended meanwhile may be among them. Requests without drafts
                may be left out and counted in `num_others` instead.
            granted: Draft tokens that each was allowed.
            drafted: Draft tokens of each that were verified, at most `granted`.
            accepted: Draft tokens of each that were accepted, at most `drafted`.
            num_tokens: Tokens that the step computed, with drafts (and padding) and prompt tokens.
            num_others: Requests that decoded without drafts and are not in `requests`.
            num_steps: Steps without drafts that this one stands for; the others are not observed.
            load: Requests that were to get tokens in the step, with those that had ended.
            num_yielded: Tokens that these steps, or the step with drafts, have yielded.
            elapsed_s: Their seconds, with all that the host does; 0 if not measured.
            draft_s: Seconds of drafting; 0 if not measured. A head that follows the text takes some in every step.
            verify_s: Seconds of the rest of the step; 0 if not measured.
        """
        num_granted, num_drafted = sum(granted), sum(drafted)
        is_learned = not num_granted or self._may_learn(len(requests), draft_s + verify_s)
        self.draft_s += draft_s
        self.verify_s += verify_s
        if num_granted:
            self.num_granted += num_granted
            self.num_drafted += num_drafted
            if 2 * sum(accepted) > num_drafted:
                self._probe_interval = _MIN_INTERVAL
            lengths = self._num_accepted_lengths
            for allowed, taken in zip(granted, accepted, strict=True):
                if allowed:
                    lengths[taken] += 1
            if is_learned:
                self._everyone.observe(granted, drafted, accepted)
                estimates = self._estimates
                for request, allowed, found, taken in zip(requests, granted, drafted, accepted, strict=True):
                    estimate = estimates.get(request.arrival) if allowed else None
                    if estimate is not None:
                        estimate.observe(allowed, found, taken)
        cost = self._cost
        if cost is None or num_tokens < 1:
            return
        num_requests = len(requests) + num_others
        has_rested = self._num_rested >= _LEAST_REST
        self._num_rested = 0 if num_granted else self._num_rested + num_steps
        if num_requests:
            num_added = self._num_computed(granted if self._computes_padding else drafted)
            self._settle(
                cost, num_requests, num_tokens, num_tokens - num_added, granted, sum(accepted), num_steps, draft_s,
                verify_s, has_rested, num_yielded * (self._pace.token_s(load) or 0.0), elapsed_s,
            )  # fmt: skip
        self._num_plain = 0 if num_granted else self._num_plain + 1
        if elapsed_s > 0 and num_yielded and self._num_plain > 1:
            self._pace.observe(load, num_steps, num_yielded, elapsed_s)
        # The host prepares one step and retires another while a step is computed. So the time of a short plain step is
        # that of plain decoding only if the steps around it are plain too.
        is_typical = bool(num_granted) or num_steps > 1 or self._num_plain == 2 or cost.seconds(num_tokens) >= _SHORT_S
        if verify_s > 0 and is_learned and is_typical:
            if num_requests and not num_granted:
                is_near = abs(verify_s / cost.seconds(num_tokens) - 1) < 0.1
                interval = self._sample_interval * 2 if is_near else self._sample_interval // 2
                self._sample_interval = min(_MAX_SAMPLE_INTERVAL, max(_MIN_SAMPLE_INTERVAL, interval))
            cost.observe(num_tokens, verify_s, has_drafts=num_granted > 0)
        # After a rest, a drafter first reads what it has left out.
        if num_granted and is_learned and not (has_rested and self._draft_cost.is_known):
            num_drafts = self._num_computed(granted)
            num_prompt = num_tokens - num_requests - self._num_computed(granted if self._computes_padding else drafted)
            self._draft_cost.observe(max(granted), num_drafts, draft_s, max(0, num_prompt))

    def _may_learn(self, num_requests: int, step_s: float) -> bool:
        """Return whether to learn from a step with drafts: from every one, unless that takes too much of the time."""
        price_s = _LEARN_S + _LEARN_PER_REQUEST_S * num_requests
        self._num_unlearned += 1
        if step_s > 0 and not self._lessons.covers(step_s, price_s) and self._num_unlearned < _LEARN_EVERY:
            return False
        self._lessons.spend(price_s)
        self._num_unlearned = 0
        return True

    def _settle(
        self,
        cost: StepCost,
        num_requests: int,
        num_tokens: int,
        num_plain: int,
        granted: Sequence[int],
        num_accepted: int,
        num_steps: int,
        draft_s: float,
        verify_s: float,
        has_rested: bool,
        worth_s: float,
        elapsed_s: float,
    ) -> None:
        """Enter a step into the account; `worth_s` is what its tokens would have taken without drafts, 0: unknown."""
        plain_s = cost.seconds(num_plain)
        has_drafts = any(granted)
        taken_s = cost.seconds(num_tokens, has_drafts=has_drafts)
        if verify_s > 0:
            taken_s = cost.credible(num_tokens, verify_s, _SURPRISE, has_drafts=has_drafts)
        num_granted = sum(granted)
        profit_s = -draft_s
        if num_granted:
            extra_s = 0.0
            num_prompt = max(0, num_plain - num_requests)
            expected_s = self._draft_cost.seconds(max(granted), self._num_computed(granted), num_prompt)
            if draft_s and self._draft_cost.is_known:
                if has_rested:
                    extra_s = min(max(0.0, draft_s - expected_s), _MOST_WAKE * plain_s)
                    # The first long one may have been an interruption: it sets the price, and is paid only in part.
                    paid_s = min(extra_s, max(2 * self._wake_s, _LEAST_WAKE * plain_s))
                    self._wake_s += _WAKE_RATE * (extra_s - self._wake_s)
                    extra_s = paid_s
                    self._owed_s = min(self._owed_s + extra_s, _MAX_DELAY * _WAKE_SHARE * self._max_slowdown * plain_s)
                    draft_s = min(draft_s, expected_s)
                else:
                    draft_s = min(
                        draft_s, _INTERRUPTED * expected_s
                    )  # more is no work of the drafter, but an interruption
            taken_s += draft_s or expected_s
            profit_s = plain_s + num_accepted * cost.seconds(num_requests) / num_requests - taken_s
            if worth_s > 0 and elapsed_s > 0 and plain_s < _SHORT_S:
                profit_s = min(profit_s, worth_s - min(elapsed_s - extra_s, _INTERRUPTED * taken_s))
            if profit_s > 0:
                self._is_stopped = False
                repaid_s = min(profit_s, self._owed_s)
                self._owed_s -= repaid_s
                profit_s -= repaid_s
        self._owed_s = max(0.0, self._owed_s - num_steps * _WAKE_SHARE * self._max_slowdown * taken_s)
        limit_s = self._limit_s(plain_s)
        account_s = limit_s / 4 if self._account_s is None else self._account_s
        account_s += num_steps * ((1 - _WAKE_SHARE) * self._max_slowdown * taken_s + profit_s)
        self._account_s = min(limit_s, max(-_MAX_DEBT * limit_s, account_s))

    def _decide(self, requests: Sequence[D], num_other_tokens: int) -> tuple[Reason, list[int]]:
        size = len(requests)
        if not size:
            return "idle", []
        if self._mode == "fixed":
            return "fixed", [self.max_tokens] * size
        cost = self._cost
        if cost is None:
            return "cost unknown", [0] * size
        num_plain = size + num_other_tokens
        # Where drafts gain much, a plain step costs much, and no error of its price would change the decision.
        num_samples = _NUM_SAMPLES if cost.seconds(num_plain) < _SHORT_S else 1
        interval = max(self._sample_interval, int(num_samples * self._gain / _SAMPLE_SHARE))
        if self._num_samples:
            self._num_samples -= 1
            return "sample", [0] * size
        if self._num_speculated >= interval or self._is_new_size(cost, num_plain):
            self._num_speculated = 0
            self._num_samples = num_samples - 1
            return "sample", [0] * size
        kept, plain_s = self._kept, cost.seconds(num_plain)
        decision_s = _DECISION_S + _PER_PAIR_S * size * self.max_tokens
        is_paid = self._decisions.covers(plain_s, decision_s)
        if kept.num_left or (kept.is_held and self._kept_reason == "gain" and not is_paid):
            loss_s = self._loss_s(cost, num_plain, kept.total_of(size))
            if (kept.fit(size, loss_s) or not is_paid) and loss_s <= self.account_s / 2:
                kept.take()
                if self._kept_reason == "gain":
                    self._num_speculated += 1
                return self._kept_reason, self._kept_of(requests)
        if 4 * size < 3 * self._last_size:  # what a probe costs now is not known yet; drafters read each request
            self._probe_interval = min(self._probe_interval, _MIN_INTERVAL)
            self._wake_s *= size / self._last_size
        self._last_size, self._last_plain = size, num_plain
        kept.drop()
        self._num_decisions += 1
        self._decisions.spend(decision_s)
        limit_s = self._limit_s(plain_s)
        if self._account_s is None:
            self._account_s = limit_s / 4
        most_kept = min(_MAX_KEPT, int(decision_s / (_KEPT_SHARE * plain_s)))
        if self._account_s < limit_s / 32:
            self._is_stopped = True
        elif self._account_s >= limit_s / 8:
            self._is_stopped = False
        estimates = self._current(requests)
        lengths: list[int] | None = None
        reason: Reason = "account"
        if not self._is_stopped and not (self._owed_s > 0 and self._num_zero >= _LEAST_REST):
            if size == 1 and num_plain == 1:
                length, reason = self._best_alone(estimates[0], cost, 1, plain_s, plain_s + self._account_s / 2)
                lengths = [length] if length else None
            else:
                lengths, reason = self._best(requests, estimates, cost, num_plain, plain_s)
        if lengths is not None and not self._draft_cost.is_known:
            return "probe", [1] + [0] * (size - 1)
        if lengths is not None:
            self._keep(estimates, lengths, cost, "gain", most_kept)
            self._num_zero = self._num_undrafted = self._num_skips = 0
            self._num_speculated += 1
            self._probe_interval = _MIN_INTERVAL
            return "gain", lengths
        self._zero_reason = reason
        self._num_speculated = 0
        self._num_zero += 1
        self._num_undrafted += 1
        if self._num_zero >= self._probe_interval:
            lengths = self._probe(estimates, cost, num_plain, plain_s)
            if lengths is not None:
                self._keep(estimates, lengths, cost, "probe", 1)
                self._num_zero = self._num_undrafted = 0
                self._probe_interval = max(_MIN_INTERVAL, min(2 * self._probe_interval, _MAX_PROBE_INTERVAL))
                return "probe", lengths
        if self._num_undrafted >= _SKIP_AFTER:
            num_skips = int(decision_s / (_DECISION_SHARE * plain_s))
            self._num_skips = min(_MAX_SKIPPED, max(_MIN_SKIPPED, num_skips))
            self._is_far = self._num_zero + _NUM_FOLLOWED < self._probe_interval
        elif reason == "account" or not self._decisions.covers(0.0, decision_s):
            self._num_skips = most_kept
        return reason, [0] * size

    def _num_computed(self, lengths: Sequence[int]) -> int:
        """Return how many tokens drafts of these lengths add to a step."""
        return sum(lengths)

    def _is_new_size(self, cost: StepCost, num_plain: int) -> bool:
        """Return whether a plain step of this size must be measured; False again after that, in case none is."""
        if num_plain == self._last_sample or cost.is_observed(num_plain):
            return False
        self._last_sample = num_plain
        return True

    def _loss_s(self, cost: StepCost, num_plain: int, num: int) -> float:
        """Return the seconds that `num` positions of drafts cost if nothing is accepted."""
        step_s = cost.seconds(num_plain + num, has_drafts=True)
        return step_s - cost.seconds(num_plain) + self._drafting_s(self.max_tokens, num)

    def _keep(self, estimates: list[Estimate], lengths: list[int], cost: StepCost, reason: Reason, most: int) -> None:
        """Keep the lengths of a decision for at most `most` more steps."""
        for estimate, length in zip(estimates, lengths, strict=True):
            estimate.length = length
        total = self._num_computed(lengths)
        loss_s = max(self._loss_s(cost, self._last_plain, total), cost.seconds(self._last_plain) / 4)
        self._kept_reason = reason
        least = 1 if reason == "probe" else 0  # the first step after a rest says little of the cost
        self._kept.keep(lengths, total, loss_s=loss_s, least=least, most=most)

    def _kept_of(self, requests: Sequence[D]) -> list[int]:
        """Return the kept lengths of these requests."""
        known, usual = self._estimates, self._kept.usual
        lengths: list[int] = []
        for request in requests:
            estimate = known.get(request.arrival)
            lengths.append(usual if estimate is None or estimate.length < 0 else estimate.length)
        return lengths

    def _limit_s(self, plain_s: float) -> float:
        """Return the most that the account may hold."""
        return self._max_slowdown * max(_NUM_STEPS_KEPT * plain_s, _SECONDS_KEPT)

    def _current(self, requests: Sequence[D]) -> list[Estimate]:
        """Return the estimates of the requests; those of large batches take turns in being computed anew."""
        known, turn, is_small = self._estimates, self._num_decisions, len(requests) <= _FEW
        estimates: list[Estimate] = []
        for request in requests:
            arrival = request.arrival
            estimate = known.get(arrival)
            if estimate is None:
                estimate = known[arrival] = self._everyone.estimate()
                if len(requests) <= 2:  # it is most of the batch
                    self._probe_interval = _MIN_INTERVAL
            elif estimate.is_stale:
                if is_small or not (turn + arrival) & 3 or estimate.num_observations < 6:
                    estimate.refresh()
            elif not (turn + arrival) & 15:
                estimate.refresh()
            estimates.append(estimate)
        return estimates

    def _best(
        self, requests: Sequence[D], estimates: list[Estimate], cost: StepCost, num_plain: int, plain_s: float
    ) -> tuple[list[int] | None, Reason]:
        """Return the lengths with the most expected tokens per second, or None and why there are none."""
        size, max_tokens = len(estimates), self.max_tokens
        num_pairs = size * max_tokens
        token_s = cost.seconds(size) / size
        weights = self._weights(requests)
        is_found = min([estimate.fill for estimate in estimates]) > 0.97
        keys: list[float] = []  # of all pairs, by request and position
        for estimate in estimates:
            keys += estimate.survival
        if weights is not None:
            keys = [key * weight for key, weight in zip(keys, _repeated(weights, max_tokens), strict=True)]
        # From here on lists are in descending order of the keys.
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
        drafts_s = self._prefixes_s(keys, ranked)
        step_s = list(map(add, step_s, drafts_s))
        values = list(accumulate(shares, initial=plain_s / token_s))
        del values[0]
        rates = [value / cost_s for value, cost_s in zip(values, step_s, strict=True)]
        best = max(rates)
        num = rates.index(best) + 1
        risk_s = plain_s + self.account_s / 2
        reason: Reason = "acceptance"
        if weights is not None or full_s[num - 1] + drafts_s[num - 1] > risk_s:
            at_worst_s = map(add, full_s, drafts_s)
            rates = [
                rate if total * token_s >= cost_s - plain_s and worst_s <= risk_s else 0.0
                for rate, total, cost_s, worst_s in zip(rates, accumulate(gains), step_s, at_worst_s, strict=True)
            ]
            affordable = max(rates)
            if best * token_s >= MARGIN > affordable * token_s:
                reason = "account"
            best = affordable
            num = rates.index(best) + 1
        extra_s, gained_s = step_s[num - 1] - plain_s, values[num - 1] * token_s - plain_s
        if best * token_s >= MARGIN or (best > 0 and gained_s > max(2 * extra_s, LEAST * plain_s)):
            self._gain = max(0.0, best * token_s - 1)
            return _lengths(estimates, weights, num, ranked[num - 1]), "gain"
        if reason != "account":
            likeliest = max(estimates, key=lambda estimate: estimate.survival[0])
            length, _ = self._best_alone(likeliest, cost, 1, cost.seconds(1), inf)
            reason = "load" if length else "acceptance"
        return None, reason

    def _weights(self, requests: Sequence[D]) -> list[float] | None:
        """Return the weights of the requests, with a mean of 1; None if all are equal."""
        if self._weight is weight_by_priority and len({request.priority for request in requests}) == 1:
            return None
        weights = [self._weight(request) for request in requests]
        mean = sum(weights) / len(weights)
        return [weight / mean for weight in weights] if min(weights) < max(weights) else None

    def _prefixes_s(self, keys: list[float], ranked: list[float]) -> list[float]:
        """Return the seconds of drafting of all prefixes; `keys` are those by position."""
        draft, max_tokens = self._draft_cost, self.max_tokens
        fixed_s = draft.per_step_s + draft.per_other_s * self._num_prompt
        seconds: list[float] = []
        if draft.per_pass_s:
            # A prefix has one more pass from where the best pair of the next position comes into it.
            starts = [bisect_left(ranked, -max(keys[index::max_tokens]), key=neg) for index in range(max_tokens)]
            for num_passes, (start, end) in enumerate(pairwise([*starts, len(ranked)]), start=1):
                seconds += [fixed_s + draft.per_pass_s * num_passes] * (end - start)
        else:
            seconds = [fixed_s] * len(ranked)
        if draft.per_token_s:
            seconds = list(map(add, seconds, accumulate(repeat(draft.per_token_s, len(seconds)))))
        return seconds

    def _best_alone(
        self, estimate: Estimate, cost: StepCost, num_plain: int, plain_s: float, risk_s: float
    ) -> tuple[int, Reason]:
        """Return what `_best` does, for a single request: its length, or 0."""
        draft, fill, token_s = self._draft_cost, estimate.fill, cost.seconds(1)
        chord = 1.0 if self._computes_padding else fill
        draft_s, pass_s = draft.per_step_s, draft.per_pass_s + draft.per_token_s
        best, num, gain_s, extra_s = 0.0, 0, 0.0, 0.0
        reason: Reason = "acceptance"
        value_s, empty_s = plain_s, cost.seconds(num_plain, has_drafts=True)
        for length, (survival, full_s) in enumerate(
            zip(estimate.survival, cost.after(num_plain, self.max_tokens), strict=True), start=1
        ):
            value_s += survival * fill * token_s
            draft_s += pass_s
            step_s = empty_s + (full_s - empty_s) * chord + draft_s
            rate = value_s / step_s
            if rate > best:
                if full_s + draft_s > risk_s:
                    if rate >= MARGIN:
                        reason = "account"
                    continue
                best, num, gain_s, extra_s = rate, length, value_s - plain_s, step_s - plain_s
        if best >= MARGIN or (num and gain_s > max(2 * extra_s, LEAST * plain_s)):
            self._gain = best - 1
            return num, "gain"
        return 0, reason

    def _probe(self, estimates: list[Estimate], cost: StepCost, num_plain: int, plain_s: float) -> list[int] | None:
        """Return a few drafts for the requests of which least is known, if they can be paid for.

        Where steps are padded, the least probe may pay for many tokens; then all requests take part.
        """
        size, share_s = len(estimates), _PROBE_SHARE * self._max_slowdown * plain_s
        num_each = min(2, self.max_tokens)
        least_s = self._probe_s(cost, num_plain, plain_s, 1, 1)
        needed_s = 2 * least_s + self._wake_s  # two steps
        if self._owed_s > 0:
            num_steps = int(self._owed_s / (_WAKE_SHARE * self._max_slowdown * plain_s)) + 1
            self._probe_interval = min(_MAX_DELAY, self._num_zero + num_steps)
            return None
        if needed_s > share_s * self._num_zero:
            self._probe_interval = min(_MAX_DELAY, int(needed_s / share_s) + 1)
            return None
        most_s = min(self.account_s / 2, (share_s * self._num_zero - self._wake_s) / 2)
        for num_requests, length in ((size, num_each), (size, 1), (max(1, size // 8), num_each), (1, 1)):
            risk_s = self._probe_s(cost, num_plain, plain_s, num_requests, length)
            if risk_s <= most_s and (num_requests < size or size == 1 or risk_s <= least_s + 0.01 * plain_s):
                least = sorted(range(size), key=lambda index: estimates[index].num_observations)
                lengths = [0] * size
                for index in least[:num_requests]:
                    lengths[index] = length
                return lengths
        return None

    def _probe_s(self, cost: StepCost, num_plain: int, plain_s: float, num_requests: int, length: int) -> float:
        """Return the seconds that a probe costs if nothing is accepted."""
        num = self._num_computed([length] * num_requests)
        return cost.seconds(num_plain + num, has_drafts=True) - plain_s + self._drafting_s(length, num)

    def _drafting_s(self, length: int, num_tokens: int) -> float:
        """Return the seconds of drafting in the step of the latest decision."""
        return self._draft_cost.seconds(length, num_tokens, self._num_prompt)

    @property
    def _num_prompt(self) -> int:
        """Prompt tokens of the step of the latest decision."""
        return self._last_plain - self._last_size


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
