"""Rows that requests hold for a while, and tickets that tell who holds them now."""

import numpy as np
from numpy.typing import NDArray

_GENERATIONS = 2**31
_ROW_BITS = 32


class OutOfRows(Exception):
    """Fewer rows are free than were asked for; none was handed out.

    Attributes:
        requested: Rows asked for.
        available: Rows that were free.
    """

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(f"requested {requested} rows, {available} are free")
        self.requested = requested
        self.available = available


class TicketPool:
    """Hands out the rows 0 .. num_rows-1, each to one holder at a time, by tickets.

    A ticket is an int64: the row in its low half, above it how often the row had been freed when it was handed out. It
    fits everywhere a row would, and unlike a row it does not come to mean another holder.

    Invariant: a ticket is valid from `alloc` until `free`; any use of it afterwards, and of any other number, is an
    error. (A generation has 31 bits: a ticket that was kept while its row was freed 2**31 times would pass.)

    Rows freed last are handed out first. Not thread-safe.
    """

    __slots__ = ("_free", "_generation", "_is_held", "_num_free")

    def __init__(self, num_rows: int) -> None:
        """Make a pool with every row free; the first rows handed out are 0, 1, 2, ...

        Raises:
            ValueError: `num_rows` is not in [1, 2**31).
        """
        if not 1 <= num_rows < 2**31:
            raise ValueError(f"num_rows must be in [1, {2**31}), got {num_rows}")
        # The free rows are _free[:_num_free], the next one to hand out last.
        self._free = np.arange(num_rows - 1, -1, -1, dtype=np.int64)  # written by: free
        self._num_free = num_rows  # written by: alloc, free
        self._generation = np.zeros(num_rows, dtype=np.int64)  # written by: free
        self._is_held = np.zeros(num_rows, dtype=np.bool_)  # written by: alloc, free

    @property
    def num_rows(self) -> int:
        """All rows, held or free."""
        return len(self._free)

    @property
    def num_free(self) -> int:
        """Rows that `alloc` can hand out."""
        return self._num_free

    def alloc(self, n: int) -> NDArray[np.int64]:
        """Hand out `n` rows.

        Returns:
            `[n] int64`, tickets.

        Raises:
            OutOfRows: Fewer than `n` rows are free; none is handed out.
            ValueError: `n` is negative.
        """
        if n > self._num_free:
            raise OutOfRows(requested=n, available=self._num_free)
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        rows = self._free[self._num_free - n : self._num_free][::-1]
        self._num_free -= n
        self._is_held[rows] = True
        return (self._generation[rows] << _ROW_BITS) | rows

    def free(self, tickets: NDArray[np.int64]) -> None:
        """Take rows back; their tickets are stale from now on.

        Args:
            tickets: `[n] int64`, valid and distinct.

        Raises:
            ValueError: A ticket is not valid, or occurs twice; nothing is freed.
        """
        rows = self.rows(tickets)
        if len(np.unique(rows)) < len(rows):
            raise ValueError(f"tickets must be distinct, got {tickets.tolist()}")
        self._generation[rows] = (self._generation[rows] + 1) % _GENERATIONS
        self._is_held[rows] = False
        self._free[self._num_free : self._num_free + len(rows)] = rows[::-1]
        self._num_free += len(rows)

    def rows(self, tickets: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the rows of tickets.

        Args:
            tickets: `[n] int64`.

        Returns:
            `[n] intp`.

        Raises:
            ValueError: A ticket is not valid: its row has been freed since, or no row was ever handed out for it.
        """
        if tickets.dtype != np.int64 or tickets.ndim != 1:
            raise ValueError(f"tickets must be a one-dimensional int64 array, got {tickets.dtype} {tickets.shape}")
        rows = (tickets & (2**_ROW_BITS - 1)).astype(np.intp)
        is_valid = rows < len(self._generation)
        known = np.where(is_valid, rows, 0)
        is_valid &= (self._generation[known] == tickets >> _ROW_BITS) & self._is_held[known]
        if not is_valid.all():
            raise ValueError(self._complaint(int(tickets[~is_valid][0])))
        return rows

    def _complaint(self, ticket: int) -> str:
        generation, row = ticket >> _ROW_BITS, ticket & (2**_ROW_BITS - 1)
        if ticket >= 0 and row < len(self._generation) and generation < self._generation[row]:
            return f"tickets must be valid, got {ticket}, which is stale: row {row} has been freed since"
        return f"tickets must be valid, got {ticket}, which was never handed out"
