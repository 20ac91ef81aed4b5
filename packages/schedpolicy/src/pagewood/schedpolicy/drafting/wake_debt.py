"""What it takes to let drafters draft after a rest: following the text before it, and what waking takes longer."""

NUM_FOLLOWED = 24
"""Steps before a probe in which drafters follow the text."""
LEAST_REST = 4
"""Steps without drafts after which the next ones follow a rest."""
MAX_DELAY = 8192
"""Steps for which a debt or the price of a probe can put off drafts at once."""
_RATE = 0.5
_FOLLOW_RATE = 0.1
_LEAST_PAID = 4.0
_MOST_TAKEN = 64.0
SHARE = 0.25
"""Part of `max_slowdown` that pays for it."""


class WakeDebt:
    """Seconds that drafters took beyond the expected in the first step after a rest, and that are owed.

    While drafters rest, they leave out what they would have read, and read it when they are woken. That is no fault of
    the drafts, so the account does not pay for it at once. It is paid from a quarter of `max_slowdown`, and from what
    drafts then gain; until it is paid, no drafts follow another rest. Before a probe they follow the text again; that
    the account pays for, step by step. Invariant: at most 8,192 steps pay for a debt.
    """

    __slots__ = ("_follow_s", "_num_rested", "_step_share", "owed_s", "usual_s")

    def __init__(self, max_slowdown: float) -> None:
        """Start without a debt.

        Args:
            max_slowdown: Part of the time that speculation may lose, in (0, 1).
        """
        self._step_share = SHARE * max_slowdown
        self._num_rested = LEAST_REST
        """Steps without drafts before the one that is observed."""  # written by: WakeDebt
        self.owed_s = 0.0
        """Seconds that are not paid for yet."""  # written by: WakeDebt
        self.usual_s = 0.0
        """Seconds that waking takes, as a moving average."""  # written by: WakeDebt
        self._follow_s = 0.0
        """Seconds of a drafter that follows the text, in each step, as a moving average."""  # written by: WakeDebt

    @property
    def following_s(self) -> float:
        """Seconds that following the text takes before a probe."""
        return NUM_FOLLOWED * self._follow_s

    def follow(self, draft_s: float, plain_s: float) -> None:
        """Note what a drafter took in a step without drafts of `plain_s` seconds, because it follows the text."""
        self._follow_s += _FOLLOW_RATE * (min(draft_s, plain_s) - self._follow_s)

    def rest(self, num_steps: int) -> None:
        """Count steps without drafts."""
        self._num_rested += num_steps

    def end_rest(self) -> bool:
        """Return whether a step with drafts follows a rest, and count from 0 again."""
        num_rested, self._num_rested = self._num_rested, 0
        return num_rested >= LEAST_REST

    def charge(self, longer_s: float, plain_s: float) -> float:
        """Enter what a drafter took beyond the expected after a rest, and return the seconds that are owed for it.

        Args:
            longer_s: Those seconds.
            plain_s: Seconds of the step without drafts.
        """
        longer_s = min(max(0.0, longer_s), _MOST_TAKEN * plain_s)
        # The first long one may have been an interruption: it sets the price, and is paid only in part.
        charged_s = min(longer_s, max(2 * self.usual_s, _LEAST_PAID * plain_s))
        self.usual_s += _RATE * (longer_s - self.usual_s)
        self.owed_s = min(self.owed_s + charged_s, MAX_DELAY * self._step_share * plain_s)
        return charged_s

    def repay(self, profit_s: float) -> float:
        """Pay from what drafts have gained, and return the rest of it."""
        repaid_s = min(profit_s, self.owed_s)
        self.owed_s -= repaid_s
        return profit_s - repaid_s

    def pass_time(self, num_steps: int, step_s: float) -> None:
        """Pay from the time that steps take."""
        self.owed_s = max(0.0, self.owed_s - num_steps * self._step_share * step_s)

    def num_steps_to_pay(self, plain_s: float) -> int:
        """Return after how many plain steps of this duration nothing is owed."""
        return int(self.owed_s / (self._step_share * plain_s)) + 1

    def scale(self, factor: float) -> None:
        """Expect waking and following to take `factor` times as long: drafters read each request."""
        self.usual_s *= factor
        self._follow_s *= factor
