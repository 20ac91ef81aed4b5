"""The policies that a replay can be run with, by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pagewood.radixcache.cache import RadixCache

CACHES: Mapping[str, Callable[[], RadixCache]] = MappingProxyType({"lru": lambda: RadixCache(1)})
"""Makes an empty cache of page size 1 for each policy of this package that needs no more than a trace."""
