"""The common part of all child processes: settings, sockets, logging, and the end of the parent."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from pagewood.engine.api import EngineConfig
from pagewood.engine.images.limits import ImageLimits
from pagewood.server.entrances.messages import EntranceSettings
from pagewood.server.messages.links import ZmqReceiver, ZmqSender, address
from pagewood.server.messages.sleep_state import SleepState
from pagewood.server.observe import logs

DUMP_SIGNAL = signal.SIGUSR1
"""Makes any process of the server write the stacks of its threads to standard error and continue."""
_PR_SET_PDEATHSIG = 1
STOP_GRACE_S = 4.0
"""How long a process without a disk cache may take to end."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a child: one line of JSON on its standard input, which stays open while the parent lives."""

    folder: str
    """Folder of the sockets."""
    stage: str
    """Name of the stage that this process runs, in its log."""
    title: str = ""
    """Name of its model in the log; empty: it is the only one."""
    listen: str
    """Name of its socket."""
    send_to: str
    """Name of the socket of the next stage."""
    model_folder: str
    incarnation: int
    """Number of earlier processes of this stage."""
    replica: int = 0
    """Number of the engine among those of the server."""
    is_routed: bool = False
    """Whether a router chooses among several engines."""
    cores: tuple[int, ...] = ()
    """Processors that the process may use; empty: all that its parent may use."""
    devices: tuple[str, ...] = ()
    """CUDA devices that the process may use; empty: all that its parent may use."""
    stop_grace_s: float = STOP_GRACE_S
    """How long the child may take to end, seconds."""
    log_level: str = "info"
    log_format: logs.LogFormat = "text"
    measures: bool = True
    """Whether the engine measures its steps."""
    engine: EngineConfig
    images: ImageLimits = ImageLimits()
    """What an image may be that a tokenizer process decodes."""
    paused: Literal["no", "in_place", "retract"] = "no"
    """Whether the engine begins paused, because the one before it was."""
    sleep: SleepState = SleepState()
    """What sleeps in the beginning, because it did in the one before it."""
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_form: Literal["map", "array"] = "map"
    kv_events_topic: str = ""
    entrance: EntranceSettings | None = None
    """Settings of an entrance; None: another process."""


class ParentWatch:
    """Whether the parent has closed the standard input of this process, because it stops or has died.

    If the parent has written anything before, this process ends alone, and the server goes on.

    A child that does not end within `grace_s` is killed: a kernel that is being compiled cannot be interrupted.

    Args:
        folder: folder of the sockets; removed if the child is killed.
        grace_s: how long the child may take to end, seconds.
    """

    __slots__ = ("_folder", "_grace_s", "_read_end", "_stopped", "_write_end", "ends_alone")

    def __init__(self, *, folder: str, grace_s: float) -> None:
        self._folder = folder
        self._grace_s = grace_s
        self.ends_alone = False
        """Whether another process takes the place of this one, so that the folder stays."""  # written by: _watch
        self._stopped = threading.Event()
        self._read_end, self._write_end = os.pipe()
        threading.Thread(target=self._watch, name="parent-watch", daemon=True).start()

    def __call__(self) -> bool:
        """Return whether to stop."""
        return self._stopped.is_set()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when it is time to stop."""
        return self._read_end

    def _watch(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            self.ends_alone = True
        self._stopped.set()
        os.close(self._write_end)
        time.sleep(self._grace_s)
        if not self.ends_alone:
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)


Serve = Callable[[Settings, ZmqReceiver, ZmqSender, ParentWatch], None]


def run_child(serve: Serve) -> None:
    """Read the settings, connect, call `serve` until the parent ends it, and close the sockets."""
    register_dump()
    _wake_at_death_of_parent()
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends these to all processes; the parent handles them
        signal.signal(number, signal.SIG_IGN)
    settings = msgspec.json.decode(_first_line(), type=Settings)
    name = f"{settings.title}/{settings.stage}" if settings.title else settings.stage
    logs.configure(settings.log_level, name, form=settings.log_format)
    watch = ParentWatch(folder=settings.folder, grace_s=settings.stop_grace_s)
    folder = Path(settings.folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        inbox = ZmqReceiver(context, address(folder, settings.listen), stopping=watch)
    except zmq.ZMQError:
        if folder.exists():
            raise
        return  # the server ended while this process started, and another child has removed the folder
    outbox = ZmqSender(context, address(folder, settings.send_to))
    try:
        serve(settings, inbox, outbox, watch)
    finally:
        inbox.close()
        outbox.close()
        context.term()
        # If the whole server ends because the parent has died, only its children can remove the folder.
        if watch() and not watch.ends_alone:
            shutil.rmtree(folder, ignore_errors=True)


def register_dump() -> None:
    """Write the stacks of all threads at `DUMP_SIGNAL`, also while the interpreter's lock is held."""
    faulthandler.register(DUMP_SIGNAL, all_threads=True)


def _wake_at_death_of_parent() -> None:
    """Make a stopped child continue when its parent dies (Linux); otherwise it would not notice, and stay for ever."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


@contextlib.contextmanager
def errors_in_one_line(settings: Settings) -> Generator[None]:
    """End the process with exit code 1 if the block finds a bad model or setting; the parent says why."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        why = str(error) or type(error).__name__
        if settings.title:  # of several models, whose parent tells the client
            logs.announce(f"error: {settings.title}: {why}")
        try:
            last_words(settings.folder, settings.stage).write_text(why, encoding="utf-8")
        except OSError:
            logs.announce(f"error: {why}")
        raise SystemExit(1) from error


def last_words(folder: str, stage: str) -> Path:
    """Return the file in which a process says why it has ended."""
    return Path(folder) / f"{stage}.error"


def _first_line() -> bytes:
    """Read up to the first newline, and not a byte more: `ParentWatch` reads the rest from the descriptor."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            raise SystemExit("pagewood: started without a parent")
        line += byte
    return bytes(line)
