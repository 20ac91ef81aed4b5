"""What the engine is asked for."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from pagewood.engine.api.answers import Refusal
from pagewood.engine.api.pooling_params import PoolingParams
from pagewood.engine.api.sampling_params import SamplingParams
from pagewood.engine.weight_commands import FinishUpdate, NameVersion, WeightCommand


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of the engine, beside its tokens.

    Requests share cached prefixes only within a `namespace`. Higher `priority` goes first. With `pooling` the engine
    answers with a vector instead of tokens, and does not read `sampling`.
    """

    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    pooling: PoolingParams | None = None
    priority: int = 0
    deadline_s: float | None = None
    """Time by which it should have ended, on the clock of `time.monotonic`. A request that falls behind gets more of
    the drafts; it is not ended at that time, but see `EngineConfig.refuse_late`. None: it has no deadline."""
    namespace: str | None = None
    tenant: str | None = None
    """The tenant whose quotas and share of the engine it uses; None: its namespace."""
    explain: bool = False
    """Whether its first `Delta` has an `Explanation`, and its last one `RequestTimings`."""
    explain_admission: bool = False
    """Whether its first `Delta` has an `Explanation`, also without `explain`."""
    service_class: str = ""
    """Its class, for the order "wrr"."""
    tag: str = ""
    """What it should run next to, for the order "tag", such as the name of an adapter."""
    adapter: str | None = None
    """The name of the adapter that computes it; None: the model alone."""
    is_search: bool = False
    """Whether it is a step of a search: a stop token is then answered as any other token, and if no token is allowed,
    the answer has none and ends with LENGTH."""
    keep_stop_token: bool = False
    """Whether the stop token that ends it is answered as its last token, with its log probability; trainers need it."""
    retain_s: float | None = None
    """Seconds after its end for which its prefix is likely to return, so that the cache keeps it longer than others, at
    most `EngineConfig.max_retain_s` and as far as `EngineConfig.retained_share` allows; 0: it will not return, so what
    no other cached sequence needs of it is dropped at its end. None: nothing is known."""
    is_paused: bool = False
    """Whether it begins paused: nothing is computed for it before a `ResumeRequest`."""
    cache_hit_threshold: float = 0.0
    """Share of what could come from the cache, all lower tiers included, below which it ends at once with
    `CACHE_THRESHOLD`, in [0, 1]. What could come are the whole pages of its prompt without the last token. 0: it is
    always computed. Not for a step of a search. Source: llm-d's connector for shared storage."""
    handover: Literal["publish", "await"] | None = None
    """What another engine with the same shared cache does for it. publish: that engine goes on with it, so its last
    answer comes when the pages of its prompt are in the shared cache, or after ten seconds; `role` prefill does this
    for all requests. await: that engine is computing its prompt, so it waits for pages while new ones come, at most two
    seconds for each further one, and computes what is missing then. None: nothing."""
    names: tuple[str, ...] = ()
    """Other names under which its sender knows it, for the decision log; the engine does not read them."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.retain_s is not None:
            _check_retention("retain_s", self.retain_s)
        if not 0 <= self.cache_hit_threshold <= 1:  # false of NaN
            raise ValueError(f"cache_hit_threshold must be in [0, 1], got {self.cache_hit_threshold}")
        if self.handover not in (None, "publish", "await"):
            raise ValueError(f"handover must be publish, await or None, got {self.handover!r}")


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image as a model's tower takes it, decoded and resized by `pagewood.engine.images`."""

    pixels: bytes
    """`[height, width, 3] uint8`: red, green and blue, row by row."""
    height: int
    width: int


class Submit(RequestOptions, frozen=True, kw_only=True, tag="submit"):
    """Generate from `tokens`: token ids as little-endian int32 bytes, so that links need no Python lists.

    The engine goes on behind `output` as if it had generated it: positions, counts, penalties, `min_tokens`,
    `max_tokens` and the grammar include it, and no `Delta` repeats it. So what an engine has begun, another one can
    end: a token is a function of logits, parameters, seed and position. If the output completes the grammar, the answer
    has no token and ends with STOP.

    The engine does not read `carry`; it returns it unchanged in the first `Delta` of the request.
    """

    request_id: str
    tokens: bytes
    output: bytes = b""
    """The tokens that the request has had already, as in `tokens`; fewer than `max_tokens`."""
    carry: bytes = b""
    images: tuple[Image, ...] = ()
    """In the order of their tokens in `tokens`, which has as many for each as the model's tower makes rows."""

    @classmethod
    def of(
        cls,
        options: RequestOptions,
        *,
        request_id: str,
        tokens: bytes,
        output: bytes = b"",
        carry: bytes = b"",
        images: tuple[Image, ...] = (),
    ) -> Submit:
        """Return the request with these options."""
        return cls(
            request_id=request_id,
            tokens=tokens,
            output=output,
            carry=carry,
            images=images,
            **msgspec.structs.asdict(options),
        )


def _check_retention(name: str, seconds: float) -> None:
    if not 0 <= seconds < math.inf:  # false of NaN
        raise ValueError(f"{name} must be >= 0 and finite, got {seconds}")


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End a request now, in any state. An unknown or finished `request_id` is not an error."""

    request_id: str


class SetPriority(msgspec.Struct, frozen=True, kw_only=True, tag="set_priority"):
    """Change the priority of a request, waiting or running, from the next step on.

    The priority of a waiting request decides when it is admitted, that of a running one which request is preempted when
    memory runs out. An unknown or finished `request_id` is not an error, and there is no answer.
    """

    request_id: str
    priority: int


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag="refuse"):
    """A request that failed before it reached the engine; the answer is a `Delta` with this refusal, sent in order."""

    request_id: str
    refusal: Refusal


class PassOn(msgspec.Struct, frozen=True, kw_only=True, tag="pass_on"):
    """Return `carry`, which the engine does not read, behind the answers to all commands before.

    The answer is a `Delta` that ends with `stop`. Nothing is computed.
    """

    request_id: str
    carry: bytes = b""


class Flush(msgspec.Struct, frozen=True, kw_only=True, tag="flush"):
    """Drop all cached KV that no request uses, on the device and in the host cache; a disk cache keeps what it has.

    The answer is a `Delta` that ends with `stop`; its `num_cached_tokens` are those that were dropped from the device.
    """

    request_id: str
    when_idle: bool = False
    """Whether to wait until no request is left, so that everything is dropped; new requests are taken meanwhile. An
    `Abort` with its id takes it back."""


class Retain(msgspec.Struct, frozen=True, kw_only=True, tag="retain"):
    """Say for how long a text that is cached is likely to return, as `Submit.retain_s` does for that of a request.

    0 seconds: the text will not return. What follows it in the cache stays, so a conversation that was continued from
    it loses nothing. The answer is a `Delta` that ends with `stop`; its `num_cached_tokens` are the tokens that are
    retained because of it, or that were dropped from the device. It is refused if the engine has no retention and
    `seconds` > 0.

    Raises:
        ValueError: `seconds` is out of range.
    """

    request_id: str
    tokens: bytes
    """As in `Submit`."""
    seconds: float
    namespace: str | None = None
    adapter: str | None = None
    """The name of the adapter that has computed it; None: the model alone."""

    def __post_init__(self) -> None:
        """Check the time."""
        _check_retention("seconds", self.seconds)


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Launch no step until `Resume`; new requests are queued meanwhile. The answer is a `Delta` that ends with `stop`.

    No request is ended unless `abort` asks for it, and paused requests go on where they stopped.
    """

    request_id: str
    retract: bool = False
    """Whether running requests give their memory back, as if they were preempted; what the prefix cache keeps of them
    can then be evicted or flushed. Otherwise they keep it."""
    abort: bool = False
    """Whether all requests are ended first, as by an `Abort` of each; their answers come before that to `Pause`."""
    waits: bool = False
    """Whether the requests that are there end first, but for those that are paused alone; new ones are kept back."""


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Launch steps again, but not of requests that were paused alone. The answer is a `Delta` that ends with `stop`."""

    request_id: str


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True, tag="pause_request"):
    """Compute nothing for one request until `ResumeRequest`, in any state; the engine goes on with all others.

    The request keeps its age and what it has answered, and no limit of the queue applies to it from now on. An unknown
    or finished `request_id` is not an error, and there is no answer.
    """

    request_id: str
    retract: bool = False
    """Whether it gives its memory back if it runs; the prefix cache keeps its KV while there is room. Otherwise it
    keeps its memory until other requests lack it."""


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True, tag="resume_request"):
    """Go on with a request that was paused alone. A request that is not paused is not an error; there is no answer."""

    request_id: str


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="load_adapter"):
    """Read an adapter, so that later requests may name it. Steps go on meanwhile.

    The answer is a `Delta` that ends with `stop`, or with a refusal that says what is wrong with the folder. An adapter
    with the contents of the one that it replaces changes nothing, so what is cached for that stays. Otherwise running
    requests end with the old one, and no request gets what is cached for that.
    """

    request_id: str
    name: str
    folder: str
    """Folder as PEFT writes it, on the engine's machine."""
    replaces: bool = False
    """Whether there may be an adapter of that name already."""
    is_pinned: bool = False
    """Whether it keeps its slot while no request uses it."""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """Let no later request name an adapter; those that have it end with it.

    The answer is a `Delta` that ends with `stop`, or with a refusal if there is no such adapter.
    """

    request_id: str
    name: str


Command = (
    Submit | Abort | SetPriority | Refuse | PassOn | Flush | Pause | Resume | PauseRequest | ResumeRequest | Retain
    | LoadAdapter | UnloadAdapter | WeightCommand | FinishUpdate | NameVersion
)  # fmt: skip
