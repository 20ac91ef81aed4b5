"""What this policy costs the host, and whether there is time for it."""

from collections.abc import Callable

from pagewood.schedpolicy.drafting.allowance import Allowance

SHORT_S = 2e-3
"""Steps that take less cost the host about as much as the machine."""
_SHARE = 0.01
_NUM_ALLOWED = 4.0
_DECISION_S = 5e-5
_PER_PAIR_S = 6e-7
_MAX_KEPT = 63
_RESTING_SHARE = 0.0025
_MIN_RESTING = 7
_MAX_RESTING = 255
_LEARN_S = 1e-5
_LEARN_PER_REQUEST_S = 1.2e-6
_LEARN_EVERY = 8
_RATE = 0.05
_SURPRISE = 4.0
_MOST_FACTOR = 16.0


class HostTime:
    """Limits how often decisions are made, and how often steps with drafts are learned from.

    Both have a price for their number of requests, which a clock corrects by a factor: between steps the caches hold
    other things, so that the same work takes several times as long there as in a loop of its own. Invariant: after the
    first few, decisions that wait for `decisions` take at most 1% of the time, and so does learning, but for every
    eighth step with drafts.
    """

    __slots__ = ("_clock", "_decision_factor", "_lesson_factor", "_lessons", "_max_tokens", "_num_unlearned",
                 "decisions")  # fmt: skip

    def __init__(self, max_tokens: int, clock: Callable[[], float] | None = None) -> None:
        """Start with time for a few.

        Args:
            max_tokens: Most draft tokens of a request in a step.
            clock: Returns seconds; None: the prices stay what they are in a loop.
        """
        self._max_tokens, self._clock = max_tokens, clock
        self._decision_factor = self._lesson_factor = 1.0  # written by: HostTime
        self.decisions = Allowance(_SHARE, most=_NUM_ALLOWED)
        """Pays for the host's work of decisions."""
        self._lessons = Allowance(_SHARE, most=_NUM_ALLOWED)
        """Pays for that of learning from steps with drafts."""
        self._num_unlearned = 0
        """Steps with drafts since the last one that was learned from."""  # written by: HostTime

    def now_s(self) -> float:
        """Return the time of the clock; 0 without one."""
        return 0.0 if self._clock is None else self._clock()

    def decision_s(self, num_requests: int) -> float:
        """Return the seconds that a decision takes."""
        return self._decision_factor * self._decision_price_s(num_requests)

    def note_decision(self, num_requests: int, began_s: float) -> None:
        """Note a decision that has ended now and began at `began_s` of the clock."""
        if self._clock is not None:
            ratio = (self._clock() - began_s) / self._decision_price_s(num_requests)
            self._decision_factor = _corrected(self._decision_factor, ratio)

    def note_lesson(self, num_requests: int, began_s: float) -> None:
        """Note that learning from a step has ended now, and began at `began_s` of the clock."""
        if self._clock is not None:
            ratio = (self._clock() - began_s) / _lesson_price_s(num_requests)
            self._lesson_factor = _corrected(self._lesson_factor, ratio)

    def num_kept(self, decision_s: float, plain_s: float) -> int:
        """Return for how many steps of this duration the lengths of a decision may be kept."""
        return min(_MAX_KEPT, int(decision_s / (_SHARE * plain_s)))

    def num_resting(self, decision_s: float, plain_s: float) -> int:
        """Return how many steps of this duration rest after a decision, while nothing is drafted."""
        return min(_MAX_RESTING, max(_MIN_RESTING, int(decision_s / (_RESTING_SHARE * plain_s))))

    def may_learn(self, num_requests: int, step_s: float) -> bool:
        """Return whether to learn from a step with drafts: from every one, unless that takes too much of the time.

        Args:
            num_requests: Requests that had drafts.
            step_s: Seconds of the step; 0: not measured.
        """
        price_s = self._lesson_factor * _lesson_price_s(num_requests)
        self._num_unlearned += 1
        if step_s > 0 and not self._lessons.covers(step_s, price_s) and self._num_unlearned < _LEARN_EVERY:
            return False
        self._lessons.spend(price_s)
        self._num_unlearned = 0
        return True

    def _decision_price_s(self, num_requests: int) -> float:
        return _DECISION_S + _PER_PAIR_S * num_requests * self._max_tokens


def _lesson_price_s(num_requests: int) -> float:
    return _LEARN_S + _LEARN_PER_REQUEST_S * num_requests


def _corrected(factor: float, ratio: float) -> float:
    """Return a factor of prices, moved towards a measured one, of which an interruption may be a part."""
    return min(_MOST_FACTOR, factor + _RATE * (min(ratio, _SURPRISE * factor) - factor))
