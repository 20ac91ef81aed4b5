"""A consumer that claims to be in sync holds what the cache holds, even if updates are lost, repeated or late."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pagewood.radixcache import Namespace, Node, RadixCache
from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    EventLog,
    Position,
    RemoteIndex,
    Snapshot,
    block_hashes,
    from_plain,
    to_plain,
)
from pagewood.radixcache.events.names import BlockNames

NAMESPACES = (None, "", "tenant")


def ids(*items: int) -> Int32:
    return np.array(items, np.int32)


def name_of(namespace: Namespace, pages: Sequence[Sequence[int]]) -> bytes:
    """Return the name of the last page, computed as `hashing` documents it."""
    start = "pagewood block 1"
    if isinstance(namespace, tuple):
        start += "("
        for part in namespace:
            text = "" if part is None else str(part)
            start += f"{'n' if part is None else type(part).__name__[0]}{len(text)}:{text}"
    elif namespace is not None:
        start += ":" + namespace
    name = hashlib.sha256(start.encode()).digest()
    for page in pages:
        tokens = b"".join(token.to_bytes(4, "little", signed=True) for token in page)
        name = hashlib.sha256(name + tokens).digest()
    return name


def names_in(cache: RadixCache) -> set[bytes]:
    """Return the names of all cached pages, computed from the tokens up to each page."""
    paths: dict[int | None, list[list[int]]] = {None: []}
    names: set[bytes] = set()
    for run in cache.runs():
        path = paths[run.parent_page]
        rows = run.tokens.reshape(-1, cache.page_size).tolist()
        for page, tokens in zip(run.pages.tolist(), rows, strict=True):
            path = paths[page] = [*path, tokens]
            names.add(name_of(run.namespace, path))
    return names


class FollowingMachine(RuleBasedStateMachine):
    """A changing cache, a log with a short memory, and a consumer whose updates are lost, repeated or late."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache(2)
        self.num_made = 0
        self.leases: list[Node] = []
        self.history: dict[tuple[str, int], set[bytes]] = {}
        self.updates: list[EventBatch | Snapshot] = []
        self.index = RemoteIndex()
        self.start_log()

    @rule()
    def start_log(self) -> None:
        """Start a new log; for the consumers, the process of the cache has restarted."""
        self.log = EventLog(self.cache, max_pages=5)
        self.published = self.log.position
        self.remember()

    @rule(
        tokens=st.lists(st.integers(0, 1), max_size=8),
        namespace=st.sampled_from(NAMESPACES),
        is_locked=st.booleans(),
    )
    def insert(self, tokens: list[int], namespace: str | None, is_locked: bool) -> None:
        pages = np.arange(self.num_made, self.num_made + len(tokens), dtype=np.int32)
        self.num_made += len(tokens)
        node = self.cache.insert(ids(*tokens), pages, namespace).node
        if is_locked:
            self.leases.append(self.cache.lock(node))
        self.remember()

    @precondition(lambda self: self.leases)
    @rule()
    def unlock(self) -> None:
        self.cache.unlock(self.leases.pop())

    @rule(num_pages=st.integers(0, 5))
    def evict(self, num_pages: int) -> None:
        self.cache.evict(num_pages)
        self.remember()

    @rule(namespace=st.sampled_from(NAMESPACES))
    def clear(self, namespace: str | None) -> None:
        self.cache.clear(namespace)
        self.remember()

    @rule(is_lost=st.booleans())
    def publish(self, is_lost: bool) -> None:
        """Read the log as a publisher does at every step; the update may be lost."""
        update = self.log.read(self.published)
        self.published = update.end
        self.updates.append(update)
        if not is_lost:
            self.deliver(update)

    @rule()
    def catch_up(self) -> None:
        update = self.log.read(self.index.position)
        self.updates.append(update)
        assert self.deliver(update)
        assert self.index.position == self.log.position

    @precondition(lambda self: self.updates)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.deliver(data.draw(st.sampled_from(self.updates)))

    @rule()
    def join_late(self) -> None:
        self.index = RemoteIndex()

    @invariant()
    def the_index_agrees_with_its_position(self) -> None:
        if self.index.position is not None:
            expected = self.history[self.index.position.log_id, self.index.position.epoch]
            assert len(self.index) == len(expected)
            assert all(name in self.index for name in expected)

    def remember(self) -> None:
        self.history[self.log.position.log_id, self.log.position.epoch] = names_in(self.cache)

    def deliver(self, update: EventBatch | Snapshot) -> bool:
        is_in_sync = self.index.apply(from_plain(to_plain(update)))
        assert is_in_sync == self.index.is_in_sync
        if is_in_sync and update.end == self.log.position:  # it has seen the newest update
            assert self.index.position == self.log.position
        return is_in_sync


SETTINGS = hypothesis.settings(max_examples=100, stateful_step_count=40, deadline=None)
FAULT_SETTINGS = hypothesis.settings(
    SETTINGS, max_examples=3000, derandomize=True, database=None, phases=[hypothesis.Phase.generate]
)


def test_a_consumer_in_sync_holds_what_the_cache_holds() -> None:
    run_state_machine_as_test(FollowingMachine, settings=SETTINGS)


apply, follow, store, read = RemoteIndex.apply, RemoteIndex._follow, BlockNames.store, EventLog.read  # pyright: ignore


def advance(index: RemoteIndex, events: Sequence[Event], end: Position) -> None:
    for event in events:
        follow(index, event)
    index._position = end  # pyright: ignore


def apply_without_gaps(index: RemoteIndex, update: EventBatch | Snapshot) -> bool:
    position = index.position
    if isinstance(update, EventBatch) and position is not None and position.epoch < update.start.epoch:
        advance(index, update.events, update.end)
    return apply(index, update)


def apply_replays(index: RemoteIndex, update: EventBatch | Snapshot) -> bool:
    position = index.position
    if isinstance(update, EventBatch) and position is not None and update.end.epoch <= position.epoch:
        advance(index, update.events, position)
    return apply(index, update)


def apply_of_any_log(index: RemoteIndex, update: EventBatch | Snapshot) -> bool:
    position = index.position
    if isinstance(update, EventBatch) and position is not None and position.log_id != update.start.log_id:
        advance(index, update.events, update.end)
    return apply(index, update)


def follow_no_removal(index: RemoteIndex, event: Event) -> bool:
    return isinstance(event, BlockRemoved) or follow(index, event)


def store_in_one_namespace(names: BlockNames, namespace: str | None, *args: Any) -> list[bytes]:
    return store(names, None, *args)


def read_without_forgetting(log: EventLog, position: Position | None = None) -> EventBatch | Snapshot:
    update = read(log, position)
    is_known = isinstance(update, Snapshot) and position is not None and position.log_id == update.end.log_id
    return EventBatch(start=position, events=[], ts=0.0) if is_known and position is not None else update


FAULTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "a gap is not detected": (RemoteIndex, "apply", apply_without_gaps),
    "a replay is applied again": (RemoteIndex, "apply", apply_replays),
    "another log is not detected": (RemoteIndex, "apply", apply_of_any_log),
    "blocks are never removed": (RemoteIndex, "_follow", follow_no_removal),
    "namespaces share block names": (BlockNames, "store", store_in_one_namespace),
    "dropped events are left out": (EventLog, "read", read_without_forgetting),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, faulty = FAULTS[fault]
    monkeypatch.setattr(owner, name, faulty)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(FollowingMachine, settings=FAULT_SETTINGS)


@given(st.lists(st.lists(st.integers(0, 1), max_size=7), max_size=5), st.lists(st.integers(0, 1), max_size=8))
def test_an_index_matches_the_same_as_the_cache(inserted: list[list[int]], tokens: list[int]) -> None:
    cache = RadixCache(3)
    num_made = 0
    for prompt in inserted:
        cache.insert(ids(*prompt), np.arange(num_made, num_made + len(prompt), dtype=np.int32), "a")
        num_made += len(prompt)
    index = RemoteIndex()
    assert index.match(ids(*tokens), "a") == 0
    assert index.apply(EventLog(cache).snapshot())
    assert index.match(ids(*tokens), "a") == cache.peek(ids(*tokens), "a").num_tokens
    assert index.match(ids(*tokens)) == 0


def followed(max_pages: int = 100) -> tuple[RadixCache, EventLog, RemoteIndex]:
    cache = RadixCache(2)
    log, index = EventLog(cache, max_pages=max_pages, clock=lambda: 5.0), RemoteIndex()
    index.apply(log.read(index.position))
    return cache, log, index


def test_events_have_the_fields_of_vllm() -> None:
    cache, log, _ = followed()
    start = log.position
    cache.insert(ids(1, 2, 3, 4), ids(70, 71), "a")
    cache.insert(ids(1, 2, 3, 4, 5, 6), ids(70, 71, 72), "a")
    cache.evict(2)
    cache.clear("a")
    first, second, third = (
        name_of("a", [[1, 2]]),
        name_of("a", [[1, 2], [3, 4]]),
        name_of("a", [[1, 2], [3, 4], [5, 6]]),
    )
    batch = log.read(start)
    assert batch.end == log.position
    assert batch.ts == 5.0
    *stored, _, removed, cleared = batch.events
    assert stored[0] == BlockStored(
        block_hashes=[first, second], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=2, namespace="a"
    )
    assert stored[1] == BlockStored(
        block_hashes=[third], parent_block_hash=second, token_ids=[5, 6], block_size=2, namespace="a"
    )
    assert removed == BlockRemoved(block_hashes=[first])
    assert cleared == AllBlocksCleared()
    assert list(block_hashes(ids(1, 2, 3, 4, 5, 6, 7), 2, "a")) == [first, second, third]


def test_clearing_one_of_two_namespaces_does_not_report_all_cleared() -> None:
    cache, log, index = followed()
    cache.insert(ids(1, 2), ids(1), "a")
    cache.insert(ids(1, 2), ids(2), "b")
    cache.clear("a")
    batch = log.read(index.position)
    assert [type(event) for event in batch.events] == [BlockStored, BlockStored, BlockRemoved]
    assert index.apply(batch)
    assert (index.match(ids(1, 2), "a"), index.match(ids(1, 2), "b")) == (0, 2)


def test_unread_changes_are_not_kept() -> None:
    cache, log, _ = followed(max_pages=3)
    start = log.position
    for page in range(10):
        cache.insert(ids(page, page), ids(page))
    assert log.position.epoch == 10
    assert not log._changes  # pyright: ignore[reportPrivateUsage]
    assert isinstance(log.read(start), Snapshot)
    heartbeat = log.read(log.position)
    assert isinstance(heartbeat, EventBatch)
    assert heartbeat.events == []


def test_the_names_of_removed_pages_are_not_kept() -> None:
    names = BlockNames(2)
    assert names.store("a", None, ids(1, 2, 3, 4), ids(7, 8)) == names.of(ids(7, 8))
    assert names.remove(ids(8)) == [name_of("a", [[1, 2], [3, 4]])]
    with pytest.raises(KeyError):
        names.of(ids(8))


def test_the_oldest_events_are_forgotten_first() -> None:
    cache, log, _ = followed(max_pages=3)
    positions = [log.position]
    for page in range(4):
        cache.insert(ids(page, page), ids(page))
        log.read(log.position)
        positions.append(log.position)
    assert isinstance(log.read(positions[0]), Snapshot)
    assert [len(log.read(position).events) for position in positions[1:]] == [3, 2, 1, 0]
    assert isinstance(log.read(Position(log_id=log.position.log_id, epoch=99)), Snapshot)


def test_a_heartbeat_reveals_lost_updates() -> None:
    cache, log, index = followed()
    cache.insert(ids(1, 2), ids(1))
    assert index.is_in_sync  # it has not seen the new position
    assert not index.apply(log.read(log.position))
    assert index.apply(log.read(index.position))


def test_contradicting_events_require_a_snapshot() -> None:
    cache, log, index = followed()
    cache.insert(ids(1, 2), ids(1))
    name = name_of(None, [[9, 9]])
    stored = BlockStored(block_hashes=[name], parent_block_hash=name, token_ids=[9, 9], block_size=2, namespace=None)
    for event in (stored, BlockRemoved(block_hashes=[name])):
        assert index.position is not None
        assert not index.apply(EventBatch(start=index.position, events=[event], ts=0.0))
        assert index.position is None
        assert index.apply(log.read(index.position))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="max_pages must be >= 1, got 0"):
        EventLog(RadixCache(1), max_pages=0)
    with pytest.raises(ValueError, match="block_size must be >= 1, got 0"):
        block_hashes(ids(1), 0)
    with pytest.raises(ValueError, match="tokens must have dtype int32"):
        RemoteIndex().match(np.zeros(1))  # pyright: ignore[reportArgumentType]


def all_kinds() -> list[EventBatch | Snapshot]:
    cache, log, index = followed()
    cache.insert(ids(1, 2, 3, 4), ids(70, 71), "a")
    snapshot = log.snapshot()
    cache.clear("a")
    return [snapshot, log.read(index.position)]


@pytest.mark.parametrize("update", all_kinds())
def test_updates_survive_the_plain_form(update: EventBatch | Snapshot) -> None:
    assert from_plain(to_plain(update)) == update


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"type": "Batch"}, "update must be an EventBatch, or a Snapshot with a block_size"),
        ({"type": "Snapshot", "block_size": 0}, "update must be an EventBatch, or a Snapshot with a block_size"),
        ({"type": "Snapshot", "block_size": 2}, "events of a Snapshot must be BlockStored"),
        ({"epoch": None}, "update must have log_id, epoch, ts and events"),
        ({"events": 3}, "update must have log_id, epoch, ts and events"),
        ({"events": [3]}, "event must be one of"),
        ({"events": [{"type": "BlockRemoved", "block_hashes": ["text"]}]}, "event must be one of"),
    ],
)
def test_an_invalid_update_is_refused(damage: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_plain(to_plain(all_kinds()[1]) | damage)


def test_a_block_stored_with_too_few_tokens_is_refused() -> None:
    plain: Any = to_plain(all_kinds()[0])
    plain["events"][0]["token_ids"].pop()
    with pytest.raises(ValueError, match="event must be one of"):
        from_plain(plain)


def test_a_batch_can_be_decoded_as_vllms() -> None:
    msgspec = pytest.importorskip("msgspec", reason="vLLM's events are msgspec structs")
    hashes = list[bytes | int]
    options = {"omit_defaults": True, "tag": True}
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", hashes), ("parent_block_hash", bytes | int | None), ("token_ids", list[int]),
            ("block_size", int), ("lora_id", int | None), ("medium", str | None), ("lora_name", str | None),
        ],
        **options,
    )  # fmt: skip
    removed = msgspec.defstruct("BlockRemoved", [("block_hashes", hashes), ("medium", str | None)], **options)
    cleared = msgspec.defstruct("AllBlocksCleared", [], **options)
    batch = msgspec.defstruct("KVEventBatch", [("ts", float), ("events", list[stored | removed | cleared])])
    update = all_kinds()[1]
    theirs = msgspec.msgpack.decode(msgspec.msgpack.encode(to_plain(update)), type=batch)
    assert [type(event).__name__ for event in theirs.events] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    assert theirs.events[0].block_hashes == update.events[0].block_hashes  # pyright: ignore
    assert from_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(to_plain(update)))) == update
