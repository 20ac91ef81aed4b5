"""Follow the content of a cache from another process: events with vLLM's field names, snapshots, a consumer's index.

For example:

    log = EventLog(cache)  # beside the cache
    index = RemoteIndex()  # in another process, for example a router
    index.apply(log.read(index.position))  # first a snapshot, later the events since the last call
    index.match(tokens, namespace)  # the same as cache.peek(tokens, namespace).num_tokens
"""

from pagewood.radixcache.events.event import AllBlocksCleared, BlockRemoved, BlockStored, Event
from pagewood.radixcache.events.hashing import block_hashes
from pagewood.radixcache.events.index import RemoteIndex
from pagewood.radixcache.events.log import EventLog
from pagewood.radixcache.events.router import router_events, router_hash
from pagewood.radixcache.events.update import EventBatch, Position, Snapshot
from pagewood.radixcache.events.wire import from_plain, to_plain

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "EventBatch",
    "EventLog",
    "Position",
    "RemoteIndex",
    "Snapshot",
    "block_hashes",
    "from_plain",
    "router_events",
    "router_hash",
    "to_plain",
]
