"""Runs copies: one worker thread per lane, with a limit on the bytes that are queued."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from heapq import heappop, heappush
from threading import Lock
from typing import Protocol

from pagewood.kvpool.arrays import check_at_least_one
from pagewood.kvpool.tiers.transfers.transfer import Transfer, TransferCancelled

# Makes a copy, reports its progress to the transfer, and raises if it fails.
Work = Callable[[Transfer], None]


class Lane(Protocol):
    """Runs copies one after another: the highest priority of the waiting ones first, then in the order of `submit`."""

    def accepts(self, num_bytes: int, *, priority: int = 0) -> bool:
        """Return whether `submit` would accept a copy of `num_bytes` now."""
        ...

    def submit(self, work: Work, num_bytes: int, *, priority: int = 0) -> Transfer | None:
        """Queue a copy and return at once; return None if too much of this priority or a higher one is in flight."""
        ...

    def wait(self, transfer: Transfer) -> None:
        """Return when one of this lane's transfers is done, successful or not."""
        ...

    def close(self) -> None:
        """Finish the queued copies and end; a second call does nothing."""
        ...


class ThreadLane:
    """A lane with its own thread.

    Invariant: for each priority, at most `max_bytes_in_flight` bytes of this or a higher priority are queued or being
    copied, unless they belong to a single transfer. So queued copies of lower priority never take the room of a copy;
    it waits for one of them only if that one has begun.

    Copies release the interpreter's lock, so a lane costs the other threads hardly more than memory bandwidth.
    """

    __slots__ = ("_lock", "_max_bytes", "_num_bytes", "_num_submitted", "_waiting", "_worker")

    def __init__(self, name: str, *, max_bytes_in_flight: int) -> None:
        """Create a lane.

        Args:
            name: Name of the thread.
            max_bytes_in_flight: Limit on the bytes in flight, >= 1. A larger transfer is accepted when nothing of its
                priority or a higher one is in flight.

        Raises:
            ValueError: `max_bytes_in_flight` is less than 1 or not an integer.
        """
        check_at_least_one(max_bytes_in_flight=max_bytes_in_flight)
        self._max_bytes = max_bytes_in_flight
        self._lock = Lock()
        self._num_bytes: dict[int, int] = {}  # in flight, by priority; written by: submit, _run
        self._num_submitted = 0  # written by: submit
        # Heap of (-priority, number, work, transfer); written by: submit, _run.
        self._waiting: list[tuple[int, int, Work, Transfer]] = []
        self._worker = ThreadPoolExecutor(1, name)

    def accepts(self, num_bytes: int, *, priority: int = 0) -> bool:
        """Return whether `submit` would accept a copy of `num_bytes` now."""
        with self._lock:
            return self._accepts(num_bytes, priority)

    def submit(self, work: Work, num_bytes: int, *, priority: int = 0) -> Transfer | None:
        """Queue a copy and return at once; return None if too much of this priority or a higher one is in flight."""
        with self._lock:
            if not self._accepts(num_bytes, priority):
                return None
            transfer = Transfer(num_bytes)
            self._num_bytes[priority] = self._num_bytes.get(priority, 0) + num_bytes
            self._num_submitted += 1
            heappush(self._waiting, (-priority, self._num_submitted, work, transfer))
        self._worker.submit(self._run)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Return when the transfer is done, successful or not."""
        try:
            transfer.wait()
        except Exception:  # the caller reads transfer.error
            return

    def close(self) -> None:
        """Finish the queued copies and end the thread."""
        self._worker.shutdown()

    def _accepts(self, num_bytes: int, priority: int) -> bool:
        in_flight = sum(num for other, num in self._num_bytes.items() if other >= priority)
        return not in_flight or in_flight + num_bytes <= self._max_bytes

    def _run(self) -> None:
        """Make the copy that is due; there is one call for each that was submitted."""
        with self._lock:
            rank, _, work, transfer = heappop(self._waiting)
        error = run(work, transfer)
        with self._lock:
            num_left = self._num_bytes.pop(-rank, 0) - transfer.num_bytes
            if num_left:
                self._num_bytes[-rank] = num_left
        transfer.finish(error)


def run(work: Work, transfer: Transfer) -> Exception | None:
    """Do a transfer's work, unless it was cancelled before it started; return the exception that ended it, or None."""
    if transfer.is_cancelled:
        return TransferCancelled("the transfer was cancelled before it started")
    try:
        work(transfer)
    except Exception as error:  # any exception of a device or a disk is the transfer's result
        return error
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """One lane for each kind of copy, so that no kind waits for another.

    Attributes:
        demote: From the device to the host.
        load: From the host to the device.
        store: From the host to the stores.
        fetch: From the stores to the host.
    """

    demote: Lane
    load: Lane
    store: Lane
    fetch: Lane

    def close(self) -> None:
        """Close all lanes."""
        for lane in (self.demote, self.load, self.store, self.fetch):
            lane.close()


def thread_lanes(*, max_bytes_in_flight: int = 2**30) -> Lanes:
    """Return lanes with a thread each; `max_bytes_in_flight` limits each of them."""
    names = ("demote", "load", "store", "fetch")
    return Lanes(**{name: ThreadLane(f"kv-{name}", max_bytes_in_flight=max_bytes_in_flight) for name in names})
