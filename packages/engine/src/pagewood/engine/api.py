"""What an engine is told and what it answers: the whole vocabulary between the engine and its users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal, NamedTuple, Protocol


class FinishReason(Enum):
    """Why a request ended; the values are the words of OpenAI's API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REFUSED = "refused"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when they end.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off. Filters apply in the
    order temperature, top_k, top_p, min_p. With a `seed`, the tokens are a function of (weights, prompt, seed) only.

    Raises:
        ValueError: a field is out of its range.
    """

    max_tokens: int | None = 128
    """None: as many as the engine's `max_length` leaves."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be in [0, 100], got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 signed bits, got {self.seed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is refused: text for a person, the name of the offending parameter, a code for a program."""

    message: str
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Generate from `tokens` (int32 little-endian bytes, so that no link turns them into Python lists).

    Requests share cached prefixes only inside one `namespace`. Higher `priority` goes first. `carry` is not read by
    the engine: it comes back unchanged in the first `Delta` of this request.
    """

    request_id: str
    tokens: bytes
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    namespace: str | None = None
    carry: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End a request now, wherever it is. An unknown or finished `request_id` is not an error."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPriority:
    """Give a request another priority, from the next step on, whether it waits, runs or streams.

    While it waits, the order decides by it; once it runs, who yields when memory runs out. An unknown or finished
    `request_id` is not an error, and there is no answer.
    """

    request_id: str
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """A request that failed before it reached the engine; it is answered with a refusing `Delta`, in its order."""

    request_id: str
    refusal: Refusal
    carry: bytes = b""


Command = Submit | Abort | SetPriority | Refuse


class Delta(NamedTuple):
    """What one step did for one request: a tuple, because there is one for every token.

    The last Delta of a request has a `finish`; every request gets exactly one such Delta. `first` marks the first
    Delta of a request, the only one that has a `carry`. The token that stopped a request (end of sequence or a stop
    token) is not among `tokens`; `num_output_tokens` counts it.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    refusal: Refusal | None = None
    first: bool = False
    carry: bytes = b""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


class Inbox(Protocol):
    """Where an engine takes its commands from."""

    def receive(self, *, timeout_s: float | None) -> Sequence[Command]:
        """Return the commands that arrived, in order; wait up to `timeout_s` (0: do not wait, None: no limit)."""
        ...


class Outbox(Protocol):
    """Where an engine puts its answers."""

    def send(self, deltas: Sequence[Delta]) -> None:
        """Hand on the answers of one step, in order; must not block for long."""
        ...


class _DeviceDefaults(NamedTuple):
    """The values of a configuration that depend on the device only."""

    dtype: Literal["float32", "bfloat16"]
    quantised: str
    """The KV dtype that takes less memory than `dtype`."""
    max_running: int
    chunked_prefill_size: int


_CPU = _DeviceDefaults("float32", "int8", max_running=64, chunked_prefill_size=512)
_CUDA = _DeviceDefaults("bfloat16", "fp8_e4m3", max_running=256, chunked_prefill_size=2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that decides how an engine is built.

    "auto" and None stand for a value that fits the model and the machine. It is chosen once, when the engine is built,
    and the whole configuration is then logged.

    Raises:
        ValueError: a field is out of its range, or two fields contradict each other.
    """

    model: str | None = None
    """Folder of a Hugging Face model; None: the model that ships inside pagewood-engine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the CPU, as long as the CUDA runner has not been run on a GPU."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Of weights, activations and KV memory; auto: float32 on a CPU, bfloat16 on CUDA. A CPU takes float32 only, CUDA
    one of the others."""
    mem_fraction: float = 0.9
    """Share of a CUDA device's free memory that weights, activations, graphs and KV memory take together."""
    cuda_graph: bool = True
    """Whether decode steps are captured as CUDA graphs."""
    cuda_graph_max_batch: int | None = None
    """Requests in the largest captured step; None: max_running."""
    batch_invariant: bool = False
    """Whether the tokens of a request must not depend on the other requests of its steps on CUDA, to the last bit: it
    costs speed. On a CPU they never do."""
    num_threads: int | None = None
    """Compute threads of the CPU runner; None: one per physical core."""
    max_total_tokens: int | None = None
    """Token positions of KV memory, over all requests and the prefix cache."""
    max_length: int | None = None
    """Longest prompt plus output of one request; None: what the model and the KV memory allow."""
    max_running: int | None = None
    """Requests that may run at the same time; None: 64 on a CPU, 256 on CUDA."""
    page_size: int = 16
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    """Scales how much memory is kept for the outputs of running requests; less admits more and preempts more."""
    chunked_prefill_size: int | None = None
    """Prompt tokens computed in one step, over all requests; None: 512 on a CPU, 2048 on CUDA, whose matrix units need
    more of them to be busy. Larger prompts go faster, and hold those that decode beside them up for longer."""
    max_prefills: int = 8
    """Prompts that may be in progress in one step."""
    prefill_first: bool = False
    """Whether steps that compute prompts compute nothing else and come first: first tokens come sooner, and requests
    that decode stall meanwhile. Otherwise each decoding request gets its token in every step."""
    overlap: bool = True
    """Plan step N+1 while step N computes."""
    prefix_cache: bool = True
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8_e4m3"] = "auto"
    """How keys and values are kept; auto: as `dtype`. A CPU also takes int8 with a scale for each token and head, which
    takes a little over a quarter of float32. CUDA also takes fp8_e4m3 without scales, half of `dtype`."""
    host_cache_gb: float | None = None
    """Main memory for KV that leaves the KV memory of the running requests, in units of 1e9 bytes; None: none. For a
    CUDA device it is pinned, and taken at start."""
    disk_cache_path: str | None = None
    """Folder on a disk for the same, which outlives the process; None: none. It needs a host cache."""
    disk_cache_gb: float | None = None
    """How large its files may be, in units of 1e9 bytes."""
    cache_write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    """When KV is copied to the host cache: as soon as it is cached, when it is used a second time, or when evicted."""
    seed: int = 0
    """Seed of the requests that name none."""

    def __post_init__(self) -> None:
        for name in ("page_size", "max_prefills"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0.0 < self.mem_fraction <= 1.0:
            raise ValueError(f"mem_fraction must be in (0, 1], got {self.mem_fraction}")
        if self.device != "cuda" and self.dtype not in ("auto", "float32"):
            raise ValueError(f"dtype must be float32 on a CPU, got {self.dtype}")
        if self.schedule_conservativeness <= 0:
            raise ValueError(f"schedule_conservativeness must be > 0, got {self.schedule_conservativeness}")
        for name in (
            "max_running", "chunked_prefill_size", "num_threads", "max_total_tokens", "max_length",
            "cuda_graph_max_batch",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        defaults = self._defaults
        dtype = defaults.dtype if self.dtype == "auto" else self.dtype
        if self.kv_cache_dtype not in (here := ("auto", dtype, defaults.quantised)):
            where = f"on CUDA with dtype {dtype}" if self.device == "cuda" else "on a CPU"
            raise ValueError(f"kv_cache_dtype must be one of {', '.join(here)} {where}, got {self.kv_cache_dtype!r}")
        self._check_tiers()
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ValueError(
                f"max_total_tokens must hold at least one page of {self.page_size}, got {self.max_total_tokens}"
            )

    @property
    def num_rows(self) -> int:
        """`max_running`, or the device's default."""
        return self.max_running or self._defaults.max_running

    @property
    def max_chunk_tokens(self) -> int:
        """`chunked_prefill_size`, or the device's default."""
        return self.chunked_prefill_size or self._defaults.chunked_prefill_size

    def resolved(self) -> EngineConfig:
        """Return this configuration with a value in place of each auto or None that depends on the device only."""
        defaults = self._defaults
        dtype = defaults.dtype if self.dtype == "auto" else self.dtype
        return replace(
            self,
            device="cpu" if self.device == "auto" else self.device,
            dtype=dtype,
            kv_cache_dtype=dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            max_running=self.num_rows,
            chunked_prefill_size=self.max_chunk_tokens,
            cuda_graph_max_batch=min(self.cuda_graph_max_batch or self.num_rows, self.num_rows),
        )

    @property
    def _defaults(self) -> _DeviceDefaults:
        return _CUDA if self.device == "cuda" else _CPU

    def _check_tiers(self) -> None:
        for name in ("host_cache_gb", "disk_cache_gb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        if (self.disk_cache_path is None) != (self.disk_cache_gb is None):
            raise ValueError(
                "disk_cache_path and disk_cache_gb must be given together, "
                f"got {self.disk_cache_path!r} and {self.disk_cache_gb}"
            )
        if self.disk_cache_path is not None and self.host_cache_gb is None:
            raise ValueError(
                f"disk_cache_path must come with host_cache_gb, which its pages pass, got {self.disk_cache_path!r}"
            )
        if self.host_cache_gb is not None and not self.prefix_cache:
            raise ValueError(f"host_cache_gb must come with the prefix cache, got {self.host_cache_gb} without it")
        if self.cache_write_policy not in ("write_through", "write_through_selective", "write_back"):
            raise ValueError(
                "cache_write_policy must be write_through, write_through_selective or write_back, "
                f"got {self.cache_write_policy!r}"
            )
