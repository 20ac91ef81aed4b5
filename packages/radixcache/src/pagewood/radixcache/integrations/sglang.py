# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# (SGLang and torch are not dependencies of this package)
"""The prefix cache as a radix-cache backend of SGLang: `--radix-cache-backend pagewood`.

Written for SGLang 0.5.23. The distribution declares `register` as an SGLang plugin, so installing it is enough.
"""

import time
from array import array
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    register_radix_cache_backend,
    registered_radix_cache_backends,
)

from pagewood.radixcache import FIFO, FILO, LFU, LRU, MRU, SLRU, RadixCache, Retained
from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.integrations.depth_first import depth_first_by_weight
from pagewood.radixcache.integrations.sglang_events import EventBridge, namespace_of
from pagewood.radixcache.integrations.slot_table import SlotTable
from pagewood.radixcache.namespaces import Namespace
from pagewood.radixcache.node import Node

NAME = "pagewood"
_POLICIES = {"lru": LRU, "lfu": LFU, "fifo": FIFO, "filo": FILO, "mru": MRU, "slru": SLRU, "priority": None}
_LARGEST_ID = np.iinfo(np.int32).max


def register() -> None:
    """Register the backend, so that SGLang accepts `--radix-cache-backend pagewood`; SGLang calls it as a plugin."""
    if NAME not in registered_radix_cache_backends():
        register_radix_cache_backend(NAME, from_context)


def from_context(context: TreeCacheBuildContext) -> "PagewoodRadixCache":
    """Build the cache of an SGLang scheduler.

    Raises:
        ValueError: the model or the server needs what this cache does not have: sliding windows or recurrent states
            in the tree, a hierarchical cache, or a disabled cache.
    """
    refused = {
        "--disable-radix-cache": context.disable_radix_cache,
        "--enable-hierarchical-cache": context.enable_hierarchical_cache,
        "a model with sliding-window layers": context.is_hybrid_swa,
        "a model with recurrent layers": context.is_hybrid_ssm,
    }
    for name, is_used in refused.items():
        if is_used:
            raise ValueError(f"--radix-cache-backend {NAME} must not be used with {name}")
    return PagewoodRadixCache(context.params)


class Prefix:
    """A cached prefix, as SGLang holds it in `last_node` and in locks.

    Invariant: `pages` are the numbers of all pages of the prefix that `node` stands for.
    """

    __slots__ = ("node", "pages")

    def __init__(self, node: Node, pages: Int32) -> None:
        self.node = node
        self.pages = pages

    def __repr__(self) -> str:
        return f"Prefix({self.node!r})"


class PagewoodRadixCache(BasePrefixCache):
    """A `pagewood.radixcache.RadixCache` behind SGLang's interface.

    Invariant: the tree holds one page number for each page of KV that SGLang has given to this cache and not got back;
    the slots of these pages are in a `SlotTable` on the device.

    Eviction is exact to the page. A running request inserts only the tokens after its lock, and no method waits for the
    device. With bigram keys (EAGLE) a unit of the key is a pair of tokens, which the tree sees as two token ids.

    Args:
        params: SGLang's arguments. `eviction_policy` may be lru, lfu, fifo, filo, mru, slru or priority.

    Raises:
        ValueError: the policy is unknown, or `eviction_policy_config` has an argument that it does not take.
    """

    def __init__(self, params: CacheInitParams) -> None:
        self.disable = params.disable
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.is_eagle = params.is_eagle
        self.eviction_policy = params.eviction_policy.lower()
        self._policy_config = dict(params.eviction_policy_config or {})
        self.device = torch.device(getattr(params.token_to_kv_pool_allocator, "device", None) or "cpu")
        self.kv_events = KVCacheEventRecorder(
            enabled=params.enable_kv_cache_events and not self.disable,
            page_size=self.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        if params.enable_metrics:
            self.init_metrics_collector()
        self._ids_per_unit = 2 if self.is_eagle else 1
        self.reset()

    @property
    def root_node(self) -> Prefix:
        """The empty prefix of the namespace without a name."""
        return self.root_node_handle()

    def root_node_handle(self, extra_key: str | None = None) -> Prefix:
        """Return the empty prefix of a namespace."""
        return self._root(namespace_of(extra_key, None))

    def reset(self) -> None:
        """Forget everything; the pages are not freed, because SGLang clears its allocator as well."""
        size = getattr(self.token_to_kv_pool_allocator, "size", 0)
        num_pages = size // self.page_size + 1 if isinstance(size, int) else 1
        self.tree = RadixCache(self.page_size * self._ids_per_unit, policy=self._make_policy())
        self._slots = SlotTable(num_pages, self.page_size, dtype=torch.int64, device=self.device)
        if self.kv_events.enabled:
            self.tree.observe(EventBridge(self.kv_events, is_bigram=self.is_eagle))
        self.kv_events.record_all_cleared()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return the longest cached prefix of a key, and count it as used."""
        key = params.key
        namespace = namespace_of(key.extra_key, key.cache_salt)
        if self.disable:
            return self._result(self._root(namespace))
        match = self.tree.match(self._ids(key), namespace)
        return self._result(Prefix(match.node, match.pages))

    def touch_prefix(self, key: RadixKey) -> None:
        """Count the longest cached prefix of a key as used."""
        if not self.disable:
            self.tree.match(self._ids(key), namespace_of(key.extra_key, key.cache_salt))

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert the whole pages of a key; the slots of pages that the tree had already still belong to the caller."""
        if self.disable:
            return InsertResult(prefix_len=0)
        key, value = params.key, params.value
        ids = self._ids(key)
        num_tokens = len(ids) // self.tree.page_size * self.page_size
        if value is None:  # as in SGLang's own trees, for tests
            value = torch.tensor(key.token_ids[:num_tokens], dtype=torch.int64)
        start = self._root(namespace_of(key.extra_key, key.cache_salt))
        num_existing, prefix = self._insert_after(start, ids, value[:num_tokens], params.priority or 0)
        return InsertResult(prefix_len=num_existing, total_len=num_tokens, last_device_node=prefix)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert the KV of a request up to a position, and let the request continue on the tree's pages."""
        if self.disable:
            return
        kv = req.kv
        locked = req.lock.node if req.lock else self._root(namespace_of(req.extra_key, req.cache_salt))
        start = len(locked.pages) * self.page_size
        new = RadixKey(req.full_untruncated_fill_ids[start:up_to], is_bigram=self.is_eagle)
        ids = self._ids(new)
        end = start + len(ids) // self.tree.page_size * self.page_size
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
        num_existing, prefix = self._insert_after(locked, ids, row[start:end], req.priority or 0)
        protected = kv.cache_protected_len
        known = start + num_existing
        if known > protected:  # the tree has other pages for these tokens; the row holds the tree's pages elsewhere
            self.token_to_kv_pool_allocator.free_segment(row[protected:known], start_pos=protected)
            slots = self._slots.slots(prefix.pages[protected // self.page_size : known // self.page_size])
            self.req_to_token_pool.write((kv.req_pool_idx, slice(protected, known)), slots.to(row.dtype))
        kv.cache_inserted_len = max(kv.cache_inserted_len, end)  # not ours
        kv.cache_protected_len = end  # not ours
        lock = self.lock(prefix)
        self.unlock(req.lock)
        req.lock, req.last_node = lock, prefix  # not ours

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict pages, and free their slots; SGLang asks for tokens, and whole pages are evicted."""
        if self.disable or params.num_tokens <= 0:
            return EvictResult()
        started = time.perf_counter()
        pages = self.tree.evict(-(-params.num_tokens // self.page_size))
        num_evicted = len(pages) * self.page_size
        if num_evicted:
            self.token_to_kv_pool_allocator.free_segment(self._slots.slots(pages), start_pos=0)
            self._slots.remove(pages)
        self.update_eviction_metrics(num_evicted, started)
        return EvictResult(num_tokens_evicted=num_evicted)

    def inc_lock_ref(self, node: Prefix) -> IncLockRefResult:
        """Lock a prefix; `delta` is the change of `evictable_size`."""
        if self.disable:
            return IncLockRefResult(delta=0)
        before = self.tree.num_locked
        self.tree.lock(node.node)
        return IncLockRefResult(delta=(before - self.tree.num_locked) * self.page_size)

    def dec_lock_ref(self, node: Prefix, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Undo one `inc_lock_ref` of a prefix."""
        if self.disable:
            return DecLockRefResult(delta=0)
        before = self.tree.num_locked
        self.tree.unlock(node.node)
        return DecLockRefResult(delta=(before - self.tree.num_locked) * self.page_size)

    def path_device_indices(self, node: Prefix) -> torch.Tensor:
        """Return the slots of a prefix, `[num_tokens] int64`, on the device."""
        return self._slots.slots(node.pages)

    def dfs_weight_order(self, node_handles: Any) -> list[int]:
        """Return request indices depth first, the branches with the most requests first."""
        return depth_first_by_weight([(node.node.namespace, node.pages) for node in node_handles])

    def supports_prefix_sharing(self) -> bool:
        """Whether the cache is on."""
        return not self.disable

    def evictable_size(self) -> int:
        """Return the number of tokens in unlocked pages."""
        return (self.tree.num_pages - self.tree.num_locked) * self.page_size

    def protected_size(self) -> int:
        """Return the number of tokens in locked pages."""
        return self.tree.num_locked * self.page_size

    def full_evictable_size(self) -> int:
        """Return `evictable_size`: all layers attend to all tokens."""
        return self.evictable_size()

    def full_protected_size(self) -> int:
        """Return `protected_size`: all layers attend to all tokens."""
        return self.protected_size()

    def total_size(self) -> int:
        """Return the number of cached tokens."""
        return self.tree.num_pages * self.page_size

    def all_values_flatten(self) -> torch.Tensor:
        """Return the slots of everything that is cached."""
        pages = [run.pages for run in self.tree.runs()]
        return self._slots.slots(np.concatenate(pages) if pages else np.empty(0, np.int32))

    def sanity_check(self) -> None:
        """Verify every invariant of the tree, and that each of its pages has one row of slots.

        Raises:
            AssertionError: an invariant does not hold.
        """
        self.tree.check()
        assert self._slots.num_used == self.tree.num_pages, (self._slots.num_used, self.tree.num_pages)

    def pretty_print(self) -> None:
        """Print the tree."""
        print(self.tree.dump())
        print(f"#tokens: {self.total_size()}")

    def _make_policy(self) -> Any:
        config = dict(self._policy_config)
        if self.eviction_policy not in _POLICIES:
            raise ValueError(f"eviction_policy must be one of {', '.join(_POLICIES)}, got {self.eviction_policy!r}")
        policy = _POLICIES[self.eviction_policy]
        if policy is SLRU and "protected_threshold" in config:
            return SLRU(protected_uses=config.pop("protected_threshold"))
        if config:
            raise ValueError(f"eviction_policy_config must be empty for {self.eviction_policy}, got {config}")
        return policy() if policy else Retained(LRU())

    def _root(self, namespace: Namespace) -> Prefix:
        return Prefix(self.tree.root(namespace), np.empty(0, np.int32))

    def _result(self, prefix: Prefix) -> MatchResult:
        num_tokens = len(prefix.pages) * self.page_size
        return MatchResult(
            device_prefix_len=num_tokens, last_device_node=prefix, last_host_node=prefix, best_match_node=prefix
        )

    def _ids(self, key: RadixKey) -> Int32:
        """Return the units of a key as token ids of the tree, `[num_units * ids_per_unit] int32`."""
        key, _ = key.maybe_to_bigram_view(self.is_eagle)
        raw = key.raw_token_ids()
        tokens = np.frombuffer(raw, np.int64) if isinstance(raw, array) else np.array(raw, np.int64)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) <= _LARGEST_ID:
            raise ValueError(f"token ids must be in [0, {_LARGEST_ID}], got {int(tokens.min())}, {int(tokens.max())}")
        ids = tokens.astype(np.int32)
        return np.stack((ids[:-1], ids[1:]), axis=1).ravel() if self.is_eagle else ids

    def _insert_after(self, start: Prefix, ids: Int32, slots: torch.Tensor, priority: int) -> tuple[int, Prefix]:
        """Insert whole pages that follow a prefix; return the number of tokens that were there, and the new prefix."""
        numbers = self._slots.add(slots)
        insertion = self.tree.insert(ids, numbers, after=start.node)
        self._slots.remove(numbers[: insertion.num_existing])
        if self.eviction_policy == "priority":
            self.tree.retain(insertion.node, priority=priority)
        pages = np.concatenate((start.pages, insertion.pages)) if len(start.pages) else insertion.pages
        return insertion.num_existing * self.page_size, Prefix(insertion.node, pages)
