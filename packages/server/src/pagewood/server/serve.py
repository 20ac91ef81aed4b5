"""The server as a whole: the HTTP process, which is the parent of all others, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import uvicorn
import uvloop
import zmq
import zmq.asyncio

from pagewood.engine.api import SamplingParams
from pagewood.engine.folder import default_sampling
from pagewood.server import wire
from pagewood.server.access import access_rules
from pagewood.server.app import Frontend
from pagewood.server.bodies import Bodies
from pagewood.server.child import STOP_GRACE_S, Settings
from pagewood.server.config import ServeConfig
from pagewood.server.connections import Connections
from pagewood.server.console import Console
from pagewood.server.errors import unavailable
from pagewood.server.http_server import http_server
from pagewood.server.links import NO_MARK, ZmqSender, address
from pagewood.server.live import LiveRequests
from pagewood.server.status import EngineStatus
from pagewood.server.supervisor import Stage, Supervisor

LAST_ANSWERS_S = 2
"""How long requests may go on when the server is to stop."""
LAST_WORDS_S = 2
"""How long a client may then take to be told that its request failed."""
FLUSH_GRACE_S = 20
"""How long the engine may then write KV to its disk; what it has not written by then is computed again."""
STOP_POLL_S = 0.1
BACKLOG = 2048

ENGINE = Stage(name="engine", module="pagewood.server.engine_process", computes=True)
DETOKENIZER = Stage(name="detokenizer", module="pagewood.server.detokenizer_process", computes=False)
HTTP = "http"


def run_server(config: ServeConfig) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code of the process.

    Raises:
        ValueError: the address is taken, or the model's folder holds what cannot be read.
    """
    listening = bind(config.host, config.port)
    defaults = default_sampling(config.model_folder)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, private_folder() as folder:
        return runner.run(_serve(config, defaults, listening, folder))


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens; done first, so that nothing is started for an address that is taken.

    Raises:
        ValueError: the address cannot be had.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listening


@contextlib.contextmanager
def private_folder() -> Generator[Path]:
    """Provide a folder that only this user can look into (0700), and remove it with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix="pagewood-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _serve(config: ServeConfig, defaults: SamplingParams, listening: socket.socket, folder: Path) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    tokenizers = [_tokenizer_stage(i) for i in range(config.tokenizer_workers)]
    senders = [ZmqSender(context, address(folder, stage.name)) for stage in tokenizers]
    limits = config.http_limits()
    frontend = Frontend(
        live=LiveRequests(senders, limit=config.engine.num_rows + config.max_queued),
        status=EngineStatus(),
        defaults=defaults,
        model_name=config.served_model_name,
        limits=limits,
        connections=Connections(limits),
        bodies=Bodies(limits),
        access=access_rules(config.host, config.allowed_hosts, config.allowed_origins),
        started=int(time.time()),
    )
    console = Console(url=_url(listening), model_name=config.served_model_name)
    server = http_server(frontend, stop_grace_s=LAST_ANSWERS_S + LAST_WORDS_S)
    failures: list[str] = []

    def give_up(why: str) -> None:
        failures.append(why)
        signal.raise_signal(signal.SIGTERM)

    supervisor = Supervisor(
        [ENGINE, DETOKENIZER, *tokenizers],
        settings=lambda stage, incarnation: _settings(config, folder, stage, incarnation),
        was_ready=lambda: frontend.status.model is not None,
        on_death=lambda stage, incarnation: _on_death(frontend, console, tokenizers, stage, incarnation),
        on_failure=give_up,
    )
    with _signals_stop(server):
        tasks = [
            asyncio.create_task(_pump(address(folder, HTTP), frontend, console)),
            asyncio.create_task(_fail_last_requests(server, frontend)),
        ]
        supervisor.start()
        try:
            await server.serve(sockets=[listening])
        finally:
            await supervisor.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for sender in senders:
                sender.close()
            context.term()
    for why in failures:
        print(f"pagewood: error: {why}", file=sys.stderr)
    return 1 if failures else 0


def _tokenizer_stage(index: int) -> Stage:
    return Stage(name=f"tokenizer-{index}", module="pagewood.server.tokenizer_process", computes=False)


def _settings(config: ServeConfig, folder: Path, stage: Stage, incarnation: int) -> Settings:
    send_to = {ENGINE.name: DETOKENIZER.name, DETOKENIZER.name: HTTP}.get(stage.name, ENGINE.name)
    is_flushing = stage is ENGINE and config.engine.disk_cache_path is not None
    return Settings(
        folder=str(folder),
        listen=stage.name,
        send_to=send_to,
        model_folder=str(config.model_folder),
        incarnation=incarnation,
        stop_grace_s=FLUSH_GRACE_S if is_flushing else STOP_GRACE_S,
        engine=config.engine,
    )


def _on_death(
    frontend: Frontend, console: Console, tokenizers: list[Stage], stage: Stage, next_incarnation: int
) -> None:
    """Fail the requests that were in a process that died."""
    if stage in tokenizers:
        frontend.live.tokenizer_lost(tokenizers.index(stage))
        return
    if stage is ENGINE:
        frontend.status.lost(next_incarnation=next_incarnation)
        console.show(frontend.status)
    frontend.live.fail_all(
        unavailable(f"The {stage.name} process died; it is started again.", code=f"{stage.name}_lost")
    )


@contextlib.contextmanager
def _signals_stop(server: uvicorn.Server) -> Generator[None]:
    """Let SIGINT and SIGTERM stop the server and nothing else.

    uvicorn does so while it runs, and raises the signal again afterwards; without handlers of ours, that would end the
    process before it has ended its children.
    """

    def stop(number: int, frame: object) -> None:
        server.handle_exit(number, None)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


async def _fail_last_requests(server: uvicorn.Server, frontend: Frontend) -> None:
    """When the server is to stop, tell the clients that still wait; uvicorn would break off in mid-sentence."""
    while not server.should_exit:
        await asyncio.sleep(STOP_POLL_S)
    await asyncio.sleep(LAST_ANSWERS_S)
    frontend.live.fail_all(unavailable("The server is shutting down.", code="shutting_down"))


async def _pump(address: str, frontend: Frontend, console: Console) -> None:
    """Take in what the detokenizer sends."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as inbox:
        inbox.setsockopt(zmq.RCVHWM, NO_MARK)
        inbox.bind(address)
        while True:
            frame = await inbox.recv()
            for message in wire.read(wire.to_http, [frame]):
                frontend.take(message)
                if not isinstance(message, wire.Answers):
                    console.show(frontend.status)


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
