"""An engine on a device that takes a modelled time for each step."""

from __future__ import annotations

from pagewood.engine.api import EngineConfig, Inbox, Outbox, Progress
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import Engine, EngineInfo, Runner
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.testing.made_up_tokens import MadeUpTokens
from pagewood.engine.testing.simulated_device import SimulatedDevice, seconds_by
from pagewood.schedpolicy import StepModel

STEPS = StepModel(base_s=0.06, prefill_s=0.0004, decode_s=0.001, kv_s=0.000002, pair_s=0.0)
"""Long beside the work of HTTP and of the engines, also where other programs run."""
VOCAB_SIZE = 256
MAX_LENGTH = 1024


def modelled_engine(config: EngineConfig, *, inbox: Inbox, outbox: Outbox, progress: Progress | None = None) -> Engine:
    """Return an engine whose tokens are made up and whose steps take the time of `STEPS`.

    Raises:
        ValueError: `config` leaves the size of the KV memory open.
    """
    config = config.resolved()
    if config.max_total_tokens is None:
        raise ValueError("max_total_tokens must be given, got None")
    info = EngineInfo(
        model_name="modelled",
        max_length=MAX_LENGTH,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        num_pages=config.max_total_tokens // config.page_size,
        page_size=config.page_size,
    )

    def make_runner(_: AnyKV) -> Runner:
        tokens = MadeUpTokens(num_rows=config.num_rows, vocab_size=VOCAB_SIZE)
        return SimulatedDevice(tokens, step_s=seconds_by(STEPS))

    return assemble(config, info=info, make_runner=make_runner, inbox=inbox, outbox=outbox)
