"""Tenants of one engine share no computed text: device, host, disk, shared folder, and the indexes of drafters.

The namespaces are those that the server makes of tenants and of the salts of clients. A rival sends the same prompt
with salts that look like the namespace of the tenant that sent it first.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewood.engine import EngineConfig, SamplingParams
from pagewood.engine.api import Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.kvpool.tiers import ArrayPages, HostTier, SharedFolder, TieredIndex
from pagewood.radixcache import RadixCache
from pagewood.server.keys.namespaces import namespace_of

PAGE = 16
PROMPT = [5 + (i * i * 31 + i) % 200 for i in range(100)]
ACME = ("acme", None)
RIVALS = [("rival", salt) for salt in (None, "acme", "@4:acme:", "4:acme:")] + [("", "4:acme:"), ("", "@4:acme:")]


class Served:
    """An engine with the embedded model, and one request at a time."""

    def __init__(self, **options: Any) -> None:
        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        config = EngineConfig(max_total_tokens=256, **options)
        self.engine: Engine = build_engine(config, inbox=self.inbox, outbox=self.outbox)

    def cached(self, sender: tuple[str, str | None], prompt: list[int] = PROMPT, *, max_tokens: int = 8) -> int:
        """Answer a prompt; return how many of its tokens were cached."""
        self.inbox.put(
            Submit(
                request_id="x",
                tokens=np.array(prompt, "<i4").tobytes(),
                sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                namespace=namespace_of(*sender),
                tenant=sender[0],
            )
        )
        pending: Pending | None = None
        num_cached = 0
        while True:
            pending = self.engine.advance(pending)
            deltas = self.outbox.take()
            num_cached = max([num_cached, *(delta.num_cached_tokens for delta in deltas)])
            if any(delta.finish is not None for delta in deltas):
                break
        while pending is not None:
            pending = self.engine.advance(pending)
        assert self.engine.violation() is None
        return num_cached


@contextmanager
def served(**options: Any) -> Generator[Served]:
    server = Served(**options)
    try:
        yield server
    finally:
        server.engine.close()


def test_device_host_and_disk(tmp_path: Path) -> None:
    tiers: dict[str, Any] = {
        "host_cache_gb": 0.1, "disk_cache_path": str(tmp_path), "disk_cache_gb": 0.1,
        "cache_write_policy": "write_through",
    }  # fmt: skip
    kept = len(PROMPT) // PAGE * PAGE
    with served(**tiers) as server:
        assert server.cached(ACME) == 0
        assert server.cached(ACME) == kept, "the device has it"
        assert [server.cached(rival) for rival in RIVALS[:1]] == [0]
        for other in range(3):  # each evicts the one before
            server.cached(("other", None), [7 + (other * 7919 + i) % 200 for i in range(200)])
        for rival in RIVALS[1:]:
            assert server.cached(rival) == 0, rival
        assert server.cached(ACME) == kept, "the host has it"
    with served(**tiers) as server:
        for rival in [("third", None), ("third", "@4:acme:"), ("", "4:acme:x"), ("acme", "@4:acme:"), ("acme", "x")]:
            assert server.cached(rival) == 0, rival
        assert server.cached(ACME) == kept, "the disk has it"


def test_a_shared_folder(tmp_path: Path) -> None:
    """Two processes with the same model: the second finds what the first wrote, for the same tenant only."""
    tokens = np.array(PROMPT[:64], np.int32)

    def index(folder: Path) -> TieredIndex:
        return TieredIndex(
            RadixCache(page_size=PAGE),
            device=ArrayPages([[np.zeros((8, 32), np.uint8)]]),
            host=HostTier(page_bytes=32, num_pages=8),
            remote=SharedFolder(folder, page_bytes=32, num_bytes=10_000),
            page_size=PAGE,
        )

    namespace = namespace_of(*ACME)
    first = index(tmp_path)
    first.insert(tokens, np.arange(4, dtype=np.int32), namespace)
    first.evict(4)
    first.close()
    second = index(tmp_path)
    try:
        for rival in [*RIVALS, ("acme", "x"), ("", None)]:
            assert second.locate(tokens, namespace_of(*rival)).num_remote == 0, rival
        assert second.locate(tokens, namespace).num_remote == 64
    finally:
        second.close()


@pytest.mark.parametrize("speculative", ["suffix", pytest.param("ngram", marks=pytest.mark.slow)])
def test_drafters(speculative: str) -> None:
    """A rival gets as many drafts as in an engine that has never seen the other tenant, whatever that one asked."""

    def drafted(server: Served, sender: tuple[str, str | None]) -> int:
        before = _num_drafted(server.engine)
        server.cached(sender, max_tokens=40)
        return _num_drafted(server.engine) - before

    with served(speculative=speculative, speculative_control="fixed") as server:
        alone = drafted(server, ("rival", None))
    with served(speculative=speculative, speculative_control="fixed") as server:
        assert drafted(server, ACME) == alone
        again = drafted(server, ACME)
        assert (again > alone) == (speculative == "suffix"), "ngram reads the request's own text only"
        assert drafted(server, ("rival", None)) == alone
        assert drafted(server, ("rival", "@4:acme:")) == alone


def _num_drafted(engine: Engine) -> int:
    counts = engine.counters().speculation
    assert counts is not None
    return counts.num_drafted
