"""The composition root: from a configuration to an engine; the only module that knows the leaves and the runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from pagewood.engine.api import EngineConfig, Inbox, Outbox
from pagewood.engine.batch import BatchBuilder
from pagewood.engine.intake import Intake
from pagewood.engine.kv import KVSpace, NoPrefixCache
from pagewood.engine.loop import Engine, EngineInfo, Runner
from pagewood.engine.plan import Planner
from pagewood.engine.state import EngineState
from pagewood.kvpool import PageAllocator
from pagewood.radixcache import RadixCache
from pagewood.schedpolicy import Budget, NewTokenRatio, SkipAhead, choose_victim, order_named

_log = logging.getLogger(__name__)


def assemble(
    config: EngineConfig,
    *,
    info: EngineInfo,
    make_runner: Callable[[KVSpace], Runner],
    inbox: Inbox,
    outbox: Outbox,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Put the parts together around any runner.

    Args:
        config: its policies and limits are used; model, device and memory are `info`'s and the runner's business.
        info: what the engine is; `max_length` must fit into `num_pages`.
        make_runner: gets the KV space, for runners that audit it.
        inbox: where commands come from.
        outbox: where answers go.
        clock: seconds, monotonic.
    """
    page_size = info.page_size
    kv = KVSpace(
        make_cache=partial(RadixCache, page_size) if config.prefix_cache else NoPrefixCache,
        allocator=PageAllocator(info.num_pages),
        page_size=page_size,
        num_rows=config.max_running,
    )
    state = EngineState()
    planner = Planner(
        kv=kv,
        order=order_named(config.schedule_policy),
        budget=Budget(
            max_step_tokens=config.chunked_prefill_size + config.max_running,
            max_chunk_tokens=config.chunked_prefill_size,
            max_running=config.max_running,
            max_prefills=config.max_prefills,
        ),
        reserve=NewTokenRatio(init=min(1.0, 0.7 * config.schedule_conservativeness)),
        victim=choose_victim,
        skip_ahead=SkipAhead(max_skipped=8, max_passes=32),
        defer_repeats=config.prefix_cache,
    )
    intake = Intake(
        state=state,
        kv=kv,
        max_length=info.max_length,
        vocab_size=info.vocab_size,
        eos_token_ids=frozenset(info.eos_token_ids),
        seed=config.seed,
    )
    return Engine(
        info=info,
        state=state,
        intake=intake,
        planner=planner,
        kv=kv,
        builder=BatchBuilder(config.max_running),
        runner=make_runner(kv),
        inbox=inbox,
        outbox=outbox,
        clock=clock,
        overlap=config.overlap,
    )
