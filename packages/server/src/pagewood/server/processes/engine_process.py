"""The engine process, the only one with torch: `python -m pagewood.server.processes.engine_process`."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pagewood.engine.api import Command, Pause
from pagewood.server.dashboard.snapshots import Snapshots
from pagewood.server.messages import wire
from pagewood.server.messages.links import Sender, ZmqReceiver, ZmqSender
from pagewood.server.observe import logs
from pagewood.server.processes.cache_reports import CacheReports
from pagewood.server.processes.child import ParentWatch, Settings, errors_in_one_line, run_child
from pagewood.server.processes.engine_profiles import Profiles
from pagewood.server.processes.engine_side import (
    EngineInbox,
    EngineOutbox,
    Heartbeat,
    SharedSender,
    log_speculation,
    pulse_of,
)
from pagewood.server.processes.kv_events import EventPump, Publisher

if TYPE_CHECKING:
    from pagewood.engine.core.loop import Engine


def serve(settings: Settings, inbox: ZmqReceiver, outbox: ZmqSender, stopped: ParentWatch) -> None:
    """Build the engine, report the progress, and run it until the parent ends it."""
    if settings.cores:  # before any thread is started
        os.sched_setaffinity(0, settings.cores)
    incarnation, replica = settings.incarnation, settings.replica

    def progress(what: str, done: int, total: int) -> None:
        if stopped():
            raise SystemExit
        loading = wire.Loading(incarnation=incarnation, replica=replica, what=what, done=done, total=total)
        outbox.send(wire.encode(loading))

    progress("importing torch", 0, 1)
    from pagewood.engine.build import build_engine  # takes seconds, so it is reported first
    from pagewood.engine.core.loop import RunnerLostError
    from pagewood.engine.observe.profiling import Profile

    first: list[Command] = []
    if settings.paused != "no":  # runs before commands that have arrived
        first.append(Pause(request_id=f"pause-{settings.incarnation}", retract=settings.paused == "retract"))
    if (sleep := settings.sleep.command(f"sleep-{settings.incarnation}")) is not None:
        first.append(sleep)
    commands = EngineInbox(inbox, stopped=stopped, first=first)
    shared = SharedSender(outbox)
    answers = EngineOutbox(shared, incarnation=incarnation, replica=replica)
    with errors_in_one_line(settings):
        engine = build_engine(settings.engine, inbox=commands, outbox=answers, progress=progress)
        events = _publish_events(engine, settings)
    if settings.measures:
        engine.measure()
    heartbeat = Heartbeat(shared, pulse=lambda: pulse_of(engine, incarnation=incarnation, replica=replica))
    profiles = Profiles(make=lambda: Profile(engine), folder=Path(settings.folder), outbox=answers)
    snapshots = Snapshots(engine, shared, incarnation=incarnation, replica=replica)
    reports = _cache_reports(engine, shared, settings)
    commands.attach(heartbeat, events, profiles=profiles, snapshots=snapshots, cache_reports=reports)
    heartbeat.start()
    # The engine lives as long as the process. A full garbage collection that visits its objects took 18 to 30 ms, every
    # hundred steps of 1,024 requests.
    gc.collect()
    gc.freeze()
    # A step of 1,024 requests makes some thousands of objects that live until the next step. With the default of 700,
    # collections visited them several times in every step: a tenth of the host's work.
    gc.set_threshold(20_000)
    try:
        engine.run(stopped)
        log_speculation(pulse_of(engine).speculation)
    except RunnerLostError as error:  # the parent starts another process, with other ranks
        logs.announce(f"error: {error}")
        raise SystemExit(1) from error
    finally:
        if events is not None:
            events.close()
        engine.close()
        heartbeat.stop()


def _publish_events(engine: Engine, settings: Settings) -> EventPump | None:
    """Return the publisher of changes of the engine's cache, or None if it is switched off."""
    if settings.kv_events is None:
        return None
    from pagewood.engine.observe.cache_events import CacheEvents

    changes = CacheEvents(lambda: engine.prefix_cache, form=settings.kv_events_form)
    publisher = Publisher(
        settings.kv_events, replay_endpoint=settings.kv_events_replay, topic=settings.kv_events_topic.encode()
    )
    return EventPump(changes.read, publisher)


def _cache_reports(engine: Engine, outbox: Sender, settings: Settings) -> CacheReports | None:
    """Return what tells the router of the engine's cache; None: there is no router, or no cache."""
    if not settings.is_routed or not settings.engine.prefix_cache:
        return None
    from pagewood.engine.observe.cache_events import CacheEvents

    return CacheReports(
        lambda: CacheEvents(lambda: engine.prefix_cache),
        outbox,
        replica=settings.replica,
        incarnation=settings.incarnation,
    )


if __name__ == "__main__":
    run_child(serve)
