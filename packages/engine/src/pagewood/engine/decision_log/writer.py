"""Writes the turns of an engine to a log, in a thread of its own."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread

import msgspec

from pagewood.engine.api import EngineConfig
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.decision_log.frames import Header
from pagewood.engine.decision_log.log_file import LogFile
from pagewood.engine.decision_log.plain import Renaming, names_in, plain_config
from pagewood.engine.decision_log.recorder import Recorder
from pagewood.engine.decision_log.turn import Turn, TurnEncoder

_log = logging.getLogger(__name__)

_MOST_WAITING = 100_000
"""Turns that wait to be written; a disk that is slower than that ends the log."""
_GATHER_S = 0.05
"""How long turns are gathered before they are written: waking a thread for each turn would delay the engine's
thread."""
_CLOSE_S = 30.0
"""How long the end of the engine waits for the rest."""


class DecisionLog:
    """A log of one engine. Invariant: the engine never waits for it, except when it is closed.

    If the log cannot be written (the disk is full, or too slow), that is logged once, and the engine goes on without.

    Args:
        config: of the engine, resolved, with a `decision_log`.
        info: facts about the engine.
        clock: of the engine.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, config: EngineConfig, info: EngineInfo, clock: Callable[[], float]) -> None:
        assert config.decision_log is not None
        self._config = config
        self._info = info
        self._clock = clock
        self._file = LogFile(Path(config.decision_log), max_bytes=int(config.decision_log_mb * 1_000_000))
        self._renaming = Renaming(
            info.vocab_size,
            is_real=config.decision_log_tokens,
            keeps_names=config.schedule_policy == "fair",
            known=names_in(config),
        )
        self._encoder = TurnEncoder(self._renaming)
        self._turns: deque[Turn] = deque()
        """Turns that are not written yet."""  # written by: _put, _run
        self._has_turns = Event()
        self._is_closing = Event()
        self._is_over = False  # written by: _put, _run
        self._header: Header | None = None  # written by: begin
        self._thread = Thread(target=self._run, name="decision-log", daemon=True)
        self.recorder = Recorder(self._put, close=self._close, clock=clock)
        """The source of the written turns."""

    def begin(
        self,
        *,
        max_drafts: int,
        drafts_constrained: bool,
        has_grammars: bool,
        has_images: bool,
        has_tiers: bool,
        has_adapters: bool,
        weights: tuple[str, str] | None,
    ) -> None:
        """Write the header, and begin to write turns; called before the first turn.

        Args:
            max_drafts: see `Header`, as for all that follow.
            drafts_constrained: as in `assemble`.
            has_grammars: whether it got a compiler.
            has_images: whether it got an encoder of images.
            has_tiers: whether the cache has lower tiers.
            has_adapters: whether it got a source of adapters.
            weights: why they are fixed, and why they stay awake; None: they have no source.
        """
        info = asdict(self._info)
        info["eos_token_ids"] = self._renaming.ids(self._info.eos_token_ids)
        self._header = Header(
            run=os.urandom(8).hex(),
            first=0,
            unix_s=time.time(),
            clock_s=self._clock(),
            config=plain_config(self._config),
            info=info,
            max_drafts=max_drafts,
            drafts_constrained=drafts_constrained,
            has_grammars=has_grammars,
            has_images=has_images,
            has_adapters=has_adapters,
            weights=weights,
            has_tiers=has_tiers,
            has_tokens=self._config.decision_log_tokens,
        )
        self._file.append(self._header)
        self._thread.start()

    def _put(self, turn: Turn) -> None:
        if turn.is_empty or self._is_over:
            return
        if len(self._turns) > _MOST_WAITING:
            self._is_over = True
            _log.error("the decision log ends: %d turns wait to be written", _MOST_WAITING)
            return
        self._turns.append(turn)
        if not self._has_turns.is_set():
            self._has_turns.set()

    def _run(self) -> None:
        try:
            while not (self._is_closing.is_set() and not self._turns):
                self._has_turns.wait()
                self._is_closing.wait(_GATHER_S)
                self._has_turns.clear()
                while self._turns:
                    self._write(self._turns.popleft())
                    time.sleep(0)  # the engine's thread may want to go on
                self._file.flush()
            self._file.close()
        except Exception:
            self._is_over = True
            _log.exception("the decision log ends: it could not be written")
            self._file.drop()

    def _write(self, turn: Turn) -> None:
        if self._file.is_full:
            assert self._header is not None
            self._file.begin(msgspec.structs.replace(self._header, first=self._encoder.number))
            self._encoder.restart()
        self._file.append(self._encoder.encode(turn))

    def _close(self) -> None:
        self._is_closing.set()
        self._has_turns.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
