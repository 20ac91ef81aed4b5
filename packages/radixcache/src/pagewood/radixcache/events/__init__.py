"""What a cache holds, followed from elsewhere: events with vLLM's field names, snapshots, and the index of a consumer.

log = EventLog(cache)                      # beside the cache
index = RemoteIndex()                      # in a router, say
index.apply(log.read(index.position))      # a snapshot at first, then what has happened since
index.match(tokens, namespace)             # as cache.peek(tokens, namespace).num_tokens, without the cache
"""

from pagewood.radixcache.events.event import AllBlocksCleared, BlockRemoved, BlockStored, Event
from pagewood.radixcache.events.hashing import block_hashes
from pagewood.radixcache.events.index import RemoteIndex
from pagewood.radixcache.events.log import EventLog
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
    "to_plain",
]
