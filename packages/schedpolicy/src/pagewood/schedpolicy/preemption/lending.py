"""Priority inheritance: a running request that others wait for runs with the highest of their priorities."""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class HasOwnPriority(Protocol):
    """A request whose priority is its own, or the higher one of a request that waits for it."""

    @property
    def arrival(self) -> int:
        """Sequence number of its first arrival, unique."""
        ...

    @property
    def priority(self) -> int:
        """The priority that policies read, loans included."""
        ...

    @property
    def own_priority(self) -> int:
        """Its priority without loans."""
        ...


B = TypeVar("B", bound=HasOwnPriority)


class Lending(Generic[B]):
    """Knows which waiting requests lend their priority to which running ones, because they wait for them.

    Without this, a request that is parked behind a prompt of low priority waits as long as that prompt: all requests
    with a priority between the two go first (priority inversion).

    Invariant: once the caller has applied all that `settle` yields, the priority of a borrower is the highest of its
    own and those of its lenders. Only a request that waits lends, and only one that runs borrows, so no loan is passed
    on.

    Source: Sha, Rajkumar and Lehoczky, Priority inheritance protocols, 1990.
    """

    __slots__ = ("_borrowers", "_is_due", "_loans")

    def __init__(self) -> None:
        """Start without loans."""
        self._loans: dict[int, tuple[B, B]] = {}  # lender and borrower, by arrival of the lender; written by: lending
        self._borrowers: dict[int, B] = {}  # those whose priority was raised, by arrival; written by: settle, stop
        self._is_due = False  # written by: lending

    def lend(self, lender: B, borrower: B) -> None:
        """Note that `lender` waits for `borrower` from now on."""
        self._loans[lender.arrival] = lender, borrower
        self._is_due |= lender.priority > borrower.priority

    def take_back(self, lender: B) -> None:
        """Note that a request no longer waits, or has ended; requests that lend nothing are ignored."""
        if self._loans.pop(lender.arrival, None) is not None:
            self._is_due |= bool(self._borrowers)

    def update(self) -> None:
        """Note that the own priority of a lender or a borrower has changed."""
        self._is_due = bool(self._loans)

    def stop(self, borrower: B) -> None:
        """Note that a borrower does not run any longer: its loans end, and the caller gives it its own priority."""
        if self._borrowers.pop(borrower.arrival, None) is not None:
            self._loans = {arrival: loan for arrival, loan in self._loans.items() if loan[1] is not borrower}

    def settle(self) -> Iterator[tuple[B, int]]:
        """Yield each request whose priority must change, with its new one; nothing if no loan has changed."""
        if not self._is_due:
            return
        self._is_due = False
        borrowers, self._borrowers = self._borrowers, {}
        highest = {arrival: one.own_priority for arrival, one in borrowers.items()}
        for lender, borrower in self._loans.values():
            before = highest.get(borrower.arrival, borrower.own_priority)
            highest[borrower.arrival] = max(before, lender.own_priority)
            borrowers[borrower.arrival] = borrower
        for arrival, priority in highest.items():
            borrower = borrowers[arrival]
            if priority > borrower.own_priority:
                self._borrowers[arrival] = borrower
            if priority != borrower.priority:
                yield borrower, priority
