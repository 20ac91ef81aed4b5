"""Says whether Pagewood works on this host's GPU: `python tools/gpu_check.py`, where its packages can be imported.

It needs neither nox nor pytest. `--stand-in` runs the same checks on the CPU, with plain torch instead of FlashInfer,
which checks the script itself. The first run compiles FlashInfer's kernels. It has not been run on a GPU yet.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pagewood.engine import LLM, SamplingParams
from pagewood.engine.api import EngineConfig, Submit
from pagewood.engine.build import build_on
from pagewood.engine.build_cuda import open_cuda
from pagewood.engine.memory import MemoryInbox, MemoryOutbox
from pagewood.engine.runner.attention_flashinfer import (
    WORKSPACE_BYTES,
    AttentionShape,
    FlashInferAttention,
    HostArrays,
    PageArrays,
    Places,
    offsets_of,
)
from pagewood.engine.runner.device import Device
from pagewood.engine.runner.flashinfer_api import FlashInfer
from pagewood.engine.testing import flashinfer_torch
from pagewood.engine.testing.recording_device import RecordingDevice
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage

QUESTIONS = ["What is 12 + 7?", "Reverse: stone", "What is 9 times 8?", "What is the capital of France?"]
TOLERANCE = {"float16": 5e-3, "bfloat16": 3e-2}


class Failed(Exception):
    """A check does not hold."""


class Skipped(Exception):
    """A check cannot be done here."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What is checked."""

    device: Device
    flashinfer: FlashInfer
    is_gpu: bool

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float16", "bfloat16")


def check_operations(host: Host) -> str:
    """FlashInfer's norms, rotation, activation, softmax and filters, against plain torch."""
    where, fi, ref = host.device.torch_device, host.flashinfer, flashinfer_torch
    torch.manual_seed(0)
    for dtype in host.dtypes:
        options = {"dtype": getattr(torch, dtype), "device": where}
        x, residual, weight = torch.randn(9, 256, **options), torch.randn(9, 256, **options), torch.rand(256, **options)
        close(fi.rmsnorm(x, weight, 1e-5), ref.rmsnorm(x, weight, 1e-5), dtype, "rmsnorm")
        mine, theirs = (x.clone(), residual.clone()), (x.clone(), residual.clone())
        fi.fused_add_rmsnorm(*mine, weight, 1e-5)
        ref.fused_add_rmsnorm(*theirs, weight, 1e-5)
        close(torch.cat(mine), torch.cat(theirs), dtype, "fused_add_rmsnorm")
        close(fi.silu_and_mul(x), ref.silu_and_mul(x), dtype, "silu_and_mul")
        angles = torch.rand(64, 32, device=where) * 6
        table = torch.cat([angles.cos(), angles.sin()], -1)
        positions = torch.arange(9, dtype=torch.int32, device=where) * 7
        heads: list[torch.Tensor] = []
        for library in (fi, ref):
            q, k, _ = x.clone().split([128, 64, 64], -1)  # parts of one row, as the runner has them
            library.rmsnorm(q.view(9, -1, 64), weight[:64], 1e-5, out=q.view(9, -1, 64))
            library.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 64, table)
            heads.append(torch.cat([q, k], -1))
        close(heads[0], heads[1], dtype, "rope")
    logits = torch.randn(4, 1000, device=where) * 3
    temperatures = torch.tensor([0.5, 1.0, 1.5, 2.0], device=where)
    probs = fi.softmax(logits, temperatures)
    close(probs, ref.softmax(logits, temperatures), "float16", "softmax")
    ks = torch.tensor([1, 5, 50, 1000], dtype=torch.int32, device=where)
    close(
        fi.top_k_renorm_probs(probs, ks, is_deterministic=True), ref.top_k_renorm_probs(probs, ks), "float16", "top_k"
    )
    ps = torch.tensor([0.1, 0.5, 0.9, 0.99], device=where)
    close(
        fi.top_p_renorm_probs(probs, ps, is_deterministic=True), ref.top_p_renorm_probs(probs, ps), "float16", "top_p"
    )
    return f"{', '.join(host.dtypes)}"


def check_attention(host: Host) -> str:
    """Every wrapper path: decode with and without tensor cores, prefill, pages, windows, soft caps."""
    count = 0
    steps = ([(0, 1), (63, 1), (64, 1), (700, 1)], [(0, 70), (33, 1), (130, 65), (1, 1)])
    variants = [("float16", None, None), ("float16", 50, None), ("float16", None, 20.0), ("bfloat16", None, None)]
    paths = itertools.product(variants, (1, 4), (1, 16, 64), steps)  # few variants: each is compiled
    for (dtype, window, soft_cap), group, page_size, step in paths:
        shape = AttentionShape(num_heads=2 * group, windows=[window], logits_soft_cap=soft_cap)
        results = [
            attend(library, where, dtype, shape, page_size, step)
            for library, where in ((host.flashinfer, host.device.torch_device), (flashinfer_torch, torch.device("cpu")))
        ]
        name = f"attention, {dtype}, group {group}, pages of {page_size}, window {window}, soft cap {soft_cap}, {step}"
        close(results[0].cpu(), results[1], dtype, name)
        count += 1
    return f"{count} paths"


def attend(
    flashinfer: FlashInfer,
    where: torch.device,
    dtype: str,
    shape: AttentionShape,
    page_size: int,
    step: Sequence[tuple[int, int]],
) -> torch.Tensor:
    """Return what the tokens of a step attend to; the same numbers for every library."""
    starts, counts = (np.array(column, np.int32) for column in zip(*step, strict=True))
    pages = PageArrays.of(starts + counts, page_size=page_size)
    layout = MultiHeadLayout(num_layers=1, num_kv_heads=2, head_dim=64, page_size=page_size, dtype=dtype)
    storage = KVStorage(layout, int(pages.kv_indptr[-1]), device=where)
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(storage.layer(0))

    storage.layer(0).copy_(random(*storage.layer(0).shape))
    qo_indptr = None if (counts == 1).all() else torch.from_numpy(offsets_of(counts))
    kv_indptr, last_page_len = torch.from_numpy(pages.kv_indptr), torch.from_numpy(pages.last_page_len)
    positions = np.concatenate([np.arange(start, start + count, dtype=np.int32) for start, count in step])
    indices = torch.randperm(storage.num_pages, generator=generator, dtype=torch.int32)
    places = Places(
        grants=torch.from_numpy(np.repeat(np.arange(len(step), dtype=np.int32), counts)).to(where),
        positions=torch.from_numpy(positions).to(where),
        kv_indptr=kv_indptr.to(where),
        kv_indices=indices.to(where),
        last_page_len=last_page_len.to(where),
    )
    host_arrays = HostArrays(qo_indptr=qo_indptr, kv_indptr=kv_indptr, last_page_len=last_page_len)
    staging = {window: torch.empty(8 << 20, dtype=torch.uint8, pin_memory=where.type == "cuda") for window in
               shape.all_windows_left}  # fmt: skip
    workspace_bytes = WORKSPACE_BYTES if where.type == "cuda" else 16
    attention = FlashInferAttention(flashinfer, storage, shape, workspace_bytes=workspace_bytes)
    planned = attention.plan(host_arrays, places, staging)
    num_tokens = len(positions)
    result = planned.run(random(num_tokens, shape.num_heads * 64), random(num_tokens, 128), random(num_tokens, 128), 0)
    if where.type == "cuda":
        torch.cuda.synchronize()  # what was allocated here must outlive what is queued
    return result


def answers(host: Host, sampling: Sequence[SamplingParams], **options: Any) -> list[list[int]]:
    """Return the tokens of all questions, by an engine whose loop may wait for results only."""
    config = EngineConfig(
        **{"device": "cuda", "dtype": "float16", "max_running": 6, "max_total_tokens": 4096, **options}
    )
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    engine = build_on(host.device, host.flashinfer, config, inbox=inbox, outbox=outbox)
    tokens: dict[str, list[int]] = {}
    for index, (prompt, one) in enumerate(zip(prompts(), sampling, strict=True)):
        tokens[str(index)] = []
        inbox.put(Submit(request_id=str(index), tokens=prompt.astype("<i4").tobytes(), sampling=one))
    num_open, pending = len(tokens), None
    if host.is_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        while num_open:
            pending = engine.advance(pending)
            for delta in outbox.take():
                if delta.refusal is not None:
                    raise Failed(delta.refusal.message)
                tokens[delta.request_id] += delta.tokens
                num_open -= delta.finish is not None
    finally:
        if host.is_gpu:
            torch.cuda.set_sync_debug_mode("default")
        engine.close()
    return list(tokens.values())


def prompts() -> list[np.ndarray[Any, Any]]:
    """Return the questions as the demo model is asked them."""
    from pagewood.engine.folder import model_folder
    from pagewood.engine.text import Tokenizer

    tokenizer = Tokenizer.from_folder(model_folder(None))
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


GREEDY = [SamplingParams(temperature=0, max_tokens=24)] * len(QUESTIONS)


def check_answers(host: Host) -> str:
    """The demo model's greedy answers are those of the CPU runner: overlapped or not, by graphs or not, chunked."""
    with LLM(max_running=6, max_total_tokens=4096) as llm:
        expected = [list(c.tokens) for c in llm.generate([p.tolist() for p in prompts()], GREEDY)]
    variants: list[dict[str, Any]] = [
        {}, {"overlap": False}, {"cuda_graph": False}, {"chunked_prefill_size": 5}, {"page_size": 1}, {"page_size": 64},
    ]  # fmt: skip
    for options in variants:
        got = answers(host, GREEDY, **options)
        if got != expected:
            raise Failed(f"with {options or 'defaults'}: {got} instead of {expected}")
    return f"{len(variants)} configurations{', and the host waited for nothing but results' if host.is_gpu else ''}"


def check_seeds(host: Host) -> str:
    """Seeded tokens come again, and differ by seed."""
    sampling = [SamplingParams(temperature=8.0, top_p=0.95, seed=i, max_tokens=24) for i in range(len(QUESTIONS))]
    first, again = answers(host, sampling), answers(host, sampling)
    if first != again:
        raise Failed(f"{first} and then {again}")
    others = [dataclasses.replace(one, seed=100 + i) for i, one in enumerate(sampling)]
    if answers(host, others) == first:
        raise Failed("other seeds give the same tokens")
    return "twice the same, and others with other seeds"


def check_server(host: Host) -> str:
    """`pagewood serve --device cuda` answers OpenAI's client."""
    if not host.is_gpu:
        raise Skipped("a server needs the GPU")
    if importlib.util.find_spec("openai") is None:
        raise Skipped("the package openai is not installed")
    from openai import OpenAI

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pagewood.server", "serve", "--device", "cuda", "--port", str(port)]
    process = subprocess.Popen(command, env=dict(os.environ))
    try:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        deadline_s = time.monotonic() + 240
        while True:
            try:
                reply = client.chat.completions.create(
                    model="pagewood-demo", temperature=0, messages=[{"role": "user", "content": QUESTIONS[0]}]
                )
                break
            except Exception as error:  # not there yet, or loading
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise Failed(f"the server does not answer: {error}") from error
                time.sleep(0.5)
        text = reply.choices[0].message.content or ""
        if "19" not in text:
            raise Failed(f"{QUESTIONS[0]} is answered by {text!r}")
        return text
    finally:
        process.terminate()
        process.wait(timeout=30)


CHECKS: tuple[Callable[[Host], str], ...] = (
    check_operations, check_attention, check_answers, check_seeds, check_server,
)  # fmt: skip


def close(mine: torch.Tensor, theirs: torch.Tensor, dtype: str, name: str) -> None:
    """Fail unless two results agree as well as their dtype allows."""
    limit = TOLERANCE[dtype] * max(1.0, float(theirs.abs().max()))
    worst = float((mine.float() - theirs.float()).abs().max())
    if not worst <= limit:
        raise Failed(f"{name}: differs by {worst:.3g}, more than {limit:.3g}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do every check; return 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stand-in", action="store_true", help="check the script itself, on the CPU")
    options = parser.parse_args(arguments)
    if options.stand_in:
        host = Host(device=RecordingDevice(), flashinfer=flashinfer_torch, is_gpu=False)
        print("stand-in on the CPU: this says nothing about a GPU")
    else:
        try:
            device, flashinfer = open_cuda()
        except ValueError as error:
            print(f"there is nothing to check: {error}")
            return 2
        host = Host(device=device, flashinfer=flashinfer, is_gpu=True)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    num_failed = 0
    for check in CHECKS:
        start_s = time.monotonic()
        try:
            word, text = "ok", check(host)
        except Skipped as reason:
            word, text = "skipped", str(reason)
        except Exception as error:  # each check is told apart, whatever a device raises
            word, text = "FAILED", f"{type(error).__name__}: {error}"
            num_failed += 1
        print(
            f"{word:8}{time.monotonic() - start_s:7.1f} s  {(check.__doc__ or '').splitlines()[0]}  [{text}]",
            flush=True,
        )
    return 1 if num_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
