"""The conformance suite for prefix caches: tests any implementation of `PrefixCache`.

Needs hypothesis (`pip install pagewood-radixcache[testing]`). In a test module of yours:

    class TestMyCache(conformance_machine(MyCache, page_size=16).TestCase):
        settings = hypothesis.settings(max_examples=200, deadline=None)

Methods beyond the Protocol (`watch`, `release`, `retain`, `limit`, `explain` with `Match.partial`, `attach` with all
that concerns snapshots) are tested too if the cache has them, as `RadixCache` documents them.
"""

from pagewood.radixcache.testing.machine import ManualClock, conformance_machine
from pagewood.radixcache.testing.oracle import Oracle, PageTokens, Prefix
from pagewood.radixcache.testing.protocol import InsertionLike, MatchLike, PrefixCache
from pagewood.radixcache.testing.soaking import soak

__all__ = [
    "InsertionLike",
    "ManualClock",
    "MatchLike",
    "Oracle",
    "PageTokens",
    "Prefix",
    "PrefixCache",
    "conformance_machine",
    "soak",
]
