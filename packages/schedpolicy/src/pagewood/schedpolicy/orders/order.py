"""The order in which waiting requests are considered for admission: the interface of every order."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

from pagewood.schedpolicy.requests import Waiting

W = TypeVar("W", bound=Waiting)


class Order(Protocol[W]):
    """A queue of waiting requests, sorted by a policy.

    A request is added when it arrives. It leaves by `admit` (it starts to run), `remove` (it was cancelled) or `park`
    (it waits for another request, and is added again later). When a running request ends or is preempted, call `stop`;
    a preempted request is then added again and keeps its arrival.

    A call that raises changes nothing: a request in the queue stays there, and any other stays out.

    Invariant: `ordered` is a permutation of the requests that were added and have not left. It is a total order: it
    depends on the requests, on `now_s` and on the calls so far, never on hashes or on the machine.
    """

    def add(self, request: W) -> None:
        """Add a request.

        Raises:
            ValueError: A request with the same `arrival` is already here, or a number that the order compares is NaN.
        """
        ...

    def remove(self, request: W) -> None:
        """Remove a waiting request that will not run.

        Raises:
            KeyError: The request is not here.
        """
        ...

    def admit(self, request: W) -> None:
        """Remove a waiting request that starts to run, and charge its group where the order keeps accounts.

        Raises:
            KeyError: The request is not here.
        """
        ...

    def park(self, request: W) -> None:
        """Take out a waiting request for a while, because `InBatchDeferral` parked it; `add` puts it back.

        Unlike `remove`, this keeps the accounts of the request's group. If the request ends while it is parked, call
        `stop`.

        Raises:
            KeyError: The request is not here.
        """
        ...

    def stop(self, request: W) -> None:
        """Report that an admitted or parked request has ended or was preempted; other requests are ignored."""
        ...

    def update(self, request: W) -> None:
        """Report that a waiting request has changed: its priority, deadline, class, tag or match.

        Raises:
            KeyError: The request is not here, for instance because it was admitted meanwhile.
            ValueError: A number that the order compares is NaN.
        """
        ...

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests in the order of admission; the cost depends only on how many are taken.

        Do not change the queue while iterating: call `admit` and `park` after the pass.

        Raises:
            RuntimeError: The queue was changed during the iteration.
        """
        ...

    def __contains__(self, request: W, /) -> bool:
        """Return whether a request is waiting here."""
        ...

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        ...


def absent(request: Waiting) -> KeyError:
    """Return the error for a request that does not wait in an order."""
    return KeyError(f"request must be waiting here, got the request with arrival {request.arrival}")


def changed_during_pass() -> RuntimeError:
    """Return the error for an iteration over an order that has changed since the iteration began."""
    return RuntimeError("the queue must not change during a pass: call add, admit, park, remove and update after it")


def require_number(name: str, value: float, request: Waiting) -> float:
    """Return a number that an order compares.

    Raises:
        ValueError: It is NaN, which no order can compare; NaN would make other requests impossible to find.
    """
    if value != value:
        raise ValueError(f"{name} must be a number, got {value} for the request with arrival {request.arrival}")
    return value
