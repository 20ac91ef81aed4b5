import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_snippets_of_the_readme_run(tmp_path: Path) -> None:
    """All in one process, because each would import torch and compile kernels again."""
    program = "".join(
        f"exec(compile({code!r}, 'snippet {number} of README.md', 'exec'), {{'__name__': '__main__'}})\n"
        for number, code in enumerate(SNIPPETS, 1)
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
