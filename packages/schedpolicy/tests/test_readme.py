import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), "README.md", "exec"), {"__name__": "readme"})


def test_importing_the_package_imports_only_the_standard_library():
    # A new interpreter, because other tests of this process import more.
    import subprocess
    import sys

    code = (
        "import sys; before = set(sys.modules); import pagewood.schedpolicy;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - {'pagewood'};"
        "sys.exit(bool(new - sys.stdlib_module_names))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
