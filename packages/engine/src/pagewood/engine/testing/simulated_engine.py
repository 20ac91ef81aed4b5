"""An engine on a simulated device, in a few lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pagewood.engine.api import EngineConfig
from pagewood.engine.assemble import assemble
from pagewood.engine.assembly.steps.draft_control import draft_control
from pagewood.engine.core.loop import Engine, EngineInfo, Pending, Runner
from pagewood.engine.core.masks.constrain import Compiler
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.testing.echo import EchoRunner
from pagewood.engine.testing.made_up_tokens import MadeUpTokens
from pagewood.engine.testing.simulated_device import DeviceClock, SimulatedDevice, StepSeconds, WallClock


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """An engine, its device, and where commands go in and answers come out."""

    engine: Engine
    device: SimulatedDevice
    inbox: MemoryInbox
    outbox: MemoryOutbox

    def run_until_idle(self) -> None:
        """Do steps until no request waits, runs or drains."""
        pending: Pending | None = self.engine.advance(None)
        while pending is not None or self.is_busy:
            pending = self.engine.advance(pending)

    @property
    def is_busy(self) -> bool:
        """Whether a request that was taken from the inbox has not ended."""
        counters = self.engine.counters()
        return counters.num_waiting + counters.num_running + counters.num_draining > 0

    def close(self) -> None:
        """End the engine and the device; no step may be in flight."""
        self.engine.close()


def simulated_engine(
    config: EngineConfig,
    *,
    step_s: float | StepSeconds,
    max_length: int = 4096,
    vocab_size: int = 32_000,
    eos_token_ids: tuple[int, ...] = (),
    num_pages: int | None = None,
    model: Literal["made-up", "echo"] = "made-up",
    acceptance: float = 0.5,
    compiler: Compiler | None = None,
    device_clock: DeviceClock | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SimulatedEngine:
    """Return an engine whose device computes made-up tokens for a given time.

    Args:
        config: policies and limits; the loop is that of `overlap` and `num_continuous_decode_steps`. Drafts come as
            `speculative` says, fixed or adaptive; which method is named does not matter.
        step_s: seconds of each step, or how long a batch takes (`seconds_by` makes that of a `StepModel`).
        max_length: longest prompt plus output of a request, tokens.
        vocab_size: token ids are below it.
        eos_token_ids: tokens that end a request.
        num_pages: pages of KV memory; None: enough for `max_running` requests of `max_length` tokens.
        model: made-up: tokens are hashes of seed and position, which takes microseconds; echo: of all KV before them,
            which takes milliseconds and finds wrong KV.
        acceptance: probability with which a draft is accepted.
        compiler: compiles grammars; None: requests with a grammar are refused.
        device_clock: real or virtual time of the device; None: real.
        clock: of the engine.
    """
    page_size = config.page_size
    if num_pages is None:
        num_pages = config.num_rows * -(-max_length // page_size)
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    device: list[SimulatedDevice] = []

    def make_runner(_: AnyKV) -> Runner:
        if model == "echo":
            runner = EchoRunner(
                num_rows=config.num_rows, max_length=max_length, num_pages=num_pages, page_size=page_size,
                vocab_size=vocab_size, guess_quality=acceptance,
            )  # fmt: skip
        else:
            runner = MadeUpTokens(num_rows=config.num_rows, vocab_size=vocab_size, acceptance=acceptance)
        device.append(SimulatedDevice(runner, step_s=step_s, clock=device_clock or WallClock()))
        return device[0]

    engine = assemble(
        config,
        info=EngineInfo(
            model_name="simulated",
            max_length=max_length,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            num_pages=num_pages,
            page_size=page_size,
        ),
        make_runner=make_runner,
        drafting=draft_control(config),
        compiler=compiler,
        inbox=inbox,
        outbox=outbox,
        clock=clock,
    )
    return SimulatedEngine(engine=engine, device=device[0], inbox=inbox, outbox=outbox)
