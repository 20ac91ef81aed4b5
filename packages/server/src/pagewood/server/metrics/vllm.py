"""The series under vLLM's names, with its labels and bounds, for dashboards and routers that expect vLLM."""

from __future__ import annotations

import time

from pagewood.server.metrics import bounds
from pagewood.server.metrics.facts import Facts
from pagewood.server.metrics.families import Families, coarser, counted

REASONS = ("stop", "length", "abort", "error")


def vllm_families(facts: Facts) -> Families:
    """Return the series of vLLM 0.33 that apply here."""
    families = Families("vllm:", {"model_name": facts.model_name, "engine": "0"})
    found, counters, requests = facts.measurement, facts.counters, facts.requests
    families.gauge(
        "num_requests_running", "Number of requests in model execution batches.", counters.get("num_running", 0)
    )
    num_waiting = counters.get("num_waiting", 0) + found.num_compiling
    num_deferred = found.num_parked + found.num_at_quota + found.num_recalling + found.num_compiling
    families.gauge("num_requests_waiting", "Number of requests waiting to be processed.", num_waiting)
    families.gauge(
        "num_requests_waiting_by_reason",
        "Number of waiting requests by reason.",
        [({"reason": "capacity"}, max(0, num_waiting - num_deferred)), ({"reason": "deferred"}, num_deferred)],
    )
    families.gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", facts.usage)
    families.counter("prefix_cache_queries", "Prefix cache queries, in tokens.", facts.num_prompt_tokens)
    families.counter("prefix_cache_hits", "Prefix cache hits, in tokens.", facts.num_cached_tokens)
    families.counter("prompt_tokens_cached", "Number of cached prompt tokens.", facts.num_cached_tokens)
    families.counter("num_preemptions", "Cumulative number of preemptions.", counters.get("num_preempted", 0))
    families.counter("prompt_tokens", "Number of prefill tokens processed.", facts.num_prompt_tokens)
    families.counter("generation_tokens", "Number of generation tokens processed.", facts.num_output_tokens)
    ended = facts.ended()
    counts = {reason: ended[reason] for reason in REASONS}
    counts["error"] += ended["refused"]
    families.counter(
        "request_success",
        "Count of successfully processed requests.",
        [({"finished_reason": reason}, num) for reason, num in counts.items()],
    )
    for name, text, fine, coarse in (
        ("time_to_first_token_seconds", "First token.", facts.summed("first_token_s"), bounds.VLLM_FIRST_TOKEN),
        ("inter_token_latency_seconds", "Inter-token latency.", counted(requests.token_s), bounds.VLLM_TOKEN),
        (
            "request_time_per_output_token_seconds", "Time per output token of a request.",
            counted(requests.per_token_s), bounds.VLLM_TOKEN,
        ),
        ("e2e_request_latency_seconds", "End to end latency.", facts.summed("request_s"), bounds.VLLM_REQUEST),
        ("request_queue_time_seconds", "Time in the WAITING phase.", facts.summed("queue_s"), bounds.VLLM_REQUEST),
        ("request_inference_time_seconds", "Time in the RUNNING phase.", counted(requests.inference_s),
         bounds.VLLM_REQUEST),
        ("request_prefill_time_seconds", "Time in PREFILL phase.", counted(requests.prefill_s), bounds.VLLM_REQUEST),
        ("request_decode_time_seconds", "Time in the DECODE phase.", counted(requests.decode_s), bounds.VLLM_REQUEST),
        ("request_params_n", "The n request parameter.", counted(requests.num_answers), bounds.VLLM_NUM_ANSWERS),
    ):  # fmt: skip
        families.histogram(name, text, [({}, coarser(fine, coarse))])
    token_bounds = bounds.one_two_five(facts.model.max_length)
    for name, text, histogram in (
        ("request_prompt_tokens", "Number of prefill tokens processed.", requests.prompt_tokens),
        ("request_generation_tokens", "Number of generation tokens processed.", requests.output_tokens),
        ("request_params_max_tokens", "The max_tokens request parameter.", requests.max_tokens),
        ("request_prefill_kv_computed_tokens", "New KV tokens computed in prefill.", requests.computed_tokens),
    ):
        families.histogram(name, text, [({}, coarser(counted(histogram), token_bounds))])
    families.histogram("iteration_tokens_total", "Number of tokens per engine step.", [({}, found.step_tokens)])
    _speculation(families, facts)
    config = facts.model.config
    families.gauge(
        "cache_config_info",
        "Information of the LLMEngine CacheConfig",
        [
            (
                {
                    "block_size": str(facts.model.page_size),
                    "num_gpu_blocks": str(facts.model.num_pages),
                    "cache_dtype": str(config.get("kv_dtype", "auto")),
                    "enable_prefix_caching": str(config.get("prefix_cache", True)),
                },
                1,
            )
        ],
    )
    use = found.adapters
    names = {
        "max_lora": str(0 if use is None else use.num_slots),
        "running_lora_adapters": "" if use is None else ",".join(use.running),
        "waiting_lora_adapters": "" if use is None else ",".join(use.waiting),
    }
    told_s = facts.metrics.started_s if use is None else time.time()  # routers take the latest of several series
    families.gauge("lora_requests_info", "Running stats on lora requests.", [(names, told_s)])
    return families


def _speculation(families: Families, facts: Facts) -> None:
    found = facts.status.speculation
    if found is None:
        return
    families.counter("spec_decode_num_drafts", "Number of spec decoding drafts.", max((0, *found.drafted_by_position)))
    families.counter("spec_decode_num_draft_tokens", "Number of draft tokens.", found.num_drafted)
    families.counter("spec_decode_num_accepted_tokens", "Number of accepted tokens.", found.num_accepted)
    families.counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens per draft position.",
        [({"position": str(place)}, num) for place, num in enumerate(found.accepted_by_position)],
    )
