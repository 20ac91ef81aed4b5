"""Memory for the states of recurrent layers: one row for each running request or snapshot."""

import numpy as np
import torch
from numpy.typing import NDArray

from pagewood.kvpool.memory import allocate
from pagewood.kvpool.state import StateLayout
from pagewood.kvpool.tickets import TicketPool


class StatePool:
    """Memory for `num_rows` states of fixed size, each handed out to one holder at a time.

    Invariant: a state is all zeros when it is handed out. It is addressed by its holder's ticket until it is freed;
    then the ticket is stale, and any use of it is an error. Not thread-safe.

    Attributes:
        layout: The layout of a state.
    """

    __slots__ = ("_memory", "_tickets", "layout")

    def __init__(self, layout: StateLayout, num_rows: int, *, device: str | torch.device = "cpu") -> None:
        """Allocate `num_rows * layout.bytes_per_page` bytes on `device`.

        Raises:
            ValueError: `num_rows` is less than 1.
        """
        self._tickets = TicketPool(num_rows)
        self._memory = allocate(layout, num_rows, device=device)  # contents written by: alloc, copy, holders
        self.layout = layout

    @property
    def num_rows(self) -> int:
        """Number of states, held or free."""
        return self._tickets.num_rows

    @property
    def num_free(self) -> int:
        """Number of states that `alloc` can hand out."""
        return self._tickets.num_free

    def alloc(self, n: int) -> NDArray[np.int64]:
        """Hand out `n` states, filled with zeros.

        Args:
            n: Number of states, at least 0.

        Returns:
            `[n] int64`, tickets.

        Raises:
            OutOfRows: Fewer than `n` states are free. No state is handed out.
            ValueError: `n` is negative.
        """
        tickets = self._tickets.alloc(n)
        self._memory.zero_pages(self.rows(tickets))
        return tickets

    def free(self, tickets: NDArray[np.int64]) -> None:
        """Take states back; their tickets become stale.

        Args:
            tickets: `[n] int64`, valid and distinct.

        Raises:
            ValueError: A ticket is not valid, or occurs twice. No state is freed.
        """
        self._tickets.free(tickets)

    def rows(self, tickets: NDArray[np.int64]) -> torch.Tensor:
        """Return the rows of tickets in the arrays, `[n] int64`, on the pool's device.

        Raises:
            ValueError: A ticket is not valid.
        """
        return torch.as_tensor(self._tickets.rows(tickets), device=self._memory.device)

    def array(self, layer: int, name: str) -> torch.Tensor:
        """Return a view of one array of one layer for all states, `[num_rows, *shape]` in its dtype."""
        return self._memory.array(layer, name)

    def copy(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        """Copy states in every layer, to keep a snapshot in a cache or to fork a request.

        Args:
            src: `[n] int64`, tickets of the states to read. All are read before any state is written.
            dst: `[n] int64`, distinct tickets of the states to write.

        Raises:
            ValueError: A ticket is not valid, or `src` and `dst` differ in length.
        """
        self._memory.copy_pages(self.rows(src), self.rows(dst))

    def checksum(self, ticket: int | np.int64) -> int:
        """Return the CRC-32 of a state in all layers, for tests. Waits for the device."""
        return self._memory.checksum(self._tickets.row(ticket))
