"""Every mutable field names its writers where it is declared: `# written by: kv, retire`; these tests find others.

Fields are declared in a class body or in `__init__`. Its writers are modules of the same package by their file
stem, with their folder where two share a stem (`cuda.attention`), classes (`Tree`), or methods (`Tree.split`; a bare
`split` is a method in the declaring module). A write is an assignment, a deletion, or a call of a method that mutates a
list, dict or set, through anything but `self`.
A write to an object of another library says so on its line: `# not ours`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = sorted((Path(__file__).parents[1] / "packages").iterdir())
MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft", "popitem", "remove"),
    *("reverse", "setdefault", "sort", "update"),
}
DECLARATION = re.compile(r"^\s*(?:self\.)?(\w+)\s*(?::[^#]*|=[^#]*)(?:#.*)?$")
WRITERS = re.compile(r"#.*\bwritten by: ([\w., ]+)")
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)


def declared_writers(source: str) -> dict[str, set[str]]:
    """Map each field with a `written by` comment, on its line or on the docstring below it, to the names there."""
    writers: dict[str, set[str]] = {}
    field: str | None = None
    for line in source.splitlines():
        declaration = DECLARATION.match(line)
        if declaration:
            field = declaration[1]
        names = WRITERS.search(line)
        if names and field:
            writers[field] = {name.strip() for name in names[1].split(",")}
    return writers


def foreign_writes(source: str) -> Iterator[tuple[str, int]]:
    """Yield (field, line) for each write to an attribute of anything but `self`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                pass
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.For(target=target):
                targets = [target]
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in MUTATORS:
                targets = [value] if isinstance(value, (ast.Attribute, ast.Subscript)) else []
            case ast.Call(func=ast.Name(id="insort" | "heappush" | "heappop"), args=[first, *_]):
                targets = [first]
            case _:
                continue
        for target in targets:
            yield from ((name, node.lineno) for name in written_fields(target))


def written_fields(target: ast.expr) -> Iterator[str]:
    """Yield the fields of objects other than self that an assignment to the target writes."""
    match target:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            for element in elements:
                yield from written_fields(element)
        case ast.Starred(value=value) | ast.Subscript(value=value):
            yield from written_fields(value)
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return
        case ast.Attribute(attr=attr):
            yield attr
        case _:
            return


def violations(sources: dict[str, str]) -> list[str]:
    """Return the writes that no declaration allows; `sources` maps file paths of one package to their text."""
    homes = {name: path for path, source in sources.items() for name in CLASS.findall(source)}
    modules = {
        name: path for path in sources for name in (Path(path).stem, f"{Path(path).parent.name}.{Path(path).stem}")
    }
    declared: dict[str, set[str]] = {}
    for path, source in sources.items():
        for field, names in declared_writers(source).items():
            writers = {modules.get(name) or homes.get(name.split(".")[0], path) for name in names}
            declared.setdefault(field, set()).update(writers)
    found: list[str] = []
    for path, source in sources.items():
        lines = source.splitlines()
        for field, line in foreign_writes(source):
            if path not in declared.get(field, set()) and "# not ours" not in lines[line - 1]:
                owners = ", ".join(sorted(declared.get(field, set()))) or "no module"
                found.append(f"{path}:{line} writes {field}, which is written by {owners}")
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_no_module_writes_what_another_owns(package: Path) -> None:
    files = sorted([*(package / "src").rglob("*.py"), *(package / "tests" / "support").rglob("*.py")])
    assert files
    assert violations({str(file.relative_to(package)): file.read_text() for file in files}) == []


STATE = """class Request:
    tokens: list[int]
    '''Known.'''  # written by: retire
    row: int = -1  # written by: kv
"""


@pytest.mark.parametrize(
    "write",
    [
        "request.row = 1",
        "request.row += 1",
        "request.tokens.append(1)",
        "request.tokens[0] = 1",
        "request.tokens[2:] = []",
        "a, request.row = 1, 2",
        "del request.tokens[0]",
        "insort(request.tokens, 1)",
        "request.undeclared = 1",
        "for request.row in x: pass",
    ],
)
def test_a_foreign_write_is_found(write: str) -> None:
    assert len(violations({"state.py": STATE, "plan.py": f"def f(request, x):\n    {write}\n"})) == 1


@pytest.mark.parametrize("write", ["request.row = 1", "self.row = 2", "print(request.tokens)", "x = request.row"])
def test_a_writers_write_is_not(write: str) -> None:
    assert violations({"state.py": STATE, "kv.py": f"def f(self, request):\n    {write}\n"}) == []
