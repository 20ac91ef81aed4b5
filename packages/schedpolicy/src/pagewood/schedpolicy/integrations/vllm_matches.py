# pyright: basic, reportMissingImports=false
# (vLLM is not a dependency of this package)
"""Live matches over vLLM's block pool: how many leading blocks of each waiting request are cached now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, make_block_hash_with_group_id

if TYPE_CHECKING:
    from pagewood.schedpolicy.integrations.vllm_queue import QueuedRequest


class LiveMatches:
    """Keeps `QueuedRequest.num_blocks` up to date while blocks enter and leave vLLM's cache.

    A change costs one step for each waiting request that it affects; the other requests cost nothing.

    Invariant: `num_blocks` leading blocks of every open request are cached, and the next one is not. `_held` has the
    cached blocks by their hashes, and `_next` has the next ones.

    Args:
        pool: the block pool; its map of hashes is replaced by one that reports changes.
        block_size: tokens per block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.block_size = block_size
        self._pool = pool
        self._open: dict[int, QueuedRequest] = {}  # by arrival
        self._hashes: dict[int, list[BlockHashWithGroupId]] = {}  # by arrival
        self._held: dict[BlockHashWithGroupId, dict[int, int]] = {}  # arrival to the index of the block
        self._next: dict[BlockHashWithGroupId, set[int]] = {}  # arrivals
        self._changed: dict[int, QueuedRequest] = {}
        self._map = self._install()

    def open(self, request: QueuedRequest) -> None:
        """Match a request, and keep its match up to date until `close`."""
        self._follow_reset()
        hashes = [make_block_hash_with_group_id(block_hash, 0) for block_hash in request.request.block_hashes]
        self._open[request.arrival], self._hashes[request.arrival] = request, hashes
        request.num_blocks = 0
        self._advance(request)

    def close(self, request: QueuedRequest) -> None:
        """Forget a request."""
        del self._open[request.arrival]
        self._truncate(request, 0)
        hashes = self._hashes.pop(request.arrival)
        if hashes:
            self._drop_next(hashes[0], request.arrival)
        self._changed.pop(request.arrival, None)

    def note(self, request: QueuedRequest) -> None:
        """Count an open request as changed."""
        if request.arrival in self._open:
            self._changed[request.arrival] = request

    def changed(self) -> list[QueuedRequest]:
        """Return the open requests whose match has changed since the last call."""
        self._follow_reset()
        changed, self._changed = self._changed, {}
        return list(changed.values())

    def cached(self, block_hash: BlockHashWithGroupId) -> None:
        """Note that a block can be matched now."""
        for arrival in sorted(self._next.pop(block_hash, ())):
            self._advance(self._open[arrival])
            self._changed[arrival] = self._open[arrival]

    def evicted(self, block_hash: BlockHashWithGroupId) -> None:
        """Note that a block cannot be matched any more."""
        for arrival, index in sorted(self._held.get(block_hash, {}).items()):
            self._truncate(self._open[arrival], index)
            self._changed[arrival] = self._open[arrival]

    def _advance(self, request: QueuedRequest) -> None:
        """Count cached blocks from `num_blocks` on, and wait for the first that is not cached."""
        hashes = self._hashes[request.arrival]
        for block_hash in hashes[request.num_blocks :]:
            if self._map.get_one_block(block_hash) is None:
                self._next.setdefault(block_hash, set()).add(request.arrival)
                return
            self._held.setdefault(block_hash, {})[request.arrival] = request.num_blocks
            request.num_blocks += 1

    def _truncate(self, request: QueuedRequest, num_blocks: int) -> None:
        """Shorten a match, and wait for the block that follows it, if there is one."""
        hashes = self._hashes[request.arrival]
        if request.num_blocks < len(hashes):
            self._drop_next(hashes[request.num_blocks], request.arrival)
        for block_hash in hashes[num_blocks : request.num_blocks]:
            holders = self._held[block_hash]
            del holders[request.arrival]
            if not holders:
                del self._held[block_hash]
        request.num_blocks = num_blocks
        if num_blocks < len(hashes):
            self._next.setdefault(hashes[num_blocks], set()).add(request.arrival)

    def _drop_next(self, block_hash: BlockHashWithGroupId, arrival: int) -> None:
        arrivals = self._next.get(block_hash)
        if arrivals is not None:
            arrivals.discard(arrival)
            if not arrivals:
                del self._next[block_hash]

    def _install(self) -> _ReportingMap:
        return _ReportingMap(self._pool, self)

    def _follow_reset(self) -> None:
        """Match everything again after vLLM has replaced its map, which empties the cache."""
        if self._pool.cached_block_hash_to_block is self._map:
            return
        self._map = self._install()
        for request in self._open.values():
            self._truncate(request, 0)
            hashes = self._hashes[request.arrival]
            if hashes:
                self._drop_next(hashes[0], request.arrival)
            self._advance(request)
            self._changed[request.arrival] = request


class _ReportingMap(BlockHashToBlockMap):
    """vLLM's map of hashes to blocks, which reports the first block of a hash that enters and the last that leaves."""

    def __init__(self, pool: BlockPool, matches: LiveMatches) -> None:
        super().__init__()
        self._cache = pool.cached_block_hash_to_block._cache
        self._matches = matches
        pool.cached_block_hash_to_block = self  # not ours

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        is_new = key not in self._cache
        super().insert(key, block)
        if is_new:
            self._matches.cached(key)

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        block = super().pop(key, block_id)
        if block is not None and key not in self._cache:
            self._matches.evicted(key)
        return block
