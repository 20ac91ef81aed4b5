import importlib.util
import re
import tempfile
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
NEED_TORCH = ("import torch", "kvpool.memory", "kvpool.storage")
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_in_the_readme_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = EXAMPLES[number]
    if any(name in code for name in NEED_TORCH) and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    exec(compile(code, f"README.md example {number}", "exec"), {"__name__": "readme"})


def test_the_readme_has_examples():
    assert len(EXAMPLES) >= 3
