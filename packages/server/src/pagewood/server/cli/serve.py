"""`pagewood serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pagewood.engine.folder import model_folder, model_name
from pagewood.server import logs
from pagewood.server.cli.engine_options import add_engine_options, engine_config
from pagewood.server.config import ServeConfig

if TYPE_CHECKING:
    from argparse import _SubParsersAction  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, with OpenAI's API: chat completions, completions, embeddings and models.",
        epilog="SIGINT (Ctrl-C) and SIGTERM stop the server with all its processes.",
    )
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    http.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0: any free port (default: %(default)s)"
    )
    http.add_argument(
        "--served-model-name", metavar="NAME", help="clients' name of the model (default: name of its folder)"
    )
    http.add_argument(
        "--max-body-bytes",
        type=int,
        default=16 * 1024 * 1024,
        metavar="BYTES",
        help="longest request body; a longer one is answered with 413 (default: %(default)s)",
    )
    http.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help="open connections; beyond it the connection that was idle longest is closed, or requests are answered "
        "with 503 (default: what `ulimit -n` allows, at most 8192)",
    )
    http.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="further host name under which clients reach the server, such as that of a reverse proxy; *.example.com "
        "allows all names below it, * every name; repeatable (default: IP addresses, localhost, this machine's name)",
    )
    http.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web page that may use the server from a browser, such as https://chat.example.com; * allows every page; "
        "repeatable (default: none)",
    )
    processes = parser.add_argument_group("processes and queues")
    processes.add_argument(
        "--tokenizer-workers", type=int, default=1, metavar="N", help="tokenizer processes (default: %(default)s)"
    )
    processes.add_argument(
        "--max-queued-requests",
        type=int,
        default=1024,
        metavar="N",
        help="requests that may be queued beyond those that run; further ones are answered with 429 "
        "(default: %(default)s)",
    )
    processes.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        default="info",
        help="lowest level that the log of every process shows, on standard error (default: %(default)s)",
    )
    events = parser.add_argument_group("KV cache events, for routers")
    events.add_argument(
        "--kv-events",
        metavar="ADDRESS",
        help="publish what the prefix cache adds and evicts over ZeroMQ, as vLLM does, such as tcp://*:5557; the "
        "events contain the tokens of prompts (default: not published)",
    )
    events.add_argument(
        "--kv-events-replay",
        metavar="ADDRESS",
        help="repeat what a subscriber has lost, such as tcp://*:5558 (default: nothing is repeated)",
    )
    events.add_argument(
        "--kv-events-form",
        choices=("map", "array"),
        default="map",
        help="write events as vLLM's maps, or as arrays for older readers (default: %(default)s)",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal stops the server."""
    engine = engine_config(options)
    folder = model_folder(engine.model)
    config = ServeConfig(
        engine=engine,
        host=options.host,
        port=options.port,
        served_model_name=options.served_model_name or model_name(engine.model),
        model_folder=folder,
        tokenizer_workers=options.tokenizer_workers,
        max_queued=options.max_queued_requests,
        max_body_bytes=options.max_body_bytes,
        max_connections=options.max_connections,
        allowed_hosts=tuple(options.allowed_host),
        allowed_origins=tuple(options.allowed_origin),
        log_level=options.log_level,
        kv_events=options.kv_events,
        kv_events_replay=options.kv_events_replay,
        kv_events_form=options.kv_events_form,
    )
    logs.configure(config.log_level, "http")
    from pagewood.server.serve import run_server  # imported here because the other commands do not need it

    return run_server(config)
