"""Events in the forms that KV-aware routers read: those of vLLM, as maps or as arrays, with 64-bit hashes."""

from collections.abc import Iterable
from typing import Literal, TypeAlias

from pagewood.radixcache.events.event import AllBlocksCleared, BlockRemoved, BlockStored, Event
from pagewood.radixcache.namespaces import Namespace

Form: TypeAlias = Literal["map", "array"]
"""How an event is written: a map with the names of its fields, or an array of its type and its fields in order."""

Medium: TypeAlias = Literal["GPU", "CPU", "STORAGE"]
"""Where blocks are: in the memory of the device that computes, in host memory, or on a disk or another machine."""


def router_hash(name: bytes) -> int:
    """Return the hash by which routers know a block: the low 64 bits of its name, unsigned, as in vLLM."""
    return int.from_bytes(name[-8:], "big")


def router_events(events: Iterable[Event], *, form: Form = "map", medium: Medium = "GPU") -> list[object]:
    """Return events as lists, dicts, numbers and strings, for `msgpack` and other serializers.

    A namespace that is a string is the salt. In a tuple, such as a `CacheKey`, the first part is the salt, the second
    the adapter and the fifth the rope, if they are strings. They are in `extra_keys` of each block as in vLLM, adapter
    and salt also in fields of their own (`lora_name`, and as in SGLang `cache_salt`, which only maps have). The fourth
    part, what distinguishes updated weights, is the field `weights_version` of maps.

    Args:
        events: events of one cache, in their order.
        form: "map" for vLLM since 0.30 and SGLang, "array" for older readers.
        medium: where the blocks of this cache are.
    """
    return [_plain(event, form, medium) for event in events]


def _plain(event: Event, form: Form, medium: Medium) -> object:
    match event:
        case BlockStored():
            salt, adapter, weights, rope = _texts_of(event.namespace)
            keys = [key for key in (adapter, rope, salt) if key is not None]
            fields: dict[str, object] = {
                "block_hashes": [router_hash(name) for name in event.block_hashes],
                "parent_block_hash": None if event.parent_block_hash is None else router_hash(event.parent_block_hash),
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": medium,
                "lora_name": adapter,
            }
            if keys:
                fields["extra_keys"] = [keys] * len(event.block_hashes)
            if salt is not None and form == "map":
                fields["cache_salt"] = salt
            if weights is not None and form == "map":
                fields["weights_version"] = weights
        case BlockRemoved():
            fields = {"block_hashes": [router_hash(name) for name in event.block_hashes], "medium": medium}
        case AllBlocksCleared():
            fields = {}
    name = type(event).__name__
    return {"type": name} | fields if form == "map" else [name, *fields.values()]


def _texts_of(namespace: Namespace) -> tuple[str | None, str | None, str | None, str | None]:
    """Return the salt, the adapter, the weights' version and the rope of a namespace, if they are strings."""
    parts = namespace if isinstance(namespace, tuple) else (namespace,)
    salt, adapter, _, weights, rope = [part if isinstance(part, str) else None for part in (*parts, *[None] * 5)[:5]]
    return salt, adapter, weights, rope
