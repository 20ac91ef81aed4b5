"""What a cache elsewhere holds, as far as its events have told."""

from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.events.event import AllBlocksCleared, BlockRemoved, BlockStored, Event
from pagewood.radixcache.events.hashing import block_hashes
from pagewood.radixcache.events.update import EventBatch, Position, Snapshot


class RemoteIndex:
    """The blocks of a cache, rebuilt from what its `EventLog` returns, whatever is lost, repeated or late on the way.

    Invariant: where `position` is not None, the index holds exactly what the cache held there.

    An update that begins after `position` is not applied, and until the updates in between come (or a snapshot) the
    index is out of sync; what is known already is ignored. A batch of another log, or one that does not fit, makes
    `position` None: then only a snapshot helps. In each case the cure is `apply(log.read(index.position))`. Meanwhile
    the index answers with what it has. (Logs have no order in time: a snapshot of another log counts as the newer one.)
    """

    __slots__ = ("_block_size", "_blocks", "_heard", "_position")

    def __init__(self) -> None:
        self._blocks: set[bytes] = set()  # written by: _restore, _follow
        self._block_size = 1  # written by: _restore
        self._position: Position | None = None  # written by: apply, _restore
        self._heard: Position | None = None  # written by: apply

    @property
    def position(self) -> Position | None:
        """How far the index has followed its log; None if it does not know what the cache holds."""
        return self._position

    @property
    def is_in_sync(self) -> bool:
        """Whether the index has followed to the newest point that it has heard of."""
        return self._position is not None and self._position == self._heard

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        """Return whether a block is cached, and so all blocks before it; see `block_hashes`."""
        return block_hash in self._blocks

    def match(self, tokens: Int32, namespace: str | None = None) -> int:
        """Return the length of the longest cached prefix of `tokens`, at the cost of a hash for each of its blocks.

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
        """Follow an update as far as it fits, and return `is_in_sync`."""
        end, position = update.end, self._position
        is_same_log = position is not None and position.log_id == end.log_id
        if self._heard is None or self._heard.log_id != end.log_id or self._heard.epoch < end.epoch:
            self._heard = end
        if isinstance(update, Snapshot):
            if position is None or not is_same_log or position.epoch < end.epoch:
                self._restore(update)
        elif position is None or not is_same_log:
            self._position = None
        elif update.start.epoch <= position.epoch < end.epoch:
            fits = all(map(self._follow, update.events[position.epoch - update.start.epoch :]))
            self._position, self._heard = (end, self._heard) if fits else (None, None)
        return self.is_in_sync

    def _restore(self, snapshot: Snapshot) -> None:
        self._blocks = {block_hash for event in snapshot.events for block_hash in event.block_hashes}
        self._block_size = snapshot.block_size
        self._position = snapshot.end

    def _follow(self, event: Event) -> bool:
        """Apply an event, and return true; false if it cannot have happened to what the index holds."""
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
