"""Where copies run: one worker thread per lane, with a bound on what is queued."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from pagewood.kvpool.tiers.transfer import Transfer, TransferCancelled

Work = Callable[[Transfer], None]
"""Copies, tells the transfer how far it is, and raises if it fails."""


class Lane(Protocol):
    """Runs copies one after the other, in the order in which they were submitted."""

    def accepts(self, num_bytes: int) -> bool:
        """Whether `submit` would take a copy of so many bytes now."""
        ...

    def submit(self, work: Work, num_bytes: int) -> Transfer | None:
        """Queue a copy and return at once; None: too much is in flight, come back later."""
        ...

    def wait(self, transfer: Transfer) -> None:
        """Return when one of this lane's transfers is done, well or not."""
        ...

    def close(self) -> None:
        """Finish what is queued and end; a second call does nothing."""
        ...


class ThreadLane:
    """A lane with a thread of its own.

    Invariant: no more than `max_bytes_in_flight` bytes are queued or being copied, except by a single transfer.

    Copies release the interpreter's lock, so a lane costs the other threads memory bandwidth and little else.

    Args:
        name: of the thread.
        max_bytes_in_flight: what `submit` accepts; a transfer that is larger is accepted when nothing is in flight.
    """

    __slots__ = ("_lock", "_max_bytes", "_num_bytes", "_worker")

    def __init__(self, name: str, *, max_bytes_in_flight: int) -> None:
        if max_bytes_in_flight < 1:
            raise ValueError(f"max_bytes_in_flight must be >= 1, got {max_bytes_in_flight}")
        self._max_bytes = max_bytes_in_flight
        self._lock = Lock()
        self._num_bytes = 0  # written by: submit, _run
        self._worker = ThreadPoolExecutor(1, name)

    def accepts(self, num_bytes: int) -> bool:
        """Whether `submit` would take a copy of so many bytes now."""
        in_flight = self._num_bytes
        return not in_flight or in_flight + num_bytes <= self._max_bytes

    def submit(self, work: Work, num_bytes: int) -> Transfer | None:
        """Queue a copy and return at once; None: too much is in flight."""
        with self._lock:
            if not self.accepts(num_bytes):
                return None
            self._num_bytes += num_bytes
        transfer = Transfer(num_bytes)
        self._worker.submit(self._run, work, transfer)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Return when the transfer is done, well or not."""
        try:
            transfer.wait()
        except Exception:  # it stays in transfer.error
            return

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._worker.shutdown()

    def _run(self, work: Work, transfer: Transfer) -> None:
        error = run(work, transfer)
        with self._lock:
            self._num_bytes -= transfer.num_bytes
        transfer.finish(error)


def run(work: Work, transfer: Transfer) -> Exception | None:
    """Do a transfer's work, unless it was called off before it began; return what went wrong."""
    if transfer.is_cancelled:
        return TransferCancelled("the transfer was called off before it began")
    try:
        work(transfer)
    except Exception as error:  # whatever a device or a disk raises is the transfer's result
        return error
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """One lane for each kind of copy, so that none of them waits behind another.

    Attributes:
        demote: device to host.
        load: host to device.
        store: host to the stores.
        fetch: stores to host.
    """

    demote: Lane
    load: Lane
    store: Lane
    fetch: Lane

    def close(self) -> None:
        """Close all of them."""
        for lane in (self.demote, self.load, self.store, self.fetch):
            lane.close()


def thread_lanes(*, max_bytes_in_flight: int = 2**30) -> Lanes:
    """Return lanes with a thread each, and this bound each."""
    names = ("demote", "load", "store", "fetch")
    return Lanes(**{name: ThreadLane(f"kv-{name}", max_bytes_in_flight=max_bytes_in_flight) for name in names})
