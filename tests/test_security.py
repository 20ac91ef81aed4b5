"""SECURITY.md names tests that exist, and the flags and paths that it speaks of."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [path for folder in ("packages", "tests") for path in (ROOT / folder).rglob("test_*.py")]
TEXT = (ROOT / "SECURITY.md").read_text()


def test_the_tests_that_it_names_exist() -> None:
    names = [name for row in re.findall(r"^\|.*\|$", TEXT, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]
    file = ""
    num_found = 0
    for name in names:
        path, _, test = name.partition("::")
        if path.endswith(".py"):
            found = [one for one in TESTS if str(one).endswith(f"/{path}")]
            assert found, name
            file = "\n".join(one.read_text() for one in found)
        if test:
            assert re.search(rf"^(async )?def {test}\(", file, re.MULTILINE), name
        num_found += path.endswith(".py") or bool(test)
    assert num_found > 20


def test_the_flags_that_it_names_exist() -> None:
    sources = (ROOT / "packages/server/src/pagewood/server/cli/options").glob("*.py")
    help_text = "\n".join(path.read_text() for path in sources)
    for flag in set(re.findall(r"`(--[a-z-]+)", TEXT)):
        assert f'"{flag}"' in help_text, flag
