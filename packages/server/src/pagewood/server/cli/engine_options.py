"""Options of the engine, for `serve` and `generate`."""

from __future__ import annotations

import argparse
from typing import get_args

from pagewood.engine.api import ActivationFormat, EngineConfig, SchedulePreset, TenantQuota, WeightFormat

DEFAULTS = EngineConfig()
ON_CUDA = EngineConfig(device="cuda")
_LIMITS = TenantQuota._fields[1:]


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the groups `model`, `memory`, `CUDA graphs`, `scheduling`, `structured output` and `speculative decoding`."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="PATH",
        help="folder of a Hugging Face model: config.json, *.safetensors, tokenizer.json; or a GGUF file (default: the "
        "small model that ships with Pagewood)",
    )
    model.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default=DEFAULTS.device,
        help="device of the model; cuda needs pagewood-engine[cuda]; auto is the CPU (default: %(default)s)",
    )
    model.add_argument(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default=DEFAULTS.dtype,
        help="data type of weights, activations and KV memory; auto: float32 on a CPU, bfloat16 on CUDA "
        "(default: %(default)s)",
    )
    model.add_argument(
        "--threads", type=int, metavar="N", help="compute threads on the CPU (default: one per physical core)"
    )
    model.add_argument(
        "--random-seed",
        type=int,
        default=DEFAULTS.seed,
        metavar="N",
        help="seed of requests without a seed (default: %(default)s)",
    )
    model.add_argument(
        "--logits-processor",
        type=_named_place,
        action="append",
        default=[],
        metavar="NAME=PACKAGE.MODULE:FUNCTION",
        help="function that requests may name in logits_processors to change their logits; it is imported and runs in "
        "the engine's process, so use trusted code only; repeatable (default: none)",
    )
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--max-total-tokens",
        type=int,
        metavar="TOKENS",
        help="KV memory of all requests and the prefix cache together (default: chosen for model and machine)",
    )
    memory.add_argument(
        "--max-length",
        type=int,
        metavar="TOKENS",
        help="longest prompt plus output of one request (default: as model and KV memory allow)",
    )
    memory.add_argument(
        "--page-size",
        type=int,
        default=DEFAULTS.page_size,
        metavar="TOKENS",
        help="token positions per page, the unit in which KV memory is allocated (default: %(default)s)",
    )
    memory.add_argument(
        "--disable-radix-cache", action="store_true", help="do not share the KV of common prefixes between requests"
    )
    memory.add_argument(
        "--weights",
        choices=get_args(WeightFormat),
        default=DEFAULTS.weights,
        help="how a CPU keeps weights; auto: as precise as the checkpoint; int8 takes a quarter of float32 and int4 a "
        "sixth, and tokens come faster by as much; they are quantised once, and kept in ~/.cache/pagewood "
        "(default: %(default)s)",
    )
    memory.add_argument(
        "--activations",
        choices=get_args(ActivationFormat),
        default=DEFAULTS.activations,
        help="what a CPU multiplies weights with; auto: bfloat16 where weights are bfloat16 and the processor has "
        "AVX-512 BF16, eight bits where they are int8 or int4, otherwise float32; float32: nothing but weights is "
        "rounded, which takes longer; bfloat16: the same as auto, on any processor (default: %(default)s)",
    )
    memory.add_argument(
        "--retained-share",
        type=float,
        default=DEFAULTS.retained_share,
        metavar="SHARE",
        help="most KV memory that the cache keeps for texts that clients mark as likely to return, as a share: by "
        "`retain` of /generate, `cache_control` of Messages, `prompt_cache_retention` of Responses "
        "(default: %(default)s)",
    )
    memory.add_argument(
        "--max-retain-seconds",
        type=float,
        default=DEFAULTS.max_retain_s,
        metavar="SECONDS",
        help="longest time for which such a text is kept (default: %(default)s)",
    )
    memory.add_argument(
        "--cache-history-tokens",
        type=int,
        default=DEFAULTS.cache_history_tokens,
        metavar="TOKENS",
        help="evicted tokens to remember, so that `explain` of /generate knows what was evicted (default: %(default)s)",
    )
    memory.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8_e4m3"),
        default=DEFAULTS.kv_cache_dtype,
        help="data type of keys and values; auto: that of --dtype; on a CPU, int8 with a scale per token and head "
        "takes a little over a quarter of the memory; on CUDA, fp8_e4m3 takes half (default: %(default)s)",
    )
    memory.add_argument(
        "--host-cache-gb",
        type=float,
        metavar="GB",
        help="main memory for evicted KV, so that a resumed conversation is not computed again (default: none)",
    )
    memory.add_argument(
        "--disk-cache-path",
        metavar="FOLDER",
        help="folder for evicted KV on a disk; it outlives the server and needs --host-cache-gb (default: none)",
    )
    memory.add_argument("--disk-cache-gb", type=float, metavar="GB", help="space to use on that disk")
    memory.add_argument(
        "--remote-cache",
        metavar="PLACE",
        help="where servers share KV: a folder that all can write, mooncake://HOST:PORT of a mooncake_master, or "
        "lmcache+URL, such as lmcache+lm://HOST:PORT; it needs --host-cache-gb (default: none)",
    )
    memory.add_argument(
        "--remote-cache-gb", type=float, metavar="GB", help="size of that folder, or memory given to others"
    )
    memory.add_argument(
        "--cache-write-policy",
        choices=("write_through", "write_through_selective", "write_back"),
        default=DEFAULTS.cache_write_policy,
        help="copy KV to the host cache when it is computed, when it is used a second time, or when it is evicted "
        "(default: %(default)s)",
    )
    memory.add_argument(
        "--mem-fraction",
        type=float,
        default=DEFAULTS.mem_fraction,
        metavar="SHARE",
        help="share of a CUDA device's free memory for weights, activations, graphs and KV memory "
        "(default: %(default)s)",
    )
    graphs = parser.add_argument_group("CUDA graphs")
    graphs.add_argument("--disable-cuda-graph", action="store_true", help="do not capture decode steps as CUDA graphs")
    graphs.add_argument(
        "--cuda-graph-max-batch",
        type=int,
        metavar="N",
        help="requests in the largest captured step (default: --max-running-requests)",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="on CUDA, make the logits of a token independent of the other requests in its step, to the last bit; "
        "this costs speed",
    )
    scheduling = parser.add_argument_group("scheduling")
    scheduling.add_argument(
        "--schedule-policy",
        default=DEFAULTS.schedule_policy,
        metavar="NAME",
        help="which request runs next, among equal priorities: fcfs (first come, first served; another name is "
        "priority), lpm (longest cached prefix first), dfs-weight (requests that share a cached prefix together), lof "
        "(longest output first), shortest (least work first), srtf (least remaining work first: the output so far of a "
        "preempted request counts), fair (equal tokens for each tenant), edf "
        "(earliest deadline first), wrr (turns of service classes), tag (those whose tag runs already), random, "
        "adaptive (lpm while it finds prefixes, else fcfs), priority-low (low priorities first, but preemption still "
        "spares high ones; see --low-priority-first) "
        "(default: %(default)s)",
    )
    scheduling.add_argument(
        "--schedule-weight",
        action="append",
        type=_named_weight,
        default=[],
        metavar="NAME=WEIGHT",
        help="share of a tenant (fair) or of a service class (wrr); repeatable (default: 1 for each)",
    )
    scheduling.add_argument(
        "--schedule-preset",
        choices=get_args(SchedulePreset),
        help="how prompts and decodes share steps: decode-first (prompts beside all decodes), stall-free (the same, "
        "but both together get --chunked-prefill-size), prefill-first (prompts come first, in steps without decodes) "
        "(default: decode-first)",
    )
    scheduling.add_argument(
        "--quota",
        action="append",
        type=_quota,
        default=[],
        metavar="TENANT:LIMIT=N,...",
        help="limits of a tenant's running requests: max_running, max_tokens_in_flight (prompts and allowed outputs), "
        "max_kv_tokens (when one more starts); the tenant * is each that is not named; requests beyond it wait, and "
        "others do not; repeatable (default: none)",
    )
    scheduling.add_argument(
        "--refuse-late",
        action="store_true",
        help="refuse requests at once whose deadline cannot be met, by the steps measured so far",
    )
    scheduling.add_argument(
        "--stream-interval",
        type=int,
        default=DEFAULTS.stream_interval,
        metavar="TOKENS",
        help="output tokens of a message at least, but for the first and the last (default: %(default)s)",
    )
    scheduling.add_argument(
        "--schedule-ageing-seconds",
        type=float,
        metavar="SECONDS",
        help="after this time a request can get every fourth admission as the oldest, whatever the order says "
        "(default: never)",
    )
    scheduling.add_argument(
        "--target-step-ms",
        type=float,
        metavar="MS",
        help="cut prompts so that steps beside decoding requests take about this long, by the steps measured so far "
        "(default: always up to --chunked-prefill-size)",
    )
    scheduling.add_argument(
        "--preemption-threshold",
        type=int,
        metavar="N",
        help="a waiting request that does not fit preempts running ones whose priority is lower by more than this; "
        "they go on later (default: requests are preempted only when memory runs out)",
    )
    scheduling.add_argument(
        "--low-priority-first",
        action="store_true",
        help="a lower priority is the more important one, in every order "
        "and for preemption; not together with the order priority-low",
    )
    scheduling.add_argument(
        "--max-queue-seconds",
        type=float,
        metavar="SECONDS",
        help="answer requests that have waited this long for their first step with 429 (default: they wait)",
    )
    scheduling.add_argument(
        "--radix-eviction-policy",
        choices=("lru", "queue-lru"),
        default=DEFAULTS.eviction_policy,
        help="which cached prefixes are evicted first: lru (least recently used), or queue-lru (the same, but what a "
        "waiting request can use comes last) (default: %(default)s)",
    )
    scheduling.add_argument(
        "--schedule-conservativeness",
        type=float,
        default=DEFAULTS.schedule_conservativeness,
        metavar="FACTOR",
        help="scales the memory reserved for outputs of running requests; a smaller factor admits and preempts more "
        "requests (default: %(default)s)",
    )
    scheduling.add_argument(
        "--max-running-requests",
        type=int,
        metavar="N",
        help=f"requests that run at the same time (default: {DEFAULTS.num_rows}, on CUDA {ON_CUDA.num_rows})",
    )
    scheduling.add_argument(
        "--chunked-prefill-size",
        "--max-prefill-tokens",
        type=int,
        metavar="TOKENS",
        help="prompt tokens computed in one step, over all requests "
        f"(default: {DEFAULTS.max_chunk_tokens}, on CUDA {ON_CUDA.max_chunk_tokens})",
    )
    scheduling.add_argument(
        "--chunk-align",
        type=int,
        default=DEFAULTS.chunk_align,
        metavar="TOKENS",
        help="cut prompts only at multiples of this many tokens, whatever other requests are in the step "
        "(default: %(default)s)",
    )
    scheduling.add_argument(
        "--max-prefills",
        "--prefill-max-requests",
        type=int,
        default=DEFAULTS.max_prefills,
        metavar="N",
        help="prompts in progress in one step (default: %(default)s)",
    )
    scheduling.add_argument(
        "--joint-prefill-tokens",
        type=int,
        metavar="TOKENS",
        help="a step gets no further prompt when those that end in it have this many tokens together, because another "
        "one would delay them and end no sooner (default: on a CPU 128, more for a small model; otherwise no limit)",
    )
    scheduling.add_argument(
        "--disable-overlap", action="store_true", help="plan a step only after the previous step has been computed"
    )
    scheduling.add_argument(
        "--num-continuous-decode-steps",
        type=int,
        default=DEFAULTS.num_continuous_decode_steps,
        metavar="N",
        help="decode steps that are launched after one decision; more than 1 replaces the overlapped loop, to compare "
        "with engines that do this, and new requests wait for all of them (default: %(default)s)",
    )
    scheduling.add_argument(
        "--decision-log",
        metavar="FILE",
        help="write every decision and what it depends on to this file, for `pagewood replay` and `pagewood why`; "
        "tokens are renamed (default: none)",
    )
    scheduling.add_argument(
        "--decision-log-mb",
        type=float,
        default=DEFAULTS.decision_log_mb,
        metavar="MB",
        help="largest size of that file and the one before it, FILE.1, together (default: %(default)s)",
    )
    scheduling.add_argument(
        "--decision-log-tokens",
        action="store_true",
        help="write the real tokens and namespaces of requests to the decision log",
    )
    structured = parser.add_argument_group("structured output")
    structured.add_argument(
        "--grammar-backend",
        choices=("llguidance", "xgrammar"),
        default=DEFAULTS.grammar_backend,
        help="library that compiles JSON schemas, expressions and grammars; xgrammar needs pagewood-engine[xgrammar] "
        "(default: %(default)s)",
    )
    structured.add_argument(
        "--grammar-timeout",
        type=float,
        default=DEFAULTS.grammar_timeout_s,
        metavar="SECONDS",
        help="a request whose grammar is not compiled by then is refused (default: %(default)s)",
    )
    speculation = parser.add_argument_group(
        "speculative decoding",
        "A drafter proposes the next tokens, and the model verifies all of them in one step. Drafts change the speed, "
        "not the text.",
    )
    speculation.add_argument(
        "--speculative",
        choices=("off", "ngram", "suffix", "draft", "eagle", "auto"),
        default=DEFAULTS.speculative,
        help="where drafts come from: ngram (earlier text of the request), suffix (that and earlier answers), draft (a "
        "small model), eagle (an EAGLE-3 or MTP head), auto (the head or the draft model in the model's folder, "
        "otherwise ngram) (default: %(default)s)",
    )
    speculation.add_argument(
        "--speculative-model",
        metavar="PATH",
        help="folder of the draft model or the head (default: `draft` or `eagle` in the model's folder)",
    )
    speculation.add_argument(
        "--speculative-num-tokens",
        type=int,
        default=DEFAULTS.speculative_num_tokens,
        metavar="N",
        help="most draft tokens of a request in one step (default: %(default)s)",
    )
    speculation.add_argument(
        "--speculative-topk",
        type=int,
        default=DEFAULTS.speculative_topk,
        metavar="K",
        help="alternatives for each draft token; more than 1 makes trees, for draft and eagle (default: %(default)s)",
    )
    speculation.add_argument(
        "--speculative-control",
        choices=("adaptive", "fixed"),
        default=DEFAULTS.speculative_control,
        help="adaptive: as many draft tokens as save time by measured acceptance and cost, down to none; fixed: always "
        "--speculative-num-tokens (default: %(default)s)",
    )
    speculation.add_argument(
        "--speculative-verify",
        choices=("exact", "rejection"),
        default=DEFAULTS.speculative_verify,
        help="exact: keep the text; rejection: accept more drafts and keep the distribution of sampled text, but not "
        "the text itself (default: %(default)s)",
    )


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the configuration of the engine for the options.

    Raises:
        ValueError: an option is out of its range.
    """
    return EngineConfig(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        mem_fraction=options.mem_fraction,
        cuda_graph=not options.disable_cuda_graph,
        cuda_graph_max_batch=options.cuda_graph_max_batch,
        batch_invariant=options.batch_invariant,
        num_threads=options.threads,
        max_total_tokens=options.max_total_tokens,
        max_length=options.max_length,
        max_running=options.max_running_requests,
        page_size=options.page_size,
        schedule_policy=options.schedule_policy,
        schedule_conservativeness=options.schedule_conservativeness,
        schedule_weights=tuple(options.schedule_weight),
        schedule_ageing_s=options.schedule_ageing_seconds,
        target_step_s=None if options.target_step_ms is None else options.target_step_ms / 1000,
        schedule_preset=options.schedule_preset,
        quotas=tuple(options.quota),
        refuse_late=options.refuse_late,
        stream_interval=options.stream_interval,
        preemption_threshold=options.preemption_threshold,
        low_priority_first=options.low_priority_first,
        max_queue_s=options.max_queue_seconds,
        chunked_prefill_size=options.chunked_prefill_size,
        max_prefills=options.max_prefills,
        joint_prefill_tokens=options.joint_prefill_tokens,
        chunk_align=options.chunk_align,
        overlap=False if options.disable_overlap else None,
        num_continuous_decode_steps=options.num_continuous_decode_steps,
        prefix_cache=not options.disable_radix_cache,
        weights=options.weights,
        activations=options.activations,
        eviction_policy=options.radix_eviction_policy,
        retained_share=options.retained_share,
        max_retain_s=options.max_retain_seconds,
        cache_history_tokens=options.cache_history_tokens,
        kv_cache_dtype=options.kv_cache_dtype,
        host_cache_gb=options.host_cache_gb,
        disk_cache_path=options.disk_cache_path,
        disk_cache_gb=options.disk_cache_gb,
        remote_cache=options.remote_cache,
        remote_cache_gb=options.remote_cache_gb,
        cache_write_policy=options.cache_write_policy,
        speculative=options.speculative,
        speculative_model=options.speculative_model,
        speculative_num_tokens=options.speculative_num_tokens,
        speculative_topk=options.speculative_topk,
        speculative_control=options.speculative_control,
        speculative_verify=options.speculative_verify,
        grammar_backend=options.grammar_backend,
        grammar_timeout_s=options.grammar_timeout,
        logits_processors=tuple(options.logits_processor),
        seed=options.random_seed,
        decision_log=options.decision_log,
        decision_log_mb=options.decision_log_mb,
        decision_log_tokens=options.decision_log_tokens,
    )


def _named_place(text: str) -> tuple[str, str]:
    name, sign, place = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"expected NAME=PACKAGE.MODULE:FUNCTION, got {text!r}")
    return name, place


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
