"""Counters of the tiers' work."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class TierCounters:
    """Numbers of pages since the index was created; a state counts as the pages that it fills.

    Attributes:
        num_demoted: Pages copied from the device to the host.
        num_dropped: Pages evicted from the device without a copy, because of the policy, a full host, or a failed copy.
        num_stored: Pages offered to the stores.
        num_fetched: Pages copied from a store to the host.
        num_loaded: Pages copied from the host to the device and adopted by its cache.
        num_failed: Pages in a copy that failed, in either direction.
    """

    num_demoted: int = 0  # written by: demotion
    num_dropped: int = 0  # written by: demotion
    num_stored: int = 0  # written by: demotion
    num_fetched: int = 0  # written by: recall
    num_loaded: int = 0  # written by: recall
    num_failed: int = 0  # written by: demotion, recall
