"""What the package promises about itself."""

import subprocess
import sys
from pathlib import Path

import pagewood.radixcache


def test_the_version_is_that_of_the_changelog() -> None:
    changelog = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {pagewood.radixcache.__version__}" in changelog


def test_the_version_is_that_of_the_distribution() -> None:
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{pagewood.radixcache.__version__}"\n' in pyproject
    assert all(hasattr(pagewood.radixcache, name) for name in pagewood.radixcache.__all__)


def test_importing_it_imports_numpy_and_the_standard_library_only() -> None:
    code = (
        "import sys, numpy; before = set(sys.modules); import pagewood.radixcache; print(*(set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    packages = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert packages <= {"numpy", "pagewood"}
