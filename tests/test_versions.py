"""A package's version is the same in its module, its metadata and its changelog."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

PACKAGES = sorted((Path(__file__).parents[1] / "packages").iterdir())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_module_metadata_and_changelog_have_one_version(package: Path) -> None:
    version = tomllib.loads((package / "pyproject.toml").read_text())["project"]["version"]
    assert importlib.import_module(f"pagewood.{package.name}").__version__ == version
    headings = re.findall(r"^## (.*)$", (package / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [heading for heading in headings if heading.strip("[]") != "Unreleased"]
    assert re.fullmatch(rf"\[?{re.escape(version)}\]? - \d{{4}}-\d\d-\d\d", released[0])
