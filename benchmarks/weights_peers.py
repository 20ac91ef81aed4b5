# pyright: basic
# (torch is untyped)
"""Measures generation with int8 and int4 weights beside OpenVINO GenAI and llama.cpp: one machine, one run, in turns.

python benchmarks/weights_peers.py --openvino /path/to/python --llama-cpp /path/to/python    # four minutes
python benchmarks/weights_peers.py --quick                                                   # shows that it works

Each peer is in an environment of its own, whose Python is given, and in a process that stays loaded; a peer without a
Python is left out, and one whose process ends gets a row that says so. llama.cpp is first started again without its
fastest layouts, whose instructions some virtual machines lack. `nox -s peers` makes the environments. The model is the
110M Llama of the end-to-end benchmark with random weights, converted by optimum-intel (symmetric, int4 in groups of 32)
and by the `gguf` package (Q8_0, Q4_0). A round asks every system once, in another order each time, for greedy answers
to random prompts; the table has the median and the extremes of the rounds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from end_to_end.machine import describe_machine
from end_to_end.model import FULL, QUICK, ModelShape, write_model
from gguf_files import write_gguf
from pagewood.engine.model_folder.folder import model_folder
from peers.systems import NUM_TOKENS, PROMPT, System, begin, measure, openvino, report

CONCURRENCY = (1, 8)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openvino", metavar="PYTHON", help="with openvino-genai and optimum-intel[nncf]")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="with llama-cpp-python")
    parser.add_argument(
        "--no-repack",
        action="store_true",
        help="keep llama.cpp from laying weights out anew, for machines on which its AMX instructions are illegal",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    arguments = parser.parse_args()
    shape, rounds = (QUICK, 1) if arguments.quick else (FULL, arguments.rounds)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        count = write_model(shape, folder, seed=0)
        print(f"{describe_machine(arguments.threads).processor}, {arguments.threads} threads, {count / 1e6:.0f}M "
              f"parameters, prompts of {PROMPT} tokens, answers of {NUM_TOKENS}\n", flush=True)  # fmt: skip
        environment = os.environ | {"PAGEWOOD_CACHE": str(Path(scratch) / "cache"), "HF_HUB_OFFLINE": "1"}
        found = peers(folder, Path(scratch), shape, arguments, environment)
        shutil.copy(model_folder(None) / "tokenizer.json", folder)  # any: prompts are token ids
        systems = [*ours(folder, arguments), *found]
        try:
            for number, system in enumerate(systems):
                begin(system, shape.vocab_size, environment, Path(scratch) / f"{number}.log", concurrency=CONCURRENCY)
            measure(systems, shape.vocab_size, rounds, concurrency=CONCURRENCY)
        finally:
            for system in systems:
                system.stop()
    report(systems, concurrency=CONCURRENCY)


def ours(folder: Path, arguments: argparse.Namespace) -> list[System]:
    """Return this engine with each form."""
    return [
        System(
            name=f"pagewood {form}",
            options={"system": "pagewood", "model": str(folder), "form": form, "threads": arguments.threads},
            python=sys.executable,
        )
        for form in ("float32", "int8", "int4")
    ]


def peers(
    folder: Path, scratch: Path, shape: ModelShape, arguments: argparse.Namespace, environment: dict[str, str]
) -> list[System]:
    """Convert the model for the peers that are there."""
    found: list[System] = []
    for form in ("int8", "int4") if arguments.openvino else ():
        out = scratch / f"openvino-{form}"
        peer = openvino(arguments.openvino, folder, out, form, arguments.threads, environment)
        found += [] if peer is None else [peer]
    for kind in ("Q8_0", "Q4_0") if arguments.llama_cpp else ():
        file = scratch / f"{kind}.gguf"
        write_gguf(folder, file, architecture="llama", kinds=[kind], keys={"llama.vocab_size": shape.vocab_size},
                   tokenizer={"tokenizer.ggml.model": "no_vocab"})  # fmt: skip
        options: dict[str, Any] = {"system": "llama.cpp", "model": str(file), "threads": arguments.threads}
        options |= {"repacks": not arguments.no_repack, "most": max(CONCURRENCY), "length": 512}
        slower = {} if arguments.no_repack else {"repacks": False}
        name = f"llama.cpp {kind.lower()}"
        found.append(System(name=name, options=options, python=arguments.llama_cpp, slower=slower))
    return found


if __name__ == "__main__":
    main()
