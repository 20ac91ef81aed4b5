# pyright: basic
# (mooncake has no types)
"""Mooncake Store as a tier: pages in the memory of several machines, found by all of them.

Needs `pip install "pagewood-kvpool[mooncake]"`, the system's libibverbs, and a running `mooncake_master`.
"""

import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from pagewood.kvpool.arrays import check_at_least_one
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.keys import check_sizes
from pagewood.kvpool.tiers.stores.checksum import CHECKSUM_BYTES, FORM, checksum
from pagewood.kvpool.tiers.stores.place_url import PlaceUrl

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_NUM_LANES = 3
"""Calls at the same time."""
_BUFFER_BYTES = 8 * 1024 * 1024
"""Pages of one call, at most, but at least one page."""
_JOIN_S = 20.0
"""Seconds after which the cluster could not be joined; a Python process starts within them."""
_GONE = frozenset((-703, -704, -706, -707, -710, -712, -800))
"""Codes of mooncake for a page that is not there, or not complete yet, or whose memory was lost with its process."""
_FULL = frozenset((-200,))
"""Code of mooncake: there is no room, and nothing could be evicted."""
_FORM_OF_URL = "mooncake://HOST:PORT"
_ASK = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
host, metadata, protocol, devices, master = sys.argv[1:]
code = store.setup(host, metadata, 0, 0, protocol, devices, master)
store.close()
sys.exit(code != 0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakePlace:
    """Where a cluster is, and how to join it."""

    master: str
    """Host of the `mooncake_master`."""
    port: int = 50051
    host: str | None = None
    """Address under which the other machines reach this one; None: the address from which it reaches the master."""
    metadata: str = "P2PHANDSHAKE"
    """Server of metadata; by default machines ask each other."""
    protocol: str = "tcp"
    """tcp or rdma."""
    devices: str = ""
    """For rdma."""
    timeout_s: float = 2.0
    """Seconds after which one batch of at most 8 MiB has failed."""

    @classmethod
    def parse(cls, url: str) -> "MooncakePlace":
        """Return the place that a URL names.

        It is `mooncake://HOST[:PORT][?host=..&metadata=..&protocol=..&devices=..&timeout_s=..]`.

        Raises:
            ValueError: A part is wrong, unknown or missing.
        """
        parts = PlaceUrl.parse(url, form=_FORM_OF_URL, options=("host", "metadata", "protocol", "devices"))
        options = {name: value for name, value in parts.options.items() if name != "timeout_s"}
        if parts.path:
            raise ValueError(f"a mooncake URL must be {_FORM_OF_URL}, got {url!r}")
        protocol = options.get("protocol", "tcp")
        if protocol not in ("tcp", "rdma"):
            raise ValueError(f"protocol of a mooncake URL must be tcp or rdma, got {protocol!r}")
        if "devices" in options and protocol != "rdma":
            raise ValueError(f"devices of a mooncake URL must come with protocol=rdma, got {url!r}")
        port = 50051 if parts.port is None else parts.port
        return cls(master=parts.host, port=port, timeout_s=parts.timeout_s, **options)

    def __str__(self) -> str:
        """Return the address of the master as a URL."""
        return f"mooncake://{self.master}:{self.port}"


class MooncakeStore:
    """A `pagewood.kvpool.tiers.PageStore` in the memory of a cluster. Thread-safe.

    Invariant: a buffer is used by one call at a time, also by one that has lasted longer than its time.

    Mooncake decides which pages it forgets; those in the memory of a process are lost with it. Each page is stored
    with a checksum, so a damaged one counts as absent. A call that fails raises OSError after `timeout_s` for each
    batch at the latest, while mooncake itself may go on for a minute; nothing is tried twice. If the master comes back,
    mooncake joins it again by itself, with empty memory.

    Source: the transfer engine reads and writes registered memory only, so pages pass through buffers of this class.
    """

    __slots__ = ("_client", "_idle", "_join_lock", "_lanes", "_num_bytes", "_page_bytes", "_place", "_prefix")

    def __init__(
        self, place: MooncakePlace, *, page_bytes: int, num_bytes: int = 1 << 30, fingerprint: bytes = b""
    ) -> None:
        """Make the store and join the cluster; if that fails, it is tried again by the next call.

        Args:
            place: Where the cluster is.
            page_bytes: Size of a page image, in bytes.
            num_bytes: Memory that this process gives to the cluster; 0: none.
            fingerprint: What the pages hold (model, dtype, layout); pages of different fingerprints are kept apart.

        Raises:
            ImportError: Mooncake is not installed, or a library of the system that it needs.
            ValueError: `page_bytes` is less than 1, or `num_bytes` is negative.
        """
        import mooncake.store  # noqa: F401 # pyright: ignore[reportMissingImports, reportUnusedImport]

        check_at_least_one(page_bytes=page_bytes)
        if num_bytes < 0:
            raise ValueError(f"num_bytes must be >= 0, got {num_bytes}")
        self._place = place
        self._page_bytes = page_bytes
        self._num_bytes = num_bytes
        self._prefix = f"pagewood-{FORM}-{fingerprint.hex() or 'any'}-{page_bytes}-"
        size = page_bytes + CHECKSUM_BYTES
        self._lanes = [_Lane(max(1, _BUFFER_BYTES // size), size) for _ in range(_NUM_LANES)]
        self._idle: SimpleQueue[_Lane] = SimpleQueue()
        for lane in self._lanes:
            self._idle.put(lane)
        self._join_lock = Lock()
        self._client: Any = None  # written by: _joined
        try:
            with self._lane() as lane:
                self._joined(lane)
        except OSError as error:
            _log.warning("%s has no pages yet: %s", place, error)

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Store pages; those for which there is no room are left out.

        Raises:
            OSError: The store did not answer.
            ValueError: A page or a key has the wrong size.
        """
        check_sizes(keys, pages, self._page_bytes)
        missing = [index for index, is_there in enumerate(self.exists(keys)) if not is_there]
        while missing:
            with self._lane() as lane:
                some, missing = missing[: len(lane.rows)], missing[len(lane.rows) :]
                for row, index in zip(lane.rows, some, strict=False):
                    row[: self._page_bytes] = pages[index]
                    row[self._page_bytes :] = np.frombuffer(checksum(keys[index], pages[index]), np.uint8)
                places = self._places(lane.rows, [keys[index] for index in some])
                codes = self._call(lane, "store pages", lambda client, places=places: client.batch_put_from(*places))
            _check(codes, "store pages", _FULL)

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Fetch and verify pages.

        Raises:
            OSError: The store did not answer.
        """
        wanted: dict[bytes, list[Bytes]] = {}  # each key once: mooncake fills one of the places of a repeated key
        for key, page in zip(keys, pages, strict=True):
            wanted.setdefault(key, []).append(page)
        distinct, found = list(wanted), set[bytes]()
        while distinct:
            with self._lane() as lane:
                some, distinct = distinct[: len(lane.rows)], distinct[len(lane.rows) :]
                places = self._places(lane.rows, some)
                codes = self._call(lane, "fetch pages", lambda client, places=places: client.batch_get_into(*places))
                _check(codes, "fetch pages", _GONE)
                for row, key, code in zip(lane.rows, some, codes, strict=False):
                    if code == len(row) and self._take(row, key, wanted[key]):
                        found.add(key)
        return [key in found for key in keys]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages are stored.

        Raises:
            OSError: The store did not answer.
        """
        if not keys:
            return []
        names = [self._prefix + key.hex() for key in keys]
        with self._lane() as lane:
            codes = self._call(lane, "look for pages", lambda client: client.batch_is_exist(names))
        _check(codes, "look for pages", _GONE)
        return [code == 1 for code in codes]

    def close(self) -> None:
        """Leave the cluster; pages in the memory of this process are lost to the others.

        If mooncake has not ended a call by then, the cluster loses this process when that call ends.
        """
        try:
            idle = [self._idle.get(timeout=self._place.timeout_s) for _ in self._lanes]
            if self._client is not None:
                idle[0].call(self._client.close, "leave the cluster", timeout_s=_JOIN_S)
        except (Empty, TimeoutError):
            _log.warning("a call to %s goes on although its store is closed", self._place)
        for lane in self._lanes:
            lane.end()

    @contextmanager
    def _lane(self) -> Generator["_Lane"]:
        """Lend a lane, until its call has ended."""
        try:
            lane = self._idle.get(timeout=self._place.timeout_s)
        except Empty:
            raise TimeoutError(f"all calls to {self._place} are waiting for an answer") from None
        try:
            yield lane
        finally:
            lane.when_idle(self._idle.put)

    def _call(self, lane: "_Lane", what: str, call: Callable[[Any], Sequence[int]]) -> Sequence[int]:
        client = self._joined(lane)
        return lane.call(lambda: call(client), what, timeout_s=self._place.timeout_s)

    def _joined(self, lane: "_Lane") -> Any:
        """Return the client of mooncake, which joins the cluster if it has not."""
        if self._client is None:
            if not self._join_lock.acquire(timeout=self._place.timeout_s):
                raise TimeoutError(f"{self._place} is being joined")
            try:
                if self._client is None:
                    self._client = lane.call(self._join, "join the cluster", timeout_s=_JOIN_S)
            finally:
                self._join_lock.release()
        return self._client

    def _join(self) -> Any:
        from mooncake.store import MooncakeDistributedStore  # pyright: ignore[reportMissingImports]

        place = self._place
        with socket.create_connection((place.master, place.port), timeout=place.timeout_s) as probe:
            host = place.host or probe.getsockname()[0]
        how, master = (place.protocol, place.devices), f"{place.master}:{place.port}"
        # A client that joins keeps the lock of the interpreter until the master answers, for minutes if that has
        # stopped. So another process joins first.
        command = [sys.executable, "-P", "-c", _ASK, host, place.metadata, *how, master]
        try:
            subprocess.run(
                command, check=True, timeout=_JOIN_S, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{place} does not answer") from None
        except subprocess.CalledProcessError:
            raise OSError(f"mooncake could not join the cluster of {place}") from None
        client = MooncakeDistributedStore()
        code = client.setup(host, place.metadata, self._num_bytes, 0, *how, master)
        if code != 0:
            raise OSError(f"mooncake could not join the cluster of {place} (code {code})")
        for rows in (lane.rows for lane in self._lanes):
            code = client.register_buffer(rows.ctypes.data, rows.nbytes)
            if code != 0:
                raise OSError(f"mooncake could not register {rows.nbytes} bytes (code {code})")
        return client

    def _places(self, rows: Bytes, keys: Sequence[bytes]) -> tuple[list[str], list[int], list[int]]:
        """Return the names, addresses and sizes of the first rows of a buffer."""
        first, size = rows.ctypes.data, rows.shape[1]
        names = [self._prefix + key.hex() for key in keys]
        return names, [first + size * index for index in range(len(keys))], [size] * len(keys)

    def _take(self, row: Bytes, key: bytes, pages: Sequence[Bytes]) -> bool:
        """Copy a row into pages; return whether all are what was stored.

        The copies are verified, because a peer that had stopped may still write to the row.
        """
        sum_of = row[self._page_bytes :].tobytes()
        for page in pages:
            page[:] = row[: self._page_bytes]
        return all(checksum(key, page) == sum_of for page in pages)


class _Lane:
    """A thread that makes one call at a time, and a buffer for it.

    Args:
        num_rows: Pages that the buffer has room for.
        row_bytes: Size of a page with its checksum.
    """

    __slots__ = ("_thread", "_work", "rows")

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.rows: Bytes = np.zeros((num_rows, row_bytes), np.uint8)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-mooncake")
        self._work: Future[Any] | None = None  # written by: call

    def call(self, function: Callable[[], _T], what: str, *, timeout_s: float) -> _T:
        """Return what a function returns; TimeoutError if it lasts too long."""
        self._work = work = self._thread.submit(function)
        try:
            return work.result(timeout_s)
        except TimeoutError as error:
            if work.done():
                raise
            raise TimeoutError(f"mooncake did not {what} within {timeout_s:g} s") from error

    def when_idle(self, notify: Callable[["_Lane"], None]) -> None:
        """Call `notify` when the last function has returned."""
        if self._work is None:
            notify(self)
        else:
            self._work.add_done_callback(lambda _: notify(self))

    def end(self) -> None:
        """Let the thread end when it is idle."""
        self._thread.shutdown(wait=False)


def _check(codes: Sequence[int], what: str, harmless: frozenset[int]) -> None:
    """Raise if no page was served, unless pages are missing or there is no room."""
    failed = [code for code in codes if code < 0 and code not in harmless]
    if failed and len(failed) == len(codes):
        raise OSError(f"mooncake could not {what} (code {failed[0]})")
