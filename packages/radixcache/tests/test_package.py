"""Names and imports of the package."""

import subprocess
import sys

import pagewood.radixcache


def test_every_public_name_exists() -> None:
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
