"""Translates a PTX kernel and compiles it to a library: `translate.py MODULE KERNEL LIBRARY`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from emulated_gpu.translation import translate  # noqa: E402

FLAGS = ["-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-w", f"-I{HERE}"]


def main() -> int:
    """Translate and compile."""
    module, kernel, library = sys.argv[1:]
    source = Path(library).with_suffix(".cpp")
    source.write_text(translate(Path(module).read_text(), kernel))
    return subprocess.run(["c++", *FLAGS, str(source), "-o", library]).returncode


if __name__ == "__main__":
    raise SystemExit(main())
