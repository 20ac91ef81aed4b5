"""A table with one row of page ids for each running request, in the form that attention kernels read."""

import numpy as np
from numpy.typing import NDArray

from pagewood.kvpool.arrays import check_at_least_one, require_whole
from pagewood.kvpool.runs import require_vector
from pagewood.kvpool.tickets import TicketPool

_INT32 = np.dtype(np.int32)


class RowPool:
    """A table `[num_rows, max_pages]` of page ids, with a row for each running request.

    Invariant: the first `num_pages` ids of a row are those that its holder appended. A row is addressed by its holder's
    ticket, so a former holder can neither read nor write it.

    The pool does not own the pages: the caller that frees a row also frees its pages, or gives them to a cache. Not
    thread-safe.

    pagewood-engine does not use this class. It is for engines that keep the page lists of requests in one table in host
    memory.
    """

    __slots__ = ("_num_pages", "_table", "_tickets")

    def __init__(self, num_rows: int, max_pages: int) -> None:
        """Create a table with every row free.

        Args:
            num_rows: Number of rows, >= 1.
            max_pages: Pages that a row has room for, >= 1.

        Raises:
            ValueError: A number is less than 1.
        """
        check_at_least_one(num_rows=num_rows, max_pages=max_pages)
        self._tickets = TicketPool(num_rows)
        self._table = np.zeros((num_rows, max_pages), dtype=np.int32)  # written by: append
        self._num_pages = np.zeros(num_rows, dtype=np.int32)  # written by: alloc, append, truncate

    @property
    def num_rows(self) -> int:
        """Number of rows, held or free."""
        return self._tickets.num_rows

    @property
    def max_pages(self) -> int:
        """Number of pages that a row has room for."""
        return self._table.shape[1]

    @property
    def num_free(self) -> int:
        """Number of rows that `alloc` can hand out."""
        return self._tickets.num_free

    @property
    def table(self) -> NDArray[np.int32]:
        """A read-only view of the whole table, `[num_rows, max_pages] int32`; index it with `rows(tickets)`."""
        table = self._table.view()
        table.flags.writeable = False  # not ours
        return table

    def alloc(self, n: int) -> NDArray[np.int64]:
        """Hand out `n` empty rows.

        Args:
            n: Number of rows, at least 0.

        Returns:
            `[n] int64`, tickets.

        Raises:
            OutOfRows: Fewer than `n` rows are free. No row is handed out.
            ValueError: `n` is negative.
        """
        tickets = self._tickets.alloc(n)
        self._num_pages[self._tickets.rows(tickets)] = 0
        return tickets

    def free(self, tickets: NDArray[np.int64]) -> None:
        """Take rows back; their tickets become stale.

        Args:
            tickets: `[n] int64`, valid and distinct.

        Raises:
            ValueError: A ticket is not valid, or occurs twice. No row is freed.
        """
        self._tickets.free(tickets)

    def rows(self, tickets: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the rows of tickets, `[n] intp`.

        Raises:
            ValueError: A ticket is not valid.
        """
        return self._tickets.rows(tickets)

    def num_pages(self, tickets: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the number of pages in each row, `[n] int32`.

        Raises:
            ValueError: A ticket is not valid.
        """
        return self._num_pages[self._tickets.rows(tickets)]

    def pages(self, ticket: int | np.int64) -> NDArray[np.int32]:
        """Return a copy of the pages of one row, `[num_pages] int32`.

        Raises:
            ValueError: The ticket is not valid.
        """
        row = self._tickets.row(ticket)
        return self._table[row, : self._num_pages[row]].copy()

    def append(self, tickets: NDArray[np.int64], pages: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Append pages to many rows at once.

        Args:
            tickets: `[n] int64`, valid and distinct.
            pages: `[counts.sum()] int32`, the pages of the first row, then those of the second, and so on.
            counts: `[n] int32`, the number of pages for each row, >= 0.

        Raises:
            ValueError: A ticket is not valid or occurs twice, a row has no room, `counts` does not match `pages`, or
                one of these is not a one-dimensional int32 array. No page is appended.
        """
        require_vector("pages", pages, _INT32)
        require_vector("counts", counts, _INT32)
        rows = self._tickets.rows(tickets)
        if counts.shape != rows.shape or counts.min(initial=0) < 0 or counts.sum() != len(pages):
            raise ValueError(f"counts must be {len(rows)} numbers >= 0 that sum to {len(pages)}, got {counts}")
        if len(np.unique(rows)) < len(rows):
            raise ValueError(f"tickets must be distinct, got {tickets.tolist()}")
        lengths = self._num_pages[rows] + counts
        if lengths.max(initial=0) > self.max_pages:
            raise ValueError(f"a row must have <= {self.max_pages} pages (max_pages), got {lengths.max()}")
        # The position in the flat table of the first page of each row's share, minus its index in `pages`.
        starts = rows * self.max_pages + lengths - np.cumsum(counts)
        self._table.reshape(-1)[np.repeat(starts, counts) + np.arange(len(pages))] = pages
        self._num_pages[rows] = lengths

    def truncate(self, ticket: int | np.int64, num_pages: int) -> NDArray[np.int32]:
        """Shorten a row, for instance after speculated tokens were rejected.

        Args:
            ticket: A valid ticket.
            num_pages: Number of pages to keep.

        Returns:
            `int32`, the pages that were dropped.

        Raises:
            ValueError: The ticket is not valid, or the row has fewer than `num_pages` pages.
        """
        pages = self.pages(ticket)
        if not 0 <= require_whole("num_pages", num_pages) <= len(pages):
            raise ValueError(f"num_pages must be in [0, {len(pages)}], got {num_pages}")
        self._num_pages[self._tickets.row(ticket)] = num_pages
        return pages[num_pages:]
