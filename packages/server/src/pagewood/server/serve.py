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
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
import zmq

from pagewood.engine.observe.settings_log import log_settings
from pagewood.server import __version__
from pagewood.server.config import ServeConfig
from pagewood.server.http.listening import bind, bind_first
from pagewood.server.jobs.store import JobStore
from pagewood.server.keys.file import read_keys
from pagewood.server.keys.gate import KeyGate
from pagewood.server.keys.gateway import GatewayHeaders
from pagewood.server.keys.key import ApiKey
from pagewood.server.keys.run_key import FOLDER_VARIABLE, RunKey, make_run_key
from pagewood.server.metrics.metrics import Metrics
from pagewood.server.metrics.requests import RequestMetrics
from pagewood.server.models.engine_group import HTTP
from pagewood.server.models.making import make_pool
from pagewood.server.models.pool import ModelPool
from pagewood.server.models.pool_config import PoolConfig
from pagewood.server.models.served_model import ServedModel
from pagewood.server.models.single import SingleModel
from pagewood.server.observe.console import Console
from pagewood.server.observe.logs import announce
from pagewood.server.observe.subjects import SUBJECTS
from pagewood.server.processes.child import register_dump
from pagewood.server.replicas.fleet_status import ServerStatus
from pagewood.server.shutdown import Shutdown

# The HTTP stack takes long to import. It is imported while the child processes start, which takes longer.
if TYPE_CHECKING:
    import uvicorn

    from pagewood.server.entrances.entrances import Entrances
    from pagewood.server.http.app import Frontend
    from pagewood.server.jobs.worker import JobWorker
    from pagewood.server.observe.tracing import Tracing

LAST_WORDS_S = 2
"""Longest time to send errors to the remaining requests when the time for draining is over."""
_log = logging.getLogger(__name__)


def run_server(config: ServeConfig, pool: PoolConfig | None = None) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code of the process.

    Args:
        config: of the server; with several models, that of any of them.
        pool: the models; None: there is one.

    Raises:
        ValueError: the address is taken, or a file of a model, of keys or of the certificate cannot be read.
    """
    check_certificate(config.tls_cert, config.tls_key)
    keys = _keys(config)
    if config.has_keys and config.tls_cert is None and not config.is_local:
        _log.warning("keys and prompts travel unencrypted; give --tls-cert and --tls-key, or put a TLS proxy before it")
    if config.insecure_no_keys and not config.is_local:
        _log.warning("everyone who reaches %s port %d can use the model", config.host, config.port)
    listening = (bind if config.http_processes == 1 else bind_first)(config.host, config.port)
    log_settings(_log, config, SUBJECTS, {one.name: one.default for one in fields(config)})
    _log.info("every setting that is not named here or by the engine has its default; --log-level debug shows all")
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        private_folder() as folder,
        admin_key(keys, listening) as run_key,
        job_store(config) as store,
    ):
        gate = KeyGate(keys, run_key=None if run_key is None else run_key.digest)
        return runner.run(_serve(config, pool, gate, run_key, listening, folder, store))


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


@contextlib.contextmanager
def job_store(config: ServeConfig) -> Generator[JobStore | None]:
    """Provide the store of files and batches; None: the server keeps none.

    Raises:
        ValueError: the folder cannot be used.
    """
    if config.batch_store is None:
        yield None
        return
    with contextlib.closing(JobStore(config.batch_store, max_bytes=int(config.batch_store_gb * 1e9))) as store:
        yield store


async def _serve(
    config: ServeConfig,
    pool: PoolConfig | None,
    gate: KeyGate,
    run_key: RunKey | None,
    listening: socket.socket,
    folder: Path,
    store: JobStore | None,
) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    tracing = _tracing(config)
    metrics = Metrics(requests=RequestMetrics(tracer=tracing), compat=config.metrics_compat)
    failures: list[tuple[int, str]] = []

    def give_up(why: str, code: int) -> None:
        failures.append((code, why))
        shutdown.begin(at_once=True)

    console = Console(
        url=_url(listening, is_encrypted=config.tls_cert is not None),
        model_names=(config.served_model_name,) if pool is None else pool.names,
        admin_key_path=None if run_key is None else run_key.path,
        has_keys=config.has_keys,
        certificate=config.tls_cert,
    )
    served = (
        SingleModel(
            ServedModel(config, metrics=metrics),
            folder=folder,
            context=context,
            give_up=give_up,
            on_news=lambda status: show(console, status),
        )
        if pool is None
        else make_pool(pool, folder=folder, context=context)
    )
    shutdown = Shutdown(served.held, drain_s=config.drain_s, incidents=metrics.incidents)
    entrances: Entrances | None = None

    def end_at_once(number: int) -> None:
        """End at once, and leave no processes or files behind."""
        served.kill_all()
        if entrances is not None:
            entrances.kill_all()
        shutil.rmtree(folder, ignore_errors=True)
        if run_key is not None:
            run_key.remove()
        os._exit(128 + number)

    register_dump()

    def hang_up() -> None:
        if config.api_key_file is not None:
            reload_keys(gate, config)
        else:
            served.begin_to_replace()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
    with StopSignals(begin=shutdown.begin, end_at_once=end_at_once):
        tasks: list[asyncio.Task[None]] = []
        try:
            await served.start()
            jobs = None if store is None else make_worker(config, store, gate, metrics)
            server, entrances = _http_side(
                config,
                served,
                gate=gate,
                metrics=metrics,
                tracing=tracing,
                jobs=jobs,
                listening=listening,
                folder=folder,
                context=context,
                give_up=give_up,
            )
            gc.collect()
            gc.freeze()  # a full collection would visit every module
            if pool is not None:
                show(console, None)
            tasks += [asyncio.create_task(work) for work in (*served.work(), shutdown.run(server))]
            if entrances is not None:
                tasks.append(asyncio.create_task(entrances.run()))
                entrances.start()
            if jobs is not None:
                tasks.append(asyncio.create_task(shutdown.while_open(jobs.run())))
            await server.serve(sockets=[listening])
        finally:
            if entrances is not None:
                await entrances.stop()
            await served.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if entrances is not None:
                entrances.close()
            served.close()
            context.term()
            if tracing is not None:
                await asyncio.to_thread(tracing.stop)
    for _, why in failures:
        announce(f"error: {why}")
    return max((code for code, _ in failures), default=0)


def _http_side(
    config: ServeConfig,
    served: SingleModel | ModelPool,
    *,
    gate: KeyGate,
    metrics: Metrics,
    tracing: Tracing | None,
    jobs: JobWorker | None,
    listening: socket.socket,
    folder: Path,
    context: zmq.Context[zmq.Socket[bytes]],
    give_up: Callable[[str, int], None],
) -> tuple[uvicorn.Server, Entrances | None]:
    """Return the HTTP server and its entrances, if it has any; they take no connections yet."""
    from pagewood.server.http.http_server import http_server

    frontend = make_frontend(
        config, served, gate=gate, metrics=metrics if config.metrics else None, tracing=tracing, jobs=jobs
    )
    site = frontend.site()
    server = http_server(
        site,
        stop_grace_s=LAST_WORDS_S,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        trusted_proxies=config.trusted_proxies,
    )
    if config.http_processes == 1:
        return server, None
    from pagewood.server.entrances.entrances import Entrances
    from pagewood.server.entrances.messages import EntranceSettings

    host, port = listening.getsockname()[:2]
    entrances = Entrances(
        config,
        site.app,
        first=EntranceSettings(
            host=host,
            port=port,
            limits=site.limits,
            stop_grace_s=LAST_WORDS_S,
            tls=None if config.tls_cert is None else (str(config.tls_cert), str(config.tls_key)),
            trusted_proxies=config.trusted_proxies,
        ),
        folder=folder,
        context=context,
        tasks=server.server_state.tasks,
        incidents=metrics.incidents,
        give_up=give_up,
    )
    if config.metrics:
        metrics.processes = lambda: {HTTP: os.getpid(), **entrances.pids(), **served.pids()}
        metrics.num_connections = lambda: len(site.connections) + entrances.num_connections
    return server, entrances


def make_frontend(
    config: ServeConfig,
    served: SingleModel | ModelPool,
    *,
    gate: KeyGate,
    metrics: Metrics | None,
    tracing: Tracing | None,
    keeps_responses: bool = True,
    jobs: JobWorker | None = None,
) -> Frontend:
    """Return the HTTP application of a server whose processes are started; arguments as in `Frontend`."""
    from pagewood.server.http.access import access_rules
    from pagewood.server.http.app import Frontend
    from pagewood.server.http.bodies import Bodies
    from pagewood.server.http.connections import Connections
    from pagewood.server.images.sources import ImageSources
    from pagewood.server.protocols.common.reader import Reader

    limits = config.http_limits()
    images = ImageSources(limits=config.image_limits, hosts=config.image_hosts, timeout_s=config.image_timeout_s)
    connections = Connections(limits)
    if metrics is not None:
        metrics.processes = lambda: {HTTP: os.getpid(), **served.pids()}
        metrics.num_connections = lambda: len(connections)
    return Frontend(
        models=served.models(Reader(bodies=Bodies(limits), images=images)),
        limits=limits,
        access=access_rules(config.host, config.allowed_hosts, config.allowed_origins),
        connections=connections,
        gate=gate,
        gateway=GatewayHeaders(objectives=dict(config.inference_objectives)) if config.gateway_headers else None,
        tracing=tracing,
        metrics=metrics,
        jobs=jobs,
        more=served.operations(),
        root_path=config.root_path,
        keeps_responses=keeps_responses,
    )


def make_worker(config: ServeConfig, store: JobStore, gate: KeyGate, metrics: Metrics) -> JobWorker:
    """Return what runs the batches of a store."""
    from pagewood.server.jobs.worker import JobWorker

    worker = JobWorker(store, owners=gate, num_lines=config.batch_lines, priority=config.job_priority)
    metrics.jobs = lambda: worker.counts
    return worker


def _tracing(config: ServeConfig) -> Tracing | None:
    """Return the tracer of requests, if the configuration asks for one."""
    if config.otlp_endpoint is None:
        return None
    from pagewood.server.observe.tracing import Tracing

    return Tracing(config.otlp_endpoint, model_name=config.served_model_name, version=__version__)


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


def show(console: Console, status: ServerStatus | None) -> None:
    """Show `status` in the terminal; None: several models are served. Output that cannot be written is dropped."""
    try:
        if status is None:
            console.welcome()
        else:
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
