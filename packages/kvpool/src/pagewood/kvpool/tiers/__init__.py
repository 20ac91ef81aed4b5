"""KV pages outside the device: in host memory, on a disk, in a folder or in memory that several processes share, or on
a server.

Start at `TieredIndex`. These modules need numpy and xxhash; `device_pages` in `pagewood.kvpool.tiers.torch_pages`
connects them to a `KVStorage`.
"""

from pagewood.kvpool.tiers.index import ALL, Hits, TieredIndex
from pagewood.kvpool.tiers.pages.device import ArrayPages, DevicePages, PageHolder
from pagewood.kvpool.tiers.pages.host import HostTier
from pagewood.kvpool.tiers.pages.keys import KeyChain
from pagewood.kvpool.tiers.pages.states import StatePages
from pagewood.kvpool.tiers.stores.breaker import Breaker
from pagewood.kvpool.tiers.stores.disk import DiskTier
from pagewood.kvpool.tiers.stores.folder import SharedFolder
from pagewood.kvpool.tiers.stores.redis import RedisPlace, RedisStore
from pagewood.kvpool.tiers.stores.shared_memory import shared_memory
from pagewood.kvpool.tiers.stores.store import PageStore
from pagewood.kvpool.tiers.tier_log import PagesRemoved, PagesStored, TierLog
from pagewood.kvpool.tiers.transfers.counters import TierCounters
from pagewood.kvpool.tiers.transfers.lane import Lane, Lanes, ThreadLane, thread_lanes
from pagewood.kvpool.tiers.transfers.policy import PrefetchMode, PrefetchPolicy, WritePolicy
from pagewood.kvpool.tiers.transfers.recall import Probe, Recall
from pagewood.kvpool.tiers.transfers.transfer import Transfer, TransferCancelled

__all__ = [
    "ALL",
    "ArrayPages",
    "Breaker",
    "DevicePages",
    "DiskTier",
    "Hits",
    "HostTier",
    "KeyChain",
    "Lane",
    "Lanes",
    "PageHolder",
    "PageStore",
    "PagesRemoved",
    "PagesStored",
    "PrefetchMode",
    "PrefetchPolicy",
    "Probe",
    "Recall",
    "RedisPlace",
    "RedisStore",
    "SharedFolder",
    "StatePages",
    "ThreadLane",
    "TierCounters",
    "TierLog",
    "TieredIndex",
    "Transfer",
    "TransferCancelled",
    "WritePolicy",
    "shared_memory",
    "thread_lanes",
]
