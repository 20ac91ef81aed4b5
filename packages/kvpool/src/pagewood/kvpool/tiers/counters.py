"""What the tiers have done so far."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class TierCounters:
    """Pages, all of them since the index was made."""

    num_demoted: int = 0
    """Copied from the device to the host."""  # written by: demotion
    num_dropped: int = 0
    """Evicted from the device without a copy, because the policy says so, the host was full or the copy failed."""
    # written by: demotion
    num_stored: int = 0
    """Offered to the stores."""  # written by: demotion
    num_fetched: int = 0
    """Copied from a store to the host."""  # written by: recall
    num_loaded: int = 0
    """Copied from the host to the device, and adopted."""  # written by: recall
    num_failed: int = 0
    """In a copy that failed, either way."""  # written by: demotion, recall
