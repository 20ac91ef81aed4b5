"""Compiles FlashInfer's kernels for another host: `python tools/gpu_host/kernels.py --site SITE --arch ARCH`.

SITE holds FlashInfer, unpacked or installed. Its sources are compiled, which also shows that no source is missing. The
libraries are written to SITE, where FlashInfer looks first, so that a host with this folder needs neither nvcc nor time
to compile. With `--ptx` the result is for `emulated_check.py` and cannot run on a GPU.
"""

# pyright: basic, reportMissingImports=false
# FlashInfer has no types; the checks and the benchmark are scripts, which are imported by path.

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile; return 0, or raise the compiler's error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", default="13.0", help="version of the toolkit, from PyPI (default: %(default)s)")
    parser.add_argument("--site", type=Path, required=True, help="the folder that holds FlashInfer")
    parser.add_argument("--arch", required=True, help="compute capability of the GPU, such as 9.0a for H100 and H200")
    parser.add_argument(
        "--models", nargs="*", default=[], type=Path, help="folders of models that will be served there, in bf16"
    )
    parser.add_argument("--ptx", action="store_true", help="compile to PTX only, for `emulated_check.py`")
    parser.add_argument("--folder", type=Path, help="keeps the toolkit and the kernels for the next run")
    options = parser.parse_args(arguments)
    sys.path[:0] = [str(options.site), str(ROOT / "tools"), str(ROOT / "benchmarks")]
    from gpu_host.toolkit import fetch_toolkit, keep_ptx

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(options.folder or temporary).absolute()
        root = fetch_toolkit(work / "cuda", version=options.cuda)
        if options.ptx:
            keep_ptx(root)
        os.environ["CUDA_HOME"] = str(root)
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = options.arch  # FlashInfer reads these when it is imported
        os.environ["FLASHINFER_WORKSPACE_BASE"] = str(work)
        for name, library in compile_all(options.arch, options.models).items():
            target = options.site / "flashinfer" / "data" / "aot" / name / f"{name}.so"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library, target)
    return 0


def compile_all(arch: str, models: Sequence[Path]) -> dict[str, Path]:
    """Compile the kernels of the GPU check, of the benchmark and of some models; return the libraries by name."""
    from gpu import kernels_of
    from gpu_checks.numerics import FP8_KERNELS, KERNELS
    from on_gpu.subject import LLAMA_8B
    from pagewood.engine.api import EngineConfig
    from pagewood.engine.assembly.cuda.build import kernel_needs
    from pagewood.engine.models.config import ModelConfig
    from pagewood.engine.runner.cuda.kernels.flashinfer_compile import kernel_specs

    needs = [*KERNELS, *FP8_KERNELS, kernels_of(LLAMA_8B)]
    for folder in models:
        needs += kernel_needs(EngineConfig(device="cuda"), ModelConfig.from_folder(folder))
    specs = kernel_specs(needs, prefill_backend="fa3" if arch.startswith("9.") else "fa2")
    for done, spec in enumerate(specs):
        start_s = time.monotonic()
        if not spec.jit_library_path.exists():  # its path names FlashInfer's version and the architecture
            spec.build()
        print(f"compiled {done + 1} of {len(specs)} in {time.monotonic() - start_s:.0f} s: {spec.name}", flush=True)
    return {spec.name: spec.jit_library_path for spec in specs}


if __name__ == "__main__":
    raise SystemExit(main())
