"""The whole server in one process: a thread per stage, links in memory, and the real engine with an echo model."""

from __future__ import annotations

import asyncio
import math
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import httpx

from echo_adapters import EchoAdapters
from echo_folder import EOS_ID
from echo_weights import EchoWeights
from memory_link import MemoryLink
from pagewood.engine.api import EngineConfig, SamplingParams, TenantQuota
from pagewood.engine.assemble import assemble
from pagewood.engine.assembly.grammar_compiler import grammar_compiler
from pagewood.engine.core.loop import EngineInfo, StepHandle
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.observe.expert_load import ExpertRows
from pagewood.engine.core.steps.speculation import Drafting
from pagewood.engine.core.weights import ServedWeights
from pagewood.engine.model_folder.folder import default_sampling
from pagewood.engine.model_folder.vector_recipe import VectorRecipe
from pagewood.engine.observe.cache_events import CacheEvents
from pagewood.engine.observe.profiling import Profile
from pagewood.engine.testing import EchoRunner, oracle_tokens
from pagewood.engine.testing.echo import EXPERT_SHAPE, STATE_SIZE
from pagewood.engine.text import Tokenizer
from pagewood.engine.weight_commands import WeightCommand
from pagewood.server.config import LEAST_PRIORITY
from pagewood.server.dashboard.live_data import Watchers
from pagewood.server.dashboard.snapshots import Snapshots
from pagewood.server.http.access import AccessRules
from pagewood.server.http.app import Frontend
from pagewood.server.http.bodies import Bodies
from pagewood.server.http.connections import Connections
from pagewood.server.http.errors import unavailable
from pagewood.server.http.limits import HttpLimits
from pagewood.server.jobs.store import JobStore
from pagewood.server.jobs.worker import JobWorker
from pagewood.server.keys.gate import KeyGate
from pagewood.server.keys.gateway import GatewayHeaders
from pagewood.server.keys.key import digest_of
from pagewood.server.messages import wire
from pagewood.server.metrics.metrics import COMPAT, Metrics
from pagewood.server.metrics.requests import RequestMetrics
from pagewood.server.observe.incidents import Incidents
from pagewood.server.processes.cache_reports import CacheReports
from pagewood.server.processes.engine_profiles import Profiles
from pagewood.server.processes.engine_side import (
    PULSE_IDLE_S,
    EngineInbox,
    EngineOutbox,
    Heartbeat,
    SharedSender,
    log_speculation,
    pulse_of,
)
from pagewood.server.protocols.common.models import OnlyModel
from pagewood.server.protocols.common.reader import Reader
from pagewood.server.protocols.common.service import Service
from pagewood.server.replicas.dispatcher import Dispatcher
from pagewood.server.replicas.division import role_of
from pagewood.server.replicas.fleet_status import FleetStatus
from pagewood.server.replicas.making import make_router
from pagewood.server.replicas.replica import Replica
from pagewood.server.requests.adapters import ServedAdapters
from pagewood.server.requests.live import LiveRequests
from pagewood.server.requests.status import EngineState, EngineStatus
from pagewood.server.stages.detokenizing import run_detokenizer
from pagewood.server.stages.tokenizing import run_tokenizer

if TYPE_CHECKING:
    from pagewood.server.observe.tracing import Tracing

ADMIN_KEY = "the-admin-key-of-servers-in-tests"
MAX_LENGTH = 400
NUM_PAGES = 100
NUM_ROWS = 8
PREFILL: dict[str, Any] = {
    "role": "prefill", "remote_cache": "shm:unused", "remote_cache_gb": 1.0, "host_cache_gb": 1.0,
}  # fmt: skip
"""Configuration of an engine that computes prompts."""
PROFILE_SPEED = 1000.0
"""Seconds of a profile in one second."""


class Gate:
    """Controls how many steps an engine may launch."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_steps = math.inf
        self.is_held = False
        """Whether the engine waits at the gate."""

    def allow(self, num_steps: float) -> None:
        """Allow that many further steps; infinity: all."""
        with self._changed:
            self._num_steps = num_steps
            self.is_held = self.is_held and num_steps < 1
            self._changed.notify_all()

    def open(self) -> None:
        """Allow all steps."""
        self.allow(math.inf)

    def close(self) -> None:
        """Allow no further step."""
        self.allow(0)

    def wait(self) -> None:
        """Wait until a step is allowed."""
        with self._changed:
            self.is_held = self._num_steps < 1
            assert self._changed.wait_for(lambda: self._num_steps >= 1, timeout=60)
            self.is_held = False
            self._num_steps -= 1


class GatedRunner:
    """An echo model that waits at a gate before each step."""

    def __init__(self, runner: EchoRunner, gate: Gate) -> None:
        self._runner = runner
        self._gate = gate

    def launch(self, batch: Batch) -> StepHandle:
        """Wait for the gate, then launch."""
        self._gate.wait()
        return self._runner.launch(batch)

    def close(self) -> None:
        """Close the runner."""
        self._runner.close()


class MemoryReplica:
    """One of the engines: its thread, its link, its gate, and whether it must end."""

    def __init__(self, *, is_over: Callable[[], bool]) -> None:
        self.gate = Gate()  # written by: memory_server
        self.life = 0  # written by: memory_server
        self.is_killed = threading.Event()  # written by: memory_server
        self.fault: Callable[[WeightCommand | str], str] = lambda sent: ""
        """Why its weights refuse a command; see `EchoWeights`."""  # written by: tests
        self._is_over = is_over
        self.link = self.new_link()  # written by: memory_server

    def new_link(self) -> MemoryLink:
        """Return a link that nothing has been sent over."""
        killed = self.is_killed
        return MemoryLink(stopping=lambda: killed.is_set() or self._is_over())

    def send(self, frame: bytes) -> None:
        """Send a command to the present engine."""
        self.link.send(frame)


class MemoryServer:
    """The whole server, from ASGI to the engine and back; `start` before use, `stop` afterwards.

    With `drafting` the engine speculates, on drafts that the echo model makes up. With `grammars` it compiles grammars.
    `script` returns the answer to the text of a prompt, as the model writes it; without it, answers are hashes.
    `client` sends requests without a key, and `admin` with `ADMIN_KEY`, the key of the run unless `gate` is given.
    The router reads `router_config`, by default one with `quotas`. The first `num_prefill` replicas compute prompts,
    but share no store with the others, which compute them again.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        limit: int,
        limits: HttpLimits | None = None,
        origins: frozenset[str] = frozenset(),
        status: EngineStatus | None = None,
        pulse_interval_s: float = PULSE_IDLE_S,
        drafting: Drafting | None = None,
        script: Callable[[str], str] | None = None,
        grammars: bool = False,
        max_length: int = MAX_LENGTH,
        num_pages: int = NUM_PAGES,
        num_pools: int = 1,
        retained_share: float = 0.0,
        recipe: VectorRecipe | None = None,
        makes_vectors: bool = True,
        generates: bool = True,
        host: str = "memory",
        model_name: str = "echo",
        gate: KeyGate | None = None,
        gateway: GatewayHeaders | None = None,
        max_retries: int = 0,
        max_ttft_s: float | None = None,
        tracing: Tracing | None = None,
        dashboard_text: bool = False,
        expert_rows: ExpertRows | None = None,
        adapters: ServedAdapters | None = None,
        num_replicas: int = 1,
        num_prefill: int = 0,
        quotas: tuple[TenantQuota, ...] = (),
        router_config: EngineConfig | None = None,
        router_clock: Callable[[], float] = time.monotonic,
        store: JobStore | None = None,
        batch_lines: int = 4,
        batch_lines_beside: int = 0,
    ) -> None:
        self._num_prefill = num_prefill
        self._adapters = EchoAdapters()
        self._max_adapters = 0 if adapters is None else 2
        self._quotas = quotas
        self.tokenizer = tokenizer
        self._script = script
        self._max_length = max_length
        self._num_pages = num_pages
        self._num_pools = num_pools
        self._retained_share = retained_share
        self._makes_vectors = makes_vectors
        self._generates = generates
        self._grammar_folder = folder if grammars else None
        self._pulse_interval_s = pulse_interval_s
        self._drafting = drafting
        self._expert_rows = expert_rows
        self._profile_folder = Path(mkdtemp())
        self._remove_profiles = weakref.finalize(self, shutil.rmtree, self._profile_folder, ignore_errors=True)
        self._stopped = threading.Event()
        self._links = [MemoryLink(stopping=self._stopped.is_set) for _ in range(3)]
        self._to_tokenizer, self._to_detokenizer, self._to_http = self._links
        self.replicas = [MemoryReplica(is_over=self._stopped.is_set) for _ in range(num_replicas)]
        self.gate = self.replicas[0].gate
        statuses = [status or EngineStatus(), *(EngineStatus() for _ in range(num_replicas - 1))]
        self.dispatcher: Dispatcher | None = None
        if num_replicas > 1:
            config = router_config or EngineConfig(max_running=NUM_ROWS, quotas=quotas)
            self.dispatcher = Dispatcher(
                make_router(config, moves=max_retries > 0, min_apart_tokens=8),
                [
                    Replica(sender=one, status=status, role=role_of(number, num_prefill=num_prefill))
                    for number, (one, status) in enumerate(zip(self.replicas, statuses, strict=True))
                ],
                num_places=NUM_ROWS,
                moves=max_retries > 0,
                max_queue_s=config.max_queue_s,
                clock=router_clock,
            )
        fleet = (
            None
            if self.dispatcher is None
            else FleetStatus(replicas=statuses, router=self.dispatcher, num_prefill=num_prefill)
        )
        limits = limits or HttpLimits(max_body_bytes=100_000)
        incidents = Incidents()
        self.metrics = Metrics(requests=RequestMetrics(tracer=tracing), compat=COMPAT, incidents=incidents)
        self.service = Service(
            metrics=self.metrics,
            live=LiveRequests(
                [self._to_tokenizer],
                limit=limit,
                max_retries=max_retries,
                max_first_answer_s=max_ttft_s,
                incidents=incidents,
                watch=self.metrics.requests,
                placing=self.dispatcher,
                num_jobs_beside=batch_lines_beside,
            ),
            status=fleet or statuses[0],
            defaults=default_sampling(folder),
            model_name=model_name,
            adapters=adapters or ServedAdapters(),
            template=tokenizer.response_template,
            recipe=recipe or VectorRecipe(),
            started=1,
            watchers=Watchers(shows_text=dashboard_text),
            dispatcher=self.dispatcher,
            folder=self._profile_folder,
            replace_engine=self._replace_engine,
        )
        if self.dispatcher is not None:
            self.dispatcher.attach(self.service.live)
        self.reader = Reader(bodies=Bodies(limits))
        gate = gate or KeyGate(run_key=digest_of(ADMIN_KEY))
        self.jobs = (
            None if store is None else JobWorker(store, owners=gate, num_lines=batch_lines, priority=LEAST_PRIORITY)
        )
        if self.jobs is not None:
            jobs = self.jobs
            self.metrics.jobs = lambda: jobs.counts
        self.frontend = Frontend(
            models=OnlyModel(service=self.service, reader=self.reader),
            metrics=self.metrics,
            limits=limits,
            connections=Connections(limits),
            tracing=tracing,
            access=AccessRules(hosts=frozenset({host}), origins=origins),
            gate=gate,
            gateway=gateway,
            jobs=self.jobs,
        )
        self.app = self.frontend.app()
        transport, url = httpx.ASGITransport(self.app), f"http://{host}"
        self.client = httpx.AsyncClient(transport=transport, base_url=url)
        self.admin = httpx.AsyncClient(transport=transport, base_url=url, headers={"x-api-key": ADMIN_KEY})

    async def __aenter__(self) -> MemoryServer:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop."""
        await self.stop()

    async def start(self) -> None:
        """Start all stages and wait until the engine is ready."""
        loop = asyncio.get_running_loop()
        stopped = self._stopped.is_set
        stages: list[Callable[[], None]] = [
            lambda: run_tokenizer(
                self.tokenizer,
                self._to_tokenizer,
                self.replicas[0].link if self.dispatcher is None else self._to_http,
                stopped=stopped,
                block_size=None if self.dispatcher is None else 16,
            ),
            *(partial(self._run_engine, number) for number in range(len(self.replicas))),
            lambda: run_detokenizer(self.tokenizer, self._to_detokenizer, self._to_http, stopped=stopped),
            lambda: self._run_pump(loop),
        ]
        self._threads = [threading.Thread(target=stage, daemon=True) for stage in stages]  # a failed test ends
        for thread in self._threads:
            thread.start()
        await self.until(lambda: all(one.state is EngineState.READY for one in self._statuses))
        self._tasks = [] if self.jobs is None else [asyncio.create_task(self.jobs.run())]

    @property
    def engine_status(self) -> EngineStatus:
        """The status of the only engine."""
        [status] = self._statuses
        return status

    @property
    def _statuses(self) -> Sequence[EngineStatus]:
        status = self.service.status
        return status.replicas if isinstance(status, FleetStatus) else [status]

    def kill(self, number: int, *, is_restarted: bool = True) -> None:
        """Let the engine of a replica die with all that it holds; another one takes its place at once, or never."""
        replica, status = self.replicas[number], self.service.status
        assert self.dispatcher is not None
        assert isinstance(status, FleetStatus)
        replica.is_killed.set()
        replica.link.wake()
        replica.gate.open()
        replica.life += 1
        replica.is_killed = threading.Event()
        replica.link = replica.new_link()
        replica.gate = Gate()
        status.lost(number, next_incarnation=replica.life)
        error = unavailable("The engine process died.", code="engine_lost")
        self.dispatcher.replica_lost(number, replica.life, error, is_planned=False)
        if is_restarted:
            self.restart(number)

    def restart(self, number: int) -> None:
        """Start the next engine of a replica that has died."""
        self._threads.append(threading.Thread(target=self._run_engine, args=(number,), daemon=True))
        self._threads[-1].start()

    async def stop(self) -> None:
        """End all stages, and check that none hangs."""
        await self.client.aclose()
        await self.admin.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas:
            replica.gate.open()
        self._stopped.set()
        for link in (*self._links, *(replica.link for replica in self.replicas)):
            link.wake()
        for thread in self._threads:
            await asyncio.to_thread(thread.join, 60)
            assert not thread.is_alive()
        self._remove_profiles()

    async def until(self, holds: Callable[[], bool], *, limit_s: float = 60.0) -> None:
        """Wait until `holds`."""
        deadline_s = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline_s, "timed out"
            await asyncio.sleep(0.002)

    @property
    def has_command_at_gate(self) -> bool:
        """Whether a command is queued for the engine while the engine waits at its gate."""
        return self.gate.is_held and self.replicas[0].link.num_queued > 0

    @property
    def num_queued_commands(self) -> int:
        """Commands that are queued for the engine."""
        return self.replicas[0].link.num_queued

    async def until_idle(self) -> None:
        """Wait until no stage holds a request, and check that all memory is free or cached."""
        status, live = self.service.status, self.service.live

        def idle() -> bool:
            counters = status.counters
            busy = sum(counters[name] for name in ("num_waiting", "num_running", "num_draining", "num_held"))
            return not busy and not live.num_live and not live.num_ending

        await self.until(idle)
        assert status.counters["num_free_pages"] + status.counters["num_cached_pages"] == self._num_pages * len(
            self.replicas
        )
        assert status.counters["num_violations"] == 0

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Send a request for the model of this server."""
        return await self.client.post(path, json={"model": "echo", **body})

    def expected_tokens(
        self,
        prompt: list[int],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        adapter: int = 0,
        weights: int = 0,
    ) -> list[int]:
        """Return the echo model's answer to a prompt, computed by the oracle; for what it is of see `oracle_tokens`."""
        return oracle_tokens(
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed),
            vocab_size=self.tokenizer.vocab_size,
            stop_ids=frozenset({EOS_ID}),
            max_length=self._max_length,
            adapter=adapter,
            weights=weights,
        )

    def expected_text(
        self,
        prompt: str,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        adapter: int = 0,
    ) -> str:
        """Return the echo model's answer to a text."""
        tokens = self.tokenizer.encode(prompt).tolist()
        return self.tokenizer.decode(
            self.expected_tokens(tokens, max_tokens=max_tokens, temperature=temperature, seed=seed, adapter=adapter)
        )

    async def _replace_engine(self) -> None:
        """Let the requests move, to the only engine that there is."""
        live = self.service.live
        live.lost(unavailable("The engine process died.", code="engine_lost"), is_planned=True)
        live.resume()

    def _answer(self, prompt: tuple[int, ...]) -> list[int]:
        """Return the tokens of the scripted answer, with the end of the sequence."""
        assert self._script is not None
        text = self._script(self.tokenizer.decode(prompt, skip_special_tokens=False))
        return [*self.tokenizer.encode(text, add_special_tokens=False).tolist(), EOS_ID]

    def _run_engine(self, number: int) -> None:
        replica = self.replicas[number]
        incarnation, killed, gate = replica.life, replica.is_killed, replica.gate

        def is_over() -> bool:
            return killed.is_set() or self._stopped.is_set()

        inbox = EngineInbox(replica.link, stopped=is_over)
        config = EngineConfig(
            max_running=NUM_ROWS,
            retained_share=self._retained_share,
            quotas=() if self.dispatcher is not None else self._quotas,
            max_adapters=self._max_adapters,
            **(PREFILL if number < self._num_prefill else {}),
        )
        info = EngineInfo(
            model_name=self.service.model_name,
            max_length=self._max_length,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=(EOS_ID,),
            num_pages=self._num_pages,
            num_pools=self._num_pools,
            page_size=16,
            vector_size=STATE_SIZE if self._makes_vectors else 0,
            expert_shape=EXPERT_SHAPE,
            reports_states=True,
            reports_kept=True,
            generates=self._generates,
        )

        runners: list[EchoRunner] = []

        def make_runner(kv: AnyKV) -> GatedRunner:
            runner = EchoRunner(
                num_rows=NUM_ROWS,
                max_length=self._max_length,
                num_pages=self._num_pages,
                num_pools=self._num_pools,
                page_size=16,
                vocab_size=self.tokenizer.vocab_size,
                held_pages=kv.held_pages,
                requests=lambda: engine._state.running,  # pyright: ignore[reportPrivateUsage]
                answer=None if self._script is None else self._answer,
                adapters=self._adapters.contents.__getitem__ if self._max_adapters else None,
            )
            runners.append(runner)
            return GatedRunner(runner, gate)

        engine = assemble(
            config,
            info=info,
            make_runner=make_runner,
            drafting=self._drafting,
            adapters=self._adapters if self._max_adapters else None,
            compiler=None if self._grammar_folder is None else grammar_compiler(config, self._grammar_folder, info),
            inbox=inbox,
            outbox=EngineOutbox(self._to_detokenizer, incarnation=incarnation, replica=number),
            expert_rows=self._expert_rows,
            weights=ServedWeights(EchoWeights(lambda: runners[0], fault=lambda sent: replica.fault(sent))),
        )
        engine.measure()
        heartbeat = Heartbeat(
            self._to_detokenizer,
            pulse=lambda: pulse_of(engine, incarnation=incarnation, replica=number),
            interval_s=self._pulse_interval_s,
        )
        reports = CacheReports(
            lambda: CacheEvents(lambda: engine.prefix_cache),
            self._to_detokenizer,
            replica=number,
            incarnation=incarnation,
        )
        profiles = Profiles(
            make=lambda: Profile(engine),
            folder=self._profile_folder,
            outbox=EngineOutbox(SharedSender(self._to_detokenizer)),
            clock=lambda: time.monotonic() * PROFILE_SPEED,
        )
        inbox.attach(
            heartbeat,
            profiles=profiles,
            snapshots=Snapshots(engine, self._to_detokenizer, incarnation=incarnation, replica=number),
            cache_reports=reports,
        )
        heartbeat.start()
        engine.run(is_over)
        log_speculation(pulse_of(engine).speculation)
        engine.close()
        heartbeat.stop()

    def _run_pump(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopped.is_set():
            for message in wire.read(wire.to_http, self._to_http.receive(timeout_s=None)):
                loop.call_soon_threadsafe(self.service.take, message)
