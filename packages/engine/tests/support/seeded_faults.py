"""Seeds faults into functions, so that tests can show that they would notice them."""

import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import pytest

Edit = tuple[Any, str, str, str]
"""Owner of a function, its name, a piece of its source, and the replacement of that piece."""


def seed_fault(edits: Sequence[Edit], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace functions by those that their edited sources define."""
    sources: dict[tuple[Any, str], str] = {}
    for owner, name, old, new in edits:
        source = sources.get((owner, name)) or source_of(owner, name)
        if old not in source:  # not an error that a test may take for the fault's
            pytest.fail(f"{name} has no {old!r}: update the fault")
        sources[owner, name] = source.replace(old, new)
    for (owner, name), source in sources.items():
        function: FunctionType = getattr(owner, name)
        namespace: dict[str, Any] = {}
        exec("from __future__ import annotations\n" + source, function.__globals__, namespace)
        monkeypatch.setattr(owner, name, namespace[name])


def source_of(owner: Any, name: str) -> str:
    """Return the source of a function, as the pieces of an `Edit` are found in it."""
    return textwrap.dedent(inspect.getsource(getattr(owner, name)))


def assert_found(edits: Sequence[Edit], run: Callable[[int], object], seeds: Iterable[int]) -> None:
    """Seed a fault, and run with one seed after another until a run ends with an error; any error counts."""
    with pytest.MonkeyPatch.context() as patch:
        seed_fault(edits, patch)
        assert_fails(run, seeds)


def assert_fails(run: Callable[[int], object], seeds: Iterable[int]) -> None:
    """Run with one seed after another until a run ends with an error."""
    for seed in seeds:
        try:
            run(seed)
        except Exception:
            return
    pytest.fail("the fault was not found")


def slow_ones(faults: Iterable[str], *slow: str) -> list[Any]:
    """Return faults as parameters; those that take many or long scenarios to find are marked as slow."""
    assert set(slow) <= set(faults)
    return [pytest.param(fault, marks=pytest.mark.slow) if fault in slow else fault for fault in faults]


def by_turns(faults: Iterable[str], *slow: str) -> list[Any]:
    """Return faults of one search as parameters: of three, the first is searched for in every run, the others are slow.

    They show that the search can find something; what it finds, it finds without them.
    """
    names = [*faults]
    return [
        pytest.param(name, marks=pytest.mark.slow if index % 3 or name in slow else ())
        for index, name in enumerate(names)
    ]
