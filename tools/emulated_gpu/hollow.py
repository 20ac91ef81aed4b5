"""Checks of the host side without running kernels: refused calls, waits, memory, time of the host."""

# pyright: basic, reportMissingImports=false
# torch is typed in part only; the checks of a GPU are scripts, which are imported by path.

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from emulated_gpu.library import Counts
from gpu_checks.host import Failed, Host, prompts
from gpu_checks.numerics import FP8_KERNELS, KERNELS, attend, operations, paths_of
from gpu_checks.server import answer_of_server
from pagewood.engine import SamplingParams
from pagewood.engine.api import EngineConfig, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine, Pending
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from pagewood.kvpool.tiers.torch_pages import device_pages, pinned_memory

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {}, {"overlap": False}, {"cuda_graph": False}, {"batch_invariant": True}, {"kv_cache_dtype": "fp8_e4m3"},
    {"host_cache_gb": 0.1, "max_total_tokens": 512},
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
FILTERED = SamplingParams(temperature=1, top_k=20, top_p=0.9, min_p=0.05, seed=1, max_tokens=16, ignore_eos=True)


def check_kernels(host: Host, counts: Counts) -> str:
    """FlashInfer accepts the arguments of every operation and attention path, and launches its kernels."""
    for operation, dtype in operations():
        operation(host.flashinfer, host.where, getattr(torch, dtype))
    paths = [*paths_of(KERNELS), *paths_of(FP8_KERNELS)]
    for path in paths:
        before = counts["kernels on the default stream"]
        attend(host.flashinfer, host.where, path)
        if counts["kernels on the default stream"] < before + 2:
            raise Failed(f"{path}: no kernel was launched")
    return f"{len(operations())} operations and {len(paths)} paths"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What the host did during several steps of an engine."""

    num_steps: int
    num_decoded: int
    """Steps in which every request got one token."""
    counted: dict[str, int]


def check_steps(host: Host, counts: Counts) -> str:
    """In every configuration the host waits once per step, for its tokens, and allocates nothing."""
    lines: list[str] = []
    for options in CONFIGURATIONS:
        for sampling in (GREEDY, FILTERED):
            name = f"{options or 'defaults'}, {'greedy' if sampling is GREEDY else 'filtered'}"
            run = _run(
                EngineConfig(device="cuda", **{"dtype": "float16", "max_running": 6, **options}), sampling, counts
            )
            problems = _problems(run, has_graphs=options.get("cuda_graph", True), has_tiers="host_cache_gb" in options)
            if problems:
                raise Failed(f"with {name}: {', '.join(problems)} in {run.num_steps} steps")
            kernels, graphs = run.counted["kernels"] / run.num_steps, run.counted["kernels of graphs"]
            lines.append(f"{name}: {kernels:.0f} + {graphs / max(run.num_decoded, 1):.0f} in a graph")
    return f"{len(lines)} runs; kernels of a step: " + "; ".join(lines)


_WATCHED = (
    "wait: event", "wait: stream", "wait: device", "wait: copy", "copies from pageable memory",
    "copies to pageable memory", "device allocations", "kernels on the default stream", "kernels", "kernels of graphs",
)  # fmt: skip


def _run(config: EngineConfig, sampling: SamplingParams, counts: Counts) -> _Run:
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    engine = build_engine(config, inbox=inbox, outbox=outbox)
    _answer(engine, inbox, outbox, sampling)  # the first run allocates everything
    counts.clear()
    before = engine.counters().num_steps
    _answer(engine, inbox, outbox, sampling)
    counted = {what: counts[what] for what in _WATCHED}
    num_steps = engine.counters().num_steps - before
    engine.close()
    return _Run(num_steps=num_steps, num_decoded=num_steps - 1, counted=counted)


def _problems(run: _Run, *, has_graphs: bool, has_tiers: bool) -> list[str]:
    allowed = {
        "wait: event": run.num_steps,
        "copies from pageable memory": 0 if has_graphs else run.num_decoded,  # FlashInfer's own [0, 1, ..], 20 bytes
        "kernels": sys.maxsize,
        "kernels of graphs": sys.maxsize,
    }
    if has_tiers:  # their threads wait for copies, and allocate one buffer per direction at the first copy
        allowed |= {"wait: stream": sys.maxsize, "copies from pageable memory": sys.maxsize, "device allocations": 2}
    found = [f"{count} of {what!r}" for what, count in run.counted.items() if count > allowed.get(what, 0)]
    if run.counted["wait: event"] < run.num_steps:
        found.append(f"only {run.counted['wait: event']} waits for tokens")
    if has_graphs and not run.counted["kernels of graphs"]:
        found.append("no graph")
    return found


def _answer(engine: Engine, inbox: MemoryInbox, outbox: MemoryOutbox, sampling: SamplingParams) -> None:
    for index, prompt in enumerate(prompts()):
        inbox.put(Submit(request_id=str(index), tokens=prompt.astype("<i4").tobytes(), sampling=sampling))
    num_open = len(prompts())
    pending: Pending | None = None
    while num_open:
        pending = engine.advance(pending)
        for delta in outbox.take():
            if delta.refusal is not None:
                raise Failed(delta.refusal.message)
            num_open -= delta.finish is not None
    while pending is not None:
        pending = engine.advance(pending)


def check_memory(host: Host, counts: Counts) -> str:
    """An engine with all its graphs takes the configured share of the free memory, and no more."""
    shares: list[str] = []
    for share in (0.9, 0.5):
        for options in ({"max_running": 8}, {"max_running": 256, "chunked_prefill_size": 8192}, {"cuda_graph": False}):
            gc.collect()
            free = host.device.free_bytes()
            config = EngineConfig(device="cuda", dtype="float16", mem_fraction=share, **options)
            engine = build_engine(config, inbox=MemoryInbox(), outbox=MemoryOutbox())
            taken = (free - torch.cuda.mem_get_info()[0]) / free
            engine.close()
            del engine
            shares.append(f"{taken:.1%}")
            if not 0.9 * share < taken <= share:
                raise Failed(f"the engine took {taken:.1%} of the free memory instead of {share:.0%}, with {options}")
    return f"took {', '.join(shares)} of the free memory, for 90 and 50%"


def check_server(host: Host, counts: Counts) -> str:
    """`pagewood serve --device cuda` starts and answers OpenAI's client; the text is not checked."""
    return f"answered {len(answer_of_server())} characters"


def check_benchmark(host: Host, counts: Counts) -> str:
    """`benchmarks/gpu.py` runs to its end, except for `transformers`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(BENCHMARK), "--no-peer", "--record", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Failed(done.stderr[-2000:])
        (record,) = Path(folder).glob("*.json")
        rows = json.loads(record.read_text())["rows"]
    failed = [f"{row['name']}: {row['note']}" for row in rows if "failed" in row["note"]]
    if failed:
        raise Failed("; ".join(failed))
    host_ms = {row["name"]: row["value"] for row in rows if row["name"].startswith("decode")}
    return f"{len(rows)} rows; ms, with a device that takes no time: " + ", ".join(
        f"{name} {ms:.2f}" for name, ms in host_ms.items()
    )


def check_host(host: Host, counts: Counts) -> str:
    """Measure the host's time, with a device that takes none: for a step of Llama 3.1 8B, and to move 1 GiB of KV."""
    sys.path.append(str(BENCHMARK.parent))
    from on_gpu.engine import Session
    from on_gpu.subject import LLAMA_8B, make_subject

    subject = make_subject(host.device, host.flashinfer, LLAMA_8B)
    texts: list[str] = []
    for num_requests in (1, 64, 256):
        session = Session(subject, overlap=True, num_requests=num_requests, length=200, max_tokens=400)
        while session.num_started < num_requests:
            session.step()
        texts.append(f"{num_requests} requests {_median_ms(session.step, 150):.2f}")
        while session.num_finished < num_requests:
            session.step()
    layout = MultiHeadLayout(num_layers=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    num_pages = (1 << 30) // layout.bytes_per_page
    pages = device_pages(KVStorage(layout, num_pages, device=host.where).memory)
    scattered, slots = random.Random(0).sample(range(num_pages), num_pages), list(range(num_pages))
    memory = pinned_memory(num_pages, layout.bytes_per_page)
    moves = {
        "out": lambda: pages.read(scattered, memory, slots),
        "in": lambda: pages.write(scattered, memory, slots, lambda n: None),
    }
    texts += [f"1 GiB {name} {_median_ms(move, 5):.1f}" for name, move in moves.items()]
    return "ms: " + ", ".join(texts)


def _median_ms(work: Callable[[], None], count: int) -> float:
    times: list[float] = []
    for _ in range(count + count // 5):  # the first ones warm up
        start_s = perf_counter()
        work()
        times.append(perf_counter() - start_s)
    return median(times[-count:]) * 1e3


CHECKS: dict[str, Callable[[Host, Counts], str]] = {
    "kernels": check_kernels,
    "steps": check_steps,
    "memory": check_memory,
    "host": check_host,
    "server": check_server,
    "benchmark": check_benchmark,
}
