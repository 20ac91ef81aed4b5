"""Runs whole tool loops of the Codex command line, unmodified: `python tools/codex_check.py PATH_TO_CODEX`.

The server is real (a socket, HTTP, all stages), and so is what Codex does. What the model writes is chosen here: a call
of the function that Codex offers for commands, or of its custom tool for patches, and then an answer with the result.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path

from scripted_server import begun, call, scripted_server

LIMIT_S = 120
COMMANDS = {"exec_command": "cmd", "shell_command": "command"}
"""Functions by which versions of Codex run a command -> their argument with the command."""
CONFIGURATION = """\
model = "{model}"
model_provider = "pagewood"
[model_providers.pagewood]
name = "pagewood"
base_url = "{url}/v1"
wire_api = "responses"
"""


MODELS = ("echo", "gpt-5.5")
"""Names of the model. Codex offers its custom tool for patches to models that it knows."""
PATCH = '*** Begin Patch\n*** Add File: note.txt\n+sum-42 "\u00e9"\n*** End Patch\n'
FILE = 'sum-42 "\u00e9"\n'


def answer(prompt: str) -> str:
    """Return what the model writes behind a prompt, which may have begun its reasoning."""
    return begun(prompt) + _words(prompt)


def _words(prompt: str) -> str:
    turn = prompt.rpartition("<|start|>")[0].rpartition("<|start|>")[2]  # the one before the answer
    if turn.startswith("tool\n"):
        return f"It says {''.join(re.findall('sum-[0-9]+|note.txt', turn)[-1:])}."
    if '"name": "apply_patch"' in prompt and "note.txt" not in prompt:
        return f"I write it.{call('apply_patch', {'input': PATCH})}"
    name = next((name for name in COMMANDS if f'"{name}"' in prompt), "exec_command")
    return f"I run it.{call(name, {COMMANDS[name]: 'echo sum-$((40+2))'})}"


async def check(program: Path) -> None:
    """Run a loop for each model, and check that the result is in the answer and the patch in the folder."""
    for model, word in zip(MODELS, ("sum-42", "note.txt"), strict=True):
        await _check(program, model, word)


async def _check(program: Path, model: str, word: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with scripted_server(folder, answer, model=model) as url:
            (folder / "config.toml").write_text(CONFIGURATION.format(url=url, model=model))
            said = await run(program, folder)
        file = folder / "work" / "note.txt"
        assert f"It says {word}." in said, said
        assert (file.read_text() if file.exists() else None) == (FILE if word == "note.txt" else None)
    print(f"codex, {model}: {said.strip()}")


async def run(program: Path, folder: Path) -> str:
    """Return the last message of Codex, which works in an empty folder."""
    (folder / "work").mkdir()
    words = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Add 40 and 2 in a shell."]
    process = await asyncio.create_subprocess_exec(
        program.resolve(),
        *words,
        cwd=folder / "work",
        env={**os.environ, "CODEX_HOME": str(folder)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0, process.returncode
    return said.decode()


if __name__ == "__main__":
    asyncio.run(check(Path(sys.argv[1])))
