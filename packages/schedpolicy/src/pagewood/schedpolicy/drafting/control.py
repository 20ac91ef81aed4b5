"""The policy of draft lengths, as called by an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Literal, Protocol, TypeVar, get_args

from pagewood.schedpolicy.drafting.acceptance import Acceptance, Decoding, Own
from pagewood.schedpolicy.drafting.comparison import Comparison
from pagewood.schedpolicy.drafting.step_cost import DraftCost, StepCost
from pagewood.schedpolicy.steps.urgency import relative_weights, weight_by_priority

Mode = Literal["adaptive", "fixed"]
Reason = Literal["gain", "trial", "load", "acceptance", "rest", "cores", "cost unknown", "fixed", "idle"]
"""The reason for the lengths of a step:

- gain: they have the most expected tokens per second.
- trial: one draft token for each request, to learn what is accepted now, because drafts are tried again.
- load: no drafts, because they cost too much at this load even if all were accepted.
- acceptance: no drafts, because too few would be accepted.
- rest: no drafts in this period, either to compare periods with and without drafts, or because this kind is faster.
- cores: no drafts, because other work takes the cores that compute them.
- cost unknown: no drafts, because there is no table of costs yet.
- fixed: the mode is "fixed".
- idle: no request decodes.
"""

_MIN_SPEEDUP = 1.02
_LEAST_SURVIVAL = 0.05
_DECISION_S = 1e-5
_DECISION_SHARE = 0.01
_MOST_KEPT = 16
_NUM_DECLINED = 16
_MOST_DECLINES = 8

D = TypeVar("D", bound=Decoding)
D_co = TypeVar("D_co", bound=Decoding, covariant=True)


class StepsReport(Protocol[D_co]):
    """Results of steps with the same number of requests, either all with drafts or all without."""

    @property
    def requests(self) -> Sequence[D_co]:
        """Requests that were given drafts, one entry per request and step; the next three have the same entries."""
        ...

    @property
    def granted(self) -> Sequence[int]:
        """Draft tokens granted to each, >= 1."""
        ...

    @property
    def drafted(self) -> Sequence[int]:
        """Granted tokens that the drafter proposed."""
        ...

    @property
    def accepted(self) -> Sequence[int]:
        """Proposed tokens that were accepted."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps, >= 1."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests of each step, those with prompts included, as in `DraftControl.rests`."""
        ...

    @property
    def num_decoding(self) -> int:
        """Requests that decoded, with and without drafts, over all steps."""
        ...

    @property
    def num_tokens(self) -> int:
        """Positions that all steps have computed."""
        ...

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens among these positions."""
        ...

    @property
    def draft_s(self) -> float:
        """Seconds for drafts; 0 if not measured."""
        ...

    @property
    def taken_s(self) -> float:
        """Seconds of the steps, including the host's work and the drafts; 0 if not measured."""
        ...


class DraftControl(Generic[D]):
    """Decides how many tokens are drafted for each decoding request of a step.

    1. The expected tokens of a step with drafts come from acceptance rates by position and a factor for each request
       (`Acceptance`).
    2. The duration of a step comes from a table by number of tokens, measured at start (`StepCost`), and the cost of
       drafting (`DraftCost`).
    3. Drafts are sorted by probability. Their number is the one with the most expected tokens per second.
    4. Drafts are made only if this is at least 2% more than without drafts.
    5. If not, the next 16 steps get none either, then the next 32, up to 128, unless the load falls.
    6. At each load, periods with and without drafts are compared by their measured yield, the host's work included. The
       faster kind continues. Trials of the other cost at most 0.4% of the time (`Comparison`).
    7. When steps are short, lengths are reused for several steps, so that decisions take at most a hundredth of the
       time.
    8. When drafts are tried again, the first step drafts one token for each request, and earlier bad results count
       less.
    9. While other work takes the cores, nothing is drafted.
    10. Weights change which requests get drafts, but not the number of drafts.
    """

    __slots__ = (
        "_acceptance", "_are_cores_taken", "_comparisons", "_computes_padding", "_cost", "_draft_cost",
        "_is_trial", "_kept", "_mode", "_num_declined", "_num_declines", "_weight", "is_far", "max_tokens",
        "reason", "steps_by_reason",
    )  # fmt: skip

    def __init__(
        self,
        max_tokens: int,
        cost: StepCost | None = None,
        *,
        mode: Mode = "adaptive",
        draft_cost: DraftCost | None = None,
        weight: Callable[[D], float] = weight_by_priority,
        computes_padding: bool = False,
        prior_acceptance: float = 0.6,
        are_cores_taken: Callable[[], bool] | None = None,
    ) -> None:
        """Start without observations.

        Args:
            max_tokens: Most draft tokens of a request in a step, >= 1.
            cost: Cost of steps on this machine; None if not measured yet (nothing is drafted until `set_cost`).
            mode: "adaptive", or "fixed" for always `max_tokens`.
            draft_cost: Cost of drafting; None to learn it.
            weight: Weight of a request, > 0; read in every decision.
            computes_padding: Whether the step computes granted tokens even if the drafter finds none for them.
            prior_acceptance: Probability of acceptance to assume before the first observation, in (0, 1).
            are_cores_taken: Returns whether other work occupies the cores that compute steps; called in every step of
                mode "adaptive". While it returns True, nothing is drafted, and measured durations are ignored. None:
                cores are always free.

        Raises:
            ValueError: An argument is out of its range.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
        self.max_tokens = max_tokens
        self.reason: Reason = "idle"
        """The reason for the latest lengths."""  # written by: DraftControl
        self.steps_by_reason: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        """Steps by the reason for their lengths."""  # written by: DraftControl
        self.is_far = False
        """Whether the next steps get no drafts for some time, if the load does not change."""
        # written by: DraftControl
        self._mode, self._weight = mode, weight
        self._computes_padding = computes_padding
        self._acceptance = Acceptance(max_tokens, prior=prior_acceptance)
        self._cost, self._draft_cost = cost, draft_cost or DraftCost()  # written by: DraftControl
        self._are_cores_taken = are_cores_taken if mode == "adaptive" else None
        self._comparisons: dict[int, Comparison] = {}
        """By load."""  # written by: DraftControl
        self._is_trial = False
        """Whether the next step with drafts is the first of a trial."""  # written by: DraftControl
        self._num_declined = 0
        """Coming steps without drafts, because the latest decision was against drafts."""  # written by: DraftControl
        self._num_declines = 0
        """Consecutive decisions against drafts."""  # written by: DraftControl
        self._kept = _Kept()

    @property
    def acceptance(self) -> list[float]:
        """[max_tokens], present acceptance rate at each position, given that all positions before it were accepted."""
        return list(self._acceptance.rates)

    @property
    def num_known(self) -> int:
        """Requests that have a record; `forget` drops it."""
        return len(self._acceptance)

    def set_cost(self, cost: StepCost, draft_cost: DraftCost | None = None) -> None:
        """Replace the costs, for example after a measurement; None keeps the cost of drafting."""
        self._cost, self._draft_cost = cost, draft_cost or self._draft_cost

    def forget(self, request: D) -> None:
        """Drop the record of a request that has ended."""
        self._acceptance.forget(request)

    def rests(self, num_requests: int) -> bool:
        """Return whether a step gets no drafts; called once for each step.

        If it returns False, `lengths` is called next.

        Args:
            num_requests: All requests of the step, those with prompts included.
        """
        if self._mode == "fixed":
            return False
        if self._are_cores_taken is not None and self._are_cores_taken():
            return self._rest("cores", is_far=True)
        if self._cost is None:
            return self._rest("cost unknown", is_far=False)
        load = _load(num_requests)
        comparison = self._comparisons.get(load)
        if comparison is None:
            comparison = self._comparisons[load] = Comparison()
        if comparison.is_resting:
            return self._rest("rest", is_far=True)
        if self._num_declined and num_requests >= self._kept.size:
            self._num_declined -= 1
            return self._rest(self.reason, is_far=self._num_declines > 1)
        return False

    def lengths(self, requests: Sequence[D], num_other_tokens: int) -> list[int]:
        """Return the draft tokens of each request, in [0, max_tokens].

        Args:
            requests: All requests that decode in the step and may get drafts.
            num_other_tokens: Prompt tokens that the step computes as well.
        """
        reason, lengths = self._decide(requests, num_other_tokens)
        self.reason = reason
        self.steps_by_reason[reason] += 1
        self.is_far = False
        return lengths

    def observe(self, report: StepsReport[D]) -> None:
        """Learn from the results of steps."""
        if report.requests:
            self._acceptance.observe(report.requests, report.granted, report.drafted, report.accepted)
        cost, num_steps = self._cost, report.num_steps
        if cost is None or self._mode == "fixed" or self.reason == "cores":
            return
        num_tokens, num_decoding = report.num_tokens // num_steps, report.num_decoding // num_steps
        has_drafts, taken_s = bool(report.requests), report.taken_s / num_steps
        if has_drafts and report.draft_s > 0:
            num_drafts = max(1, report.num_draft_tokens // num_steps)
            self._draft_cost.observe(max(report.granted), num_drafts, report.draft_s / num_steps)
        if taken_s <= 0 or not num_decoding:
            return
        cost.observe(num_tokens, max(taken_s - report.draft_s / num_steps, 0.1 * taken_s), has_drafts=has_drafts)
        num_accepted, num_plain = sum(report.accepted), num_tokens - report.num_draft_tokens // num_steps
        worth_s = num_steps * cost.as_measured(num_plain) + num_accepted * cost.as_measured(num_decoding) / num_decoding
        comparison = self._comparisons.get(_load(report.num_requests))
        if comparison is None:
            return
        if comparison.observe(num_steps, worth_s, report.taken_s, has_drafts=has_drafts):
            self._acceptance.hope()
            self._is_trial, self._num_declined, self._num_declines = True, 0, 0

    def _rest(self, reason: Reason, *, is_far: bool) -> bool:
        self.reason, self.is_far = reason, is_far
        self.steps_by_reason[reason] += 1
        return True

    def _decide(self, requests: Sequence[D], num_other_tokens: int) -> tuple[Reason, list[int]]:
        """Return the reason for the lengths of a step, and the lengths."""
        size = len(requests)
        if not size:
            return "idle", []
        if self._mode == "fixed":
            return "fixed", [self.max_tokens] * size
        cost = self._cost
        if cost is None:
            return "cost unknown", [0] * size
        kept, acceptance = self._kept, self._acceptance
        if self._is_trial:
            self._is_trial, kept.num_left = False, 0
            for request in requests:
                acceptance.of(request).length = 1
            return "trial", [1] * size
        if kept.num_left and kept.size <= 2 * size <= 4 * kept.size and num_other_tokens <= kept.num_others:
            kept.num_left -= 1
            return "gain", [acceptance.latest_length(request, kept.usual) for request in requests]
        owns = [acceptance.of(request) for request in requests]
        reason, lengths = self._best(requests, owns, cost, num_other_tokens)
        kept.size, kept.num_others, kept.num_left = size, num_other_tokens, 0
        if reason != "gain":
            if not num_other_tokens:
                self._num_declines += 1
                self._num_declined = _NUM_DECLINED * min(self._num_declines, _MOST_DECLINES)
            return reason, lengths
        self._num_declined = self._num_declines = 0
        for own, length in zip(owns, lengths, strict=True):
            own.length = length
            if not length:
                acceptance.skip(own)
        kept.usual = sum(lengths) // size
        decision_s = _DECISION_S * (1 + size) / 2
        kept.num_left = min(_MOST_KEPT, int(decision_s / _DECISION_SHARE / cost.seconds(size + num_other_tokens)))
        return reason, lengths

    def _best(
        self, requests: Sequence[D], owns: Sequence[Own], cost: StepCost, num_other_tokens: int
    ) -> tuple[Reason, list[int]]:
        """Return the lengths with the most expected tokens per second; all 0 if they gain nothing."""
        size = len(requests)
        drafts = self._sorted_drafts(requests, owns)
        num_plain = size + num_other_tokens
        plain_s, worth_s = cost.seconds(num_plain), cost.seconds(size) / size
        best, num_best = _MIN_SPEEDUP, 0
        gained = num_tokens = 0.0
        num_passes = 0
        for number, (_, survival, num_computed, depth, _) in enumerate(drafts, 1):
            gained += survival
            num_tokens += num_computed
            num_passes = max(num_passes, depth)
            taken_s = cost.seconds(num_plain + round(num_tokens), has_drafts=True)
            taken_s += self._draft_cost.seconds(num_passes, max(1, round(num_tokens)))
            speedup = (plain_s + gained * worth_s) / taken_s
            if speedup >= best:
                best, num_best = speedup, number
        lengths = [0] * size
        if num_best:
            for *_, index in drafts[:num_best]:
                lengths[index] += 1
            return "gain", lengths
        taken_s = cost.seconds(num_plain + 1, has_drafts=True) + self._draft_cost.seconds(1, 1)  # the least drafts
        return "acceptance" if plain_s + worth_s > taken_s else "load", lengths

    def _sorted_drafts(self, requests: Sequence[D], owns: Sequence[Own]) -> list[tuple[float, float, float, int, int]]:
        """Return the possible drafts, best first.

        Each is (rank, expected tokens, tokens to compute, depth, index of the request). A draft token never comes
        before the one that it follows.
        """
        acceptance = self._acceptance
        weights = relative_weights(requests, self._weight) if len(requests) > 1 else None
        drafts: list[tuple[float, float, float, int, int]] = []
        for index, own in enumerate(owns):
            weight, fill = weights[index] if weights else 1.0, acceptance.fill(own)
            num_computed = 1.0 if self._computes_padding else fill
            for depth, value in enumerate(acceptance.survival(own), 1):
                if value < _LEAST_SURVIVAL:
                    break
                drafts.append((value * weight, value * fill, num_computed, depth, index))
        drafts.sort(key=_rank, reverse=True)
        return drafts


class _Kept:
    """The latest decision, which similar steps reuse."""

    __slots__ = ("num_left", "num_others", "size", "usual")

    def __init__(self) -> None:
        self.num_left = 0
        """Further steps that may reuse the lengths."""  # written by: DraftControl
        self.size = 0
        """Requests of the step of the decision."""  # written by: DraftControl
        self.num_others = 0
        """Prompt tokens of that step."""  # written by: DraftControl
        self.usual = 0
        """Length for a request that has arrived since."""  # written by: DraftControl


def _load(num_requests: int) -> int:
    """Return the number of a class of similar loads: 1, 2, 3, 4, 5 to 6, 7 to 8, 9 to 12, 13 to 16, 17 to 24, ..."""
    width = max(0, (num_requests - 1).bit_length() - 2)
    return (width << 2) + ((num_requests - 1) >> width)


def _rank(draft: tuple[float, float, float, int, int]) -> float:
    return draft[0]
