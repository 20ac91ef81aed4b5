"""The endpoints of the Responses protocol."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from pagewood.engine.api import RequestOptions, SamplingParams
from pagewood.server.http.errors import ApiError
from pagewood.server.http.operations import Operation
from pagewood.server.keys.caller import current_caller
from pagewood.server.messages import wire
from pagewood.server.protocols.common import fields
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.paging import read_page
from pagewood.server.protocols.common.reasoning import style_kwargs
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.protocols.common.service import Generation, names_of
from pagewood.server.protocols.common.structured import constraint
from pagewood.server.protocols.responses import objects
from pagewood.server.protocols.responses.format import ResponsesFormat
from pagewood.server.protocols.responses.items import Item, items_of, listed, messages
from pagewood.server.protocols.responses.objects import Response
from pagewood.server.protocols.responses.request import (
    IGNORED,
    NEUTRAL,
    ResponsesRequest,
    parse_request,
    response_format,
)
from pagewood.server.protocols.responses.store import ResponseStore, StoredResponse
from pagewood.server.protocols.responses.tools import Offer, offer

MAX_LISTED = 100
"""Most items of one page."""
DEFAULT_LISTED = 20
TAG = "Responses"
_KEPT = "/v1/responses/{id}"
_ABSENT = ("/v1/responses/input_tokens", "/v1/responses/compact")
"""Paths of OpenAI's API that this server does not have, and that look like those of kept responses."""
_ANSWERED_WHOLE = "A response that is kept cannot be streamed again; leave 'stream' out."


@dataclass(frozen=True, slots=True)
class ResponsesEndpoints:
    """Responses: new ones and kept ones."""

    models: Models
    store: ResponseStore | None = field(default_factory=ResponseStore)
    """None: none are kept."""

    def operations(self) -> list[Operation]:
        """Return the operations."""
        operation = partial(Operation, tag=TAG)
        return [
            operation(
                name="CreateResponse",
                path="/v1/responses",
                endpoint=self.create,
                body=ResponsesRequest,
                example={"model": self.models.names[0], "input": "What is 12 + 7?", "max_output_tokens": 64},
                neutral=NEUTRAL,
                ignored=IGNORED,
                answer=objects.Response,
                event=objects.ResponseEvent,
                last_event=None,
            ),
            operation(
                name="GetResponse",
                method="GET",
                path=_KEPT,
                endpoint=self.retrieve,
                query={"stream": {"enum": ["false", "0"]}},
                answer=objects.Response,
                statuses=(404,),
            ),
            operation(
                name="DeleteResponse",
                method="DELETE",
                path=_KEPT,
                endpoint=self.delete,
                answer=objects.DeletedResponse,
                statuses=(404,),
            ),
            operation(
                name="CancelResponse",
                path=f"{_KEPT}/cancel",
                endpoint=self.cancel,
                answer=None,
            ),
            operation(
                name="ListInputItems",
                method="GET",
                path=f"{_KEPT}/input_items",
                endpoint=self.input_items,
                query={
                    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": DEFAULT_LISTED},
                    "order": {"enum": ["asc", "desc"], "default": "desc"},
                    "after": {"type": "string", "description": "The id of the last item of the page before."},
                },
                answer=objects.ItemList,
                statuses=(404,),
            ),
        ]

    async def create(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        said = await self.models.reader.read(request, parse_request)
        service = await self.models.serving(said.model, request)
        model = service.model(said.model)
        before = self._conversation(said.previous_response_id)

        def read() -> tuple[list[Item], list[dict[str, Any]]]:
            earlier = items_of(before)
            items = [*earlier, *items_of(said.input)]
            return items, messages(items, instructions=said.instructions, num_earlier=len(earlier))

        num_parts = len(before) + (len(said.input) if isinstance(said.input, list) else 1)
        items, prompt_messages = await self.models.reader.convert(read, num_parts=num_parts)
        offered = offer(said, items)
        asked = said.model_copy(update={"response_format": response_format(said)})
        structured = constraint(asked, format_param="text.format")
        sampling = fields.sampling(
            said,
            service.defaults,
            max_tokens=said.max_output_tokens,
            vocab_size=model.vocab_size,
            logprobs=(said.top_logprobs or 0) if said.shows_logprobs else None,
            grammar=None if structured is None else structured.grammar,
        )
        prompt = wire.ChatPrompt(
            messages=tuple(prompt_messages),
            tools=() if offered.tools is None else offered.tools.offered,
            template_kwargs=_style_kwargs(said) | (said.chat_template_kwargs or {}),
        )
        generation = Generation(
            prompts=[await self.models.reader.images.filled(prompt)],
            options=RequestOptions(
                sampling=sampling,
                priority=said.priority or 0,
                namespace=said.cache_salt or None,
                retain_s=said.retain_s,
            ),
            text=wire.TextOptions(stop=tuple(said.stop), stop_regex=fields.stop_expressions(said)),
            prompt_param="input",
            grammar_param=None if structured is None else structured.param,
            bad_words=tuple(said.bad_words),
            is_chat=True,
            tools=offered.tools,
            param_names={"max_tokens": "max_output_tokens"},
            stream=bool(said.stream),
        )
        format = ResponsesFormat(
            response=self._begun(service.model_name, said, offered, sampling),
            keep=self._keeper(items, said.store),
            shows_logprobs=said.shows_logprobs,
            shows_encrypted=said.shows_encrypted,
            origins=offered.origins,
        )
        return service.generate(generation, model, names=names_of(request, format.id), format=format)

    async def retrieve(self, request: Request) -> HttpResponse:
        """Return a response that is kept."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise ApiError(_ANSWERED_WHOLE, param="stream", code="unsupported_parameter")
        return json_response(self._kept(request).body)

    async def delete(self, request: Request) -> HttpResponse:
        """Delete a response that is kept."""
        self._kept(request)
        id: str = request.path_params["id"]
        self._kept_ones("id").delete(id)
        return json_response(objects.DeletedResponse(id=id))

    async def cancel(self, request: Request) -> HttpResponse:
        """Refuse to cancel a response, because kept responses have ended."""
        self._kept(request)
        raise ApiError(
            "Cannot cancel a synchronous response. To end one that is not complete, close its connection.",
            code="not_cancellable",
        )

    async def input_items(self, request: Request) -> HttpResponse:
        """List the items that led to a response, including those of earlier responses."""
        items = self._kept(request).input_items()
        found = read_page(request, most=MAX_LISTED, default=DEFAULT_LISTED).cut(items, lambda item: item.id)
        page = objects.ItemList(
            data=found.shown,
            first_id=found.shown[0].id if found.shown else "",
            last_id=found.shown[-1].id if found.shown else "",
            has_more=found.has_more,
        )
        return json_response(page)

    def _kept(self, request: Request) -> StoredResponse:
        id: str = request.path_params["id"]
        found = self._find(id, "id")
        if found is None:
            raise ApiError(f"Response with id '{id[:100]}' not found.", status=404, code="response_not_found")
        return found

    def _kept_ones(self, param: str) -> ResponseStore:
        if self.store is None:
            raise ApiError(
                "This server keeps no responses, because several processes answer requests. Send the whole "
                "conversation as 'input', and leave 'store' out.",
                param=param,
                code="responses_not_kept",
            )
        return self.store

    def _find(self, id: str, param: str) -> StoredResponse | None:
        """Return a response of the caller's tenant; None: unknown id."""
        found = self._kept_ones(param).get(id)
        return found if found is not None and found.tenant == current_caller().tenant else None

    def _conversation(self, id: str | None) -> list[dict[str, Any]]:
        """Return the items up to the end of a response; an empty list without an id."""
        if id is None:
            return []
        found = self._find(id, "previous_response_id")
        if found is None:
            raise ApiError(
                f"Previous response with id '{id[:100]}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found.conversation()

    def _keeper(self, items: list[Item], wants: bool | None) -> Callable[[Response], None] | None:
        """Return what keeps the response; None: nothing does. `wants` is what the client says of it."""
        if wants is False or (wants is None and self.store is None):
            return None
        store, tenant = self._kept_ones("store"), current_caller().tenant

        def keep(response: Response) -> None:
            body = msgspec.json.encode(response)
            listing = msgspec.json.encode([listed(item) for item in items])
            store.put(response.id, StoredResponse(body=body, input=listing, tenant=tenant))

        return keep

    def _begun(self, model_name: str, said: ResponsesRequest, offered: Offer, sampling: SamplingParams) -> Response:
        """Return the response as it is before the first token."""
        text: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
        if said.text is not None and said.text.verbosity is not None:
            text["verbosity"] = said.text.verbosity
        if said.text is not None and said.text.format is not None:
            text["format"] = said.text.format.model_dump(by_alias=True, exclude_none=True)
        effort = None if said.reasoning is None else said.reasoning.effort
        return Response(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            model=model_name,
            instructions=said.instructions,
            previous_response_id=said.previous_response_id,
            max_output_tokens=said.max_output_tokens,
            max_tool_calls=said.max_tool_calls,
            metadata=said.metadata or {},
            parallel_tool_calls=said.parallel_tool_calls is not False,
            prompt_cache_key=said.prompt_cache_key,
            reasoning={"effort": effort, "summary": None if said.reasoning is None else said.reasoning.summary},
            safety_identifier=said.safety_identifier,
            store=said.store is not False and self.store is not None,
            temperature=sampling.temperature if said.temperature is None else said.temperature,
            text=text,
            tool_choice=said.tool_choice or "auto",
            tools=offered.shown,
            top_logprobs=said.top_logprobs or 0,
            top_p=sampling.top_p if said.top_p is None else said.top_p,
            truncation=said.truncation or "disabled",
            user=said.user,
        )


def absent_routes() -> list[Route]:
    """Return routes that answer 404 for missing features; otherwise the answer would be 405."""
    return [Route(path, _absent, methods=["POST"]) for path in _ABSENT]


async def _absent(request: Request) -> HttpResponse:
    raise HTTPException(404)


def _style_kwargs(said: ResponsesRequest) -> dict[str, Any]:
    return style_kwargs(
        None if said.reasoning is None else said.reasoning.effort, None if said.text is None else said.text.verbosity
    )
