"""A part of the time of steps, for work of the host that must not slow them down."""

from math import inf


class Allowance:
    """Saves a part of the time that steps take, and says when that pays for a piece of work.

    It starts full. Invariant: after the first `most` pieces, no more than `share` of the time is spent.
    """

    __slots__ = ("_held_s", "_most", "_share")

    def __init__(self, share: float, *, most: float) -> None:
        """Start full.

        Args:
            share: Part of the time that is saved, > 0.
            most: Pieces of work that can be saved for, >= 1.
        """
        self._share, self._most = share, most
        self._held_s = inf  # written by: Allowance

    def covers(self, step_s: float, price_s: float) -> bool:
        """Save a part of a step's time, and return whether a piece of work is paid for.

        Args:
            step_s: Seconds of the step.
            price_s: Seconds of the work.
        """
        self._held_s = min(self._held_s + self._share * step_s, self._most * price_s)
        return self._held_s >= price_s

    def spend(self, price_s: float) -> None:
        """Take the price of a piece of work; what is held may become negative."""
        self._held_s -= price_s
