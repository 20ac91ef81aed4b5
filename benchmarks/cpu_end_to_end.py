"""Measures Pagewood and `transformers` side by side on this CPU, relative to what the CPU allows.

python benchmarks/cpu_end_to_end.py            # prints the tables; about fifteen minutes on two cores
python benchmarks/cpu_end_to_end.py --record   # and writes them to benchmarks/results
python benchmarks/cpu_end_to_end.py --quick    # a tiny model, only to test the script
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from end_to_end.cases import choose_cases

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run the comparison that the command line asks for."""
    parser = _parser()
    arguments = parser.parse_args()
    try:
        cases = choose_cases(arguments.only, quick=arguments.quick)
    except ValueError as error:
        parser.error(str(error))
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # read when torch is imported; sets the threads of OpenMP

    from end_to_end.comparison import compare
    from end_to_end.report import markdown, write_record

    with tempfile.TemporaryDirectory() as folder:
        record = compare(
            Path(folder),
            cases,
            quick=arguments.quick,
            tied=arguments.tied,
            num_threads=arguments.threads,
            num_repeats=arguments.repeat,
            num_pairs=arguments.pairs,
        )
    print(markdown(record))
    if arguments.record is not None:
        print("\n".join(str(path) for path in write_record(record, arguments.record)))


def _parser() -> argparse.ArgumentParser:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens; its numbers mean nothing")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="a case by name; may be repeated")
    parser.add_argument("--tied", action="store_true", help="a model whose head is its embedding table")
    parser.add_argument("--threads", type=int, default=min(2, cores), help="threads of every system (default 2)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of everything (default 3)")
    parser.add_argument(
        "--pairs", type=int, default=4, help="runs of our two loops side by side, in each repetition (default 4)"
    )
    parser.add_argument(
        "--record", type=Path, nargs="?", const=RESULTS, metavar="FOLDER", help="keep JSON and Markdown in FOLDER"
    )
    return parser


if __name__ == "__main__":
    main()
