"""Changes one operator or number of a module at a time, runs its tests, and reports the changes that no test notices.

    python tools/mutate.py packages/schedpolicy budget reserve victim
    python tools/mutate.py packages/schedpolicy victim --part 1/4

Each module `x` is tested by `tests/test_x.py` of its package, in a copy of the package that only the test run sees.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv,),
    ast.FloorDiv: (ast.Mult,),
    ast.Div: (ast.Mult,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
EQUIVALENT = {
    # A pivot is either exactly zero or far above this limit.
    ("if a[i][i] <= 1e-9 * len(rows):", "a[i][i] < 1e-09 * len(rows)"),
    # Fitting again without a column of weight zero changes nothing.
    ("if solution[worst] >= 0:", "solution[worst] > 0"),
    # Any scale works.
    ("scale = [max(abs(row[i]) for row, _ in rows) or 1.0 for i in range(n)]", "2.0"),
    ("scale = [max(abs(row[i]) for row, _ in rows) or 1.0 for i in range(n)]", "min"),
    # Two entries are never equal, because each group is in only one of them.
    ("if again and (num_begun == len(active) or again[0] < active[num_begun]):", "again[0] <= active[num_begun]"),
}
"""Mutations that do not change behaviour: the line, and the new text of its mutated part."""
RENAMED = {"min": "max", "max": "min"}


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, object]]:
    """Yield (node, field, new value) for every change; comparisons have one for each operator."""
    decorated = [node for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    strict = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "strict"]
    decorators = {id(part) for node in decorated for decorator in node.decorator_list for part in ast.walk(decorator)}
    for node in ast.walk(tree):
        if id(node) in decorators or node in strict:  # zip(strict=) checks what holds
            continue
        match node:
            case ast.BinOp(op=operator) | ast.BoolOp(op=operator) | ast.AugAssign(op=operator):
                yield from ((node, "op", other()) for other in SWAPS.get(type(operator), ()))
            case ast.Compare(ops=operators):
                for index, operator in enumerate(operators):
                    for other in SWAPS.get(type(operator), ()):
                        yield node, "ops", [*operators[:index], other(), *operators[index + 1 :]]
            case ast.Constant(value=bool(value)):
                yield node, "value", not value
            case ast.Constant(value=int(value) | float(value)):
                yield node, "value", value + 1
            case ast.Name(id=name) if name in RENAMED:
                yield node, "id", RENAMED[name]
            case _:
                pass


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, new text, mutated source) for every change."""
    tree, lines = ast.parse(source), source.splitlines()
    for node, field, value in list(places(tree)):
        before, line = getattr(node, field), getattr(node, "lineno", 1)
        setattr(node, field, value)
        if (lines[line - 1].strip(), ast.unparse(node)) not in EQUIVALENT:
            yield line, ast.unparse(node), ast.unparse(tree)
        setattr(node, field, before)


def survives(package: Path, copy: Path, module: str) -> bool:
    """Return whether the tests of a module pass against the copy."""
    environment = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/test_{module}.py"]
    try:
        done = subprocess.run(command, cwd=package, env=environment, capture_output=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    """Mutate the given modules; return 1 if a change survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--part", default="1/1", help="I/N: only the I-th of every N changes, to split a run into N")
    options = parser.parse_args()
    part, num_parts = map(int, options.part.split("/"))
    num_survivors = 0
    for module in options.modules:
        (original,) = (options.package / "src").rglob(f"{module}.py")
        source = original.read_text()
        num_mutants = 0
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "src"
            shutil.copytree(options.package / "src", copy)
            target = copy / original.relative_to(options.package / "src")
            if not survives(options.package, copy, module):
                raise SystemExit(f"the tests of {module} must pass before mutation")
            for line, text, mutant in islice(mutants(source), part - 1, None, num_parts):
                num_mutants += 1
                target.write_text(mutant)
                if survives(options.package, copy, module):
                    num_survivors += 1
                    print(f"{original}:{line} survives as {text!r}", flush=True)
        print(f"{module}: {num_mutants} changes", flush=True)
    return int(num_survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
