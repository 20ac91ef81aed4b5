"""Versions and imports of the package."""

import subprocess
import sys
from pathlib import Path

import pagewood.radixcache


def test_the_changelog_has_the_version() -> None:
    changelog = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{pagewood.radixcache.__version__}] - " in changelog


def test_the_distribution_has_the_version() -> None:
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{pagewood.radixcache.__version__}"\n' in pyproject
    assert all(hasattr(pagewood.radixcache, name) for name in pagewood.radixcache.__all__)


def test_the_package_imports_only_numpy_and_the_standard_library() -> None:
    code = (
        "import sys, numpy; before = set(sys.modules); import pagewood.radixcache; print(*(set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    packages = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    ours = {
        name for name in packages if name == "pagewood" or name.endswith("__mypyc")
    }  # the latter in compiled wheels
    assert packages - ours <= {"numpy"}
