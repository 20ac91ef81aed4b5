"""Checks whether Pagewood works on this host's GPU: `python tools/gpu_check.py`.

Pagewood's packages must be importable; nox and pytest are not needed. Each check runs in a process of its own with a
time limit, so that a failure does not hide the other results; the first one compiles FlashInfer's kernels. `--stand-in`
runs the checks on the CPU with plain torch instead of FlashInfer, which tests the script itself. See
tools/gpu_checks/README.md.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from gpu_checks.adapters import check_adapters
from gpu_checks.engine import check_answers, check_fp8, check_invariance, check_logits, check_seeds, check_waiting
from gpu_checks.experts import check_experts, check_fused_experts
from gpu_checks.families import check_families
from gpu_checks.features import check_drafts, check_ranks, check_reports, check_sampling
from gpu_checks.host import Host, Skipped, open_host
from gpu_checks.images import check_images
from gpu_checks.numerics import KERNELS, check_attention, check_operations, check_repeats
from gpu_checks.recurrence import check_recurrence
from gpu_checks.scenarios import check_echo, check_tiers
from gpu_checks.server import check_server
from pagewood.engine.runner.cuda.kernels.flashinfer_compile import compile_kernels

LIMIT_S = {"compile": 540, "families": 540, "fp8": 540, "fused": 540}
"""Time limits of the checks that compile kernels."""
OTHER_LIMIT_S = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a check."""

    name: str
    word: str
    """ok, skipped or FAILED."""
    text: str
    seconds: float


def check_compiling(host: Host) -> str:
    """FlashInfer's kernels compile."""
    if not host.is_gpu:
        raise Skipped("nothing needs to be compiled for the CPU")

    def report(what: str, done: int, count: int) -> None:
        print(f"{what}: {done} of {count}", flush=True)

    compile_kernels(KERNELS, progress=report)
    return f"{len(KERNELS)} attention shapes"


CHECKS: dict[str, Callable[[Host], str]] = {
    "compile": check_compiling,
    "operations": check_operations,
    "attention": check_attention,
    "repeats": check_repeats,
    "experts": check_experts,
    "adapters": check_adapters,
    "recurrence": check_recurrence,
    "logits": check_logits,
    "families": check_families,
    "images": check_images,
    "answers": check_answers,
    "waiting": check_waiting,
    "seeds": check_seeds,
    "invariance": check_invariance,
    "sampling": check_sampling,
    "reports": check_reports,
    "drafts": check_drafts,
    "ranks": check_ranks,
    "echo": check_echo,
    "tiers": check_tiers,
    "server": check_server,
    "fp8": check_fp8,
    "fused": check_fused_experts,
}
ON_REQUEST = ("fp8", "fused")
"""Checks that run only by name or with `--all`: their kernels take long to compile."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 0 if none failed, 1 if one failed, 2 if there is no GPU or no FlashInfer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=list(CHECKS), metavar="NAME", help=f"run only these checks, of {', '.join(CHECKS)}"
    )
    parser.add_argument("--all", action="store_true", help=f"also run {', '.join(ON_REQUEST)}")
    parser.add_argument("--stand-in", action="store_true", help="test the script itself on the CPU")
    parser.add_argument("--slow", action="store_true", help="for an emulated device: smaller steps and no time limits")
    parser.add_argument("--here", action="store_true", help="run in this process and print one line of JSON per check")
    options = parser.parse_args(arguments)
    names = options.only or [name for name in CHECKS if options.all or name not in ON_REQUEST]
    if options.stand_in:
        torch.set_num_threads(1)
    try:
        host = open_host(stand_in=options.stand_in, is_slow=options.slow)
    except ValueError as error:
        print(f"nothing can be checked: {error}")
        return 2
    if options.here:
        results = [run(host, name) for name in names]
        print("\n".join(json.dumps(asdict(result)) for result in results))
    else:
        print(heading(host), flush=True)
        results = [run_apart(name, options) for name in names]
        print("\n" + "\n".join(line(result) for result in results))
        num_failed = sum(result.word == "FAILED" for result in results)
        print(f"{len(results)} checks, {num_failed} failed, {sum(result.seconds for result in results):.0f} s")
    return 1 if any(result.word == "FAILED" for result in results) else 0


def heading(host: Host) -> str:
    """Return the first line of the report: device and versions."""
    where = torch.cuda.get_device_name() if host.is_gpu else "stand-in on the CPU: this says nothing about a GPU"
    flashinfer = importlib.metadata.version("flashinfer-python") if host.is_gpu else "replaced"
    return f"{where}; Python {sys.version.split()[0]}, torch {torch.__version__}, FlashInfer {flashinfer}"


def run(host: Host, name: str) -> Result:
    """Run one check in this process."""
    start_s = time.monotonic()
    try:
        word, text = "ok", CHECKS[name](host)
    except Skipped as reason:
        word, text = "skipped", str(reason)
    except Exception as error:  # any error that a device raises is the result of its check
        word, text = "FAILED", f"{type(error).__name__}: {error}"
    return Result(name=name, word=word, text=text, seconds=time.monotonic() - start_s)


def run_apart(name: str, options: argparse.Namespace) -> Result:
    """Run one check in a process of its own, because a fault in a kernel breaks the whole process."""
    flags = [*(["--stand-in"] if options.stand_in else []), *(["--slow"] if options.slow else [])]
    command = [sys.executable, __file__, "--here", "--only", name, *flags]
    print(f"--- {name}: {(CHECKS[name].__doc__ or '').splitlines()[0]}", flush=True)
    start_s, limit_s = time.monotonic(), None if options.slow else LIMIT_S.get(name, OTHER_LIMIT_S)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output = process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # including the compilers that it started
        process.communicate()
        return Result(
            name=name, word="FAILED", text=f"not finished after {limit_s} s", seconds=time.monotonic() - start_s
        )
    try:
        result = Result(**json.loads(output.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        result = Result(
            name=name, word="FAILED", text="the process died; see above", seconds=time.monotonic() - start_s
        )
    print(line(result), flush=True)
    return result


def line(result: Result) -> str:
    """Return the table row of a result."""
    return f"{result.word:8} {result.seconds:6.1f} s  {result.name:11} {result.text}"


if __name__ == "__main__":
    raise SystemExit(main())
