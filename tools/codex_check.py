"""Runs whole tool loops of the Codex command line, unmodified: `python tools/codex_check.py PATH_TO_CODEX`.

The server is real (a socket, HTTP, all stages), and so is what Codex does. What the model writes is chosen here: a call
of the function that Codex offers for commands, or of its custom tool for patches, and then an answer with the result.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from pathlib import Path

from pagewood.engine.text import Tokenizer
from pagewood.server.http_server import http_server
from pagewood.server.limits import HttpLimits
from pagewood.server.serve import bind
from pagewood.server.testing import TOOLS_TEMPLATE, MemoryServer, write_echo_folder

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
    begun = "</think>" if prompt.endswith("<think>\n") else ""
    return begun + _words(prompt)


def _words(prompt: str) -> str:
    turn = prompt.rpartition("<|start|>")[0].rpartition("<|start|>")[2]  # the one before the answer
    if turn.startswith("tool\n"):
        return f"It says {''.join(re.findall('sum-[0-9]+|note.txt', turn)[-1:])}."
    if '"name": "apply_patch"' in prompt and "note.txt" not in prompt:
        return _call("I write it.", "apply_patch", {"input": PATCH})
    name = next((name for name in COMMANDS if f'"{name}"' in prompt), "exec_command")
    return _call("I run it.", name, {COMMANDS[name]: "echo sum-$((40+2))"})


def _call(text: str, name: str, arguments: dict[str, str]) -> str:
    return f"{text}\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def check(program: Path) -> None:
    """Run a loop for each model, and check that the result is in the answer and the patch in the folder."""
    for model, word in zip(MODELS, ("sum-42", "note.txt"), strict=True):
        await _check(program, model, word)


async def _check(program: Path, model: str, word: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_echo_folder(folder, chat_template=TOOLS_TEMPLATE, template="hermes")
        server = MemoryServer(
            folder,
            Tokenizer.from_folder(folder),
            limit=16,
            script=answer,
            grammars=True,
            max_length=300_000,
            num_pages=40_000,
            limits=HttpLimits(),
            host="127.0.0.1",
            model_name=model,
        )
        await server.start()
        with bind("127.0.0.1", 0) as socket:
            http = http_server(server.frontend, stop_grace_s=5)
            serving = asyncio.create_task(http.serve(sockets=[socket]))
            try:
                url = f"http://127.0.0.1:{socket.getsockname()[1]}"
                (folder / "config.toml").write_text(CONFIGURATION.format(url=url, model=model))
                said = await run(program, folder)
            finally:
                http.should_exit = True
                await serving
                await server.stop()
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
