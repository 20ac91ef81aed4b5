"""The server as a whole: starts the HTTP process, which is the parent of all other processes, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
import zmq

from pagewood.engine.api import SamplingParams
from pagewood.engine.folder import default_sampling
from pagewood.engine.vector_recipe import VectorRecipe, read_vector_recipe
from pagewood.server import wire
from pagewood.server.child import STOP_GRACE_S, Settings
from pagewood.server.config import ServeConfig
from pagewood.server.console import Console
from pagewood.server.errors import unavailable
from pagewood.server.links import ZmqSender, address
from pagewood.server.live import LiveRequests
from pagewood.server.pump import AnswerPump
from pagewood.server.status import EngineStatus
from pagewood.server.supervisor import Stage, Supervisor

# The HTTP stack takes long to import. It is imported once the child processes run, which take longer.
if TYPE_CHECKING:
    import uvicorn

    from pagewood.server.app import Frontend

LAST_ANSWERS_S = 2
"""How long requests may continue when the server stops."""
LAST_WORDS_S = 2
"""How long sending the errors of the remaining requests may then take."""
FLUSH_GRACE_S = 20
"""How long the engine may then write KV to its disk cache. KV that is not written by then is computed again."""
STOP_POLL_S = 0.1
BACKLOG = 2048

ENGINE = Stage(name="engine", module="pagewood.server.engine_process", computes=True)
DETOKENIZER = Stage(name="detokenizer", module="pagewood.server.detokenizer_process", computes=False)
HTTP = "http"


def run_server(config: ServeConfig) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code of the process.

    Raises:
        ValueError: the address is taken, or a file in the model's folder cannot be read.
    """
    listening = bind(config.host, config.port)
    defaults, recipe = default_sampling(config.model_folder), read_vector_recipe(config.model_folder)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, private_folder() as folder:
        return runner.run(_serve(config, defaults, recipe, listening, folder))


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. This comes first, so that no process is started for an address that is taken.

    Raises:
        ValueError: the address cannot be used.
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
    """Provide a folder that only this user can access (0700), and remove it with its content."""
    folder = Path(tempfile.mkdtemp(prefix="pagewood-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _serve(
    config: ServeConfig, defaults: SamplingParams, recipe: VectorRecipe, listening: socket.socket, folder: Path
) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    tokenizers = [_tokenizer_stage(i) for i in range(config.tokenizer_workers)]
    senders = [ZmqSender(context, address(folder, stage.name)) for stage in tokenizers]
    live = LiveRequests(senders, limit=config.engine.num_rows + config.max_queued)
    status = EngineStatus()
    console = Console(url=_url(listening), model_name=config.served_model_name)
    failures: list[str] = []

    def give_up(why: str) -> None:
        failures.append(why)
        signal.raise_signal(signal.SIGTERM)

    def on_death(stage: Stage, next_incarnation: int) -> None:
        """Fail the requests that were in a process that died."""
        if stage in tokenizers:
            index = tokenizers.index(stage)
            senders[index].reconnect()
            live.tokenizer_lost(index)
            return
        if stage is ENGINE:
            status.lost(next_incarnation=next_incarnation)
        else:
            status.relay_lost(next_incarnation=next_incarnation)
        show(console, status)
        live.fail_all(unavailable(f"The {stage.name} process died; it is being restarted.", code=f"{stage.name}_lost"))

    supervisor = Supervisor(
        [ENGINE, DETOKENIZER, *tokenizers],
        settings=lambda stage, incarnation: _settings(config, folder, stage, incarnation),
        was_ready=lambda: status.model is not None,
        on_death=on_death,
        on_failure=give_up,
    )
    with StopSignals() as signals:
        supervisor.start()
        tasks: list[asyncio.Task[None]] = []
        try:
            await supervisor.launched()
            from pagewood.engine.text import ResponseTemplate
            from pagewood.server.access import access_rules
            from pagewood.server.app import Frontend
            from pagewood.server.bodies import Bodies
            from pagewood.server.connections import Connections
            from pagewood.server.http_server import http_server
            from pagewood.server.service import Service

            limits = config.http_limits()
            frontend = Frontend(
                service=Service(
                    live=live,
                    status=status,
                    bodies=Bodies(limits),
                    defaults=defaults,
                    model_name=config.served_model_name,
                    template=ResponseTemplate.from_folder(config.model_folder),
                    recipe=recipe,
                ),
                limits=limits,
                access=access_rules(config.host, config.allowed_hosts, config.allowed_origins),
                connections=Connections(limits),
            )
            server = http_server(frontend, stop_grace_s=LAST_ANSWERS_S + LAST_WORDS_S)
            signals.attach(server)
            pump = AnswerPump(
                address(folder, HTTP),
                take=lambda message: _take(message, frontend, console),
                fail=live.fail,
                fail_all=live.fail_all,
                give_up=give_up,
            )
            gc.collect()
            gc.freeze()  # a full collection would visit every module
            tasks += [asyncio.create_task(pump.run()), asyncio.create_task(_fail_last_requests(server, frontend))]
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
        log_level=config.log_level,
        engine=config.engine,
        kv_events=config.kv_events,
        kv_events_replay=config.kv_events_replay,
        kv_events_form=config.kv_events_form,
    )


def _take(message: wire.ToHttp, frontend: Frontend, console: Console) -> None:
    frontend.take(message)
    if not isinstance(message, wire.Answers):
        show(console, frontend.service.status)


class StopSignals:
    """While entered, SIGINT and SIGTERM stop the server and do nothing else.

    uvicorn handles them only while it runs, and raises the signal again afterwards. Without these handlers, that would
    end this process before it has ended its children. A signal that comes earlier is passed to the server later.
    """

    __slots__ = ("_before", "_pending", "_server")

    def __init__(self) -> None:
        self._server: uvicorn.Server | None = None  # written by: attach
        self._pending: list[int] = []  # written by: _stop
        self._before: list[tuple[int, Any]] = []  # written by: __enter__

    def __enter__(self) -> StopSignals:
        """Install the handlers."""
        self._before = [(number, signal.signal(number, self._stop)) for number in (signal.SIGINT, signal.SIGTERM)]
        return self

    def __exit__(self, *exception: object) -> None:
        """Install the handlers from before."""
        for number, handler in self._before:
            signal.signal(number, handler)

    def attach(self, server: uvicorn.Server) -> None:
        """Pass all signals to `server`, the earlier ones, too."""
        self._server = server
        for number in self._pending:
            server.handle_exit(number, None)

    def _stop(self, number: int, frame: object) -> None:
        if self._server is None:
            self._pending.append(number)
        else:
            self._server.handle_exit(number, None)


async def _fail_last_requests(server: uvicorn.Server, frontend: Frontend) -> None:
    """When the server stops, end the remaining requests with an error; uvicorn would cut their connections."""
    while not server.should_exit:
        await asyncio.sleep(STOP_POLL_S)
    await asyncio.sleep(LAST_ANSWERS_S)
    frontend.service.live.fail_all(unavailable("The server is shutting down.", code="shutting_down"))


def show(console: Console, status: EngineStatus) -> None:
    """Show `status` in the terminal. If the reader of the output is gone, later output is dropped."""
    try:
        console.show(status)
    except OSError:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                with Path(os.devnull).open("w") as nowhere:
                    os.dup2(nowhere.fileno(), stream.fileno())


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
