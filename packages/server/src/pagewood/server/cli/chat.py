"""`pagewood chat`: a conversation in the terminal, with any server that has OpenAI's API."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from pagewood.server.cli.options.page import Commands
from pagewood.server.cli.server_options import add_server_options, key_of, trust_of

HELP = "/clear starts a new conversation, /exit quits, Ctrl-C stops an answer"


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "chat", help="chat with a server in the terminal", description=f"Chat with a server in the terminal: {HELP}."
    )
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    server.add_argument("--model", metavar="NAME", help="name of the model (default: the first model of the server)")
    add_server_options(server)
    answers = parser.add_argument_group("answers")
    answers.add_argument("--system", metavar="TEXT", help="system message (default: none)")
    answers.add_argument("--max-tokens", type=int, metavar="TOKENS", help="longest answer (default: as long as fits)")
    answers.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: that of the model)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Hold a conversation until the user quits."""
    key, trust = key_of(options), trust_of(options)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(10.0, read=None)
    with httpx.Client(base_url=options.url, headers=headers, timeout=timeout, verify=trust or True) as client:
        try:
            model: str = options.model or _json(client.get("/v1/models"))["data"][0]["id"]
        except httpx.HTTPError as error:
            raise ValueError(f"no server answers at {options.url}: {error}") from error
        print(f"{model} at {options.url}: {HELP}.")
        _converse(client, model, options)
    return 0


def _converse(client: httpx.Client, model: str, options: argparse.Namespace) -> None:
    start = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(start)
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        match text:
            case "/exit":
                return
            case "/clear":
                messages = list(start)
                print("(new conversation)")
            case "":
                pass
            case _:
                messages.append({"role": "user", "content": text})
                body = {"model": model, "messages": messages, "stream": True}
                limits = {"max_tokens": options.max_tokens, "temperature": options.temperature}
                body |= {name: value for name, value in limits.items() if value is not None}
                answer = _show_answer(client, body)
                if answer is None:
                    messages.pop()
                else:
                    messages.append({"role": "assistant", "content": answer})


def _show_answer(client: httpx.Client, body: dict[str, Any]) -> str | None:
    """Print an answer while it arrives and return it, or the part that arrived; None if there was no answer."""
    answer = ""
    try:
        for piece in _pieces(client, body):
            answer += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:  # leaving the stream closes the connection, and the server then stops generating
        print(" (stopped)", end="")
    except (httpx.HTTPError, ValueError) as error:
        print(f"\n(error: {error})", file=sys.stderr)
        return answer or None
    print()
    return answer


def _pieces(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """Yield the text of the answer.

    Raises:
        ValueError: the server responded with an error.
    """
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            response.read()
            _json(response)
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ValueError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


def _json(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON of a response.

    Raises:
        ValueError: the response is an error.
    """
    if not response.is_error:
        return response.json()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text
    raise ValueError(f"{response.status_code}: {message}")
