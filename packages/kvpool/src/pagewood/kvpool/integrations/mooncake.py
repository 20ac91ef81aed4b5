# pyright: basic
# (mooncake has no types)
"""Mooncake Store as a tier: pages in the memory of several machines, found by all of them.

Needs `pip install mooncake-transfer-engine` (or `mooncake-transfer-engine-non-cuda`) and a running `mooncake_master`.
"""

from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numpy as np

from pagewood.kvpool.arrays import check_at_least_one
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.keys import require_keys
from pagewood.kvpool.tiers.stores.checksum import CHECKSUM_BYTES, FORM, checksum

_NUM_BUFFERS = 2
_BUFFER_BYTES = 16 * 1024 * 1024
_GONE = frozenset((-703, -704, -706))
"""Codes of mooncake for a page that is not there, is not complete yet, or was being removed."""
_FULL = -200
"""Code of mooncake: there is no room, and nothing could be evicted."""


class MooncakeStore:
    """A `pagewood.kvpool.tiers.PageStore` over a `MooncakeDistributedStore`. Thread-safe.

    Mooncake decides which pages it forgets. Each page is stored with a checksum, so a damaged one counts as absent.

    Source: the transfer engine reads and writes registered memory only, so pages pass through buffers of this class.

    Args:
        store: on which `setup` has succeeded; `close` closes it.
        page_bytes: size of a page image, in bytes.
        fingerprint: what the pages hold (model, dtype, layout); pages of different fingerprints are kept apart.

    Raises:
        ValueError: `page_bytes` is less than 1.
        OSError: memory could not be registered.
    """

    __slots__ = ("_buffers", "_idle", "_page_bytes", "_prefix", "_store")

    def __init__(self, store: Any, *, page_bytes: int, fingerprint: bytes = b"") -> None:
        check_at_least_one(page_bytes=page_bytes)
        self._store = store
        self._page_bytes = page_bytes
        self._prefix = f"pagewood-{FORM}-{fingerprint.hex() or 'any'}-{page_bytes}-"
        size = page_bytes + CHECKSUM_BYTES
        self._buffers: list[Bytes] = [
            np.zeros((max(1, _BUFFER_BYTES // size), size), np.uint8) for _ in range(_NUM_BUFFERS)
        ]
        self._idle: SimpleQueue[Bytes] = SimpleQueue()
        for buffer in self._buffers:
            code = store.register_buffer(buffer.ctypes.data, buffer.nbytes)
            if code != 0:
                raise OSError(f"mooncake could not register {buffer.nbytes} bytes (code {code})")
            self._idle.put(buffer)

    @classmethod
    def connect(
        cls,
        master: str,
        *,
        page_bytes: int,
        fingerprint: bytes = b"",
        host: str = "127.0.0.1",
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        num_bytes: int = 1 << 30,
    ) -> "MooncakeStore":
        """Join a cluster and return its store.

        Args:
            master: `host:port` of `mooncake_master`.
            page_bytes: see the class.
            fingerprint: see the class.
            host: address under which the other machines reach this one.
            metadata: server of metadata; by default machines ask each other.
            protocol: "tcp" or "rdma".
            devices: of RDMA.
            num_bytes: memory that this process gives to the cluster; 0: none.

        Raises:
            ImportError: mooncake is not installed.
            OSError: the master does not answer.
        """
        from mooncake.store import MooncakeDistributedStore  # pyright: ignore[reportMissingImports]

        store = MooncakeDistributedStore()
        code = store.setup(host, metadata, num_bytes, 2 * _BUFFER_BYTES, protocol, devices, master)
        if code != 0:
            raise OSError(f"mooncake could not join the cluster of {master} (code {code})")
        return cls(store, page_bytes=page_bytes, fingerprint=fingerprint)

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Store pages; those for which there is no room are left out.

        Raises:
            OSError: the store did not answer.
            ValueError: a page or a key has the wrong size.
        """
        require_keys(keys)
        for page in pages:
            if page.nbytes != self._page_bytes:
                raise ValueError(f"pages must have {self._page_bytes} bytes, got {page.nbytes}")
        found = self.exists(keys)
        missing = [index for index, is_there in enumerate(found) if not is_there]
        buffer = self._idle.get()
        try:
            for start in range(0, len(missing), len(buffer)):
                indices = missing[start : start + len(buffer)]
                for row, index in zip(buffer, indices, strict=False):
                    row[: self._page_bytes] = pages[index]
                    sum_of = checksum(keys[index], row[: self._page_bytes])
                    row[self._page_bytes :] = np.frombuffer(sum_of, np.uint8)
                codes = self._store.batch_put_from(*self._places(buffer, [keys[index] for index in indices]))
                _check(codes, "store pages", {_FULL})
        finally:
            self._idle.put(buffer)

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Fetch and verify pages.

        Raises:
            OSError: the store did not answer.
        """
        places: dict[bytes, list[Bytes]] = {}  # each key once: mooncake fills one of the places of a repeated key
        for key, page in zip(keys, pages, strict=True):
            places.setdefault(key, []).append(page)
        distinct = list(places)
        found: set[bytes] = set()
        buffer = self._idle.get()
        try:
            for start in range(0, len(distinct), len(buffer)):
                some = distinct[start : start + len(buffer)]
                codes = self._store.batch_get_into(*self._places(buffer, some))
                _check(codes, "fetch pages", _GONE)
                for row, key, code in zip(buffer, some, codes, strict=False):
                    image, sum_of = row[: self._page_bytes], row[self._page_bytes :]
                    if code == buffer.shape[1] and checksum(key, image) == sum_of.tobytes():
                        found.add(key)
                        for page in places[key]:
                            page[:] = image
        finally:
            self._idle.put(buffer)
        return [key in found for key in keys]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages are stored.

        Raises:
            OSError: the store did not answer.
        """
        if not keys:
            return []
        codes = self._store.batch_is_exist([self._prefix + key.hex() for key in keys])
        _check(codes, "look for pages", _GONE)
        return [code == 1 for code in codes]

    def close(self) -> None:
        """Leave the cluster; pages in the memory of this process are lost to the others."""
        for buffer in self._buffers:
            with suppress(Exception):
                self._store.unregister_buffer(buffer.ctypes.data)
        self._store.close()

    def _places(self, buffer: Bytes, keys: Sequence[bytes]) -> tuple[list[str], list[int], list[int]]:
        """Return the names, addresses and sizes of the first rows of a buffer."""
        first, size = buffer.ctypes.data, buffer.shape[1]
        names = [self._prefix + key.hex() for key in keys]
        return names, [first + size * index for index in range(len(keys))], [size] * len(keys)


def _check(codes: Sequence[int], what: str, harmless: frozenset[int] | set[int]) -> None:
    """Raise if no page was served, unless pages are missing or there is no room."""
    failed = [code for code in codes if code < 0 and code not in harmless]
    if failed and len(failed) == len(codes):
        raise OSError(f"mooncake could not {what} (code {failed[0]})")
