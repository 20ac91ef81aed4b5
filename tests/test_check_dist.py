"""The check of built archives accepts sound ones and finds each kind of fault."""

# pyright: basic, reportMissingImports=false
# tools are scripts, which are imported by path.

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
INFO = "pagewood_radixcache-0.1.0.dist-info"
METADATA = """Metadata-Version: 2.4
Name: pagewood-radixcache
License-Expression: Apache-2.0
Requires-Dist: numpy>=1.26
Requires-Dist: pagewood-kvpool<0.2,>=0.1
Description-Content-Type: text/markdown

"""
WHEEL = {
    "pagewood/radixcache/__init__.py": "",
    "pagewood/radixcache/testing/oracle.py": "",
    "pagewood/radixcache/py.typed": "",
    f"{INFO}/METADATA": METADATA + "# A cache\n",
    f"{INFO}/licenses/LICENSE": (ROOT / "LICENSE").read_text(),
}
SDIST = dict.fromkeys(
    [
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "pyproject.toml",
        "PKG-INFO",
        "src/pagewood/radixcache/a.py",
        "tests/a.py",
    ],
    "",
)
VERSIONS = {"radixcache": "0.1.0"}
MEMBERS = {"radixcache": "0.1.0", "kvpool": "0.1.3"}


@pytest.fixture(autouse=True)
def tools_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def wheel_problems(folder: Path, files: Mapping[str, str]) -> list[str]:
    import check_dist

    path = folder / "pagewood_radixcache-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return list(check_dist.wheel_problems(path, "radixcache", MEMBERS))


def sdist_problems(folder: Path, files: Mapping[str, str]) -> list[str]:
    import check_dist

    path = folder / "pagewood_radixcache-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"pagewood_radixcache-0.1.0/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content.encode()))
    return list(check_dist.sdist_problems(path, "radixcache", MEMBERS))


def test_sound_archives_pass(tmp_path: Path) -> None:
    import check_dist

    assert wheel_problems(tmp_path, WHEEL) == []
    assert sdist_problems(tmp_path, SDIST) == []
    assert list(check_dist.problems_of(tmp_path, VERSIONS | {})) == [
        f"{tmp_path.joinpath('pagewood_radixcache-0.1.0-py3-none-any.whl').name}: "
        "pagewood-kvpool<0.2,>=0.1 is not one of our packages"
    ]


@pytest.mark.parametrize(
    "name",
    [
        "pagewood/__init__.py",  # would hide the other packages of the namespace
        "pagewood/radixcache/test_cache.py",
        "pagewood/radixcache/tests/oracle.py",
        "pagewood/radixcache/conftest.py",
        "pagewood/radixcache/testing/traffic.py",
        "pagewood/radixcache/tiers/testing.py",
        "pagewood/radixcache/__pycache__/cache.py",
        "pagewood/radixcache/kernel.nbi",
        "pagewood/radixcache/notes.txt",
        "tests/test_cache.py",
    ],
)
def test_a_stray_file_in_a_wheel_is_found(name: str, tmp_path: Path) -> None:
    (problem,) = wheel_problems(tmp_path, {**WHEEL, name: ""})
    assert problem.startswith(name)


@pytest.mark.parametrize("name", ["pagewood/radixcache/py.typed", f"{INFO}/licenses/LICENSE"])
def test_a_missing_file_in_a_wheel_is_found(name: str, tmp_path: Path) -> None:
    (problem,) = wheel_problems(tmp_path, {key: content for key, content in WHEEL.items() if key != name})
    assert problem == f"{Path(name).name} is missing"


def test_another_license_is_found(tmp_path: Path) -> None:
    assert wheel_problems(tmp_path, {**WHEEL, f"{INFO}/licenses/LICENSE": "MIT"}) == [
        "LICENSE is not that of the repository"
    ]


@pytest.mark.parametrize("name", ["dist/a.whl", "tests/__pycache__/a.pyc", ".venv/a.py", ".hypothesis/a"])
def test_a_stray_file_in_an_sdist_is_found(name: str, tmp_path: Path) -> None:
    assert sdist_problems(tmp_path, {**SDIST, name: ""}) == [f"{name} does not belong into an sdist"]


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"])
def test_a_missing_file_in_an_sdist_is_found(name: str, tmp_path: Path) -> None:
    assert sdist_problems(tmp_path, {key: "" for key in SDIST if key != name}) == [f"{name} is missing"]


def test_an_archive_that_is_too_large_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import check_dist

    monkeypatch.setattr(check_dist, "OTHER_MAX_BYTES", 1024)
    assert wheel_problems(tmp_path, WHEEL)[0].startswith("must have at most 1 KiB")


def test_missing_and_foreign_archives_are_found(tmp_path: Path) -> None:
    import check_dist

    (tmp_path / "other-1.0.tar.gz").touch()
    assert list(check_dist.problems_of(tmp_path, VERSIONS)) == [
        "pagewood_radixcache-0.1.0-py3-none-any.whl: is missing",
        "pagewood_radixcache-0.1.0.tar.gz: is missing",
        "other-1.0.tar.gz: is not one of our archives",
    ]


@pytest.mark.parametrize(
    ("need", "problem"),
    [
        ("pagewood-kvpool>=0.1,<0.2", None),
        ("pagewood-kvpool==0.1.3", "must be a range"),
        ("pagewood-kvpool>=0.1", "must be a range"),
        ("pagewood-kvpool>=0.2,<0.3", "excludes the current version 0.1.3"),
        ("pagewood-other>=0.1,<0.2", "is not one of our packages"),
    ],
)
def test_requirements_between_packages(need: str, problem: str | None) -> None:
    import check_dist

    requirement = Requirement(need)
    found = list(check_dist.requirement_problems(requirement, MEMBERS.get(requirement.name.removeprefix("pagewood-"))))
    assert len(found) == (problem is not None)
    assert all(problem and problem in text for text in found)


BASE = "https://github.com/pagewood/pagewood"


@pytest.mark.parametrize(
    "text",
    [
        "[elsewhere](https://example.org/a#b) and `[code](a.py)`",
        f"[ours]({BASE}/blob/main/packages/engine/README.md#cuda)",
        f"![a picture]({BASE}/raw/main/LICENSE)",
        f"[a folder]({BASE}/tree/main/tools)",
        "```\n[in a block](a.py)\n```",
    ],
)
def test_links_that_work_on_an_index(text: str) -> None:
    import check_dist

    assert list(check_dist.readme_problems(text)) == []


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("[a](../engine)", "../engine"),
        ("[a](#section)", "#section"),
        ("![a](gallery/a.png)", "gallery/a.png"),
        ('<img src="a.png">', "a.png"),
        ("| a |\n|---|\n| [a](b.md) |", "b.md"),
        ("[a][1]\n\n[1]: b.md", "b.md"),
        (f"[a]({BASE}/blob/main/no_such_file.py)", "no_such_file.py"),
        ("![a](https://raw.githubusercontent.com/pagewood/pagewood/main/no.png)", "no.png"),
    ],
)
def test_links_that_do_not(text: str, address: str) -> None:
    import check_dist

    (problem,) = check_dist.readme_problems(text)
    assert address in problem
