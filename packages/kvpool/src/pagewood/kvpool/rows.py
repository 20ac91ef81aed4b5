"""The page lists of running requests: one row each, as attention kernels read them."""

import numpy as np
from numpy.typing import NDArray

from pagewood.kvpool.arrays import check_at_least_one
from pagewood.kvpool.tickets import TicketPool


class RowPool:
    """A table `[num_rows, max_pages] int32`, in which each running request has a row of page ids.

    Invariant: the first `num_pages` ids of a row are those that its holder appended. A row is addressed by its holder's
    ticket, so that whoever held it before can neither read nor write it.

    The pool owns no pages: whoever frees a row frees its pages too, or gives them to a cache. Not thread-safe.
    """

    __slots__ = ("_num_pages", "_table", "_tickets")

    def __init__(self, num_rows: int, max_pages: int) -> None:
        """Make a table with every row free.

        Raises:
            ValueError: A number is less than 1.
        """
        check_at_least_one(num_rows=num_rows, max_pages=max_pages)
        self._tickets = TicketPool(num_rows)
        self._table = np.zeros((num_rows, max_pages), dtype=np.int32)  # written by: append
        self._num_pages = np.zeros(num_rows, dtype=np.int32)  # written by: alloc, append, truncate

    @property
    def num_rows(self) -> int:
        """All rows, held or free."""
        return self._tickets.num_rows

    @property
    def max_pages(self) -> int:
        """Pages that a row has room for."""
        return self._table.shape[1]

    @property
    def num_free(self) -> int:
        """Rows that `alloc` can hand out."""
        return self._tickets.num_free

    @property
    def table(self) -> NDArray[np.int32]:
        """The whole table, not a copy, read-only: `[num_rows, max_pages]`, to be indexed by `rows(tickets)`."""
        table = self._table.view()
        table.flags.writeable = False  # not ours
        return table

    def alloc(self, n: int) -> NDArray[np.int64]:
        """Hand out `n` empty rows.

        Returns:
            `[n] int64`, tickets.

        Raises:
            OutOfRows: Fewer than `n` rows are free; none is handed out.
            ValueError: `n` is negative.
        """
        tickets = self._tickets.alloc(n)
        self._num_pages[self._tickets.rows(tickets)] = 0
        return tickets

    def free(self, tickets: NDArray[np.int64]) -> None:
        """Take rows back; their tickets are stale from now on.

        Raises:
            ValueError: A ticket is not valid, or occurs twice; nothing is freed.
        """
        self._tickets.free(tickets)

    def rows(self, tickets: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the rows of tickets, `[n] intp`.

        Raises:
            ValueError: A ticket is not valid.
        """
        return self._tickets.rows(tickets)

    def num_pages(self, tickets: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return how many pages are in each row, `[n] int32`.

        Raises:
            ValueError: A ticket is not valid.
        """
        return self._num_pages[self._tickets.rows(tickets)]

    def pages(self, ticket: int | np.int64) -> NDArray[np.int32]:
        """Return a copy of a row's pages, `[num_pages] int32`.

        Raises:
            ValueError: The ticket is not valid.
        """
        row = self._tickets.rows(np.array([ticket], dtype=np.int64))[0]
        return self._table[row, : self._num_pages[row]].copy()

    def append(self, tickets: NDArray[np.int64], pages: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Append pages to many rows at once.

        Args:
            tickets: `[n] int64`, valid and distinct.
            pages: `[counts.sum()] int32`, the pages of the first row, then those of the second, ...
            counts: `[n] int32`, how many of them each row gets, >= 0.

        Raises:
            ValueError: A ticket is not valid or occurs twice, a row has no room, or the numbers do not add up; nothing
                is appended.
        """
        rows = self._tickets.rows(tickets)
        if counts.shape != rows.shape or counts.min(initial=0) < 0 or counts.sum() != len(pages):
            raise ValueError(f"counts must be {len(rows)} numbers >= 0 that sum to {len(pages)}, got {counts}")
        if len(np.unique(rows)) < len(rows):
            raise ValueError(f"tickets must be distinct, got {tickets.tolist()}")
        lengths = self._num_pages[rows] + counts
        if lengths.max(initial=0) > self.max_pages:
            raise ValueError(f"a row must have at most max_pages = {self.max_pages} pages, got {lengths.max()}")
        # Page i of the argument goes to its row's end plus what precedes it in its own share.
        starts = rows * self.max_pages + lengths - np.cumsum(counts)
        self._table.reshape(-1)[np.repeat(starts, counts) + np.arange(len(pages))] = pages
        self._num_pages[rows] = lengths

    def truncate(self, ticket: int | np.int64, num_pages: int) -> NDArray[np.int32]:
        """Shorten a row, for instance when speculated tokens were rejected.

        Returns:
            `int32`, the pages that were dropped.

        Raises:
            ValueError: The ticket is not valid, or the row has fewer pages than `num_pages`.
        """
        pages = self.pages(ticket)
        if not 0 <= num_pages <= len(pages):
            raise ValueError(f"num_pages must be in [0, {len(pages)}], got {num_pages}")
        self._num_pages[self._tickets.rows(np.array([ticket], dtype=np.int64))] = num_pages
        return pages[num_pages:]
