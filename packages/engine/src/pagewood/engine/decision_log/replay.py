"""Repeats the decisions of a log: the core and its policies, around a runner that gives the logged results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pagewood.engine.api import Command, Delta
from pagewood.engine.core.loop import Engine, EngineInfo
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch, num_rows_of
from pagewood.engine.core.messages.logprobs import Logprobs
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.request import Request
from pagewood.engine.core.weights import ServedWeights
from pagewood.engine.decision_log.differences import difference
from pagewood.engine.decision_log.frames import Header, Record, Result
from pagewood.engine.decision_log.log_file import Log
from pagewood.engine.decision_log.plain import PROCESSOR, Renaming, command_of, config_of
from pagewood.engine.decision_log.recorded_grammars import ReplayedCompiler
from pagewood.engine.decision_log.recorded_tiers import ReplayedCache
from pagewood.engine.decision_log.recorded_work import LoggedWork, ReplayedAdapters, ReplayedImages, ReplayedWeights
from pagewood.engine.decision_log.recorder import Recorder
from pagewood.engine.decision_log.turn import Turn, TurnEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of a replay."""

    num_records: int
    """Records whose decisions were repeated, including the one that differs."""
    num_plans: int
    difference: str | None
    """The first difference in words; None: every decision is the same, byte for byte."""


def replay(path: Path, *, assemble: Callable[..., Engine]) -> Replayed:
    """Repeat the decisions of the log at `path`, and compare them.

    Args:
        path: of the log.
        assemble: `pagewood.engine.assemble.assemble`; an engine with policies of your own needs a `partial` of it that
            has new ones of the same kind.

    Raises:
        ValueError: the log cannot be read, or its beginning was dropped.
        FileNotFoundError: there is no such file.
    """
    return _Replay(Log.at(path), assemble).run()


class _Replay:
    """A log that is replayed: source of all inputs, and judge of all decisions."""

    def __init__(self, log: Log, assemble: Callable[..., Engine]) -> None:
        header = log.header
        if header.first:
            raise ValueError(
                f"log must have its beginning to be replayed, got one from record {header.first} on: "
                "raise decision_log_mb"
            )
        self._frames = log.frames()
        next(self._frames)
        self._header = header
        self._record: Record | None = None
        """The current record; None before the first and after the last."""  # written by: _advance
        self._following: Record | None = None  # written by: _advance
        self._restarts = False
        """Whether a file begins with the record that follows."""  # written by: _advance
        self._clock: deque[float] = deque()
        self._now_s = header.clock_s
        self._launches: deque[str] = deque()
        self._results: deque[Result] = deque()
        self._drafts: deque[list[int] | None] = deque()
        self._cache: dict[str, deque[Any]] = {}
        self._exchanges: deque[bool] = deque()
        self._towers: deque[int] = deque()
        self._work = LoggedWork()
        self._answers: dict[tuple[int, int, str], Any] = {}
        """Unusual answers of matchers, by grammar, tokens before and method."""
        self._names: dict[int, str] = {}
        """Ids of requests, by arrival."""
        self._num_records = 0
        self._num_plans = 0
        self._difference: str | None = None
        self._encoder = TurnEncoder(Renaming(header.info["vocab_size"], is_real=True, keeps_names=True))
        self._recorder = Recorder(self._judge, close=lambda: None, clock=lambda: self._now_s)
        self._num_top = np.full(config_of(header.config).num_rows, -1, np.int32)
        """By row: alternatives that are reported with each token; -1: no report."""  # contents written by: launch
        self._fetch()
        if self._following is not None:  # what was loaded before the first turn
            self._work.results.update(self._following.ends)
        self._engine = self._assembled(assemble)

    def run(self) -> Replayed:
        """Replay to the end, or to the first difference."""
        while not self._is_over:
            try:
                self._engine.run(lambda: self._is_over)
            except KeyboardInterrupt:  # of the log
                continue
            except Exception:
                self._recorder.end_turn()  # earlier decisions explain it
                if self._difference is None:
                    raise
        if self._difference is None:
            self._judge(self._recorder.turn)
        return Replayed(num_records=self._num_records, num_plans=self._num_plans, difference=self._difference)

    @property
    def _is_over(self) -> bool:
        return self._following is None or self._difference is not None

    def _assembled(self, assemble: Callable[..., Engine]) -> Engine:
        header, config = self._header, config_of(self._header.config)
        info: dict[str, Any] = {**header.info, "eos_token_ids": tuple(header.info["eos_token_ids"])}
        info["windows"] = tuple(info.get("windows", (None,)))
        return assemble(
            replace(config, decision_log=None),
            info=EngineInfo(**info),
            make_runner=self._as_runner,
            make_cache=(lambda: ReplayedCache(header.info["page_size"], self._answer)) if header.has_tiers else None,
            drafting=_ReplayedDrafting(header.max_drafts, self.next_drafts) if header.max_drafts else None,
            compiler=ReplayedCompiler(self._work, self._answers) if header.has_grammars else None,
            adapters=ReplayedAdapters(self._work) if header.has_adapters else None,
            images=ReplayedImages(self._work, self._read_tower) if header.has_images else None,
            weights=None if header.weights is None else self._weights(*header.weights),
            drafts_constrained=header.drafts_constrained,
            processors={PROCESSOR: _unchanged},
            inbox=self._recorder.inbox(self),
            outbox=self._recorder.outbox(_Nowhere()),
            clock=self._read_clock,
            observer=self._recorder,
        )

    def _weights(self, why_fixed: str, why_awake: str) -> ServedWeights:
        source = ReplayedWeights(self._work, lambda: self._exchanges.popleft() if self._exchanges else True)
        return ServedWeights(source, why_fixed=why_fixed, why_awake=why_awake)

    # As an inbox.

    def receive(self, *, timeout_s: float | None) -> Sequence[Command]:
        """Go on to the next record, and return its commands."""
        self._advance()
        return () if self._record is None else [command_of(*command) for command in self._record.commands]

    # As a runner.

    def _as_runner(self, kv: AnyKV) -> _Replay:
        return self

    def launch(self, batch: Batch) -> _ReplayedStep:
        """Return a step whose result is in the log, or fail as in the log."""
        fault = self._launches.popleft() if self._launches else ""
        if fault == "interrupt":
            raise KeyboardInterrupt
        if fault:
            raise RuntimeError("as in the log")
        self._num_top[batch.admitted_rows()] = -1
        if batch.reports is not None:
            self._num_top[batch.reports.rows] = batch.reports.num_top
        num_top = np.minimum(self._num_top[batch.rows[batch.sampled]], self._header.info["vocab_size"])
        return _ReplayedStep(batch, num_top, self)

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Layers, and experts of a token in each."""
        return tuple(self._header.info.get("expert_shape") or ())

    @property
    def vector_size(self) -> int:
        """Elements of a hidden state."""
        return self._header.info["vector_size"]

    def close(self) -> None:
        """Do nothing."""

    def next_result(self) -> Result | None:
        """Return the next result of the current record, if there is one."""
        return self._results.popleft() if self._results else None

    def next_drafts(self) -> list[int] | None:
        """Return the next decision about draft lengths; None: there are no drafts."""
        return self._drafts.popleft() if self._drafts else None

    def _answer(self, method: str) -> Any:
        answers = self._cache.get(method)
        return answers.popleft() if answers else None

    def _read_clock(self) -> float:
        if self._clock:
            self._now_s = self._clock.popleft()
        return self._now_s

    def _read_tower(self) -> int:
        return self._towers.popleft() if self._towers else 0

    def _advance(self) -> None:
        record = self._record = self._following
        if record is None:
            return
        if self._restarts:
            self._encoder.restart()
        self._num_records += 1
        self._num_plans += len(record.plans)
        self._clock, self._launches = deque(record.clock), deque(record.launches)
        self._results, self._drafts = deque(record.results), deque(record.drafts)
        self._cache = {method: deque(answers) for method, answers in record.cache.items()}
        self._exchanges, self._towers = deque(record.exchanges), deque(record.towers)
        self._work.results.update(record.ends)
        self._names.update(record.names)
        for index, place, method, answer in record.matchers:
            self._answers[index, place, method] = answer
        self._fetch()

    def _fetch(self) -> None:
        frame = next(self._frames, None)
        self._restarts = isinstance(frame, Header)
        if isinstance(frame, Header):
            frame = next(self._frames, None)
        assert not isinstance(frame, Header)
        self._following = frame

    def _judge(self, turn: Turn) -> None:
        """Compare the decisions of a turn that is over with those of the current record."""
        if self._record is None or self._difference is not None:
            return
        found = self._encoder.encode(turn)
        if found.decisions != self._record.decisions:
            self._difference = difference(self._record, found, names=self._names, num_plans=self._num_plans)


class _ReplayedStep:
    """A launched step; its drafts are not needed."""

    def __init__(self, batch: Batch, num_top: Int32, source: _Replay) -> None:
        """Expect the next result of the log.

        Args:
            batch: of the step.
            num_top: `[S]`, alternatives that are reported with the tokens of each sampled grant; -1: none are reported.
            source: of the result.
        """
        self._batch = batch
        self._num_top = num_top
        self._source = source

    def drafts(self) -> Sequence[Sequence[int]]:
        """Return no drafts."""
        return [()] * len(self._batch.constrained)

    def constrain(self, masks: Int32) -> None:
        """Do nothing."""

    def wait(self) -> StepResult:
        """Return the result of the log, or fail as in the log; the log may end before it."""
        result = self._source.next_result()
        if result is not None and result.fault == "interrupt":
            raise KeyboardInterrupt
        if result is not None and result.fault:
            raise RuntimeError("as in the log")
        if result is None:  # the log ends here
            result = Result(counts=np.zeros(len(self._num_top), "<i4").tobytes())
        tokens = np.frombuffer(result.tokens, "<i4").astype(np.int32)
        ones = np.ones(len(tokens), np.int32)
        counts = ones if result.counts is None else np.frombuffer(result.counts, "<i4").astype(np.int32)
        if len(counts) != len(self._num_top):  # a different step than in the log
            result, tokens, counts = Result(), tokens[:0], np.zeros(len(self._num_top), np.int32)
        pooled, num_elements = len(self._batch.pooled), self._source.vector_size
        is_number = np.array(result.pooled if len(result.pooled) == pooled else [True] * pooled, np.bool_)
        num_top, scored = np.repeat(self._num_top, counts), self._batch.scored
        routed, stated = (self._num_rows(entries, counts) for entries in (self._batch.routed, self._batch.stated))
        return StepResult(
            tokens=tokens,
            counts=counts,
            excluded=result.excluded,
            num_drafted=np.maximum(counts - 1, 0),
            logprobs=_logprobs(tokens, num_top) if (num_top >= 0).any() else None,
            prompt_logprobs=_logprobs(
                np.zeros(int(scored[:, 1].sum()), np.int32), np.repeat(scored[:, 2], scored[:, 1])
            )
            if len(scored)
            else None,
            vectors=np.where(is_number[:, None], np.zeros(num_elements), np.nan).astype(np.float32) if pooled else None,
            experts=np.zeros((routed, *self._source.expert_shape), np.int32) if len(self._batch.routed) else None,
            states=np.zeros((stated, num_elements), np.float32) if len(self._batch.stated) else None,
        )

    def _num_rows(self, entries: Int32, counts: Int32) -> int:
        batch = self._batch
        return int(num_rows_of(entries, batch.counts, batch.sampled, batch.num_promised, counts).sum())


def _logprobs(tokens: Int32, num_top: Int32) -> Logprobs:
    """Return made-up log probabilities of tokens, with this many alternatives each."""
    num, most = len(tokens), max(0, int(num_top.max(initial=0)))
    return Logprobs(
        tokens=tokens,
        values=np.zeros(num, np.float32),
        ranks=np.zeros(num, np.int32),
        num_top=num_top.astype(np.int32),
        top_ids=np.zeros((num, most), np.int32),
        top_values=np.zeros((num, most), np.float32),
    )


class _ReplayedDrafting:
    """Decides as in the log; satisfies `core.steps.speculation.Drafting`."""

    reason = "replayed"
    is_far = False

    def __init__(self, max_tokens: int, next_drafts: Callable[[], list[int] | None]) -> None:
        self.max_tokens = max_tokens
        self._next = next_drafts
        self._lengths: list[int] = []  # written by: rests

    def rests(self, num_requests: int) -> bool:
        """Return whether there were no drafts."""
        found = self._next()
        self._lengths = found or []
        return found is None

    def lengths(self, requests: Sequence[Request], num_other_tokens: int) -> Sequence[int]:
        """Return the lengths; 0 for requests that are not in the log."""
        return (self._lengths + [0] * len(requests))[: len(requests)]

    def observe(self, *arguments: Any, **options: Any) -> None:
        """Do nothing."""

    def forget(self, request: Request) -> None:
        """Do nothing."""


class _Nowhere:
    """An outbox."""

    def send(self, deltas: Sequence[Delta]) -> None:
        """Drop them."""


def _unchanged(tokens: Any, logits: Any) -> None:
    """Stand for any logits processor."""
