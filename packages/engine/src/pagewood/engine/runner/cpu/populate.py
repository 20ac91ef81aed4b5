"""KV memory that the system provides a little ahead of its use, so that neither a start nor a step waits for it.

The system provides memory at its first write, and a step that writes first waits: 35 ms were measured in a prefill step
of 544 tokens. Writing all of the memory at start would take time, and memory that may never be used.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import numpy as np

from pagewood.engine.core.loop import Runner, StepHandle
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.kvpool.memory import PageMemory

_AHEAD_BYTES = 128 << 20
_PIECE_BYTES = 2 << 20  # of one array: a huge page
_SYSTEM_PAGE_BYTES = 4096
_POPULATE_WRITE = 23  # Linux 5.14 and later: as if each system page were written, without a change to what it holds
_NICENESS = 10


class Populator:
    """A thread of low priority that has the system provide pages in ascending order, as far as `reach` asks for.

    Page allocators hand out low page ids first and reuse those that were freed last, so the highest page in use says
    how much memory is needed. If the system cannot populate memory, all of it is written at the start.

    Invariant: contents never change but by `give_back`.
    """

    __slots__ = (
        "_ahead", "_is_closed", "_memory", "_num_populated", "_piece", "_populate", "_thread", "_wake", "_wanted",
        "_working",
    )  # fmt: skip

    def __init__(self, memory: PageMemory, *, num_ahead_bytes: int = _AHEAD_BYTES) -> None:
        """Start to provide the first bytes of `memory`, and later that many beyond the highest page in use."""
        page_bytes = memory.layout.bytes_per_page
        largest = max(block.shape[1] for block in memory.blocks(0))
        self._memory = memory
        self._ahead = max(1, num_ahead_bytes // page_bytes)
        self._piece = max(1, _PIECE_BYTES // largest)
        self._wake = threading.Condition()
        self._working = threading.Lock()  # held while memory is provided
        self._num_populated = 0  # written by: the thread, give_back
        self._wanted = min(self._ahead, memory.num_pages)  # written by: reach, give_back
        self._is_closed = False  # written by: close
        self._thread: threading.Thread | None = None
        self._populate = _populate_function()
        if self._populate is None or not self._provide(0, 1):
            memory.touch()
            self._num_populated = memory.num_pages
            return
        self._thread = threading.Thread(target=self._run, name="kv-memory", daemon=True)
        self._thread.start()

    @property
    def num_pages(self) -> int:
        """Pages of the memory."""
        return self._memory.num_pages

    @property
    def num_populated(self) -> int:
        """Pages [0, n) that have been provided."""
        return self._num_populated

    def reach(self, page: int) -> None:
        """Note that `page` is in use."""
        wanted = min(page + 1 + self._ahead, self._memory.num_pages)
        if wanted > self._wanted:
            with self._wake:
                self._wanted = wanted
                self._wake.notify()

    def give_back(self) -> None:
        """Give all of the memory back to the system, and provide nothing before the next `reach`; no page is in use.

        Raises:
            OSError: the system is not Linux.
        """
        with self._wake:
            self._wanted = 0
        with self._working:
            self._memory.release()
            self._num_populated = 0

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # of this thread only
        while True:
            with self._wake:
                while self._num_populated >= self._wanted and not self._is_closed:
                    self._wake.wait()
                if self._is_closed:
                    return
            with self._working:
                if self._num_populated < self._wanted:
                    end = min(self._num_populated + self._piece, self._memory.num_pages)
                    self._provide(self._num_populated, end)
                    self._num_populated = end

    def _provide(self, first: int, last: int) -> bool:
        """Provide pages [first, last); return whether the system could."""
        assert self._populate is not None
        for layer in range(self._memory.layout.num_layers):
            for block in self._memory.blocks(layer):
                stride = block.stride(0)
                start = (block.data_ptr() + first * stride) // _SYSTEM_PAGE_BYTES * _SYSTEM_PAGE_BYTES
                end = block.data_ptr() + (last - 1) * stride + block.shape[1]
                if self._populate(start, end - start, _POPULATE_WRITE) != 0:
                    return False
        return True


def _populate_function() -> ctypes._NamedFuncPointer | None:  # pyright: ignore[reportPrivateUsage]
    """Return the system's madvise, or None."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)  # not ours
    return function


class PopulatingRunner:
    """A runner that reports to a populator which pages its batches bring into use.

    Args:
        runner: computes.
        populator: of its memory.
        first: the id of the first page there, if pages with other ids are in the memory of other ranks; None: all are
            there.
    """

    __slots__ = ("_first", "_populator", "_runner")

    def __init__(self, runner: Runner, populator: Populator, *, first: int | None = None) -> None:
        self._runner = runner
        self._populator = populator
        self._first = first

    @property
    def inner(self) -> Runner:
        """The runner that computes."""
        return self._runner

    def launch(self, batch: Batch) -> StepHandle:
        """Launch a batch on the runner."""
        if len(batch.page_ids) > 0:
            self._populator.reach(int(batch.page_ids.max()) if self._first is None else self._highest(batch.page_ids))
        return self._runner.launch(batch)

    def _highest(self, pages: Int32) -> int:
        """Return the highest number of those pages that are in this memory; -1 if all lie elsewhere."""
        numbers = pages - np.int32(self._first or 0)
        return int(numbers.max(where=numbers < self._populator.num_pages, initial=-1))

    def close(self) -> None:
        """Close the runner and end the populator's thread."""
        self._runner.close()
        self._populator.close()
