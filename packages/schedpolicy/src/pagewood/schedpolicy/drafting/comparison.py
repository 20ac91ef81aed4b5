"""Whether drafting pays: compares the yield of periods with and without drafts at similar loads."""

from __future__ import annotations

_PERIOD_S = 0.1
_PERIOD_STEPS = 8
_DECAY = 0.8
_TRIAL_SHARE = 0.01
_LEAST_GAIN = 1.005


class Comparison:
    """Divides the steps of one load into periods with drafts and without.

    A period lasts at least a tenth of a second and at least eight steps. The kind of period with the higher yield per
    second continues. The other kind is tried for one period at a time, never twice in succession, and so rarely that
    trials cost at most a hundredth of the time. The first two periods are one of each kind, with drafts first.

    Results arrive some steps after the decision, and a drafter is slow at first after a rest. So the first report of a
    trial counts towards the cost of the trial, but not towards the yield of its kind.
    """

    __slots__ = (
        "_is_first",
        "_is_trial",
        "_left_s",
        "_num_steps",
        "_speed_s",
        "_speed_worth_s",
        "_taken_s",
        "_worth_s",
        "is_resting",
    )  # fmt: skip

    def __init__(self) -> None:
        self.is_resting = False
        """Whether this is a period without drafts."""  # written by: Comparison
        self._is_trial = True
        """Whether the other kind is believed to be better, or its yield is unknown."""  # written by: Comparison
        self._left_s = 0.0
        """Seconds until the other kind is tried."""  # written by: Comparison
        self._is_first = False
        """Whether the next report is the first one of this kind."""  # written by: Comparison
        self._num_steps = 0
        """Steps of this period."""  # written by: Comparison
        self._worth_s = 0.0
        """Seconds that plain decoding needs for the tokens of this period, according to the table."""
        # written by: Comparison
        self._taken_s = 0.0
        """Seconds that this period has taken."""  # written by: Comparison
        self._speed_worth_s = [0.0, 0.0]
        """The same as `_worth_s`, summed over all periods with drafts and over all without, decayed."""
        # written by: Comparison
        self._speed_s = [0.0, 0.0]
        """Seconds that those periods have taken, decayed in the same way."""  # written by: Comparison

    def observe(self, num_steps: int, worth_s: float, taken_s: float) -> bool:
        """Record the yield and duration of some steps; return whether a period with drafts begins now."""
        kind = self.is_resting
        self._num_steps += num_steps
        self._worth_s += worth_s
        self._taken_s += taken_s
        if self._is_first:
            self._is_first = False
        else:
            self._speed_worth_s[kind] += worth_s
            self._speed_s[kind] += taken_s
        if self._num_steps < _PERIOD_STEPS or self._taken_s < _PERIOD_S or not self._speed_s[kind]:
            return False
        self._end_period()
        return not self.is_resting

    def _end_period(self) -> None:
        kind, worth_s, taken_s = self.is_resting, self._worth_s, self._taken_s
        self._num_steps, self._worth_s, self._taken_s = 0, 0.0, 0.0
        if not self._speed_s[not kind]:
            self._turn(is_trial=True)
            return
        drafting, resting = (worth / taken for worth, taken in zip(self._speed_worth_s, self._speed_s, strict=True))
        self._speed_worth_s[kind] *= _DECAY
        self._speed_s[kind] *= _DECAY
        self._left_s -= taken_s
        rest_is_better = drafting < _LEAST_GAIN * resting
        better, worse = (resting, drafting) if rest_is_better else (drafting, resting)
        if rest_is_better != kind:  # a trial is over, or the better kind has changed
            self._turn(is_trial=False)
            lost_s = taken_s - worth_s / better
        elif self._is_trial:  # the trial has shown that this kind is better
            self._is_trial = False
            lost_s = taken_s * (1 - worse / better)
        elif self._left_s > 0:
            return
        else:
            self._turn(is_trial=True)
            return
        self._left_s = max(2 * taken_s, lost_s / _TRIAL_SHARE)

    def _turn(self, *, is_trial: bool) -> None:
        self.is_resting, self._is_trial, self._is_first = not self.is_resting, is_trial, True
