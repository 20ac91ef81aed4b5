# pyright: basic
# (nixl has no types)
"""Pages in the memory of the engines that have computed them, read by others over NIXL; a Redis server knows where.

Needs `pip install "pagewood-kvpool[nixl]"`, and a server of the Redis protocol.
"""

import logging
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Any
from uuid import uuid4

import numpy as np

from pagewood.kvpool.arrays import check_at_least_one
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.keys import check_sizes
from pagewood.kvpool.tiers.stores.checksum import CHECKSUM_BYTES, checksum
from pagewood.kvpool.tiers.stores.redis import RedisPlace, RedisStore

_log = logging.getLogger(__name__)

_BATCH_BYTES = 8 * 1024 * 1024
"""Pages of one transfer, at most, but at least one page."""
_RECORD = struct.Struct("<16sQ")
"""Where a page is: the owner and its address there."""
_AGENT_BYTES = 64 * 1024
"""Largest size of what others must know of an agent, with its length."""
_POLL_S = 0.0002


class NixlStore:
    """A `pagewood.kvpool.tiers.PageStore` in the memory of the processes that put pages. Thread-safe.

    Invariant: a page is found through its record in the directory, and a record is only a hint. Pages have checksums,
    so one that was overwritten, or is being overwritten, counts as absent; the reader then drops the record.

    The memory is a ring: the oldest pages are overwritten. If a process ends, its pages are lost. A call that fails
    raises OSError; waiting for a transfer of at most 8 MiB, and for an answer of the directory, ends after the
    `timeout_s` of the directory's place.

    NIXL chooses the network; its variables and those of UCX (`UCX_TLS`, `UCX_NET_DEVICES`) say which.
    """

    __slots__ = (
        "_agent", "_agents", "_arena", "_held", "_id", "_landing", "_next", "_page_bytes", "_peers", "_put_lock",
        "_read_lock", "_records", "_self", "_slots", "_timeout_s",
    )  # fmt: skip

    def __init__(
        self, directory: RedisPlace, *, page_bytes: int, num_bytes: int = 1 << 30, fingerprint: bytes = b""
    ) -> None:
        """Make the store; the directory need not answer yet.

        Args:
            directory: Server of the Redis protocol, the same for all. It holds about 200 bytes for each page; give it
                `maxmemory` and `maxmemory-policy allkeys-lru`, because records of lost processes stay.
            page_bytes: Size of a page image, in bytes.
            num_bytes: Memory for pages that this process has put.
            fingerprint: What the pages hold (model, dtype, layout); pages of different fingerprints are kept apart.

        Raises:
            ImportError: NIXL is not installed.
            OSError: NIXL cannot be used here.
            ValueError: `page_bytes` is less than 1, or `num_bytes` less than a page.
        """
        from nixl_cu12._api import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]

        check_at_least_one(page_bytes=page_bytes)
        size = page_bytes + CHECKSUM_BYTES
        if num_bytes < page_bytes:
            raise ValueError(f"num_bytes must be at least page_bytes, {page_bytes}, got {num_bytes}")
        self._page_bytes = page_bytes
        self._timeout_s = directory.timeout_s
        # The size of a page is in the name, because it is not that of a record.
        name = fingerprint + page_bytes.to_bytes(8, "little")
        self._records = RedisStore(directory, page_bytes=_RECORD.size, fingerprint=b"nixl" + name)
        self._agents = RedisStore(directory, page_bytes=_AGENT_BYTES, fingerprint=b"nixl agents")
        self._arena: Bytes = np.zeros((num_bytes // page_bytes, size), np.uint8)
        self._held: list[bytes | None] = [None] * len(self._arena)  # key by slot; written by: _place
        self._slots: dict[bytes, int] = {}  # written by: _place
        self._next = 0  # slot; written by: _place
        self._put_lock = Lock()
        self._landing: Bytes = np.zeros((max(1, _BATCH_BYTES // size), size), np.uint8)
        self._read_lock = Lock()
        """Held around calls of the agent."""
        self._id = uuid4().bytes
        self._peers: set[bytes] = set()  # ids of known agents; written by: _fetch, _knows
        try:
            self._agent: Any = nixl_agent(self._id.hex(), nixl_agent_config(backends=["UCX"]))
            for memory in (self._arena, self._landing):
                self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
            metadata = self._agent.get_agent_metadata()
        except Exception as error:  # NIXL's errors have no common class
            raise OSError(f"NIXL cannot be used here: {error!r}") from error
        if len(metadata) > _AGENT_BYTES - 4:
            raise OSError(f"NIXL describes its agent in {len(metadata)} bytes, more than {_AGENT_BYTES - 4}")
        self._self: Bytes = np.zeros(_AGENT_BYTES, np.uint8)
        self._self[: 4 + len(metadata)] = np.frombuffer(len(metadata).to_bytes(4, "little") + metadata, np.uint8)

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Keep pages in the memory of this process, and announce them.

        Raises:
            OSError: The directory did not answer.
            ValueError: A page or a key has the wrong size.
        """
        check_sizes(keys, pages, self._page_bytes)
        self._agents.put([_agent_key(self._id)], [self._self])  # which the directory may have forgotten
        missing = [index for index, is_there in enumerate(self.exists(keys)) if not is_there]
        with self._put_lock:
            for start in range(0, len(missing), len(self._arena)):
                some = missing[start : start + len(self._arena)]
                placed = self._place([keys[index] for index in some], [pages[index] for index in some])
                self._records.put(
                    list(placed), [_bytes(_RECORD.pack(self._id, address)) for address in placed.values()]
                )

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Read and verify pages.

        Raises:
            OSError: The directory or an owner did not answer in time.
        """
        found = [False] * len(keys)
        by_owner: dict[bytes, list[tuple[int, int]]] = {}  # index and address of each page
        for index, record in enumerate(self._look_up(keys)):
            if record is not None:
                by_owner.setdefault(record[0], []).append((index, record[1]))
        for owner, places in by_owner.items():
            for start in range(0, len(places), len(self._landing)):
                some = places[start : start + len(self._landing)]
                if not self._read_lock.acquire(timeout=self._timeout_s):
                    raise TimeoutError("all time went by in other transfers")
                try:
                    if not self._fetch(owner, [address for _, address in some]):
                        break
                    for row, (index, _) in zip(self._landing, some, strict=False):
                        # The copy is verified, because an owner that had stopped may still write to the row.
                        pages[index][:] = row[: self._page_bytes]
                        sum_of = row[self._page_bytes :].tobytes()
                        found[index] = checksum(keys[index], pages[index]) == sum_of
                finally:
                    self._read_lock.release()
        stale = [keys[index] for places in by_owner.values() for index, _ in places if not found[index]]
        self._records.drop(list(dict.fromkeys(stale)))  # so that an owner that has the page may announce it
        return found

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages have a record of an owner that is not known to be lost.

        Raises:
            OSError: The directory did not answer.
        """
        owners = [None if record is None else record[0] for record in self._look_up(keys)]
        distinct = list({owner for owner in owners if owner is not None})
        are_there = dict(zip(distinct, self._agents.exists(list(map(_agent_key, distinct))), strict=True))
        self._records.drop(
            [key for key, owner in zip(keys, owners, strict=True) if owner is not None and not are_there[owner]]
        )
        return [owner is not None and are_there[owner] for owner in owners]

    def close(self) -> None:
        """Leave; pages in the memory of this process are lost to the others."""
        with suppress(OSError):
            self._agents.drop([_agent_key(self._id)])
        self._agents.close()
        self._records.close()
        del self._agent  # before the memory that it has registered

    def _look_up(self, keys: Sequence[bytes]) -> list[tuple[bytes, int] | None]:
        rows = np.zeros((len(keys), _RECORD.size), np.uint8)
        found = self._records.get(keys, list(rows))
        return [_RECORD.unpack(row.tobytes()) if is_there else None for row, is_there in zip(rows, found, strict=True)]

    def _place(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> dict[bytes, int]:
        """Copy at most as many pages as there are slots into the ring; return their addresses by key.

        A page that the ring has, although the directory has forgotten it, stays where it is, unless the others need
        its slot.

        Raises:
            OSError: The directory did not answer; nothing was copied.
        """
        num_new = sum(key not in self._slots for key in keys)
        ring = [(self._next + n) % len(self._arena) for n in range(num_new)]
        old = [key for slot in ring if (key := self._held[slot]) is not None]
        self._records.drop(old)
        for key in old:
            del self._slots[key]
        self._next = (self._next + num_new) % len(self._arena)
        free, placed = iter(ring), dict[bytes, int]()
        for key, page in zip(keys, pages, strict=True):
            if key not in self._slots:
                slot = next(free, None)
                if slot is None:
                    continue
                self._held[slot], self._slots[key] = key, slot
            row = self._arena[self._slots[key]]
            row[: self._page_bytes] = page
            row[self._page_bytes :] = _bytes(checksum(key, page))
            placed[key] = row.ctypes.data
        return placed

    def _fetch(self, owner: bytes, addresses: Sequence[int]) -> bool:
        """Read pages into the first rows of the landing memory; return False if their owner is lost.

        Raises:
            OSError: The directory did not answer.
            TimeoutError: The owner did not.
        """
        size, first = self._landing.shape[1], self._landing.ctypes.data
        if owner == self._id:
            for row, address in zip(self._landing, addresses, strict=False):
                row[:] = self._arena[(address - self._arena.ctypes.data) // size % len(self._arena)]
            return True
        if not self._knows(owner):
            return False
        until_s, handle = time.monotonic() + self._timeout_s, None
        try:
            here = self._agent.get_xfer_descs([(first + size * n, size, 0) for n in range(len(addresses))], "DRAM")
            there = self._agent.get_xfer_descs([(address, size, 0) for address in addresses], "DRAM")
            handle = self._agent.initialize_xfer("READ", here, there, owner.hex())
            state = self._agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > until_s:
                    raise TimeoutError(f"the owner of pages did not send them within {self._timeout_s:g} s")
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                return True
            reason = f"state {state}"
        except TimeoutError:
            raise
        except Exception as error:  # NIXL's errors have no common class
            reason = repr(error)
        finally:
            if handle is not None:
                with suppress(Exception):  # a transfer that cannot be cancelled
                    self._agent.release_xfer_handle(handle)
        _log.warning("an owner of pages is lost to NIXL: %s", reason)
        self._peers.discard(owner)
        with suppress(Exception):
            self._agent.remove_remote_agent(owner.hex())
        self._agents.drop([_agent_key(owner)])  # if it lives, it announces itself with its next pages
        return False

    def _knows(self, owner: bytes) -> bool:
        """Return whether an owner can be asked; learn of it from the directory."""
        if owner in self._peers:
            return True
        row = np.zeros(_AGENT_BYTES, np.uint8)
        if self._agents.get([_agent_key(owner)], [row]) != [True]:
            return False
        metadata = row[4 : 4 + int.from_bytes(row[:4].tobytes(), "little")].tobytes()
        try:
            self._agent.add_remote_agent(metadata)
        except Exception as error:  # NIXL's errors have no common class
            _log.warning("NIXL cannot reach an owner of pages: %r", error)
            return False
        self._peers.add(owner)
        return True


def _agent_key(owner: bytes) -> bytes:
    return owner.ljust(32, b"\0")


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)
