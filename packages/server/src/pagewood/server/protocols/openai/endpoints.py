"""The endpoints of OpenAI's protocol."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pagewood.engine.api import RequestOptions
from pagewood.server.http.errors import ApiError
from pagewood.server.http.operations import Operation
from pagewood.server.messages import wire
from pagewood.server.messages.token_ids import bytes_of
from pagewood.server.protocols.common import fields, shared_kv
from pagewood.server.protocols.common.beams import BeamResponse
from pagewood.server.protocols.common.formats import Format
from pagewood.server.protocols.common.messages import tools_of
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.priority import PriorityRequest, parse_priority
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.protocols.common.service import Generation, Service, names_of
from pagewood.server.protocols.common.structured import constraint
from pagewood.server.protocols.common.tools import Tools
from pagewood.server.protocols.openai import beams, chat, completions, tokens
from pagewood.server.requests.live import new_request_id

TAG = "OpenAI"


class ChangedRequest(msgspec.Struct, frozen=True):
    """A request whose priority was changed."""

    id: str
    priority: int
    object: Literal["request"] = "request"


@dataclass(frozen=True, slots=True)
class OpenAIEndpoints:
    """Chat completions, completions, models, and the priority of a request."""

    models: Models

    def operations(self) -> list[Operation]:
        """Return the operations."""
        operation = partial(Operation, tag=TAG)
        return [
            operation(
                name="ChatCompletions",
                path="/v1/chat/completions",
                endpoint=self.chat_completions,
                body=chat.ChatRequest,
                example={
                    "model": self.models.names[0],
                    "messages": [{"role": "user", "content": "What is 12 + 7?"}],
                    "max_tokens": 64,
                },
                neutral=chat.NEUTRAL,
                ignored=chat.IGNORED,
                answer=chat.ChatCompletion,
                event=chat.ChatChunk,
            ),
            operation(
                name="Completions",
                path="/v1/completions",
                endpoint=self.completions,
                body=completions.CompletionRequest,
                example={"model": self.models.names[0], "prompt": "What is 12 + 7?", "max_tokens": 64},
                neutral=completions.NEUTRAL,
                ignored=fields.IGNORED,
                answer=completions.Completion,
                event=completions.Completion,
            ),
            operation(
                name="GenerateTokens",
                path="/inference/v1/generate",
                endpoint=self.tokens,
                body=tokens.TokensRequest,
                example={"token_ids": [40, 41, 42], "sampling_params": {"max_tokens": 8, "logprobs": 0}},
                neutral=tokens.NEUTRAL,
                answer=tokens.GeneratedTokens,
            ),
            operation(
                name="SetPriority",
                path="/v1/requests/{name:path}/priority",
                endpoint=self.priority,
                body=PriorityRequest,
                example={"priority": 5},
                answer=ChangedRequest,
            ),
        ]

    async def chat_completions(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        said = await self.models.reader.read(request, chat.parse_chat)
        service = await self.models.serving(said.model, request, keep_s=said.ttl)
        model = service.model(said.model)
        extent, tools = chat.extent(said), tools_of(said)
        answer_id = new_request_id("chatcmpl")
        format = chat.ChatFormat(
            id=answer_id,
            created=int(time.time()),
            model=service.model_name,
            options=fields.stream_options(said),
            logprobs=extent.logprobs is not None,
            prompt_logprobs=said.prompt_logprobs,
            shows_reasoning=said.include_reasoning is not False,
            has_old_form=said.has_old_form,
            has_ids=bool(said.return_token_ids),
            names_ids=bool(said.return_tokens_as_token_ids),
        )
        prompt = await self.models.reader.conversation(lambda: chat.prompt(said, tools), num_parts=len(said.messages))
        return self._respond(request, service, said, model, [prompt], extent, format, tools=tools, is_chat=True)

    async def completions(self, request: Request) -> ASGIApp:
        """Continue one or more prompts."""
        said = await self.models.reader.read(request, completions.parse_completion)
        service = await self.models.serving(said.model, request, keep_s=said.ttl)
        model = service.model(said.model)
        extent = completions.extent(said)
        format = completions.CompletionFormat(
            id=new_request_id("cmpl"),
            created=int(time.time()),
            model=service.model_name,
            options=fields.stream_options(said),
            logprobs=said.logprobs,
            prompt_logprobs=said.prompt_logprobs,
            echo=extent.echo,
            has_ids=bool(said.return_token_ids),
            names_ids=bool(said.return_tokens_as_token_ids),
        )
        prompts = completions.prompts(said, vocab_size=model.vocab_size)
        return self._respond(request, service, said, model, prompts, extent, format)

    async def tokens(self, request: Request) -> ASGIApp:
        """Continue token ids with token ids."""
        said = await self.models.reader.read(request, tokens.parse_tokens)
        service = await self.models.serving(said.model, request)
        model = service.model(service.model_name if said.model is None else said.model)
        fields.check_tokens(said.token_ids, param="token_ids", vocab_size=model.vocab_size)
        chosen, answer_id = said.sampling_params, said.request_id or new_request_id("gen")
        extent, structured = tokens.extent(chosen), constraint(chosen)
        generation = Generation(
            prompts=[wire.TokenPrompt(tokens=bytes_of(said.token_ids))],
            options=RequestOptions(
                sampling=fields.sampling(
                    chosen,
                    service.defaults,
                    max_tokens=extent.max_tokens,
                    vocab_size=model.vocab_size,
                    logprobs=extent.logprobs or 0 if said.return_sampling_mask else extent.logprobs,
                    kept_tokens=tokens.MAX_MASK_TOKENS if said.return_sampling_mask else None,
                    prompt_logprobs=extent.prompt_logprobs,
                    routed_experts_from=0 if said.return_routed_experts else None,
                    grammar=None if structured is None else structured.grammar,
                ),
                priority=said.priority or 0,
                namespace=said.cache_salt or None,
                keep_stop_token=True,
            ),
            text=wire.TextOptions(
                stop=tuple(chosen.stop),
                stop_regex=fields.stop_expressions(chosen),
                reports_tokens=True,
                hidden=fields.stop_ids(chosen, model.eos_token_ids),
            ),
            prompt_param="token_ids",
            grammar_param=None if structured is None else f"sampling_params.{structured.param}",
            param_names={
                **{name: f"sampling_params.{name}" for name in tokens.TokenSampling.model_fields},
                "kept_tokens": "return_sampling_mask",
                "routed_experts_from": "return_routed_experts",
            },
            num_answers=extent.num_answers,
            num_choices=extent.num_choices,
            bad_words=tuple(chosen.bad_words),
            shows_partial=True,
            stream=bool(said.stream),
        )
        format = tokens.TokensFormat(
            id=answer_id,
            logprobs=extent.logprobs,
            prompt_logprobs=extent.prompt_logprobs,
            options=fields.stream_options(said),
            has_mask=bool(said.return_sampling_mask),
        )
        return service.generate(generation, model, names=names_of(request, answer_id), format=format)

    async def priority(self, request: Request) -> Response:
        """Change the priority of a request that is queued, running or streaming."""
        name: str = request.path_params["name"]
        priority = await self.models.reader.read(request, parse_priority)
        if not sum(service.live.prioritize(name, priority) for service in self.models.loaded()):
            raise ApiError(f"No request '{name}' is queued or running.", status=404, code="request_not_found")
        return json_response(ChangedRequest(name, priority))

    def _respond(
        self,
        request: Request,
        service: Service,
        said: fields.GenerationFields,
        model: wire.Model,
        prompts: Sequence[wire.Prompt],
        extent: fields.Extent,
        format: chat.ChatFormat | completions.CompletionFormat,
        *,
        tools: Tools | None = None,
        is_chat: bool = False,
    ) -> ASGIApp:
        names = names_of(request, format.id)
        prompt_param = "messages" if is_chat else "prompt"
        if said.use_beam_search:
            return self._search(service, said, model, prompts, extent, format, names=names, prompt_param=prompt_param)
        structured, has_ids = constraint(said), bool(said.return_token_ids)
        # As in OpenAI's completions, the token that ends a text has a log probability, and no text.
        keeps_end = has_ids or (not is_chat and extent.logprobs is not None)
        generation = Generation(
            prompts=prompts,
            options=RequestOptions(
                sampling=fields.sampling(
                    said,
                    service.defaults,
                    max_tokens=extent.max_tokens,
                    vocab_size=model.vocab_size,
                    logprobs=extent.logprobs,
                    prompt_logprobs=extent.prompt_logprobs,
                    grammar=None if structured is None else structured.grammar,
                ),
                explain=bool(said.return_timings),
                priority=said.priority or 0,
                namespace=said.cache_salt or None,
                cache_hit_threshold=said.cache_hit_threshold or 0.0,
                handover=said.handover,
                keep_stop_token=keeps_end,
            ),
            text=wire.TextOptions(
                stop=tuple(said.stop),
                stop_regex=fields.stop_expressions(said),
                is_scoring=extent.is_scoring,
                reports_tokens=has_ids,
                hidden=fields.stop_ids(said, model.eos_token_ids) if keeps_end else (),
            ),
            reports_prompt=has_ids,
            prompt_param=prompt_param,
            grammar_param=None if structured is None else structured.param,
            num_answers=extent.num_answers,
            num_choices=extent.num_choices,
            bad_words=tuple(said.bad_words),
            echo=extent.echo,
            is_chat=is_chat,
            tools=tools,
            shows_reasoning=not isinstance(format, chat.ChatFormat) or format.shows_reasoning,
            param_names=shared_kv.PARAM_NAMES
            | ({} if extent.max_tokens_param is None else {"max_tokens": extent.max_tokens_param}),
            stream=bool(said.stream),
        )
        return service.generate(generation, model, names=names, format=format)

    def _search(
        self,
        service: Service,
        said: fields.GenerationFields,
        model: wire.Model,
        prompts: Sequence[wire.Prompt],
        extent: fields.Extent,
        format: Format,
        *,
        names: frozenset[str],
        prompt_param: str,
    ) -> BeamResponse:
        structured = constraint(said)
        return BeamResponse(
            live=service.live,
            params=beams.params(said, extent, model),
            model=model,
            prompts=prompts,
            prompt_param=prompt_param,
            grammar_param=None if structured is None else structured.param,
            bad_words=tuple(said.bad_words),
            names=names,
            priority=said.priority or 0,
            num_choices=extent.num_choices,
            format=format,
            is_speculating=service.status.speculation is not None,
        )
