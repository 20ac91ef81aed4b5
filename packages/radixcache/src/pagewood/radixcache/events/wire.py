"""Updates as plain dicts, lists, numbers, strings and bytes, for serializers such as msgpack."""

from typing import Any, cast

from pagewood.radixcache.events.event import AllBlocksCleared, BlockRemoved, BlockStored, Event
from pagewood.radixcache.events.update import EventBatch, Position, Snapshot
from pagewood.radixcache.namespaces import Namespace, require_namespace


def to_plain(update: EventBatch | Snapshot) -> dict[str, object]:
    """Return an update in the plain form that `from_plain` reads.

    Packed as msgpack, a batch can also be decoded as vLLM's `KVEventBatch` with structs as maps: all its fields are
    present under their names (None if they do not apply), besides the additional `log_id`, `epoch` and `namespace`.
    """
    is_snapshot = isinstance(update, Snapshot)
    position = update.end if is_snapshot else update.start
    plain: dict[str, object] = {
        "type": type(update).__name__,
        "log_id": position.log_id,
        "epoch": position.epoch,
        "ts": update.ts,
        "events": [_event_to_plain(event) for event in update.events],
    }
    return plain | {"block_size": update.block_size} if is_snapshot else plain


def from_plain(plain: Any) -> EventBatch | Snapshot:
    """Return the update that was passed to `to_plain`.

    Raises:
        ValueError: `plain` is not such an update.
    """
    match plain:
        case {"log_id": str(log_id), "epoch": int(epoch), "ts": float() | int() as ts, "events": [*events]} if (
            abs(ts) < 2**63 and ts is not True and ts is not False
        ):
            ts = float(ts)  # JSON of other languages has no ".0"
            position = Position(log_id=log_id, epoch=epoch)
        case _:
            raise ValueError(f"update must have log_id, epoch, ts and events, got {_shorten(plain)}")
    match plain:
        case {"type": "EventBatch"}:
            return EventBatch(start=position, events=list(map(_event_from_plain, events)), ts=ts)
        case {"type": "Snapshot", "block_size": int(block_size)} if block_size > 0:
            return Snapshot(end=position, events=list(map(_stored_from_plain, events)), block_size=block_size, ts=ts)
        case _:
            raise ValueError(f"update must be an EventBatch, or a Snapshot with a block_size, got {_shorten(plain)}")


def _event_to_plain(event: Event) -> dict[str, object]:
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent_block_hash,
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": None,
                "lora_name": None,
                "namespace": list(event.namespace) if isinstance(event.namespace, tuple) else event.namespace,
            }
        case BlockRemoved():
            return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": None}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _stored_from_plain(plain: Any) -> BlockStored:
    event = _event_from_plain(plain)
    if not isinstance(event, BlockStored):
        raise ValueError(f"events of a Snapshot must be BlockStored, got {_shorten(plain)}")
    return event


def _event_from_plain(plain: Any) -> Event:
    match plain:
        case {
            "type": "BlockStored",
            "block_hashes": [*block_hashes],
            "parent_block_hash": bytes() | None as parent,
            "token_ids": [*token_ids],
            "block_size": int(block_size),
            "namespace": namespace,
        } if _are(block_hashes, bytes) and _are(token_ids, int) and len(token_ids) == len(block_hashes) * block_size:
            return BlockStored(
                block_hashes=block_hashes,
                parent_block_hash=parent,
                token_ids=token_ids,
                block_size=block_size,
                namespace=_namespace_from_plain(namespace),
            )
        case {"type": "BlockRemoved", "block_hashes": [*block_hashes]} if _are(block_hashes, bytes):
            return BlockRemoved(block_hashes=block_hashes)
        case {"type": "AllBlocksCleared"}:
            return AllBlocksCleared()
        case _:
            raise ValueError(f"event must be one of BlockStored, BlockRemoved, AllBlocksCleared, got {_shorten(plain)}")


def _namespace_from_plain(plain: Any) -> Namespace:
    namespace: Namespace = tuple(cast("list[Any]", plain)) if isinstance(plain, list) else plain
    require_namespace(namespace)
    return namespace


def _are(values: list[Any], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


def _shorten(plain: object) -> str:
    return repr(plain)[:80]
