"""The server as a whole: starts the HTTP process, which is the parent of all other processes, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
import zmq

from pagewood.engine.api import SamplingParams
from pagewood.engine.model_folder.folder import default_sampling
from pagewood.engine.model_folder.vector_recipe import VectorRecipe, read_vector_recipe
from pagewood.server import __version__
from pagewood.server.config import ServeConfig
from pagewood.server.http.errors import ApiError, unavailable
from pagewood.server.keys.file import read_keys
from pagewood.server.keys.gate import KeyGate
from pagewood.server.keys.gateway import GatewayHeaders
from pagewood.server.keys.key import ApiKey
from pagewood.server.keys.run_key import FOLDER_VARIABLE, RunKey, make_run_key
from pagewood.server.messages import wire
from pagewood.server.messages.links import ZmqSender, address
from pagewood.server.metrics.metrics import Metrics
from pagewood.server.metrics.rank_processes import rank_processes
from pagewood.server.metrics.requests import RequestMetrics
from pagewood.server.observe.console import Console
from pagewood.server.observe.incidents import Incidents, Recovery
from pagewood.server.observe.logs import announce
from pagewood.server.processes.child import STOP_GRACE_S, Settings, register_dump
from pagewood.server.processes.succession import Lose, Succession, engine_socket
from pagewood.server.processes.supervisor import Stage, Supervisor
from pagewood.server.processes.watchdog import Watchdog, trouble_of
from pagewood.server.replicas.dispatcher import Dispatcher, Replica
from pagewood.server.replicas.division import cores_of_each, engine_of_each
from pagewood.server.replicas.fleet_status import FleetStatus, ServerStatus
from pagewood.server.replicas.making import make_router
from pagewood.server.requests.adapters import ServedAdapters
from pagewood.server.requests.live import LiveRequests
from pagewood.server.requests.pump import AnswerPump
from pagewood.server.requests.status import EngineStatus
from pagewood.server.shutdown import Shutdown

# The HTTP stack takes long to import. It is imported while the child processes start, which takes longer.
if TYPE_CHECKING:
    from pagewood.server.http.app import Frontend
    from pagewood.server.observe.tracing import Tracing

LAST_WORDS_S = 2
"""Longest time to send errors to the remaining requests when the time for draining is over."""
FLUSH_GRACE_S = 20
"""Longest time for the engine to write KV to its disk cache after that. Other KV is lost and computed again."""
BACKLOG = 2048
EXIT_FAILED = 1
"""Exit code of a server that could not start, or cannot receive answers."""
EXIT_CRASH_LOOP = 3
"""Exit code of a server with a process that kept dying."""

ENGINE = Stage(name="engine", module="pagewood.server.processes.engine_process", computes=True)
DETOKENIZER = Stage(name="detokenizer", module="pagewood.server.processes.detokenizer_process", computes=False)
HTTP = "http"

_log = logging.getLogger(__name__)


def run_server(config: ServeConfig) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code of the process.

    Raises:
        ValueError: the address is taken, or a file of the model, of keys or of the certificate cannot be read.
    """
    check_certificate(config.tls_cert, config.tls_key)
    keys = _keys(config)
    if config.has_keys and config.tls_cert is None and not config.is_local:
        _log.warning("keys and prompts travel unencrypted; give --tls-cert and --tls-key, or put a TLS proxy before it")
    if config.insecure_no_keys and not config.is_local:
        _log.warning("everyone who reaches %s port %d can use the model", config.host, config.port)
    listening = bind(config.host, config.port)
    hidden = ("engine", "api_keys")
    settings = {one.name: getattr(config, one.name) for one in fields(config) if one.name not in hidden}
    _log.info("server: %s", ", ".join(f"{name}={value}" for name, value in settings.items()))
    defaults, recipe = default_sampling(config.model_folder), read_vector_recipe(config.model_folder)
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        private_folder() as folder,
        admin_key(keys, listening) as run_key,
    ):
        gate = KeyGate(keys, run_key=None if run_key is None else run_key.digest)
        return runner.run(_serve(config, gate, run_key, defaults, recipe, listening, folder))


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. This comes first, so that no process is started for an address that is taken.

    Raises:
        ValueError: the address cannot be used.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if host == "::":  # all addresses, those of IPv4, too, whatever the system's default is
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
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


@contextlib.contextmanager
def admin_key(keys: Sequence[ApiKey], listening: socket.socket) -> Generator[RunKey | None]:
    """Provide an admin key to a server whose keys hold none, and remove its file.

    If the file cannot be written, the server has no admin key, so its admin routes stay closed.
    """
    if any(key.admin for key in keys):
        yield None
        return
    try:
        made = make_run_key(*listening.getsockname()[:2])
    except (OSError, RuntimeError) as error:
        _log.warning(
            "admin routes stay closed, because the admin key of this run cannot be written: %s; set %s to a folder "
            "that can be written, or give an admin key",
            error,
            FOLDER_VARIABLE,
        )
        yield None
        return
    try:
        yield made
    finally:
        made.remove()


async def _serve(
    config: ServeConfig,
    gate: KeyGate,
    run_key: RunKey | None,
    defaults: SamplingParams,
    recipe: VectorRecipe,
    listening: socket.socket,
    folder: Path,
) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    tokenizers = [_tokenizer_stage(i) for i in range(config.tokenizer_workers)]
    engines = engine_stages(config.replicas)
    statuses = [EngineStatus() for _ in engines]
    status: ServerStatus = statuses[0]
    dispatcher: Dispatcher | None = None
    engine_senders: list[ZmqSender] = []
    if len(engines) > 1:
        engine_senders += [ZmqSender(context, address(folder, engine_socket(stage.name, 0))) for stage in engines]
        dispatcher = Dispatcher(
            make_router(config.engine, moves=config.max_retries > 0),
            [Replica(sender=sender) for sender in engine_senders],
            num_places=config.engine.num_rows,
            low_priority_first=config.engine.low_priority_first,
            moves=config.max_retries > 0,
        )
        status = FleetStatus(replicas=statuses, router=dispatcher)
    senders = [ZmqSender(context, address(folder, stage.name)) for stage in tokenizers]
    incidents = Incidents()
    tracing = _tracing(config)
    metrics = None
    if config.metrics:
        metrics = Metrics(requests=RequestMetrics(tracer=tracing), compat=config.metrics_compat, incidents=incidents)
    live = LiveRequests(
        senders,
        limit=config.replicas * config.engine.num_rows + config.max_queued,
        max_retries=config.max_retries,
        seed=config.engine.seed,
        max_first_answer_s=config.max_ttft_s,
        incidents=incidents,
        watch=None if metrics is None else metrics.requests,
        placing=dispatcher,
    )
    if dispatcher is not None:
        dispatcher.attach(live)
    adapters = ServedAdapters.of(config.engine.adapters, config.adapter_folders)
    recovery = Recovery(status, incidents)
    shutdown = Shutdown(live, drain_s=config.drain_s, incidents=incidents)
    console = Console(
        url=_url(listening, is_encrypted=config.tls_cert is not None),
        model_name=config.served_model_name,
        admin_key_path=None if run_key is None else run_key.path,
        has_keys=config.has_keys,
        certificate=config.tls_cert,
    )
    failures: list[tuple[int, str]] = []

    def route(socket: str) -> None:
        for sender in senders:
            sender.send(wire.encode(wire.Route(stage=socket)))

    def lose(number: int) -> Lose:
        """Return what follows the next process of an engine, of which there may be several."""

        def follow(incarnation: int | None, error: ApiError, is_planned: bool) -> None:
            if incarnation is not None and isinstance(status, FleetStatus):
                status.lost(number, next_incarnation=incarnation)
            elif incarnation is not None:
                statuses[number].lost(next_incarnation=incarnation)
            if dispatcher is None:
                live.lost(error, is_planned=is_planned)
            else:
                dispatcher.replica_lost(number, incarnation, error, is_planned=is_planned)

        return follow

    successions = [
        Succession(
            stage,
            statuses[number],
            live,
            route=route if dispatcher is None else _reconnect(engine_senders[number], folder),
            paused=lambda: status.paused,
            lose=lose(number),
            is_beside=config.restarts_beside,
        )
        for number, stage in enumerate(engines)
    ]

    def give_up(why: str, code: int = EXIT_FAILED) -> None:
        failures.append((code, why))
        shutdown.begin(at_once=True)

    def end_at_once(number: int) -> None:
        """End at once, and leave no processes or files behind."""
        supervisor.kill_all()
        shutil.rmtree(folder, ignore_errors=True)
        if run_key is not None:
            run_key.remove()
        os._exit(128 + number)

    def on_death(stage: Stage, next_incarnation: int) -> None:
        """Fail the requests that were in a process that died."""
        if stage in tokenizers:
            index = tokenizers.index(stage)
            senders[index].reconnect()
            live.tokenizer_lost(index)
            return
        if stage in engines:
            successions[engines.index(stage)].follow(next_incarnation)
        else:
            status.relay_lost(next_incarnation=next_incarnation)
            successions[0].note_difference()
            live.lost(unavailable(f"The {stage.name} process died; it is being restarted.", code=f"{stage.name}_lost"))
            if dispatcher is not None:
                dispatcher.relay_lost()
        recovery.began()
        show(console, status)

    supervisor = Supervisor(
        [*engines, DETOKENIZER, *tokenizers],
        settings=lambda stage, incarnation: _settings(config, folder, stage, incarnation, status, engines, adapters),
        was_ready=lambda: status.model is not None,
        on_death=on_death,
        on_failure=give_up,
        on_crash_loop=lambda why: give_up(why, EXIT_CRASH_LOOP),
        useful_s=lambda stage: statuses[engines.index(stage)].seconds_since_first_pulse if stage in engines else None,
        max_quick_deaths=config.max_quick_deaths,
        incidents=incidents,
    )
    watchdogs = [
        Watchdog(
            one,
            limit_s=config.watchdog_s,
            incidents=incidents,
            dump=supervisor.dump_stacks,
            kill=supervisor.kill,
            engine=stage.name,
            relay_works=lambda: any(
                other.seconds_since_pulse is not None and trouble_of(other, limit_s=config.watchdog_s) is None
                for other in statuses
            ),
        )
        for stage, one in zip(engines, statuses, strict=True)
    ]
    register_dump()

    async def replace_engine() -> None:
        """Replace one engine after the other, so that the others work meanwhile."""
        for succession in successions:
            await succession.replace(supervisor)

    def hang_up() -> None:
        if config.api_key_file is not None:
            reload_keys(gate, config)
        else:
            successions[0].begin(supervisor, others=successions[1:])

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
    with StopSignals(begin=shutdown.begin, end_at_once=end_at_once):
        supervisor.start()
        tasks: list[asyncio.Task[None]] = []
        try:
            await supervisor.launched()
            from pagewood.engine.text import ResponseTemplate
            from pagewood.server.dashboard.live_data import Watchers
            from pagewood.server.http.access import access_rules
            from pagewood.server.http.app import Frontend
            from pagewood.server.http.bodies import Bodies
            from pagewood.server.http.connections import Connections
            from pagewood.server.http.http_server import http_server
            from pagewood.server.protocols.common.service import Service

            limits = config.http_limits()
            connections = Connections(limits)
            if metrics is not None:
                metrics.processes = lambda: _pids(supervisor, engines)
                metrics.num_connections = lambda: len(connections)
            frontend = Frontend(
                service=Service(
                    live=live,
                    status=status,
                    bodies=Bodies(limits),
                    defaults=defaults,
                    model_name=config.served_model_name,
                    adapters=adapters,
                    template=ResponseTemplate.from_folder(config.model_folder),
                    recipe=recipe,
                    metrics=metrics,
                    watchers=Watchers(shows_text=config.dashboard_text),
                ),
                limits=limits,
                access=access_rules(config.host, config.allowed_hosts, config.allowed_origins),
                connections=connections,
                gate=gate,
                gateway=(
                    GatewayHeaders(objectives=dict(config.inference_objectives)) if config.gateway_headers else None
                ),
                tracing=tracing,
                folder=folder,
                replace_engine=replace_engine,
                dispatcher=dispatcher,
                root_path=config.root_path,
            )
            server = http_server(
                frontend,
                stop_grace_s=LAST_WORDS_S,
                tls_cert=config.tls_cert,
                tls_key=config.tls_key,
                trusted_proxies=config.trusted_proxies,
            )
            pump = AnswerPump(
                address(folder, HTTP),
                take=lambda message: _take(message, frontend, console, recovery, successions, supervisor),
                fail=live.fail,
                fail_all=live.fail_all,
                give_up=give_up,
            )
            gc.collect()
            gc.freeze()  # a full collection would visit every module
            tasks += [
                asyncio.create_task(work)
                for work in (pump.run(), shutdown.run(server), *(one.run() for one in watchdogs))
            ]
            await server.serve(sockets=[listening])
        finally:
            await supervisor.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for sender in (*senders, *engine_senders):
                sender.close()
            context.term()
            if tracing is not None:
                await asyncio.to_thread(tracing.stop)
    for _, why in failures:
        announce(f"error: {why}")
    return max((code for code, _ in failures), default=0)


def _tracing(config: ServeConfig) -> Tracing | None:
    """Return the tracer of requests, if the configuration asks for one."""
    if config.otlp_endpoint is None:
        return None
    from pagewood.server.observe.tracing import Tracing

    return Tracing(config.otlp_endpoint, model_name=config.served_model_name, version=__version__)


def _pids(supervisor: Supervisor, engines: Sequence[Stage]) -> dict[str, int]:
    """Return the process ids of the server by name, with those of the ranks of a model."""
    pids = {HTTP: os.getpid(), **supervisor.pids()}
    for stage in engines:
        ranks = rank_processes(pids.get(stage.name))
        pids |= ranks if len(engines) == 1 else {f"{stage.name}-{name}": pid for name, pid in ranks.items()}
    return pids


def engine_stages(num_replicas: int) -> list[Stage]:
    """Return the stage of the engine, or those of several."""
    if num_replicas == 1:
        return [ENGINE]
    return [replace(ENGINE, name=f"{ENGINE.name}-{number}") for number in range(num_replicas)]


def _reconnect(sender: ZmqSender, folder: Path) -> Callable[[str], None]:
    return lambda socket: sender.reconnect(address(folder, socket))


def _tokenizer_stage(index: int) -> Stage:
    return Stage(name=f"tokenizer-{index}", module="pagewood.server.processes.tokenizer_process", computes=False)


def _settings(
    config: ServeConfig,
    folder: Path,
    stage: Stage,
    incarnation: int,
    status: ServerStatus,
    engines: Sequence[Stage],
    adapters: ServedAdapters,
) -> Settings:
    number = engines.index(stage) if stage in engines else None
    is_routed = len(engines) > 1
    if number is not None:
        send_to = DETOKENIZER.name
    elif stage is DETOKENIZER or is_routed:
        send_to = HTTP
    else:
        send_to = engine_socket(ENGINE.name, status.incarnation)
    engine = config.engine if not incarnation else replace(config.engine, adapters=adapters.loaded())
    is_flushing = number is not None and config.engine.disk_cache_path is not None
    return Settings(
        folder=str(folder),
        stage=stage.name,
        listen=stage.name if number is None else engine_socket(stage.name, incarnation),
        send_to=send_to,
        model_folder=str(config.model_folder),
        incarnation=incarnation,
        stop_grace_s=FLUSH_GRACE_S if is_flushing else STOP_GRACE_S,
        log_level=config.log_level,
        log_format=config.log_format,
        measures=config.metrics,
        replica=number or 0,
        is_routed=is_routed,
        cores=cores_of_each(len(engines))[number] if is_routed and number is not None else (),
        engine=engine_of_each(engine, num_replicas=len(engines)) if is_routed else engine,
        paused=status.paused,
        kv_events=config.kv_events,
        kv_events_replay=config.kv_events_replay,
        kv_events_form=config.kv_events_form,
        kv_events_topic=config.kv_events_topic,
    )


def _take(
    message: wire.ToHttp,
    frontend: Frontend,
    console: Console,
    recovery: Recovery,
    successions: Sequence[Succession],
    supervisor: Supervisor,
) -> None:
    if isinstance(message, wire.Pulse):
        successions[message.replica].pulsed(message, supervisor)
    frontend.take(message)
    if isinstance(message, wire.Loading | wire.Pulse):
        recovery.check()
        show(console, frontend.service.status)


class StopSignals:
    """While entered, the first SIGINT or SIGTERM begins the end of the server, and the second ends it at once.

    They are handled even if a shell ignores them, as it does with SIGINT for background jobs.

    Args:
        begin: called from the event loop at the first signal.
        end_at_once: called from the signal handler with the number of the second signal.
    """

    __slots__ = ("_before", "_begin", "_end_at_once", "_has_begun", "_loop")

    def __init__(self, *, begin: Callable[[], None], end_at_once: Callable[[int], None]) -> None:
        self._begin = begin
        self._end_at_once = end_at_once
        self._loop = asyncio.get_running_loop()
        self._has_begun = False  # written by: _stop
        self._before: list[tuple[int, Any]] = []  # written by: __enter__

    def __enter__(self) -> StopSignals:
        """Install the handlers."""
        self._before = [(number, signal.signal(number, self._stop)) for number in (signal.SIGINT, signal.SIGTERM)]
        return self

    def __exit__(self, *exception: object) -> None:
        """Install the handlers from before."""
        for number, handler in self._before:
            signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        if self._has_begun:
            self._end_at_once(number)
        else:
            self._has_begun = True
            self._loop.call_soon_threadsafe(self._begin)


def show(console: Console, status: ServerStatus) -> None:
    """Show `status` in the terminal. If the output cannot be written any more, it is dropped."""
    try:
        console.show(status)
    except OSError:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                with Path(os.devnull).open("w") as nowhere:
                    os.dup2(nowhere.fileno(), stream.fileno())


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Check that a certificate can be used, before any process is started.

    Raises:
        ValueError: a file cannot be read, or the key has a passphrase or is not the certificate's.
    """
    if certificate is None:
        return

    def no_passphrase() -> str:
        raise ValueError(f"tls_key must have no passphrase, got {key}")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=no_passphrase)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"tls_cert and tls_key cannot be used ({certificate}, {key}): {error}") from error


def _keys(config: ServeConfig) -> list[ApiKey]:
    """Return all keys of a server.

    Raises:
        ValueError: their file cannot be read or is wrong.
    """
    return [*config.api_keys, *(() if config.api_key_file is None else read_keys(config.api_key_file))]


def reload_keys(gate: KeyGate, config: ServeConfig) -> None:
    """Read the keys again. If their file is wrong or missing, the server keeps its present keys."""
    try:
        keys = _keys(config)
        gate.replace(keys)
    except ValueError as error:
        _log.error("the API keys stay as they were: %s", error)
    else:
        _log.info("the server has %d API keys", len(keys))


def _url(listening: socket.socket, *, is_encrypted: bool) -> str:
    """Return an address that can be opened on this machine."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "::1" if host == "::" else "127.0.0.1"
    scheme = "https" if is_encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
