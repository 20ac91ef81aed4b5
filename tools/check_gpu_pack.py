"""Checks a pack without a GPU: `python tools/check_gpu_pack.py PACK`.

Unpacks it, imports FlashInfer from what was unpacked, and follows the includes of all sources that our kernels are
compiled from: each must be found there, or be one that the CUDA toolkit or the compiler brings. It needs what
FlashInfer's import needs, torch and apache-tvm-ffi among it.
"""

# pyright: basic
# FlashInfer has no types.

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
_BROUGHT = re.compile(
    r"[a-z_0-9]+|c?(assert|complex|ctype|errno|fenv|float|inttypes|limits|locale|math|setjmp|signal|stdarg|stdbool|"
    r"stddef|stdint|stdio|stdlib|string|time|uchar|wchar|wctype|malloc|unistd|dlfcn|fcntl|pthread|sched|io|direct|process|"
    r"share|winsock2|windows|intrin|emmintrin|immintrin|x86intrin|xmmintrin|alloca|features|memory|strings|execinfo|"
    r"cxxabi|arm_neon|arm_acle|cpuid|endian|semaphore)\.h|(sys|bits|linux|netinet|arpa|android|experimental|ext|mach|TargetConditionals)[/.].*|"
    r"(cuda|cu|nv|cooperative_groups|mma|sm_|device_|driver_|vector_|math_constants|crt/|library_types|texture_|surface_|"
    r"channel_descriptor|builtin_types|host_defines|math_functions|fatbinary|cupti)[A-Za-z0-9_/.]*|"
    r"__(memory|utility)/.*|debug/safe_iterator\.h|yvals\.h|emscripten/.*|boost/.*"
)
"""Headers of the compiler, the system and the CUDA toolkit, and those that are asked for on other systems only."""
_SPECS = """
import json, sys, warnings
warnings.simplefilter("ignore")
import flashinfer
from flashinfer.jit import env
from pagewood.engine.runner.flashinfer_compile import KernelNeeds, kernel_specs

needs = [
    KernelNeeds(dtype=dtype, head_dim=head_dim, group=group, has_windows=(False, True), has_soft_cap=cap)
    for dtype in ("float16", "bfloat16") for head_dim in (64, 128) for group in (1, 4) for cap in (False, True)
]
folders = [env.FLASHINFER_INCLUDE_DIR, env.FLASHINFER_CSRC_DIR, *env.CUTLASS_INCLUDE_DIRS, env.SPDLOG_INCLUDE_DIR,
           *env.CCCL_INCLUDE_DIRS]
sources = [str(source) for spec in kernel_specs(needs, prefill_backend="fa3") for source in spec.sources]
print(json.dumps({"file": flashinfer.__file__, "folders": [str(f) for f in folders], "sources": sources}))
"""


def main() -> int:
    """Check the pack that the command line names; return 0 if nothing is missing."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    pack = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        site = Path(name) / "site"
        with tarfile.open(pack / "flashinfer.tar.xz") as packed:
            packed.extractall(site, filter="data")
        (ffi,) = (pack / "wheels").glob("apache_tvm_ffi-*.whl")
        with zipfile.ZipFile(ffi) as wheel:
            wheel.extractall(Path(name) / "ffi")
        told = specs(site, cache=Path(name) / "cache")
        if not Path(told["file"]).is_relative_to(site):
            print(f"FlashInfer must be imported from the pack, got {told['file']}")
            return 1
        headers = sorted({path.parent for path in (Path(name) / "ffi").rglob("tvm") if path.parent.name == "include"})
        dlpack = sorted({path.parent for path in (Path(name) / "ffi").rglob("dlpack") if path.parent.name == "include"})
        folders = [*map(Path, told["folders"]), *headers, *dlpack]
        found, missing = follow([Path(source) for source in told["sources"]], folders)
    print(f"{len(told['sources'])} sources reach {found} headers of the pack; missing: {missing or 'none'}")
    return 1 if missing else 0


def specs(site: Path, *, cache: Path) -> dict[str, list[str]]:
    """Return where FlashInfer is imported from, its include folders, and the sources of our kernels."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ, "PYTHONPATH": path, "FLASHINFER_WORKSPACE_BASE": str(cache), "FLASHINFER_CUDA_ARCH_LIST": "9.0a"
    }  # fmt: skip
    command = [sys.executable, "-c", _SPECS]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def follow(sources: Sequence[Path], folders: Sequence[Path]) -> tuple[int, list[str]]:
    """Return how many headers the sources reach, and the names of those that are not there."""
    queue, seen, missing = list(sources), set(sources), set()
    while queue:
        path = queue.pop()
        for quote, name in includes(path):
            places = [path.parent, *folders] if quote == '"' else folders
            header = next((place / name for place in places if (place / name).is_file()), None)
            if header is None:
                if not _BROUGHT.fullmatch(name):
                    missing.add(f"{name} (of {path.name})")
            elif (header := header.resolve()) not in seen:
                seen.add(header)
                queue.append(header)
    return len(seen) - len(sources), sorted(missing)


def includes(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (quote, name) of every include of a file, whatever conditions stand around it."""
    yield from _INCLUDE.findall(path.read_text(errors="replace"))


if __name__ == "__main__":
    raise SystemExit(main())
