"""Checks with random traffic over the echo model, through the CUDA runner's staging, tables, graphs and tiers."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from gpu_checks.host import Failed, Host
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from pagewood.kvpool.tiers import HostTier, TieredIndex
from pagewood.kvpool.tiers.torch_pages import device_pages, pinned_memory
from pagewood.radixcache import RadixCache
from scenarios.drawing import random_scenario, with_drafts
from scenarios.running import run_scenario
from scenarios.scenario import VOCAB_SIZE, Scenario
from stand_ins.echo_cuda import WatchedCUDARunner

NUM_SCENARIOS = 60
NUM_WHERE_SLOW = 12


def check_echo(host: Host) -> str:
    """With random arrivals, aborts, priorities, page and chunk sizes and drafts, the output is the oracle's."""
    return _all_scenarios(host, has_tiers=False)


def check_tiers(host: Host) -> str:
    """The output is the oracle's while KV is moved to host memory and back; also measures the copies."""
    scenarios = _all_scenarios(host, has_tiers=True)
    return f"{scenarios}; {_copy_rates(host)}" if host.is_gpu and not host.is_slow else scenarios


def _all_scenarios(host: Host, *, has_tiers: bool) -> str:
    found: list[str] = []
    count = NUM_SCENARIOS if host.is_gpu and not host.is_slow else NUM_WHERE_SLOW
    for seed in range(count):
        try:
            _run_scenario(host, seed, has_tiers=has_tiers)
        except Exception as error:  # the remaining scenarios still run
            found.append(f"scenario {seed}: {type(error).__name__}: {error}")
    if found:
        raise Failed(f"{len(found)} of {count}: " + "; ".join(found[:3]))
    return f"{count} scenarios"


def _run_scenario(host: Host, seed: int, *, has_tiers: bool) -> None:
    rng = random.Random(seed)
    scenario: Scenario = random_scenario(rng, overlap=seed % 4 > 0)
    if seed % 2:
        scenario = with_drafts(scenario, random.Random(seed))
    runner = WatchedCUDARunner(
        host.device, num_rows=scenario.config.num_rows, max_length=scenario.max_length,
        num_pages=scenario.num_pages, page_size=scenario.config.page_size, vocab_size=VOCAB_SIZE,
        with_graphs=seed % 3 > 0, max_drafts=scenario.max_drafts, guess_quality=scenario.guess_quality,
    )  # fmt: skip
    if not has_tiers:
        run_scenario(scenario, make_runner=lambda _: runner)
        return

    def make_caches(_: object, page_size: int) -> Callable[[], TieredIndex]:
        tier = _host_tier(host, runner.memory.layout.bytes_per_page, rng.randint(1, 40))
        return lambda: TieredIndex(
            RadixCache(page_size), device=device_pages(runner.memory), host=tier, page_size=page_size
        )

    scenario = replace(scenario, config=replace(scenario.config, prefix_cache=True))
    run_scenario(scenario, make_runner=lambda _: runner, make_caches=make_caches)


def _host_tier(host: Host, page_bytes: int, num_pages: int) -> HostTier:
    memory = pinned_memory(num_pages, page_bytes) if host.is_gpu else None
    return HostTier(page_bytes=page_bytes, num_pages=num_pages, memory=memory)


def _copy_rates(host: Host) -> str:
    """Return a text with the rates at which 1 GiB of Llama-3.1-8B pages is copied, also relative to one plain copy."""
    layout = MultiHeadLayout(num_layers=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    num_pages = (1 << 30) // layout.bytes_per_page
    storage = KVStorage(layout, num_pages, device=host.where)
    pages, tier = device_pages(storage.memory), _host_tier(host, layout.bytes_per_page, num_pages)
    scattered = random.Random(0).sample(range(num_pages), num_pages)
    slots = list(range(num_pages))
    on_device, on_host = torch.empty(1 << 30, dtype=torch.uint8, device=host.where), torch.from_numpy(tier.memory)
    flat = on_host.flatten()
    texts: list[str] = []
    for name, plain, mine in (
        ("out", lambda: flat.copy_(on_device), lambda: pages.read(scattered, tier.memory, slots)),
        ("in", lambda: on_device.copy_(flat), lambda: pages.write(scattered, tier.memory, slots, lambda n: None)),
    ):
        plain_s, mine_s = _best_s(plain), _best_s(mine)
        texts.append(f"{name} at {flat.nbytes / mine_s / 1e9:.0f} GB/s, {plain_s / mine_s:.0%} of a plain copy")
    return "KV is copied " + ", ".join(texts)


def _best_s(work: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(4):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
    return min(times)
