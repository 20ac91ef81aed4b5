# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false
# (mini-sglang and torch are not dependencies of this package)
"""The cache type for mini-sglang, under its real cache manager, compared with its own radix cache."""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("minisgl", reason="needs mini-sglang; nox -s integrations uses a checkout of it")
torch = pytest.importorskip("torch")

import minisgl.core as core  # noqa: E402
from minisgl.scheduler.cache import CacheManager  # noqa: E402

from pagewood.radixcache.integrations import minisgl as ours  # noqa: E402


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(core, "_GLOBAL_CTX", None)
    ours.register()
    ours.register()  # changes nothing


class Server:
    """The cache side of mini-sglang's scheduler, with a record of what each slot holds."""

    def __init__(self, kind: str, page_size: int, num_pages: int) -> None:
        core._GLOBAL_CTX = None
        core.set_global_ctx(core.Context(page_size=page_size))
        self.table = torch.zeros((8, 256), dtype=torch.int32)
        self.manager = CacheManager(num_pages, page_size, self.table, kind)
        self.page_size = page_size
        self.rows = list(range(8))
        self.running = []
        self.content: dict[int, tuple[int, ...]] = {}

    def start(self, tokens: list[int]):
        ids = torch.tensor(tokens, dtype=torch.int32)
        handle = self.manager.match_req(SimpleNamespace(input_ids=ids, input_len=len(ids))).cuda_handle
        self.manager.lock(handle)
        if len(tokens) - handle.cached_len + self.page_size > self.manager.available_size:
            self.manager.unlock(handle)
            return None
        req = core.Req(ids, self.rows.pop(), handle.cached_len, 4, 0, core.SamplingParams(), handle)
        row = self.table[req.table_idx]
        if handle.cached_len:
            row[: handle.cached_len] = handle.get_matched_indices()
        first, last = handle.cached_len // self.page_size, -(-len(tokens) // self.page_size)
        slots = self.manager._page_to_token(self.manager._allocate(last - first))
        row[handle.cached_len : last * self.page_size] = slots
        for position, slot in enumerate(row[handle.cached_len : len(tokens)].tolist(), handle.cached_len):
            self.content[slot] = tuple(tokens[: position + 1])
        req.cached_len = len(tokens)
        self.running.append(req)
        return req

    def finish(self, index: int) -> None:
        req = self.running.pop(index)
        self.manager.cache_req(req, finished=True)
        self.rows.append(req.table_idx)

    def check(self) -> None:
        for req in self.running:
            tokens = req.input_ids.tolist()
            row = self.table[req.table_idx, : len(tokens)].tolist()
            assert [self.content[slot] for slot in row] == [tuple(tokens[: n + 1]) for n in range(len(tokens))]
        self.manager.prefix_cache.check_integrity()
        if not self.running:
            self.manager.check_integrity()


def live(servers: list[Server], seed: int) -> int:
    rng, total = random.Random(seed), 0
    for _ in range(150):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(2, 40))]
        is_start, index, hits = rng.random() < 0.5, rng.randrange(6), set()
        for server in servers:
            if is_start and len(server.running) < 5:
                req = server.start(prompt)
                hits.add(req and req.cache_handle.cached_len)
            elif index < len(server.running):
                server.finish(index)
            server.check()
        assert len(hits) <= 1
        total += sum(filter(None, hits))
    for server in servers:
        while server.running:
            server.finish(0)
        server.check()
    return total


@pytest.mark.parametrize("page_size", [1, 4])
def test_hits_are_those_of_mini_sglang(page_size: int) -> None:
    assert live([Server(kind, page_size, 6000 // page_size) for kind in ("radix", "pagewood")], page_size) > 100


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_small_memory_is_shared_correctly(page_size: int) -> None:
    assert live([Server("pagewood", page_size, 160 // page_size)], 9) > 20


def test_more_than_is_evictable_is_refused() -> None:
    cache = Server("pagewood", 4, 10).manager.prefix_cache
    cache.insert_prefix(torch.arange(9, dtype=torch.int32), torch.arange(9, dtype=torch.int32))
    assert cache.evict(0).tolist() == []
    with pytest.raises(RuntimeError, match="size must be <= 8 evictable tokens, got 9"):
        cache.evict(9)
    assert cache.evict(3).tolist() == [4, 5, 6, 7]
