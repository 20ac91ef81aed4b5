"""One model and the requests that it holds: what all endpoints do with them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.types import ASGIApp

from pagewood.engine.api import Pause, RequestOptions, Resume, SamplingParams
from pagewood.engine.fan_out import ROW_STARTS
from pagewood.engine.model_folder.vector_recipe import VectorRecipe
from pagewood.engine.text import ResponseTemplate
from pagewood.engine.weight_commands import SLEEP_TAGS, Sleep, SleepTag, WakeUp
from pagewood.server.dashboard.live_data import Watchers
from pagewood.server.http.errors import ApiError, unavailable
from pagewood.server.http.exchange import exchange_of
from pagewood.server.http.field_limits import MAX_ID_LENGTH
from pagewood.server.messages import wire
from pagewood.server.metrics.metrics import Metrics
from pagewood.server.protocols.common.formats import Format
from pagewood.server.protocols.common.respond import GroupResponse
from pagewood.server.protocols.common.tools import Tools
from pagewood.server.replicas.dispatcher import Dispatcher
from pagewood.server.replicas.fleet_status import ServerStatus
from pagewood.server.requests.adapters import ServedAdapters
from pagewood.server.requests.live import LiveRequests, new_request_id
from pagewood.server.requests.status import EngineState
from pagewood.server.requests.weights import ServedVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The content of one HTTP request, independent of its protocol."""

    prompts: Sequence[wire.Prompt]
    options: RequestOptions
    """What the engine reads of it."""
    text: wire.TextOptions = field(default_factory=wire.TextOptions)
    """What the detokenizer reads of it, but for how answers are read."""
    prompt_param: str
    """The client's name of the prompt field."""
    grammar_param: str | None = None
    """The client's name of the field with the grammar; None: it sent none."""
    num_answers: int = 1
    """Answers to compute for each prompt."""
    num_choices: int = 1
    """Number of best answers to show for each prompt."""
    bad_words: tuple[str, ...] = ()
    echo: bool = False
    """Whether the text of the prompt is shown."""
    is_chat: bool = False
    """Whether answers are read by the model's response template: into content, reasoning and calls."""
    tools: Tools | None = None
    shows_reasoning: bool = True
    """Whether log probabilities have the tokens of reasoning."""
    param_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The client's names of further fields of the engine, where they differ; for errors."""
    fills_window: bool = False
    """Whether the `max_tokens` of its sampling may exceed the room that the prompt leaves in the model's longest text;
    see `wire.Generate.fills_window`."""
    shows_partial: bool = False
    """See `LiveGroup.shows_partial`."""
    reports_prompt: bool = False
    """Whether answers have the ids of their prompts."""
    stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The model and the requests that it holds, for the endpoints of all protocols."""

    live: LiveRequests
    status: ServerStatus
    defaults: SamplingParams
    """Sampling parameters of requests that give none."""
    model_name: str
    adapters: ServedAdapters = field(default_factory=ServedAdapters)
    weights: ServedVersion = field(default_factory=ServedVersion)
    template: ResponseTemplate | None = None
    """How answers of the model are read; None: answers are plain text."""
    recipe: VectorRecipe = field(default_factory=VectorRecipe)
    """How vectors and scores are made."""
    watchers: Watchers = field(default_factory=Watchers)
    """The viewers of the engine."""
    started: int = field(default_factory=lambda: int(time.time()))
    """Unix time, seconds."""
    metrics: Metrics | None = None
    """None: nothing is measured."""
    dispatcher: Dispatcher | None = None
    """Sends requests to replicas; None: there is one engine, and the tokenizers send to it."""
    folder: Path | None = None
    """Where the engine process writes profiles; None: it takes none."""
    replace_engine: Callable[[], Awaitable[None]] | None = None
    """Replaces the engine process, or raises ApiError; None: it cannot be replaced."""

    def take(self, message: wire.ToHttp) -> None:
        """Take a message of the detokenizer, or with several replicas of a tokenizer."""
        match message:
            case wire.Answers():
                if self.dispatcher is not None:
                    message = self.dispatcher.answered(message)
                if self.metrics is not None:
                    self.metrics.requests.answered(message)
                self.live.take(message)
            case wire.Loading() | wire.Pulse():
                self.status.take(message)
                if self.dispatcher is not None and isinstance(message, wire.Pulse):
                    self.dispatcher.pulsed(message)
                if self.live.is_interrupted and self.status.state is EngineState.READY:
                    self.live.resume()
                if self.metrics is not None:
                    self.metrics.pulsed(self.status)
            case wire.Snapshot():
                self.watchers.take(message)
            case wire.CacheChanges():
                if self.dispatcher is not None:
                    self.dispatcher.cache_changed(message)
            case wire.OtherLoad():
                if self.dispatcher is not None:
                    self.dispatcher.others_changed(message)
            case _:
                assert self.dispatcher is not None, "tokenizers send to the engine if there is one"
                self.dispatcher.take(message)

    def model(self, name: str) -> wire.Model:
        """Return the model that a request is for, with the adapter if `name` is that of one.

        While its engine is started again after a death, the request may come: it waits as those that the engine held.

        Raises:
            ApiError: `name` is another model, or the engine does not work and requests do not wait for it.
        """
        adapter = self.adapter_of(name)
        model, state = self.status.model, self.status.state
        may_wait = self.live.has_repeats and state is not EngineState.STALLED
        if model is None or not (may_wait or state is EngineState.READY):
            raise self._not_ready()
        if adapter is None:
            return model
        return replace(model, adapter=adapter, adapter_version=self.status.adapter_versions.get(adapter))

    def check_ready(self) -> None:
        """Check that an engine works now, as commands need it, which are not repeated.

        Raises:
            ApiError: it does not.
        """
        if self.status.state not in (EngineState.READY, EngineState.OUTDATED):
            raise self._not_ready()

    def _not_ready(self) -> ApiError:
        return unavailable(f"The engine is not ready: {self.status.detail}.", code="not_ready")

    def adapter_of(self, name: str) -> str | None:
        """Return the adapter that a client names: alone, or behind the model and a colon; None: it names the model.

        Raises:
            ApiError: `name` is neither.
        """
        if name == self.model_name:
            return None
        adapter = name.removeprefix(f"{self.model_name}:")
        if adapter in self.adapters.by_name:
            return adapter
        raise ApiError(
            f"The model '{name}' does not exist; this server has '{self.model_name}'.",
            status=404,
            param="model",
            code="model_not_found",
        )

    def generate(self, generation: Generation, model: wire.Model, *, names: frozenset[str], format: Format) -> ASGIApp:
        """Submit a request, and return the response that will send its answers; it ends with an error at its deadline.

        Args:
            generation: the content of the request.
            model: the loaded model.
            names: by which the client may refer to it.
            format: writes the answers.

        Raises:
            ApiError: the server holds too many requests, or the model cannot call functions.
        """
        options, reading = generation.options, self._reading(generation)
        has_rows = any(getattr(options.sampling, start) is not None for start in ROW_STARTS)
        asked = replace(
            options,
            adapter=model.adapter,
            explain_admission=self.metrics is not None,
            names=tuple(sorted(names)),
        )
        text = replace(generation.text, reading=reading)
        grammar_param = generation.grammar_param
        if grammar_param is None and generation.tools is not None:
            grammar_param = generation.tools.param
        group = self.live.submit(
            [
                wire.Generate(
                    request_id=new_request_id("req"),
                    prompt=prompt,
                    options=asked,
                    text=text,
                    sibling_ids=tuple(new_request_id("req") for _ in range(generation.num_answers - 1)),
                    bad_words=generation.bad_words,
                    echo=generation.echo,
                    max_length=model.max_length,
                    reports_prompt=generation.reports_prompt,
                    fills_window=generation.fills_window,
                    adapter_version=model.adapter_version,
                    weights_digest=self.status.weights_digest,
                )
                for prompt in generation.prompts
            ],
            prompt_param=generation.prompt_param,
            grammar_param=grammar_param,
            param_names=generation.param_names,
            names=names,
        )
        group.shows_partial = generation.shows_partial
        if options.deadline_s is not None:
            self.live.end_at(group, options.deadline_s)
        return GroupResponse(
            live=self.live,
            group=group,
            num_prompts=len(generation.prompts),
            num_answers=generation.num_answers,
            num_choices=generation.num_choices,
            shares_prompt=generation.num_answers > 1 and (has_rows or options.sampling.prompt_logprobs is not None),
            has_rows=has_rows,
            format=format,
            stream=generation.stream,
            is_speculating=self.status.speculation is not None,
            is_read=reading is not None,
        )

    async def encode(self, prompt: wire.Prompt, *, prompt_param: str) -> NDArray[np.int32]:
        """Return the token ids of a prompt, [num_tokens] int32, as the engine would compute them.

        A tokenizer process encodes it; the engine computes nothing. A prompt may be longer than the model accepts.

        Args:
            prompt: to encode.
            prompt_param: the client's name of the prompt field.

        Raises:
            ApiError: the tokenizer or the chat template refuses the prompt, the server holds too many requests, or a
                process that held the request died.
        """
        model = self.status.model
        message = wire.Encode(
            request_id=new_request_id("req"), prompt=prompt, max_length=None if model is None else model.max_length
        )
        return np.frombuffer((await self.encoded(message, prompt_param=prompt_param)).tokens, dtype="<i4")

    async def encoded(self, message: wire.Encode, *, prompt_param: str) -> wire.Encoded:
        """Return the answer of a tokenizer process; arguments and errors are those of `encode`."""
        answer = await self.ask(message, prompt_param=prompt_param)
        assert answer.encoded is not None
        return answer.encoded

    async def ask(
        self,
        message: wire.NewRequest,
        *,
        prompt_param: str = "",
        param_names: Mapping[str, str] | None = None,
    ) -> wire.Answer:
        """Send a message that has one answer, and return the answer; `param_names` as in `Generation`.

        Raises:
            ApiError: it was refused, the server holds too many requests, or a process that held it died.
        """
        group = self.live.submit([message], prompt_param=prompt_param, param_names=param_names or {})
        try:
            return (await group.next())[1]
        finally:
            self.live.close(group)

    async def pause(self, *, abort: bool = False, waits: bool = False, retract: bool = False) -> None:
        """Stop computing, until `resume`; see `Pause`.

        Raises:
            ApiError: see `ask`.
        """
        await self.ask(Pause(request_id=new_request_id("req"), abort=abort, waits=waits, retract=retract))
        self.status.paused = "retract" if retract else "in_place"

    async def resume(self) -> None:
        """Compute again.

        Raises:
            ApiError: see `ask`.
        """
        await self.ask(Resume(request_id=new_request_id("req")))
        self.status.paused = "no"

    async def sleep(
        self, tags: Sequence[SleepTag], *, drops_weights: bool, mode: Literal["keep", "wait", "abort"]
    ) -> None:
        """Let the engine sleep, see `Sleep`.

        Args:
            tags: what sleeps.
            drops_weights: whether weights are forgotten.
            mode: keep: requests go on afterwards; wait: those that are there end first; abort: they end at once.

        Raises:
            ApiError: it was refused, or see `ask`.
        """
        command = Sleep(request_id=new_request_id("req"), tags=tuple(tags), drops_weights=drops_weights)
        pauses = mode != "keep" and not self.status.sleep.is_asleep
        was_paused = self.status.paused
        if pauses:
            await self.pause(abort=mode == "abort", waits=mode == "wait", retract=was_paused == "retract")
        try:
            await self.ask(command)
            self.status.sleep = self.status.sleep.slept(command)
        except ApiError:
            asleep = self.status.sleep.tags
            woken: tuple[SleepTag, ...] = tuple(one for one in SLEEP_TAGS if one in command.tags and one not in asleep)
            if self.dispatcher is not None and woken:  # some replicas may sleep
                await self.ask(WakeUp(request_id=new_request_id("req"), tags=woken))
            raise
        finally:
            if pauses and was_paused == "no":
                await self.resume()

    async def wake_up(self, tags: Sequence[SleepTag]) -> None:
        """Wake the engine up, see `WakeUp`.

        Raises:
            ApiError: it was refused, or see `ask`.
        """
        command = WakeUp(request_id=new_request_id("req"), tags=tuple(tags))
        await self.ask(command)
        self.status.sleep = self.status.sleep.woken(command)

    def note_updated(self) -> None:
        """Note that the engine has all weights, after an update."""
        self.status.sleep = self.status.sleep.updated()

    def _reading(self, generation: Generation) -> wire.Reading | None:
        """Return the rules for reading the answers; None: answers are plain text.

        Raises:
            ApiError: functions are offered, and calls of this model cannot be read.
        """
        if not generation.is_chat:
            return None
        tools = generation.tools
        if tools is None or tools.choice == "none":
            return None if self.template is None else wire.Reading(shows_reasoning=generation.shows_reasoning)
        if self.template is None or not self.template.has_calls:
            raise ApiError(
                f"The model '{self.model_name}' has no template by which calls of functions could be read; "
                f"leave '{tools.param}' out.",
                param=tools.param,
                code="tools_not_supported",
            )
        return wire.Reading(
            tools=tools.offered,
            binds=tools.binds,
            parallel=tools.parallel,
            shows_reasoning=generation.shows_reasoning,
        )


def names_of(request: Request, answer_id: str) -> frozenset[str]:
    """Return the names of a request: the id of its answers, its `x-request-id`, and `X-Client-Request-Id` if sent.

    Raises:
        ApiError: the client's own name is too long to be looked up.
    """
    names = {answer_id, exchange_of(request.scope).request_id}
    own_id = request.headers.get("x-client-request-id", "")
    if len(own_id) > MAX_ID_LENGTH:
        message = f"'X-Client-Request-Id' must have at most {MAX_ID_LENGTH} characters, but got {len(own_id)}."
        raise ApiError(message, param="X-Client-Request-Id", code="invalid_value")
    return frozenset(names | {own_id} if own_id else names)
