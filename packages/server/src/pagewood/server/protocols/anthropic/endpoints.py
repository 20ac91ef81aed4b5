"""The endpoints of Anthropic's protocol."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pagewood.engine.api import RequestOptions
from pagewood.server.http.exchange import exchange_of
from pagewood.server.http.operations import Operation
from pagewood.server.messages import wire
from pagewood.server.protocols.anthropic import fields
from pagewood.server.protocols.anthropic.conversation import chat_prompt, num_parts
from pagewood.server.protocols.anthropic.errors import OVERLOADED, AnthropicError
from pagewood.server.protocols.anthropic.format import Message, MessageEvent, MessageFormat
from pagewood.server.protocols.anthropic.retention import retain_s
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.protocols.common.sampling_fields import chosen
from pagewood.server.protocols.common.service import Generation, names_of

TAG = "Anthropic"


class TokenCount(msgspec.Struct, frozen=True):
    """The tokens of a prompt."""

    input_tokens: int


@dataclass(frozen=True, slots=True)
class AnthropicEndpoints:
    """Messages, and counts of their tokens."""

    models: Models

    def operations(self) -> list[Operation]:
        """Return the operations."""
        operation = partial(
            Operation,
            tag=TAG,
            neutral=fields.NEUTRAL,
            ignored=fields.IGNORED,
            error=AnthropicError,
            busy_status=OVERLOADED,
        )
        prompt = {
            "model": self.models.names[0],
            "messages": [{"role": "user", "content": "What is 12 + 7?"}],
        }
        return [
            operation(
                name="Messages",
                path="/v1/messages",
                endpoint=self.messages,
                body=fields.MessagesRequest,
                example={**prompt, "max_tokens": 64},
                answer=Message,
                event=MessageEvent,
                last_event=None,
            ),
            operation(
                name="CountTokens",
                path="/v1/messages/count_tokens",
                endpoint=self.count_tokens,
                body=fields.CountTokensRequest,
                example=prompt,
                answer=TokenCount,
            ),
        ]

    async def messages(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        said = await self.models.reader.read(request, fields.parse_messages)
        service = await self.models.serving(said.model, request)
        model = service.model(said.model)
        tools, constraint = fields.tools_of(said), fields.constraint(said)
        sampling = dataclasses.replace(
            chosen(service.defaults, said),
            max_tokens=said.max_tokens,
            grammar=None if constraint is None else constraint.grammar,
        )
        prompt = await self.models.reader.conversation(lambda: chat_prompt(said, tools), num_parts=num_parts(said))
        generation = Generation(
            prompts=[prompt],
            options=RequestOptions(sampling=sampling, retain_s=retain_s(said)),
            text=wire.TextOptions(stop=tuple(said.stop_sequences or ())),
            prompt_param="messages",
            grammar_param=None if constraint is None else constraint.param,
            is_chat=True,
            tools=tools,
            fills_window=True,
            stream=bool(said.stream),
        )
        format = MessageFormat(
            id=f"msg_{uuid.uuid4().hex[:24]}",
            model=service.model_name,
            request_id=exchange_of(request.scope).request_id,
            max_tokens=said.max_tokens,
            shows_thinking=said.thinking is None or said.thinking.display != "omitted",
        )
        return service.generate(generation, model, names=names_of(request, format.id), format=format)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a prompt."""
        said = await self.models.reader.read(request, fields.parse_count)
        service = await self.models.serving(said.model, request)
        service.model(said.model)
        tools = fields.tools_of(said)
        prompt = await self.models.reader.conversation(lambda: chat_prompt(said, tools), num_parts=num_parts(said))
        tokens = await service.encode(prompt, prompt_param="messages")
        return json_response(TokenCount(len(tokens)))
