"""One engine process follows another: after a death, or on request, and the requests go on in the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from pagewood.server.http.errors import ApiError, unavailable
from pagewood.server.messages import wire
from pagewood.server.messages.sleep_state import SleepState
from pagewood.server.processes.supervisor import ReplacementError, Stage, Supervisor
from pagewood.server.requests.live import LiveRequests
from pagewood.server.requests.status import EngineState, EngineStatus

POLL_S = 0.02

Lose = Callable[[int | None, ApiError, bool], None]
"""Called with the next incarnation, the error of requests that cannot go on, and whether that is planned."""

_log = logging.getLogger(__name__)


def engine_socket(stage: str, incarnation: int) -> str:
    """Return the name of the socket of an engine process: two of a stage may work at a time."""
    return f"{stage}-{incarnation}"


class Succession:
    """Makes the next engine process that of the server.

    Invariant: `status`, the tokenizers and the requests follow the same engine process.

    Args:
        stage: of the engine.
        status: of the engine.
        live: the requests, which move.
        route: makes what is sent to the engine go to the socket of that name.
        rest: whether all engines are paused, and how, and what sleeps in them.
        why_kept: why a new process would not have the weights of the present one; empty: it would.
        lose: follows the process of that incarnation; None: it is not known yet, and the one before it ends. The
            requests go on elsewhere, or wait.
        is_beside: whether a new process loads beside the one that it replaces.
    """

    __slots__ = ("_is_beside", "_live", "_lose", "_replacing", "_rest", "_route", "_stage", "_status", "_why_kept")

    def __init__(
        self,
        stage: Stage,
        status: EngineStatus,
        live: LiveRequests,
        *,
        route: Callable[[str], None],
        rest: Callable[[], tuple[str, SleepState]],
        lose: Lose,
        why_kept: Callable[[], str],
        is_beside: bool,
    ) -> None:
        self._lose, self._why_kept = lose, why_kept
        self._rest = rest
        self._stage = stage
        self._status = status
        self._live = live
        self._route = route
        self._is_beside = is_beside
        self._replacing: asyncio.Task[None] | None = None  # written by: begin

    def follow(self, incarnation: int, *, is_planned: bool = False) -> None:
        """Follow the next process: the one before it has died, or ends."""
        self.note_difference()
        self._route(engine_socket(self._stage.name, incarnation))
        self._hold(incarnation, is_planned=is_planned)

    def pulsed(self, pulse: wire.Pulse, supervisor: Supervisor) -> None:
        """Take a pulse; the first one of a process that loads beside the present one makes it the next."""
        name = self._stage.name
        settings = supervisor.successor_settings(name)
        if settings is None or settings.incarnation != pulse.incarnation:
            return
        if (settings.paused, settings.sleep) != self._rest():
            _log.error("the new engine process is given up: the engine was paused, slept or went on while it loaded")
            supervisor.give_up_successor(name)
            return
        self.follow(pulse.incarnation, is_planned=True)
        supervisor.promote(name)

    def begin(self, supervisor: Supervisor, *, others: Sequence[Succession] = ()) -> None:
        """Begin to replace the engine process, then those of `others`, one by one; log why it fails, if it does."""
        self._replacing = asyncio.create_task(_replace([self, *others], supervisor))

    async def replace(self, supervisor: Supervisor) -> None:
        """Replace the engine process, and return when the new one works.

        Raises:
            ApiError: the engine does not work now, is being replaced already, or the new process has failed.
        """
        if self._status.state is not EngineState.READY:
            raise unavailable(f"The engine is not ready: {self._status.detail}.", code="not_ready")
        before = self._status.incarnation
        try:
            if why_kept := self._why_kept():
                raise ReplacementError(why_kept)
            await supervisor.replace(
                self._stage, is_beside=self._is_beside, on_end=lambda: self._hold(None, is_planned=True)
            )
            while self._status.incarnation == before or self._status.state is not EngineState.READY:
                await asyncio.sleep(POLL_S)
                if self._status.outdated and (why_kept := self._why_kept()):
                    raise ReplacementError(why_kept)
        except ReplacementError as error:
            raise ApiError(
                f"The engine process was not replaced: {error}.",
                status=409,
                type="server_error",
                code="engine_not_replaced",
            ) from error

    def _hold(self, incarnation: int | None, *, is_planned: bool) -> None:
        error = unavailable("The engine process died; it is being restarted.", code="engine_lost")
        self._lose(incarnation, error, is_planned)

    def note_difference(self) -> None:
        """Log that the rest of answers may differ from what would have come without a pause, if they may."""
        config = {} if self._status.model is None else self._status.model.config
        is_varying = config.get("device") == "cuda" and not config.get("batch_invariant")
        if self._live.num_live and (is_varying or config.get("speculative_verify") == "rejection"):
            _log.warning(
                "%d requests go on in the next engine process; their answers stay valid, but may differ from those "
                "without the pause: on CUDA without batch_invariant, and with speculative_verify rejection, tokens "
                "depend on the steps in which they are computed",
                self._live.num_live,
            )


async def _replace(successions: Sequence[Succession], supervisor: Supervisor) -> None:
    try:
        for succession in successions:
            await succession.replace(supervisor)
    except ApiError as error:
        _log.error("%s", error)
