"""The result of a check: whether a request fits, and if not, which number was short."""

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """What the caller does after a check."""

    CONTINUE = "continue"
    """The request fits; try the next one."""
    OTHER = "other"
    """A limit of the request's tenant is reached: try again in the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a check, with the deciding number. Invariant: `short_of` is empty if and only if it is CONTINUE.

    Attributes:
        outcome: What to do.
        short_of: Name of the attribute or field that was too small.
        wanted: Amount needed.
        left: Amount available.
    """

    outcome: Outcome
    short_of: str = ""
    wanted: float = 0
    left: float = 0

    @property
    def fits(self) -> bool:
        """Whether the outcome is CONTINUE."""
        return self.outcome is Outcome.CONTINUE

    @property
    def reason(self) -> str:
        """What was short, for logs; empty if nothing was."""
        return f"{self.short_of}: {self.wanted:g} wanted, {self.left:g} left" if self.short_of else ""


FITS = Verdict(outcome=Outcome.CONTINUE)
"""The verdict of a request that fits."""
