"""What a consumer is given: events in a row, or the whole state."""

from dataclasses import dataclass

from pagewood.radixcache.events.event import BlockStored, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A point in the history of one cache.

    Attributes:
        log_id: which history; a cache that is made anew has another.
        epoch: events up to there; it only grows.
    """

    log_id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """Events in a row; none of them, where there is nothing new.

    Attributes:
        start: the point before the first of them; each event leads to the next epoch.
        events: in the order in which they happened.
        ts: when the batch was made, in seconds since 1970.
    """

    start: Position
    events: list[Event]
    ts: float

    @property
    def end(self) -> Position:
        """The point after the last of them."""
        return Position(log_id=self.start.log_id, epoch=self.start.epoch + len(self.events))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that is cached at one point, as the events that store it into an empty cache.

    Attributes:
        end: that point.
        events: parents before what follows them.
        block_size: tokens per block.
        ts: when the snapshot was made, in seconds since 1970.
    """

    end: Position
    events: list[BlockStored]
    block_size: int
    ts: float
