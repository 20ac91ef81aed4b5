"""Assemble an engine from the core and the leaves around any runner. Imports no torch."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial

from pagewood.engine.api import EngineConfig, Inbox, LoadAdapter, Outbox
from pagewood.engine.assembly.policies import ChosenPolicies, Policies, chosen
from pagewood.engine.assembly.steps.measured_steps import MeasuredChunk, StepForecast
from pagewood.engine.assembly.steps.stream_interval import IntervalOutbox
from pagewood.engine.assembly.subjects import SUBJECTS
from pagewood.engine.core.cache_keys import CacheKeys
from pagewood.engine.core.images import ImageEncoder, NoImages
from pagewood.engine.core.intake import Intake
from pagewood.engine.core.loop import Engine, EngineInfo, Observer, Runner, Stages
from pagewood.engine.core.masks.constrain import Compiler
from pagewood.engine.core.memory.adapters import AdapterPool, AdapterSource, SlotSharing
from pagewood.engine.core.memory.caches import NoPrefixCache, PrefixCache
from pagewood.engine.core.memory.divided_kv import AnyKV, DividedKV, PageRange
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.memory.page_groups import PageGroups, most_pages, num_frames_needed
from pagewood.engine.core.memory.retention import Retention
from pagewood.engine.core.memory.states import StatePlaces
from pagewood.engine.core.observe.expert_load import ExpertRows
from pagewood.engine.core.queue.deadlines import Deadlines
from pagewood.engine.core.queue.priority_preemption import PriorityPreemption
from pagewood.engine.core.queue.publishing import Publishing
from pagewood.engine.core.queue.quota_queue import QuotaQueue
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.queue.waiting import WaitingQueue
from pagewood.engine.core.reasons import Notes
from pagewood.engine.core.request import Request
from pagewood.engine.core.requirements import Requirements
from pagewood.engine.core.rest import Rest
from pagewood.engine.core.steps.batch_builder import BatchBuilder
from pagewood.engine.core.steps.chunks import Chunks
from pagewood.engine.core.steps.equal_chunks import EqualChunks
from pagewood.engine.core.steps.pacing import Pacing
from pagewood.engine.core.steps.plan import Planner
from pagewood.engine.core.steps.speculation import Drafting, Speculation
from pagewood.engine.core.steps.stage_turns import StageTurns
from pagewood.engine.core.vector_tail import VectorTail
from pagewood.engine.core.weights import ServedWeights
from pagewood.engine.observe.settings_log import log_settings
from pagewood.kvpool import PageAllocator
from pagewood.radixcache import LRU, CacheKey, QueueInformed, RadixCache
from pagewood.schedpolicy import (
    Lending,
    PreemptionGuard,
    Quota,
    Quotas,
    deserving,
)

_log = logging.getLogger(__name__)

_LOGGED_HISTORY = 1 << 20
"""Evicted tokens that are remembered if decisions are logged, so that the log explains misses."""

_SCORED_BYTES = 16 << 20
"""Memory for the logits of one prompt in a step, in bytes, if log probabilities of its tokens are wanted."""
_MAX_MASK_HELPERS = 7
"""Threads that fill masks beside the engine's own."""


def assemble(
    config: EngineConfig,
    *,
    info: EngineInfo,
    make_runner: Callable[[AnyKV], Runner],
    make_cache: Callable[[], PrefixCache] | None = None,
    allocator: PageAllocator | PageGroups | None = None,
    drafting: Drafting | None = None,
    compiler: Compiler | None = None,
    adapters: AdapterSource | None = None,
    drafts_constrained: bool = False,
    processors: Mapping[str, Callable[..., None]] | None = None,
    inbox: Inbox,
    outbox: Outbox,
    clock: Callable[[], float] = time.monotonic,
    observer: Observer | None = None,
    policies: Policies | None = None,
    expert_rows: ExpertRows | None = None,
    vector_tail: VectorTail | None = None,
    weights: ServedWeights | None = None,
    images: ImageEncoder | None = None,
) -> Engine:
    """Assemble an engine around any runner.

    Args:
        config: its policies and limits are used; model, device and memory are only logged.
        info: facts about the engine; `max_length` must fit into `num_pages`.
        make_runner: makes the runner; gets the KV space, for runners that check it.
        make_cache: makes empty prefix caches; None: a radix cache, or no cache if `config.prefix_cache` is false.
        allocator: what `page_allocator` returns, for caches that know the frames of pages; None: it is made here.
        drafting: decides how many tokens the runner drafts for each request; None: the runner drafts none.
        compiler: compiles grammars; None: requests with a grammar are refused.
        adapters: reads them for the runner, also those that the configuration names; None: there are none.
        drafts_constrained: see `Speculation`.
        processors: the functions that the runner calls for requests that name them; None: there are none.
        inbox: source of commands.
        outbox: destination of answers.
        clock: returns monotonic seconds.
        observer: hears what is decided; None: only the decision log does, if there is one.
        policies: of the caller's own; None: those that the configuration names.
        expert_rows: what the runner counts; None: it does not.
        vector_tail: what the model does with pooled states; None: nothing.
        weights: of the runner; None: they never change.
        images: makes rows of images for the runner; None: requests with images are refused.

    Raises:
        ValueError: `config.schedule_policy` is unknown, the order needs watches that the cache does not have, or the
            configuration says what a policy of the caller's own decides; or one of its adapters cannot be loaded.
        OSError: the decision log cannot be written.
    """
    own = policies or Policies()
    weights = weights or ServedWeights(None, why_fixed="its runner cannot change them")
    own.check(config)
    config = config.resolved()
    if config.decision_log is not None and config.prefix_cache and not config.cache_history_tokens:
        config = replace(config, cache_history_tokens=_LOGGED_HISTORY)
    usual = EngineConfig(device=config.device, max_running=config.max_running).resolved()
    defaults = {one.name: getattr(usual, one.name) for one in fields(usual)}
    log_settings(_log, config, SUBJECTS, defaults | {"max_running": EngineConfig(device=config.device).num_rows})
    page_size = info.page_size
    policy = chosen(config, own, page_size=page_size)
    log = None
    if config.decision_log is not None:
        from pagewood.engine.decision_log.writer import DecisionLog  # needs msgspec

        log = DecisionLog(config, info, clock)
        observer, clock = log.recorder, log.recorder.clock
        inbox, outbox = log.recorder.inbox(inbox), log.recorder.outbox(outbox)
        make_cache = None if make_cache is None else log.recorder.caches(make_cache)
        drafting = None if drafting is None else log.recorder.drafting(drafting)
        compiler = None if compiler is None else log.recorder.compiler(compiler)
        images = None if images is None else log.recorder.images(images)
        adapters = None if adapters is None else log.recorder.adapters(adapters)
        if weights.source is not None:
            weights.source = log.recorder.weights(weights.source)
    if allocator is None and info.num_pools == 1:
        allocator = page_allocator(config, info)
    pool = None if adapters is None or policy.slots is None else _adapter_pool(config, adapters, policy.slots)
    if make_cache is None:
        make_cache = partial(radix_cache, config, page_size, clock) if config.prefix_cache else NoPrefixCache
    make_space = partial(_space, config, info, make_cache=make_cache, adapters=pool, notes=observer, clock=clock)
    kv: AnyKV
    if allocator is not None:
        kv = make_space(allocator)
    else:
        _check_pools(info, policy)
        num_pages = info.num_pages // info.num_pools
        ranges = [PageRange(PageAllocator(num_pages), first=first) for first in range(0, info.num_pages, num_pages)]
        free_rows = list(range(config.num_rows - 1, -1, -1))
        kv = DividedKV([make_space(own, rank=rank, free_rows=free_rows) for rank, own in enumerate(ranges)])
    quotas = _quotas(config)
    waiting = WaitingQueue(
        order=policy.order,
        kv=kv,
        deferral=policy.deferral,
        lending=Lending[Request]() if config.prefix_cache else None,
        is_watching=policy.is_watching and not info.num_states,  # a watch does not know of snapshots
        quota_queue=None if quotas is None else QuotaQueue(quotas),
        notes=observer,
    )
    state = EngineState(waiting=waiting, rank=deserving, on_end=policy.reserve.on_end)
    has_shared = config.remote_cache is not None and kv.shared is not None
    publishing = Publishing(lambda: kv.shared, clock) if has_shared else None
    pacing, deadlines = _timing(config, policy, state, kv)
    stages = None
    if config.pipeline_parallel_size > 1:
        count = config.pipeline_parallel_size
        stages = Stages(turns=StageTurns(count + bool(config.overlap)), chunks=EqualChunks(count))
    planner = Planner(
        kv=kv,
        budget=policy.budget,
        reserve=policy.reserve,
        victim=policy.victim,
        skip_ahead=policy.skip_ahead,
        chunks=Chunks(
            max_scored=max(16, _SCORED_BYTES // (4 * info.vocab_size)),
            align=config.chunk_align,
            sizes=None if stages is None else stages.chunks,
        ),
        preemption=None
        if config.preemption_threshold is None
        else _priority_preemption(kv, config.preemption_threshold, observer),
        pace=None if config.target_step_s is None else pacing,
        turns=None if stages is None else stages.turns,
        notes=observer,
    )
    image_encoder = images or NoImages(config.why_no_images or "this engine takes text only")
    ends_early = config.role == "prefill"
    rest = Rest(
        state=state,
        kv=kv,
        keys=CacheKeys(make=CacheKey.of, short_length=info.short_length),
        weights=weights,
        images=image_encoder,
    )
    intake = Intake(
        state=state,
        kv=kv,
        requirements=Requirements(
            state=state,
            kv=kv,
            images=image_encoder,
            publishing=publishing,
            max_length=info.max_length,
            vocab_size=info.vocab_size,
            has_grammars=compiler is not None,
            processors=processors,
            vector_size=info.vector_size if vector_tail is None else vector_tail.size,
            expert_shape=info.expert_shape,
            state_size=info.vector_size if info.reports_states else 0,
            reports_kept=info.reports_kept,
            generates=info.generates,
            ends_early=ends_early,
        ),
        rest=rest,
        max_length=info.max_length,
        eos_token_ids=frozenset(info.eos_token_ids),
        seed=config.seed,
        compiler=compiler,
        vector_tail=vector_tail,
        low_priority_first=config.low_priority_first,
        max_queue_s=config.max_queue_s,
        max_live=None if config.max_queued is None else config.num_rows + config.max_queued,
        quotas=quotas,
        deadlines=deadlines,
        notes=observer,
        clock=clock,
        publishing=publishing,
        ends_early=ends_early,
        images=image_encoder,
    )
    runner = make_runner(kv)
    if log is not None:
        runner = log.recorder.runner(runner)
        log.begin(
            max_drafts=0 if drafting is None else drafting.max_tokens,
            drafts_constrained=drafts_constrained,
            has_grammars=compiler is not None,
            has_images=images is not None,
            has_adapters=adapters is not None,
            has_tiers=kv.tiers is not None,
            weights=None if weights.source is None else (weights.why_fixed, weights.why_awake),
        )
    return Engine(
        config=config,
        info=info,
        state=state,
        intake=intake,
        rest=rest,
        planner=planner,
        speculation=None
        if drafting is None
        else Speculation(drafting=drafting, kv=kv, drafts_constrained=drafts_constrained),
        kv=kv,
        builder=BatchBuilder(
            num_rows=config.num_rows,
            page_size=page_size,
            is_drafting=drafting is not None,
            groups=allocator if isinstance(allocator, PageGroups) else None,
            has_lengths=info.short_length is not None,
            adapters=pool,
            kv=kv if info.num_states else None,
        ),
        runner=runner,
        inbox=inbox,
        outbox=outbox if config.stream_interval == 1 else IntervalOutbox(outbox, config.stream_interval),
        clock=clock,
        pacing=pacing,
        num_mask_helpers=_num_mask_helpers(),
        observer=observer,
        expert_rows=expert_rows,
        publishing=publishing,
        stages=stages,
    )


def _space(
    config: EngineConfig,
    info: EngineInfo,
    allocator: PageAllocator | PageRange | PageGroups,
    *,
    rank: int = 0,
    free_rows: list[int] | None = None,
    make_cache: Callable[[], PrefixCache],
    adapters: AdapterPool | None,
    notes: Notes | None,
    clock: Callable[[], float],
) -> KVSpace:
    """Return the memory of an engine, or that of a rank where it is divided by request, which share `free_rows`."""
    groups = allocator if isinstance(allocator, PageGroups) else None
    states = retention = None
    if info.num_states:
        count = info.num_states // info.num_pools
        states = StatePlaces(count, page_size=info.page_size, interval=info.state_interval, first=rank * count)
    if config.retained_share:
        retention = Retention(
            num_pages=info.num_pages if groups is None else groups.num_ids,
            max_pages=int(allocator.num_pages * config.retained_share),
            max_s=config.max_retain_s,
            page_size=info.page_size,
            clock=clock,
            groups=groups,
        )
    return KVSpace(
        make_cache=make_cache,
        notes=notes,
        allocator=allocator,
        adapters=adapters,
        states=states,
        page_size=info.page_size,
        num_rows=config.num_rows,
        free_rows=free_rows,
        retention=retention,
    )


def _adapter_pool(config: EngineConfig, source: AdapterSource, sharing: SlotSharing) -> AdapterPool:
    """Return a pool with the adapters that the configuration names.

    Raises:
        ValueError: one of them cannot be loaded.
    """
    pool = AdapterPool(config.max_adapters, source=source, sharing=sharing)
    for name, folder in config.adapters:
        refusal = pool.load(LoadAdapter(request_id="", name=name, folder=folder))
        if refusal is not None:
            pool.close()
            raise ValueError(f"adapter {name} cannot be loaded: {refusal.message}")
    return pool


def _timing(
    config: EngineConfig, policy: ChosenPolicies, state: EngineState, kv: AnyKV
) -> tuple[Pacing | None, Deadlines | None]:
    """Return what measures steps, and what refuses requests that would be late; None: it is not asked for."""
    if config.target_step_s is None and not config.refuse_late:
        return None, None
    chunk = MeasuredChunk(config, kv.page_size)
    if not config.refuse_late:
        return Pacing(chunk), None
    assert policy.expectation is not None
    forecast = StepForecast(chunk, policy.expectation, config)
    return Pacing(chunk), Deadlines(state, kv, forecast, is_by_deadline=policy.is_by_deadline)


def _check_pools(info: EngineInfo, policy: ChosenPolicies) -> None:
    """Check what an engine needs whose pages are divided among ranks by request."""
    for name, number in (("num_pages", info.num_pages), ("num_states", info.num_states)):
        if number % info.num_pools:
            raise ValueError(f"{name} must be a multiple of num_pools {info.num_pools}, got {number}")
    if info.windows != (None,):
        raise ValueError(f"layers must have no window where pages are divided among ranks, got {info.windows}")
    num_tokens = info.num_pages // info.num_pools * info.page_size
    if info.max_length > num_tokens:
        raise ValueError(f"max_length must be at most {num_tokens}, the tokens of one rank, got {info.max_length}")
    policy.check_pools()


def page_allocator(config: EngineConfig, info: EngineInfo) -> PageAllocator | PageGroups:
    """Return what hands out pages: whole ones, or, where layers have windows, their frames in groups of layers.

    Raises:
        ValueError: a request of `max_length` does not fit.
    """
    if info.windows == (None,):
        return PageAllocator(info.num_pages)
    num_frames, num_ahead = info.num_pages * len(info.windows), config.max_chunk_tokens
    num_needed = num_frames_needed(info.windows, info.max_length, page_size=info.page_size, num_ahead=num_ahead)
    if num_needed > num_frames:
        raise ValueError(
            f"max_length must fit into {info.num_pages} pages, which have {num_frames} frames, got {info.max_length}, "
            f"which needs {num_needed}"
        )
    if None in info.windows:
        num_ids = most_pages(info.windows, num_frames)
    else:  # a page may then be cached without any memory of its own
        num_ids = num_frames + config.num_rows * -(-info.max_length // info.page_size)
    return PageGroups(
        info.windows,
        frames=PageAllocator(num_frames),
        ids=PageAllocator(num_ids),
        page_size=info.page_size,
        num_ahead=num_ahead,
        announces_pages=info.announces_pages,
    )


def radix_cache(config: EngineConfig, page_size: int, clock: Callable[[], float] = time.monotonic) -> RadixCache:
    """Return an empty cache with the eviction policy and the history of a configuration."""
    policy = QueueInformed(LRU()) if config.eviction_policy == "queue-lru" else LRU()
    return RadixCache(page_size, policy=policy, history_tokens=config.cache_history_tokens, clock=clock)


def _priority_preemption(kv: AnyKV, threshold: int, notes: Notes | None) -> PriorityPreemption:
    guard = PreemptionGuard[Request]()

    def choose(candidate: Request, running: Sequence[Request], num_missing: int) -> Sequence[Request]:
        return guard.choose(candidate, running, threshold, num_missing=num_missing)

    def able(candidate: Request, running: Sequence[Request]) -> Sequence[Request]:
        return guard.eligible(candidate, running, threshold)

    return PriorityPreemption(kv, choose, able=able, num_spared=lambda: guard.num_spared, notes=notes)


def _quotas(config: EngineConfig) -> Quotas | None:
    if not config.quotas:
        return None
    quotas = {
        one.tenant: Quota(
            max_running=one.max_running,
            max_tokens_in_flight=one.max_tokens_in_flight,
            max_kv_tokens=one.max_kv_tokens,
        )
        for one in config.quotas
    }
    return Quotas(quotas, default=quotas.pop("*", None))


def _num_mask_helpers() -> int:
    """Return how many other cores can fill masks."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MAX_MASK_HELPERS, num_cores - 1)
