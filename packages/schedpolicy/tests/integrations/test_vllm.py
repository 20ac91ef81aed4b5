# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false
# (vLLM is not a dependency of this package)
"""The orders on vLLM's real scheduler, and live matches against vLLM's own look-up."""

import json
import random
import runpy
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM; nox -s integrations installs it")
torch = pytest.importorskip("torch")

import vllm.platforms  # noqa: E402
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from pagewood.schedpolicy.integrations.vllm import OrderedAsyncScheduler, OrderedScheduler  # noqa: E402

BLOCK = 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "dtype": "float16", "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    vllm.platforms.current_platform.device_type = "cpu"  # no platform is found without a GPU
    init_none_hash(sha256)
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


class Engine:
    """vLLM's scheduler in front of a model that always answers with token 7."""

    def __init__(self, model, scheduler=OrderedScheduler, *, blocks=200, running=1, policy="fcfs", budget=64, **config):
        model_config = ModelConfig(model=model, dtype="float16", skip_tokenizer_init=True, max_model_len=1024)
        vllm_config = VllmConfig(
            model_config=model_config,
            scheduler_config=SchedulerConfig(
                max_num_seqs=running, max_num_batched_tokens=budget, max_model_len=1024, is_encoder_decoder=False,
                enable_chunked_prefill=True, policy=policy, watermark=0.0,
                async_scheduling=issubclass(scheduler, OrderedAsyncScheduler),
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            additional_config=config,
        )  # fmt: skip
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        vllm_config.cache_config.num_gpu_blocks = blocks
        self.scheduler = scheduler(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.started: list[str] = []

    def add(self, name, prompt, *, max_tokens=1, arrival=0.0, priority=0, salt=None, **extra) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None)
        params.update_from_generation_config({}, 2)
        request = Request(
            name, list(prompt), params, None, arrival_time=arrival, priority=priority, cache_salt=salt,
            block_hasher=self.hasher,
        )  # fmt: skip
        self.scheduler.add_request(request)
        return request

    def step(self) -> list[str]:
        output = self.scheduler.schedule()
        started = [new.req_id for new in output.scheduled_new_reqs]
        self.started += started
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        done = {name: requests[name].num_computed_tokens >= requests[name].num_tokens for name in names}
        tokens = [[7] if done[name] else [] for name in names]
        runner = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=tokens
        )
        self.scheduler.update_from_output(output, runner)
        return started

    def run(self) -> list[str]:
        for _ in range(2000):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests()
        return self.started


def words(seed: int, length: int = 16) -> list[int]:
    return [random.Random(seed).randrange(10, 900) for _ in range(length)]


def test_the_longest_match_is_live(model) -> None:
    """A request whose prefix is computed while it waits overtakes those that came before it."""
    engine = Engine(model, pagewood_order="lpm")
    shared = words(1, 32)
    engine.add("first", shared)
    engine.step()
    engine.add("other", words(2), arrival=0.001)
    engine.add("repeat", [*shared, 5], arrival=0.002)
    assert engine.run() == ["first", "repeat", "other"]


def test_first_come_first_served_by_default(model) -> None:
    engine = Engine(model)
    shared = words(1, 32)
    for name, prompt in {"first": shared, "other": words(2), "repeat": [*shared, 5]}.items():
        engine.add(name, prompt)
    assert engine.run() == ["first", "other", "repeat"]


def test_earliest_deadline_first(model) -> None:
    engine = Engine(model, pagewood_order="edf")
    engine.add("none", words(1))
    engine.add("late", words(2), deadline_s=9.0)
    engine.add("soon", words(3), deadline_s=1.0)
    engine.add("later but urgent", words(4), arrival=0.5, deadline_s=0.1)
    assert engine.run() == ["later but urgent", "soon", "late", "none"]


def test_tenants_share(model) -> None:
    """The tenant with many requests does not keep the other one waiting; within one step it is charged as well."""
    for running in (1, 2):
        engine = Engine(model, running=running, pagewood_order="fair")
        for number in range(6):
            engine.add(f"a{number}", words(number), tenant="a")
        for number in range(2):
            engine.add(f"b{number}", words(10 + number), salt="b")
        assert engine.run()[:4] == ["a0", "b0", "a1", "b1"]


def test_a_tenant_pays_for_the_tokens_that_it_computes(model) -> None:
    """What is being computed for a request counts as cached at once in vLLM; the tenant pays for it all the same."""
    engine = Engine(model, pagewood_order="fair")
    for number in range(2):
        engine.add(f"a{number}", words(number, 41), tenant="a")
    for number in range(6):
        engine.add(f"b{number}", words(10 + number, 9), tenant="b")
    assert engine.run() == ["a0", "b0", "b1", "b2", "b3", "a1", "b4", "b5"]


def test_generated_tokens_are_charged(model) -> None:
    engine = Engine(model, pagewood_order="fair")
    engine.add("a0", words(1), tenant="a", max_tokens=40)
    for number in range(4):
        engine.add(f"b{number}", words(10 + number), tenant="b")
    engine.add("a1", words(2), tenant="a")
    assert engine.run() == ["a0", "b0", "b1", "b2", "b3", "a1"]


def test_ageing_bounds_the_wait(model) -> None:
    """Every fourth admission goes to the oldest request, whatever the order says."""
    plain, aged = (
        Engine(model, pagewood_order="shortest"),
        Engine(model, pagewood_order="shortest", pagewood_ageing_s=5),
    )  # all requests have arrived decades ago
    for engine in (plain, aged):
        engine.add("long", words(0, 60))
        for number in range(8):
            engine.add(f"short {number}", words(number + 1, 8))
    assert plain.run().index("long") == 8
    assert aged.run().index("long") == 3


def test_priorities_count_as_in_vllm(model) -> None:
    for policy, expected in (("fcfs", ["a", "b"]), ("priority", ["b", "a"])):
        engine = Engine(model, policy=policy, pagewood_order="lpm")
        engine.add("a", words(1), priority=5)
        engine.add("b", words(2), priority=1)
        assert engine.run() == expected
    engine = Engine(model, policy="priority")
    for name, arrival in {"late": 2.0, "early": 1.0}.items():
        engine.add(name, words(1), arrival=arrival)
    assert engine.run() == ["early", "late"]


def test_families_are_served_together(model) -> None:
    engine = Engine(model, pagewood_order="dfs-weight")
    large, small = words(1, 32), words(2, 32)
    for name, prompt in {"large": large, "small": small}.items():
        engine.add(name, prompt)
    engine.run()
    for number, prompt in enumerate([small, large, large, large]):
        engine.add(f"{number}", [*prompt, number + 5])
    assert engine.run()[2:] == ["1", "2", "0", "3"]  # at last the families are equal, and the older one goes first


@pytest.mark.parametrize("name", ["fcfs", "lpm", "fair", "shortest", "dfs-weight", "adaptive", "random", "wrr"])
def test_matches_stay_those_of_vllm_through_preemptions_and_aborts(model, name: str) -> None:
    """In a tiny memory: each waiting request has the match that vLLM would find, and all requests end."""
    rng = random.Random(name)
    engine = Engine(model, blocks=40, running=6, budget=32, pagewood_order=name, pagewood_ageing_s=0)
    queue, manager = engine.scheduler.waiting, engine.scheduler.kv_cache_manager
    texts, added, num_matched = [words(seed, 40) for seed in range(3)], 0, 0
    for _ in range(150):
        if rng.random() < 0.5 and added < 60:
            prompt = [*rng.choice(texts)[: rng.randrange(1, 40)], *words(added + 50, rng.randrange(1, 8))]
            engine.add(str(added), prompt, max_tokens=rng.randrange(1, 30), tenant=rng.choice("ab"))
            added += 1
        if rng.random() < 0.1 and engine.scheduler.requests:
            engine.scheduler.finish_requests(
                rng.choice(list(engine.scheduler.requests)), RequestStatus.FINISHED_ABORTED
            )
        if rng.random() < 0.03:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.step()
        waiting = list(queue)
        assert len(waiting) == len(queue) == len(set(waiting))
        for request in waiting:
            expected = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1]
            assert queue._known[request.request_id].num_matched == expected
            num_matched += expected
    engine.run()
    assert num_matched > 0
    assert not queue._known
    assert not queue._matches._held
    assert not queue._matches._next


def test_the_order_of_vllm_and_fcfs_are_the_same(model) -> None:
    engines = [Engine(model, kind, blocks=40, running=4) for kind in (Scheduler, OrderedScheduler)]
    for engine in engines:
        for number in range(30):
            engine.add(str(number), words(number % 5, 5 + number), max_tokens=20)
    assert engines[0].run() == engines[1].run()


def test_the_async_scheduler_orders_too(model) -> None:
    engine = Engine(model, OrderedAsyncScheduler, pagewood_order="edf")
    engine.add("late", words(2), deadline_s=9.0)
    engine.add("soon", words(3), deadline_s=1.0)
    assert engine.run() == ["soon", "late"]


def test_the_example_serves_urgent_requests_first(model) -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "vllm_order.py"))["UrgentFirst"]
    engine, now = Engine(model, example), time.time()
    engine.add("plain", words(2), arrival=now)
    engine.add("urgent", words(3), arrival=now, service_class="urgent")
    engine.add("old", words(4), arrival=now - 100)
    assert engine.run() == ["urgent", "old", "plain"]


def test_wrong_arguments_are_refused(model) -> None:
    with pytest.raises(ValueError, match="name must be one of fcfs"):
        Engine(model, pagewood_order="fastest")
    with pytest.raises(ValueError, match="pagewood_ageing_s must be a number >= 0, got 'x'"):
        Engine(model, pagewood_ageing_s="x")
    engine = Engine(model)
    with pytest.raises(IndexError, match="the queue must not be empty"):
        engine.scheduler.waiting.pop_request()
    request = engine.add("a", words(1))
    engine.scheduler.waiting.remove_request(request)
    with pytest.raises(ValueError, match="request must be in the queue, got 'a'"):
        engine.scheduler.waiting.remove_request(request)
