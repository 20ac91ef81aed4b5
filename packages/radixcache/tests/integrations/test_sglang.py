# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false
# (SGLang and torch are not dependencies of this package)
"""The backend for SGLang, between SGLang's real requests, rows and allocators, compared with SGLang's own trees."""

import json
import random
from array import array
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="needs SGLang; nox -s integrations installs it")
torch = pytest.importorskip("torch")

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from pagewood.radixcache.integrations import sglang as ours  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 128000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "dtype": "float16", "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    return publish_server_args(tmp_path_factory.mktemp("model"))


def publish_server_args(folder: Path) -> ServerArgs:
    """Register the backend, and give SGLang's code the arguments of a server that uses it and the model in `folder`.

    The folder gets the model's config.json.
    """
    (folder / "config.json").write_text(json.dumps(CONFIG))
    ours.register()
    args = ServerArgs(model_path=str(folder), device="cpu", skip_tokenizer_init=True, radix_cache_backend="pagewood")
    runtime_context.get_context().set_server_args(args)
    return args


class Server:
    """The host side of SGLang around one tree, with a record of what each slot of the KV cache holds."""

    max_length = 512
    is_recording = True

    def __init__(self, tree, page_size: int, num_tokens: int, **params) -> None:
        self.page_size = page_size
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(num_tokens, torch.float16, "cpu", None, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(num_tokens, page_size, torch.float16, "cpu", None, False)
        self.pool = ReqToTokenPool(size=16, max_context_len=self.max_length, device="cpu", enable_memory_saver=False)
        self.cache = tree(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                **params,
            )
        )
        self.num_tokens = num_tokens
        self.content: dict[int, tuple[int, ...]] = {}
        self.running: list = []

    def start(self, prompt: list[int], extra_key: str | None = None):
        """Admit a request as the scheduler does, and compute its prompt."""
        sampling = SamplingParams(max_new_tokens=64, temperature=0, ignore_eos=True)
        req = Req("request", "", array("q", prompt), sampling, vocab_size=128_000, eos_token_ids={2})
        req.extra_key = extra_key
        req.init_next_round_input(self.cache)
        req.lock = self.cache.lock(req.last_node)
        if (
            len(prompt) - req.prefix_len + self.page_size
            > self.allocator.available_size() + self.cache.evictable_size()
        ):
            self.cache.unlock(req.lock)
            return None
        self.pool.alloc([req])
        self.row(req)[: req.prefix_len] = self.cache.prefix_device_indices(req)
        self.extend(req, req.prefix_len, len(prompt))
        self.running.append(req)
        return req

    def row(self, req):
        return self.pool.req_to_token[req.kv.req_pool_idx]

    def extend(self, req, start: int, end: int) -> bool:
        """Allocate and compute the positions [start, end)."""
        first = -(-start // self.page_size) * self.page_size
        need = -(-end // self.page_size) * self.page_size - first
        if need > 0:
            self.allocator.evict_to_free_tokens(self.cache, need)
            slots = self.allocator.alloc(need)
            if slots is None:
                return False
            self.row(req)[first:end] = slots[: end - first].to(torch.int32)
            if self.page_size > 1:  # the rest of the last page is written later
                self.pool.req_to_token[req.kv.req_pool_idx, end : first + need] = slots[end - first :].to(torch.int32)
        tokens = [*req.origin_input_ids, *req.output_ids]
        for position, slot in enumerate(self.row(req)[start:end].tolist() if self.is_recording else (), start):
            self.content[slot] = (req.extra_key, *tokens[: position + 1])
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = end
        req.refresh_fill_ids()
        return True

    def decode(self, req, token: int) -> None:
        req.output_ids.append(token)
        length = len(req.origin_input_ids) + len(req.output_ids)
        if not self.extend(req, length - 1, length):
            req.output_ids.pop()
            self.finish(req)

    def checkpoint(self, req) -> None:
        req.refresh_fill_ids()
        checkpoint_kv_cache(req, self.cache)

    def finish(self, req) -> None:
        req.finished_reason = FINISH_LENGTH(length=1)
        release_kv_cache(req, self.cache, checkpoint=True)
        self.running.remove(req)

    def check(self) -> None:
        """Every running request reads the KV of its own tokens, and no slot is lost."""
        owned = 0
        for req in self.running:
            tokens = [*req.origin_input_ids, *req.output_ids]
            for position, slot in enumerate(self.row(req)[: req.kv.kv_committed_len].tolist()):
                assert self.content[slot] == (req.extra_key, *tokens[: position + 1])
            owned += -(-req.kv.kv_allocated_len // self.page_size) * self.page_size - req.kv.cache_protected_len
        cached = self.cache.evictable_size() + self.cache.protected_size()
        assert self.allocator.available_size() + cached + owned == self.num_tokens
        assert cached == self.cache.total_size()
        if isinstance(self.cache, ours.PagewoodRadixCache):
            self.cache.sanity_check()


def live(servers: list[Server], seed: int, num_events: int, namespaces: tuple[str | None, ...] = (None,)) -> list[int]:
    """Send the same random events to all servers; return the lengths of the hits, which must be equal."""
    rng, hits = random.Random(seed), []
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 60))] for _ in range(6)]
    for _ in range(num_events):
        kind, index, text = rng.randrange(4), rng.randrange(8), rng.choice(texts)
        prompt = [*text[: rng.randrange(len(text) + 1)], *(rng.randrange(3) for _ in range(rng.randrange(1, 20)))]
        namespace, token = rng.choice(namespaces), rng.randrange(3)
        lengths = set()
        for server in servers:
            if kind == 0 and len(server.running) < 6:
                req = server.start(prompt, namespace)
                lengths.add(req and req.prefix_len)
            elif index < len(server.running):
                req = server.running[index]
                if kind == 1:
                    for _ in range(5):
                        if req in server.running:
                            server.decode(req, token)
                elif kind == 2:
                    server.checkpoint(req)
                else:
                    server.finish(req)
            server.check()
        assert len(lengths) <= 1
        hits += lengths
    return hits


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_hits_are_those_of_sglang_and_no_slot_is_lost(page_size: int, seed: int) -> None:
    servers = [Server(tree, page_size, 4000) for tree in (RadixCache, ours.PagewoodRadixCache)]
    assert sum(filter(None, live(servers, seed, 120, (None, "adapter")))) > 100


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "filo", "mru", "slru", "priority"])
def test_a_small_memory_is_shared_correctly(page_size: int, policy: str) -> None:
    server = Server(ours.PagewoodRadixCache, page_size, 160, eviction_policy=policy)
    assert sum(filter(None, live([server], 7, 150))) > 20
    for req in list(server.running):
        server.finish(req)
    server.check()
    assert server.cache.protected_size() == 0


def test_a_growing_request_moves_to_the_pages_of_the_tree() -> None:
    server = Server(ours.PagewoodRadixCache, 4, 400)
    first, second = server.start(list(range(20))), server.start(list(range(20)))  # both compute the same prompt
    server.checkpoint(first)
    before = server.allocator.available_size()
    server.checkpoint(second)
    assert server.allocator.available_size() == before + 20
    assert torch.equal(server.row(first)[:20], server.row(second)[:20])
    server.check()


def test_eviction_is_exact_to_the_page() -> None:
    server = Server(ours.PagewoodRadixCache, 4, 400)
    server.finish(server.start(list(range(40))))
    assert server.cache.evict(EvictParams(num_tokens=5)).num_tokens_evicted == 8
    assert server.start([*range(40), 7]).prefix_len == 32


def insert(cache, tokens, extra_key=None, salt=None):
    key = RadixKey(array("q", tokens), extra_key, cache_salt=salt)
    return cache.insert(InsertParams(key=key, value=torch.arange(len(tokens)) + 1000))


def match(cache, tokens, extra_key=None, salt=None):
    return cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), extra_key, cache_salt=salt)))


def test_bigram_keys_match_as_in_sglang() -> None:
    rng = random.Random(3)
    caches = [Server(tree, 2, 1000, is_eagle=True).cache for tree in (RadixCache, ours.PagewoodRadixCache)]
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 16))]
        results = [insert(cache, tokens).prefix_len for cache in caches]
        assert results[0] == results[1]
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 16))]
        found = [match(cache, tokens).device_prefix_len for cache in caches]
        assert found[0] == found[1]
        assert caches[0].total_size() == caches[1].total_size()


@pytest.mark.parametrize("dynamo", [False, True])
def test_kv_events_are_those_of_sglang(dynamo: bool) -> None:
    options = {"enable_kv_cache_events": True, "dynamo_kv_event_format": dynamo}
    caches = [Server(tree, 2, 1000, **options).cache for tree in (RadixCache, ours.PagewoodRadixCache)]
    stored = [(list(range(9)), None, None), ([0, 1, 2, 3, 9, 9], None, None), ([5, 6, 7, 8], "lora", "salt")]
    stored += [([5, 6, 7, 8, 9, 1], "lora", "salt"), ([5, 6], None, "salt")]
    for tokens, extra_key, salt in stored:
        for cache in caches:
            insert(cache, tokens, extra_key, salt)
    theirs, mine = [cache.take_events() for cache in caches]
    assert theirs == mine
    assert len(theirs) > 4
    for cache in caches:
        cache.evict(EvictParams(num_tokens=1000))
    removed = [{h for event in cache.take_events() for h in event.block_hashes} for cache in caches]
    assert removed[0] == removed[1]
    assert len(removed[0]) == (9 if dynamo else 8)  # only Dynamo's hashes tell adapters apart
    assert match(caches[1], list(range(9))).device_prefix_len == 0


def test_requests_are_sorted_depth_first_as_in_sglang() -> None:
    rng = random.Random(5)
    caches = [Server(tree, 1, 4000).cache for tree in (RadixCache, ours.PagewoodRadixCache)]
    for _ in range(30):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
        for cache in caches:
            insert(cache, tokens)
    queries = [[rng.randrange(3) for _ in range(rng.randrange(0, 8))] for _ in range(40)]
    tails = []
    for cache in caches:
        nodes = [match(cache, query).last_device_node for query in queries]
        nodes = [match(cache, query).last_device_node for query in queries]  # after the splits of SGLang's matches
        order = cache.dfs_weight_order(nodes)
        assert sorted(order) == list(range(len(queries)))
        tails.append([tuple(queries[index][: match(cache, queries[index]).device_prefix_len]) for index in order])
    weight = {}
    for prefix in tails[0]:
        for end in range(len(prefix) + 1):
            weight[prefix[:end]] = weight.get(prefix[:end], 0) + 1

    def weights(order):
        return [[weight[prefix[:end]] for end in range(1, len(prefix) + 1)] for prefix in order]

    assert weights(tails[0]) == weights(tails[1])  # equal weights may be in either order


def test_namespaces_do_not_share_and_touching_counts_as_a_use() -> None:
    cache = Server(ours.PagewoodRadixCache, 1, 100).cache
    insert(cache, [1, 2, 3])
    insert(cache, [4, 5, 6], "adapter", "salt")
    assert match(cache, [4, 5, 6], "adapter").device_prefix_len == 0
    assert match(cache, [4, 5, 6], None, "salt").device_prefix_len == 0
    cache.touch_prefix(RadixKey(array("q", [1, 2, 3])))
    cache.evict(EvictParams(num_tokens=3))
    assert match(cache, [1, 2, 3]).device_prefix_len == 3
    assert match(cache, [4, 5, 6], "adapter", "salt").device_prefix_len == 0


def test_sglang_builds_the_backend_by_its_name(server_args) -> None:
    server = Server(ours.PagewoodRadixCache, 4, 400)
    params = CacheInitParams(
        disable=False, req_to_token_pool=server.pool, token_to_kv_pool_allocator=server.allocator, page_size=4
    )

    def context(**changes):
        values = {"is_hybrid_swa": False, "is_hybrid_ssm": False, "enable_hierarchical_cache": False}
        values |= {"disable_radix_cache": False} | changes
        return TreeCacheBuildContext(
            server_args=server_args, params=params, tp_worker=None, model_config=None, tp_size=1, tp_rank=0,
            tp_group=None, **values,
        )  # fmt: skip

    assert type(create_tree_cache(context())) is ours.PagewoodRadixCache
    with pytest.raises(ValueError, match="sliding-window"):
        create_tree_cache(context(is_hybrid_swa=True))
    with pytest.raises(ValueError, match="--disable-radix-cache"):
        create_tree_cache(context(disable_radix_cache=True))


def test_the_distribution_is_a_plugin_of_sglang() -> None:
    (plugin,) = [one for one in entry_points(group="sglang.srt.plugins") if one.name == "pagewood"]
    assert plugin.load() is ours.register


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="eviction_policy must be one of lru"):
        Server(ours.PagewoodRadixCache, 1, 100, eviction_policy="tlru")
    with pytest.raises(ValueError, match="eviction_policy_config must be empty for lru"):
        Server(ours.PagewoodRadixCache, 1, 100, eviction_policy_config={"threshold": 3})
    with pytest.raises(ValueError, match="token ids must be in"):
        match(Server(ours.PagewoodRadixCache, 1, 100).cache, [1, 2**31])
