"""Whether a request may go on, and if not, which number was short."""

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """What follows from a check; the words are SGLang's."""

    CONTINUE = "continue"
    """It fits; try the next."""
    NO_TOKEN = "no_token"
    """Memory is short: nothing more fits until something ends."""
    OTHER = "other"
    """A limit of this step, or of this request's owner, is reached: try in the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one check, with the number that decided. `short_of` is empty exactly if the outcome is CONTINUE.

    Attributes:
        outcome: What to do.
        short_of: Name of the number that was too small, as it is called where it lives.
        wanted: How much of it was needed.
        left: How much there was.
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
        """Say what was short, for logs; empty if nothing was."""
        return f"{self.short_of}: {self.wanted:g} wanted, {self.left:g} left" if self.short_of else ""


FITS = Verdict(outcome=Outcome.CONTINUE)
"""The verdict that has no reason."""
