"""Measures the engine on a GPU: `python benchmarks/gpu.py`; prints one table in under eight minutes and records it.

The model has the shape of Llama 3.1 8B and random weights made on the device; `--shape experts` and `--shape latents`
have those of Qwen3 30B-A3B and DeepSeek V2 Lite. The script measures decoding as a share
of the memory roofline and prefill as a share of the matrix peak, both in the same run; what it costs to verify drafts;
the share of time in which the device is idle; the first token of a long prompt; and `transformers` on the same device.
`--stand-in` runs a tiny model on the CPU with stand-ins, to test the script.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from on_gpu.engine import first_token_seconds, idle_share
from on_gpu.limits import Limits, measure_limits
from on_gpu.peer import Peer
from on_gpu.record import Record, Row, markdown, write
from on_gpu.steps import decode_bytes, decode_seconds, prefill_flops, prefill_seconds, shares_pages
from on_gpu.subject import EXPERTS_30B, LATENTS_16B, LLAMA_8B, TINY, Plan, Subject, make_subject
from pagewood.engine.assembly.cuda.build import open_cuda
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.runner.cuda.device import Device
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer
from pagewood.engine.runner.cuda.kernels.flashinfer_compile import KernelNeeds, compile_kernels
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES = {"dense": LLAMA_8B, "experts": EXPERTS_30B, "latents": LATENTS_16B}
DECODE_TARGETS = {1: 0.80, 64: 0.65}
"""Target share of the memory roofline, by batch size."""
PREFILL_TARGETS = {8192: 0.60}
"""Target share of the matrix peak, by number of tokens."""
IDLE_TARGET = 3.0
BUDGET_S = 440  # after this time no further measurement is started


class Measurements:
    """The rows so far. Invariant: a measurement that fails or comes too late gives a row with the reason."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.start_s = perf_counter()

    def add(self, row: Row, measure: Callable[[], Row]) -> None:
        """Add the row that `measure` returns, or `row` with the reason why there is no value."""
        if perf_counter() - self.start_s > BUDGET_S:
            self._keep(replace(row, note="not measured: out of time"))
            return
        try:
            self._keep(measure())
        except Exception as error:  # the remaining rows are still measured
            self._keep(replace(row, note=f"failed: {type(error).__name__}: {str(error)[:200]}"))

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        print(f"{perf_counter() - self.start_s:6.1f} s  {row.name}: {row.value} {row.unit} {row.note}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and record it; return 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stand-in", action="store_true", help="a tiny model on the CPU; its numbers mean nothing")
    parser.add_argument("--shape", choices=SHAPES, default="dense", help="(default: %(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--record", type=Path, default=RESULTS, metavar="FOLDER", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    device: Device
    flashinfer: FlashInfer
    if options.stand_in:
        device, plan = RecordingDevice(), TINY
        flashinfer = flashinfer_torch
    else:
        try:
            device, flashinfer = open_cuda()
        except ValueError as error:
            print(f"there is nothing to measure: {error}")
            return 2
        plan = SHAPES[options.shape]
        compile_kernels([kernels_of(plan)], progress=lambda what, done, count: print(f"{what}: {done} of {count}"))
    measurements = Measurements()
    limits = measure_limits(device, dtype=plan.dtype, stream_bytes=plan.stream_bytes, matmul_size=plan.matmul_size)
    measurements.rows += [
        Row(name="memory copy, read and written", value=limits.copy_gb_s, unit="GB/s"),
        Row(name="memory read", value=limits.read_gb_s, unit="GB/s"),
        Row(name=f"matrix product {plan.matmul_size}^3, {plan.dtype}", value=limits.matmul_tflops, unit="TFLOP/s"),
    ]
    subject = make_subject(device, flashinfer, plan)
    measure_steps(measurements, subject, limits)
    measure_engine(measurements, subject)
    del subject
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if plan.peer_batches and not options.no_peer:
        measure_peer(measurements, device, plan)
    record = Record(
        device="stand-in" if options.stand_in else torch.cuda.get_device_name(),
        date=f"{datetime.now(UTC):%Y-%m-%dT%H:%M} UTC",
        versions=_versions(),
        subject=f"{plan.name}, random weights, {plan.dtype}",
        seconds=perf_counter() - measurements.start_s,
        rows=measurements.rows,
    )
    print("\n" + markdown(record))
    print("\n".join(str(path) for path in write(record, options.record)))
    return 0


def measure_steps(measurements: Measurements, subject: Subject, limits: Limits) -> None:
    """Measure decode steps and prefills on the runner."""
    for context, batch in itertools.product(subject.plan.contexts, subject.plan.batches):
        row = Row(name=f"decode, {batch} at {context} tokens", at_least=DECODE_TARGETS.get(batch))
        measurements.add(row, partial(_decode, row, subject, limits, batch, context))
    for batch in subject.plan.batches if subject.plan.num_drafts else ():
        context = subject.plan.contexts[0]
        row = Row(name=f"decode with {subject.plan.num_drafts} drafts each, {batch} at {context} tokens")
        measurements.add(row, partial(_verify, row, subject, batch, context))
    for size in subject.plan.prefills:
        row = Row(name=f"prefill, {size} tokens", at_least=PREFILL_TARGETS.get(size))
        measurements.add(row, partial(_prefill, row, subject, limits, size))


def _decode(row: Row, subject: Subject, limits: Limits, batch: int, context: int) -> Row:
    seconds = decode_seconds(subject, batch, context)
    row = replace(row, value=seconds * 1e3, unit="ms a step", note=f"{batch / seconds:.0f} tokens/s")
    if shares_pages(subject, batch, context):  # they are read once for several requests, so bytes are not known
        return replace(row, at_least=None, note=f"{row.note}; requests share pages, more do not fit")
    return replace(row, share=decode_bytes(subject, batch, context) / limits.bytes_per_s / seconds)


def _verify(row: Row, subject: Subject, batch: int, context: int) -> Row:
    plain, seconds = (
        decode_seconds(subject, batch, context, num_drafts=count) for count in (0, subject.plan.num_drafts)
    )
    return replace(row, value=seconds * 1e3, unit="ms a step", note=f"{seconds / plain:.2f} times one without drafts")


def _prefill(row: Row, subject: Subject, limits: Limits, size: int) -> Row:
    seconds = prefill_seconds(subject, size)
    share = prefill_flops(subject.plan, size) / seconds / (limits.matmul_tflops * 1e12)
    return replace(row, value=seconds * 1e3, unit="ms", share=share, note=f"{size / seconds:.0f} tokens/s")


def measure_engine(measurements: Measurements, subject: Subject) -> None:
    """Measure the first token of a long prompt, and idle time, on the whole engine."""
    plan = subject.plan
    first = Row(name=f"first token of {plan.long_prompt} tokens", unit="ms")
    measurements.add(first, lambda: replace(first, value=first_token_seconds(subject) * 1e3))
    for overlap in (True, False):
        name = f"device idle, {plan.idle_batch} decode, {'with' if overlap else 'without'} overlap"
        row = Row(name=name, unit="%", below=IDLE_TARGET if overlap else None)
        measurements.add(row, partial(_idle, row, subject, overlap))


def _idle(row: Row, subject: Subject, overlap: bool) -> Row:
    idle = idle_share(subject, overlap=overlap)
    if idle is None:
        return replace(row, note="not measured: no kernel was seen")
    return replace(row, value=idle.share * 100, note=f"{idle.for_host:.1%} in gaps over 10 us, for the host")


def measure_peer(measurements: Measurements, device: Device, plan: Plan) -> None:
    """Measure the same shapes with transformers."""
    try:
        peer = Peer(device, plan)
    except Exception as error:  # it is not what is measured
        measurements.rows.append(Row(name="transformers", note=f"not measured: {type(error).__name__}: {error}"))
        return
    context, size = plan.contexts[0], plan.prefills[-1]
    for batch in plan.peer_batches:
        row = Row(name=f"transformers {peer.version}: decode, {batch} at {context} tokens", unit="ms a step")
        measurements.add(row, partial(_timed, row, partial(peer.decode_seconds, batch, context)))
    row = Row(name=f"transformers {peer.version}: prefill, {size} tokens", unit="ms")
    measurements.add(row, partial(_timed, row, partial(peer.prefill_seconds, size)))


def _timed(row: Row, measure_seconds: Callable[[], float]) -> Row:
    return replace(row, value=measure_seconds() * 1e3)


def kernels_of(plan: Plan) -> KernelNeeds:
    """Return the attention kernels that the measured model needs."""
    mixer = plan.model.paged[0]
    if not isinstance(mixer, AttentionConfig):
        return KernelNeeds(
            dtype=plan.dtype, head_dim=mixer.shape.rank, group=mixer.shape.num_heads, has_windows=(False,),
            latent_rope_dim=mixer.shape.rope_dim,
        )  # fmt: skip
    verifies = bool(plan.num_drafts)
    return KernelNeeds(
        dtype=plan.dtype, head_dim=mixer.head_dim, group=mixer.group, has_windows=(False,), verifies=verifies
    )


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "CUDA": str(torch.version.cuda)}
    for name in ("flashinfer-python", "transformers", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


if __name__ == "__main__":
    sys.exit(main())
