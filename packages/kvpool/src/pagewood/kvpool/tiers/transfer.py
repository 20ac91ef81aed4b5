"""A copy under way: how far it is, waiting for it, and calling it off."""

from threading import Condition


class TransferCancelled(Exception):
    """The transfer was called off before it was complete."""


class Transfer:
    """One batch of pages on its way between two memories.

    Invariant: once `is_done`, no worker touches the memory of either side any more; until then both sides belong to the
    transfer, cancelled or not. Any thread may ask and wait; only the worker that copies calls `advance` and `finish`.
    """

    __slots__ = ("_changed", "_error", "_is_cancelled", "_is_done", "_num_layers", "_num_pages", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._changed = Condition()
        self._num_pages = 0  # written by: advance
        self._num_layers = 0  # written by: advance
        self._is_cancelled = False  # written by: cancel
        self._is_done = False  # written by: finish
        self._error: BaseException | None = None  # written by: finish

    @property
    def is_done(self) -> bool:
        """Whether the worker is through with it, well or not."""
        return self._is_done

    @property
    def is_cancelled(self) -> bool:
        """Whether it has been called off; the worker may not have noticed yet."""
        return self._is_cancelled

    @property
    def error(self) -> BaseException | None:
        """What ended it early; None: nothing, or it is not done."""
        return self._error

    @property
    def num_pages(self) -> int:
        """Leading pages that have arrived whole, where pages arrive one after the other."""
        return self._num_pages

    @property
    def num_layers(self) -> int:
        """Leading layers that have arrived for all pages, where layers arrive one after the other."""
        return self._num_layers

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done; return whether it is.

        Raises:
            TransferCancelled: it was called off in time.
            Exception: what the copy raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_done, timeout_s)
            if self._error is not None:
                raise self._error
            return self._is_done

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until a layer of all pages is there, which may be long before the last; return whether it is.

        A forward pass that calls this before each layer's attention may start while the load is still running.

        Raises:
            TransferCancelled: it was called off before this layer.
            Exception: what the copy raised before this layer.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_layers > layer or self._is_done, timeout_s)
            if self._num_layers > layer:
                return True
            if self._error is not None:
                raise self._error
            return self._is_done

    def cancel(self) -> None:
        """Ask for an early end and return at once; what has not been copied by then is not copied."""
        with self._changed:
            self._is_cancelled = True

    def advance(self, *, num_pages: int | None = None, num_layers: int | None = None) -> None:
        """Say how much has arrived.

        Raises:
            TransferCancelled: it has been called off, so the worker must stop.
        """
        with self._changed:
            if num_pages is not None:
                self._num_pages = num_pages
            if num_layers is not None:
                self._num_layers = num_layers
            self._changed.notify_all()
            is_cancelled = self._is_cancelled
        if is_cancelled:
            raise TransferCancelled("the transfer was called off")

    def finish(self, error: BaseException | None = None) -> None:
        """Say that the worker is through with it."""
        with self._changed:
            self._error = error
            self._is_done = True
            self._changed.notify_all()
