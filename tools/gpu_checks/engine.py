"""Checks of the demo model on the whole engine: logits, answers, seeds, waits, batch invariance."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_checks.host import QUESTIONS, Failed, Host, difference, prompts
from gpu_checks.numerics import FP8_KERNELS, compare_paths
from pagewood.engine import LLM, SamplingParams
from pagewood.engine.api import EngineConfig, Submit
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cuda.kernels.flashinfer_compile import compile_kernels
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from row_driver import RowDriver
from stand_ins.recording_device import RecordingDevice

GREEDY = [SamplingParams(temperature=0, max_tokens=24)] * len(QUESTIONS)
CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {}, {"overlap": False}, {"cuda_graph": False}, {"cuda_graph_max_batch": 2}, {"chunked_prefill_size": 5},
    {"page_size": 1}, {"page_size": 64}, {"batch_invariant": True}, {"batch_invariant": True, "cuda_graph": False},
    {"host_cache_gb": 0.1}, {"speculative": "ngram", "speculative_control": "fixed"},
    {"speculative": "ngram", "speculative_control": "fixed", "batch_invariant": True, "cuda_graph": False},
)  # fmt: skip
PAGE_SIZE = 16
_BUSY_CYCLES = 1_000_000_000
"""Half a second at 2 GHz."""
_BUSY_S = 0.2


def check_logits(host: Host) -> str:
    """The demo model's logits at every position of its prompts are the CPU runner's."""
    return f"{compare_logits(host, model_folder(None))} positions, float16 and bfloat16"


def compare_logits(host: Host, folder: Path) -> int:
    """Compare a model's logits at every position of the prompts with the CPU runner's; return their number."""
    model = load_model(folder, CPUOps())
    layout = model.config.memory_layout(page_size=PAGE_SIZE, order="HND")
    assert isinstance(layout, MultiHeadLayout)
    reference = CPURunner(
        model, KVStorage(layout, 64), warm_up(layout.head_dim), max_rows=6, max_length=256, num_threads=1
    )
    expected = torch.from_numpy(reference.forward(_prompt_batch(reference)))
    reference.close()
    found: list[str] = []
    for dtype in ("float16", "bfloat16"):
        engine = build(host, host.config(dtype=dtype, model=str(folder)))[0]
        runner: Any = engine._runner
        if problem := difference(runner.forward(_prompt_batch(runner)), expected, dtype):
            found.append(f"{dtype}: {problem}")
        engine.close()
    if found:
        raise Failed("; ".join(found))
    return len(expected)


def check_answers(host: Host) -> str:
    """The demo model's greedy answers are the CPU runner's, in every configuration."""
    with LLM(max_running=6, max_total_tokens=4096) as llm:
        expected = [list(c.tokens) for c in llm.generate([p.tolist() for p in prompts()], GREEDY)]
    found: list[str] = []
    for options in CONFIGURATIONS:
        try:
            got = answers(host, GREEDY, **options)
        except Exception as error:  # the remaining configurations still run
            found.append(f"with {options or 'defaults'}: {type(error).__name__}: {error}")
            continue
        if got != expected:
            found.append(f"with {options or 'defaults'}: {got} instead of {expected}")
    if found:
        raise Failed(f"{len(found)} of {len(CONFIGURATIONS)}: " + "; ".join(found))
    return f"{len(CONFIGURATIONS)} configurations"


def check_fp8(host: Host) -> str:
    """With keys and values in fp8, attention agrees, and most greedy answers are still the CPU runner's."""
    if host.is_gpu:
        compile_kernels(FP8_KERNELS)
    paths = compare_paths(host, FP8_KERNELS)
    with LLM(max_running=6, max_total_tokens=4096) as llm:
        expected = [list(c.tokens) for c in llm.generate([p.tolist() for p in prompts()], GREEDY)]
    got = answers(host, GREEDY, kv_cache_dtype="fp8_e4m3")
    num_alike = sum(mine == theirs for mine, theirs in zip(got, expected, strict=True))
    if 2 * num_alike < len(expected):
        raise Failed(f"{num_alike} of {len(expected)} alike: {got} instead of {expected}")
    return f"{paths}; {num_alike} of {len(expected)} answers alike"


def check_waiting(host: Host) -> str:
    """Between two results the host never waits for the device, with and without graphs and filters.

    torch raises an error for waits that it knows of. Waits inside the driver or FlashInfer show in time: a step is
    launched while the device is busy, and the launch must return before the device is done.
    """
    filtered = [SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.05, seed=1, max_tokens=16)]
    for options in ({}, {"cuda_graph": False}, {"batch_invariant": True}):
        answers(host, GREEDY, watched=True, **options)
        answers(host, filtered * len(QUESTIONS), watched=True, **options)
    return f"6 runs; {_launch_behind_a_queue(host)}" if host.is_gpu else "6 runs"


def _launch_behind_a_queue(host: Host) -> str:
    """Launch each kind of step while the device is busy; return a text with the longest time that a launch took."""
    took_s: dict[str, float] = {}
    for cuda_graph in (True, False):
        engine = build(host, host.config(cuda_graph=cuda_graph))[0]
        runner: Any = engine._runner
        driver = RowDriver(runner, num_pages=100, page_size=PAGE_SIZE)
        rows = [driver.add(list(range(5, 45))) for _ in QUESTIONS]
        for _ in range(2):  # the first round allocates and compiles everything
            for kind, grants in (("prefill", [(row, 5) for row in rows]), ("decode", [(row, 1) for row in rows])):
                batch = driver.batch(grants)
                with host.device.computing():
                    torch.cuda._sleep(_BUSY_CYCLES)
                start_s = time.perf_counter()
                handle = runner.launch(batch)
                took_s[f"{kind}{' by a graph' if cuda_graph and kind == 'decode' else ''}"] = (
                    time.perf_counter() - start_s
                )
                handle.wait()
                if time.perf_counter() - start_s < _BUSY_S:
                    raise Failed("the device was not busy for long enough for a result")
        engine.close()
    if slow := {kind: seconds for kind, seconds in took_s.items() if seconds > _BUSY_S / 2}:
        raise Failed(f"a launch waits for the device: {slow}")
    return f"launched behind a busy device in at most {max(took_s.values()) * 1e3:.1f} ms"


def check_seeds(host: Host) -> str:
    """The same seeds give the same tokens again, and other seeds give others."""
    sampling = [SamplingParams(temperature=8.0, top_p=0.95, seed=i, max_tokens=24) for i in range(len(QUESTIONS))]
    first, again = answers(host, sampling), answers(host, sampling)
    if first != again:
        raise Failed(f"{first} and then {again}")
    others = [dataclasses.replace(one, seed=100 + i) for i, one in enumerate(sampling)]
    if answers(host, others) == first:
        raise Failed("other seeds give the same tokens")
    return "the same tokens twice, and others with other seeds"


WAYS: dict[str, tuple[tuple[int, ...], int, bool]] = {
    "chunks": ((7, 11, 12), 0, False),
    "one at a time": ((1,) * 30, 0, False),
    "mixed": ((20, 10), 3, False),
    "decoded beside others": ((20, 9, 1), 3, False),
    "by a graph": ((29, 1), 0, True),
    "by a padded graph beside others": ((20, 9, 1), 4, True),
}
"""Ways to compute 30 tokens: sizes of the chunks, number of other requests in the step, and whether with graphs."""


def check_invariance(host: Host) -> str:
    """In batch-invariant mode, logits are the same bits however a token is computed."""
    different: dict[bool, list[str]] = {}
    for batch_invariant in (True, False):
        expected = _final_logits(host, (30,), 0, False, batch_invariant=batch_invariant)
        different[batch_invariant] = [
            name
            for name, way in WAYS.items()
            if not torch.equal(_final_logits(host, *way, batch_invariant=batch_invariant), expected)
        ]
    if different[True]:
        raise Failed(f"{len(different[True])} of {len(WAYS)} ways differ: {', '.join(different[True])}")
    return f"{len(WAYS)} ways alike; without the mode {len(different[False])} of them differ"


def answers(
    host: Host, sampling: Sequence[SamplingParams], *, watched: bool = False, **options: Any
) -> list[list[int]]:
    """Return the tokens of all answers; with `watched`, a wait for anything but results is an error."""
    engine, inbox, outbox = build(host, host.config(**options))
    tokens: dict[str, list[int]] = {}
    for index, (prompt, one) in enumerate(zip(prompts(), sampling, strict=True)):
        tokens[str(index)] = []
        inbox.put(Submit(request_id=str(index), tokens=prompt.astype("<i4").tobytes(), sampling=one))
    num_open, pending = len(tokens), None
    with _watching(host) if watched else contextlib.nullcontext():
        while num_open:
            pending = engine.advance(pending)
            for delta in outbox.take():
                if delta.refusal is not None:
                    raise Failed(delta.refusal.message)
                if delta.finish is not None and delta.finish.value == "error":
                    raise Failed(f"request {delta.request_id} ended with an error; see the log above")
                tokens[delta.request_id] += delta.tokens
                num_open -= delta.finish is not None
    engine.close()
    return list(tokens.values())


@contextlib.contextmanager
def _watching(host: Host) -> Iterator[None]:
    if isinstance(host.device, RecordingDevice):
        host.device.waits.clear()
        with host.device.watching():
            yield
        if others := set(host.device.waits) - {"event.synchronize"}:
            raise Failed(f"the host waits for more than results: {others}")
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def build(host: Host, config: EngineConfig) -> tuple[Any, MemoryInbox, MemoryOutbox]:
    """Return an engine on the device, and its links."""
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    return build_on(host.device, host.flashinfer, config, inbox=inbox, outbox=outbox), inbox, outbox


def _prompt_batch(runner: Any) -> Any:
    driver = RowDriver(runner, num_pages=60, page_size=PAGE_SIZE)
    return driver.batch([(driver.add(prompt.tolist()), 128) for prompt in prompts()])


def _final_logits(
    host: Host, chunks: Sequence[int], num_others: int, with_graphs: bool, *, batch_invariant: bool
) -> torch.Tensor:
    """Return the logits after 30 tokens of one request."""
    config = host.config(batch_invariant=batch_invariant, cuda_graph=with_graphs)
    engine = build(host, config)[0]
    runner: Any = engine._runner
    seen: list[torch.Tensor] = []
    head = runner._model.head
    runner._model.head = lambda x: seen.append(head(x)) or seen[-1]
    rng = np.random.default_rng(0)
    driver = RowDriver(runner, num_pages=100, page_size=PAGE_SIZE)
    mine = driver.add(rng.integers(5, 200, 30).tolist())
    others = [driver.add(rng.integers(5, 200, size).tolist()) for size in (1, 40, 9, 17)[:num_others]]
    for other in others:
        runner.launch(driver.batch([(other, 64)])).wait()
        other.tokens.append(7)
    result = torch.empty(0)
    for count in chunks:
        batch = driver.batch([(mine, count), *((other, 1) for other in others)])
        runner.launch(batch).wait()
        size = runner._graphs.size_for(len(batch.rows)) if batch.num_tokens == len(batch.rows) else None
        result = (seen[-1] if size is None else runner._graphs.of(size)._logits)[0].clone().cpu()
        for other in others:
            other.tokens.append(7)
    engine.close()
    return result
