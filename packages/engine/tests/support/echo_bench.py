"""An engine with the echo model and a clock that the test sets, stepped by the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import Command, Delta, EngineConfig, FinishReason, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import Engine, EngineInfo, Pending, Runner, StepHandle
from pagewood.engine.core.masks.constrain import Compiler
from pagewood.engine.core.memory.caches import PrefixCache
from pagewood.engine.core.memory.divided_kv import AnyKV, DividedKV
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.steps.speculation import Drafting
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.testing import EchoRunner, oracle_tokens
from pagewood.engine.testing.simulated_device import StepSeconds

PAGE, MAX_LENGTH, VOCAB = 4, 64, 50

MakeCaches = Callable[[NDArray[np.uint64]], Callable[[], PrefixCache]]
"""KV memory -> a function that makes prefix caches for it."""


def echo_engine(
    *,
    num_pages: int = 32,
    page_size: int = PAGE,
    max_length: int = MAX_LENGTH,
    vocab_size: int = VOCAB,
    max_running: int = 2,
    make_runner: Callable[[AnyKV], Runner] | None = None,
    info: Mapping[str, Any] | None = None,
    parts: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Engine, MemoryInbox, MemoryOutbox]:
    """Return an engine with the echo model, or with another runner, and its links.

    `info` are further fields of `EngineInfo`, `parts` what is given to `assemble`, and `options` the configuration.
    """
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    config = EngineConfig(page_size=page_size, max_running=max_running, **options)

    def echo(kv: AnyKV) -> Runner:
        return EchoRunner(
            num_rows=config.num_rows, max_length=max_length, num_pages=num_pages, page_size=page_size,
            vocab_size=vocab_size, held_pages=kv.held_pages,
        )  # fmt: skip

    engine: Engine = assemble(
        config,
        info=EngineInfo(
            model_name="echo", max_length=max_length, vocab_size=vocab_size, eos_token_ids=(), num_pages=num_pages,
            page_size=page_size, **(info or {}),
        ),
        make_runner=make_runner or echo, inbox=inbox, outbox=outbox, **(parts or {}),
    )  # fmt: skip
    return engine, inbox, outbox


class EchoBench:
    """An engine of small size. After every call of `step`, the accounting of its memory is right.

    `now_s` is the time of its clock. With `step_s` it passes while steps are computed.
    """

    def __init__(
        self,
        *,
        num_pages: int = 32,
        num_pools: int = 1,
        max_running: int = 2,
        max_length: int = MAX_LENGTH,
        compiler: Compiler | None = None,
        make_caches: MakeCaches | None = None,
        drafting: Drafting | None = None,
        clock: Callable[[], float] | None = None,
        step_s: StepSeconds | None = None,
        **options: Any,
    ) -> None:
        self.now_s = 0.0  # written by: echo_bench
        self.num_pages = num_pages
        memory = np.empty(num_pages * PAGE, np.uint64)

        def make_runner(kv: AnyKV) -> Runner:
            runner = EchoRunner(
                num_rows=EngineConfig(max_running=max_running, **options).num_rows, max_length=max_length,
                num_pages=num_pages, page_size=PAGE, vocab_size=VOCAB, held_pages=kv.held_pages, memory=memory,
                requests=lambda: self.state.holders, num_pools=num_pools,
            )  # fmt: skip
            return runner if step_s is None else _TimedRunner(self, runner, step_s)

        self.engine, self.inbox, self.outbox = echo_engine(
            num_pages=num_pages, max_length=max_length, max_running=max_running, make_runner=make_runner,
            info={"num_pools": num_pools},
            parts={
                "make_cache": None if make_caches is None else make_caches(memory), "compiler": compiler,
                "drafting": drafting, "drafts_constrained": True, "clock": clock or (lambda: self.now_s),
            },
            **options,
        )  # fmt: skip
        kv = self.engine._kv  # pyright: ignore[reportPrivateUsage]
        self.spaces = kv.spaces if isinstance(kv, DividedKV) else (kv,)
        self.kv: KVSpace = self.spaces[0]
        self.state = self.engine._state  # pyright: ignore[reportPrivateUsage]
        self.pending: Pending | None = None
        self.deltas: dict[str, list[Delta]] = {}

    def step(self, *commands: Command) -> None:
        """Give commands and advance the engine once."""
        for command in commands:
            self.inbox.put(command)
        self.pending = self.engine.advance(self.pending)
        for delta in self.outbox.take():
            self.deltas.setdefault(delta.request_id, []).append(delta)
        violation = self.engine.violation()
        assert violation is None, violation

    def steps(self, number: int) -> None:
        """Advance the engine several times."""
        for _ in range(number):
            self.step()

    def until(self, holds: Callable[[], object], *, limit: int = 200) -> None:
        """Advance the engine until something holds."""
        for _ in range(limit):
            if holds():
                return
            self.step()
        raise AssertionError(f"not reached: {self.engine.counters()}")

    def answer(self, submit: Submit) -> Delta:
        """Submit a request, wait for its end, and return its last answer."""
        self.step(submit)
        self.until(lambda: self.finish(submit.request_id))
        return self.deltas[submit.request_id][-1]

    def tokens(self, name: str) -> list[int]:
        """Return the tokens of a request so far."""
        return [token for delta in self.deltas.get(name, []) for token in delta.tokens]

    def finish(self, name: str) -> FinishReason | None:
        """Return why a request has ended."""
        return self.deltas[name][-1].finish if name in self.deltas else None

    def check_empty(self) -> None:
        """Check that no request holds memory: all pages are free, or cached without a lock."""
        counters = self.engine.counters()
        assert (counters.num_running, counters.num_waiting, counters.num_draining, counters.num_held) == (0, 0, 0, 0)
        assert counters.num_free_pages + counters.num_cached_pages == self.num_pages
        assert self.kv.cache.num_locked == counters.num_retained_pages
        assert self.kv.num_free_rows == self.engine.config.num_rows
        assert self.state.by_id == {}


class _TimedRunner:
    """Lets the clock of a bench pass while a step is waited for; for requests without grammars."""

    def __init__(self, bench: EchoBench, runner: Runner, step_s: StepSeconds) -> None:
        self._bench = bench
        self._runner = runner
        self._step_s = step_s

    def launch(self, batch: Batch) -> _TimedStep:
        return _TimedStep(self._bench, self._runner.launch(batch), self._step_s(batch))

    def close(self) -> None:
        self._runner.close()


class _TimedStep:
    def __init__(self, bench: EchoBench, step: StepHandle, seconds: float) -> None:
        self._bench = bench
        self._step = step
        self._left_s = seconds

    def wait(self) -> StepResult:
        self._bench.now_s += self._left_s
        self._left_s = 0.0
        return self._step.wait()


def submit(name: str, prompt: Sequence[int], *, max_tokens: int | None = 30, **fields: Any) -> Submit:
    """Return a greedy request."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, grammar=fields.pop("grammar", None))
    return Submit(
        request_id=name, tokens=np.array(prompt, "<i4").tobytes(), sampling=sampling, carry=name.encode(), **fields
    )


def expected(prompt: Sequence[int], max_tokens: int = 30, *, max_length: int = MAX_LENGTH) -> list[int]:
    """Return what such a request must be answered with."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return oracle_tokens(prompt, sampling, vocab_size=VOCAB, stop_ids=frozenset(), max_length=max_length)
