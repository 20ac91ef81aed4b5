"""Rows that requests hold for a while, and tickets that identify the current holder of a row."""

import numpy as np
from numpy.typing import NDArray

from pagewood.kvpool.arrays import require_whole
from pagewood.kvpool.runs import require_vector

_GENERATIONS = 2**31
_ROW_BITS = 32
_INT64 = np.dtype(np.int64)


class OutOfRows(Exception):
    """More rows were requested than are free; no row was handed out.

    Attributes:
        requested: Number of rows requested.
        available: Number of rows that were free.
    """

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(f"requested {requested} rows, {available} are free")
        self.requested = requested
        self.available = available


class TicketPool:
    """Hands out the rows 0 .. num_rows-1 by tickets, each row to one holder at a time.

    A ticket is an int64. Its low half is the row; its high half is the row's generation, the number of times that the
    row had been freed when the ticket was handed out. A ticket can be stored wherever a row number can, but unlike a
    row number it never refers to a later holder.

    Invariant: a ticket is valid from `alloc` until `free`. Using it afterwards, or using any other number, is an error.
    (A generation has 31 bits: a ticket that is kept while its row is freed 2**31 times is accepted again.)

    The rows that were freed last are handed out first. Not thread-safe.

    pagewood-engine keeps its rows in a plain list and does not use this class. It is for engines that want stale rows
    detected.
    """

    __slots__ = ("_free", "_generation", "_is_held", "_num_free")

    def __init__(self, num_rows: int) -> None:
        """Create a pool with every row free; the first rows handed out are 0, 1, 2, ...

        Args:
            num_rows: Number of rows, in [1, 2**31).

        Raises:
            ValueError: `num_rows` is out of range or not an integer.
        """
        num_rows = require_whole("num_rows", num_rows)
        if not 1 <= num_rows < 2**31:
            raise ValueError(f"num_rows must be in [1, {2**31}), got {num_rows}")
        # The free rows are _free[:_num_free]; the last of them is handed out next.
        self._free = np.arange(num_rows - 1, -1, -1, dtype=np.int64)  # written by: free
        self._num_free = num_rows  # written by: alloc, free
        self._generation = np.zeros(num_rows, dtype=np.int64)  # written by: free
        self._is_held = np.zeros(num_rows, dtype=np.bool_)  # written by: alloc, free

    @property
    def num_rows(self) -> int:
        """Number of rows, held or free."""
        return len(self._free)

    @property
    def num_free(self) -> int:
        """Number of rows that `alloc` can hand out."""
        return self._num_free

    def alloc(self, n: int) -> NDArray[np.int64]:
        """Hand out `n` rows.

        Args:
            n: Number of rows, at least 0.

        Returns:
            `[n] int64`, tickets.

        Raises:
            OutOfRows: Fewer than `n` rows are free. No row is handed out.
            ValueError: `n` is negative or not an integer.
        """
        if type(n) is not int:
            n = require_whole("n", n)
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        if n > self._num_free:
            raise OutOfRows(requested=n, available=self._num_free)
        rows = self._free[self._num_free - n : self._num_free][::-1]
        self._num_free -= n
        self._is_held[rows] = True
        return (self._generation[rows] << _ROW_BITS) | rows

    def free(self, tickets: NDArray[np.int64]) -> None:
        """Take rows back; their tickets become stale.

        Args:
            tickets: `[n] int64`, valid and distinct.

        Raises:
            ValueError: A ticket is not valid, or occurs twice. No row is freed.
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
            ValueError: A ticket is not valid: its row has been freed since, or the ticket was never handed out.
        """
        require_vector("tickets", tickets, _INT64)
        rows = (tickets & (2**_ROW_BITS - 1)).astype(np.intp)
        is_valid = rows < len(self._generation)
        known = np.where(is_valid, rows, 0)
        is_valid &= (self._generation[known] == tickets >> _ROW_BITS) & self._is_held[known]
        if not is_valid.all():
            raise ValueError(self._complaint(int(tickets[~is_valid][0])))
        return rows

    def row(self, ticket: int | np.int64) -> int:
        """Return the row of one ticket.

        Raises:
            ValueError: The ticket is not valid, or not an integer.
        """
        number = require_whole("ticket", ticket)
        if not 0 <= number < 2**63:
            raise ValueError(self._complaint(number))
        return int(self.rows(np.array([number], _INT64))[0])

    def _complaint(self, ticket: int) -> str:
        generation, row = ticket >> _ROW_BITS, ticket & (2**_ROW_BITS - 1)
        if ticket >= 0 and row < len(self._generation) and generation < self._generation[row]:
            return f"tickets must be valid, got {ticket}, which is stale: row {row} has been freed since"
        return f"tickets must be valid, got {ticket}, which was never handed out"
