"""The consumer's side: an index of what a cache in another process holds."""

from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.events.event import AllBlocksCleared, BlockRemoved, BlockStored, Event
from pagewood.radixcache.events.hashing import block_hashes
from pagewood.radixcache.events.update import EventBatch, Position, Snapshot
from pagewood.radixcache.namespaces import Namespace


class RemoteIndex:
    """The blocks of a cache, rebuilt from what its `EventLog` returns. Updates may be lost, repeated or late.

    Invariant: if `position` is not None, the index holds exactly what the cache held at that position.

    An update that begins after `position` is not applied: the index is out of sync until the missing updates or a
    snapshot arrive. Updates that it knows already are ignored. A batch of another log, or a batch that contradicts the
    index, sets `position` to None; then only a snapshot helps. In each case `apply(log.read(index.position))` restores
    the index. Until then the index answers with what it has. (Logs are not ordered in time: a snapshot of another log
    counts as newer.)
    """

    __slots__ = ("_block_size", "_blocks", "_newest", "_position")

    def __init__(self) -> None:
        self._blocks: set[bytes] = set()  # written by: _restore, _follow
        self._block_size = 1  # written by: _restore
        self._position: Position | None = None  # written by: apply, _restore
        self._newest: Position | None = None  # written by: apply; the newest position seen in an update

    @property
    def position(self) -> Position | None:
        """How far the index has followed its log; None if it does not know what the cache holds."""
        return self._position

    @property
    def is_in_sync(self) -> bool:
        """Whether the index has followed the log to the newest position that it has seen."""
        return self._position is not None and self._position == self._newest

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        """Return whether a block is cached, and therefore all blocks before it; see `block_hashes`."""
        return block_hash in self._blocks

    def match(self, tokens: Int32, namespace: Namespace = None) -> int:
        """Return the length of the longest cached prefix of `tokens`, at the cost of one hash per block of it.

        Raises:
            ValueError: `tokens` is not a one-dimensional int32 array.
        """
        num_blocks = 0
        for block_hash in block_hashes(tokens, self._block_size, namespace):
            if block_hash not in self._blocks:
                break
            num_blocks += 1
        return num_blocks * self._block_size

    def apply(self, update: EventBatch | Snapshot) -> bool:
        """Apply an update as far as it fits, and return `is_in_sync`."""
        end, position = update.end, self._position
        is_same_log = position is not None and position.log_id == end.log_id
        if self._newest is None or self._newest.log_id != end.log_id or self._newest.epoch < end.epoch:
            self._newest = end
        if isinstance(update, Snapshot):
            if position is None or not is_same_log or position.epoch < end.epoch:
                self._restore(update)
        elif position is None or not is_same_log:
            self._position = None
        elif update.start.epoch <= position.epoch < end.epoch:
            fits = all(map(self._follow, update.events[position.epoch - update.start.epoch :]))
            self._position, self._newest = (end, self._newest) if fits else (None, None)
        return self.is_in_sync

    def _restore(self, snapshot: Snapshot) -> None:
        self._blocks = {block_hash for event in snapshot.events for block_hash in event.block_hashes}
        self._block_size = snapshot.block_size
        self._position = snapshot.end

    def _follow(self, event: Event) -> bool:
        """Apply an event; return whether it fits what the index holds."""
        match event:
            case BlockStored(parent_block_hash=parent, block_hashes=names):
                fits = parent is None or parent in self._blocks
                self._blocks.update(names)
            case BlockRemoved(block_hashes=names):
                fits = self._blocks.issuperset(names)
                self._blocks.difference_update(names)
            case AllBlocksCleared():
                fits = True
                self._blocks.clear()
        return fits
