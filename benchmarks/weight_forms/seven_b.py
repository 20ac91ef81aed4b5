# pyright: basic
"""A model of 7B weights in four bits: how long it takes until it is ready, and how much memory it needs."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import tempfile
from pathlib import Path
from time import perf_counter

from end_to_end.cases import Case, draw_prompts
from weight_forms.folders import SEVEN_B, SHAPES, write_folder

CASE = Case(name="one request", num_requests=1, num_shared=0, num_own=64, num_output=16)
LIMIT_GB = 8.0
_STATUS = Path("/proc/self/status")


def measure(*, num_threads: int, quick: bool) -> None:
    """Write a folder, serve one request from it twice, and print times and memory; the folder is deleted.

    Args:
        num_threads: of the engine.
        quick: take a tiny model.
    """
    shape = SHAPES["tiny"] if quick else SEVEN_B
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["PAGEWOOD_CACHE"] = str(folder / "cache")
        start = perf_counter()
        num_weights = write_folder(shape, folder / "model", is_int4=True)
        size = (folder / "model" / "model.safetensors").stat().st_size
        print(
            f"A checkpoint of {num_weights / 1e9:.2f}B weights in four bits, {size / 1e9:.2f} GB, written in "
            f"{perf_counter() - start:.0f} s;\none request of {CASE.num_prompt} tokens that gets {CASE.num_output}.\n"
        )
        print("| start | imports | weights | rest until ready | first token | each other | peak RSS | RSS after |")
        print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
        for what in ("first", "second, mapped"):
            with multiprocessing.get_context("spawn").Pool(1) as pool:  # a process of its own, for its peak
                found = pool.apply(serve, (folder / "model", num_threads, shape.vocab_size))
            seconds = " | ".join(f"{one:.2f} s" for one in found[:5])
            peak, after = (f"{one / 1e9:.2f} GB" for one in found[5:])
            print(f"| {what} | {seconds} | {peak} | {after} |", flush=True)
            if found[5] > LIMIT_GB * 1e9:
                print(f"\nMore than {LIMIT_GB:.0f} GB!")


def serve(folder: Path, num_threads: int, vocab_size: int) -> tuple[float, ...]:
    """Return seconds of imports, weights, the rest of the start, the first token and others, and bytes of memory."""
    from end_to_end.pagewood_system import PagewoodSystem

    age_s, imported = _age_s(), perf_counter()
    records = _Records()
    logging.getLogger("pagewood").addHandler(records)
    logging.getLogger("pagewood").setLevel(logging.INFO)
    system = PagewoodSystem(folder, [CASE], num_threads=num_threads, weights="int4")
    ready = perf_counter()
    weights_s = records.seconds_of_weights()
    run = system.run(CASE, draw_prompts(CASE, vocab_size=vocab_size, seed=0))
    system.close()
    times = run.times_s[0]
    first, each = times[0] - run.submitted_s, (times[-1] - times[0]) / (len(times) - 1)
    peak, after = _memory()
    return age_s, weights_s, ready - imported - weights_s, first, each, peak, after


class _Records(logging.Handler):
    """Keeps what the engine logs about its weights."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._found += re.findall(r"weights (?:quantised|mapped) .* in ([\d.]+) s", record.getMessage())

    def seconds_of_weights(self) -> float:
        return sum(map(float, self._found))


def _age_s() -> float:
    """Return the seconds since this process was started; 0 if the system does not say."""
    if not _STATUS.is_file():
        return 0.0
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def _memory() -> tuple[int, int]:
    """Return the peak and the present resident bytes of this process."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines()) if _STATUS.is_file() else {}
    peak, now = (1024 * int(lines.get(name, "0").split()[0]) for name in ("VmHWM", "VmRSS"))
    return peak, now
