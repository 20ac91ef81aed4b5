"""What the ranks of a model tell each other beside their exchanges: MessagePack over a connection that has no name."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypeVar

import msgspec

from pagewood.engine.api import EngineConfig, Refusal
from pagewood.engine.observe.profiling import Span
from pagewood.engine.runner.ranks.link import Link
from pagewood.engine.weight_commands import WeightCommand

StoreName = Literal["disk", "remote"]
"""A store below the host cache: the disk, or the one that engines share."""


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message to a rank: what it is a part of."""

    config: EngineConfig
    rank: int
    count: int
    segment: int
    """Descriptor of the shared memory."""
    beats_at: int
    """Place of the rank's beats in it, in words of eight bytes."""
    kv_memory: int | None
    """Descriptor of memory for keys and values, which rank 0 reads too; None: the rank has its own."""
    search_path: list[str]
    """Where modules are found that the configuration names."""
    cores: list[int]
    """On which its threads run; empty: on any."""
    cuts: list[int]
    """First layer of each stage but the first one; empty: the model has one stage."""
    port: int | None
    """Where ranks on devices meet; None: they exchange in the shared memory."""
    log_level: int
    """Lowest level that the rank logs."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How much KV memory every rank has, and how long a request may be."""

    num_pages: int
    max_length: int
    num_states: int
    """Places of states of recurrent layers."""
    host_page_bytes: int
    """Bytes of the image of a page on the host with the largest one, which all hosts divide their budgets for lower
    tiers by."""
    num_state_parts: int = 0
    """Parts in which each process copies its part of a state; 0: no layer is recurrent."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A step."""

    number: int
    """From 1 on."""
    batch: bytes
    """See `core.messages.codec`."""


class Constrain(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The masks of the step that was launched last."""

    masks: bytes
    """See `core.messages.codec`."""


class StartSpans(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Record from now on."""


class TakeSpans(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Record no more, and answer with `Spans`."""


class ReadNewWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read your part of new weights, go on with steps meanwhile, and answer with `WeightsRead`."""

    command: WeightCommand


class ExchangeWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute the steps behind this message with what was read, and answer with `WeightsExchanged`."""


class ReadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read your part of an adapter, go on with steps meanwhile, and answer with `AdapterRead`."""

    number: int
    """Identifies the load; the answer has the same."""
    folder: str


class KeepAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Let the steps behind this message find an adapter by its number."""

    load: int
    """The number of the load that has read it."""
    number: int


class DropAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget what a load has read; no step behind this message names it, and those before it have ended."""

    load: int


class MovePages(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Copy your parts of pages from or to the host cache, beside the steps, and answer with `PagesMoved`."""

    number: int
    """Identifies the copy; the answer has the same."""
    is_out: bool
    """Whether from the KV memory to the host cache, or from there to the store."""
    slots: list[int]
    """Images of the host cache; empty: say which pages the store has."""
    pages: list[int] = []
    """Pages of the KV memory; empty if a store is given."""
    keys: list[bytes] = []
    """Keys of the pages in the store; empty without a store."""
    store: StoreName | None = None
    """With which the host cache exchanges pages; None: with the KV memory."""


class Close(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute what was launched, and end."""


ToRank: TypeAlias = (
    Begin
    | Sizes
    | Launch
    | Constrain
    | StartSpans
    | TakeSpans
    | ReadNewWeights
    | ExchangeWeights
    | ReadAdapter
    | KeepAdapter
    | DropAdapter
    | MovePages
    | Close
)


class Doing(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a rank does before it is ready."""

    what: str
    done: int
    total: int


class Said(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A line for the log of rank 0."""

    logger: str
    level: int
    text: str


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has its weights, and knows how much KV memory fits beside them."""

    num_pages: int
    max_length: int
    num_states: int
    """Places of states of recurrent layers that fit; 0: the model has no such layers."""
    state_interval: int
    """See `EngineInfo`."""
    page_bytes: int
    """Bytes of its part of a page."""
    state_bytes: int
    """Bytes of its part of a state; 0: none of its layers is recurrent."""
    layers: tuple[int, int]
    """Its first layer, and the first one behind it."""
    division: str
    """See `models.expert_division.division_mark`; the same on all ranks."""


class CanMeet(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has its weights on its device, and connects to the other ranks."""

    division: str
    """See `Loaded`."""
    has_device: bool
    """Whether each rank of its host has a device of its own."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank can compute."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank cannot be built."""

    message: str
    is_refusal: bool
    """Whether the model or the configuration is wrong, which is a ValueError or an OSError."""


class Spans(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a rank has recorded."""

    spans: list[Span]
    num_dropped: int
    now_s: float
    """When it was sent, on the clock of the rank's host."""


class WeightsRead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has its part of new weights, or cannot use it."""

    refusal: Refusal | None


class WeightsExchanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank computes with new weights from the next step on, or goes on with the old ones."""

    why_not: str | None


class AdapterRead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has its part of an adapter, or cannot use it."""

    number: int
    """See `ReadAdapter`."""
    version: str | None
    """See `core.adapter.Adapter`; None: it cannot use it."""
    refusal: Refusal | None


class PagesMoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has copied its parts of pages, or could not."""

    number: int
    """See `MovePages`."""
    found: list[bool]
    """Whether the store had each page, if pages came from a store, or were asked for."""
    error: str | None


FromRank: TypeAlias = (
    Doing | Said | Loaded | CanMeet | Ready | Failed | Spans | WeightsRead | WeightsExchanged | AdapterRead | PagesMoved
)

Answer = TypeVar("Answer", Loaded, CanMeet, Ready, Spans, WeightsRead, WeightsExchanged, AdapterRead)
"""What rank 0 waits for from all others."""

_encode = msgspec.msgpack.Encoder().encode
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def send(link: Link, message: ToRank | FromRank) -> None:
    """Send a message.

    Raises:
        OSError: the other process has ended.
    """
    link.send(encode(message))


def receive(link: Link) -> ToRank:
    """Wait for a message of rank 0.

    Raises:
        EOFError: it has ended.
        OSError: likewise.
    """
    return to_rank(link.receive())


def to_rank(data: bytes | bytearray) -> ToRank:
    """Return a message of rank 0."""
    return _to_rank.decode(data)


def from_rank(data: bytes | bytearray) -> FromRank:
    """Return a message of a rank."""
    return _from_rank.decode(data)


def encode(message: ToRank | FromRank) -> bytes:
    """Return the bytes of a message."""
    return _encode(message)
