# pyright: basic, reportMissingImports=false
# (SGLang is not a dependency of this package)
"""SGLang's KV cache events, recorded from the notifications of the tree."""

from array import array
from types import SimpleNamespace

import numpy as np
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey

from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.namespaces import Namespace


def namespace_of(extra_key: str | None, cache_salt: str | None) -> Namespace:
    """Return the namespace of a key of SGLang."""
    return None if extra_key is None and not cache_salt else (extra_key, cache_salt or None)


class EventBridge:
    """An observer of the tree that reports its pages to SGLang's recorder, with SGLang's own hashes.

    Invariant: it remembers the hashes of exactly the pages that are in the tree.

    Args:
        recorder: SGLang's recorder, enabled.
        is_bigram: whether two token ids of the tree stand for a pair of tokens.
    """

    def __init__(self, recorder: KVCacheEventRecorder, *, is_bigram: bool) -> None:
        self._recorder = recorder
        self._is_bigram = is_bigram
        self._hashes: dict[int, tuple[str, str | None]] = {}

    def stored(self, namespace: Namespace, parent_page: int | None, tokens: Int32, pages: Int32) -> None:
        """Report pages that have entered the tree."""
        raw = np.append(tokens[::2], tokens[-1:]) if self._is_bigram else tokens
        parent = self._node(namespace, array("q"), [], None)
        if parent_page is not None:
            parent = self._node(namespace, array("q", [0] * 2), [parent_page], parent)
        node = self._node(namespace, array("q", raw.astype(np.int64).tobytes()), [], parent)
        node.__dict__.update(hash_value=None, event_hash_value=None)  # not ours: the recorder computes them
        self._recorder.record_store(node)
        plain: list[str] = node.hash_value
        hashes = zip(plain, node.event_hash_value or [None] * len(plain), strict=True)
        self._hashes.update(zip(pages.tolist(), hashes, strict=True))

    def removed(self, namespace: Namespace, pages: Int32) -> None:
        """Report pages that have left the tree."""
        num_units = len(pages) * self._recorder.page_size
        raw = array("q", bytes(8 * (num_units + self._is_bigram)))
        parent = self._node(namespace, array("q"), [], None)
        self._recorder.record_remove(self._node(namespace, raw, pages.tolist(), parent))
        for page in pages.tolist():
            del self._hashes[page]

    def cleared(self, namespace: Namespace) -> None:
        """Do nothing: the pages were reported by `removed`."""

    def _node(
        self, namespace: Namespace, raw: "array[int]", pages: list[int], parent: SimpleNamespace | None
    ) -> SimpleNamespace:
        """Return what the recorder reads of a tree node."""
        extra_key, salt = namespace if isinstance(namespace, tuple) else (None, None)
        hashes = [self._hashes[page] for page in pages]
        event_hashes = [event_hash for _, event_hash in hashes if event_hash is not None]
        return SimpleNamespace(
            key=RadixKey(raw, extra_key, is_bigram=self._is_bigram, cache_salt=salt),
            parent=parent,
            hash_value=[plain for plain, _ in hashes],
            event_hash_value=event_hashes or None,
        )
