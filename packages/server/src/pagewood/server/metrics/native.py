"""The series under `pagewood_`."""

from __future__ import annotations

from pagewood.engine.weight_commands import SLEEP_TAGS
from pagewood.engine.weight_spans import FIRST_VERSION
from pagewood.server.metrics.facts import Facts
from pagewood.server.metrics.families import Families, counted
from pagewood.server.metrics.metrics import Metrics
from pagewood.server.metrics.processes import ProcessUsage
from pagewood.server.metrics.requests import Account
from pagewood.server.replicas.fleet_status import FleetStatus
from pagewood.server.requests.status import EngineState

PREFIX = "pagewood_"


def native_families(facts: Facts) -> Families:
    """Return the series of a model under our own names."""
    families = Families(PREFIX, {"model_name": facts.model_name})
    _engine(families, facts)
    _replicas(families, facts)
    _memory(families, facts)
    _steps(families, facts)
    _speculation(families, facts)
    _experts(families, facts)
    _requests(families, facts)
    _held(families, facts)
    return families


def process_families(metrics: Metrics, usage: dict[str, ProcessUsage], *, model_name: str | None) -> Families:
    """Return the series of HTTP and of the processes under our own names; they have the name of the only model."""
    families = Families(PREFIX, {} if model_name is None else {"model_name": model_name})
    _server(families, metrics, usage)
    return families


def _engine(families: Families, facts: Facts) -> None:
    """Add the state of the engine and its queue."""
    found, counters, status = facts.measurement, facts.counters, facts.status
    families.gauge("engine_up", "Whether the engine serves.", float(status.state is EngineState.READY))
    families.gauge(
        "engine_state",
        "1 for the state of the engine.",
        [({"state": state.value}, float(status.state is state)) for state in EngineState],
    )
    families.gauge(
        "engine_seconds_since_pulse", "Time since the engine's last sign of life.", status.seconds_since_pulse or 0.0
    )
    families.gauge("engine_seconds_in_step", "How long the present step has taken, if it is long.", status.step_s)
    families.gauge("num_requests_running", "Requests that hold a row.", counters.get("num_running", 0))
    families.gauge("num_requests_waiting", "Requests that are queued.", counters.get("num_waiting", 0))
    families.gauge("num_requests_draining", "Ended requests that a step still reads.", counters.get("num_draining", 0))
    num_waiting = counters.get("num_waiting", 0)
    num_capacity = max(0, num_waiting - found.num_parked - found.num_at_quota - found.num_recalling)
    families.gauge(
        "num_requests_waiting_by_reason",
        "Requests that are not running by why they wait: for room (capacity), for the prompt of another request "
        "(repeated_prompt), for other requests of a tenant at its limit (quota), for KV from a lower tier (recall), or "
        "for their grammar (grammar).",
        [
            ({"reason": "capacity"}, num_capacity),
            ({"reason": "repeated_prompt"}, found.num_parked),
            ({"reason": "quota"}, found.num_at_quota),
            ({"reason": "recall"}, found.num_recalling),
            ({"reason": "grammar"}, found.num_compiling),
        ],
    )
    for state, counts in (("waiting", found.queue.waiting), ("running", found.queue.running)):
        families.gauge(
            f"num_requests_{state}_by_priority",
            f"Requests that are {state}, by priority.",
            [({"priority": priority}, num) for priority, num in counts.items()],
        )
    families.gauge("oldest_waiting_seconds", "Age of the oldest waiting request.", found.queue.oldest_s)
    families.counter("preemptions", "Running requests that went back to the queue.", counters.get("num_preempted", 0))
    families.counter(
        "preemptions_declined",
        "Waiting requests for which no running request was preempted, because each had been preempted before.",
        counters.get("num_spared", 0),
    )
    families.counter(
        "requests_starved",
        "Waiting requests that did not fit and that others had passed as often as they may; then none passes them.",
        counters.get("num_starved", 0),
    )
    families.counter(
        "preemptions_by_priority",
        "Running requests that went back to the queue, by priority.",
        [({"priority": priority}, num) for priority, num in found.preempted.items()],
    )
    families.counter(
        "violations", "How often the accounting of KV memory was found wrong.", counters.get("num_violations", 0)
    )


def _replicas(families: Families, facts: Facts) -> None:
    """Add what tells several engines apart; all other series have their sums."""
    status = facts.status
    if not isinstance(status, FleetStatus):
        return
    labelled = [({"replica": str(number)}, one) for number, one in enumerate(status.replicas)]
    families.gauge(
        "replica_up", "Whether an engine serves.",
        [(labels, float(one.state is EngineState.READY)) for labels, one in labelled],
    )  # fmt: skip
    families.gauge(
        "replica_outdated", "Whether an engine gets no requests because its weights are not those of the others.",
        [(labels, float(bool(one.outdated))) for labels, one in labelled],
    )  # fmt: skip
    for state in ("running", "waiting"):
        families.gauge(
            f"replica_requests_{state}", f"Requests that are {state} on an engine.",
            [(labels, one.counters.get(f"num_{state}", 0)) for labels, one in labelled],
        )  # fmt: skip
    families.gauge(
        "replica_free_pages", "Pages of KV memory of an engine that are free.",
        [(labels, one.counters.get("num_free_pages", 0)) for labels, one in labelled],
    )  # fmt: skip
    families.gauge(
        "router_requests_waiting", "Requests that wait for a place on any engine.", status.router.num_waiting
    )


def _memory(families: Families, facts: Facts) -> None:
    """Add the KV memory, the prefix cache and its tiers."""
    found, counters, model = facts.measurement, facts.counters, facts.model
    families.gauge(
        "kv_cache_usage_perc", "Share of the KV memory that requests hold, 1 is all; evictable pages are free.",
        facts.usage,
    )  # fmt: skip
    num_free, num_pages = counters.get("num_free_pages", 0), counters.get("num_pages", 0)
    num_cached, num_evictable = counters.get("num_cached_pages", 0), facts.num_evictable_pages
    families.gauge(
        "kv_pages",
        "Pages of KV memory: free, cached and evictable, cached and in use, or private to a request.",
        [
            ({"state": "free"}, num_free),
            ({"state": "evictable"}, num_evictable),
            ({"state": "shared"}, max(0, num_cached - num_evictable)),
            ({"state": "private"}, max(0, num_pages - num_free - num_cached)),
        ],
    )
    if facts.status.free_pages_by_rank:
        families.gauge(
            "kv_rank_free_pages", "Free pages of each rank, where ranks divide KV memory by request.",
            [({"rank": str(rank)}, num) for rank, num in enumerate(facts.status.free_pages_by_rank)],
        )  # fmt: skip
    families.gauge("kv_page_tokens", "Tokens of a page.", model.page_size)
    config = model.config
    families.gauge(
        "cache_config_info",
        "Facts about the KV memory; 1.",
        [
            (
                {
                    "page_size": str(model.page_size),
                    "num_pages": str(model.num_pages),
                    "page_bytes": str(model.page_bytes),
                    "prefix_cache": str(config.get("prefix_cache", "")),
                    "kv_dtype": str(config.get("kv_dtype", "")),
                    "max_length": str(model.max_length),
                },
                1,
            )
        ],
    )
    families.gauge(
        "weights_info", "The version of the weights; 1.",
        [({"version": facts.status.weight_version or FIRST_VERSION}, 1)],
    )  # fmt: skip
    use = facts.measurement.adapters
    if use is not None:
        families.gauge("adapter_slots", "Adapters that requests may use at the same time.", use.num_slots)
        families.gauge("adapter_slots_used", "Adapters that running requests use.", len(use.running))
        families.gauge(
            "adapters", "Adapters of live requests, by whether these run or wait; 1.",
            [
                ({"adapter": name, "state": state}, 1)
                for state, names in (("running", use.running), ("waiting", use.waiting)) for name in names
            ],
        )  # fmt: skip
    families.gauge(
        "asleep", "Whether weights, KV memory or only the steps sleep, so that nothing is computed.",
        [({"what": tag}, int(tag in facts.status.asleep)) for tag in SLEEP_TAGS],
    )  # fmt: skip
    if model.rank_places:
        families.gauge(
            "rank_info", "The node of each process that computes the model; 1.",
            [({"rank": str(rank), "node": place}, 1) for rank, place in enumerate(model.rank_places)],
        )  # fmt: skip
    labelled = [(_labels(account), account) for account in facts.requests.accounts]
    families.counter(
        "prefix_cache_queries", "Prompt tokens that were looked up.",
        [(labels, account.num_prompt_tokens) for labels, account in labelled],
    )  # fmt: skip
    families.counter(
        "prefix_cache_hits", "Prompt tokens that were cached.",
        [(labels, account.num_cached_tokens) for labels, account in labelled],
    )  # fmt: skip
    families.counter(
        "prefix_cache_requests", "Requests by why no more of their prompt was cached.",
        [({"cause": cause}, num) for cause, num in facts.requests.causes.items()],
    )  # fmt: skip
    families.counter(
        "prefix_cache_missed_tokens", "Prompt tokens that were not cached, by cause.",
        [({"cause": cause}, num) for cause, num in facts.requests.missed_tokens.items()],
    )  # fmt: skip
    families.counter("kv_evicted_tokens", "Cached tokens that were evicted.", found.num_evicted_pages * model.page_size)
    families.counter(
        "tier_tokens",
        "Tokens copied between the tiers of the cache, by what happened to them; a state counts as the pages it fills.",
        [({"event": name.removeprefix("num_")}, num * model.page_size) for name, num in found.tiers.items()],
    )  # fmt: skip


def _steps(families: Families, facts: Facts) -> None:
    """Add steps and their stages."""
    found = facts.measurement
    families.counter("engine_steps", "Forward passes.", facts.counters.get("num_steps", 0))
    families.counter(
        "engine_tokens", "Positions computed, by whether they belong to a prompt.",
        [({"kind": "prefill"}, found.num_prefill_tokens), ({"kind": "decode"}, found.num_decode_tokens)],
    )  # fmt: skip
    families.counter(
        "engine_stage_seconds",
        "Time of the engine's thread by what it did; the rest of the time it was idle.",
        [({"stage": stage}, seconds) for stage, seconds in found.stage_s.items()],
    )
    families.histogram("step_seconds", "Time of a step.", [({}, found.step_s)])
    families.histogram("step_tokens", "Positions of a step.", [({}, found.step_tokens)])


def _speculation(families: Families, facts: Facts) -> None:
    """Add the counts of drafts; none without speculation."""
    found = facts.status.speculation
    if found is None:
        return
    families.counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.", found.num_drafted)
    families.counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", found.num_accepted)
    by_position = zip(found.drafted_by_position, found.accepted_by_position, strict=True)
    numbered = [({"position": str(place)}, counts) for place, counts in enumerate(by_position)]
    families.counter(
        "spec_decode_num_draft_tokens_per_pos", "Draft tokens by position.",
        [(labels, counts[0]) for labels, counts in numbered],
    )  # fmt: skip
    families.counter(
        "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.",
        [(labels, counts[1]) for labels, counts in numbered],
    )  # fmt: skip
    families.counter(
        "spec_decode_seconds", "Time of drafts, and of the rest of all steps.",
        [({"part": "draft"}, found.draft_s), ({"part": "verify"}, found.verify_s)],
    )  # fmt: skip


def _experts(families: Families, facts: Facts) -> None:
    """Add the load of experts; none unless their rows are counted."""
    found = facts.measurement.experts
    if found is None:
        return
    families.gauge(
        "expert_imbalance",
        "Rows of the expert of a layer that has most, over the mean of all experts: the mean over layers.",
        found.expert_imbalance,
    )
    if found.rank_rows:
        families.gauge(
            "expert_rank_imbalance",
            "Rows of the rank that has most of a layer's, over the mean of all ranks: the mean over layers.",
            found.rank_imbalance,
        )
        families.counter(
            "expert_rank_rows", "Rows that the experts of a rank have computed.",
            [({"rank": str(rank)}, num) for rank, num in enumerate(found.rank_rows)],
        )  # fmt: skip
    if found.rows:
        families.counter(
            "expert_rows", "Rows that an expert of a layer has computed.",
            [
                ({"layer": layer, "expert": str(expert)}, num)
                for layer, counts in found.rows.items()
                for expert, num in enumerate(counts)
            ],
        )  # fmt: skip


def _requests(families: Families, facts: Facts) -> None:
    """Add the measurements of requests."""
    requests = facts.requests
    labelled = [(_labels(account), account) for account in requests.accounts]
    families.counter(
        "request_success",
        "Requests that have ended, by reason, tenant and priority.",
        [
            ({**labels, "finished_reason": reason}, num)
            for labels, account in labelled
            for reason, num in account.num_ended.items()
        ],
    )
    families.counter(
        "prompt_tokens", "Tokens of prompts.", [(labels, account.num_prompt_tokens) for labels, account in labelled]
    )
    families.counter(
        "generation_tokens", "Tokens generated.", [(labels, facts.num_output[account]) for labels, account in labelled]
    )
    for name, text, attribute in (
        ("time_to_first_token_seconds", "From the submission of a request to its first token.", "first_token_s"),
        ("request_queue_time_seconds", "In the engine's queue before the first step.", "queue_s"),
        ("e2e_request_latency_seconds", "From the submission of a request to its end.", "request_s"),
    ):
        families.histogram(name, text, [(labels, counted(getattr(account, attribute))) for labels, account in labelled])
    for name, text, histogram in (
        ("inter_token_latency_seconds", "Between two messages of an answer, one for each step.", requests.token_s),
        ("request_time_per_output_token_seconds", "Mean of a request after its first token.", requests.per_token_s),
        ("request_prefill_time_seconds", "From the first step to the first token.", requests.prefill_s),
        ("request_decode_time_seconds", "From the first token to the last.", requests.decode_s),
        ("request_inference_time_seconds", "From the first step to the last token.", requests.inference_s),
        ("request_prompt_tokens", "Prompt tokens of a request.", requests.prompt_tokens),
        ("request_generation_tokens", "Tokens generated for a request.", requests.output_tokens),
        ("request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", requests.computed_tokens),
        ("request_params_max_tokens", "The max_tokens of requests.", requests.max_tokens),
        ("request_params_n", "Answers to a prompt that a request asks for.", requests.num_answers),
    ):
        families.histogram(name, text, [({}, counted(histogram))])


def _held(families: Families, facts: Facts) -> None:
    """Add the requests that the HTTP process holds, and incidents."""
    families.gauge("requests_live", "Requests that a client waits for.", facts.num_live)
    families.gauge(
        "requests_ending", "Cancelled requests whose end the engine has not confirmed yet.", facts.num_ending
    )
    families.counter(
        "incidents", "What went wrong and what the server did about it, by kind and, if there is one, by process.",
        [
            ({"kind": kind, "process": process}, num)
            for (kind, process), num in facts.metrics.incidents.by_kind().items()
        ],
    )  # fmt: skip


def _server(families: Families, metrics: Metrics, usage: dict[str, ProcessUsage]) -> None:
    """Add HTTP and the processes."""
    families.counter(
        "http_requests", "HTTP requests by method, path and status.",
        [
            ({"method": method, "path": path, "status": str(status)}, num)
            for (method, path, status), num in metrics.exchanges.items()
        ],
    )  # fmt: skip
    families.counter(
        "http_errors", "HTTP requests by the code of their error.",
        [({"code": code}, num) for code, num in metrics.errors.items()],
    )  # fmt: skip
    families.gauge("http_connections", "Open connections.", metrics.num_connections())
    families.gauge("start_time_seconds", "Unix time at which the server was started.", metrics.started_s)
    if metrics.jobs is not None:
        jobs = metrics.jobs()
        families.gauge("batches", "Batches, by state.", [({"state": one}, num) for one, num in jobs.batches.items()])
        families.counter(
            "batch_lines", "Requests of batches that have results, by outcome.",
            [({"outcome": "answered"}, jobs.num_answered), ({"outcome": "failed"}, jobs.num_failed)],
        )  # fmt: skip
    labelled = [({"process": name}, one) for name, one in usage.items()]
    families.counter("process_cpu_seconds", "CPU time of a process.", [(labels, one.cpu_s) for labels, one in labelled])
    families.gauge(
        "process_resident_memory_bytes", "Memory of a process.",
        [(labels, one.resident_bytes) for labels, one in labelled],
    )  # fmt: skip
    families.gauge("process_threads", "Threads of a process.", [(labels, one.num_threads) for labels, one in labelled])
    families.gauge(
        "process_open_files", "Open files of a process.", [(labels, one.num_open_files) for labels, one in labelled]
    )


def _labels(account: Account) -> dict[str, str]:
    return {"tenant": account.tenant, "priority": account.priority}
