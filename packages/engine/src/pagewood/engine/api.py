"""The engine's interface: its commands, its answers and its configuration. Standard library and msgspec only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import msgspec

from pagewood.engine.node_address import Address
from pagewood.engine.sampling_parameter import Parameter, parameters_of
from pagewood.engine.weight_commands import NameVersion, WeightCommand

MAX_LOGIT_BIAS = 1024
"""Most tokens of a `logit_bias`."""
MAX_BAD_WORDS = 256
"""Most sequences of a `bad_words`."""
MAX_BAD_WORD_TOKENS = 32
"""Most tokens of each."""
MAX_LOGITS_PROCESSORS = 8
"""Most `logits_processors` of a request."""
MAX_PROCESSOR_NAME = 128
"""Longest name of a logits processor, in characters."""
MAX_PROCESSOR_ARGUMENTS_BYTES = 4096
"""Longest arguments of a logits processor, in bytes of UTF-8."""
MAX_LOGPROBS = 64
"""Most alternatives that are reported for a token."""
MAX_MARKS = 64
"""Most texts of `Grammar.after`."""
MAX_MARK_LENGTH = 256
"""Longest text of `Grammar.after`, in characters."""


class FinishReason(Enum):
    """Why a request ended; the values are those of OpenAI's API where it has them."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REFUSED = "refused"
    ERROR = "error"
    CACHE_THRESHOLD = "cache_threshold"
    """Less of its prompt was cached than `RequestOptions.cache_hit_threshold` asks for, so nothing was computed."""


class TokenLogprob(NamedTuple):
    """How probable one token was, and which tokens were most probable in its place."""

    token: int
    logprob: float
    """Natural logarithm of its probability; minus infinity if it had none."""
    rank: int
    """1 for the most probable token; equally probable ones share the smaller rank."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with their log probabilities, best first, of equal ones the smaller id first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the output of a request may be. `Grammar.regex("[0-9]+")` and the like make one of each kind.

    The engine compiles the text, and refuses the request if it is wrong.

    Raises:
        ValueError: `text` is empty, or `after` has too many texts, or one that is empty or too long.
    """

    kind: Literal["json_schema", "regex", "lark", "choice", "structural_tag"]
    """json_schema: one JSON value by a JSON schema; regex: a text that matches the whole expression, in Rust's syntax;
    lark: a grammar in llguidance's form of Lark; choice: one of the strings of a JSON array; structural_tag: free text
    with typed regions, as JSON (see `pagewood.engine.grammar`)."""
    text: str
    after: tuple[str, ...] = ()
    """The grammar begins behind the first of these texts that the output has, such as the end of a section of
    reasoning. The output before it is free, but does not end. Empty: the grammar begins at once."""

    def __post_init__(self) -> None:
        """Check that there is a text, and that the marks may be."""
        if not self.text:
            raise ValueError("grammar.text must not be empty")
        if len(self.after) > MAX_MARKS or any(not 0 < len(mark) <= MAX_MARK_LENGTH for mark in self.after):
            raise ValueError(
                f"grammar.after must hold at most {MAX_MARKS} texts of 1 to {MAX_MARK_LENGTH} characters, "
                f"got {self.after!r:.300}"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """Return the grammar of one JSON value that a schema describes.

        Properties come in the order of the schema.

        Args:
            schema: an object, or its JSON text.

        Raises:
            TypeError: it holds something that JSON does not have.
            ValueError: it holds a number that is not finite.
        """
        return cls(kind="json_schema", text=_json_text("schema", schema))

    @classmethod
    def regex(cls, expression: str) -> Grammar:
        """Return the grammar of the texts that an expression in Rust's syntax matches from their start to their end."""
        return cls(kind="regex", text=expression)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """Return the grammar of one of several texts.

        Raises:
            TypeError: `choices` is a string, or does not hold strings.
        """
        items: list[object] = list(choices)
        if isinstance(choices, str) or not all(isinstance(item, str) for item in items):
            raise TypeError(f"choices must be a sequence of strings, got {choices!r:.100}")
        return cls(kind="choice", text=_json_text("choices", items))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Return the grammar that a text in llguidance's form of Lark describes.

        `pagewood.engine.ebnf.lark_of_ebnf` translates EBNF, as llama.cpp has it.
        """
        return cls(kind="lark", text=grammar)

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any] | str) -> Grammar:
        """Return the grammar of free text with typed regions.

        Args:
            tag: an object with the type structural_tag, or its JSON text.

        Raises:
            TypeError: it holds something that JSON does not have.
            ValueError: it holds a number that is not finite.
        """
        return cls(kind="structural_tag", text=_json_text("tag", tag))


def _json_text(name: str, value: object) -> str:
    """Return the compact JSON of a value; a string is such a text already."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except TypeError as error:
        raise TypeError(f"{name} must be a JSON value or its text: {error}") from None
    except ValueError as error:
        raise ValueError(f"{name} must be a JSON value or its text: {error}") from None


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """A call of one of the functions of `EngineConfig.logits_processors`, for every token of a request.

    Raises:
        ValueError: a field is too long, or there is no name.
    """

    name: str
    """Which function."""
    arguments: str = "{}"
    """Its keyword arguments, a JSON object."""

    def __post_init__(self) -> None:
        """Check the lengths."""
        if not 1 <= len(self.name) <= MAX_PROCESSOR_NAME:
            raise ValueError(f"name must have 1 to {MAX_PROCESSOR_NAME} characters, got {len(self.name)}")
        size = len(self.arguments.encode(errors="surrogatepass"))
        if size > MAX_PROCESSOR_ARGUMENTS_BYTES:
            raise ValueError(f"arguments must have at most {MAX_PROCESSOR_ARGUMENTS_BYTES} bytes, got {size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when generation ends.

    `temperature` 0 is greedy. `top_n_sigma` 0, `top_k` 0, `top_p` 1, `min_p` 0 and `typical_p` 1 switch those filters
    off. With a `seed`, the tokens are a function of (weights, prompt, parameters) only.

    Logits are changed in this order. Then filters apply in the order top_n_sigma, temperature, top_k, top_p, min_p,
    typical_p:

    - `repetition_penalty` r, of each token in prompt or output: a positive logit is divided by r, another multiplied.
      Source: Keskar et al., CTRL, 2019.
    - `frequency_penalty` is subtracted once for each occurrence of a token in the output, `presence_penalty` once for a
      token that occurs. Source: OpenAI's API.
    - `logit_bias`, pairs of a token and a number, is added.
    - Until there are `min_tokens` output tokens, those that would end the request get no probability.
    - A token that would complete one of the `bad_words` gets no probability. The tokens before it may lie in the
      prompt, as in `transformers`.
    - Tokens that the `grammar` does not allow get no probability.
    - The `logits_processors` run in their order.

    Raises:
        ValueError: a field is out of its range.
    """

    max_tokens: int | None = 128
    """Most output tokens; None: as many as the engine's `max_length` leaves."""
    temperature: Annotated[float, Parameter(low=0, high=100, off=0, is_recommended=True)] = 1.0
    top_k: Annotated[int, Parameter(low=0, high=2**31 - 1, off=0, is_recommended=True)] = 0
    top_p: Annotated[float, Parameter(low=0, high=1, excludes_low=True, off=1, is_recommended=True)] = 1.0
    min_p: Annotated[float, Parameter(low=0, high=1, off=0, is_recommended=True)] = 0.0
    typical_p: Annotated[float, Parameter(low=0, high=1, excludes_low=True, off=1, is_recommended=True)] = 1.0
    """In (0, 1]. Of the tokens that the other filters leave, those are kept whose surprisal is nearest to the entropy,
    until their share of the probability reaches `typical_p`. Source: Meister et al., Locally typical sampling, 2022."""
    top_n_sigma: Annotated[float, Parameter(low=0, high=1000, off=0)] = 0.0
    """At most 1,000. Tokens are kept whose logit is at least the largest one less this many standard deviations of the
    row's logits. The deviation is that of all logits that are finite, so what a grammar or a bias of minus infinity
    rules out does not count. Logits are not divided by the temperature before, which would change nothing. Source: Tang
    et al., Top-n-sigma: Not all logits are you need, 2024; first in the order as in llama.cpp."""
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: Annotated[float, Parameter(low=0, high=100, excludes_low=True, is_recommended=True)] = 1.0
    """Above 0, at most 100; 1: off."""
    frequency_penalty: Annotated[float, Parameter(low=-2, high=2)] = 0.0
    """In [-2, 2]."""
    presence_penalty: Annotated[float, Parameter(low=-2, high=2)] = 0.0
    """In [-2, 2]."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """At most 1,024 distinct tokens, each with a number in [-100, 100], or minus infinity for none of its kind."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output must not complete: at most 256, each of 1 to 32 tokens."""
    min_tokens: int = 0
    """Output tokens before a stop token can be drawn; at most `max_tokens`."""
    logprobs: int | None = None
    """How many of the most probable tokens are reported with each output token and its own log probability, at most
    64; 0: none but its own, None: nothing is reported."""
    logprobs_kind: Literal["raw", "processed"] = "raw"
    """raw: of the model's distribution, before anything is changed; processed: of the distribution that the token was
    drawn from, after penalties, biases, grammar, processors, temperature and filters."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for each prompt token from `prompt_logprobs_start` on, always raw. The prompt is then computed
    from the token before that one on, also where it is cached."""
    prompt_logprobs_start: int = 1
    """Index of the first prompt token that `prompt_logprobs` reports. At least 1: the first token of a prompt, which
    has the index 0, has no probability."""
    grammar: Grammar | None = None
    """What the output may be; None: anything."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Functions of `EngineConfig.logits_processors` that change the logits, at most 8."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        for name, parameter in SAMPLING_PARAMETERS.items():
            parameter.check(name, getattr(self, name))
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 signed bits, got {self.seed}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS or len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError(
                f"logit_bias must name at most {MAX_LOGIT_BIAS} tokens, each once, got {len(self.logit_bias)} pairs"
            )
        for token, bias in self.logit_bias:
            if not 0 <= token < 2**31:
                raise ValueError(f"logit_bias must name token ids in [0, 2**31), got {token}")
            if not (-100.0 <= bias <= 100.0 or bias == -math.inf):
                raise ValueError(f"logit_bias must have numbers in [-100, 100] or minus infinity, got {bias}")
        self._check_bad_words()
        if not 0 <= self.min_tokens < 2**31 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            limit = "2**31" if self.max_tokens is None else f"max_tokens ({self.max_tokens})"
            raise ValueError(f"min_tokens must be >= 0 and at most {limit}, got {self.min_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise ValueError(f"{name} must be None or in [0, {MAX_LOGPROBS}], got {value}")
        if self.prompt_logprobs_start < 1:
            raise ValueError(f"prompt_logprobs_start must be >= 1, got {self.prompt_logprobs_start}")
        if self.logprobs_kind not in ("raw", "processed"):
            raise ValueError(f"logprobs_kind must be 'raw' or 'processed', got {self.logprobs_kind!r}")
        if len(self.logits_processors) > MAX_LOGITS_PROCESSORS:
            raise ValueError(
                f"logits_processors must hold at most {MAX_LOGITS_PROCESSORS}, got {len(self.logits_processors)}"
            )

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before the filters."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        changes = self.logit_bias or self.bad_words or self.min_tokens > 0 or self.grammar is not None
        return penalties != (1.0, 0.0, 0.0) or bool(changes) or bool(self.logits_processors)

    def _check_bad_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words must hold at most {MAX_BAD_WORDS} sequences, got {len(self.bad_words)}")
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise ValueError(f"bad_words must hold sequences of 1 to {MAX_BAD_WORD_TOKENS} tokens, got {len(word)}")
            for token in word:
                if not 0 <= token < 2**31:
                    raise ValueError(f"bad_words must hold token ids in [0, 2**31), got {token}")


SAMPLING_PARAMETERS: Mapping[str, Parameter] = parameters_of(SamplingParams)
"""The numbers among the fields of `SamplingParams` that have a declaration, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How the hidden states of a prompt become one vector. They are those that the output projection reads.

    Raises:
        ValueError: a field is out of its range.
    """

    kind: Literal["last", "mean", "cls"] = "last"
    """last: the state at the last token; mean: the mean of all; cls: the state at the first token. With mean and cls
    the prompt is computed also where it is cached, as far as its states are needed."""
    normalize: bool = True
    """Whether the vector is divided by its length."""
    dimensions: int | None = None
    """How many of its first elements are kept, before it is normalised; None: all. Useful with models that are
    trained for it. Source: Kusupati et al., Matryoshka Representation Learning, 2022."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.kind not in ("last", "mean", "cls"):
            raise ValueError(f"kind must be last, mean or cls, got {self.kind!r}")
        if self.dimensions is not None and self.dimensions < 1:
            raise ValueError(f"dimensions must be >= 1, got {self.dimensions}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """The lengths of a request that does not fit the longest sequence of the engine."""

    num_prompt: int
    """Tokens of the prompt."""
    max_length: int
    """Longest prompt plus output, in tokens."""
    max_tokens: int | None = None
    """Most output tokens that the request asks for; None: it asks for no number."""
    is_counted: bool = True
    """False: the prompt has at least `num_prompt` tokens; it was not encoded as a whole."""

    def refusal(self) -> Refusal:
        """Return the refusal of the request."""
        at_least = "" if self.is_counted else "at least "
        wanted = "" if self.max_tokens is None else f" and max_tokens asks for {self.max_tokens} more"
        return Refusal(
            message=(
                f"This model's maximum context length is {self.max_length} tokens, "
                f"but the prompt has {at_least}{self.num_prompt} tokens{wanted}"
            ),
            param="prompt" if self.max_tokens is None else "max_tokens",
            code="context_length_exceeded",
            overflow=self,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is refused: a text for people, the name of the wrong parameter, a code for programs."""

    message: str
    param: str | None = None
    code: str | None = None
    overflow: Overflow | None = None
    """With the code `context_length_exceeded`: the lengths, for protocols with words of their own."""


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
    | LoadAdapter | UnloadAdapter | WeightCommand | NameVersion
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """Why the cached prefix of a prompt was not longer when its request was admitted.

    It depends on the request's own namespace only, so it reveals nothing about others.
    """

    cause: Literal[
        "complete", "page_rounding", "evicted", "window_evicted", "snapshot_evicted", "no_snapshot", "never_seen",
        "no_cache",
    ]  # fmt: skip
    """complete: all that can be reused was cached; page_rounding: the cached text goes on within the next page, and
    only whole pages are cached; evicted: more was cached before; window_evicted: more is cached, but in layers with a
    window, the memory of the pages before its end was used for something else; snapshot_evicted and no_snapshot: more
    is cached, but not the state of recurrent layers at its end; never_seen: no longer prefix is cached,
    or remembered; no_cache: the engine keeps no prefixes."""
    num_reusable_tokens: int
    """Most tokens of the prompt that could come from a cache: all but the last one, whose logits are needed, and fewer
    if log probabilities or states of the prompt are asked for."""
    num_tokens: int
    """Length of the cached prefix, whole pages."""
    first_difference: int
    """Position of the first token after it that differs from everything cached there."""
    num_possible_tokens: int
    """Its length without the cause: with a page size of 1, or if nothing had been evicted."""
    evicted_by: str | None = None
    """What evicted it: the name of the policy, "clear" or "release"; None for other causes."""
    evicted_s: float | None = None
    """When that was, on the engine's clock; None for other causes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What happened to a request before its first token. Times are seconds on the engine's clock, `time.monotonic`."""

    prefix: CachedPrefix
    arrived_s: float
    """When the engine took it from its inbox."""
    admitted_s: float
    """When it was first given memory, and its first step was planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """When things happened to a request. Times are seconds on the engine's clock, `time.monotonic`."""

    arrived_s: float
    """When the engine took it from its inbox."""
    queued_s: float | None
    """When it was put into the queue, which is later if its grammar had to be compiled; None: it was never queued."""
    admitted_s: float | None
    """When it was first given memory, and its first step was planned; None: it was never admitted."""
    chunks: tuple[tuple[float, int], ...] = ()
    """When a step was planned that computes a part of its prompt, and the tokens of that part: at most the first 256.
    After a preemption, what is not cached is computed again."""
    num_preempted: int = 0
    preempted_s: tuple[float, ...] = ()
    """When it was preempted, at most the first 256 times."""
    first_token_s: float | None
    """When its first token was sent; None: no token was sent."""
    finished_s: float
    """When its last answer was made."""


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of one step for one request. A msgspec struct, because there may be one for every token.

    The last Delta of a request has a `finish`; every request gets exactly one such Delta. The first one has `first`
    set, and only it has a `carry`. The token that stopped a request (end of sequence or a stop token) is not in
    `tokens`, but `num_output_tokens` counts it.
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
    num_drafted_tokens: int = 0
    """Draft tokens that were verified for the request so far."""
    num_accepted_tokens: int = 0
    """Draft tokens that were accepted so far; one that follows the end of the request may be among them."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `tokens`, if they were asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each prompt token that they were asked for, in the `Delta` with the first output tokens."""
    vector: bytes = b""
    """float32, little-endian: what `Submit.pooling` has asked for, in the last `Delta`; it finishes with STOP."""
    explanation: Explanation | None = None
    """In the first `Delta`, if `Submit.explain` asks for it and the request was admitted."""
    timings: RequestTimings | None = None
    """In the last `Delta`, if `Submit.explain` asks for it and the request was not refused at once."""
    weights: str = ""
    """The version of the weights that have computed `tokens`; empty: those that the engine began with."""


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
Progress = Callable[[str, int, int], None]
"""Gets reports of a long start: what is being done, the parts that are done, and the parts in total."""


class Inbox(Protocol):
    """The source of an engine's commands."""

    def receive(self, *, timeout_s: float | None) -> Sequence[Command]:
        """Return the commands that have arrived, in order; wait up to `timeout_s` (0: do not wait, None: no limit)."""
        ...


class Outbox(Protocol):
    """The destination of an engine's answers."""

    def send(self, deltas: Sequence[Delta]) -> None:
        """Pass on the answers of one step, in order; must not block for long."""
        ...


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

_COUNTS = (
    "tensor_parallel_size", "nnodes", "pipeline_parallel_size", "page_size", "chunk_align", "max_prefills",
    "num_continuous_decode_steps", "speculative_num_tokens", "stream_interval",
)  # fmt: skip
"""Fields of `EngineConfig` that are at least 1."""
_OPTIONAL_COUNTS = (
    "max_running", "chunked_prefill_size", "joint_prefill_tokens", "num_threads", "max_total_tokens", "max_length",
    "cuda_graph_max_batch", "state_places",
)  # fmt: skip
"""Fields of `EngineConfig` that are None or at least 1."""


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
    attention, and the KV memory of its own requests. So the KV memory of latent attention, whose latents cannot be
    divided among heads, is not held by every process. A request then fits if it fits the memory of one process. Layers
    with a window keep the KV of all positions."""
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
    """Whether the model's tower for images is loaded, and computed on a CPU in float32. auto: if the model has one that
    this package knows, and no other option rules it out; the log then says which. on: otherwise the engine is not
    built. off: the model gets text only, and has no tower in memory."""
    image_cache_gb: float = 0.25
    """Memory for what the tower has made of images, by their contents, in units of 1e9 bytes; those used least recently
    are dropped first. An image of a request in the engine is kept beside."""

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
        if not 0 < self.decision_log_mb < math.inf:
            raise ValueError(f"decision_log_mb must be > 0 and finite, got {self.decision_log_mb}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, got {self.device!r}")
        if self.model_impl not in (known := get_args(ModelImpl)):
            raise ValueError(f"model_impl must be one of {', '.join(known)}, got {self.model_impl!r}")
        if self.eviction_policy not in ("lru", "queue-lru"):
            raise ValueError(f"eviction_policy must be lru or queue-lru, got {self.eviction_policy!r}")
        if not 0.0 < self.mem_fraction <= 1.0:
            raise ValueError(f"mem_fraction must be in (0, 1], got {self.mem_fraction}")
        if self.device != "cuda" and self.dtype not in ("auto", "float32"):
            raise ValueError(f"dtype must be float32 on a CPU, got {self.dtype}")
        if self.weights not in (known := get_args(WeightFormat)):
            raise ValueError(f"weights must be one of {', '.join(known)}, got {self.weights!r}")
        if self.device == "cuda" and self.weights != "auto":
            raise ValueError(f"weights must be auto on CUDA, which keeps them in dtype, got {self.weights!r}")
        if self.activations not in (known := get_args(ActivationFormat)):
            raise ValueError(f"activations must be one of {', '.join(known)}, got {self.activations!r}")
        if self.activations != "auto" and self.device == "cuda":
            raise ValueError(f"activations must be auto on CUDA, which computes in dtype, got {self.activations!r}")
        if self.activations == "bfloat16" and self.weights not in ("auto", "bfloat16"):
            raise ValueError(f"activations must be auto or float32 with weights {self.weights!r}, got 'bfloat16'")
        if self.grammar_backend not in ("llguidance", "xgrammar"):
            raise ValueError(f"grammar_backend must be llguidance or xgrammar, got {self.grammar_backend!r}")
        if not self.grammar_timeout_s > 0:  # true of NaN
            raise ValueError(f"grammar_timeout_s must be > 0, got {self.grammar_timeout_s}")
        self._check_processors()
        if not 0 < self.schedule_conservativeness < math.inf:
            raise ValueError(f"schedule_conservativeness must be > 0 and finite, got {self.schedule_conservativeness}")
        if self.low_priority_first and self.schedule_policy.replace("_", "-") == "priority-low":
            raise ValueError("low_priority_first must be false with the schedule_policy priority-low, got both")
        if self.preemption_threshold is not None and self.preemption_threshold < 0:
            raise ValueError(f"preemption_threshold must be >= 0, got {self.preemption_threshold}")
        for name, weight in self.schedule_weights:
            if not 0 < weight < math.inf:
                raise ValueError(f"schedule_weights must be > 0 and finite, got {weight} for {name!r}")
        if self.schedule_ageing_s is not None and not 0 <= self.schedule_ageing_s < math.inf:
            raise ValueError(f"schedule_ageing_s must be >= 0 and finite, got {self.schedule_ageing_s}")
        if self.target_step_s is not None and not self.target_step_s > 0:  # true of NaN
            raise ValueError(f"target_step_s must be > 0, got {self.target_step_s}")
        if self.max_queue_s is not None and not self.max_queue_s > 0:  # true of NaN
            raise ValueError(f"max_queue_s must be > 0, got {self.max_queue_s}")
        self._check_limits()
        for name in (*_COUNTS, *_OPTIONAL_COUNTS):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_COUNTS:
                continue
            if not isinstance(value, int):
                raise ValueError(f"{name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
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

    @property
    def num_rows(self) -> int:
        """`max_running`, or the device's default."""
        return self.max_running or self._defaults.max_running

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

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
        if not self.max_adapters:
            return
        refused: list[tuple[str, bool]] = [("model_impl", self.model_impl == "transformers")]
        if self.device == "cuda":
            refused.append(("speculative", self.speculative in ("draft", "eagle")))
            refused.append(("enable_dp_attention", self.enable_dp_attention))
        for name, is_refused in refused:
            if is_refused:
                where = f"{name} {getattr(self, name)}{' on CUDA' * (name != 'model_impl')}"
                raise ValueError(f"max_adapters must be 0 with {where}, got {self.max_adapters}")
        if self.decision_log is not None:
            raise ValueError(f"max_adapters must be 0 with decision_log, got {self.max_adapters}")

    @property
    def why_no_images(self) -> str | None:
        """Which option rules images out, as the end of a sentence; None: no option does."""
        reasons = {
            "images are off": self.images == "off",
            "towers are computed on a CPU only, not on CUDA": self.device == "cuda",
            "model_impl is transformers": self.model_impl == "transformers",
            "several ranks compute the model": self.tensor_parallel_size > 1,
            "the model is cut into stages": self.pipeline_parallel_size > 1,
            "drafts are on (speculative)": self.speculative != "off",
            "decisions are logged (decision_log)": self.decision_log is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _check_images(self) -> None:
        if self.images not in (known := get_args(ImageUse)):
            raise ValueError(f"images must be one of {', '.join(known)}, got {self.images!r}")
        if not 0 <= self.image_cache_gb < math.inf:
            raise ValueError(f"image_cache_gb must be >= 0 and finite, got {self.image_cache_gb}")
        if self.images == "on" and (why := self.why_no_images) is not None:
            raise ValueError(f"images must be auto or off, because {why}, got 'on'")

    def _check_experts(self) -> None:
        if self.expert_load not in (known := get_args(ExpertLoadDetail)):
            raise ValueError(f"expert_load must be one of {', '.join(known)}, got {self.expert_load!r}")
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError("expert_parallel must be False with tensor_parallel_size 1, got True")
        if self.expert_map is not None and not self.expert_parallel:
            raise ValueError(f"expert_map must be None without expert_parallel, got {self.expert_map!r}")
        if self.expert_kernels not in (known := get_args(ExpertKernels)):
            raise ValueError(f"expert_kernels must be one of {', '.join(known)}, got {self.expert_kernels!r}")
        if self.expert_kernels != "triton":
            for reason, is_so in (
                ("on a CPU, which has kernels of its own", self.device != "cuda"),
                ("with batch_invariant, because tiles of the others depend on the batch", self.batch_invariant),
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
        presets = get_args(SchedulePreset)
        if self.schedule_preset is not None and self.schedule_preset not in presets:
            raise ValueError(f"schedule_preset must be one of {', '.join(presets)}, got {self.schedule_preset!r}")
        if self.prefill_first and self.mixing != "prefill-first":
            raise ValueError(f"schedule_preset must be prefill-first with prefill_first, got {self.schedule_preset!r}")
        self._check_chunk_align()
        if self.max_queued is not None and self.max_queued < 0:
            raise ValueError(f"max_queued must be >= 0, got {self.max_queued}")
        names: set[str] = set()
        for quota in self.quotas:
            if quota.tenant in names:
                raise ValueError(f"quotas must name each tenant once, got {quota.tenant!r} again")
            names.add(quota.tenant)
            for name, limit in zip(quota._fields[1:], quota[1:], strict=True):
                if limit is not None and limit < 1:
                    raise ValueError(f"quotas must have {name} >= 1, got {limit} for {quota.tenant!r}")

    def _check_speculation(self) -> None:
        for name, known in (
            ("speculative", ("off", "ngram", "suffix", "draft", "eagle", "auto")),
            ("speculative_control", ("adaptive", "fixed")),
            ("speculative_verify", ("exact", "rejection")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
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
        if not 0.0 < self.max_retain_s < math.inf:
            raise ValueError(f"max_retain_s must be > 0 and finite, got {self.max_retain_s}")

    def _check_tiers(self) -> None:
        if self.cache_history_tokens < 0:
            raise ValueError(f"cache_history_tokens must be >= 0, got {self.cache_history_tokens}")
        for name in ("host_cache_gb", "disk_cache_gb", "remote_cache_gb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")
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
        if self.role not in (known := get_args(Role)):
            raise ValueError(f"role must be one of {', '.join(known)}, got {self.role!r}")
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
