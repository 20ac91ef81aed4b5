"""Events of the prefix cache on real sockets: a subscriber that is late or loses messages catches up by replay."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from pagewood.engine.api import EngineConfig
from pagewood.engine.cache_events import CacheEvents
from pagewood.engine.folder import model_folder
from pagewood.radixcache import RadixCache
from pagewood.server.config import ServeConfig
from pagewood.server.kv_events import END, EventPump, Publisher
from serving import MODEL, Server, until

PAGE = 4


class Router:
    """A reader that shares no code with the publisher: it keeps the hashes of the blocks that are cached."""

    def __init__(self, endpoint: str, replay_endpoint: str | None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        assert replay_endpoint is not None
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(replay_endpoint)
        self.next = 0
        self.blocks: set[int] = set()
        self.num_replayed = 0
        self.numbers: list[int] = []

    def read(self, until: int, *, lose: tuple[int, ...] = ()) -> None:
        """Apply batches up to a number; those to lose are dropped on the way."""
        deadline_s = time.monotonic() + 10
        while self.next <= until:
            assert time.monotonic() < deadline_s
            if not self.sub.poll(1000):
                continue
            topic, number, payload = self.sub.recv_multipart()
            assert topic == b""
            if int.from_bytes(number, "big") in lose:
                continue
            if int.from_bytes(number, "big") > self.next:
                self.catch_up()
            self.apply(int.from_bytes(number, "big"), payload)

    def read_to(self, blocks: set[int]) -> None:
        """Apply batches until these blocks are cached; there are heartbeats in between."""
        deadline_s = time.monotonic() + 10
        while self.blocks != blocks:
            assert time.monotonic() < deadline_s
            self.read(self.next)

    def catch_up(self) -> None:
        """Ask for everything from the first batch that is missing."""
        self.replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self.replay.poll(10_000)
            empty, _, number, payload = self.replay.recv_multipart()
            assert empty == b""
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
        for fields in map(named, events):
            match fields["type"]:
                case "BlockStored":
                    hashes = fields["block_hashes"]
                    assert len(fields["token_ids"]) == len(hashes) * fields["block_size"]
                    assert fields["parent_block_hash"] is None or fields["parent_block_hash"] in self.blocks
                    self.blocks.update(hashes)
                case "BlockRemoved":
                    self.blocks.difference_update(fields["block_hashes"])
                case kind:
                    assert kind == "AllBlocksCleared"
                    self.blocks.clear()

    def close(self) -> None:
        self.context.destroy(linger=0)


NAMES = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")


def named(event: Any) -> dict[str, Any]:
    """Return the fields of an event; an array has them in vLLM's order."""
    is_map: bool = hasattr(event, "keys")
    return event if is_map else dict(zip(NAMES, event, strict=False))


def hashes(*texts: list[int]) -> set[int]:
    """Return the hashes of the whole blocks of texts, by the definition in `pagewood.radixcache.events.hashing`."""
    found = set[int]()
    for tokens in texts:
        name = hashlib.sha256(b"pagewood block 1").digest()
        for start in range(0, len(tokens) - PAGE + 1, PAGE):
            name = hashlib.sha256(name + np.array(tokens[start : start + PAGE], "<i4").tobytes()).digest()
            found.add(int.from_bytes(name, "big") & (2**64 - 1))
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
    server = Server(tmp_path, "--kv-events", addresses[0], "--kv-events-replay", addresses[1])
    router = Router(*addresses)
    try:
        for question in ("What is 2 + 3?", "What is 2 + 4? Please say it in words."):
            server.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": question}])
        num_cached = server.until_idle()["num_cached_pages"]
        assert num_cached > 3
        until(lambda: router.read(router.next) or len(router.blocks) == num_cached)
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
    with pytest.raises(ValueError, match="kv_events_form must be map or array, got 'xml'"):
        config(kv_events="tcp://*:5557", kv_events_form="xml")
