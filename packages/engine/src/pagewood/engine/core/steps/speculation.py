"""Speculation: which grants of a step are made longer by drafts, and what came of them.

The host plans with upper bounds. A grant with n drafts promises n + 1 tokens; until its step is retired, the numbers of
its request assume that all of them come. `settle` then lowers what was launched by the tokens that did not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import Protocol

from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.grant import Grant

_LONGEST_STEP = 2.0
"""A pause came before a step that takes at least this many times what the runner has measured for it, ..."""
_LONGEST_HOST_S = 5e-3
"""... and more than this many seconds on top: the host does not work that long for a step."""
_FORGET_EVERY = 256
"""Steps after which ended requests are forgotten."""
_REPORTED_S = 4e-3
"""Steps that are alike are reported together, until they have taken this many seconds."""


@dataclass(slots=True)
class StepsReport:
    """What steps with the same number of requests have yielded: all with drafts, or all without."""

    requests: list[Request] = field(default_factory=list[Request])  # contents written by: settle
    """Requests that were given drafts, one entry per step; the next three lists have the same length."""
    granted: list[int] = field(default_factory=list[int])  # contents written by: settle
    """Draft tokens that each was given."""
    drafted: list[int] = field(default_factory=list[int])  # contents written by: settle
    """How many of them the drafter proposed."""
    accepted: list[int] = field(default_factory=list[int])  # contents written by: settle
    """How many of those were accepted."""
    num_requests: int = 0
    """Requests of each step."""  # written by: settle
    is_drafting: bool = False  # written by: settle
    num_steps: int = 0  # written by: settle
    num_decoding: int = 0
    """Requests that decoded, with and without drafts, over all steps."""  # written by: settle
    num_tokens: int = 0
    """Positions that all steps have computed."""  # written by: settle
    num_draft_tokens: int = 0
    """Positions of drafts among them."""  # written by: settle
    draft_s: float = 0.0
    """Seconds for drafts; 0: not measured."""  # written by: settle
    taken_s: float = 0.0
    """Seconds of the steps with all that the host did for them, drafts included."""  # written by: settle


class Drafting(Protocol):
    """Decides how many tokens are drafted for each request."""

    @property
    def max_tokens(self) -> int:
        """The most draft tokens of one request in one step."""
        ...

    @property
    def reason(self) -> str:
        """Why the latest numbers are what they are, in a word or two, for metrics."""
        ...

    @property
    def is_far(self) -> bool:
        """Whether the steps after the latest decision get no drafts for a while, so that drafters need not follow."""
        ...

    def rests(self, num_requests: int) -> bool:
        """Return whether a step with this number of requests gets no drafts; the requests themselves are not read.

        It is called once for each step. If it returns False, `lengths` is called next.
        """
        ...

    def lengths(self, requests: Sequence[Request], num_other_tokens: int) -> Sequence[int]:
        """Return the number of draft tokens of each decoding request, in [0, max_tokens].

        Args:
            requests: the decoding requests of one step.
            num_other_tokens: prompt tokens that the same step computes.
        """
        ...

    def observe(self, report: StepsReport) -> None:
        """Note the results of steps; called when they have been retired."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that has ended; called some time after its end."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCounts:
    """What has come of drafts since the engine was built."""

    num_drafted: int = 0
    """Draft tokens that were verified."""
    num_accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    """[max_tokens], how often the first, the second, ... draft token was accepted."""
    drafted_by_position: tuple[int, ...] = ()
    """[max_tokens], how often there was a first, a second, ... draft token."""
    draft_s: float = 0.0
    """Seconds for drafts."""
    verify_s: float = 0.0
    """Seconds for the rest of all steps."""
    num_rebuilt: int = 0
    """Positions that a draft model computed before its drafts because its KV there was missing or of other tokens."""
    num_postponed: int = 0
    """Times that a request got no drafts, because the drafter was not ready for its row."""
    num_short: int = 0
    """Rows for which a drafting head attends to a part of the text only, because its KV of the rest was missing."""
    reason: str = ""
    """Why the draft lengths are what they are now."""


class Speculation:
    """Makes grants longer by drafts, and counts what they yielded.

    Invariant: no request loses pages for the drafts of another.

    Args:
        drafting: decides how many tokens are drafted.
        kv: gives pages for them.
        drafts_constrained: whether requests with a grammar get drafts; the runner must then report drafts before it
            verifies them.
    """

    __slots__ = (
        "_clock", "_draft_s", "_drafting", "_drafts_constrained", "_kv", "_num_by_accepted", "_num_by_drafted",
        "_num_postponed", "_num_rebuilt", "_num_settled", "_num_short", "_report", "_seen", "_settled_s", "_verify_s",
    )  # fmt: skip

    def __init__(
        self,
        *,
        drafting: Drafting,
        kv: AnyKV,
        drafts_constrained: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._drafting = drafting
        self._clock = clock
        self._settled_s = 0.0
        """When the latest step was retired."""  # written by: speculation
        self._drafts_constrained = drafts_constrained
        self._kv = kv
        self._num_by_drafted = [0] * (1 + drafting.max_tokens)  # contents written by: settle
        """How often a request had 0, 1, 2, ... drafts."""
        self._num_by_accepted = [0] * (1 + drafting.max_tokens)  # contents written by: settle
        self._seen: set[Request] = set()
        """Requests that `drafting` may know."""  # contents written by: speculation
        self._num_settled = 0
        """Steps since ended requests were forgotten."""  # written by: speculation
        self._report = StepsReport()
        """Steps that are not reported yet."""  # written by: settle
        self._draft_s = 0.0  # written by: speculation
        self._verify_s = 0.0  # written by: speculation
        self._num_rebuilt = 0  # written by: speculation
        self._num_postponed = 0  # written by: speculation
        self._num_short = 0  # written by: speculation

    @property
    def is_followed(self) -> bool:
        """Whether drafters should follow the step that was extended last; see `Batch.is_followed`."""
        return not self._drafting.is_far

    def extend(self, grants: tuple[Grant, ...]) -> tuple[Grant, ...]:
        """Return the grants of a step, those of decoding requests made longer by as many drafts as pages allow.

        It is the same tuple if there are no drafts.
        """
        if self._drafting.rests(len(grants)):
            return grants
        decoding = [
            index
            for index, grant in enumerate(grants)
            if grant.num_tokens == grant.num_promised == 1
            and (self._drafts_constrained or grant.request.matcher is None)
        ]
        if not decoding:
            return grants
        num_other_tokens = sum([grant.num_tokens for grant in grants]) - len(decoding)
        requests = [grants[index].request for index in decoding]
        self._seen.update(requests)
        wanted = self._drafting.lengths(requests, num_other_tokens)
        if not any(wanted):
            return grants
        extended, page_size = list(grants), self._kv.page_size
        is_drafting = False
        for index, num_wanted in zip(decoding, wanted, strict=True):
            if not num_wanted:
                continue
            grant = grants[index]
            request, start = grant.request, grant.start
            # The last draft may be followed by one more token, which ends the request.
            num = min(num_wanted, request.max_length - 2 - start)
            if start + 1 + num > request.num_pages * page_size:
                num = self._room(grant, num, num_reserved=len(grants))
            if num > 0:
                extended[index] = Grant(request, start, 1 + num, 1 + num, grant.is_admitted)
                is_drafting = True
        return tuple(extended) if is_drafting else grants

    def settle(self, grants: Sequence[Grant], result: StepResult, *, is_drafting: bool) -> None:
        """Lower the launch counters of the requests by the promised tokens that a step did not yield, and count.

        Args:
            grants: of the step; none of its tokens has been applied to the requests yet.
            result: of the step.
            is_drafting: whether `extend` has changed the grants.
        """
        now = self._clock()
        elapsed_s, self._settled_s = now - self._settled_s, now
        self._draft_s += result.draft_s
        self._verify_s += result.verify_s
        device_s = result.draft_s + result.verify_s
        if elapsed_s >= _LONGEST_STEP * device_s and elapsed_s - device_s >= _LONGEST_HOST_S:  # after a pause
            elapsed_s = device_s
        if not grants:
            return
        report, last, num_grants = self._report, grants[-1], len(grants)
        # Those that decode come first.
        only_decodes = last.num_promised > 1 or last.num_promised == last.num_tokens
        if not only_decodes or report.is_drafting != is_drafting or report.num_requests != num_grants:
            self.report()
            report = self._report
            report.is_drafting, report.num_requests = is_drafting, num_grants
        report.num_steps += 1
        if only_decodes:
            report.num_decoding += num_grants
        else:
            report.num_decoding += sum([one.num_promised > 1 or one.num_promised == one.num_tokens for one in grants])
        if only_decodes and not is_drafting:
            report.num_tokens += num_grants
        else:
            report.num_tokens += sum([grant.num_tokens for grant in grants])
        if is_drafting:
            self._settle_drafts(report, grants, result)
        report.draft_s += result.draft_s
        # The cost of a step is the time since the step before it was retired, with the host's work.
        report.taken_s += elapsed_s if elapsed_s > device_s else device_s
        if not only_decodes or report.taken_s >= _REPORTED_S:
            self.report()

    def report(self) -> None:
        """Report the steps collected so far; called when the next step differs from them or does not come."""
        report = self._report
        if not report.num_steps:
            return
        self._report = StepsReport()
        self._num_settled += report.num_steps
        if self._num_settled >= _FORGET_EVERY:
            self._forget_ended()
        self._drafting.observe(report)

    def _settle_drafts(self, report: StepsReport, grants: Sequence[Grant], result: StepResult) -> None:
        """Lower the launch counters, and enter the drafts of each grant that yielded tokens."""
        promised = grants if len(grants) == result.counts.size else [grant for grant in grants if grant.num_promised]
        num_drafted_of = [0] * len(promised) if result.num_drafted is None else result.num_drafted.tolist()
        by_drafted, by_accepted = self._num_by_drafted, self._num_by_accepted
        requests, granted, drafted, accepted = report.requests, report.granted, report.drafted, report.accepted
        num_missing = 0
        for grant, count, num_drafted in zip(promised, result.counts.tolist(), num_drafted_of, strict=True):
            num_promised = grant.num_promised
            if num_promised == 1:
                continue
            report.num_draft_tokens += grant.num_tokens - 1
            if not count:  # its request has ended
                continue
            request, num_accepted = grant.request, count - 1
            request.num_launched -= num_promised - count
            requests.append(request)
            granted.append(num_promised - 1)
            drafted.append(num_drafted)
            accepted.append(num_accepted)
            by_drafted[num_drafted] += 1
            by_accepted[num_accepted] += 1
            request.num_drafted += num_drafted
            request.num_accepted += num_accepted
            num_missing += num_promised - 1 - num_drafted  # the runner has not computed these positions
        report.num_tokens -= num_missing
        report.num_draft_tokens -= num_missing
        self._num_rebuilt += result.num_rebuilt
        self._num_postponed += result.num_postponed
        self._num_short += result.num_short

    def counts(self) -> SpeculationCounts:
        """Return what has come of drafts so far."""
        drafted, accepted = _by_position(self._num_by_drafted), _by_position(self._num_by_accepted)
        return SpeculationCounts(
            num_drafted=sum(drafted),
            num_accepted=sum(accepted),
            accepted_by_position=accepted,
            drafted_by_position=drafted,
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            num_rebuilt=self._num_rebuilt,
            num_postponed=self._num_postponed,
            num_short=self._num_short,
            reason=self._drafting.reason,
        )

    def _forget_ended(self) -> None:
        self._num_settled = 0
        ended = [request for request in self._seen if request.finish is not None]
        self._seen.difference_update(ended)
        for request in ended:
            self._drafting.forget(request)

    def _room(self, grant: Grant, num_wanted: int, *, num_reserved: int) -> int:
        """Return how many of the drafts of a grant there are pages for, and give its request those that it lacks.

        `num_reserved` pages stay available.
        """
        request, kv = grant.request, self._kv
        if kv.grow(request, grant.start + 1 + num_wanted, num_reserved=num_reserved):
            return num_wanted
        return min(num_wanted, request.num_pages * kv.page_size - grant.start - 1)


def _by_position(num_by_length: Sequence[int]) -> tuple[int, ...]:
    """Return how often there was a first, a second, ... token, from how often there were 0, 1, 2, ... of them."""
    return tuple(accumulate(num_by_length[:0:-1]))[::-1]
