"""What a machine has for an engine, which of it will be used, and what would make it faster: for `pagewood doctor`."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from pagewood.engine.assembly.available_memory import available_memory_bytes
from pagewood.engine.cache_folder import cache_root
from pagewood.engine.model_folder.inspection import Inspection
from pagewood.engine.runner.cpu.compiled.products.dot import DotLevel, dot_level
from pagewood.engine.runner.cpu.compiled.products.pair_dot import PairLevel, pair_level
from pagewood.engine.runner.ranks.cores import num_cores

_STREAM_BYTES = 1 << 28
_STREAM_PASSES = 5
_LEAST_TORCH = (2, 11)
_INTEGER_LEVELS = {
    DotLevel.AVX512_VNNI: "AVX-512 VNNI",
    DotLevel.AVX_VNNI: "AVX VNNI",
    DotLevel.AVX2: "AVX2",
    DotLevel.SDOT: "NEON dot products",
}
_EXTRAS = {
    "transformers": ("pagewood-engine[transformers]", "models that Pagewood has no table for, and `pagewood check`"),
    "xgrammar": ("pagewood-engine[xgrammar]", "--grammar-backend xgrammar"),
    "huggingface_hub": ("huggingface_hub", "models by their name on the hub"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that the machine has or lacks."""

    subject: str
    text: str
    advice: str = ""
    """What to do about it; empty: nothing need be done."""
    is_obstacle: bool = False
    """Whether an engine cannot run because of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The most that a model can reach at one request, in one form of weights: memory is read at its full rate."""

    form: str
    tokens_per_s: float
    weights_bytes: int
    fits: bool
    """Whether weights, and keys and values of the longest text, fit the memory that is available."""


def examine(*, root: Path = Path("/")) -> list[Finding]:
    """Look at this machine; `root` contains `proc` and `sys`."""
    return [
        _versions(),
        _processor(root),
        _cores(root),
        Finding(subject="memory", text=f"{available_memory_bytes(root) / 1e9:.1f} GB available"),
        *_devices(root),
        _cache(),
        _extras(),
    ]


def memory_rate(num_threads: int) -> float:
    """Return the bytes per second that this many threads read from memory, measured in a second or so."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        array = torch.arange(_STREAM_BYTES // 4, dtype=torch.float32)
        times: list[float] = []
        for _ in range(_STREAM_PASSES):
            start_s = perf_counter()
            array.sum()
            times.append(perf_counter() - start_s)
    finally:
        torch.set_num_threads(before)
    return _STREAM_BYTES / min(times)


def rooflines(model: Inspection, bytes_per_s: float, *, memory_bytes: int) -> list[Roofline]:
    """Return what a model can reach at most on a CPU, by form of weights."""
    config = model.model
    read = model.num_active_parameters
    if not config.tied_embeddings:
        read -= config.vocab_size * config.hidden_size  # of the embedding, a token reads one row
    share = read / model.num_parameters
    return [
        Roofline(
            form=form,
            tokens_per_s=bytes_per_s / (size * share),
            weights_bytes=size,
            fits=size + min(model.kv_bytes_of_longest.values()) <= memory_bytes,
        )
        for form, size in model.weights_bytes.items()
        if form != "auto"
    ]


def _versions() -> Finding:
    version, own = torch.__version__, importlib.metadata.version("pagewood-engine")
    is_old = tuple(map(int, version.split("+")[0].split(".")[:2])) < _LEAST_TORCH
    least = ".".join(map(str, _LEAST_TORCH))
    return Finding(
        subject="software",
        text=f"pagewood-engine {own}, Python {platform.python_version()}, torch {version}, {sys.platform}",
        advice=f"pip install 'torch>={least}'" if is_old else "",
        is_obstacle=is_old,
    )


def _processor(root: Path) -> Finding:
    integers = _INTEGER_LEVELS.get(dot_level())
    pairs = "bfloat16 products" if pair_level() == PairLevel.AVX512_BF16 else None
    found = [one for one in (integers, pairs) if one is not None]
    slow = "" if integers else "--weights int8 and int4 save memory here, but compute slowly: prefer bfloat16"
    return Finding(
        subject="processor",
        text=f"{_processor_name(root)}, with {' and '.join(found) or 'no instructions for small numbers'}",
        advice=slow,
    )


def _processor_name(root: Path) -> str:
    try:
        lines = (root / "proc" / "cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _cores(root: Path) -> Finding:
    cores, usable = num_cores(), os.cpu_count() or 1
    text = f"{cores} physical cores for this process, of {usable} processors"
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        allowed = int(quota) / int(period)
    except (OSError, ValueError):  # no container, or no limit
        return Finding(subject="cores", text=text)
    text += f"; this container may use {allowed:g} of them at a time"
    fewer = allowed < cores
    return Finding(
        subject="cores",
        text=text,
        advice=f"--threads {max(1, int(allowed))}, because threads beyond the limit stop all others" if fewer else "",
    )


def _devices(root: Path) -> list[Finding]:
    """Return what there is of GPUs, and what they lack."""
    if torch.cuda.is_available():
        found: list[Finding] = []
        for number in range(torch.cuda.device_count()):
            one = torch.cuda.get_device_properties(number)
            found.append(
                Finding(
                    subject=f"GPU {number}",
                    text=f"{one.name}, {one.total_memory / 1e9:.0f} GB, compute capability {one.major}.{one.minor}",
                )
            )
        has = importlib.util.find_spec("flashinfer") is not None
        text = importlib.metadata.version("flashinfer-python") if has else "not installed, so the CPU computes"
        advice = "--device cuda" if has else "pip install 'pagewood-engine[cuda]', then --device cuda"
        return [*found, Finding(subject="FlashInfer", text=text, advice=advice)]
    if not (root / "proc/driver/nvidia/version").exists():
        return [Finding(subject="GPU", text="none with a driver, so the CPU computes")]
    if torch.version.cuda is None:
        return [
            Finding(
                subject="GPU",
                text="there is a driver, but this torch is the build for CPUs, so the CPU computes",
                advice="install torch for CUDA, see pytorch.org, and 'pagewood-engine[cuda]'",
            )
        ]
    return [
        Finding(
            subject="GPU",
            text=f"there is a driver, but torch for CUDA {torch.version.cuda} finds no device, so the CPU computes",
            advice="see what `nvidia-smi` says; the driver may be too old, or a container may lack the device",
        )
    ]


def _cache() -> Finding:
    folder = cache_root()
    place = next(one for one in (folder, *folder.parents) if one.exists())
    if os.access(place, os.W_OK):
        return Finding(subject="cache", text=f"{folder}, for compiled kernels and rounded weights")
    return Finding(
        subject="cache",
        text=f"{folder} cannot be written, so kernels are compiled at every start",
        advice="set PAGEWOOD_CACHE to a folder that can",
    )


def _extras() -> Finding:
    missing = {name: one for name, one in _EXTRAS.items() if importlib.util.find_spec(name) is None}
    if not missing:
        return Finding(subject="extras", text=f"{', '.join(_EXTRAS)} are installed")
    uses = "; ".join(f"`pip install '{package}'` for {use}" for package, use in missing.values())
    return Finding(subject="extras", text=f"not installed: {', '.join(missing)}", advice=uses)


def describe(findings: Sequence[Finding]) -> str:
    """Return findings as lines for a reader."""
    width = max(len(one.subject) for one in findings)
    lines: list[str] = []
    for one in findings:
        lines.append(f"{one.subject:<{width}}  {one.text}")
        if one.advice:
            lines.append(f"{'':<{width}}  -> {one.advice}")
    return "\n".join(lines)
