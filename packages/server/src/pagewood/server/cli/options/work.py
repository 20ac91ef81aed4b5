"""Options for the amount of work done at the same time, and for its order."""

from __future__ import annotations

import argparse

from pagewood.engine.api import EngineConfig, TenantQuota
from pagewood.server.cli.options.page import Group, Page

ON_CPU, ON_CUDA = EngineConfig(), EngineConfig(device="cuda")
_LIMITS = TenantQuota._fields[1:]


def add_work_options(page: Page) -> None:
    """Add the groups."""
    work = page.group("work at the same time")
    work.setting(
        "--max-running-requests",
        dest="max_running",
        metavar="N",
        help=f"requests computed together (default: {ON_CPU.num_rows}, on CUDA {ON_CUDA.num_rows})",
    )
    work.setting(
        "--replicas",
        metavar="N",
        help="engines of this model behind one port (default: %(default)s)",
        more="Each has its share of the cores, and KV memory of its own; --max-running-requests is the limit of "
        "each. A router sends a request to the engine that will decode it first, by its load and by the prefix that "
        "it has cached, and keeps priorities, shares and quotas of tenants over all. If an engine dies, its requests "
        "go on in the others. --max-queue-seconds limits the wait for an engine, and there for the first step; "
        "--refuse-late is decided when an engine gets the request. Engine N has the folder replica-N of the disk "
        "cache, a decision log with -N in its name, and for --kv-events the port plus N. With CUDA it has devices of "
        "its own.",
    )
    work.setting(
        "--prefill-replicas",
        metavar="N",
        help="those of them that only compute prompts; needs --remote-cache (default: %(default)s)",
        more="The others decode. The router sends a prompt of which more than some pages are not cached first to such "
        "an engine, which puts its KV into the shared cache, and then to one that decodes. If one is lost, the others "
        "compute what is missing.",
    )
    work.add(
        "--max-queued-requests",
        type=int,
        default=1024,
        metavar="N",
        help="requests that may wait; further ones get 429 (default: %(default)s)",
    )
    work.setting(
        "--max-queue-seconds",
        dest="max_queue_s",
        metavar="S",
        help="longest wait for a first step, then 429 (default: no limit)",
    )
    work.setting(
        "--max-ttft-seconds",
        dest="max_ttft_s",
        metavar="S",
        help="429 if the first token is predicted later (default: no limit)",
    )
    work.add("--refuse-late", action="store_true", help="refuse requests that are forecast to miss their `deadline`")
    work.add(
        "--quota",
        action="append",
        type=_quota,
        default=[],
        dest="quotas",
        metavar="TENANT:LIMIT=N,...",
        help="limits of what runs for a tenant; repeatable (default: none)",
        more="max_running: requests. max_tokens_in_flight: tokens of their prompts and all that they may still "
        "generate, so the tenant never holds more. max_kv_tokens: KV that they hold when one more starts; it may grow "
        "beyond that, and counts all tokens of a request, whatever windows layers have. Further requests of the tenant "
        "wait, and others do not wait for them. The tenant * stands for every tenant that is not named.",
    )
    work.setting("--tokenizer-workers", metavar="N", help="tokenizer processes (default: %(default)s)")
    work.setting(
        "--stream-interval",
        metavar="TOKENS",
        help="tokens in each message of a stream (default: %(default)s)",
        more="1 or more; the first and the last message may have fewer. Raise it if the HTTP process is busy with many "
        "streams: text then comes less often, and several tokens at a time.",
    )
    _add_batches(page.group("batches"))
    scheduling = page.group("scheduling")
    _add_order(scheduling)
    _add_prompts(scheduling)
    _add_steps(scheduling)


def _add_batches(batches: Group) -> None:
    batches.setting(
        "--batch-store",
        metavar="FOLDER",
        help="serve /v1/files and /v1/batches from it (default: off)",
        more="Batches run when there are no other requests, and go on after a restart. One server has a folder at a "
        "time.",
    )
    batches.setting(
        "--batch-store-gb",
        metavar="GB",
        help="most space of uploaded files (default: %(default)s)",
        more="Above 0; a GB is 1e9 bytes. Results are kept beyond.",
    )
    batches.setting(
        "--batch-lines",
        metavar="N",
        help="requests of batches at a time (default: %(default)s)",
        more="At most half of --max-running-requests.",
    )
    batches.setting(
        "--batch-lines-beside",
        metavar="N",
        help="those of them that go on beside other requests (default: %(default)s)",
        more="The rest waits until the model has no other request. Raise it where steps with more requests take hardly "
        "longer, as on a GPU, or where there is always another request.",
    )


def _add_order(order: Group) -> None:
    order.setting(
        "--schedule-policy",
        metavar="NAME",
        help="next request: fcfs, lpm, fair, edf and others (default: %(default)s)",
        more="Among equal priorities: fcfs (first come, first served; another name is priority), lpm (longest cached "
        "prefix first), dfs-weight (requests that share a cached prefix together), lof (longest output first), "
        "shortest (least work first), srtf (least remaining work first: the output so far of a preempted request "
        "counts), hrrn (highest response ratio next), fair (equal tokens for each tenant), edf (earliest deadline "
        "first), wrr (turns of service classes), tag (those whose tag runs already), random, adaptive (lpm while it "
        "finds prefixes, else fcfs), priority-low (low priorities first, but preemption still spares high ones; see "
        "--low-priority-first).",
    )
    order.add(
        "--schedule-weight",
        action="append",
        type=_named_weight,
        default=[],
        dest="schedule_weights",
        metavar="NAME=WEIGHT",
        help="share of a tenant (fair) or service class (wrr); repeatable (default: 1)",
        more="Above 0; only with these two orders.",
    )
    order.setting(
        "--schedule-ageing-seconds",
        dest="schedule_ageing_s",
        metavar="S",
        help="wait after which the oldest gets every fourth admission (default: never)",
        more="0 or more. Set it where the order could keep a request waiting for long.",
    )
    order.add(
        "--low-priority-first",
        action="store_true",
        help="a lower priority is the more important one, as in vLLM",
        more="In every order and for preemption; not together with the order priority-low.",
    )
    order.setting(
        "--preemption-threshold",
        metavar="N",
        help="preempt running requests whose priority is lower by more than N",
        more="0 or more. They make room for a waiting request that does not fit, and go on later. Without it requests "
        "are preempted only when memory runs out.",
    )
    order.setting(
        "--schedule-conservativeness",
        metavar="FACTOR",
        help="factor of the memory kept for running answers (default: %(default)s)",
        more="Above 0. The engine learns which part of their limit answers use, and admits a request if the expected "
        "use leaves enough memory. Below 1 more requests run at the same time, and more are preempted and go on later. "
        "Raise it above 1 if `pagewood_preemptions_total` of /metrics grows fast.",
    )


def _add_steps(steps: Group) -> None:
    steps.add(
        "--disable-overlap",
        action="store_const",
        const=False,
        dest="overlap",
        help="plan a step only when the one before has been computed",
        more="To find out whether overlap causes a fault; it costs speed on CUDA.",
    )
    steps.add(
        "--enable-overlap",
        action="store_const",
        const=True,
        dest="overlap",
        help="with --pipeline-parallel-size, launch one step more than there are stages",
        more="The first stage then does not wait for the host between two steps; each step has fewer requests. Without "
        "stages it is the default.",
    )
    steps.setting(
        "--num-continuous-decode-steps",
        metavar="N",
        help="decode steps after one decision, to compare engines (default: %(default)s)",
        more="1 or more. Above 1 there is no overlap, and new requests and ends of answers are noticed after N steps "
        "only. Leave it at 1 except to compare with engines that work so.",
    )
    steps.add(
        "--disable-cuda-graph",
        action="store_false",
        dest="cuda_graph",
        help="do not capture decode steps as CUDA graphs",
        more="The start is then shorter and takes less memory, and steps take longer.",
    )
    steps.setting(
        "--cuda-graph-max-batch",
        metavar="N",
        help="requests in the largest captured step (default: --max-running-requests)",
    )


def _add_prompts(steps: Group) -> None:
    steps.setting(
        "--chunked-prefill-size",
        "--max-prefill-tokens",
        metavar="N",
        help=f"prompt tokens in one step (default: {ON_CPU.max_chunk_tokens}, on CUDA {ON_CUDA.max_chunk_tokens})",
        more="Over all requests. Raise it for prompts that are computed faster, lower it for answers that pause less "
        "while prompts are computed.",
    )
    steps.add(
        "--target-step-ms",
        type=_milliseconds,
        dest="target_step_s",
        metavar="MS",
        help="cut prompts so that steps take about this long (default: off)",
        more="Above 0. Prompts beside running answers get as many tokens as fit in this time by the steps measured so "
        "far, but always some.",
    )
    steps.setting(
        "--schedule-preset",
        metavar="NAME",
        help="how prompts and answers share steps (default: decode-first)",
        more="decode-first: prompts are computed beside all answers. stall-free: the same, but both together get "
        "--chunked-prefill-size. prefill-first: prompts come first, in steps without answers.",
    )
    steps.setting(
        "--max-prefills",
        "--prefill-max-requests",
        metavar="N",
        help="prompts in progress in one step (default: %(default)s)",
    )
    steps.setting(
        "--joint-prefill-tokens",
        metavar="TOKENS",
        help="prompt tokens with which a step is full (default: automatic)",
        more="1 or more; above --chunked-prefill-size it has no effect. When the prompts that end in a step have this "
        "many tokens together, no other prompt joins them: it would delay their first tokens, and get its own no "
        "sooner. The default is 128 on a CPU, more for a small model, and no limit on CUDA. Raise it if such a step "
        "leaves the processor idle.",
    )
    steps.setting(
        "--chunk-align",
        metavar="TOKENS",
        help="cut prompts only at multiples of this (default: %(default)s)",
        more="1 or more, at most seven eighths of --chunked-prefill-size, and not with --target-step-ms. For kernels "
        "whose results depend on where a prompt is cut.",
    )


def _milliseconds(text: str) -> float:
    return float(text) / 1000


def _quota(text: str) -> TenantQuota:
    tenant, _, listed = text.rpartition(":")
    limits: dict[str, int] = {}
    try:
        for limit in listed.split(","):
            name, number = limit.split("=")
            if name not in _LIMITS or name in limits:
                raise ValueError
            limits[name] = int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be TENANT:LIMIT=N,... with limits of {', '.join(_LIMITS)}, each once, got {text!r}"
        ) from None
    return TenantQuota(tenant, **limits)


def _named_weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        return name, float(weight)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be NAME=WEIGHT, got {text!r}") from None
