"""Which replicas hold which blocks of KV, from their own events."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

from pagewood.schedpolicy.counts import require_count

BlockHash: TypeAlias = int | bytes
"""Name of a block of tokens and of everything before it, as the replicas name it in their events."""

MAX_BLOCKS = 4_000_000
"""Default bound of the blocks that are remembered."""
_DEVICE = (None, "GPU")
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: products with it spread numbers that follow each other."""
_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


class PrefixIndex:
    """The blocks of each replica, found by their hash.

    A replica is a small number here, its *slot*: the replicas that hold a block are the bits of one integer. So a match
    against all replicas is one look-up for each leading block that any replica holds, whatever their number.

    Events are numbered, and each batch says which numbers it has. If numbers are missing, the replica holds nothing
    until `restore`, because a block that it may have evicted must not attract requests.

    Only blocks on the device count: those of lower tiers (`medium` CPU or STORAGE) are passed over.

    If there are more than `max_blocks`, the slot with the most is *thinned*: from then on every other of its blocks is
    remembered, or every fourth, and so on; which ones follows from their names. A match skips what is not remembered,
    so it ends at the last remembered block before the true end. Long prefixes are still found, on all replicas;
    prefixes of a few blocks may not be. A slot that becomes empty, as before a snapshot, starts again with all blocks.

    Invariant: while a slot is in sync, its blocks are exactly those of its events whose rank is at least its level.
    `_holders` has a bit for each block of `_held`, and no other bits. There are at most `max_blocks`.
    """

    __slots__ = (
        "_bits", "_block_size", "_held", "_holders", "_levels", "_max_blocks", "_positions", "_skips", "num_blocks",
        "num_changes",
    )  # fmt: skip

    def __init__(self, *, block_size: int, max_blocks: int = MAX_BLOCKS) -> None:
        """Start without replicas.

        Args:
            block_size: Tokens per block, >= 1.
            max_blocks: Blocks of all replicas together that are remembered, >= 1. Each takes about 150 bytes. If the
                replicas have more, one of two is remembered, or of four, and so on.

        Raises:
            ValueError: An argument is out of range.
        """
        self._block_size = require_count("block_size", block_size, least=1)
        self._max_blocks = require_count("max_blocks", max_blocks, least=1)
        self._holders: dict[BlockHash, int] = {}  # bits of the slots that hold a block; written by: _store, _remove
        self._held: dict[int, set[BlockHash]] = {}  # by slot; written by: open, close, _store, _remove, _clear, _thin
        # By thinned slot, >= 1: half of the blocks have rank 0, a quarter rank 1; written by: _clear, _thin.
        self._levels: dict[int, int] = {}
        # Bits of the slots that do not remember blocks, by their rank; written by: _clear, _thin.
        self._skips: dict[int, int] = {}
        self._bits: dict[int, int] = {}  # by slot, one object for each bit; written by: open, close
        self._positions: dict[int, int | None] = {}  # number of the next event; written by: open, close, apply, restore
        self.num_blocks = 0
        """Blocks of all replicas together."""  # written by: PrefixIndex
        self.num_changes = 0
        """Counts changes: as long as it is the same, `runs` returns the same."""  # written by: PrefixIndex

    @property
    def spacing(self) -> int:
        """Blocks of which one is remembered, of the replica where that is most: 1 as long as all are remembered."""
        return 1 << max(self._levels.values(), default=0)

    def open(self, slot: int, *, position: int | None = 0) -> None:
        """Follow a new replica, which holds nothing.

        Args:
            slot: Its number, >= 0 and small.
            position: Number of its first event; None if it is unknown what it holds, until `restore`.

        Raises:
            ValueError: The slot is in use.
        """
        require_count("slot", slot, least=0)
        if slot in self._held:
            raise ValueError(f"slot must be free, got {slot}")
        if position is not None:
            require_count("position", position, least=0)
        self._held[slot] = set()
        self._bits[slot] = 1 << slot
        self._positions[slot] = position

    def close(self, slot: int) -> None:
        """Forget a replica."""
        self._clear(slot)
        del self._held[slot], self._bits[slot], self._positions[slot]

    def position(self, slot: int) -> int | None:
        """Return the number of the event that comes next; None if only a snapshot helps."""
        return self._positions[slot]

    def least_rank(self, slot: int) -> int:
        """Return the rank below which no block of a replica is remembered."""
        return self._levels.get(slot, 0)

    def apply(self, slot: int, start: int, end: int, events: Iterable[object]) -> bool:
        """Follow the events [start, end) of a replica.

        Known events are ignored. After a gap, or if only some of the events are known, the replica holds nothing until
        `restore`.

        Args:
            slot: The replica.
            start: Number of the first event, or of the batch where batches are numbered.
            end: Number after the last.
            events: Events of vLLM's form, as maps or as arrays; see `events.router_events` of pagewood-radixcache.

        Returns:
            Whether the index is in sync with the replica.

        Raises:
            ValueError: An event has another form or block size; then the replica holds nothing until `restore`.
        """
        position = self._positions[slot]
        if position is None or end <= position:
            return position is not None
        if start != position:
            self.lose(slot)
            return False
        try:
            for event in events:
                self._follow(slot, event)
        except ValueError:
            self.lose(slot)
            raise
        self._positions[slot] = end
        return True

    def restore(self, slot: int, position: int, hashes: Iterable[BlockHash]) -> None:
        """Replace what is known of a replica by everything that it holds.

        Args:
            slot: The replica.
            position: Number of the first event that the snapshot does not contain.
            hashes: Its blocks.
        """
        require_count("position", position, least=0)
        self._clear(slot)
        self._store(slot, hashes)
        self._positions[slot] = position

    def lose(self, slot: int) -> None:
        """Treat a replica as empty until `restore`: its events do not fit, or its log has been replaced."""
        self._clear(slot)
        self._positions[slot] = None

    def runs(self, hashes: Sequence[BlockHash]) -> list[tuple[int, int]]:
        """Return how many leading blocks the replicas hold: pairs of a number and the bits of those with at least it.

        The largest number is first. Each pair has more bits than the one before it. Replicas without the first block
        are in none.
        """
        if self._skips:
            return self._thinned_runs(hashes)
        holders = self._holders
        runs: list[tuple[int, int]] = []
        bits, num_blocks = -1, 0
        for name in hashes:
            here = holders.get(name)
            if here is None:
                break
            if here is not bits:
                both = bits & here
                if not both:
                    break
                if both != bits:
                    if num_blocks:
                        runs.append((num_blocks, bits))
                    bits = both
            num_blocks += 1
        if num_blocks:
            runs.append((num_blocks, bits))
        runs.reverse()
        return runs

    def _thinned_runs(self, hashes: Sequence[BlockHash]) -> list[tuple[int, int]]:
        """Return the same, where a slot may lack a block because it does not remember it."""
        holders, skips = self._holders, self._skips
        found: list[tuple[int, int]] = []
        bits = -1
        for num_blocks, name in enumerate(hashes, 1):
            here = holders.get(name, 0)
            if bits & here:
                found.append((num_blocks, bits & here))
            bits &= here | skips.get(rank(name), 0)
            if not bits:
                break
        runs: list[tuple[int, int]] = []
        bits = 0
        for num_blocks, here in reversed(found):
            if here | bits != bits:
                bits |= here
                runs.append((num_blocks, bits))
        return runs

    def blocks(self, slot: int) -> frozenset[BlockHash]:
        """Return the remembered blocks of a replica, for tests and displays."""
        return frozenset(self._held[slot])

    def _follow(self, slot: int, event: object) -> None:
        name, fields = _fields_of(event)
        if name == "AllBlocksCleared":
            self._clear(slot)
            return
        hashes, medium = fields.get("block_hashes"), fields.get("medium")
        if not isinstance(hashes, (list, tuple)) or not {*map(type, cast("list[object]", hashes))} <= {int, bytes}:
            raise ValueError(f"block_hashes must be a list of ints or bytes, got {hashes!r:.80}")
        block_size = fields.get("block_size", self._block_size)
        if block_size != self._block_size:
            raise ValueError(f"block_size must be {self._block_size}, got {block_size!r:.80}")
        if medium in _DEVICE:
            names = cast("list[BlockHash]", hashes)
            if name == "BlockStored":
                self._store(slot, names)
            else:
                self._remove(slot, names)

    def _store(self, slot: int, hashes: Iterable[BlockHash]) -> None:
        self.num_changes += 1
        held, holders, bit, level = self._held[slot], self._holders, self._bits[slot], self._levels.get(slot)
        for name in hashes:
            if name in held or (level and rank(name) < level):
                continue
            held.add(name)
            self.num_blocks += 1
            others = holders.get(name)
            holders[name] = bit if others is None else others | bit
            if self.num_blocks > self._max_blocks:
                self._thin()
                held, level = self._held[slot], self._levels.get(slot)

    def _thin(self) -> None:
        """Forget half of the blocks of the slot that has most, at least one."""
        slot = max(self._held, key=lambda slot: len(self._held[slot]))
        held, level = self._held[slot], self._levels.get(slot, 0)
        kept = held
        while len(kept) == len(held):
            self._skips[level] = self._skips.get(level, 0) | self._bits[slot]
            level += 1
            kept = {name for name in held if rank(name) >= level}
        self._levels[slot] = level
        self._remove(slot, held - kept)
        self._held[slot] = kept

    def _remove(self, slot: int, hashes: Iterable[BlockHash]) -> None:
        self.num_changes += 1
        held, holders, bit = self._held[slot], self._holders, self._bits[slot]
        for name in hashes:
            if name not in held:
                continue
            held.remove(name)
            self.num_blocks -= 1
            others = holders[name] ^ bit
            if others:
                holders[name] = others
            else:
                del holders[name]

    def _clear(self, slot: int) -> None:
        self._remove(slot, tuple(self._held[slot]))
        for skipped in range(self._levels.pop(slot, 0)):
            self._skips[skipped] ^= self._bits[slot]
            if not self._skips[skipped]:
                del self._skips[skipped]


def rank(name: BlockHash) -> int:
    """Return how many of the leading 64 bits of a number that follows from a name are 0; the same everywhere."""
    number = name if isinstance(name, int) else int.from_bytes(name[-8:], "big")
    return 64 - (number * _GOLDEN & _WORD).bit_length()


def _fields_of(event: object) -> tuple[str, dict[str, object]]:
    """Return the name and the fields of an event that is a map, or an array of its name and its fields in order.

    Raises:
        ValueError: It is no event.
    """
    match event:
        case {"type": str(name)} if name in _FIELDS:
            return name, cast("dict[str, object]", event)
        case list() | tuple() if event and event[0] in _FIELDS:
            name, *values = cast("list[Any]", event)
            return name, dict(zip(_FIELDS[name], values, strict=False))
        case _:
            raise ValueError(f"event must be one of {', '.join(_FIELDS)}, got {event!r:.80}")
