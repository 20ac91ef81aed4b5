"""Runs whole loops of clients and agents, unmodified, over Anthropic's and Ollama's protocols: `nox -s clients`.

The server is real (a socket, HTTP, all stages), and so is what the clients do. What the model writes is chosen here:
two calls at once, and then an answer with the last result; for aider, a file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path

from anthropic import Anthropic, beta_tool

from scripted_server import begun, call, scripted_server

LIMIT_S = 120
MAX_LENGTH = 8_000
"""Less than all of these clients ask for."""
LOOPS = Path(__file__).parent / "loops"
TEXT = "sum-42\n"


def answer(prompt: str) -> str:
    """Return what the model writes behind a prompt."""
    turn = prompt.rpartition("<|start|>")[0].rpartition("<|start|>")[2]  # the one before the answer
    if turn.startswith("tool\n"):
        return f"{begun(prompt)}It says {''.join(re.findall('rain in [A-Z][a-z]+', turn)[-1:])}."
    if '"name": "weather"' in prompt:
        return f"{begun(prompt)}I look.{call('weather', {'city': 'Oslo'})}{call('weather', {'city': 'Rome'})}"
    return f"{begun(prompt)}note.txt\n```\n{TEXT}```\n"  # a whole file, in the form that aider asks for


def check_tool_runner(url: str) -> None:
    """Run the tool runner of Anthropic's client, whole and streamed."""
    asked: list[str] = []

    @beta_tool
    def weather(city: str) -> str:
        """Return the weather.

        Args:
            city: name.
        """
        asked.append(city)
        return f"rain in {city}"

    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for max_tokens, stream in ((20_000, False), (128_000, True)):
            runner = client.beta.messages.tool_runner(
                model="echo",
                max_tokens=max_tokens,
                messages=[{"role": "user", "content": "Is it raining in Oslo and in Rome?"}],
                tools=[weather],
                stream=stream,
            )
            last = runner.until_done()
            assert last.stop_reason == "end_turn", last
            assert last.content[0].type == "text", last
            assert last.content[0].text == "It says rain in Rome.", last
    assert asked == ["Oslo", "Rome"] * 2, asked
    print("Anthropic's tool runner, Python: 2 loops")


async def check_aider(program: Path, url: str, folder: Path) -> None:
    """Let aider write a file over Ollama, without a network beyond the server."""
    options = [
        "--model", "ollama_chat/echo", "--edit-format", "whole", "--no-git", "--yes-always", "--no-check-update",
        "--analytics-disable", "--no-show-model-warnings", "--no-auto-lint", "--map-tokens", "0",
    ]  # fmt: skip
    environment = {"OLLAMA_API_BASE": url, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(folder)}
    await run(program, *options, "--message", "Write sum-42.", "note.txt", folder=folder, environment=environment)
    assert (folder / "note.txt").read_text() == TEXT
    print("aider over Ollama: 1 file")


async def run(program: Path | str, *words: str, folder: Path, environment: dict[str, str] | None = None) -> None:
    """Run a program in a folder."""
    process = await asyncio.create_subprocess_exec(
        program, *words, cwd=folder, env=os.environ | (environment or {}), stdin=asyncio.subprocess.DEVNULL
    )
    await asyncio.wait_for(process.wait(), LIMIT_S)
    assert process.returncode == 0, process.returncode


async def check_node(node: Path, url: str) -> None:
    """Run every script, with the packages of a folder."""
    for script in sorted(LOOPS.glob("*.mjs")):
        copy = shutil.copy(script, node)  # its imports are searched beside it
        await run("node", str(copy), url, folder=node)


async def check(*, node: Path | None, aider: Path | None) -> None:
    """Run every loop whose program is there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "work").mkdir()
        async with scripted_server(folder / "model", answer, max_length=MAX_LENGTH) as url:
            await asyncio.to_thread(check_tool_runner, url)
            if node is not None:
                await check_node(node.resolve(), url)
            if aider is not None:
                await check_aider(aider.absolute(), url, folder / "work")


def main() -> None:
    """Read the arguments, and run the loops."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", type=Path, help="folder with the packages of the scripts in tools/loops")
    parser.add_argument("--aider", type=Path, help="the program")
    options = parser.parse_args()
    asyncio.run(check(node=options.node, aider=options.aider))


if __name__ == "__main__":
    main()
