"""The processes that serve one model, as one: engines, tokenizers and the detokenizer, and the requests they hold."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import zmq

from pagewood.server.config import ServeConfig
from pagewood.server.http.errors import ApiError, unavailable
from pagewood.server.messages import wire
from pagewood.server.messages.links import ZmqSender, address
from pagewood.server.metrics.rank_processes import rank_processes
from pagewood.server.observe.incidents import Incidents, Recovery
from pagewood.server.processes.child import STOP_GRACE_S, Settings
from pagewood.server.processes.succession import Lose, Succession, engine_socket
from pagewood.server.processes.supervisor import Stage, Supervisor
from pagewood.server.processes.watchdog import Watchdog, trouble_of
from pagewood.server.replicas.dispatcher import Dispatcher
from pagewood.server.replicas.division import (
    address_of_each,
    cores_of_each,
    devices_of_each,
    engine_of_each,
    role_of,
)
from pagewood.server.replicas.fleet_status import FleetStatus, ServerStatus
from pagewood.server.replicas.making import make_router
from pagewood.server.replicas.replica import Replica
from pagewood.server.replicas.roster import Roster
from pagewood.server.requests.adapters import ServedAdapters
from pagewood.server.requests.live import LiveRequests, RequestWatch
from pagewood.server.requests.pump import AnswerPump
from pagewood.server.requests.status import EngineStatus

FLUSH_GRACE_S = 20
"""Longest time for the engine to write KV to its disk cache at its end. Other KV is lost and computed again."""
EXIT_FAILED = 1
"""Exit code of a server that could not start, or cannot receive answers."""
EXIT_CRASH_LOOP = 3
"""Exit code of a server with a process that kept dying."""

ENGINE = Stage(name="engine", module="pagewood.server.processes.engine_process", computes=True)
DETOKENIZER = Stage(name="detokenizer", module="pagewood.server.processes.detokenizer_process", computes=False)
HTTP = "http"


class Receiver(Protocol):
    """Takes what the processes send."""

    def take(self, message: wire.ToHttp) -> None:
        """Take a message."""
        ...


class EngineGroup:
    """The processes that serve one model, and the requests that they hold.

    All processes and messages of a model are here, and nothing of another model. So several models are several groups,
    and what one of them needs is started, supervised and ended with it.

    Invariant: `status`, `live` and the processes are those of the same model.

    Args:
        config: of the server, for this model.
        folder: of the sockets; only this user can access it.
        context: of the sockets.
        title: name of the model in the log; empty: it is the only one.
        incidents: where deaths, repeated and refused requests are counted.
        adapters: that the model has.
        watch: is notified when requests begin and end; None: nothing is.
        give_up: called with the reason and an exit code if the model cannot be served, or no longer.
        on_news: called after the state of an engine may have changed.
        roster: engines that are started elsewhere; None: the group starts its engines.
    """

    __slots__ = (
        *("_adapters", "_config", "_context", "_engine_senders", "_engines", "_folder", "_give_up", "_incidents"),
        *("_on_news", "_pump", "_recovery", "_senders", "_statuses", "_successions", "_supervisor", "_title"),
        *("_tokenizers", "dispatcher", "live", "status"),
    )

    def __init__(
        self,
        config: ServeConfig,
        *,
        folder: Path,
        context: zmq.Context[zmq.Socket[bytes]],
        title: str,
        incidents: Incidents,
        adapters: ServedAdapters,
        watch: RequestWatch | None,
        give_up: Callable[[str, int], None],
        on_news: Callable[[], None],
        roster: Roster | None = None,
    ) -> None:
        self._config, self._folder, self._context = config, folder, context
        self._incidents, self._adapters = incidents, adapters
        self._give_up, self._on_news, self._title = give_up, on_news, title
        self._tokenizers = [_tokenizer_stage(i) for i in range(config.tokenizer_workers)]
        self._engines = engine_stages(config.replicas) if roster is None else []
        self._statuses = [EngineStatus() for _ in self._engines] if roster is None else roster.statuses
        self.status: ServerStatus = self._statuses[0]
        self.dispatcher: Dispatcher | None = None
        self._engine_senders: list[ZmqSender] = []
        num_engines = config.replicas if roster is None else roster.most
        if len(self._engines) != 1:
            self._engine_senders += [
                ZmqSender(context, address(folder, engine_socket(stage.name, 0))) for stage in self._engines
            ]
            self.dispatcher = Dispatcher(
                make_router(config.engine, moves=config.max_retries > 0),
                [
                    Replica(sender=sender, status=status, role=role_of(number, num_prefill=config.prefill_replicas))
                    for number, (sender, status) in enumerate(zip(self._engine_senders, self._statuses, strict=True))
                ]
                if roster is None
                else roster.replicas,
                num_places=config.engine.num_rows,
                low_priority_first=config.engine.low_priority_first,
                moves=config.max_retries > 0,
                max_queue_s=config.engine.max_queue_s,
            )
            self.status = FleetStatus(
                replicas=self._statuses,
                router=self.dispatcher,
                num_prefill=config.prefill_replicas,
                is_elastic=roster is not None,
            )
            if roster is not None:
                roster.attach(self.dispatcher, self.status)
        self._senders = [ZmqSender(context, address(folder, stage.name)) for stage in self._tokenizers]
        self.live = LiveRequests(
            self._senders,
            limit=(num_engines - config.prefill_replicas) * config.engine.num_rows + config.max_queued,
            max_retries=config.max_retries,
            seed=config.engine.seed,
            max_first_answer_s=config.max_ttft_s,
            incidents=incidents,
            watch=watch,
            placing=self.dispatcher,
            num_jobs_beside=config.batch_lines_beside,
        )
        if self.dispatcher is not None:
            self.dispatcher.attach(self.live)
        self._recovery = Recovery(self.status, incidents)
        self._successions = [
            Succession(
                stage,
                self._statuses[number],
                self.live,
                route=self._route if self.dispatcher is None else _reconnect(self._engine_senders[number], folder),
                rest=lambda: (self.status.paused, self.status.sleep),
                lose=self._lose(number),
                why_kept=lambda: "" if self.dispatcher is None else self.dispatcher.weights.why_kept,
                is_beside=config.restarts_beside,
            )
            for number, stage in enumerate(self._engines)
        ]
        self._supervisor = Supervisor(
            [*self._engines, DETOKENIZER, *self._tokenizers],
            settings=self._settings,
            was_ready=lambda: self.status.model is not None,
            on_death=self._on_death,
            on_failure=lambda why: give_up(why, EXIT_FAILED),
            on_crash_loop=lambda why: give_up(why, EXIT_CRASH_LOOP),
            useful_s=self._useful_s,
            max_quick_deaths=config.max_quick_deaths,
            incidents=incidents,
            title=title,
        )

    @property
    def folder(self) -> Path:
        """Folder of the sockets, and of the files that its processes hand over."""
        return self._folder

    def start(self) -> None:
        """Start all processes."""
        self._supervisor.start()

    async def launched(self) -> None:
        """Wait until every process was started once, or failed to start."""
        await self._supervisor.launched()

    def work(self, receiver: Receiver) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what must run while the group works: pass messages on to `receiver`, and watch the engines."""
        pump = AnswerPump(
            address(self._folder, HTTP),
            take=lambda message: self._take(message, receiver),
            fail=self.live.fail,
            fail_all=self.live.fail_all,
            give_up=lambda why: self._give_up(why, EXIT_FAILED),
        )
        return [pump.run(), *(one.run() for one in self._watchdogs())]

    async def stop(self) -> None:
        """End all processes."""
        await self._supervisor.stop()

    def close(self) -> None:
        """Close the sockets; call it when nothing of `work` runs any more."""
        for sender in (*self._senders, *self._engine_senders):
            sender.close()

    def kill_all(self) -> None:
        """Kill all processes without waiting for them; safe in a signal handler."""
        self._supervisor.kill_all()

    async def replace_engine(self) -> None:
        """Replace one engine after the other, so that the others work meanwhile.

        Raises:
            ApiError: as in `Succession.replace`.
        """
        for succession in self._successions:
            await succession.replace(self._supervisor)

    def begin_to_replace(self) -> None:
        """Begin to replace all engines, one after the other; why it fails is logged."""
        self._successions[0].begin(self._supervisor, others=self._successions[1:])

    def pids(self) -> Mapping[str, int]:
        """Return the process ids by name, with those of the ranks of a model."""
        pids = self._supervisor.pids()
        for stage in self._engines:
            ranks = rank_processes(pids.get(stage.name))
            pids |= ranks if len(self._engines) == 1 else {f"{stage.name}-{name}": pid for name, pid in ranks.items()}
        return pids

    def _take(self, message: wire.ToHttp, receiver: Receiver) -> None:
        if isinstance(message, wire.Pulse) and self._successions:
            self._successions[message.replica].pulsed(message, self._supervisor)
        receiver.take(message)
        if isinstance(message, wire.Loading | wire.Pulse):
            self._recovery.check()
            self._on_news()

    def _watchdogs(self) -> list[Watchdog]:
        limit_s = self._config.watchdog_s
        return [
            Watchdog(
                one,
                limit_s=limit_s,
                incidents=self._incidents,
                dump=self._supervisor.dump_stacks,
                kill=self._supervisor.kill,
                engine=stage.name,
                relay_works=lambda: any(
                    other.seconds_since_pulse is not None and trouble_of(other, limit_s=limit_s) is None
                    for other in self._statuses
                ),
            )
            for stage, one in zip(self._engines, self._statuses, strict=False)
        ]

    def _route(self, socket: str) -> None:
        for sender in self._senders:
            sender.send(wire.encode(wire.Route(stage=socket)))

    def _lose(self, number: int) -> Lose:
        """Return what follows the next process of an engine, of which there may be several."""

        def follow(incarnation: int | None, error: ApiError, is_planned: bool) -> None:
            if incarnation is not None and isinstance(self.status, FleetStatus):
                self.status.lost(number, next_incarnation=incarnation)
            elif incarnation is not None:
                self._statuses[number].lost(next_incarnation=incarnation)
            if self.dispatcher is None:
                self.live.lost(error, is_planned=is_planned)
            else:
                self.dispatcher.replica_lost(number, incarnation, error, is_planned=is_planned)

        return follow

    def _on_death(self, stage: Stage, next_incarnation: int) -> None:
        """Fail the requests that were in a process that died."""
        if stage in self._tokenizers:
            index = self._tokenizers.index(stage)
            self._senders[index].reconnect()
            self.live.tokenizer_lost(index)
            return
        if stage in self._engines:
            self._successions[self._engines.index(stage)].follow(next_incarnation)
        else:
            self.status.relay_lost(next_incarnation=next_incarnation)
            if self._successions:
                self._successions[0].note_difference()
            error = unavailable(f"The {stage.name} process died; it is being restarted.", code=f"{stage.name}_lost")
            self.live.lost(error)
            if self.dispatcher is not None:
                self.dispatcher.relay_lost()
        self._recovery.began()
        self._on_news()

    def _useful_s(self, stage: Stage) -> float | None:
        if stage not in self._engines:
            return None
        return self._statuses[self._engines.index(stage)].seconds_since_first_pulse

    def _settings(self, stage: Stage, incarnation: int) -> Settings:
        config, engines = self._config, self._engines
        number = engines.index(stage) if stage in engines else None
        is_routed = self.dispatcher is not None
        if number is not None:
            send_to = DETOKENIZER.name
        elif stage is DETOKENIZER or is_routed:
            send_to = HTTP
        else:
            send_to = engine_socket(ENGINE.name, self.status.incarnation)
        engine = config.engine if not incarnation else replace(config.engine, adapters=self._adapters.loaded())
        is_flushing = number is not None and config.engine.disk_cache_path is not None
        events, replay = config.kv_events, config.kv_events_replay
        if is_routed and number is not None:
            engine = engine_of_each(engine, number, num_replicas=len(engines), num_prefill=config.prefill_replicas)
            events = None if events is None else address_of_each(events, number)
            replay = None if replay is None else address_of_each(replay, number)
        return Settings(
            folder=str(self._folder),
            stage=stage.name,
            title=self._title,
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
            devices=devices_of_each(engine, len(engines))[number] if is_routed and number is not None else (),
            engine=engine,
            images=config.image_limits,
            paused=self.status.paused,
            sleep=self.status.sleep,
            kv_events=events,
            kv_events_replay=replay,
            kv_events_form=config.kv_events_form,
            kv_events_topic=config.kv_events_topic,
        )


def engine_stages(num_replicas: int) -> list[Stage]:
    """Return the stage of the engine, or those of several."""
    if num_replicas == 1:
        return [ENGINE]
    return [replace(ENGINE, name=f"{ENGINE.name}-{number}") for number in range(num_replicas)]


def _reconnect(sender: ZmqSender, folder: Path) -> Callable[[str], None]:
    return lambda socket: sender.reconnect(address(folder, socket))


def _tokenizer_stage(index: int) -> Stage:
    return Stage(name=f"tokenizer-{index}", module="pagewood.server.processes.tokenizer_process", computes=False)
