"""What a consumer receives: a sequence of events, or the whole state."""

from dataclasses import dataclass

from pagewood.radixcache.events.event import BlockStored, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A point in the history of one cache.

    Attributes:
        log_id: identifies the log; a cache that is created again has another one.
        epoch: number of events up to this point.
    """

    log_id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """Consecutive events; empty if nothing has changed.

    Attributes:
        start: the position before the first event; each event advances the epoch by one.
        events: in the order in which they happened.
        ts: when the batch was made, in seconds since 1970.
    """

    start: Position
    events: list[Event]
    ts: float

    @property
    def end(self) -> Position:
        """The position after the last event."""
        return Position(log_id=self.start.log_id, epoch=self.start.epoch + len(self.events))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that is cached at one position, as the events that store it into an empty cache.

    Attributes:
        end: that position.
        events: parents before the blocks that follow them.
        block_size: tokens per block.
        ts: when the snapshot was made, in seconds since 1970.
    """

    end: Position
    events: list[BlockStored]
    block_size: int
    ts: float
