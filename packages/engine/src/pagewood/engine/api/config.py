"""Everything that decides how an engine is built."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

from pagewood.engine.api.sampling_params import MAX_PROCESSOR_NAME
from pagewood.engine.node_address import Address


class TenantQuota(NamedTuple):
    """What the running requests of one tenant may hold; None: any amount.

    A request beyond it waits, and requests of other tenants do not wait for it.
    """

    tenant: str
    """"*": each tenant that is not named."""
    max_running: int | None = None
    max_tokens_in_flight: int | None = None
    """Tokens of its running requests: prompts and all that they may still generate."""
    max_kv_tokens: int | None = None
    """Tokens of KV that its running requests hold when one more starts; they may outgrow it by what they generate. A
    request counts with all its tokens, also where layers with a window keep the last ones only."""


SchedulePreset: TypeAlias = Literal["decode-first", "stall-free", "prefill-first"]
"""How prompts and decodes share steps, see `EngineConfig.schedule_preset`."""
ModelImpl: TypeAlias = Literal["auto", "native", "transformers"]
"""What computes a model, see `EngineConfig.model_impl`."""
WeightFormat: TypeAlias = Literal["auto", "float32", "bfloat16", "int8", "int4"]
"""How a CPU keeps weights, see `EngineConfig.weights`."""
ActivationFormat: TypeAlias = Literal["auto", "float32", "bfloat16"]
"""What a CPU multiplies weights with, see `EngineConfig.activations`."""
Role: TypeAlias = Literal["both", "prefill", "decode"]
"""What an engine of several with a shared cache does, see `EngineConfig.role`."""
ImageUse: TypeAlias = Literal["auto", "on", "off"]
"""Whether a model takes images, see `EngineConfig.images`."""
MAX_ADAPTER_RANK = 1024
"""The largest value of `EngineConfig.max_adapter_rank`."""
ExpertKernels: TypeAlias = Literal["triton", "flashinfer"]
"""What computes mixtures of experts on CUDA, see `EngineConfig.expert_kernels`."""
ExpertLoadDetail: TypeAlias = Literal["off", "ranks", "experts"]
"""How rows of experts are counted, see `EngineConfig.expert_load`."""


class _DeviceDefaults(NamedTuple):
    """The defaults of a configuration that depend on the device only."""

    dtype: Literal["float32", "bfloat16"]
    quantised: str
    """The KV dtype that takes less memory than `dtype`."""
    max_running: int
    chunked_prefill_size: int


_CPU = _DeviceDefaults("float32", "int8", max_running=64, chunked_prefill_size=512)
_CUDA = _DeviceDefaults("bfloat16", "fp8_e4m3", max_running=256, chunked_prefill_size=2048)
_MOST_DRAFT_TOKENS = 64
"""More are never accepted in practice; programs and graphs have room for this many."""
_RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    (
        ">= 1", lambda value: value >= 1,
        (
            "tensor_parallel_size", "nnodes", "pipeline_parallel_size", "page_size", "chunk_align", "max_prefills",
            "num_continuous_decode_steps", "speculative_num_tokens", "stream_interval", "max_running",
            "chunked_prefill_size", "joint_prefill_tokens", "num_threads", "max_total_tokens", "max_length",
            "cuda_graph_max_batch", "state_places",
        ),
    ),
    (">= 0", lambda value: value >= 0, ("preemption_threshold", "max_queued", "cache_history_tokens")),
    (
        "> 0", lambda value: value > 0,
        ("grammar_timeout_s", "target_step_s", "max_queue_s", "host_cache_gb", "disk_cache_gb", "remote_cache_gb"),
    ),
    (
        "> 0 and finite", lambda value: 0 < value < math.inf,
        ("decision_log_mb", "schedule_conservativeness", "max_retain_s"),
    ),
    (">= 0 and finite", lambda value: 0 <= value < math.inf, ("image_cache_gb", "schedule_ageing_s")),
)  # fmt: skip
"""Rules, each with the fields of `EngineConfig` that keep it unless they are None by default. NaN keeps none."""
_WORDS = (
    "model_impl", "weights", "activations", "images", "expert_load", "expert_kernels", "eviction_policy", "role",
    "schedule_preset", "speculative", "speculative_control", "speculative_verify", "grammar_backend",
)  # fmt: skip
"""Fields of `EngineConfig` that are one of the words of their type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that decides how an engine is built.

    "auto" and None mean a value that fits the model and the machine, unless the field says otherwise. The value is
    chosen once, when the engine is built; the whole configuration is then logged. The groups of fields are those of
    `pagewood serve --help-all`: model, formats of numbers, images, length and memory, prefix cache, work at the same
    time, scheduling, drafts and grammars, decision log.

    Raises:
        ValueError: a field is out of its range, or two fields contradict each other.
    """

    # model
    model: str | None = None
    """Folder of a Hugging Face model, a GGUF file, or a name on the hub (`org/name`), see `model_folder.hub`; None: the
    model that ships with pagewood-engine."""
    model_impl: ModelImpl = "auto"
    """What computes the model. native: the parts of this package; transformers: its class in that library
    (`pagewood-engine[transformers]`), over the same KV memory, which is slower; auto: transformers for an architecture
    that this package has no table for, native for all others."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Name and folder of each adapter that is loaded at start. Folders are those of PEFT."""
    max_adapters: int = 0
    """Adapters that requests may use at the same time; others of those that are loaded wait for their turn. 0: the
    engine has no adapters."""
    max_adapter_rank: int = 64
    """The largest rank of an adapter in a module."""
    max_adapter_expert_rank: int = 0
    """The largest rank of an adapter in an expert on CUDA, where each of `max_adapters` takes memory for all experts.
    0: adapters may not change experts there. On a CPU it means nothing, because adapters stay where they are."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the CPU."""
    num_threads: int | None = None
    """Compute threads of the CPU runner, of all processes of this host together; None: one per physical core."""
    tensor_parallel_size: int = 1
    """Processes that compute the model together, each with a part of every matrix, of all heads and of their KV memory.
    They run on cores of their own, on those of one memory node where there are several; with CUDA each has a device of
    its own, or all share one, which is slow. It must divide the sizes of the model. Logits then differ in their last
    bits from those of one process."""
    nnodes: int = 1
    """Hosts that these processes run on, as many on each. Those of other hosts belong to a `pagewood serve`
    that has been started there with the same options and its own `node_rank`; the engine waits for them."""
    node_rank: int = 0
    """Number of this host, from 0 on. The engine is on host 0."""
    master_addr: str | None = None
    """HOST:PORT where host 0 listens for the others, as this host reaches it; with `nnodes` only."""
    node_secret_file: str | None = None
    """File with a secret of at least 16 bytes that hosts prove to each other, closed to other users; read when the
    group begins. None: no secret, which is allowed on a loopback address, or with `insecure_no_node_secret`."""
    insecure_no_node_secret: bool = False
    """Whether everyone who reaches `master_addr` may take part in the computation, and read and change it."""
    pipeline_parallel_size: int = 1
    """Stages of consecutive layers, each computed by `tensor_parallel_size` processes that have no others.
    Steps of different requests are in all stages at the same time, and chunks of a long prompt follow each other
    through them. With `nnodes` they may be on different hosts. Layers are divided by the bytes of their weights. It is
    for models that do not fit the memory of one node, or of one process; a single request gets no faster."""
    expert_parallel: bool = False
    """Whether these processes divide the experts of a model as wholes, some on each, instead of the inner size of all.
    Then the inner size of experts need not be divisible, and weights are read and rounded as those of one process. A
    step waits for the process whose experts have most rows."""
    expert_map: str | None = None
    """JSON file that says which processes have which experts, with `expert_parallel`: `{"layers": {"3": [0, 1, [0, 1],
    ...]}}`, for a layer the process of each expert, or the processes that have a copy of it. None, and for layers that
    are not in it: consecutive experts."""
    enable_dp_attention: bool = False
    """Whether these processes divide attention by request instead of by heads: each has the whole weights of
    attention and of recurrent layers, and the KV memory and the states of its own requests. So the KV memory of latent
    attention, whose latents cannot be divided among heads, is not held by every process. A request then fits if it fits
    the memory of one process. Layers with a window keep the KV of all positions."""
    expert_load: ExpertLoadDetail = "off"
    """Whether rows of experts are counted, on a CPU, for the metrics. ranks: by process, with a measure of imbalance;
    experts: also by layer and expert, which are many."""
    expert_kernels: ExpertKernels = "triton"
    """What computes mixtures of experts on CUDA. triton: kernels of Pagewood, which were measured on an H100, and give
    a token the same bits in every batch. flashinfer: its fused kernels (CUTLASS), which may be faster for long prompts,
    were not run on a GPU yet, and take many minutes to compile the first time; mixtures that they do not take, and all
    if they cannot be compiled, are computed as with triton, and the log says why."""

    # formats of numbers
    weights: WeightFormat = "auto"
    """How a CPU keeps the weights of matrices, embeddings and the output projection included. auto: as precise as the
    checkpoint, so bfloat16 and float16 stay as they are; bfloat16: rounded to that; int8: a scale for each output;
    int4: a scale for each 32 inputs. CUDA keeps weights in `dtype`."""
    activations: ActivationFormat = "auto"
    """What a CPU multiplies weights with. auto: bfloat16 where weights are bfloat16 and the processor has AVX-512 BF16,
    as a GPU does, eight bits with a scale for each token where weights have codes of four or eight bits, and float32
    elsewhere. float32: nothing but weights is rounded ("weight-only"); logits have the bits of a float32 model with
    these weights. bfloat16: the inputs of products with bfloat16 weights are rounded to it on every processor, and
    added in float32; it needs `weights` bfloat16, or auto and a checkpoint in bfloat16. Norms, attention and everything
    between products are float32 in any case. CUDA computes in `dtype`."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Format of weights and activations on CUDA: bfloat16, which is auto, or float16. A CPU has float32 only; `weights`
    and `activations` choose for its products."""
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8_e4m3"] = "auto"
    """How keys and values are stored; auto: in `dtype`. A CPU also supports int8 with a scale for each token and head,
    a little over a quarter of the memory; CUDA also supports fp8_e4m3 without scales, half of the memory."""
    batch_invariant: bool = False
    """Whether, on CUDA, the logits of a request must not depend on the other requests of its steps, to the last bit.
    This costs speed. On a CPU they never do."""

    # images
    images: ImageUse = "auto"
    """Whether the model's tower for images is loaded: on a CPU in float32, on CUDA in `dtype`. auto: if the model has
    one that this package knows, and no other option rules it out; the log then says which. on: otherwise the engine is
    not built. off: the model gets text only, and has no tower in memory."""
    image_cache_gb: float = 0.25
    """Memory of the host for what the tower has made of images, by their contents, in units of 1e9 bytes; those used
    least recently are dropped first. An image of a request in the engine is kept beside."""

    # length and memory
    max_length: int | None = None
    """Longest prompt plus output of one request, at least 2; None: what the model and the KV memory allow."""
    max_total_tokens: int | None = None
    """Token positions of KV memory, for all requests and the prefix cache together; more fit if layers have windows and
    give memory back. None, on a CPU: 2,048 for each request that may run (or the longest request, if that is shorter),
    at least one longest request, at most a quarter of the free memory; the system provides it as it is used. On CUDA:
    all that `mem_fraction` leaves."""
    state_places: int | None = None
    """Places for the states of recurrent layers: one for each request that may run, and copies that the prefix cache
    keeps; None: five for each request, in at most a quarter of the free memory."""
    mem_fraction: float = 0.9
    """Fraction of a CUDA device's free memory for weights, activations, graphs and KV memory together."""
    page_size: int = 16
    """Token positions of a page. Prefixes are reused in whole pages."""

    # prefix cache, and memory for KV that it evicts
    prefix_cache: bool = True
    """Whether requests reuse the KV of common prefixes."""
    eviction_policy: Literal["lru", "queue-lru"] = "lru"
    """Which cached pages are evicted first. lru: those used least recently; queue-lru: the same, but pages that a
    waiting request can use come last, which raises hits where many requests wait."""
    retained_share: float = 0.0
    """Largest share of KV memory that the cache keeps for prefixes that are likely to return (`Submit.retain_s`), in
    [0, 1]. These are evicted last, those of the namespace that has most of them first. 0: nothing is retained."""
    max_retain_s: float = 3600.0
    """Longest time for which a prefix is retained, seconds; clients that ask for more get this."""
    cache_history_tokens: int = 0
    """Evicted tokens that the prefix cache remembers, so that explanations know what was evicted; 4 bytes each, and a
    little more for each run of them. It needs `prefix_cache`."""
    host_cache_gb: float | None = None
    """Host memory for evicted KV and states of recurrent layers, in units of 1e9 bytes, on each of `nnodes`; None: no
    host cache. For a CUDA device it is pinned, and allocated at start."""
    disk_cache_path: str | None = None
    """Folder on a disk for evicted KV, which survives the process; None: no disk cache. It needs a host cache."""
    disk_cache_gb: float | None = None
    """Largest total size of its files, in units of 1e9 bytes, on each of `nnodes`."""
    remote_cache: str | None = None
    """Where engines share KV: a folder that all of them can write; `shm:NAME`, memory that the engines of one user on
    this machine share; `redis://HOST:PORT/DATABASE` of a server of the Redis protocol, with `?user=`, `password_file=`
    and `timeout_s=` as in `pagewood.kvpool.tiers.RedisPlace`; `mooncake://HOST:PORT` of a `mooncake_master`, with
    `?host=`, `protocol=`, `devices=`, `metadata=` and `timeout_s=` as in `MooncakePlace` of
    `pagewood.kvpool.integrations.mooncake`; `nixl+redis://HOST:PORT` for pages in the memory of each engine, which the
    others read over NIXL and find in a server of the Redis protocol; or `lmcache+URL` for what LMCache reaches at a URL
    (`lmcache+lm://HOST:PORT` is its server). None: no KV is shared. It needs a host cache."""
    remote_cache_gb: float | None = None
    """Largest total size of the files or of the shared memory, or the memory that this engine gives to the others, in
    units of 1e9 bytes; None for `redis://` and `lmcache+URL`, where the service decides."""
    role: Role = "both"
    """What this engine does of those that share KV. prefill: it computes prompts, ends each request with its first
    token, and answers when the prompt's pages are in the shared cache, where they appear after each chunk. decode: it
    goes on with requests whose prompts other engines have computed, takes what the shared cache has, and computes what
    is missing. An engine that decodes computes as one for both does; the name is for routers. Both need
    `remote_cache`."""
    cache_write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    """When KV is copied to the host cache: as soon as it is cached, at its second use, or when it is evicted."""

    # work at the same time
    max_running: int | None = None
    """Requests that may run at the same time; None: 64 on a CPU, 256 on CUDA."""
    max_queued: int | None = None
    """A request is refused with the code `queue_full` if the engine holds `max_running` and this many more, waiting or
    running; one that was preempted is never refused. None: no limit."""
    max_queue_s: float | None = None
    """Seconds after which a request that has never run is refused, with the code `queue_timeout`; None: it waits."""
    refuse_late: bool = False
    """Whether a request is refused on arrival, with the code `deadline_infeasible`, if it is expected to miss its
    `deadline_s`, by the steps measured so far and by the prompts before its own."""
    quotas: tuple[TenantQuota, ...] = ()
    """Limits of tenants, each named once. A request that exceeds them alone is refused with `quota_exceeded`."""
    stream_interval: int = 1
    """Least output tokens of a `Delta`; the first and the last of a request may have fewer. A higher value costs fewer
    messages, and tokens come later and several at a time."""

    # scheduling
    schedule_policy: str = "fcfs"
    """Which waiting request is next: a name of `pagewood.schedpolicy.ORDERS`."""
    schedule_weights: tuple[tuple[str, float], ...] = ()
    """Shares of tenants for the order "fair", or of service classes for "wrr"; those that are not named have 1. Other
    orders refuse them."""
    schedule_ageing_s: float | None = None
    """Seconds of waiting after which a request can get every fourth admission as the oldest, whatever the order says;
    None: the order alone decides."""
    low_priority_first: bool = False
    """Whether a lower `priority` is the more important one, in every order and for preemption. It is refused together
    with the order "priority-low", which admits low priorities first but spares high ones from preemption."""
    preemption_threshold: int | None = None
    """A waiting request that does not fit preempts running ones whose priority is lower by more than this. None: a
    running request is preempted only when memory runs out."""
    schedule_conservativeness: float = 1.0
    """Factor of the memory that is kept for the outputs of running requests, > 0. A lower value admits more requests,
    and preempts more when memory runs out. Outputs count as if no layer had a window: where most have, a lower value
    fits."""
    chunked_prefill_size: int | None = None
    """Most prompt tokens in one step, over all requests; None: 512 on a CPU, 2048 on CUDA, whose matrix units need more
    tokens to be busy. A higher value computes prompts faster and delays decoding requests for longer."""
    target_step_s: float | None = None
    """Seconds that a step should take at most where requests decode: prompts get as many tokens as fit beside them by
    the steps measured so far, but always some. None: always up to `chunked_prefill_size`."""
    schedule_preset: SchedulePreset | None = None
    """How prompts and decodes share steps. decode-first: each decoding request gets a token in every step, and prompts
    up to `chunked_prefill_size` beside them. stall-free: the same, but prompts and decodes together get
    `chunked_prefill_size`, so that a step takes as long with many decodes as with few; prompts always get an eighth of
    it. prefill-first: as the field `prefill_first`. None: as that field says, otherwise decode-first."""
    prefill_first: bool = False
    """Whether prompts are computed before anything else, in steps without decoding: first tokens come sooner, and
    decoding requests stall meanwhile. Otherwise every decoding request gets a token in every step."""
    max_prefills: int = 8
    """Prompts that one step may compute parts of."""
    joint_prefill_tokens: int | None = None
    """A step gets no further prompt when the prompts that end in it have at least this many tokens together. Another
    one would get its first token no sooner than in the next step, and it would delay the others. None, on a CPU: 128,
    or more for a small model. None, elsewhere: no limit."""
    chunk_align: int = 1
    """A part of a prompt that does not end the prompt ends at a multiple of this many tokens. So prompts are cut at the
    same kind of place whatever else is in the step, for kernels whose order of additions depends on where they are cut.
    At most seven eighths of the prompt tokens of a step, and not with `target_step_s`."""
    overlap: bool | None = None
    """Whether step N+1 is planned while step N computes; None: yes, unless
    `num_continuous_decode_steps` is above 1, or there are stages. With `pipeline_parallel_size`, one step more than
    there are stages is then in flight, so that the first stage does not wait for the host; steps have fewer requests
    each."""
    num_continuous_decode_steps: int = 1
    """Steps that are launched after one decision while the same requests decode. 1: one, in the loop that `overlap`
    chooses; more: all are launched before the first is retired, and `overlap` must not be true. The engine then looks
    at its inbox and its queue only after that many steps, and wastes what it computes behind the end of a request. For
    comparisons with engines that do this."""
    cuda_graph: bool = True
    """Whether decode steps are captured as CUDA graphs."""
    cuda_graph_max_batch: int | None = None
    """Requests in the largest captured step; None: `max_running`. It needs `cuda_graph`."""

    # drafts, grammars, logits
    speculative: Literal["off", "ngram", "suffix", "draft", "eagle", "auto"] = "off"
    """How tokens are drafted before the model verifies several of them in one step. ngram: the text of the request
    itself; suffix: that and earlier outputs of the same namespace; draft: a smaller model; eagle: a head on the model's
    hidden states (EAGLE-3 or MTP); auto: the head or the draft model that comes with the model, otherwise ngram."""
    speculative_model: str | None = None
    """Folder of the draft model or the head; None: the one in the model's folder (`draft` or `eagle`)."""
    speculative_num_tokens: int = 5
    """Most draft tokens of a request in one step."""
    speculative_control: Literal["adaptive", "fixed"] = "adaptive"
    """adaptive: as many draft tokens as pay by measured acceptance and cost, down to none;
    fixed: always `speculative_num_tokens`."""
    speculative_verify: Literal["exact", "rejection"] = "exact"
    """exact: a draft token is accepted if it is the token that the model draws, so drafts do not change the text;
    rejection: chain rejection sampling, which accepts more drafts and keeps the distribution. Sampled text then differs
    from that of plain decoding; it depends on the seed and on the number of drafts in each step, which adaptive
    control, preemption and the prefix cache may change. Greedy text is the same."""
    grammar_backend: Literal["llguidance", "xgrammar"] = "llguidance"
    """The library that grammars are compiled with; xgrammar must be installed (`pagewood-engine[xgrammar]`)."""
    grammar_timeout_s: float = 10.0
    """Seconds after which a request whose grammar has not been compiled is refused."""
    logits_processors: tuple[tuple[str, str], ...] = ()
    """Functions that requests may name to change their logits: the name and the place of each, such as ("ban",
    "my_package.processors:ban"). They are imported when the engine is built, and run in its process. A function is
    called as `process(tokens, logits, **arguments)` before each token is drawn; see `SamplingParams.logits_processors`
    for the arguments and the order of changes.

    tokens: `[n] int32`, a copy of the tokens of prompt and output before the drawn one, on the engine's device.
    logits: `[vocab_size] float32`, to be changed in place. A token with minus infinity must keep it: it is forbidden.

    It must be a pure function of its arguments, because drafts, preemption and the like decide how often and in which
    order it is called. A request ends with an error if the function raises an exception, writes NaN, or leaves no token
    a probability."""
    seed: int = 0
    """Seed from which the seeds of requests without one are made."""

    # decision log
    decision_log: str | None = None
    """File for everything that decisions depend on, which `pagewood replay` and `pagewood why` read; an existing file
    gets `.1` behind its name. None: nothing is written, and it costs nothing. Tokens and namespaces are renamed (see
    `decision_log_tokens`). Unless `cache_history_tokens` is set, 2**20 evicted tokens are remembered."""
    decision_log_mb: float = 256.0
    """Largest size of that file and the one before it together, in units of 1e6 bytes. When the file has half of it,
    it replaces the one before."""
    decision_log_tokens: bool = False
    """Whether the log has the real tokens and namespaces of requests; it needs `decision_log`. Otherwise both get other
    names, which are equal where the real ones are. Namespaces keep theirs with the order "fair", which compares them,
    and where the configuration names them."""

    def __post_init__(self) -> None:
        self._check_ranges()
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, got {self.device!r}")
        if not 0.0 < self.mem_fraction <= 1.0:
            raise ValueError(f"mem_fraction must be in (0, 1], got {self.mem_fraction}")
        if self.device != "cuda" and self.dtype not in ("auto", "float32"):
            raise ValueError(f"dtype must be float32 on a CPU, got {self.dtype}")
        if self.device == "cuda" and self.weights != "auto":
            raise ValueError(f"weights must be auto on CUDA, which keeps them in dtype, got {self.weights!r}")
        if self.activations != "auto" and self.device == "cuda":
            raise ValueError(f"activations must be auto on CUDA, which computes in dtype, got {self.activations!r}")
        if self.activations == "bfloat16" and self.weights not in ("auto", "bfloat16"):
            raise ValueError(f"activations must be auto or float32 with weights {self.weights!r}, got 'bfloat16'")
        self._check_processors()
        if self.low_priority_first and self.schedule_policy.replace("_", "-") == "priority-low":
            raise ValueError("low_priority_first must be false with the schedule_policy priority-low, got both")
        for name, weight in self.schedule_weights:
            if not 0 < weight < math.inf:
                raise ValueError(f"schedule_weights must be > 0 and finite, got {weight} for {name!r}")
        self._check_limits()
        if self.max_length == 1:
            raise ValueError("max_length must be >= 2, for a prompt and an output of a token each, got 1")
        defaults = self._defaults
        dtype = defaults.dtype if self.dtype == "auto" else self.dtype
        if self.kv_cache_dtype not in (here := ("auto", dtype, defaults.quantised)):
            where = f"on CUDA with dtype {dtype}" if self.device == "cuda" else "on a CPU"
            raise ValueError(f"kv_cache_dtype must be one of {', '.join(here)} {where}, got {self.kv_cache_dtype!r}")
        self._check_nodes()
        self._check_ranks()
        self._check_stages()
        self._check_experts()
        self._check_dp_attention()
        self._check_adapters()
        self._check_images()
        self._check_needs()
        self._check_tiers()
        self._check_retention()
        self._check_speculation()
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ValueError(
                f"max_total_tokens must hold at least one page of {self.page_size}, got {self.max_total_tokens}"
            )

    def _check_ranges(self) -> None:
        """Refuse fields that are out of their range whatever the others are."""
        given: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        absent = {one.name for one in fields(self) if one.default is None and given[one.name] is None}
        for name in _WORDS:
            if name not in absent and given[name] not in (known := _words_of(name)):
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {given[name]!r}")
        for rule, keeps, names in _RANGES:
            for name in names:
                if name in absent:
                    continue
                if rule == ">= 1" and not isinstance(given[name], int):
                    raise ValueError(f"{name} must be an int, got {given[name]!r}")
                if not keeps(given[name]):
                    raise ValueError(f"{name} must be {rule}, got {given[name]}")

    @property
    def num_rows(self) -> int:
        """`max_running`, or the device's default."""
        return self.max_running or self._defaults.max_running

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_pools(self) -> int:
        """Processes that have pages and states of requests of their own; 1: all have parts of the same ones."""
        return self.tensor_parallel_size if self.enable_dp_attention else 1

    @property
    def max_chunk_tokens(self) -> int:
        """`chunked_prefill_size`, or the device's default."""
        return self.chunked_prefill_size or self._defaults.chunked_prefill_size

    def resolved(self) -> EngineConfig:
        """Return this configuration with a value for each "auto" or None whose default depends on the device only."""
        defaults = self._defaults
        dtype = defaults.dtype if self.dtype == "auto" else self.dtype
        return replace(
            self,
            device="cpu" if self.device == "auto" else self.device,
            dtype=dtype,
            kv_cache_dtype=dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            max_running=self.num_rows,
            overlap=self.num_continuous_decode_steps == self.pipeline_parallel_size == 1
            if self.overlap is None
            else self.overlap,
            chunked_prefill_size=self.max_chunk_tokens,
            cuda_graph_max_batch=min(self.cuda_graph_max_batch or self.num_rows, self.num_rows)
            if self.cuda_graph
            else None,
        )

    @property
    def _defaults(self) -> _DeviceDefaults:
        return _CUDA if self.device == "cuda" else _CPU

    @property
    def mixing(self) -> SchedulePreset:
        """How prompts and decodes share steps: `schedule_preset`, or what `prefill_first` says."""
        return self.schedule_preset or ("prefill-first" if self.prefill_first else "decode-first")

    @property
    def ranks_per_node(self) -> int:
        """Processes that compute the model together on each host."""
        return self.num_ranks // self.nnodes

    def _check_nodes(self) -> None:
        """Refuse fields of hosts that contradict each other, and what ranks on several hosts cannot do."""
        if self.nnodes == 1:
            whole = ("node_rank", 0), ("master_addr", None), ("node_secret_file", None)
            for name, off in (*whole, ("insecure_no_node_secret", False)):
                if (value := getattr(self, name)) != off:
                    raise ValueError(f"{name} must be {off} with nnodes 1, got {value!r}")
            return
        if self.num_ranks % self.nnodes:
            sizes = "tensor_parallel_size" + " times pipeline_parallel_size" * (self.pipeline_parallel_size > 1)
            raise ValueError(f"{sizes} must be a multiple of nnodes {self.nnodes}, got {self.num_ranks}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node_rank must be in [0, {self.nnodes}) with nnodes {self.nnodes}, got {self.node_rank}")
        if self.master_addr is None:
            raise ValueError(f"master_addr must be HOST:PORT with nnodes {self.nnodes}, got None")
        address = Address.parsed(self.master_addr)
        if self.node_secret_file is not None and self.insecure_no_node_secret:
            raise ValueError("insecure_no_node_secret must be False with node_secret_file, got True")
        if self.node_secret_file is None and not (address.is_loopback or self.insecure_no_node_secret):
            raise ValueError(
                f"node_secret_file must be given unless master_addr is a loopback address, got {self.master_addr}: "
                "give a secret, or trust all who reach that address with insecure_no_node_secret"
            )

    def _check_ranks(self) -> None:
        if self.num_threads is not None and self.num_threads < self.ranks_per_node:
            sizes = f"tensor_parallel_size {self.tensor_parallel_size}"
            if self.nnodes > 1:
                sizes += f" over nnodes {self.nnodes}"
            if self.pipeline_parallel_size > 1:
                sizes += f" times pipeline_parallel_size {self.pipeline_parallel_size}"
            raise ValueError(f"num_threads must be at least {sizes}, got {self.num_threads}")
        if self.tensor_parallel_size > 1 and self.model_impl == "transformers":
            raise ValueError(
                f"tensor_parallel_size must be 1 with model_impl transformers, got {self.tensor_parallel_size}"
            )

    def _check_stages(self) -> None:
        """Refuse what stages cannot do."""
        if self.pipeline_parallel_size == 1:
            return
        refused: list[tuple[str, bool, str, object]] = [
            ("model_impl", self.model_impl == "transformers", "auto or native", self.model_impl),
            (
                "num_continuous_decode_steps", self.num_continuous_decode_steps > 1, "1",
                self.num_continuous_decode_steps,
            ),
            ("expert_load", self.expert_load != "off", "off", self.expert_load),
            ("enable_dp_attention", self.enable_dp_attention, "False", True),
            ("target_step_s", self.target_step_s is not None, "None", self.target_step_s),
            ("refuse_late", self.refuse_late, "False", self.refuse_late),
            ("decision_log", self.decision_log is not None, "None", self.decision_log),
        ]  # fmt: skip
        for name, is_wrong, rule, value in refused:
            if is_wrong:
                raise ValueError(
                    f"{name} must be {rule} with pipeline_parallel_size {self.pipeline_parallel_size}, got {value!r}"
                )

    def _check_dp_attention(self) -> None:
        """Refuse what attention by request cannot be combined with."""
        if not self.enable_dp_attention:
            return
        if self.tensor_parallel_size == 1:
            raise ValueError("enable_dp_attention must be False with tensor_parallel_size 1, got True")
        values: dict[str, object] = {
            "preemption_threshold": self.preemption_threshold,
            "decision_log": self.decision_log,
        }
        for name, value in values.items():
            if value is not None:
                raise ValueError(f"{name} must be None with enable_dp_attention, got {value!r}")

    def _check_adapters(self) -> None:
        num_loaded = len(self.adapters)
        names = [name for name, _ in self.adapters]
        if len(set(names)) < num_loaded or "" in names:
            raise ValueError(f"adapters must have names of their own, got {', '.join(names)}")
        if self.adapters and not self.max_adapters:
            raise ValueError(f"max_adapters must be >= 1 with adapters, got {self.max_adapters}")
        if self.max_adapters < 0:
            raise ValueError(f"max_adapters must be >= 0, got {self.max_adapters}")
        if not 1 <= self.max_adapter_rank <= MAX_ADAPTER_RANK:
            raise ValueError(f"max_adapter_rank must be in [1, {MAX_ADAPTER_RANK}], got {self.max_adapter_rank}")
        if not 0 <= self.max_adapter_expert_rank <= self.max_adapter_rank:
            raise ValueError(
                f"max_adapter_expert_rank must be in [0, {self.max_adapter_rank}], up to max_adapter_rank, got "
                f"{self.max_adapter_expert_rank}"
            )
        if not self.max_adapters:
            return
        if self.model_impl == "transformers":
            raise ValueError(f"max_adapters must be 0 with model_impl transformers, got {self.max_adapters}")

    @property
    def why_no_images(self) -> str | None:
        """Which option rules images out, as the end of a sentence; None: no option does."""
        reasons = {
            "images are off": self.images == "off",
            "model_impl is transformers": self.model_impl == "transformers",
            "several ranks compute the model": self.tensor_parallel_size > 1,
            "the model is cut into stages": self.pipeline_parallel_size > 1,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _check_images(self) -> None:
        if self.images == "on" and (why := self.why_no_images) is not None:
            raise ValueError(f"images must be auto or off, because {why}, got 'on'")

    def _check_experts(self) -> None:
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError("expert_parallel must be False with tensor_parallel_size 1, got True")
        if self.expert_map is not None and not self.expert_parallel:
            raise ValueError(f"expert_map must be None without expert_parallel, got {self.expert_map!r}")
        if self.expert_kernels != "triton":
            rank = self.max_adapter_expert_rank
            for reason, is_so in (
                ("on a CPU, which has kernels of its own", self.device != "cuda"),
                ("with batch_invariant, because tiles of the others depend on the batch", self.batch_invariant),
                (f"with max_adapter_expert_rank {rank}, because adapters add to each product", rank > 0),
            ):
                if is_so:
                    raise ValueError(f"expert_kernels must be triton {reason}, got {self.expert_kernels}")
        if self.expert_load != "off" and self.device == "cuda":
            raise ValueError(f"expert_load must be off on CUDA, where rows are not counted, got {self.expert_load}")
        if self.expert_load != "off" and self.model_impl == "transformers":
            raise ValueError(f"expert_load must be off with model_impl transformers, got {self.expert_load}")

    def _check_needs(self) -> None:
        """Refuse fields that have no effect beside others."""
        if self.cuda_graph_max_batch is not None and not self.cuda_graph:
            raise ValueError(f"cuda_graph_max_batch must be None without cuda_graph, got {self.cuda_graph_max_batch}")
        if self.overlap and self.num_continuous_decode_steps > 1:
            raise ValueError(
                "overlap must be None or False with num_continuous_decode_steps > 1, got True with "
                f"{self.num_continuous_decode_steps}"
            )
        if self.cache_history_tokens and not self.prefix_cache:
            raise ValueError(f"cache_history_tokens must be 0 without prefix_cache, got {self.cache_history_tokens}")
        if self.decision_log_tokens and self.decision_log is None:
            raise ValueError("decision_log_tokens must be False without decision_log, got True")
        if self.schedule_weights and self.schedule_policy not in ("fair", "wrr"):
            raise ValueError(
                "schedule_weights must be empty unless schedule_policy is fair or wrr, got "
                f"{self.schedule_weights!r:.100} with {self.schedule_policy}"
            )

    def _check_chunk_align(self) -> None:
        """Refuse alignments for which no step might have room, because a prompt would then never go on."""
        num_tokens = self.max_chunk_tokens // (8 if self.mixing == "stall-free" else 1)
        if self.chunk_align > 1 and self.chunk_align > num_tokens - num_tokens // 8:
            raise ValueError(
                f"chunk_align must be <= {num_tokens - num_tokens // 8}, seven eighths of a step's prompt tokens, got "
                f"{self.chunk_align}"
            )
        if self.chunk_align > 1 and self.target_step_s is not None:
            raise ValueError(f"chunk_align must be 1 with target_step_s, which cuts elsewhere, got {self.chunk_align}")

    def _check_limits(self) -> None:
        if self.prefill_first and self.mixing != "prefill-first":
            raise ValueError(f"schedule_preset must be prefill-first with prefill_first, got {self.schedule_preset!r}")
        self._check_chunk_align()
        names: set[str] = set()
        for quota in self.quotas:
            if quota.tenant in names:
                raise ValueError(f"quotas must name each tenant once, got {quota.tenant!r} again")
            names.add(quota.tenant)
            for name, limit in zip(quota._fields[1:], quota[1:], strict=True):
                if limit is not None and limit < 1:
                    raise ValueError(f"quotas must have {name} >= 1, got {limit} for {quota.tenant!r}")

    def _check_speculation(self) -> None:
        has_model = self.speculative in ("draft", "eagle")
        if self.speculative_model is not None and not has_model:
            raise ValueError(
                f"speculative_model must come with speculative draft or eagle, got {self.speculative_model!r} with "
                f"{self.speculative}"
            )
        if self.speculative_verify == "rejection" and not has_model:
            raise ValueError(
                "speculative_verify must be exact unless speculative is draft or eagle, got rejection with "
                f"{self.speculative}"
            )
        if self.speculative_num_tokens > _MOST_DRAFT_TOKENS:
            raise ValueError(
                f"speculative_num_tokens must be <= {_MOST_DRAFT_TOKENS}, got {self.speculative_num_tokens}"
            )

    def _check_processors(self) -> None:
        names: set[str] = set()
        for name, place in self.logits_processors:
            if not 1 <= len(name) <= MAX_PROCESSOR_NAME:
                raise ValueError(
                    f"logits_processors must have names of 1 to {MAX_PROCESSOR_NAME} characters, got {name!r}"
                )
            if name in names:
                raise ValueError(f"logits_processors must have each name once, got {name!r} again")
            names.add(name)
            module, _, function = place.partition(":")
            if not all(map(str.isidentifier, (*module.split("."), function))):
                raise ValueError(
                    "logits_processors must be found at places like package.module:function, "
                    f"got {place!r} for {name!r}"
                )

    def _check_retention(self) -> None:
        if not 0.0 <= self.retained_share <= 1.0:
            raise ValueError(f"retained_share must be in [0, 1], got {self.retained_share}")
        if self.retained_share and not self.prefix_cache:
            raise ValueError(f"retained_share must come with the prefix cache, got {self.retained_share} without it")

    def _check_tiers(self) -> None:
        for place, size in (("disk_cache_path", "disk_cache_gb"), ("remote_cache", "remote_cache_gb")):
            found = getattr(self, place), getattr(self, size)
            if place == "remote_cache" and str(found[0]).startswith(("lmcache+", "redis://")):
                if found[1] is not None:
                    raise ValueError(
                        f"{size} must be None with {str(found[0]).partition('?')[0]}, whose service decides it, "
                        f"got {found[1]}"
                    )
            elif (found[0] is None) != (found[1] is None):
                raise ValueError(f"{place} and {size} must be given together, got {found[0]!r} and {found[1]}")
            if found[0] is not None and self.host_cache_gb is None:
                raise ValueError(f"{place} must come with host_cache_gb, got {found[0]!r} without it")
        if self.role != "both" and self.remote_cache is None:
            raise ValueError(f"role must be both without remote_cache, got {self.role!r}")
        if self.role != "both" and self.decision_log is not None:
            raise ValueError(f"role must be both with decision_log, which does not know shared KV, got {self.role!r}")
        if self.role == "prefill" and self.cache_write_policy != "write_through":
            raise ValueError(
                f"cache_write_policy must be write_through with role 'prefill', got {self.cache_write_policy!r}"
            )
        if self.host_cache_gb is not None and not self.prefix_cache:
            raise ValueError(f"host_cache_gb must come with the prefix cache, got {self.host_cache_gb} without it")
        if self.cache_write_policy not in ("write_through", "write_through_selective", "write_back"):
            raise ValueError(
                "cache_write_policy must be write_through, write_through_selective or write_back, "
                f"got {self.cache_write_policy!r}"
            )


@cache
def _words_of(name: str) -> tuple[str, ...]:
    """Return the words that a field of `EngineConfig` may be."""
    hint = get_type_hints(EngineConfig)[name]
    return get_args(hint) if get_origin(hint) is Literal else get_args(get_args(hint)[0])  # of `Literal[...] | None`
