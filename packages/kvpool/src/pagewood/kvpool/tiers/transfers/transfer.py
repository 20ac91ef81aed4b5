"""A copy in progress: how much of it is done, waiting for it, and cancelling it."""

from threading import Condition


class TransferCancelled(Exception):
    """The transfer was cancelled before it was complete."""


class Transfer:
    """One batch of pages that is copied between two memories.

    Invariant: once `is_done` is true, no worker accesses the memory of either side. Until then both sides belong to the
    transfer, even if it was cancelled. Any thread may query it, wait for it or cancel it; only the worker that copies
    calls `advance` and `finish`.

    Attributes:
        num_bytes: Size of the transfer, in bytes.
    """

    __slots__ = ("_changed", "_error", "_is_cancelled", "_is_done", "_num_layers", "_num_pages", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        """Create a transfer that has not started."""
        self.num_bytes = num_bytes
        self._changed = Condition()
        self._num_pages = 0  # written by: advance
        self._num_layers = 0  # written by: advance
        self._is_cancelled = False  # written by: cancel
        self._is_done = False  # written by: finish
        self._error: BaseException | None = None  # written by: finish

    @property
    def is_done(self) -> bool:
        """Whether the worker has finished it, successfully or not."""
        return self._is_done

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled; the worker may not have noticed yet."""
        return self._is_cancelled

    @property
    def error(self) -> BaseException | None:
        """The exception that ended it early, or None if there was none or the transfer is not done."""
        return self._error

    @property
    def num_pages(self) -> int:
        """Number of leading pages that have arrived complete, if pages arrive one after another."""
        return self._num_pages

    @property
    def num_layers(self) -> int:
        """Number of leading layers that have arrived for all pages, if layers arrive one after another."""
        return self._num_layers

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done or the time is over; return whether it is done.

        Raises:
            TransferCancelled: It was cancelled before it was complete.
            Exception: The exception that the copy raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_done, timeout_s)
            if self._error is not None:
                raise self._error
            return self._is_done

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until a layer of all pages has arrived or the time is over; return whether it has.

        This may be long before the last layer. A forward pass that calls it before the attention of each layer may
        start while the load is still running.

        Raises:
            TransferCancelled: The transfer was cancelled before this layer had arrived.
            Exception: The exception that the copy raised before this layer had arrived.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_layers > layer or self._is_done, timeout_s)
            if self._num_layers > layer:
                return True
            if self._error is not None:
                raise self._error
            return self._is_done

    def cancel(self) -> None:
        """Request an early end and return at once; the rest is not copied."""
        with self._changed:
            self._is_cancelled = True

    def advance(self, *, num_pages: int | None = None, num_layers: int | None = None) -> None:
        """Report how much has arrived.

        Raises:
            TransferCancelled: The transfer was cancelled, so the worker must stop.
        """
        with self._changed:
            if num_pages is not None:
                self._num_pages = num_pages
            if num_layers is not None:
                self._num_layers = num_layers
            self._changed.notify_all()
            is_cancelled = self._is_cancelled
        if is_cancelled:
            raise TransferCancelled("the transfer was cancelled")

    def finish(self, error: BaseException | None = None) -> None:
        """Report that the worker has finished, with the exception that ended the copy early, if any."""
        with self._changed:
            self._error = error
            self._is_done = True
            self._changed.notify_all()
