"""The version that a package says is the one that is published."""

import importlib
import tomllib
from pathlib import Path

import pytest

PACKAGES = sorted((Path(__file__).parents[1] / "packages").iterdir())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_module_project_and_changelog_agree(package: Path) -> None:
    version = tomllib.loads((package / "pyproject.toml").read_text())["project"]["version"]
    assert importlib.import_module(f"pagewood.{package.name}").__version__ == version
    assert version in (package / "CHANGELOG.md").read_text()
