"""Every snippet of README.md runs, except shell commands that install or that start a server."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
SNIPPETS: list[tuple[str, str]] = FENCE.findall((ROOT / "README.md").read_text())
PYTHON = [code for language, code in SNIPPETS if language == "python"]
SHELL = [code for language, code in SNIPPETS if language == "bash"]
ADDRESS = "http://127.0.0.1:8000"


def commands() -> list[str]:
    joined = "\n".join(SHELL).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: code.strip().splitlines()[0][:40])
def test_python_snippets_run(code: str, url: str) -> None:
    code = code.replace(ADDRESS, url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [line for line in commands() if not line.startswith("python -m ")])
def test_shell_commands_run(command: str, url: str) -> None:
    if command.startswith("pagewood "):
        command = f"{sys.executable} -m pagewood.server {command.removeprefix('pagewood ')}"
    command = command.replace(ADDRESS, url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert '"error"' not in done.stdout


def test_the_two_commands_name_sessions_that_exist() -> None:
    sessions = re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    named = [line.split(" -s ")[1].split()[0] for line in commands() if " -s " in line]
    assert named == ["serve", "tests"]
    assert set(named) <= set(sessions)
