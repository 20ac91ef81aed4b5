"""The conformance suite: what a prefix cache must do, for any implementation of `PrefixCache`.

Needs hypothesis (`pip install pagewood-radixcache[testing]`). In a test module of your own:

    class TestMyCache(conformance_machine(MyCache, page_size=16).TestCase):
        settings = hypothesis.settings(max_examples=200, deadline=None)

What a cache has beyond the Protocol (`watch`, `release`, `retain`, `limit`, `explain` with `Match.partial`) is tested
too, as `RadixCache` documents it; what it lacks is not asked for.
"""

from pagewood.radixcache.testing.machine import ManualClock, conformance_machine, soak
from pagewood.radixcache.testing.oracle import Oracle, PageTokens, Prefix
from pagewood.radixcache.testing.protocol import InsertionLike, MatchLike, PrefixCache

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
