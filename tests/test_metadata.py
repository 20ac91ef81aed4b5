"""The five pyproject.toml files agree with the table [tool.pagewood] of the repository's own, and with each other."""

# pyright: basic
# tomllib returns untyped values.

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGES = sorted((ROOT / "packages").iterdir())
PROJECTS = {path.name: tomllib.loads((path / "pyproject.toml").read_text())["project"] for path in PACKAGES}
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pagewood"]
each_package = pytest.mark.parametrize("name", PROJECTS)


@each_package
def test_addresses(name: str) -> None:
    base = TABLE["repository"]
    assert PROJECTS[name]["urls"] == {
        "Homepage": base,
        "Documentation": f"{base}/blob/main/packages/{name}/README.md",
        "Repository": base,
        "Issues": f"{base}/issues",
        "Changelog": f"{base}/blob/main/packages/{name}/CHANGELOG.md",
    }


@each_package
def test_author_license_and_python(name: str) -> None:
    project = PROJECTS[name]
    assert project["authors"] == [{"name": TABLE["author"]}]
    assert (project["license"], project["license-files"]) == (TABLE["license"], ["LICENSE"])
    assert project["requires-python"] == f">={TABLE['python'][0]}"
    assert (ROOT / "packages" / name / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@each_package
def test_classifiers_and_keywords(name: str) -> None:
    classifiers = PROJECTS[name]["classifiers"]
    versions = [entry for entry in classifiers if re.search(r"Python :: \d+\.\d+$", entry)]
    assert versions == [f"Programming Language :: Python :: {version}" for version in TABLE["python"]]
    assert {TABLE["status"], "Intended Audience :: Developers", "Typing :: Typed"} <= set(classifiers)
    assert any(entry.startswith("Topic :: ") for entry in classifiers)
    assert not any(entry.startswith("License :: ") for entry in classifiers)  # PEP 639: the expression alone says it
    assert len(PROJECTS[name]["keywords"]) >= 3


@each_package
def test_packages_require_each_other_as_ranges_that_hold_now(name: str) -> None:
    extras = PROJECTS[name].get("optional-dependencies", {}).values()
    for text in [*PROJECTS[name]["dependencies"], *(need for extra in extras for need in extra)]:
        need = Requirement(text)
        if need.name.startswith("pagewood-"):
            assert sorted(part.operator for part in need.specifier) == ["<", ">="], text
            assert need.specifier.contains(PROJECTS[need.name.removeprefix("pagewood-")]["version"]), text


def test_every_mention_of_the_repository_has_its_address() -> None:
    owner = TABLE["repository"].removeprefix("https://github.com/")
    files = [*ROOT.glob("*.md"), *ROOT.glob("packages/*/*.md"), *ROOT.glob("tools/**/*.md")]
    for path in files:
        for mention in re.findall(
            r"https://(?:raw\.githubusercontent|github)\.com/([\w.-]+/[\w.-]+)", path.read_text()
        ):
            if mention.endswith("/pagewood"):
                assert mention == owner, path
