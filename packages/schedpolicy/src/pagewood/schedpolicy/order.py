"""In which order waiting requests are considered for admission: what every order can do."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

from pagewood.schedpolicy.requests import Waiting

W = TypeVar("W", bound=Waiting)


class Order(Protocol[W]):
    """A queue that knows who goes next.

    A request is added when it arrives, and leaves by `admit` (it runs) or `remove` (it does not want to any more).
    One that ran and no longer does is told by `stop`; if it was preempted, it is then added again and keeps its age.

    Invariant: `ordered` is a permutation of the requests that were added and have not left. It is a total order: it
    depends on the requests, on `now_s` and on what has been told to the queue, never on hashes or on the machine.
    """

    def add(self, request: W) -> None:
        """Take a request in.

        Raises:
            ValueError: a request with its `arrival` is here already.
        """
        ...

    def remove(self, request: W) -> None:
        """Let a waiting request go that will not run.

        Raises:
            KeyError: It is not here.
        """
        ...

    def admit(self, request: W) -> None:
        """Let a waiting request go that runs from now on; what it costs is charged to whoever pays.

        Raises:
            KeyError: It is not here.
        """
        ...

    def park(self, request: W) -> None:
        """Take a waiting request out for a while, as `InBatchDeferral` asks; `add` brings it back.

        Unlike `remove`, this keeps what the request and its group are owed. If the request ends meanwhile, call `stop`.

        Raises:
            KeyError: It is not here.
        """
        ...

    def stop(self, request: W) -> None:
        """Take note that a request that was admitted or parked has ended or was preempted; ignore any other."""
        ...

    def update(self, request: W) -> None:
        """Take note that a waiting request has changed: its priority, deadline, class, tag or match.

        Raises:
            KeyError: It is not here.
        """
        ...

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests, first to be admitted first, and pay only for those that are taken.

        The queue must not be changed before the iterator is dropped: `admit` after the pass.
        """
        ...

    def __contains__(self, request: W, /) -> bool:
        """Return whether the request waits here."""
        ...

    def __len__(self) -> int:
        """Return how many requests wait here."""
        ...
