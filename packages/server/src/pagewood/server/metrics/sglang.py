"""The series under SGLang's names, with its labels and bounds, for dashboards that expect SGLang."""

from __future__ import annotations

from pagewood.server.metrics import bounds
from pagewood.server.metrics.facts import Facts
from pagewood.server.metrics.families import Families, coarser, counted

_SCHEDULER = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}


def sglang_families(facts: Facts) -> list[Families]:
    """Return the series of SGLang 0.5.23's scheduler and tokenizer that apply here.

    `_priorities` has further ones.
    """
    scheduler = Families("sglang:", {"model_name": facts.model_name, **_SCHEDULER})
    tokenizer = Families("sglang:", {"model_name": facts.model_name})
    _scheduler(scheduler, facts)
    _priorities(scheduler, facts)
    _tokenizer(tokenizer, facts)
    return [scheduler, tokenizer]


def _scheduler(families: Families, facts: Facts) -> None:
    found, counters, page_size = facts.measurement, facts.counters, facts.model.page_size
    throughput, hit_rate = facts.recent()
    num_pages, num_free = counters.get("num_pages", 0), counters.get("num_free_pages", 0)
    num_used = (num_pages - found.num_available_pages) * page_size if facts.is_measured else 0
    for name, text, value in (
        ("num_running_reqs", "The number of running requests.", counters.get("num_running", 0)),
        ("num_queue_reqs", "The number of requests in the waiting queue.", counters.get("num_waiting", 0)),
        ("num_grammar_queue_reqs", "The number of requests in the grammar waiting queue.", found.num_compiling),
        ("gen_throughput", "The generation throughput (token/s).", throughput),
        ("cache_hit_rate", "The prefix cache hit rate.", hit_rate),
        ("token_usage", "The token usage.", facts.usage),
        ("full_token_usage", "The token usage for full attention layers.", facts.usage),
        ("num_used_tokens", "The number of used tokens.", num_used),
        ("kv_used_tokens", "Number of actively used token slots in the KV cache pool.", num_used),
        ("kv_available_tokens", "Number of free token slots in the KV cache pool.", num_free * page_size),
        (
            "kv_evictable_tokens", "Number of evictable token slots in the KV cache pool.",
            facts.num_evictable_pages * page_size,
        ),
        ("max_total_num_tokens", "Number of token slots in the KV cache pool.", num_pages * page_size),
    ):  # fmt: skip
        families.gauge(name, text, value)
    families.gauge(
        "cache_config_info", "Facts about the KV cache.",
        [({"page_size": str(page_size), "num_pages": str(facts.model.num_pages)}, 1)],
    )  # fmt: skip
    if found.adapters is not None:
        used, total = len(found.adapters.running), found.adapters.num_slots
        families.gauge("lora_pool_slots_used", "Adapters that running requests use.", used)
        families.gauge("lora_pool_slots_total", "Adapters that requests may use at the same time.", total)
        families.gauge("lora_pool_utilization", "The quotient of both.", used / total)
    families.counter("num_retracted_requests", "Total number of retracted requests.", counters.get("num_preempted", 0))
    families.counter(
        "evicted_tokens", "Number of tokens evicted from the prefix cache.", found.num_evicted_pages * page_size
    )
    families.histogram(
        "queue_time_seconds", "Histogram of queueing time in seconds.",
        [({}, coarser(facts.summed("queue_s"), bounds.SGLANG_QUEUE))],
    )  # fmt: skip
    drafts = facts.status.speculation
    if drafts is not None:
        num_checks = max((0, *drafts.drafted_by_position))
        mean = 1 + drafts.num_accepted / num_checks if num_checks else 0.0
        rate = drafts.num_accepted / drafts.num_drafted if drafts.num_drafted else 0.0
        families.gauge("spec_accept_length", "Mean acceptance length of speculative decoding.", mean)
        families.gauge("spec_accept_rate", "Speculative acceptance rate.", rate)


def _priorities(families: Families, facts: Facts) -> None:
    """Add the effects of priorities, which SGLang itself shows only as a label of some gauges."""
    families.counter(
        "priority_preemption_count", "Running requests that went back to the queue, by priority.",
        [({"priority": priority}, num) for priority, num in facts.measurement.preempted.items()],
    )  # fmt: skip
    families.counter(
        "priority_starvation_count", "Waiting requests that others had passed as often as they may.",
        facts.counters.get("num_starved", 0),
    )  # fmt: skip
    families.histogram(
        "priority_waiting_time_seconds", "Histogram of queueing time in seconds, by priority.",
        [
            ({"priority": priority}, coarser(found, bounds.SGLANG_QUEUE))
            for priority, found in facts.queue_s_by_priority().items()
        ],
    )  # fmt: skip


def _tokenizer(families: Families, facts: Facts) -> None:
    requests, ended = facts.requests, facts.ended()
    families.counter("prompt_tokens", "Number of prefill tokens processed.", facts.num_prompt_tokens)
    families.counter("generation_tokens", "Number of generation tokens processed.", facts.num_output_tokens)
    families.counter(
        "cached_tokens", "Number of cached prompt tokens.", [({"cache_source": "total"}, facts.num_cached_tokens)]
    )
    families.counter("num_requests", "Number of requests processed.", ended["stop"] + ended["length"])
    families.counter("num_aborted_requests", "Number of requests aborted.", ended["abort"])
    for name, text, fine, coarse in (
        (
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.",
            facts.summed("first_token_s"), bounds.SGLANG_FIRST_TOKEN,
        ),
        (
            "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", counted(requests.token_s),
            bounds.SGLANG_TOKEN,
        ),
        (
            "e2e_request_latency_seconds", "Histogram of End-to-end request latency in seconds",
            facts.summed("request_s"), bounds.SGLANG_REQUEST,
        ),
        (
            "prompt_tokens_histogram", "Histogram of prompt token length.", counted(requests.prompt_tokens),
            bounds.SGLANG_TOKENS,
        ),
        (
            "generation_tokens_histogram", "Histogram of generation token length.", counted(requests.output_tokens),
            bounds.SGLANG_TOKENS,
        ),
        (
            "uncached_prompt_tokens_histogram", "Histogram of uncached prompt token length.",
            counted(requests.computed_tokens), bounds.SGLANG_TOKENS,
        ),
    ):  # fmt: skip
        families.histogram(name, text, [({}, coarser(fine, coarse))])
