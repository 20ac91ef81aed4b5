"""Whether drafting pays: compares the yield of periods with and without drafts at similar loads."""

from __future__ import annotations

_PERIOD_S = 0.1
_PERIOD_STEPS = 8
_DECAY = 0.8
_TRIAL_SHARE = 0.004
_LEAST_GAIN = 1.005


class Comparison:
    """Divides the steps of one load into periods with drafts and without.

    A period lasts at least a tenth of a second and at least eight steps. From time to time the other kind is tried for
    one period. It continues if its yield per second is higher than that of the periods just before: older ones do not
    count, because the speed of a machine changes. After a trial, at least two periods pass without one, and as many as
    it takes until the trial has cost no more than 0.4% of the time. The first period drafts, and the second is a trial
    of rest. While the estimates are against all drafts, drafts are tried, not rest.

    Results arrive some steps after the decision, and a drafter is slow at first after a rest. So the first report of a
    trial counts towards the cost of the trial, but not towards its yield.
    """

    __slots__ = (
        "_has_drafts", "_is_idle", "_is_trial", "_left_s", "_num_steps", "_taken_s", "_unread", "_usual", "_worth_s",
        "is_resting",
    )  # fmt: skip

    def __init__(self) -> None:
        self.is_resting = False
        """Whether this is a period without drafts."""  # written by: Comparison
        self._is_idle = False
        """Whether nothing was drafted in the latest period that was neither rest nor a trial."""
        # written by: Comparison
        self._is_trial = False  # written by: Comparison
        self._left_s = 0.0
        """Seconds until the next trial."""  # written by: Comparison
        self._num_steps = 0
        """Steps of this period."""  # written by: Comparison
        self._has_drafts = False
        """Whether one of them had drafts."""  # written by: Comparison
        self._worth_s = 0.0
        """Seconds that plain decoding needs for the tokens of this period, according to the table."""
        # written by: Comparison
        self._taken_s = 0.0
        """Seconds that this period has taken."""  # written by: Comparison
        self._unread = 0.0, 0.0
        """The part of both that does not count towards the yield."""  # written by: Comparison
        self._usual = 0.0, 0.0
        """The same two sums over the latest periods that were no trials, decayed."""  # written by: Comparison

    def observe(self, num_steps: int, worth_s: float, taken_s: float, *, has_drafts: bool) -> bool:
        """Record the yield and duration of some steps; return whether drafts begin, again or as a trial."""
        if self._is_trial and not self._num_steps:
            self._unread = worth_s, taken_s
        self._num_steps += num_steps
        self._has_drafts |= has_drafts
        self._worth_s += worth_s
        self._taken_s += taken_s
        worth_s, taken_s = self._worth_s - self._unread[0], self._taken_s - self._unread[1]
        if self._num_steps < _PERIOD_STEPS or self._taken_s < _PERIOD_S or not taken_s:
            return False
        begins = self._end_trial(worth_s, taken_s) if self._is_trial else self._end_period(worth_s, taken_s)
        self._num_steps, self._has_drafts = 0, False
        self._worth_s, self._taken_s, self._unread = 0.0, 0.0, (0.0, 0.0)
        return begins and not self.is_resting

    def _end_period(self, worth_s: float, taken_s: float) -> bool:
        """End a period that was no trial; return whether a trial begins."""
        is_idle = not self.is_resting and not self._has_drafts
        if is_idle != self._is_idle:
            self._is_idle, self._usual = is_idle, (0.0, 0.0)
            self._left_s = min(self._left_s, 3 * taken_s) if is_idle else self._left_s
        self._usual = self._usual[0] * _DECAY + worth_s, self._usual[1] * _DECAY + taken_s
        self._left_s -= taken_s
        if self._left_s > 0:
            return False
        self._is_trial = True
        self.is_resting = not self.is_resting and not is_idle
        return True

    def _end_trial(self, worth_s: float, taken_s: float) -> bool:
        """End a trial; return whether the earlier kind continues."""
        usual, found = self._usual[0] / self._usual[1], worth_s / taken_s
        self._is_trial = False
        self._left_s = max(2 * self._taken_s, (self._taken_s - self._worth_s / usual) / _TRIAL_SHARE)
        if found * _LEAST_GAIN > usual if self.is_resting else found >= usual * _LEAST_GAIN:
            self._is_idle, self._usual = False, (worth_s, taken_s)
            return False
        self.is_resting = not self.is_resting and not self._is_idle
        return not self._is_idle
