"""A simulated machine that decodes speculatively, to test what decides the draft lengths."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from pagewood.schedpolicy.drafting.control import StepsReport
from pagewood.schedpolicy.drafting.step_cost import StepCost
from pagewood.schedpolicy.testing import FakeRequest, OneStep


class Drafting(Protocol):
    """What decides the draft lengths: `DraftControl`, or an implementation of your own."""

    @property
    def max_tokens(self) -> int:
        """Most draft tokens of a request."""
        ...

    @property
    def reason(self) -> str:
        """Why the latest lengths are what they are."""
        ...

    @property
    def is_far(self) -> bool:
        """Whether the next drafts are so far away that drafters need not follow."""
        ...

    def rests(self, num_requests: int) -> bool:
        """Return whether a step gets no drafts, without a look at its requests."""
        ...

    def lengths(self, requests: Sequence[Any], num_other_tokens: int) -> Sequence[int]:
        """Return the draft tokens of each request."""
        ...

    def observe(self, report: StepsReport[Any]) -> None:
        """Learn from steps."""
        ...

    def forget(self, request: Any) -> None:
        """Drop what is known of a request."""
        ...


@dataclass(slots=True)
class SpeculativeRun:
    """What the steps of a run did and took; every list has one entry for each step."""

    taken_s: list[float] = field(default_factory=list[float])
    """Seconds of the step."""  # written by: speculative_machine
    plain_s: list[float] = field(default_factory=list[float])
    """Seconds that plain decoding takes for the tokens of the step."""  # written by: speculative_machine
    mean_length: list[float] = field(default_factory=list[float])
    """Draft tokens granted for each request."""  # written by: speculative_machine
    lengths: list[list[int]] = field(default_factory=list[list[int]])
    """Draft tokens granted, by request."""  # written by: speculative_machine
    reasons: list[str] = field(default_factory=list[str])
    """Reason of the lengths."""  # written by: speculative_machine
    is_far: list[bool] = field(default_factory=list[bool])
    """Whether drafters need not follow."""  # written by: speculative_machine

    @property
    def speedup(self) -> float:
        """Tokens per second against plain decoding."""
        return sum(self.plain_s) / sum(self.taken_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeMachine:
    """A machine with a known cost of steps, and requests with known probabilities of acceptance.

    Attributes:
        step_s: Seconds of a step by its number of tokens.
        accepts: Probability that a draft token is accepted, given those before it, by (arrival, step, position).
        draft_s: Seconds of drafting by (longest draft, draft tokens).
        wake_s: Seconds that drafting takes longer after a step without drafts.
        follow_s: Seconds of the drafter in each step without drafts while it follows the text.
        finds: Probability that the drafter finds a draft at all.
        noise: Standard deviation of measured durations, as a part of them.
        lag: Steps that are planned before a result comes back.
        life: Steps after which a request ends and a new one takes its place.
        num_other_tokens: Prompt tokens of each step.
        host_s: Seconds that the host adds to a step while drafters follow the text; no other measure has them.
        is_measured: Whether durations are reported.
    """

    step_s: Callable[[int], float]
    accepts: Callable[[int, int, int], float]
    draft_s: Callable[[int, int], float] = lambda passes, tokens: 0.0
    wake_s: float = 0.0
    follow_s: float = 0.0
    finds: float = 1.0
    noise: float = 0.0
    lag: int = 1
    life: int = 300
    num_other_tokens: int = 0
    host_s: float = 0.0
    is_measured: bool = True

    def table(self, sizes: Iterable[int]) -> StepCost:
        """Return the table that a measurement of these sizes gives."""
        sizes = list(sizes)
        return StepCost(sizes, [self.step_s(size) for size in sizes])

    def run(
        self,
        control: Drafting,
        load: Callable[[int], int],
        num_steps: int,
        *,
        seed: int = 0,
        priority: Callable[[int], int] = lambda arrival: 0,
    ) -> SpeculativeRun:
        """Decode `num_steps` steps of `load(step)` requests; the same seed gives the same run."""
        rng = Random(seed)
        run = SpeculativeRun()
        batch: list[FakeRequest] = []
        ends: dict[int, int] = {}
        results: deque[Callable[[], None]] = deque()
        for step in range(num_steps):
            for request in [request for request in batch if ends[request.arrival] <= step]:
                batch.remove(request)
                control.forget(request)
            while len(batch) > load(step):
                control.forget(batch.pop())
            while len(batch) < load(step):
                arrival = len(ends)
                batch.append(FakeRequest(arrival=arrival, priority=priority(arrival)))
                ends[arrival] = step + (rng.randint(1, self.life) if step == 0 else self.life)
            results.append(self._step(control, list(batch), step, rng, run))
            if len(results) > self.lag:
                results.popleft()()
        return run

    def best_fixed(self, max_tokens: int, num_requests: int, num_steps: int) -> float:
        """Return the expected speedup of the best fixed length, 0 included, with requests of even and odd arrival."""
        times = range(0, num_steps, 10)
        best, expected = 1.0, 0.0
        survival = [1.0 for _ in range(2 * len(times))]
        for length in range(1, max_tokens + 1):
            pairs = [(arrival, step) for step in times for arrival in (0, 1)]
            survival = [s * self.accepts(*pair, length - 1) for s, pair in zip(survival, pairs, strict=True)]
            expected += self.finds * sum(survival) / len(survival)
            num = num_requests * length
            plain_s = self.step_s(num_requests + self.num_other_tokens)
            gained_s = expected * self.step_s(num_requests)
            taken_s = self.step_s(num_requests + self.num_other_tokens + num) + self.draft_s(length, num)
            best = max(best, (plain_s + gained_s) / taken_s)
        return best

    def _step(
        self, control: Drafting, batch: list[FakeRequest], step: int, rng: Random, run: SpeculativeRun
    ) -> Callable[[], None]:
        """Run a step; return what reports its result."""
        is_resting = control.rests(len(batch))
        granted = [0] * len(batch) if is_resting else list(control.lengths(batch, self.num_other_tokens))
        assert len(granted) == len(batch)
        assert all(0 <= length <= control.max_tokens for length in granted)
        drafted = [length if rng.random() < self.finds else 0 for length in granted]
        accepted: list[int] = []
        for request, length in zip(batch, drafted, strict=True):
            taken = 0
            while taken < length and rng.random() < self.accepts(request.arrival, step, taken):
                taken += 1
            accepted.append(taken)
        num_plain = len(batch) + self.num_other_tokens
        num_tokens = num_plain + sum(drafted)
        unused_s = 0.0 if control.is_far else self.follow_s
        draft_s = self.draft_s(max(granted), sum(granted)) if sum(granted) else unused_s
        if sum(granted) and not (run.mean_length and run.mean_length[-1]):
            draft_s += self.wake_s
        step_s = self.step_s(num_tokens)
        gained_s = sum(accepted) * self.step_s(len(batch)) / len(batch) if batch else 0.0
        host_s = 0.0 if control.is_far else self.host_s
        run.taken_s.append(step_s + draft_s + host_s)
        run.plain_s.append(self.step_s(num_plain) + gained_s)
        run.mean_length.append(sum(granted) / max(1, len(batch)))
        run.lengths.append(granted)
        run.reasons.append(control.reason)
        run.is_far.append(control.is_far)
        jitter = max(0.1, 1 + self.noise * rng.gauss(0, 1)) if self.is_measured else 0.0

        def report() -> None:
            taken_s = (step_s + draft_s + host_s) * jitter
            control.observe(
                OneStep.of(
                    batch, granted, drafted, accepted, num_tokens=num_tokens, draft_s=draft_s * jitter, taken_s=taken_s
                )
            )

        return report


def check_drafting(make: Callable[[], Drafting], rng: Random, *, num_steps: int = 200) -> None:
    """Check that lengths are valid whatever happens: any load, lag, priorities, and results of forgotten requests.

    Args:
        make: Makes what decides the lengths.
        rng: Source of the random course of events.
        num_steps: Steps to run.

    Raises:
        AssertionError: A length is missing, negative or above `max_tokens`.
    """
    rates = [rng.random() for _ in range(8)]
    slope = rng.choice((0.0, 1e-4, 1e-3))
    loads = [rng.choice((1, 1, 2, 5, 20)) for _ in range(num_steps)]
    machine = SpeculativeMachine(
        step_s=lambda num_tokens: 0.01 + slope * num_tokens,
        accepts=lambda arrival, step, position: rates[(arrival + step // 50) % 8],
        finds=rng.choice((0.0, 0.5, 1.0)),
        noise=rng.choice((0.0, 0.3)),
        lag=rng.randint(0, 3),
        life=rng.randint(1, 50),
        num_other_tokens=rng.choice((0, 100)),
        is_measured=rng.random() < 0.8,
    )
    machine.run(make(), loads.__getitem__, num_steps, seed=rng.randrange(1 << 32), priority=lambda arrival: arrival % 3)
