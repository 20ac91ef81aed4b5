"""The tokenizer stage: turns prompts into token ids, or refuses them, and sends the result to the engine."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pagewood.engine.api import (
    MAX_BAD_WORD_TOKENS,
    Abort,
    Command,
    Image,
    Overflow,
    PassOn,
    PauseRequest,
    Refusal,
    Refuse,
    ResumeRequest,
    Retain,
    SamplingParams,
    SetPriority,
    Submit,
)
from pagewood.engine.fan_out import fan_out
from pagewood.engine.images.cached_ids import cached_ids
from pagewood.engine.images.limits import ImageError
from pagewood.engine.model_folder.vector_recipe import cut, with_end
from pagewood.engine.text import ChatTemplateError, Tokenizer
from pagewood.engine.text.reasoning import TAIL_LENGTH
from pagewood.radixcache.events.hashing import block_hashes
from pagewood.radixcache.events.router import router_hash
from pagewood.radixcache.namespaces import CacheKey
from pagewood.server.messages import wire
from pagewood.server.messages.links import Receiver, Sender
from pagewood.server.messages.token_ids import num_ids
from pagewood.server.observe.logs import request_fields
from pagewood.server.protocols.common.context_window import capped, overlong
from pagewood.server.stages.binding import bound
from pagewood.server.stages.pictures import Pictures, TextOnly, images_of
from pagewood.server.stages.text_limit import TextTooLong, check_text
from pagewood.server.stages.turns import Turns

LANE_BYTES = (1 << 14, 1 << 18)
"""Longest message of each lane but the last. A prompt waits only for prompts of its own lane, in which HTTP requests
take turns. The last lane encodes prompts that take much memory, one at a time."""
HUGE_BYTES = 1 << 20
"""After a message of this size or more, free memory is given back to the system."""

MAX_PIECES = 8_192
"""Most tokens of a prompt whose bytes are shown: each is a value of its own in every process."""

_Hold = PauseRequest | ResumeRequest
_Command = Command | wire.Profile
"""The messages of a tokenizer to the engine process."""

logger = logging.getLogger(__name__)


def run_tokenizer(
    tokenizer: Tokenizer,
    inbox: Receiver,
    outbox: Sender,
    *,
    stopped: Callable[[], bool],
    route: Callable[[str], None] = lambda stage: None,
    block_size: int | None = None,
    pictures: Pictures | None = None,
) -> None:
    """Serve until `stopped`.

    Args:
        tokenizer: of the model.
        inbox: gets the messages of the HTTP process.
        outbox: to the engine, or to the router.
        stopped: whether to stop.
        route: makes `outbox` send to another stage.
        block_size: tokens of a page of the replicas, among which a router chooses; None: there is one engine.
        pictures: what images must be; None: the model takes text only.
    """
    stage = TokenizerStage(tokenizer, outbox, route=route, block_size=block_size, pictures=pictures)
    try:
        while not stopped():
            # Read everything that has arrived before a prompt is begun: it may be cancelled by now.
            for frame in inbox.receive(timeout_s=0 if stage.num_short else None):
                for message in wire.read(wire.to_tokenizer, [frame]):
                    stage.take(message, num_bytes=len(frame))
            stage.tokenize_one()
    finally:
        stage.close()


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    """A prompt that is not tokenized yet, and the changes to its requests meanwhile."""

    message: wire.WithPrompt
    num_bytes: int
    cancelled: set[str] = field(default_factory=set[str])  # written by: take
    """Ids of its requests that were cancelled."""
    priorities: dict[str, int] = field(default_factory=dict[str, int])  # written by: take
    """Newest priorities of its requests, by id, if they have changed."""
    holds: dict[str, _Hold] = field(default_factory=dict[str, _Hold])  # written by: take
    """Newest pauses and resumptions of its requests, by id; the engine gets them after the request."""

    @property
    def is_cancelled(self) -> bool:
        """Whether all its requests were cancelled."""
        return len(self.cancelled) == len(wire.ids_of(self.message))


@dataclass(slots=True, kw_only=True, eq=False)
class _Lane:
    """The prompts of a class of sizes that wait for the thread of this class."""

    prompts: Turns[_Pending] = field(default_factory=Turns[_Pending])  # written by: TokenizerStage
    """Protected by the lock of the stage."""
    num_waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """The thread of the lane waits for it."""


class TokenizerStage:
    """Tokenizes short prompts in the caller's thread, and longer ones in threads of their own, one per class of sizes.

    Invariant: the first message about a request to the engine is the command for its prompt, or its only `Refuse`. A
    request that is cancelled before it is begun is not tokenized. It is refused, so that its end is still confirmed.
    """

    __slots__ = (
        *("_block_size", "_is_closed", "_lanes", "_lock", "_outbox", "_pending", "_pictures", "_route", "_short"),
        "_tokenizer",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        outbox: Sender,
        *,
        route: Callable[[str], None] = lambda stage: None,
        block_size: int | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        self._block_size = block_size
        self._pictures = pictures
        self._tokenizer = tokenizer
        self._outbox = outbox
        self._route = route
        self._lock = threading.Lock()
        """Held while something is sent, and while `_pending` or a lane is read or written."""
        self._pending: dict[str, _Pending] = {}  # written by: take, _tokenize. By the ids of requests
        self._short: Turns[_Pending] = Turns()  # written by: _queue, tokenize_one
        self._lanes: dict[int, _Lane] = {}  # written by: _lane
        self._is_closed = False  # written by: close

    @property
    def num_short(self) -> int:
        """Short prompts that wait for `tokenize_one`."""
        return len(self._short)

    def take(self, message: wire.ToTokenizer, *, num_bytes: int) -> None:
        """Accept a message of `num_bytes`: queue a new request, or change one that is queued or in the engine."""
        with self._lock:
            match message:
                case wire.Generate() | wire.Encode() | wire.RetainText():
                    pending = _Pending(message=message, num_bytes=num_bytes)
                    self._pending.update(dict.fromkeys(wire.ids_of(message), pending))
                    self._queue(pending, sum(num_bytes > longest for longest in LANE_BYTES))
                case Abort() if message.request_id in self._pending:
                    self._pending[message.request_id].cancelled.add(message.request_id)
                case SetPriority() if message.request_id in self._pending:
                    self._pending[message.request_id].priorities[message.request_id] = message.priority
                case PauseRequest() | ResumeRequest() if message.request_id in self._pending:
                    self._pending[message.request_id].holds[message.request_id] = message
                case wire.Watch():
                    if not self._is_closed:
                        self._outbox.send(wire.encode(message))
                case wire.Route():
                    if not self._is_closed:
                        self._route(message.stage)
                case _:
                    self._send(message)

    def tokenize_one(self) -> None:
        """Tokenize the short prompt whose turn it is, if there is one."""
        if self._short:
            self._tokenize(self._short.pop())

    def close(self) -> None:
        """Stop sending. A prompt that is being tokenized cannot be interrupted; its result is dropped."""
        with self._lock:
            self._is_closed = True

    def _queue(self, pending: _Pending, index: int) -> None:
        """Queue a prompt in the lane of that index."""
        message, lane = pending.message, self._lane(index) if index else None
        tenant = group = ""
        if isinstance(message, wire.Generate):
            tenant, group = message.options.tenant or "", message.group_id
        turns = self._short if lane is None else lane.prompts
        turns.put(pending, tenant=tenant, group=group or message.request_id)
        if lane is not None:
            lane.num_waiting.release()

    def _lane(self, index: int) -> _Lane:
        """Return a lane of longer prompts; its thread starts with its first prompt."""
        if index not in self._lanes:
            self._lanes[index] = _Lane()
            threading.Thread(
                target=self._run_lane, args=(self._lanes[index],), name=f"tokenizer-lane-{index}", daemon=True
            ).start()
        return self._lanes[index]

    def _run_lane(self, lane: _Lane) -> None:
        while not self._is_closed:
            try:
                lane.num_waiting.acquire()
                with self._lock:
                    pending = lane.prompts.pop()
                self._tokenize(pending)
            except Exception:  # the lane goes on
                logger.exception("a prompt cannot be passed on")

    def _tokenize(self, pending: _Pending) -> None:
        request_ids = wire.ids_of(pending.message)
        if pending.is_cancelled:
            results: Sequence[_Command] = [_cancelled(request_id) for request_id in request_ids]
        else:
            results = commands(self._tokenizer, pending.message, pictures=self._pictures)
        names = [self._names(result, pending.message) for result in results]
        with self._lock:
            for request_id in request_ids:
                del self._pending[request_id]
            for result, of_blocks in zip(results, names, strict=True):
                command = _changed(result, pending)
                if of_blocks is not None and isinstance(command, Submit):
                    self._send(routed(command, of_blocks))
                else:
                    self._send(command)
            self._send(*pending.holds.values())
        if pending.num_bytes >= HUGE_BYTES:
            del results
            _give_memory_back()

    def _names(self, command: _Command, message: wire.WithPrompt) -> bytes | None:
        """Return the hashes of the whole pages of a request, by which the router knows where they are cached."""
        if self._block_size is None or not isinstance(command, Submit):
            return None
        is_known = isinstance(message, wire.Generate)
        version, digest = (message.adapter_version, message.weights_digest) if is_known else (None, None)
        if command.adapter is not None and version is None:
            return b""
        adapter = command.adapter if version else None  # without a version, its prefixes begin as those of the model
        key = CacheKey.of(command.namespace, adapter=adapter, adapter_version=version or None, weights_version=digest)
        prompt, output = (np.frombuffer(ids, dtype="<i4") for ids in (command.tokens, command.output))
        if command.images and self._pictures is not None:
            try:
                prompt = cached_ids(prompt, command.images, self._pictures.prompts.recipe)
            except ValueError:
                return b""  # the engine refuses it
        tokens = np.concatenate([prompt, output])
        names = block_hashes(tokens, self._block_size, key)
        return b"".join(router_hash(name).to_bytes(wire.HASH_BYTES, "big") for name in names)

    def _send(self, *commands: _Command | wire.Routed) -> None:
        for command in commands:
            if not self._is_closed:
                self._outbox.send(wire.encode(command))


def routed(submit: Submit, block_hashes: bytes) -> wire.Routed:
    """Return a request as the router needs it."""
    return wire.Routed(
        request_id=submit.request_id,
        submit=wire.encode(submit),
        num_prompt=num_ids(submit.tokens),
        num_output=num_ids(submit.output),
        max_new_tokens=0 if submit.pooling is not None else submit.sampling.max_tokens,
        priority=submit.priority,
        tenant=submit.tenant or submit.namespace or "",
        block_hashes=block_hashes,
    )


def _changed(command: _Command, pending: _Pending) -> _Command:
    """Return the command for a request, given the changes to it while its prompt was tokenized."""
    if command.request_id in pending.cancelled:
        return _cancelled(command.request_id)
    priority = pending.priorities.get(command.request_id)
    if priority is None or not isinstance(command, Submit):
        return command
    return replace(command, priority=priority)


def _cancelled(request_id: str) -> Refuse:
    refusal = Refusal(message="the request was cancelled before it was tokenized", code="cancelled")
    return Refuse(request_id=request_id, refusal=refusal)


def _give_memory_back() -> None:
    """Return free memory to the system, where the C library can (glibc): it keeps what an encoded text took."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def commands(
    tokenizer: Tokenizer, message: wire.WithPrompt, *, pictures: Pictures | None = None
) -> Sequence[Submit | Refuse | PassOn | Retain]:
    """Return the engine's commands for `message`: one for each of its requests.

    Never raises: requests whose prompt cannot be tokenized become `Refuse`s.
    """
    try:
        images = images_of(message.prompt, pictures)
        text = _prompt_text(tokenizer, message.prompt)
        if images and pictures is not None:
            text = pictures.prompts.written(text, images)
        match message:
            case wire.Encode():
                result = _encoded(tokenizer, message, text)
            case wire.RetainText():
                result = _retained(tokenizer, message, text)
            case wire.Generate():
                result = _submits(tokenizer, message, text, images)
    except ImageError as error:
        code = "images_not_supported" if isinstance(error, TextOnly) else "invalid_image"
        result = Refusal(message=_encodable(error), param="prompt", code=code)
    except TextTooLong as error:
        result = Refusal(message=str(error), param="prompt", code="text_too_long")
    except ChatTemplateError as error:
        result = Refusal(message=_encodable(error), param="prompt", code="invalid_messages")
    except Exception as error:  # templates and tokenizers come with models: any error concerns this request only
        logger.warning(
            "request %s cannot be tokenized: %s",
            message.request_id,
            error,
            extra=request_fields(message.request_id),
        )
        result = Refusal(
            message=f"the prompt cannot be tokenized: {_encodable(error)}",
            param="prompt",
            code="invalid_prompt",
        )
    if isinstance(result, Refusal):
        return [Refuse(request_id=request_id, refusal=result) for request_id in wire.ids_of(message)]
    return result


def _encoded(tokenizer: Tokenizer, message: wire.Encode, text: str) -> list[PassOn] | Refusal:
    """Return the command that carries the ids of a prompt through the engine, which computes nothing for it."""
    prompt = message.prompt
    check_text(tokenizer, text, max_length=message.max_length)
    tokens = _prompt_tokens(tokenizer, prompt, text, add_special_tokens=message.add_special_tokens)
    if message.shows_pieces and len(tokens) > MAX_PIECES:
        return Refusal(
            message=f"the pieces of at most {MAX_PIECES} tokens can be shown, got {len(tokens)}",
            param="prompt",
            code="too_many_pieces",
        )
    if message.shows_text and isinstance(prompt, wire.TokenPrompt):
        text = tokenizer.decode(tokens, skip_special_tokens=message.skip_special_tokens)
    encoded = wire.Encoded(
        tokens=tokens.astype("<i4", copy=False).tobytes(),
        text=text if message.shows_text else "",
        pieces=tuple(map(tokenizer.bytes_of_tokens(), tokens.tolist())) if message.shows_pieces else (),
    )
    return [PassOn(request_id=message.request_id, carry=wire.encode(encoded))]


def _retained(tokenizer: Tokenizer, message: wire.RetainText, text: str) -> list[Retain] | Refusal:
    """Return the command that keeps the KV of a text, or drops it."""
    if isinstance(message.prompt, wire.ChatPrompt) and message.prompt.images:
        return Refusal(
            message="a conversation with images cannot be retained by its text; send 'retain_s' with the request",
            param="prompt",
            code="images_not_supported",
        )
    check_text(tokenizer, text, max_length=message.max_length)
    tokens = _prompt_tokens(tokenizer, message.prompt, text).astype("<i4", copy=False).tobytes()
    return [
        Retain(
            request_id=message.request_id,
            tokens=tokens,
            seconds=message.seconds,
            namespace=message.namespace,
            adapter=message.adapter,
        )
    ]


def _encodable(error: Exception) -> str:
    """Return the text of an error without lone surrogates, which no message can carry."""
    return str(error).encode(errors="replace").decode()


def _submits(
    tokenizer: Tokenizer, message: wire.Generate, text: str, images: tuple[Image, ...]
) -> list[Submit] | Refusal:
    limit = message.max_length
    refusal = None if isinstance(message.prompt, wire.TokenPrompt) else overlong(tokenizer, message, text)
    if refusal is not None:
        return refusal
    longest = limit if message.cuts_prompt else None
    tokens = _prompt_tokens(tokenizer, message.prompt, text, longest=longest)
    tokens = with_end(tokens, message.end_token)
    if not len(tokens):
        return Refusal(message="the prompt must hold at least one token, got 0", param="prompt", code="empty_prompt")
    is_too_long = False
    if limit is not None and len(tokens) > limit:
        if message.cuts_prompt:
            tokens = cut(tokens, tokenizer.encode(text, add_special_tokens=False), limit)
        elif message.options.pooling is not None:  # by the engine or by its folder
            return Overflow(num_prompt=len(tokens), max_length=limit).refusal()
        else:
            is_too_long = True  # the engine will refuse it
    sampling = _with_bad_words(tokenizer, message)
    if isinstance(sampling, Refusal):
        return sampling
    sampling = capped(sampling, message, num_prompt=len(tokens))
    reading = message.text.reading
    if reading is not None:
        reading = replace(reading, prompt_tail=text[-TAIL_LENGTH:])
        sampling = bound(tokenizer, sampling, reading)
        if isinstance(sampling, Refusal):
            return sampling
    ids = tokens.astype("<i4", copy=False).tobytes()
    carried = replace(
        message.text,
        prefix="" if is_too_long else _echo(tokenizer, message, tokens),
        reading=reading,
        prompt_tokens=ids if message.reports_prompt else b"",
    )
    # The engine reports the log probabilities of a prompt with its first answer only.
    shows_prompt = sampling.prompt_logprobs is not None
    first = replace(carried, first_token=int(tokens[0])) if shows_prompt else carried
    options = replace(message.options, sampling=sampling)
    submit = Submit.of(options, request_id=message.request_id, tokens=ids, carry=wire.encode(first), images=images)
    submits = fan_out(submit, message.sibling_ids, carry=wire.encode(carried)) if message.sibling_ids else [submit]
    if message.begun:
        texts = [first, *[carried] * len(message.sibling_ids)]
        submits = [_resumed(*each) for each in zip(submits, texts, message.begun, strict=True)]
    return submits


def _resumed(submit: Submit, text: wire.TextOptions, begun: wire.Begun) -> Submit:
    """Return a request that goes on behind what it has had. The steps of a search show all of their output."""
    sampling = submit.sampling
    if begun.seed is not None:
        sampling = dataclasses.replace(sampling, seed=begun.seed)
    if begun.output and not submit.is_search:
        kept = sampling.kept_tokens
        if kept is not None:  # the limit is that of the whole answer
            kept = kept - begun.num_kept if kept > begun.num_kept else None
        sampling = dataclasses.replace(sampling, prompt_logprobs=None, kept_tokens=kept)  # its client has the prompt's
        text = replace(text, begun=begun, first_token=None, prompt_tokens=b"")
    return replace(submit, sampling=sampling, output=begun.output, carry=wire.encode(text))


def _prompt_text(tokenizer: Tokenizer, prompt: wire.Prompt) -> str:
    """Return the text of a prompt; empty if it has come as ids."""
    match prompt:
        case wire.TokenPrompt():
            return ""
        case wire.TextPrompt(text=text):
            return text
        case wire.PairPrompt(first=first, second=second):
            return f"{first}\n{second}"
        case wire.ChatPrompt():
            return tokenizer.render_chat(
                prompt.messages,
                tools=prompt.tools or None,
                documents=prompt.documents or None,
                template_kwargs=prompt.template_kwargs,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
            )


def _prompt_tokens(
    tokenizer: Tokenizer,
    prompt: wire.Prompt,
    text: str,
    *,
    add_special_tokens: bool | None = None,
    longest: int | None = None,
) -> NDArray[np.int32]:
    """Return the ids of a prompt with that text, which `check_text` has accepted, [num_tokens] int32.

    A pair that is longer than `longest` is cut.
    """
    if isinstance(prompt, wire.TokenPrompt):
        return np.frombuffer(prompt.tokens, dtype="<i4")
    if isinstance(prompt, wire.PairPrompt):
        return tokenizer.encode_pair(prompt.first, prompt.second, type_stride=prompt.type_stride, longest=longest)
    if add_special_tokens is None:  # a chat template writes them itself
        add_special_tokens = isinstance(prompt, wire.TextPrompt)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _with_bad_words(tokenizer: Tokenizer, message: wire.Generate) -> SamplingParams | Refusal:
    """Return the sampling parameters with the tokens of the bad words; or a refusal if a word has too many.

    A word is encoded without and with a space before it, because that is another token in most vocabularies.
    """
    if not message.bad_words:
        return message.options.sampling
    found: dict[tuple[int, ...], None] = {}
    for word in message.bad_words:
        for text in (word.lstrip(" "), " " + word.lstrip(" ")):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False).tolist())
            if len(tokens) > MAX_BAD_WORD_TOKENS:
                return Refusal(
                    message=f"bad_words must hold texts of at most {MAX_BAD_WORD_TOKENS} tokens, got {len(tokens)}",
                    param="bad_words",
                    code="invalid_value",
                )
            if tokens:
                found[tokens] = None
    return dataclasses.replace(message.options.sampling, bad_words=tuple(found))


def _echo(tokenizer: Tokenizer, message: wire.Generate, tokens: NDArray[np.int32]) -> str:
    """Return the text before the answer: of the ids that it begins with, or of the prompt."""
    if message.prefix_tokens:
        return tokenizer.decode(np.frombuffer(message.prefix_tokens, dtype="<i4"))
    match message:
        case wire.Generate(echo=False):
            return ""
        case wire.Generate(prompt=wire.TextPrompt(text=text)):
            return text
        case _:
            return tokenizer.decode(tokens)
