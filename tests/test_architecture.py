"""ARCHITECTURE.md and the READMEs of the folders: short enough, and about modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAP = ROOT / "ARCHITECTURE.md"
SOURCES = [path for path in sorted(ROOT.glob("packages/*/src/pagewood/*")) if path.is_dir()]
ROOMS = sorted(ROOT.glob("packages/*/src/pagewood/**/README.md"))
WHERE = MAP.read_text().partition("## Where a new thing goes")[2].partition("\n## ")[0]


def test_the_map_is_read_in_a_quarter_of_an_hour() -> None:
    assert len(MAP.read_text().split()) <= 3_000


@pytest.mark.parametrize("place", sorted(set(re.findall(r"`((?:\w+/)+\w+(?:\.\w+)?)`", WHERE))))
def test_a_place_exists(place: str) -> None:
    path, _, name = place.partition(".")
    if path.startswith("engine/"):  # said where another package has a module of this name
        path = path.removeprefix("engine/")
    elif name == "json":
        assert list(ROOT.glob(f"packages/*/{place}"))
        return
    if name == "html":
        assert [source for source in SOURCES if (source / place).exists()]
        return
    found = [source / path for source in SOURCES if (source / path).is_dir() or (source / f"{path}.py").exists()]
    assert found, f"{path} is no module or folder"
    if name:
        assert any(re.search(rf"^(class|def) {name}\b", one.with_suffix(".py").read_text(), re.M) for one in found)


def test_every_folder_with_a_readme_is_linked() -> None:
    linked = {
        (page.parent / target).resolve()
        for page in (MAP, *ROOMS)
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    }
    assert {page.parent for page in ROOMS} <= linked
