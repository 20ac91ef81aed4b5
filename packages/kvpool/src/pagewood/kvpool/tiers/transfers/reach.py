"""How far the tiers have the pages of a token sequence, and the states at ends of its prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, kw_only=True)
class Reach:
    """What is known of a sequence; its pages may be known further than its states, and the other way round.

    Attributes:
        keys: Keys of its whole pages.
        num_pages: Leading pages that the device or a tier is known to have.
        marks: For each page, the key by which a tier knows the state at its end; None if no layer is recurrent.
        ends: Numbers of pages of the prefixes whose state a tier is known to have, ascending.
        asked: Those whose state the remote store was asked for.
    """

    keys: list[bytes]
    num_pages: int  # written by: reach
    marks: list[bytes] | None = None
    ends: list[int] = field(default_factory=list[int])  # written by: reach
    asked: list[int] = field(default_factory=list[int])  # written by: reach

    @property
    def goal(self) -> int:
        """Pages of the longest prefix that is known to be complete: with states, the state at its end is known too."""
        if self.marks is None:
            return self.num_pages
        return max((end for end in self.ends if end <= self.num_pages), default=0)

    def question(self) -> list[bytes]:
        """Return the keys to ask the remote store for: of pages that are not known, and of states behind the goal."""
        marks = self.marks or ()
        self.asked = sorted({*range(self.goal + 1, len(marks) + 1)} - {*self.ends})
        return [*self.keys[self.num_pages :], *(marks[end - 1] for end in self.asked)]

    def learn(self, found: Sequence[bool]) -> None:
        """Note the answer to the question: whether each key is there."""
        num_asked = len(self.keys) - self.num_pages
        self.num_pages += (*found[:num_asked], False).index(False)
        states = zip(self.asked, found[num_asked:], strict=True)
        self.ends = sorted({*self.ends, *(end for end, is_there in states if is_there)})

    def lower(self, lost: bytes) -> None:
        """Note that no tier has the page with this key after all, or if none of the pages has it, the goal's state."""
        if lost in self.keys:
            self.num_pages = self.keys.index(lost)
        else:
            self.ends.remove(self.goal)
