"""Events of the prefix cache on real sockets: a subscriber that is late or loses messages catches up by replay."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from pagewood.engine.api import EngineConfig
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.observe.cache_events import CacheEvents
from pagewood.kvpool.tiers import ArrayPages, DiskTier, HostTier, KeyChain, TieredIndex
from pagewood.radixcache import RadixCache
from pagewood.server.config import ServeConfig
from pagewood.server.processes.kv_events import END, EventPump, Publisher
from serving import MODEL, Server, until

PAGE = 4


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """The fields of vLLM's event, in its order; a map has them by name."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """As in vLLM."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """As in vLLM."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Router:
    """A reader that shares no code with the publisher: it keeps the hashes of the blocks that are in each medium."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, *, topic: bytes = b"") -> None:
        self.topic = topic
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        assert replay_endpoint is not None
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(replay_endpoint)
        self.next = 0
        self.media: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.num_replayed = 0
        self.numbers: list[int] = []

    @property
    def blocks(self) -> set[int]:
        """The blocks on the device."""
        return self.media["GPU"]

    def read(self, until: int, *, lose: tuple[int, ...] = ()) -> None:
        """Apply batches up to a number; those to lose are dropped on the way."""
        deadline_s = time.monotonic() + 60
        while self.next <= until:
            assert time.monotonic() < deadline_s
            if not self.sub.poll(1000):
                continue
            topic, number, payload = self.sub.recv_multipart()
            assert topic == self.topic
            if int.from_bytes(number, "big") in lose:
                continue
            if int.from_bytes(number, "big") > self.next:
                self.catch_up()
            self.apply(int.from_bytes(number, "big"), payload)

    def read_to(self, blocks: set[int]) -> None:
        """Apply batches until these blocks are cached; there are heartbeats in between."""
        deadline_s = time.monotonic() + 60
        while self.blocks != blocks:
            assert time.monotonic() < deadline_s
            self.read(self.next)

    def catch_up(self) -> None:
        """Ask for everything from the first batch that is missing."""
        self.replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self.replay.poll(60_000)
            empty, topic, number, payload = self.replay.recv_multipart()
            assert empty == b""
            assert topic == (b"" if number == END else self.topic)
            if number == END:
                assert payload == b""
                return
            self.num_replayed += 1
            self.apply(int.from_bytes(number, "big"), payload)

    def apply(self, number: int, payload: bytes) -> None:
        if number < self.next:
            return
        self.next = number + 1
        self.numbers.append(number)
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert abs(ts - time.time()) < 60
        assert rank == 0
        for event in map(decoded, events):
            match event:
                case BlockStored(block_hashes=hashes, parent_block_hash=parent, medium=str(medium)):
                    assert len(event.token_ids) == len(hashes) * event.block_size
                    assert medium != "GPU" or parent is None or parent in self.blocks
                    assert not self.media[medium].intersection(hashes)
                    self.media[medium].update(hashes)
                case BlockRemoved(block_hashes=hashes, medium=str(medium)):
                    assert self.media[medium].issuperset(hashes)
                    self.media[medium].difference_update(hashes)
                case _:
                    assert isinstance(event, AllBlocksCleared)
                    for blocks in self.media.values():
                        blocks.clear()

    def close(self) -> None:
        self.context.destroy(linger=0)


def decoded(event: Any) -> Event:
    """Return an event that is a map, or an array of its type and its fields in vLLM's order."""
    if isinstance(event, list):
        return msgspec.convert(event, type=Event)
    kinds = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
    kind = kinds[event.pop("type")]
    event.pop("cache_salt", None)  # SGLang's
    assert set(event) <= set(kind.__struct_fields__)
    return kind(**event)


def hashes(*texts: list[int]) -> set[int]:
    """Return the hashes of the whole blocks of texts."""
    return {name for tokens in texts for name in hash_chain(tokens, None)}


def hash_chain(tokens: list[int], namespace: str | None) -> list[int]:
    """Return the hashes of the whole blocks of a text, by the definition in `pagewood.radixcache.events.hashing`."""
    found: list[int] = []
    name = hashlib.sha256(b"pagewood block 1" + (b"" if namespace is None else b":" + namespace.encode())).digest()
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        name = hashlib.sha256(name + np.array(tokens[start : start + PAGE], "<i4").tobytes()).digest()
        found.append(int.from_bytes(name, "big") & (2**64 - 1))
    return found


@pytest.fixture
def publisher() -> Generator[Publisher]:
    publisher = Publisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", heartbeat_s=0.05)
    yield publisher
    publisher.close()


@pytest.fixture
def router(publisher: Publisher) -> Generator[Router]:
    router = Router(publisher.endpoint, publisher.replay_endpoint)
    yield router
    router.close()


def ids(tokens: list[int]) -> Any:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_router_that_loses_batches_knows_what_is_cached(publisher: Publisher, router: Router, form: Any) -> None:
    cache = RadixCache(PAGE)
    pump = EventPump(CacheEvents(lambda: cache, form=form).read, publisher)
    router.read(1)  # the heartbeat reaches the subscriber
    texts = [[*range(20)], [*range(12), 5, 5, 5, 5], [7] * 9]
    for number, text in enumerate(texts):
        cache.insert(ids(text), ids([*range(number * 10, number * 10 + len(text) // PAGE)]))
        pump.turn()
    cache.evict(1)  # the end of the first text
    pump.turn()
    first, expected = router.next, hashes(*texts) - hashes(texts[0]) | hashes(texts[0][:16])
    router.read(first + 3, lose=(first, first + 2))
    router.read_to(expected)
    assert router.num_replayed >= 2
    cache.clear()
    pump.turn()
    router.read_to(set())


def test_a_late_router_catches_up_when_a_heartbeat_shows_the_gap(publisher: Publisher, router: Router) -> None:
    expected = hashes(*([number] * 8 for number in range(5)))
    cache = RadixCache(PAGE)
    pump = EventPump(CacheEvents(lambda: cache).read, publisher)
    for number in range(5):
        cache.insert(ids([number] * 8), ids([2 * number, 2 * number + 1]))
        pump.turn()
    router.read_to(expected)  # all batches have been sent
    late = Router(publisher.endpoint, publisher.replay_endpoint)
    try:
        late.read_to(expected)
        assert late.num_replayed >= 5
        assert late.numbers == list(range(late.next))
    finally:
        late.close()


def test_a_topic_is_the_first_frame_of_events_and_repetitions() -> None:
    publisher = Publisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic=b"kv@a@m", heartbeat_s=0.05)
    router = Router(publisher.endpoint, publisher.replay_endpoint, topic=b"kv@a@m")
    other = Router(publisher.endpoint, publisher.replay_endpoint, topic=b"kv@b@m")
    cache = RadixCache(PAGE)
    pump = EventPump(CacheEvents(lambda: cache).read, publisher)
    try:
        router.read(1)
        cache.insert(ids([1] * 8), ids([0, 1]))
        pump.turn()
        router.read(router.next, lose=(router.next,))
        router.read_to(hashes([1] * 8))
        assert not other.sub.poll(0)
    finally:
        router.close()
        other.close()
        publisher.close()


def test_a_new_cache_starts_anew(publisher: Publisher, router: Router) -> None:
    caches = [RadixCache(PAGE)]
    pump = EventPump(CacheEvents(lambda: caches[-1]).read, publisher)
    router.read(0)
    caches[0].insert(ids([1] * 8), ids([0, 1]))
    pump.turn()
    caches.append(RadixCache(PAGE))
    caches[1].insert(ids([2] * 4), ids([5]))
    pump.turn()
    router.read_to(hashes([2] * 4))


class Tiers:
    """A prefix cache with a small host and a small disk, and random requests."""

    def __init__(self, folder: Path, seed: int, *, num_host_pages: int = 6) -> None:
        self.rng = random.Random(seed)
        layers = [np.zeros((8, 8), np.uint8)]
        self.device = ArrayPages([layers])
        self.host = HostTier(page_bytes=8, num_pages=num_host_pages)
        self.disk = DiskTier(folder / "pages", page_bytes=8, num_bytes=20 * 8)
        self.texts: list[tuple[list[int], str | None]] = []
        self.open()

    def open(self) -> None:
        """Begin with an empty device, above the same host and disk."""
        self.free = list(range(8))
        self.index = TieredIndex(RadixCache(PAGE), device=self.device, host=self.host, disk=self.disk, page_size=PAGE)

    def take(self, n: int) -> Any:
        if len(self.free) < n:
            self.free += self.index.evict(n - len(self.free)).tolist()
        taken = self.free[:n]
        self.free = self.free[n:]
        return ids(taken)

    def request(self) -> None:
        """Recall what tiers have of a text, or else compute it; it is new, or continues an earlier one."""
        text, namespace = self.rng.choice([*self.texts, ([], None), ([], "salt")])
        text = [
            *text[: self.rng.randrange(0, 17, PAGE)],
            *(self.rng.randrange(3) for _ in range(self.rng.choice((4, 8)))),
        ]
        self.texts.append((text, namespace))
        recall = self.index.recall(ids(text), namespace)
        while recall is not None and self.index.advance(recall, self.take):
            time.sleep(0)
        match = self.index.match(ids(text), namespace)
        lease = self.index.lock(match.node)
        pages = self.take((len(text) - match.num_tokens) // PAGE)
        self.index.insert(ids(text[match.num_tokens :]), pages, namespace, after=lease)
        self.index.unlock(lease)

    def held(self) -> dict[str, set[int]]:
        """Return the hashes of the blocks that each medium holds, by asking the tiers for their keys."""
        chain = KeyChain(PAGE, fingerprint=b"")
        held: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        for text, namespace in self.texts:
            keys = chain.extend(chain.root(namespace), ids(text))
            num_on_device = self.index.peek(ids(text), namespace).num_tokens // PAGE
            for index, name in enumerate(hash_chain(text, namespace)):
                held["GPU"].update([name] if index < num_on_device else [])
                held["CPU"].update([name] if keys[index] in self.host else [])
                held["STORAGE"].update([name] if keys[index] in self.disk else [])
        return held


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("seed", range(4))
def test_a_router_knows_what_the_host_and_the_disk_hold(
    publisher: Publisher, router: Router, tmp_path: Path, form: Any, seed: int
) -> None:
    """With pages that move up and down, batches that are lost, and a router that comes late."""
    tiers = Tiers(tmp_path, seed)
    pump = EventPump(CacheEvents(lambda: tiers.index, form=form).read, publisher)
    router.read(1)
    for _ in range(40):
        tiers.request()
        pump.turn()
    tiers.index.flush()
    pump.turn()
    expected = tiers.held()
    assert min(map(len, expected.values())) > 3
    assert len(expected["STORAGE"] - expected["CPU"] - expected["GPU"]) > 0
    first = router.next
    router.read(first + 10, lose=(first + 2, first + 7))
    until(lambda: router.read(router.next) or router.media == expected)
    late = Router(publisher.endpoint, publisher.replay_endpoint)
    try:
        until(lambda: late.read(late.next) or late.media == expected)
        assert late.num_replayed >= 40
    finally:
        late.close()
        tiers.index.close()


def test_tiers_keep_their_blocks_when_the_device_is_cleared_or_replaced(
    publisher: Publisher, router: Router, tmp_path: Path
) -> None:
    tiers = Tiers(tmp_path, 1, num_host_pages=32)
    pump = EventPump(CacheEvents(lambda: tiers.index).read, publisher)
    router.read(0)
    for namespace in (None, "salt"):
        tiers.texts.append(([1, 2, 3, 4, 5, 6, 7, 8], namespace))
        tiers.index.insert(ids(tiers.texts[-1][0]), tiers.take(2), namespace)
    tiers.index.flush()
    pump.turn()
    full = tiers.held()
    until(lambda: router.read(router.next) or router.media == full)
    assert [len(blocks) for blocks in full.values()] == [4, 4, 4]
    for namespace in (None, "salt"):
        tiers.index.clear(namespace)
    pump.turn()
    until(lambda: router.read(router.next) or router.media == full | {"GPU": set()})
    tiers.index.close(keep_stores=True)
    tiers.open()
    pump.turn()
    number = router.next + 3
    router.read(number)
    assert router.media == full | {"GPU": set()}
    tiers.index.clear()  # and the host
    pump.turn()
    until(lambda: router.read(router.next) or router.media == full | {"GPU": set(), "CPU": set()})
    tiers.index.close()


def test_a_disk_of_an_earlier_process_is_reported_when_it_is_needed(
    publisher: Publisher, router: Router, tmp_path: Path
) -> None:
    first = Tiers(tmp_path, 1)
    first.texts.append(([*range(12)], None))
    first.index.insert(ids([*range(12)]), first.take(3))
    first.index.close()
    tiers = Tiers(tmp_path, 1)
    tiers.texts = first.texts
    pump = EventPump(CacheEvents(lambda: tiers.index).read, publisher)
    pump.turn()
    router.read(2)
    assert not any(router.media.values())
    recall = tiers.index.recall(ids([*range(12), 99, 99, 99, 99]))
    assert recall is not None
    while tiers.index.advance(recall, tiers.take):
        time.sleep(0)
    pump.turn()
    until(lambda: router.read(router.next) or router.media == tiers.held())
    assert router.media == dict.fromkeys(("GPU", "CPU", "STORAGE"), hashes([*range(12)]))
    tiers.index.close()


def test_what_cannot_be_followed_or_bound_is_refused(publisher: Publisher) -> None:
    with pytest.raises(ValueError, match="cache must report its changes to be followed, got object"):
        CacheEvents(object)
    with pytest.raises(ValueError, match=r"kv_events must be addresses that can be bound, got 'tcp://127.0.0.1"):
        Publisher("tcp://127.0.0.1:*", replay_endpoint=publisher.endpoint)


def test_a_malformed_replay_request_is_ignored(publisher: Publisher, router: Router) -> None:
    router.replay.send_multipart([b"", b"short"])
    router.read(2)
    router.next = 0
    router.catch_up()
    assert router.next >= 3


def test_a_served_model_publishes_what_it_caches(tmp_path: Path) -> None:
    """With real processes: the events have the tokens of the prompts, and the counter of the engine agrees."""
    addresses = [f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"]
    server = Server(
        tmp_path, "--kv-events", addresses[0], "--kv-events-replay", addresses[1], "--host-cache-gb", "0.05"
    )
    router = Router(*addresses)
    try:
        for question in ("What is 2 + 3?", "What is 2 + 4? Please say it in words."):
            server.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": question}])
        # The counters come behind the answers, with the next pulse.
        until(lambda: router.read(router.next) or 3 < len(router.blocks) == server.until_idle()["num_cached_pages"])
        until(lambda: router.read(router.next) or router.media["CPU"] == router.blocks)  # written through
    finally:
        router.close()
        server.close()


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    def config(**settings: Any) -> ServeConfig:
        return ServeConfig(served_model_name="m", model_folder=model_folder(None), **settings)

    assert config(kv_events="tcp://*:5557", kv_events_replay="tcp://[::1]:5558").kv_events_form == "map"
    with pytest.raises(ValueError, match=r"kv_events must be like tcp://\*:5557 or ipc:///path, got '5557'"):
        config(kv_events="5557")
    with pytest.raises(ValueError, match="kv_events must be given with kv_events_replay"):
        config(kv_events_replay="tcp://*:5558")
    with pytest.raises(ValueError, match="prefix_cache must be true for kv_events"):
        config(kv_events="tcp://*:5557", engine=EngineConfig(prefix_cache=False))
    with pytest.raises(ValueError, match=r"kv_events must be None with enable_dp_attention, got 'tcp://\*:5557'"):
        config(kv_events="tcp://*:5557", engine=EngineConfig(tensor_parallel_size=2, enable_dp_attention=True))
    with pytest.raises(ValueError, match="kv_events_form must be map or array, got 'xml'"):
        config(kv_events="tcp://*:5557", kv_events_form="xml")
