"""What this policy costs the host, and whether there is time for it."""

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
_LEARN_EVERY = 4


class HostTime:
    """Limits how often decisions are made, and how often steps with drafts are learned from.

    Invariant: after the first few, decisions that wait for `decisions` take at most 1% of the time, and so does
    learning, but for every fourth step with drafts.
    """

    __slots__ = ("_lessons", "_max_tokens", "_num_unlearned", "decisions")

    def __init__(self, max_tokens: int) -> None:
        """Start with time for a few.

        Args:
            max_tokens: Most draft tokens of a request in a step.
        """
        self._max_tokens = max_tokens
        self.decisions = Allowance(_SHARE, most=_NUM_ALLOWED)
        """Pays for the host's work of decisions."""
        self._lessons = Allowance(_SHARE, most=_NUM_ALLOWED)
        """Pays for that of learning from steps with drafts."""
        self._num_unlearned = 0
        """Steps with drafts since the last one that was learned from."""  # written by: HostTime

    def decision_s(self, num_requests: int) -> float:
        """Return the seconds that a decision takes."""
        return _DECISION_S + _PER_PAIR_S * num_requests * self._max_tokens

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
        price_s = _LEARN_S + _LEARN_PER_REQUEST_S * num_requests
        self._num_unlearned += 1
        if step_s > 0 and not self._lessons.covers(step_s, price_s) and self._num_unlearned < _LEARN_EVERY:
            return False
        self._lessons.spend(price_s)
        self._num_unlearned = 0
        return True
