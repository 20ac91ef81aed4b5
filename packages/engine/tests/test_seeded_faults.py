"""Faults that tests seed fit the code of today, also those that are searched for in slow cases only."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import seeded_faults
from seeded_faults import Edit, seed_fault, source_of

FOLDER = Path(__file__).parent
FILES = [
    path for path in sorted(FOLDER.rglob("*.py"))
    if "integrations" not in path.parts and any(word in path.read_text() for word in ("Edit", "seed_fault"))
]  # fmt: skip


def module_of(path: Path) -> ModuleType:
    """Return the module of a file, which pytest has imported if it runs all tests."""
    for one in [*sys.modules.values()]:
        if getattr(one, "__file__", None) == str(path):
            return one
    spec = importlib.util.spec_from_file_location(f"read_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def edits_in(found: Any) -> Iterator[Edit]:
    """Yield the edits in a table of faults, however deep."""
    match found:
        case (owner, str() as name, str() as old, str() as new) if inspect.isclass(owner) or inspect.ismodule(owner):
            yield owner, name, old, new
        case dict():
            for one in found.values():  # pyright: ignore[reportUnknownVariableType]
                yield from edits_in(one)
        case list() | tuple():
            for one in found:  # pyright: ignore[reportUnknownVariableType]
                yield from edits_in(one)
        case _:
            return


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_faults_fit_the_code(path: Path) -> None:
    for name, found in vars(module_of(path)).items():
        for owner, function, old, _ in edits_in(found) if not name.startswith("__") else ():
            assert old in source_of(owner, function), f"{name}: {function} has no {old!r}"


def test_a_fault_that_does_not_fit_is_not_taken_for_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011
            seed_fault([(seeded_faults, "source_of", "no such piece", "")], monkeypatch)

    with pytest.raises(pytest.fail.Exception, match="update the fault"):
        run()


def test_there_are_faults() -> None:
    assert sum(1 for path in FILES for one in vars(module_of(path)).values() for _ in edits_in(one)) > 300
