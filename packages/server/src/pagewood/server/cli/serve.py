"""`pagewood serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pagewood.engine.model_folder.folder import model_folder, model_name
from pagewood.server.cli.engine_options import add_engine_options, engine_config
from pagewood.server.cli.observability_options import add_observability_options, observability
from pagewood.server.config import ServeConfig
from pagewood.server.keys.file import ADMIN_VARIABLE, KEY_VARIABLE, keys_of_environment
from pagewood.server.observe import logs

if TYPE_CHECKING:
    from argparse import _SubParsersAction  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, with OpenAI's API: chat completions, completions, embeddings and models.",
        epilog="SIGINT (Ctrl-C) and SIGTERM stop the server with all its processes, after running requests had time "
        "to end; SIGUSR1 writes the stacks of a process. Exit codes: 0 stopped by a signal, 1 the server could not "
        "start or go on, 2 wrong arguments, 3 a process kept dying, 130 and 143 ended at once by a second signal.",
    )
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    http.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0: any free port (default: %(default)s)"
    )
    http.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="clients' name of the model (default: name of its folder, or of its repository in a Hugging Face cache)",
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
    http.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="address or network of a reverse proxy, such as 127.0.0.1 or 10.0.0.0/8, whose X-Forwarded-For and "
        "X-Forwarded-Proto name the client; repeatable (default: none, and these headers are ignored)",
    )
    http.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="prefix under which a reverse proxy shows the server, such as /llm, whether the proxy removes it or keeps "
        "it (default: none)",
    )
    http.add_argument(
        "--dashboard-text",
        action="store_true",
        help="show the beginnings of cached prompts as text in /dashboard (default: lengths only)",
    )
    access = parser.add_argument_group("access")
    access.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="let in only requests with a key of this file: one on each line (plain, sha256:DIGEST, or a JSON object "
        f"with tenant and limits), or a JSON array of objects; read again at SIGHUP. {KEY_VARIABLE} and "
        f"{ADMIN_VARIABLE} in the environment are keys, too (default: no keys)",
    )
    access.add_argument(
        "--insecure-no-keys",
        action="store_true",
        help="allow another address than loopback for --host without keys: everyone who reaches the port can use the "
        "model; admin routes need the key that the server makes for its run",
    )
    access.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="serve HTTPS with this certificate chain, PEM (default: HTTP)"
    )
    access.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of the certificate, PEM")
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
    add_staying_up_options(parser)
    processes.add_argument(
        "--log-level",
        choices=logs.LEVELS,
        default="info",
        help="lowest level that the log of every process shows, on standard error (default: %(default)s)",
    )
    add_observability_options(parser)
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


def add_staying_up_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what happens when a process dies, is stuck, has too much to do, or is to end."""
    group = parser.add_argument_group("staying up")
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="time for running requests to end when SIGTERM or SIGINT stops the server; a second ends it at once "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--watchdog-seconds",
        type=float,
        metavar="S",
        help="end and restart an engine whose device, loop or admission is stuck, or which is silent, for this long; "
        "longer than any step takes (default: it is reported with the stacks of all processes, not ended)",
    )
    group.add_argument(
        "--max-retries",
        type=int,
        default=1,
        metavar="N",
        help="how often the server sends a request again whose process died before its client got anything of an "
        "answer: a whole answer until it is complete, a stream until its first text (default: %(default)s)",
    )
    group.add_argument(
        "--max-restarts",
        type=int,
        default=10,
        metavar="N",
        help="deaths of one process in a row, each within 10 s, after which the server ends with exit code 3 "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--max-ttft-seconds",
        type=float,
        metavar="S",
        help="refuse a request with 429 if its first token is predicted to take longer (default: no limit)",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until a signal stops the server."""
    engine = engine_config(options)
    folder = model_folder(engine.model)
    api_keys = tuple(keys_of_environment(os.environ))
    for variable in (KEY_VARIABLE, ADMIN_VARIABLE):
        os.environ.pop(variable, None)  # not ours; the other processes need no key
    config = ServeConfig(
        engine=engine,
        host=options.host,
        port=options.port,
        served_model_name=options.served_model_name or model_name(engine.model),
        model_folder=folder,
        tokenizer_workers=options.tokenizer_workers,
        max_queued=options.max_queued_requests,
        drain_s=options.drain_seconds,
        watchdog_s=options.watchdog_seconds,
        max_retries=options.max_retries,
        max_quick_deaths=options.max_restarts,
        max_ttft_s=options.max_ttft_seconds,
        max_body_bytes=options.max_body_bytes,
        max_connections=options.max_connections,
        allowed_hosts=tuple(options.allowed_host),
        allowed_origins=tuple(options.allowed_origin),
        trusted_proxies=tuple(options.trusted_proxy),
        root_path=options.root_path,
        api_keys=api_keys,
        api_key_file=options.api_key_file,
        insecure_no_keys=options.insecure_no_keys,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        log_level=options.log_level,
        **observability(options),
        dashboard_text=options.dashboard_text,
        kv_events=options.kv_events,
        kv_events_replay=options.kv_events_replay,
        kv_events_form=options.kv_events_form,
    )
    logs.configure(config.log_level, "http", form=config.log_format)
    from pagewood.server.serve import run_server  # imported here because the other commands do not need it

    return run_server(config)
