"""The account of speculation, in seconds: what drafts have earned, and what they may lose."""

from pagewood.schedpolicy.drafting.host_time import SHORT_S
from pagewood.schedpolicy.drafting.wake_debt import LEAST_REST, SHARE, WakeDebt

_NUM_STEPS_HELD = 400
_SECONDS_HELD = 1.0
_MAX_DEBT = 0.25
_INTERRUPTED = 2.0
"""Times the expected duration; what is longer is no work of the step or of its drafter."""


class DraftAccount:
    """Seconds that speculation may lose against plain decoding.

    Every step adds a part of its duration, below `max_slowdown`; in a period of rest (`Trial`) only until drafts are
    allowed again, because what such a period saves is not there to be lost. A step that
    drafts adds what its tokens would have cost in plain steps, and pays what it took, but for interruptions. A step may
    risk half of the balance. It starts at a quarter of the most, which is `max_slowdown` of 400 plain steps or of a
    second, whichever is longer, and never falls below minus a quarter of the most. Drafting stops below a thirty-second
    of the most, until an eighth is there again or drafts gain. Invariant: decoding takes at most 1 + `max_slowdown`
    times as long as without drafts, plus what the account held at the start, if the seconds that it is given are right.
    """

    __slots__ = ("_is_open", "_is_stopped", "_max_slowdown", "_step_share", "balance_s", "wake")

    def __init__(self, max_slowdown: float) -> None:
        """Start closed: the first step says how long steps are, and so what the account holds at the start.

        Args:
            max_slowdown: Part of the time that speculation may lose, in (0, 1).
        """
        self._max_slowdown, self._step_share = max_slowdown, (1 - SHARE) * max_slowdown
        self.balance_s = 0.0
        """Seconds that may be lost."""  # written by: DraftAccount
        self.wake = WakeDebt(max_slowdown)
        """What drafters take longer after a rest, which is paid apart."""
        self._is_open = False  # written by: DraftAccount
        self._is_stopped = False
        """Whether nothing is drafted until the account recovers or a probe pays."""  # written by: DraftAccount

    def close(self) -> None:
        """Forget the balance, because it is of other costs; what is owed for waking drafters stays."""
        self.balance_s, self._is_open = 0.0, False

    def lets_draft(self, plain_s: float, num_idle: int) -> bool:
        """Return whether drafts are allowed at all.

        Args:
            plain_s: Seconds of the step without drafts.
            num_idle: Steps for which nothing was drafted, in this period.
        """
        limit_s = self._limit_s(plain_s)
        if not self._is_open:
            self.balance_s, self._is_open = limit_s / 4, True
        if self.balance_s < limit_s / 32:
            self._is_stopped = True
        elif self.balance_s >= limit_s / 8:
            self._is_stopped = False
        return not self._is_stopped and not (self.wake.owed_s > 0 and num_idle >= LEAST_REST)

    def num_steps_to_save(self, most_s: float, plain_s: float) -> int:
        """Return after how many plain steps the account holds this much, at most what it may hold."""
        missing_s = min(most_s, self._limit_s(plain_s)) - self.balance_s
        return int(max(0.0, missing_s) / (self._step_share * plain_s)) + 1

    def settle_plain(self, plain_s: float, taken_s: float, draft_s: float, num_steps: int) -> None:
        """Enter steps without drafts.

        Args:
            plain_s: Expected seconds of each.
            taken_s: Seconds that each took, without `draft_s`.
            draft_s: Seconds of the drafter in each, which follows the text.
            num_steps: How many steps, >= 1.
        """
        if draft_s:
            self.wake.follow(draft_s, plain_s)
        self._enter(plain_s, taken_s, -draft_s, num_steps)

    def settle_rest(self, plain_s: float, taken_s: float, num_steps: int) -> None:
        """Enter steps of a period of rest.

        Args:
            plain_s: Expected seconds of each.
            taken_s: Seconds that each took.
            num_steps: How many steps, >= 1.
        """
        balance_s = self.balance_s if self._is_open else 0.0
        self._enter(plain_s, taken_s, 0.0, num_steps)
        self.balance_s = max(balance_s, min(self.balance_s, self._limit_s(plain_s) / 8))

    def settle_drafts(
        self,
        plain_s: float,
        gained_s: float,
        taken_s: float,
        draft_s: float,
        expected_s: float,
        num_steps: int,
        *,
        has_rested: bool,
        is_priced: bool,
        pace_s: float,
        elapsed_s: float,
    ) -> None:
        """Enter steps with drafts. If they were short, the lower of two estimates of what they gained counts.

        All but `num_steps` is of one step, on average.

        Args:
            plain_s: Expected seconds of the step without drafts.
            gained_s: What the accepted tokens would have taken in plain steps.
            taken_s: Seconds that the step took, without drafting.
            draft_s: Seconds of drafting; 0: not measured, then `expected_s` counts.
            expected_s: Expected seconds of drafting.
            num_steps: How many steps, >= 1.
            has_rested: Whether they followed a rest.
            is_priced: Whether `expected_s` is known.
            pace_s: What all its tokens take at the pace of plain decoding; 0: unknown.
            elapsed_s: Seconds since the step before ended; 0: not measured.
        """
        waking_s = 0.0
        if draft_s and is_priced:
            if has_rested:
                waking_s = self.wake.charge(draft_s - expected_s, plain_s)
                draft_s = min(draft_s, expected_s)
            else:  # what takes longer is no work of the drafter, but an interruption
                draft_s = min(draft_s, _INTERRUPTED * expected_s)
        taken_s += draft_s or expected_s
        profit_s = plain_s + gained_s - taken_s
        if pace_s > 0 and elapsed_s > 0 and plain_s < SHORT_S:
            profit_s = min(profit_s, pace_s - min(elapsed_s - waking_s, _INTERRUPTED * taken_s))
        if profit_s > 0:
            self._is_stopped = False
            profit_s = self.wake.repay(num_steps * profit_s) / num_steps
        self._enter(plain_s, taken_s, profit_s, num_steps)

    def _enter(self, plain_s: float, taken_s: float, profit_s: float, num_steps: int) -> None:
        self.wake.pass_time(num_steps, taken_s)
        limit_s = self._limit_s(plain_s)
        balance_s = self.balance_s if self._is_open else limit_s / 4
        balance_s += num_steps * (self._step_share * taken_s + profit_s)
        self.balance_s, self._is_open = min(limit_s, max(-_MAX_DEBT * limit_s, balance_s)), True

    def _limit_s(self, plain_s: float) -> float:
        """Return the most that the account may hold."""
        return self._max_slowdown * max(_NUM_STEPS_HELD * plain_s, _SECONDS_HELD)
