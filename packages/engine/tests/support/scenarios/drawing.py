"""Draws scenarios, and adds to them what an engine can be asked for."""

from __future__ import annotations

import random
from dataclasses import replace

from pagewood.engine.api import (
    EngineConfig,
    Grammar,
    PoolingParams,
    SamplingParams,
    TenantQuota,
)
from pagewood.engine.core.memory.page_groups import num_frames_needed
from pagewood.engine.weight_commands import SleepTag
from pagewood.schedpolicy import ORDERS
from pagewood.schedpolicy.orders.names import MATCH_ORDERS
from scenarios.scenario import VOCAB_SIZE, AdapterLoad, Arrival, Scenario, Update


def with_stages(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return a scenario whose model is cut into stages, with some of its traffic in several steps at once."""
    config = replace(
        scenario.config, pipeline_parallel_size=rng.choice((2, 2, 3, 4)), num_continuous_decode_steps=1,
        target_step_s=None, refuse_late=False, chunked_prefill_size=rng.choice((4, 16, 24, None)), chunk_align=1,
    )  # fmt: skip
    return replace(scenario, config=config, long_step_tokens=0)


def random_scenario(rng: random.Random, *, overlap: bool, bursts: float = 0.3) -> Scenario:
    """Draw a scenario: shared prefixes, bursts that repeat one, tiny pools, chunks, priorities that change, namespaces,
    aborts, and requests that can never fit.

    Args:
        rng: source of all choices.
        overlap: whether the engine launches a step before it retires the one before; if not, two thirds of the
            scenarios launch several steps in which the same requests decode.
        bursts: probability that the requests come almost at once, most of them with one of a few prompts.
    """
    page_size = rng.choice((1, 4, 16))
    is_burst = rng.random() < bursts
    max_length = rng.randint(60, 120) if is_burst else rng.randint(8, 90)
    fewest_pages = -(-max_length // page_size)
    num_pages = rng.randint(fewest_pages, fewest_pages * 3)
    longest_stem = max_length * 2 // 3 if is_burst else max_length
    stems = [[rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, longest_stem))] for _ in range(3)]
    arrivals: list[Arrival] = []
    for _ in range(rng.randint(1, 12)):
        stem = rng.choice(stems)
        tail = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(0, 6))]
        prompt = (stem[: len(stem) if is_burst else rng.randint(0, len(stem))] + tail) or [1]
        at_step = rng.randint(0, 3 if is_burst else 25)
        arrivals.append(
            Arrival(
                at_step=at_step,
                abort_at_step=at_step + rng.randint(0, 20) if rng.random() < 0.2 else None,
                prompt=tuple(prompt),
                sampling=SamplingParams(
                    max_tokens=rng.choice((None, rng.randint(1, 40))),
                    temperature=rng.choice((0.0, 1.0)),
                    seed=rng.randrange(1000),
                    ignore_eos=rng.random() < 0.5,
                    stop_token_ids=(7,) if rng.random() < 0.2 else (),
                ),
                priority=rng.choice((0, 0, 1)),
                namespace=rng.choice((None, None, "tenant")),
                priority_from_step=(rng.randint(-1, 2), at_step + rng.randint(0, 20)) if rng.random() < 0.3 else None,
            )
        )
    return Scenario(
        config=EngineConfig(
            page_size=page_size,
            max_running=rng.randint(1, 6),
            chunked_prefill_size=rng.choice((48, 64, 128) if is_burst else (1, 3, 16, 64)),
            max_prefills=rng.randint(1, 3),
            joint_prefill_tokens=(None, 1, 8)[num_pages % 3],
            prefill_first=rng.random() < 0.2,
            schedule_policy=(policy := rng.choice([name for name in ORDERS if not name.startswith("priority")])),
            schedule_weights=(("tenant", 2.0), ("1", 3.0)) if num_pages % 2 and policy in ("fair", "wrr") else (),
            schedule_ageing_s=(None, None, 0.0, 10.0)[max_length % 4],
            target_step_s=(None, 1.0)[len(arrivals) % 2],
            schedule_conservativeness=rng.choice((0.05, 0.05, 1.0)),
            overlap=overlap,
            num_continuous_decode_steps=1 if overlap else (1, 2, 5)[max_length % 3],
            prefix_cache=rng.random() < 0.9,
            eviction_policy="queue-lru" if num_pages % 3 == 0 else "lru",
        ),
        num_pages=num_pages,
        max_length=max_length,
        arrivals=tuple(arrivals),
        eager_steps=frozenset(rng.sample(range(60), rng.randint(0, 30))),
        leaves_out=num_pages % 2 == 0,
        long_step_tokens=(0, 1, 6)[max_length % 3],
    )


def with_pools(scenario: Scenario, rng: random.Random, *numbers: int) -> Scenario:
    """Return the scenario with pages that some ranks divide by request; a request just fits each of them."""
    config, num_pools = scenario.config, rng.choice(numbers or (2, 2, 3))
    fewest_pages = -(-scenario.max_length // config.page_size)
    return replace(
        scenario,
        config=replace(
            config,
            max_running=rng.randint(2, 9),
            schedule_policy="fcfs" if config.schedule_policy in MATCH_ORDERS else config.schedule_policy,
            eviction_policy="lru",
            tensor_parallel_size=num_pools,
            enable_dp_attention=True,
        ),
        num_pages=rng.choice((fewest_pages, fewest_pages, scenario.num_pages)) * num_pools,
        num_pools=num_pools,
    )


def with_windows(scenario: Scenario, rng: random.Random, *, has_whole: bool | None = None) -> Scenario:
    """Return the scenario for a model with windows, in a pool that may not hold the longest request whole.

    With `has_whole`, some layers see all positions; without it, none does; None: either.
    """
    window = rng.randint(1, scenario.max_length)
    some = ((None, window), (None, window, window, window), (None, None, window))
    every = ((window,), (window, window))
    windows = rng.choice((*some, *every) if has_whole is None else some if has_whole else every)
    config = scenario.config
    num_frames = num_frames_needed(
        windows, scenario.max_length, page_size=config.page_size, num_ahead=config.max_chunk_tokens
    )
    fewest_pages = -(-num_frames // len(windows))
    return replace(scenario, windows=windows, num_pages=rng.randint(fewest_pages, 2 * fewest_pages))


def with_states(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario for a model with recurrent layers, with few or many places for their states."""
    num_rows, page_size = -(-scenario.config.num_rows // scenario.num_pools), scenario.config.page_size
    return replace(
        scenario,
        num_states=rng.choice((num_rows, num_rows + 1, 2 * num_rows, 5 * num_rows)) * scenario.num_pools,
        state_interval=page_size * rng.choice((1, 1, 2, 5)),
    )


def with_drafts(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario for an engine that speculates, with a drafter of random quality."""
    return replace(scenario, max_drafts=rng.choice((1, 2, 4, 8)), guess_quality=rng.choice((0.0, 0.5, 0.9, 1.0)))


def with_interruptions(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with pauses, preemption by priority, and a limit on the time in the queue."""
    starts = rng.sample(range(40), rng.randint(0, 3))
    return replace(
        scenario,
        config=replace(
            scenario.config,
            preemption_threshold=rng.choice((None, 0, 0, 1)),
            low_priority_first=rng.random() < 0.3,
            max_queue_s=rng.choice((None, None, rng.randint(3, 60))),
        ),
        pauses=tuple((start, start + rng.randint(1, 12), rng.random() < 0.5) for start in starts),
    )


def with_urgency(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with three priorities, of which the higher ones come later, and prompts in small parts.

    In a burst, requests are then parked behind the prompts of others of lower priority.
    """
    arrivals = tuple(
        replace(arrival, priority=rng.choice((0, 10, 20)) if arrival.at_step else 0, namespace=None)
        for arrival in scenario.arrivals
    )
    config = replace(
        scenario.config, chunked_prefill_size=rng.choice((4, 8)), max_running=rng.randint(3, 6), prefix_cache=True
    )
    return replace(scenario, arrivals=arrivals, config=config)


def with_limits(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with quotas of tenants, refusals of late and of too many requests, and another mixing."""
    largest = scenario.max_length

    def limit(low: int, high: int) -> int | None:
        return rng.choice((None, rng.randint(low, high)))

    def quota(tenant: str) -> TenantQuota:
        return TenantQuota(tenant, limit(1, 3), limit(largest // 2, 2 * largest), limit(largest // 3, largest))

    presets = ("decode-first", "stall-free", "prefill-first") if not scenario.config.prefill_first else (None,)
    return replace(
        scenario,
        config=replace(
            scenario.config,
            quotas=rng.choice(((quota("*"),), (quota("tenant"),), (quota("tenant"), quota("*")))),
            schedule_preset=rng.choice((None, *presets)),
            refuse_late=rng.random() < 0.5,
            max_queued=limit(0, 5),
            stream_interval=rng.choice((1, 1, 2, 5)),
        ),
        deadline_after_s=rng.choice((-1.0, 10.0, 30.0)),
    )


def with_holds(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with requests that are paused alone, retention under a small bound, and aborts.

    Some requests are aborted while they are paused; in some scenarios all are at once.
    """
    arrivals: list[Arrival] = []
    for arrival in scenario.arrivals:
        start = arrival.at_step + rng.randint(0, 15)
        hold = (start, start + rng.randint(1, 15), rng.random() < 0.5) if rng.random() < 0.6 else None
        aborts = hold is not None and rng.random() < 0.15
        arrivals.append(
            replace(
                arrival,
                hold=hold,
                abort_at_step=rng.randint(*hold[:2]) if hold is not None and aborts else arrival.abort_at_step,
                retain_s=rng.choice((None, None, 0.0, 3.0, 40.0, 1e6)),
            )
        )
    share = rng.choice((0.0, 0.3, 0.5, 1.0)) if scenario.config.prefix_cache else 0.0
    steps = rng.sample(range(50), rng.randint(0, 4))
    return replace(
        scenario,
        arrivals=tuple(arrivals),
        config=replace(scenario.config, retained_share=share, max_retain_s=rng.choice((5.0, 1e6))),
        retains=tuple((step, rng.randrange(len(arrivals)), rng.choice((0.0, 4.0, 1e6))) for step in steps),
        abort_all_at=rng.randint(1, 30) if rng.random() < 0.1 else None,
    )


def with_logprobs(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with requests that ask for log probabilities of their output, their prompt, both or none,
    with some for what filters leave, and for experts and hidden states from some position on."""
    arrivals = tuple(
        replace(
            arrival,
            sampling=replace(
                arrival.sampling,
                logprobs=(num_top := rng.choice((None, 0, 2))),
                kept_tokens=None if not num_top else 4 + len(arrival.prompt),
                prompt_logprobs=rng.choice((None, None, 0, 1)),
                prompt_logprobs_start=rng.choice((1, 1, 2, 7)),
                routed_experts_from=rng.choice((None, -1, 0, len(arrival.prompt))),
                hidden_states_from=rng.choice((None, -1, 0, len(arrival.prompt) // 2)),
            ),
        )
        for arrival in scenario.arrivals
    )
    return replace(scenario, arrivals=arrivals)


def with_pooling(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with requests that ask for a vector, about half of them."""
    arrivals = tuple(
        replace(arrival, pooling=_random_pooling(rng) if rng.random() < 0.5 else None) for arrival in scenario.arrivals
    )
    return replace(scenario, arrivals=arrivals)


def _random_pooling(rng: random.Random) -> PoolingParams:
    return PoolingParams(
        kind=rng.choice(("last", "mean", "mean", "cls")),
        normalize=rng.random() < 0.5,
        dimensions=rng.choice((None, None, 1, 3)),
    )


def random_grammar(rng: random.Random) -> Grammar:
    """Draw a grammar: a seed, the longest text, after how many tokens its matcher fails, and whether it is wrong."""
    length = rng.choice((1, 5, 12, 40))
    fails_after = rng.randrange(20) if rng.random() < 0.1 else 999
    text = f"{rng.randrange(100)} {length} {fails_after} {int(rng.random() < 0.1)}"
    return Grammar(kind="regex", text=text, after=rng.choice(((), (), (), ("<5>",), ("<9><9>",))))


def with_grammars(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with requests that have a grammar, most of them, and sometimes log probabilities."""
    arrivals = tuple(
        replace(
            arrival,
            sampling=replace(
                arrival.sampling,
                grammar=random_grammar(rng) if rng.random() < 0.7 else None,
                logprobs=rng.choice((None, None, 1)),
            ),
        )
        for arrival in scenario.arrivals
    )
    return replace(scenario, arrivals=arrivals)


def with_adapters(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with few slots for several adapters, which are replaced and unloaded while requests run.

    Some compute from invocation tokens on, which some prompts have.
    """

    invocations: list[tuple[int, ...]] = [()]
    for _ in range(rng.randint(0, 3)):
        prompt = rng.choice(scenario.arrivals).prompt
        start = rng.randrange(min(len(prompt), 8))
        invocations.append(tuple(prompt[start : start + rng.randint(1, 3)]))
    names = [f"adapter {number}" for number in range(rng.randint(1, 5))]
    contents = [rng.randrange(1, 1 << 40) for _ in range(6)]
    loads = [
        AdapterLoad(
            at_step=0, until_step=0, name=name, content=rng.choice(contents), invocation=rng.choice(invocations)
        )
        for name in names
    ]
    num_slots = rng.randint(1, 4)
    for name in names:
        step = 0
        for _ in range(rng.randint(0, 3)):
            step += rng.randint(1, 12)
            loads.append(
                AdapterLoad(
                    at_step=step,
                    until_step=step + rng.choice((0, 0, 3, 9)),
                    name=name,
                    content=rng.choice((*contents, 0)),
                    invocation=rng.choice(invocations),
                    is_pinned=num_slots > len(names) and rng.random() < 0.3,
                )
            )
            step = loads[-1].until_step
    arrivals = tuple(
        replace(arrival, at_step=arrival.at_step + 1, adapter=rng.choice((None, *names)))
        for arrival in scenario.arrivals
    )
    config = replace(scenario.config, max_adapters=num_slots)
    return replace(scenario, arrivals=arrivals, config=config, adapters=tuple(loads))


def with_updates(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with updates of the weights, which are read while requests run, and with naps behind some."""
    updates: list[Update] = []
    contents = [rng.randrange(1, 1 << 40) for _ in range(3)]
    step = rng.randint(0, 6)
    for _ in range(rng.randint(1, 5)):
        updates.append(
            Update(
                at_step=step,
                until_step=step + rng.choice((0, 0, 2, 7)),
                content=rng.choice(contents),
                old_kv=rng.choice(("drop", "drop", "recompute")),
            )
        )
        step = updates[-1].until_step + rng.randint(4, 20)
    naps: list[tuple[int, int, SleepTag]] = []
    for update, end in zip(updates, (*(one.at_step for one in updates[1:]), step + 20), strict=True):
        start = update.until_step + 1
        if end - start > 9 and rng.random() < 0.5:  # no update begins before it is over
            naps.append((start, start + rng.randint(0, 4), rng.choice(("kv_cache", "kv_cache", "weights"))))
    return replace(scenario, updates=tuple(updates), naps=tuple(naps))
