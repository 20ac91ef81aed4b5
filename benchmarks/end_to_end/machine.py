# pyright: basic
# (torch.ops is untyped)
"""Measures the machine: how fast it reads memory, and how fast it multiplies matrices of the model's shapes."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from end_to_end.model import BYTES_PER_VALUE, LinearShape
from pagewood.engine.models.ops import Linear
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.ops import CPUOps
from pagewood.engine.runner.cpu.tape import Buffer
from stand_ins.tapes import write_down

_STREAM_PASSES = 6
_MIN_MEASURE_S = 0.02
_MIN_REPEATS = 3
_MAX_ROUNDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine and versions of a record."""

    processor: str
    num_cores: int
    memory_gb: float
    system: str
    python: str
    torch: str
    transformers: str
    num_threads: int
    environment: dict[str, str]
    """Environment variables that change how threads wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTime:
    """Times of a projection for a number of rows, by implementation and place of the weights."""

    shape: str
    num_rows: int
    gflops: dict[str, float]
    """For "engine" and "torch", the rate with one matrix that is used repeatedly, so that it is in the cache if it
    fits there."""
    walk_ms: dict[str, float]
    """For "engine" and "torch", the time of one pass over the matrices of all layers, which come from memory."""


def describe_machine(num_threads: int) -> Machine:
    """Return the description of this machine."""
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    return Machine(
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gb=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        num_threads=num_threads,
        environment={name: os.environ[name] for name in names if name in os.environ},
    )


class Stream:
    """Reads a large array from memory with all threads."""

    def __init__(self, num_bytes: int, *, num_threads: int) -> None:
        """Allocate an array of `num_bytes`, which should be far larger than any cache."""
        self._array = torch.rand(num_bytes // BYTES_PER_VALUE)  # random, so that the host cannot merge pages
        self._num_threads = num_threads

    def measure(self) -> list[float]:
        """Return the bytes per second of several passes."""
        torch.set_num_threads(self._num_threads)
        rates: list[float] = []
        for _ in range(_STREAM_PASSES):
            start = perf_counter()
            self._array.sum()
            rates.append(self._array.nbytes / (perf_counter() - start))
        return rates


class Linears:
    """The projections of the model, computed by the engine's linear and by torch's."""

    def __init__(self, shapes: Sequence[LinearShape], *, num_threads: int) -> None:
        self._shapes = tuple(shapes)
        self._num_threads = num_threads
        self._kernel = warm_up(64)
        self._weights = [
            [torch.randn(shape.num_out, shape.num_in) for _ in range(shape.count)] for shape in self._shapes
        ]
        ops = CPUOps()
        self._linears = [[ops.linear(weight, None) for weight in weights] for weights in self._weights]

    def measure(self, num_rows: int) -> list[LinearTime]:
        """Time every projection for `num_rows` rows."""
        torch.set_num_threads(self._num_threads)
        times: list[LinearTime] = []
        for shape, linears, weights in zip(self._shapes, self._linears, self._weights, strict=True):
            x = torch.randn(num_rows, shape.num_in)
            with torch.inference_mode():
                seconds = {
                    "engine": (self._engine_s(linears[:1], x), self._engine_s(linears, x)),
                    "torch": (_torch_s(weights[:1], x), _torch_s(weights, x)),
                }
            flops = 2 * num_rows * shape.num_out * shape.num_in
            gflops = {form: 1e-9 * flops / one for form, (one, _) in seconds.items()}
            walk_ms = {form: 1e3 * walk for form, (_, walk) in seconds.items()}
            times.append(LinearTime(shape=shape.name, num_rows=num_rows, gflops=gflops, walk_ms=walk_ms))
        return times

    def _engine_s(self, linears: Sequence[Linear[Buffer]], x: Tensor) -> float:
        """Return the seconds of one pass over `linears`; many passes per measurement hide the start of threads."""
        once_s = _seconds(self._engine(linears, x, rounds=1))
        rounds = min(_MAX_ROUNDS, 1 + round(_MIN_MEASURE_S / once_s))
        return _seconds(self._engine(linears, x, rounds=rounds)) / rounds

    def _engine(self, linears: Sequence[Linear[Buffer]], x: Tensor, *, rounds: int) -> Callable[[], object]:
        def one_after_the_other(x: Buffer) -> Buffer:
            return [linear(x) for _ in range(rounds) for linear in linears][-1]

        return write_down(one_after_the_other, x.numpy(), kernel=self._kernel, num_threads=self._num_threads)


def _torch_s(weights: Sequence[Tensor], x: Tensor) -> float:
    return _seconds(lambda: [functional.linear(x, weight) for weight in weights])


def _seconds(call: Callable[[], object]) -> float:
    """Return the median time of several calls, after one call to warm up."""
    call()
    times: list[float] = []
    while len(times) < _MIN_REPEATS or sum(times) < _MIN_MEASURE_S:
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
