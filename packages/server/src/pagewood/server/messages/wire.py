"""The messages between the processes: msgspec structs in msgpack, one union of types for each link.

    HTTP --ToTokenizer--> tokenizer --ToEngine--> engine --FromEngine--> detokenizer --ToHttp--> HTTP

With several replicas, tokenizers send `ToRouter` to the HTTP process, which sends `ToEngine` to one of the engines.

The commands and answers of the engine (`pagewood.engine.api`) are sent as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from pagewood.engine.api import (
    Abort,
    Command,
    Delta,
    Explanation,
    FinishReason,
    Flush,
    LoadAdapter,
    PassOn,
    Pause,
    PauseRequest,
    Refusal,
    Refuse,
    RequestOptions,
    RequestTimings,
    Resume,
    ResumeRequest,
    Retain,
    Rows,
    SetPriority,
    UnloadAdapter,
)
from pagewood.engine.observe.view import EngineView
from pagewood.engine.text import Part
from pagewood.engine.text import PartKind as PartKind
from pagewood.engine.weight_commands import (
    CheckWeights,
    JoinGroup,
    LeaveGroup,
    NameVersion,
    Sleep,
    SleepTag,
    UpdateWeights,
    WakeUp,
    WeightCommand,
)
from pagewood.server.messages.measurement import Measurement

T = TypeVar("T")
_log = logging.getLogger(__name__)


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="chat"):
    """A conversation: plain JSON values for the model's chat template."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    """As in OpenAI's API, which is what templates read."""
    documents: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] = {}
    """Further variables of the template."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of the assistant's turn."""
    continue_final_message: bool = False
    """Whether the answer continues the last message."""
    images: tuple[bytes, ...] = ()
    """The files of its images, in the order of the parts `{"type": "image"}` of its messages."""


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """A text to continue."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Token ids to continue."""

    tokens: bytes
    """int32, little-endian."""


class PairPrompt(msgspec.Struct, frozen=True, kw_only=True, tag="pair"):
    """Two texts in one, for a model that scores pairs."""

    first: str
    second: str
    type_stride: int = 0
    """See `Tokenizer.encode_pair`."""


Prompt = ChatPrompt | TextPrompt | TokenPrompt | PairPrompt


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is read by the response template of the model: into content, reasoning and calls of functions."""

    tools: tuple[dict[str, Any], ...] = ()
    """Functions that may be called, as in OpenAI's API."""
    binds: str | None = None
    """Which calls a grammar binds to their schemas: "required": there must be some; "auto": if there are some; the name
    of a function: this one must be called. None: calls are not bound."""
    parallel: bool = True
    """Whether there may be several calls. Otherwise the answer ends after the first one."""
    shows_reasoning: bool = True
    """Whether the client gets the log probabilities of tokens of the reasoning."""
    prompt_tail: str = ""
    """End of the prompt, which may have begun a section of the answer."""


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has had already: it goes on behind that. A request that is sent again has had it from a process
    that died, and a step of a search is made with it."""

    output: bytes = b""
    """Its tokens so far, int32, little-endian."""
    seed: int | None = None
    """Its seed; None: that of its sampling."""
    num_cached_tokens: int = 0
    """What its client was told about its prompt."""
    num_kept: int = 0
    """Ids of `SamplingParams.kept_tokens` that it has had."""


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, tag="text_options"):
    """Options of a request for the detokenizer; they pass the engine in `Submit.carry`. The tokenizer fills in what
    depends on the prompt."""

    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    prefix: str = ""
    """Text to show before the answer."""
    first_token: int | None = None
    """The first token of the prompt, if the prompt's log probabilities are shown: the engine has none for it."""
    prompt_tokens: bytes = b""
    """Ids of the prompt for the client, int32, little-endian; empty if it does not ask for them."""
    is_scoring: bool = False
    """Whether the tokens of the answer are not shown, nor counted."""
    reports_tokens: bool = False
    """Whether the client gets the ids of the answer."""
    hidden: tuple[int, ...] = ()
    """Tokens that end the answer: they are among those that the engine answers, but their text is not shown."""
    shows_special_tokens: bool = False
    """Whether special tokens are shown in plain text."""
    reading: Reading | None = None
    """None: the answer is plain text."""
    keeps_output: bool = False
    """Whether the HTTP process gets the ids of all its tokens, because it may have to send the request again."""
    begun: Begun | None = None
    """What its client has had already, which is not shown again; None: nothing."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """A new request."""

    request_id: str
    prompt: Prompt
    options: RequestOptions = RequestOptions()
    """What the engine reads."""
    text: TextOptions = TextOptions()
    """What the detokenizer reads."""
    end_token: int | None = None
    """Ends the prompt, unless the tokenizer has appended it."""
    sibling_ids: tuple[str, ...] = ()
    """Ids of further requests for the same prompt; with several, the prompt is still tokenized once."""
    bad_words: tuple[str, ...] = ()
    """Texts for the `bad_words` of its sampling, which has none yet: their tokens are known after the tokenizer."""
    echo: bool = False
    """Whether the answer begins with the text of the prompt."""
    prefix_tokens: bytes = b""
    """Ids whose text the answer begins with, int32, little-endian; the engine does not get them."""
    reports_prompt: bool = False
    """Whether the answer has the ids of the prompt, in its log probabilities."""
    max_length: int | None = None
    """Longest prompt plus output that the engine accepts, in tokens; None: unknown."""
    fills_window: bool = False
    """Whether a request whose `max_tokens` exceeds the rest of `max_length` after the prompt gets that rest; otherwise
    it is refused."""
    cuts_prompt: bool = False
    """Whether a text that is longer than `max_length` loses its end; otherwise it is refused."""
    group_id: str = ""
    """Shared by the prompts of an HTTP request, which take turns with those of others; empty: it has one prompt."""

    begun: tuple[Begun, ...] = ()
    """What each of its requests has had already, in their order; empty: nothing."""
    adapter_version: str | None = None
    """Version of its adapter, by which a router knows where its prefix is cached; None: unknown."""
    weights_digest: str | None = None
    """Tells the model's weights apart, for the same use; None: those that the engines began with."""

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the requests of all answers to the prompt, in their order."""
        return (self.request_id, *self.sibling_ids)

    def with_options(self, **options: Any) -> Generate:
        """Return the request with other options for the engine."""
        return msgspec.structs.replace(self, options=msgspec.structs.replace(self.options, **options))


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag="encode"):
    """A request for the ids of a prompt. The tokenizer answers it with an `Encoded`, which passes the engine in its
    turn; nothing is computed for it."""

    request_id: str
    prompt: Prompt
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own tokens, such as the beginning of a text; None: to a text, and to nothing else.
    """
    skip_special_tokens: bool = False
    """Whether the text of ids has no special tokens."""
    shows_text: bool = False
    """Whether the answer has the text of the prompt."""
    shows_pieces: bool = False
    """Whether the answer has the bytes of each token."""
    max_length: int | None = None
    """Longest text of the model, in tokens. The prompt may be longer."""


class Encoded(msgspec.Struct, frozen=True, kw_only=True, tag="encoded"):
    """The answer to an `Encode`; it passes the engine in `PassOn.carry`."""

    tokens: bytes
    """Ids of the prompt, int32, little-endian."""
    text: str = ""
    """The text of the prompt, if it was asked for."""
    pieces: tuple[bytes, ...] = ()
    """The bytes of each token, if they were asked for."""


class RetainText(msgspec.Struct, frozen=True, kw_only=True, tag="retain_text"):
    """Keep a text cached for some seconds, or drop it. The answer has that many `num_cached_tokens`."""

    request_id: str
    prompt: Prompt
    seconds: float
    namespace: str | None = None
    adapter: str | None = None
    max_length: int | None = None
    """Longest text of the model, in tokens. The prompt may be longer."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, tag="profile"):
    """Record the work of the engine for some time; the answer comes when the file of the profile is written."""

    request_id: str
    """Also the name of the file, in the folder of the sockets."""
    seconds: float
    """Longest time."""
    steps: int | None = None
    """End when this many have begun; None: after the time."""


WithPrompt = Generate | Encode | RetainText
"""Messages whose prompt is tokenized."""
NewRequest = WithPrompt | Profile | Flush | Pause | Resume | LoadAdapter | UnloadAdapter | WeightCommand | NameVersion


def ids_of(message: NewRequest) -> tuple[str, ...]:
    """Return the ids of the requests that a message begins."""
    return message.request_ids if isinstance(message, Generate) else (message.request_id,)


class Watch(msgspec.Struct, frozen=True, kw_only=True, tag="watch"):
    """Send a `Snapshot` some times a second, for `for_s`; a `Watch` is sent again while the dashboard has readers."""

    for_s: float
    shows_tokens: bool = False
    """Whether snapshots have the first tokens of the branches of the prefix cache, as text."""
    wanted: tuple[str, ...] = ()
    """Ids of requests that snapshots have even if they are far back in the queue."""


class Route(msgspec.Struct, frozen=True, kw_only=True, tag="route"):
    """From now on, send everything to another engine process; what was not delivered to the one before is dropped."""

    stage: str
    """The name of its socket."""


class ShowCache(msgspec.Struct, frozen=True, kw_only=True, tag="show_cache"):
    """Send all that the prefix cache holds as `CacheChanges`: some of them were lost, or this is the first time."""


class Routed(msgspec.Struct, frozen=True, kw_only=True, tag="routed"):
    """A request for the router of several replicas, which passes `submit` on unread."""

    request_id: str
    submit: bytes
    """The frame of the `Submit`."""
    num_prompt: int
    """Tokens."""
    num_output: int
    """Tokens that it has had already."""
    max_new_tokens: int | None
    """Most output tokens, those that it has had among them; None: as many as its length allows."""
    priority: int
    tenant: str
    block_hashes: bytes
    """Hashes by which the events of caches name the whole pages of its tokens, `HASH_BYTES` each, most significant
    first; empty: unknown."""


HASH_BYTES = 8

ToTokenizer = NewRequest | Abort | SetPriority | PauseRequest | ResumeRequest | Watch | Route


ToEngine = Command | Profile | Watch | ShowCache

ToRouter = (
    Routed
    | Abort
    | SetPriority
    | Refuse
    | PassOn
    | Flush
    | Pause
    | Resume
    | PauseRequest
    | ResumeRequest
    | Retain
    | LoadAdapter
    | UnloadAdapter
    | UpdateWeights
    | JoinGroup
    | LeaveGroup
    | CheckWeights
    | Sleep
    | WakeUp
    | NameVersion
    | Profile
    | Watch
)
"""What tokenizers send where there are several replicas: the HTTP process passes it on."""


class Step(msgspec.Struct, frozen=True, tag="step"):
    """The results of one step of the engine."""

    deltas: tuple[Delta, ...]
    incarnation: int = 0
    """Which engine process computed it, counted from 0."""
    replica: int = 0
    """The replica of that process, counted from 0."""


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """Progress of an engine that is not ready yet; `incarnation` counts the engine processes of this server from 0."""

    incarnation: int
    what: str
    done: int
    total: int
    relay: int = 0
    """Which detokenizer process passed it on, counted from 0."""
    replica: int = 0


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the loaded model for the HTTP process."""

    max_length: int
    """Longest prompt plus output."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a text."""
    generates: bool = True
    """Whether it generates text; an encoder makes vectors only."""
    takes_images: bool = False
    """Whether prompts may have images."""
    num_pages: int = 0
    """Pages of KV memory."""
    page_size: int = 0
    """Tokens."""
    page_bytes: int = 0
    rank_places: tuple[str, ...] = ()
    """The host of each rank, in words, where ranks are on several hosts."""
    config: dict[str, Any] = {}
    """The configuration of the engine, without folders."""
    adapter: str | None = None
    """The adapter that a client named with it; None: the model alone."""
    adapter_version: str | None = None
    """Version of this adapter; None: unknown; empty: its prefixes begin as those of the model."""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of drafts since the engine was built: the fields of the engine's `SpeculationCounts`."""

    num_drafted: int
    num_accepted: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    draft_s: float
    verify_s: float
    num_rebuilt: int
    num_postponed: int
    num_short: int
    reason: str


class Pulse(msgspec.Struct, frozen=True, kw_only=True, tag="pulse"):
    """Sign of life of an engine that is ready; sent while it works, while it waits, and during a long step."""

    incarnation: int
    model: Model
    counters: dict[str, int]
    free_pages_by_rank: tuple[int, ...] = ()
    """Where ranks divide KV memory by request, the free pages of each."""
    speculation: Speculation | None = None
    """None: the engine does not speculate."""
    measurement: Measurement | None = None
    """None: the engine does not measure."""
    adapter_versions: dict[str, str] = {}
    """Versions of the loaded adapters, by name."""
    weight_version: str = ""
    """Name of the weights; empty: those that the engine began with."""
    weights_digest: str | None = None
    """Tells these weights apart in the keys of cached prefixes; None: those that the engine began with."""
    asleep: tuple[SleepTag, ...] = ()
    """What sleeps, as the engine says."""
    step_s: float = 0.0
    """How long the engine's thread has computed without looking for commands, seconds: the length of a long step."""
    is_in_device: bool = False
    """Whether the engine's thread is in the runner in such a step, so that the device is what takes long."""
    frozen_s: float = 0.0
    """How long requests have waited while nothing ran and memory was free, seconds: admission is frozen."""
    relay: int = 0
    """Which detokenizer process passed it on, counted from 0."""
    replica: int = 0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """A view of the engine, sent while a `Watch` lasts."""

    incarnation: int
    view: EngineView
    replica: int = 0


class CacheChanges(msgspec.Struct, frozen=True, kw_only=True, tag="cache_changes"):
    """Changes of the prefix cache of a replica, for the router."""

    replica: int
    incarnation: int
    number: int
    """Counts the messages of this engine process from 0."""
    events: bytes
    """Events of vLLM's form without their tokens, msgpack."""
    is_whole: bool = False
    """Whether they begin with an empty cache, whatever was sent before."""


class OtherLoad(msgspec.Struct, frozen=True, kw_only=True, tag="other_load"):
    """What an engine has of requests that came from other HTTP processes than the one that gets this."""

    num_requests: int
    num_prompt_tokens: int
    """Tokens of prompts that have no first token yet; those of them that are cached are counted too."""
    replica: int = 0
    incarnation: int = 0


FromEngine = Step | Loading | Pulse | Snapshot | CacheChanges | OtherLoad


class ScoredToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token and its log probability."""

    token: int
    data: bytes
    """UTF-8, perhaps of a part of a character."""
    logprob: float
    """May be minus infinity."""


class TokenEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token of an answer or of a prompt, and the most probable tokens in its place."""

    chosen: ScoredToken
    rank: int
    """1 for the most probable; 0 for the first token of a prompt, which has no probability."""
    offset: int
    """Characters of the shown text before the one that the token begins or continues."""
    top: tuple[ScoredToken, ...]
    """Best first."""
    kept: bytes | None = None
    """See `TokenLogprob.kept`."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probabilities of the tokens of one answer message."""

    tokens: tuple[TokenEntry, ...]
    prompt: tuple[TokenEntry, ...] | None = None
    """Entries of all tokens of the prompt, once for a request; None: not in this message."""
    prompt_tokens: bytes = b""
    """Ids of the prompt, int32, little-endian, once for a request that asks for them; empty: not in this message."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The result of one step for one client.

    The first Answer of a request with a `finish` is the last one that its client sees. `ended` says that the engine has
    ended the request as well; after a stop string, that comes later, in a separate Answer.
    """

    request_id: str
    text: str
    finish: FinishReason | None
    ended: bool
    refusal: Refusal | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    logprobs: Logprobs | None = None
    """None: this step has none, or they were not requested."""
    parts: tuple[Part, ...] | None = None
    """What `text` says, read by the response template; `text` is empty then. None: the answer is plain text."""
    stopped_by: str | None = None
    """With a `finish`: the stop string, or the match of a stop expression, that ended the answer. None: neither did."""
    vector: bytes = b""
    """float32, little-endian, in the last Answer of a request for a vector."""
    tokens: bytes = b""
    """Ids of the step's tokens, int32, little-endian, if they were asked for. The token that ended it is not among
    them."""
    explanation: Explanation | None = None
    """In the first Answer, if it was asked for."""
    timings: RequestTimings | None = None
    """In the last Answer, if `explanation` was asked for."""
    encoded: Encoded | None = None
    """The answer to an `Encode`; None: to another request, or it was refused."""
    output: tuple[int, ...] = ()
    """All tokens of the step, also those behind the end of the answer, if the HTTP process keeps them."""
    computed: tuple[str, int] | None = None
    """The version of the weights that have computed the step's tokens, and how many of these belong to the answer;
    None: the weights that the engine began with. In the answer to an update, the version and 0."""
    experts: Rows | None = None
    """See `Delta.experts`, up to the end of the answer."""
    states: Rows | None = None
    """See `Delta.states`, likewise."""


class Answers(msgspec.Struct, frozen=True, tag="answers"):
    """The results of one step for all clients."""

    answers: tuple[Answer, ...]
    replica: int = 0
    """The one that computed it."""


ToHttp = Answers | Loading | Pulse | Snapshot | CacheChanges | OtherLoad | ToRouter


encode = msgspec.msgpack.Encoder().encode
"""Encodes any of these messages as a frame."""


to_tokenizer: msgspec.msgpack.Decoder[ToTokenizer] = msgspec.msgpack.Decoder(ToTokenizer)
engine_commands: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
to_http: msgspec.msgpack.Decoder[ToHttp] = msgspec.msgpack.Decoder(ToHttp)
carried: msgspec.msgpack.Decoder[TextOptions | Encoded] = msgspec.msgpack.Decoder(TextOptions | Encoded)
"""What passes the engine unread."""


def read(decoder: msgspec.msgpack.Decoder[T], frames: Iterable[bytes]) -> Iterator[T]:
    """Yield the message of each frame. A frame that is not a valid message is reported and dropped."""
    for frame in frames:
        try:
            yield decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            _log.error("dropped a malformed message of %d bytes: %s", len(frame), error)
