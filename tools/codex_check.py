"""Runs one whole tool loop of the Codex command line, unmodified: `python tools/codex_check.py PATH_TO_CODEX`.

The server is real (a socket, HTTP, all stages), and so is the command that Codex runs. What the model writes is chosen
here: a call of the function that Codex offers for commands, and then an answer with what the command printed.
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
model = "echo"
model_provider = "pagewood"
[model_providers.pagewood]
name = "pagewood"
base_url = "{url}/v1"
wire_api = "responses"
"""


def answer(prompt: str) -> str:
    """Return what the model writes behind a prompt."""
    turn = prompt.rpartition("<|start|>")[0].rpartition("<|start|>")[2]  # the one before the answer
    if turn.startswith("tool\n"):
        return f"It printed {''.join(re.findall('sum-[0-9]+', turn)[-1:])}."
    name = next((name for name in COMMANDS if f'"{name}"' in prompt), "exec_command")
    call = json.dumps({"name": name, "arguments": {COMMANDS[name]: "echo sum-$((40+2))"}})
    return f"I run it.\n<tool_call>\n{call}\n</tool_call>"


async def check(program: Path) -> None:
    """Run the loop, and check that the result of the command is in the answer."""
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
        )
        await server.start()
        with bind("127.0.0.1", 0) as socket:
            http = http_server(server.frontend, stop_grace_s=5)
            serving = asyncio.create_task(http.serve(sockets=[socket]))
            try:
                url = f"http://127.0.0.1:{socket.getsockname()[1]}"
                (folder / "config.toml").write_text(CONFIGURATION.format(url=url))
                said = await run(program, folder)
            finally:
                http.should_exit = True
                await serving
                await server.stop()
    assert "It printed sum-42." in said, said
    print(f"codex: {said.strip()}")


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
