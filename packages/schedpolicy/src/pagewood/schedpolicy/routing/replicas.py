"""Replicas as the router sees them, and the choice of one of them."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import TypeAlias

from pagewood.schedpolicy.routing.load import ReplicaLoad

ReplicaName: TypeAlias = Hashable
"""What the caller calls a replica: a string, a number."""

_FEW = 32
"""With fewer candidates than this at a level, all are compared; with more, its replicas are searched for the first."""
_LEVEL_TOKENS = 256
"""Loads of one level differ by less than this."""


class Role(Enum):
    """What a replica does."""

    BOTH = "both"
    """Computes prompts and decodes."""
    DECODE = "decode"
    """Decodes; prompts are computed by a replica with the role PREFILL if there is one."""
    PREFILL = "prefill"
    """Computes prompts for replicas with the role DECODE."""


class ReplicaState:
    """One replica.

    Invariant: `placed` has the requests that the router sent here to be answered, by arrival, and `helped` those whose
    prompt it computes for another replica.
    """

    __slots__ = (
        "helped", "is_draining", "is_full", "load", "name", "num_places", "placed", "rank", "role", "slot", "slowness",
    )  # fmt: skip

    def __init__(self, *, name: ReplicaName, slot: int, role: Role, num_places: int, rank: float) -> None:
        """Start without requests; `rank` decides between replicas that are otherwise equal, smallest first."""
        self.name = name
        self.slot = slot
        self.role = role
        self.num_places = num_places
        self.rank = rank
        self.load = ReplicaLoad()
        self.slowness = 1.0  # written by: router
        self.is_full = False  # written by: router
        self.is_draining = False  # written by: router
        self.placed: dict[int, None] = {}  # written by: router
        self.helped: dict[int, None] = {}  # written by: router

    @property
    def is_open(self) -> bool:
        """Whether it has a place for a request."""
        return not self.is_draining and not self.is_full and self.load.num_requests < self.num_places

    def key(self, request_tokens: int) -> float:
        """Return its load in tokens, where a request counts as `request_tokens`, the next one included."""
        load = self.load
        return self.slowness * (load.num_tokens + request_tokens * (load.num_requests + 1))


class Pool:
    """The replicas that have a place, by load.

    Invariant: `_entries` is sorted, and has exactly the replicas for which `is_open` held at their last `refresh`,
    with the load that they had then; `_levels` has the bits of the same replicas, by load divided by `_LEVEL_TOKENS`.
    """

    __slots__ = ("_entries", "_entry_of", "_level_bits", "_levels", "_replicas", "_request_tokens")

    def __init__(self, *, request_tokens: int) -> None:
        """Start empty; a request counts as `request_tokens` tokens besides its prompt."""
        self._request_tokens = request_tokens
        self._entries: list[tuple[float, float, int]] = []  # (load, rank, slot); written by: refresh, remove
        self._entry_of: dict[int, tuple[float, float, int]] = {}  # by slot; written by: refresh, remove
        self._replicas: dict[int, ReplicaState] = {}  # by slot; written by: refresh, remove
        self._level_bits: dict[int, int] = {}  # bits of the slots, by level; written by: refresh, remove
        self._levels: list[int] = []  # keys of `_level_bits`, sorted; written by: refresh, remove

    def __len__(self) -> int:
        """Return how many replicas have a place."""
        return len(self._entries)

    def refresh(self, replica: ReplicaState) -> None:
        """Sort a replica in again after a change of its load or state."""
        slot = replica.slot
        entry = (replica.key(self._request_tokens), replica.rank, slot) if replica.is_open else None
        if entry == self._entry_of.get(slot):
            return
        self.remove(replica)
        if entry is not None:
            insort(self._entries, entry)
            self._entry_of[slot] = entry
            self._replicas[slot] = replica
            level = int(entry[0] // _LEVEL_TOKENS)
            if level not in self._level_bits:
                insort(self._levels, level)
            self._level_bits[level] = self._level_bits.get(level, 0) | 1 << slot

    def remove(self, replica: ReplicaState) -> None:
        """Take a replica out, if it is here."""
        entry = self._entry_of.pop(replica.slot, None)
        if entry is not None:
            del self._entries[bisect_left(self._entries, entry)]
            del self._replicas[replica.slot]
            level = int(entry[0] // _LEVEL_TOKENS)
            self._level_bits[level] ^= 1 << replica.slot
            if not self._level_bits[level]:
                del self._level_bits[level], self._levels[bisect_left(self._levels, level)]

    def best(
        self, runs: Sequence[tuple[int, int]], *, block_size: int, num_tokens: int, max_excess: float
    ) -> tuple[ReplicaState, int] | None:
        """Return the replica that would begin to decode a request first, and the tokens of it that are cached there.

        It is the one with the least `load + num_tokens - cached tokens` of those whose load exceeds the least by
        `max_excess` at most; between equal ones the rank decides. So its load never exceeds the least by more than the
        tokens that it saves.

        The cost, for R replicas with a place, is O(log R) for the least loaded, and for each length of a cached prefix,
        longest first, as long as it can still win: an AND of R bits for each level of load below the first replica with
        that prefix, and about sqrt(R) steps within its level.

        Args:
            runs: What `PrefixIndex.runs` returned.
            block_size: Tokens per block.
            num_tokens: Tokens of the request.
            max_excess: Load in tokens.

        Returns:
            None if no replica has a place.
        """
        entries = self._entries
        if not entries:
            return None
        least, rank, slot = entries[0]
        best_cached = next((num for num, bits in runs if bits >> slot & 1), 0) * block_size
        best = (least + (num_tokens - min(best_cached, num_tokens)), rank, slot)
        limit = least + max_excess
        for num_blocks, bits in runs:
            num_cached = num_blocks * block_size
            rest = num_tokens - min(num_cached, num_tokens)
            if least + rest > best[0]:
                break
            found = self._least_of(bits, limit)
            if found is not None:
                candidate = (found[0] + rest, found[1], found[2])
                if candidate < best:
                    best, best_cached = candidate, num_cached
        return self._replicas[best[2]], min(best_cached, num_tokens)

    def _least_of(self, bits: int, limit: float) -> tuple[float, float, int] | None:
        """Return the least loaded replica of `bits`; None if its load exceeds the limit."""
        entry_of = self._entry_of
        for level in self._levels:
            if level * _LEVEL_TOKENS > limit:
                return None
            here = bits & self._level_bits[level]
            if not here:
                continue
            if here.bit_count() < _FEW:
                found = entry_of[here.bit_length() - 1]
                while here:
                    low = here & -here
                    found = min(found, entry_of[low.bit_length() - 1])
                    here ^= low
            else:
                entries = self._entries
                place = bisect_left(entries, (level * _LEVEL_TOKENS,))
                while not here >> entries[place][2] & 1:
                    place += 1
                found = entries[place]
            return found if found[0] <= limit else None
        return None
