"""Check of a real server on the GPU with OpenAI's client."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time

from gpu_checks.host import QUESTIONS, Failed, Host, Skipped

START_S = 200  # time in which the server must answer; its kernels are already compiled


def check_server(host: Host) -> str:
    """`pagewood serve --device cuda` answers OpenAI's client."""
    if not host.is_gpu:
        raise Skipped("the server needs a GPU")
    text = answer_of_server()
    if "19" not in text:
        raise Failed(f"the answer to {QUESTIONS[0]!r} is {text!r}")
    return text


def answer_of_server() -> str:
    """Start a server on the GPU, ask it the first question, stop it, and return the answer."""
    if importlib.util.find_spec("openai") is None:
        raise Skipped("the package openai is not installed")
    from openai import OpenAI

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--device", "cuda", "--dtype", "float16", "--max-total-tokens", "65536", "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-m", "pagewood.server", "serve", *options], env=dict(os.environ))
    try:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                reply = client.chat.completions.create(
                    model="pagewood-demo", temperature=0, messages=[{"role": "user", "content": QUESTIONS[0]}]
                )
                break
            except Exception as error:  # not listening yet, or still loading
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise Failed(f"the server does not answer: {error}") from error
                time.sleep(0.5)
        return reply.choices[0].message.content or ""
    finally:
        process.terminate()
        process.wait(timeout=30)
