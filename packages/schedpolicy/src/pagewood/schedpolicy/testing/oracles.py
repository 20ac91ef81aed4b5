"""A slow and simple order, with which another one is compared."""

from collections.abc import Callable, Iterator

from pagewood.schedpolicy.testing.requests import FakeRequest

Pass = Callable[[list[FakeRequest], float], list[FakeRequest]]


class Naive:
    """Sorts all requests in every pass, by a function without state."""

    def __init__(self, sort: Pass) -> None:
        self.sort = sort
        self.waiting: list[FakeRequest] = []

    def add(self, request: FakeRequest) -> None:
        """Add a request."""
        self.waiting.append(request)

    def remove(self, request: FakeRequest) -> None:
        """Remove a request."""
        self.waiting.remove(request)

    admit = remove
    park = remove

    def stop(self, request: FakeRequest) -> None:
        """Do nothing."""

    def update(self, request: FakeRequest) -> None:
        """Do nothing."""

    def ordered(self, now_s: float) -> Iterator[FakeRequest]:
        """Yield the waiting requests."""
        return iter(self.sort(list(self.waiting), now_s))

    def __contains__(self, request: FakeRequest, /) -> bool:
        """Return whether a request is waiting."""
        return request in self.waiting

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self.waiting)


def by(key: Callable[[FakeRequest], tuple[float, ...]]) -> Pass:
    """Sort by a key, ties by arrival."""
    return lambda waiting, now_s: sorted(waiting, key=lambda request: (*key(request), request.arrival))
