"""Measurements of requests in the HTTP process: times by stream, tokens, and reasons of the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from pagewood.engine.api import CachedPrefix, Explanation, FinishReason
from pagewood.engine.observe.histogram import Histogram, Labels
from pagewood.server.messages import wire
from pagewood.server.metrics import bounds

MAX_TENANTS = 32
"""Tenants with series of their own; later tenants share one."""
MAX_PRIORITIES = 16
_NOT_COMPUTED = (FinishReason.REFUSED, FinishReason.ERROR, FinishReason.CACHE_THRESHOLD)
"""Ends of requests without output that say nothing about the time to a first token."""


def tenant_of(message: wire.Generate) -> str:
    """Return the tenant of a request for labels; empty: it has none."""
    return message.options.tenant or ""


@dataclass(slots=True, kw_only=True, eq=False)
class Account:
    """The sums of one tenant and priority."""

    tenant: str
    priority: str
    num_ended: Counter[str] = field(default_factory=Counter[str])
    """Ended requests by the reason of the end."""  # written by: RequestMetrics
    num_prompt_tokens: int = 0  # written by: RequestMetrics
    num_cached_tokens: int = 0  # written by: RequestMetrics
    num_output_tokens: int = 0  # written by: RequestMetrics
    first_token_s: Histogram = field(default_factory=partial(Histogram, bounds.FIRST_TOKEN))
    """From the submission of a request."""  # written by: RequestMetrics
    queue_s: Histogram = field(default_factory=partial(Histogram, bounds.QUEUE))  # written by: RequestMetrics
    request_s: Histogram = field(default_factory=partial(Histogram, bounds.REQUEST))  # written by: RequestMetrics


@dataclass(slots=True, kw_only=True, eq=False)
class Timing:
    """One request that has not ended. Times are seconds on the clock of `time.monotonic`."""

    request_id: str  # written by: RequestMetrics
    account: Account
    submitted_s: float
    max_tokens: int | None
    context: object = None
    """The tracer's data about it; None: it is not traced."""
    first_s: float = 0.0
    """Time of its first answer; 0: no answer yet."""  # written by: RequestMetrics
    last_s: float = 0.0
    """Time of its latest answer."""  # written by: RequestMetrics
    num_prompt: int = 0  # written by: RequestMetrics
    num_cached: int = 0  # written by: RequestMetrics
    num_output: int = 0  # written by: RequestMetrics
    explanation: Explanation | None = None
    """Times of queueing and admission, and the cached tokens."""  # written by: RequestMetrics


class Tracer(Protocol):
    """Gets requests as they begin and end."""

    def begin(self, message: wire.Generate) -> object:
        """Return the data that `end` needs about a request that is being submitted; None: it is not traced."""
        ...

    def end(self, timing: Timing, *, reason: str, now_s: float) -> None:
        """Take a traced request that has ended."""
        ...


class RequestMetrics:
    """Counts requests from their submission to their end. Invariant: each request ends once.

    Requests of a beam search are not counted: each of its steps is one.

    Args:
        tracer: is notified of every request; None: requests are not traced.
        clock: seconds.
    """

    def __init__(self, *, tracer: Tracer | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracer = tracer
        self._clock = clock
        self._tenants, self._priorities = Labels(MAX_TENANTS), Labels(MAX_PRIORITIES)
        self._accounts: dict[tuple[str, str], Account] = {}  # written by: _account
        self._open: dict[str, Timing] = {}  # written by: submitted, _close
        self.token_s = Histogram(bounds.TOKEN)
        """Between two messages of an answer."""
        self.per_token_s = Histogram(bounds.TOKEN)
        """Mean of a request after its first message, for each token."""
        self.prefill_s = Histogram(bounds.REQUEST)
        self.decode_s = Histogram(bounds.REQUEST)
        self.inference_s = Histogram(bounds.REQUEST)
        self.prompt_tokens = Histogram(bounds.TOKENS)
        self.output_tokens = Histogram(bounds.TOKENS)
        self.computed_tokens = Histogram(bounds.TOKENS)
        """Prompt tokens that were not cached."""
        self.max_tokens = Histogram(bounds.TOKENS)
        self.num_answers = Histogram(bounds.VLLM_NUM_ANSWERS)
        self.causes: Counter[str] = Counter()
        """Requests by the cause for which no more of their prompt was cached."""  # written by: _first
        self.missed_tokens: Counter[str] = Counter()
        """Prompt tokens by the cause for which they were not cached."""  # written by: _first

    @property
    def accounts(self) -> list[Account]:
        """The sums of every tenant and priority that has been seen."""
        return list(self._accounts.values())

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def output_tokens_of_open(self) -> Iterator[tuple[Account, int]]:
        """Yield the tokens of open requests so far; their accounts do not have these tokens yet."""
        return ((timing.account, timing.num_output) for timing in self._open.values())

    def submitted(self, message: wire.NewRequest) -> None:
        """Begin to measure the requests of a message."""
        if not isinstance(message, wire.Generate) or message.options.is_search:
            return
        now_s, account = self._clock(), self._account(message)
        context = None if self._tracer is None else self._tracer.begin(message)
        for request_id in wire.ids_of(message):
            self._open[request_id] = Timing(
                request_id=request_id,
                account=account,
                submitted_s=now_s,
                max_tokens=message.options.sampling.max_tokens,
                context=context,
            )
        self.num_answers.add(len(wire.ids_of(message)))

    def renamed(self, request_id: str, *, new_id: str) -> None:
        """Continue to measure a request under another id; it is sent again, because a process died.

        It counts once, from its first submission; the pause counts as time between two of its answers.
        """
        timing = self._open.pop(request_id, None)
        if timing is not None:
            timing.request_id = new_id
            self._open[new_id] = timing

    def answered(self, answers: wire.Answers) -> None:
        """Measure the answers of one step, before they are passed on."""
        now_s, open_ = self._clock(), self._open
        gaps: dict[float, int] = {}  # most answers of one step also shared their previous step
        for answer in answers.answers:
            timing = open_.get(answer.request_id)
            if timing is None:
                continue
            if timing.first_s and answer.finish is None:
                last_s = timing.last_s
                gaps[last_s] = gaps.get(last_s, 0) + 1
                timing.last_s = now_s
                timing.num_output = answer.num_output_tokens
            else:
                self._first_or_last(timing, answer, now_s)
        for last_s, num in gaps.items():
            self.token_s.add(now_s - last_s, num)

    def left(self, request_id: str, *, has_failed: bool) -> None:
        """Close a request that is dropped: it has ended, its client has left, or it was lost with a process."""
        timing = self._open.get(request_id)
        if timing is not None:
            self._close(timing, "error" if has_failed else "abort", self._clock())

    def _account(self, message: wire.Generate) -> Account:
        key = (self._tenants.of(tenant_of(message)), self._priorities.of(message.options.priority))
        account = self._accounts.get(key)
        if account is None:
            self._accounts[key] = account = Account(tenant=key[0], priority=key[1])
        return account

    def _first_or_last(self, timing: Timing, answer: wire.Answer, now_s: float) -> None:
        is_computed = answer.num_output_tokens > 0 or answer.finish not in _NOT_COMPUTED
        timing.num_output = answer.num_output_tokens
        if timing.first_s:
            self.token_s.add(now_s - timing.last_s)
        elif is_computed:
            self._first(timing, answer, now_s)
        timing.last_s = now_s
        if answer.finish is not None:
            self._close(timing, answer.finish.value, now_s)

    def _first(self, timing: Timing, answer: wire.Answer, now_s: float) -> None:
        account = timing.account
        timing.first_s = now_s
        timing.num_prompt, timing.num_cached = answer.num_prompt_tokens, answer.num_cached_tokens
        timing.explanation = answer.explanation
        account.num_prompt_tokens += answer.num_prompt_tokens
        account.num_cached_tokens += answer.num_cached_tokens
        account.first_token_s.add(now_s - timing.submitted_s)
        self.computed_tokens.add(answer.num_prompt_tokens - answer.num_cached_tokens)
        found = answer.explanation
        if found is None:
            return
        account.queue_s.add(max(0.0, found.admitted_s - found.arrived_s))
        self.prefill_s.add(max(0.0, now_s - found.admitted_s))
        self._explain(found.prefix)

    def _explain(self, prefix: CachedPrefix) -> None:
        self.causes[prefix.cause] += 1
        self.missed_tokens[prefix.cause] += prefix.num_reusable_tokens - prefix.num_tokens

    def _close(self, timing: Timing, reason: str, now_s: float) -> None:
        del self._open[timing.request_id]
        account = timing.account
        account.num_ended[reason] += 1
        account.num_output_tokens += timing.num_output
        if timing.first_s:
            account.request_s.add(now_s - timing.submitted_s)
            self.prompt_tokens.add(timing.num_prompt)
            self.output_tokens.add(timing.num_output)
            self.decode_s.add(timing.last_s - timing.first_s)
            if timing.num_output > 1:
                self.per_token_s.add((timing.last_s - timing.first_s) / (timing.num_output - 1))
            if timing.max_tokens:
                self.max_tokens.add(timing.max_tokens)
            if timing.explanation is not None:
                self.inference_s.add(max(0.0, timing.last_s - timing.explanation.admitted_s))
        if self._tracer is not None and timing.context is not None:
            self._tracer.end(timing, reason=reason, now_s=now_s)
