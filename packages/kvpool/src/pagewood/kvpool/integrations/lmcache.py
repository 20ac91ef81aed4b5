# pyright: basic
# (lmcache has no types)
"""LMCache's storage as a tier: pages behind any of its connectors, such as its server, a file system, Redis or S3.

Needs `pip install lmcache`, and the service that the URL names.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from hashlib import blake2b
from threading import Lock, Thread
from typing import Any, TypeVar

import numpy as np

from pagewood.kvpool.arrays import check_at_least_one
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.keys import check_sizes
from pagewood.kvpool.tiers.stores.checksum import CHECKSUM_BYTES, FORM, checksum

_T = TypeVar("_T")

_ALIGNED_BYTES = 4096
"""LMCache rounds the sizes of what it allocates up to multiples of this."""
_NUM_BUFFERS = 4
"""Pages that a connection has memory for. It needs one; a connector that fails may not free what it has allocated."""


class LMCacheStore:
    """A `pagewood.kvpool.tiers.PageStore` over a connector of LMCache. Thread-safe.

    LMCache decides which pages it forgets; its own server forgets none. Each page is stored with a checksum, so a
    damaged one counts as absent.

    Invariant: a connection is never used again after a call on it has failed, because the rest of an answer may still
    be on its way. The next call connects anew.

    Calls are made one at a time: the connector of LMCache's server has one connection.

    Args:
        url: As LMCache's `remote_url`: `lm://HOST:PORT` (its server), `fs://host:0/FOLDER`, `redis://HOST:PORT`, ...
        page_bytes: Size of a page image, in bytes.
        fingerprint: What the pages hold (model, dtype, layout); pages of different fingerprints are kept apart.
        timeout_s: Seconds after which a call for one page has failed.

    Raises:
        ImportError: LMCache is not installed.
        OSError: The connector cannot be made, for instance because the service does not answer.
        ValueError: `page_bytes` is less than 1, or `timeout_s` is not positive.
    """

    __slots__ = ("_connection", "_lock", "_model", "_page_bytes", "_timeout_s", "_url")

    def __init__(self, url: str, *, page_bytes: int, fingerprint: bytes = b"", timeout_s: float = 10.0) -> None:
        check_at_least_one(page_bytes=page_bytes)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
        self._url = url
        self._page_bytes = page_bytes
        # Short, because a name has at most 150 characters in the protocol of LMCache's server, and the key has 64.
        self._model = f"pagewood-{FORM}-{blake2b(fingerprint, digest_size=16).hexdigest()}-{page_bytes}"
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._connection: _Connection | None = None  # written by: _call, close
        self._call("connect", lambda connection: None)

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Store the pages that are not stored.

        Raises:
            OSError: The store did not answer.
            ValueError: A page or a key has the wrong size.
        """
        check_sizes(keys, pages, self._page_bytes)
        for key, page, is_stored in zip(keys, pages, self.exists(keys), strict=True):
            if not is_stored:
                image = np.concatenate((page, np.frombuffer(checksum(key, page), np.uint8)))
                self._call("store a page", lambda connection, key=key, image=image: connection.put(key, image))

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Fetch and verify pages.

        Raises:
            OSError: The store did not answer.
        """
        answer: list[bool] = []
        image = np.empty(self._page_bytes + CHECKSUM_BYTES, np.uint8)
        for key, page in zip(keys, pages, strict=True):
            found = self._call("fetch a page", lambda connection, key=key: connection.get(key, image))
            if found := found and checksum(key, image[: self._page_bytes]) == image[self._page_bytes :].tobytes():
                page[:] = image[: self._page_bytes]
            answer.append(found)
        return answer

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages are stored.

        Raises:
            OSError: The store did not answer.
        """
        return [self._call("look for a page", lambda connection, key=key: connection.exists(key)) for key in keys]

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _call(self, what: str, call: Callable[["_Connection"], _T]) -> _T:
        """Make a call, on a new connection if the last one has failed."""
        with self._lock:
            try:
                if self._connection is None:
                    size = self._page_bytes + CHECKSUM_BYTES
                    self._connection = _Connection(self._url, self._model, size, timeout_s=self._timeout_s)
                return call(self._connection)
            except ImportError:
                raise
            except Exception as error:  # connectors raise the errors of their libraries, asserts among them
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                raise OSError(f"LMCache at {self._url} could not {what}: {error!r}") from error


class _Connection:
    """A connector of LMCache, and the event loop that it needs, in a thread of its own.

    Images have `num_bytes` bytes. A call that gets no answer may block the thread until the service ends the
    connection; the thread is then left behind.
    """

    __slots__ = ("_backend", "_connector", "_loop", "_model", "_shape", "_timeout_s")

    def __init__(self, url: str, model: str, num_bytes: int, *, timeout_s: float) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig  # pyright: ignore[reportMissingImports]
        from lmcache.v1.memory_allocators.host_memory_allocator import (  # pyright: ignore[reportMissingImports]
            HostMemoryAllocator,
        )
        from lmcache.v1.metadata import LMCacheMetadata  # pyright: ignore[reportMissingImports]
        from lmcache.v1.storage_backend.connector import CreateConnector  # pyright: ignore[reportMissingImports]
        from lmcache.v1.storage_backend.local_cpu_backend import (  # pyright: ignore[reportMissingImports]
            LocalCPUBackend,
        )

        self._model = model
        self._timeout_s = timeout_s
        # To LMCache, a page is the KV of one token with one layer and one head.
        self._shape = torch.Size((1, 1, 1, num_bytes))
        metadata = LMCacheMetadata(
            model_name=model,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 1, 1, 1, num_bytes),
            chunk_size=1,
        )
        config = LMCacheEngineConfig.from_defaults(chunk_size=1, local_cpu=False)
        memory = HostMemoryAllocator(_NUM_BUFFERS * -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES)
        self._backend = LocalCPUBackend(config, metadata, "cpu", memory_allocator=memory)
        self._loop = asyncio.new_event_loop()
        Thread(target=self._run, name="kv-lmcache", daemon=True).start()
        try:
            self._connector = CreateConnector(url, self._loop, self._backend, config, metadata)
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    def put(self, key: bytes, image: Bytes) -> None:
        """Store an image."""
        import torch
        from lmcache.v1.memory_management import MemoryFormat  # pyright: ignore[reportMissingImports]

        memory = self._backend.allocate(self._shape, torch.uint8, MemoryFormat.KV_2LTD)
        np.frombuffer(memory.byte_array, np.uint8)[:] = image
        self._wait(self._connector.put(self._key(key), memory))  # which frees the memory

    def get(self, key: bytes, image: Bytes) -> bool:
        """Fetch an image; return whether there is one."""
        memory = self._wait(self._connector.get(self._key(key)))
        if memory is None:
            return False
        found = np.frombuffer(memory.byte_array, np.uint8)
        if is_whole := found.size == image.size:
            image[:] = found
        memory.ref_count_down()
        return is_whole

    def exists(self, key: bytes) -> bool:
        """Return whether there is an image."""
        return self._wait(self._connector.exists(self._key(key)))

    def close(self) -> None:
        """Disconnect, or leave that to the thread if it is busy; it ends then."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> None:
        try:
            await self._connector.close()
        finally:
            self._loop.stop()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(self._timeout_s)

    def _key(self, key: bytes) -> Any:
        import torch
        from lmcache.utils import CacheEngineKey  # pyright: ignore[reportMissingImports]

        return CacheEngineKey(self._model, 1, 0, int.from_bytes(key, "big"), torch.uint8)
