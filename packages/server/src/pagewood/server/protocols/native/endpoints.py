"""The endpoints of the native protocol."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pagewood.engine.api import MAX_KEPT_TOKENS, Flush, RequestOptions
from pagewood.server.http.errors import ApiError
from pagewood.server.http.exchange import exchange_of
from pagewood.server.http.operations import Operation
from pagewood.server.http.validation import parser
from pagewood.server.messages import wire
from pagewood.server.messages.token_ids import bytes_of, num_ids, written_ids_of
from pagewood.server.protocols.common.fields import Extent, check_tokens, sampling, stop_expressions
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.respond import json_response
from pagewood.server.protocols.common.service import Generation, Service, names_of
from pagewood.server.protocols.common.shared_kv import PARAM_NAMES
from pagewood.server.protocols.common.structured import constraint
from pagewood.server.protocols.native import answers, fields
from pagewood.server.protocols.native.format import NativeFormat
from pagewood.server.requests.live import new_request_id

TAG = "Native"
_PACKAGES = (
    "pagewood-server", "pagewood-engine", "pagewood-kvpool", "pagewood-radixcache", "pagewood-schedpolicy", "torch",
    "numpy", "numba", "tokenizers", "starlette", "uvicorn",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NativeEndpoints:
    """Generation with token ids, the tokenizer, and control of the server."""

    models: Models

    def operations(self) -> list[Operation]:
        """Return the operations."""
        operation = partial(Operation, tag=TAG)
        return [
            operation(
                name="Generate",
                path="/generate",
                endpoint=self.generate,
                body=fields.GenerateRequest,
                example={"text": "What is 12 + 7?", "sampling_params": {"max_new_tokens": 64}},
                neutral=fields.NEUTRAL,
                ignored=fields.IGNORED,
                answer=answers.Answer | list[answers.Answer],
                event=answers.Answer,
            ),
            operation(
                name="Tokenize",
                path="/tokenize",
                endpoint=self.tokenize,
                body=fields.TokenizeRequest,
                example={"text": "What is 12 + 7?", "return_pieces": True},
                answer=answers.Tokenized,
            ),
            operation(
                name="Detokenize",
                path="/detokenize",
                endpoint=self.detokenize,
                body=fields.DetokenizeRequest,
                example={"tokens": [40, 41, 42]},
                answer=answers.Detokenized,
            ),
            operation(
                name="ApplyTemplate",
                path="/apply_template",
                endpoint=self.apply_template,
                body=fields.TemplateRequest,
                example={"messages": [{"role": "user", "content": "What is 12 + 7?"}]},
                answer=answers.Templated,
            ),
            operation(
                name="Abort",
                path="/abort",
                endpoint=self.abort,
                body=fields.AbortRequest,
                example={"rid": "gen-0"},
                answer=answers.Aborted,
            ),
            operation(
                name="FlushCache",
                path="/flush_cache",
                endpoint=self.flush_cache,
                admin=True,
                body=fields.FlushRequest,
                example={},
                answer=answers.Flushed,
            ),
            operation(
                name="FlushCacheByGet",  # as slime asks SGLang
                method="GET",
                path="/flush_cache",
                endpoint=self.flush_cache,
                admin=True,
                answer=answers.Flushed,
            ),
            operation(
                name="Pause",
                path="/pause",
                endpoint=self.pause,
                admin=True,
                query={
                    "mode": {"type": "string", "enum": ["abort", "wait", "keep"]},
                    "clear_cache": {"type": "boolean"},
                },
                body=fields.PauseRequest,
                example={"mode": "retract"},
                answer=answers.Paused,
            ),
            operation(
                name="Resume",
                path="/resume",
                endpoint=self.resume,
                admin=True,
                body=fields.ResumeRequest,
                example={},
                answer=answers.Paused,
            ),
            operation(
                name="Retain",
                path="/retain",
                endpoint=self.retain,
                body=fields.RetainRequest,
                example={"text": "You are a helpful assistant.", "seconds": 0},
                answer=answers.Retained,
            ),
            operation(
                name="ServerInfo",
                method="GET",
                path="/server_info",
                endpoint=self.server_info,
                admin=True,
                answer=answers.ServerInfo,
            ),
        ]

    async def generate(self, request: Request) -> ASGIApp:
        """Continue a text, token ids or a conversation; the answer has the ids of its tokens."""
        said = await self.models.reader.read(request, fields.parse_generate)
        arrived_s = exchange_of(request.scope).started_s
        deadline_s = None if said.deadline is None else arrived_s + said.deadline
        service = await self.models.serving(said.model, request, deadline_s=deadline_s)
        name = said.model if said.lora_path is None else f"{said.model or service.model_name}:{said.lora_path}"
        model = _model(service, name)
        prompts, prompt_param, is_many = said.prompts(vocab_size=model.vocab_size)
        try:
            return self._generate(request, service, said, model, prompts, prompt_param=prompt_param, is_many=is_many)
        except ApiError as error:
            raise error.renamed(fields.PARAM_NAMES) from error

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or of a conversation."""
        said = await self.models.reader.read(request, parser(fields.TokenizeRequest))
        service = await self.models.serving(said.model, request)
        model = _model(service, said.model)
        chat = await self.models.reader.convert(said.chat, num_parts=len(said.messages or ()))
        chat = None if chat is None else await self.models.reader.images.filled(chat)
        fields.check_one({"text": said.text, "prompt": said.prompt, "messages": said.messages})
        param = "messages" if chat is not None else "text" if said.prompt is None else "prompt"
        message = wire.Encode(
            request_id=new_request_id("req"),
            prompt=wire.TextPrompt(text=said.text or said.prompt or "") if chat is None else chat,
            add_special_tokens=said.add_special_tokens,
            shows_pieces=bool(said.return_pieces),
            max_length=model.max_length,
        )
        encoded = await service.encoded(message, prompt_param=param)
        pieces = [piece.decode(errors="replace") for piece in encoded.pieces]
        return json_response(
            answers.Tokenized(
                tokens=await written_ids_of(encoded.tokens),
                count=num_ids(encoded.tokens),
                max_model_len=model.max_length,
                pieces=pieces if said.return_pieces else msgspec.UNSET,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        said = await self.models.reader.read(request, parser(fields.DetokenizeRequest))
        service = await self.models.serving(said.model, request)
        check_tokens(said.tokens, param="tokens", vocab_size=_model(service, said.model).vocab_size)
        message = wire.Encode(
            request_id=new_request_id("req"),
            prompt=wire.TokenPrompt(tokens=bytes_of(said.tokens)),
            skip_special_tokens=said.skip_special_tokens is not False,
            shows_text=True,
        )
        text = (await service.encoded(message, prompt_param="tokens")).text
        return json_response(answers.Detokenized(text=text, prompt=text))

    async def apply_template(self, request: Request) -> Response:
        """Return the text that the model's chat template makes of a conversation."""
        said = await self.models.reader.read(request, parser(fields.TemplateRequest))
        service = await self.models.serving(said.model, request)
        model = _model(service, said.model)
        chat = await self.models.reader.convert(said.chat, num_parts=len(said.messages or ()))
        chat = None if chat is None else await self.models.reader.images.filled(chat)
        fields.check_one({"messages": said.messages})
        assert chat is not None
        message = wire.Encode(
            request_id=new_request_id("req"), prompt=chat, shows_text=True, max_length=model.max_length
        )
        encoded = await service.encoded(message, prompt_param="messages")
        return json_response(answers.Templated(text=encoded.text, count=num_ids(encoded.tokens)))

    async def abort(self, request: Request) -> Response:
        """End a request of any protocol, by its id or that of its answers.

        Its client gets the error `aborted`, or from `/generate` what there is of the answers.
        """
        said = await self.models.reader.read(request, parser(fields.AbortRequest))
        num_aborted = sum(service.live.abort(said.rid) for service in self.models.loaded())
        if not num_aborted:
            raise ApiError(f"No request '{said.rid}' is queued or running.", status=404, code="request_not_found")
        return json_response(answers.Aborted(num_aborted))

    async def flush_cache(self, request: Request) -> Response:
        """Drop the cached KV that no request uses, on the device and in host memory. A disk cache keeps its pages."""
        said = await self.models.reader.read(request, parser(fields.FlushRequest, is_optional=True), is_declared=False)
        service = self._chosen(request)
        answer = await service.ask(Flush(request_id=new_request_id("req"), when_idle=said.when == "idle"))
        return json_response(answers.Flushed(answer.num_cached_tokens))

    async def pause(self, request: Request) -> Response:
        """Stop computing until `/resume`: for one request, or for all.

        No request ends unless the mode is `abort`; new ones are queued, and running ones go on afterwards. The query
        may say it in the words of vLLM: abort, wait (for those that are there) or keep.
        """
        said = await self.models.reader.read(request, parser(fields.PauseRequest, is_optional=True), is_declared=False)
        if "mode" in request.query_params:
            return await self._pause_as_vllm(request, said)
        if said.rid is not None:
            if said.mode == "abort":
                raise ApiError("A single request is aborted by '/abort'.", param="mode", code="invalid_value")
            return self._hold(said.rid, said.mode)
        service = self._chosen(request)
        await service.pause(retract=said.mode == "retract", abort=said.mode == "abort")
        return json_response(answers.Paused(True))

    async def _pause_as_vllm(self, request: Request, said: fields.PauseRequest) -> Response:
        """Pause all requests, in the words of vLLM."""
        mode, clears = request.query_params["mode"], request.query_params.get("clear_cache", "false")
        if said != fields.PauseRequest() or mode not in ("abort", "wait", "keep") or clears not in ("true", "false"):
            raise ApiError(
                "'mode' of the query must be abort, wait or keep, 'clear_cache' true or false, and there must be no "
                f"body, but got '{mode[:40]}' and '{clears[:40]}'.",
                param="mode",
                code="invalid_value",
            )
        service = self._chosen(request)
        await service.pause(abort=mode == "abort", waits=mode == "wait")
        if clears == "true":
            await service.ask(Flush(request_id=new_request_id("req")))
        return json_response(answers.Paused(True, status="paused"))

    async def resume(self, request: Request) -> Response:
        """Compute again after `/pause`."""
        said = await self.models.reader.read(request, parser(fields.ResumeRequest, is_optional=True), is_declared=False)
        if said.rid is not None:
            return self._hold(said.rid, "resume")
        service = self._chosen(request)
        await service.resume()
        return json_response(answers.Paused(False))

    async def retain(self, request: Request) -> Response:
        """Keep the cached KV of a text for some time, or drop the part of it that no other cached text needs."""
        said = await self.models.reader.read(request, parser(fields.RetainRequest))
        service = await self.models.serving(said.model, request)
        model = _model(service, said.model)
        service.check_ready()
        prompt, param = said.prompt(vocab_size=model.vocab_size)
        message = wire.RetainText(
            request_id=new_request_id("req"),
            prompt=prompt,
            seconds=said.seconds,
            namespace=said.cache_salt or None,
            adapter=model.adapter,
            max_length=model.max_length,
        )
        return json_response(answers.Retained((await service.ask(message, prompt_param=param)).num_cached_tokens))

    async def server_info(self, request: Request) -> Response:
        """Describe the server: versions, configuration, memory and counters."""
        service = self._chosen(request)
        model, status = service.model(service.model_name), service.status
        return json_response(
            answers.ServerInfo(
                model=service.model_name,
                started=service.started,
                versions=_versions(),
                status=status.state.value,
                max_model_len=model.max_length,
                vocab_size=model.vocab_size,
                config=model.config,
                kv_memory=answers.MemoryPlan(
                    num_pages=model.num_pages,
                    page_size=model.page_size,
                    page_bytes=model.page_bytes,
                    num_tokens=model.num_pages * model.page_size,
                    num_bytes=model.num_pages * model.page_bytes,
                ),
                engine=status.counters,
                vllm_config=_in_words_of_vllm(service, model)
                if "config_format" in request.query_params
                else msgspec.UNSET,
            )
        )

    def _hold(self, rid: str, mode: Literal["in_place", "retract", "resume"]) -> Response:
        """Pause one HTTP request, or resume it."""
        num_requests = sum(service.live.hold(rid, mode) for service in self.models.loaded())
        if not num_requests:
            raise ApiError(f"No request '{rid}' is queued or running.", status=404, code="request_not_found")
        return json_response(answers.Paused(mode != "resume", requests=num_requests))

    def _chosen(self, request: Request) -> Service:
        """Return the service that a command concerns, which is ready.

        Raises:
            ApiError: the query names no model although there are several, or the engine is not ready.
        """
        service = self.models.chosen(request)
        service.check_ready()
        return service

    def _generate(
        self,
        request: Request,
        service: Service,
        said: fields.GenerateRequest,
        model: wire.Model,
        prompts: list[wire.Prompt],
        *,
        prompt_param: str,
        is_many: bool,
    ) -> ASGIApp:
        chosen = said.sampling_params or fields.NativeSampling()
        num_answers = chosen.n or 1
        num_top = said.top_logprobs_num or 0
        start = said.logprob_start_len
        extent = Extent(
            max_tokens=chosen.max_tokens or fields.DEFAULT_MAX_TOKENS,
            num_answers=num_answers,
            num_choices=num_answers,
            logprobs=num_top if said.return_logprob else None,
            prompt_logprobs=num_top if said.return_logprob and start is not None and start >= 0 else None,
        )
        extent.check(len(prompts), param="n")
        structured = constraint(chosen)
        answer_id, arrived_s = said.rid or new_request_id("gen"), exchange_of(request.scope).started_s
        format = NativeFormat(
            id=answer_id,
            is_array=is_many or num_answers > 1,
            logprobs=bool(said.return_logprob),
            num_top=num_top,
            prompt_start=None if extent.prompt_logprobs is None else start,
            shows_pieces=bool(said.return_text_in_logprobs),
            received_s=arrived_s if said.return_timings or said.explain else None,
            has_kept=chosen.has_kept,
            explains=bool(said.explain),
        )
        generation = Generation(
            prompts=prompts,
            options=RequestOptions(
                sampling=sampling(
                    chosen,
                    service.defaults,
                    max_tokens=extent.max_tokens,
                    vocab_size=model.vocab_size,
                    logprobs=extent.logprobs or 0 if chosen.has_kept else extent.logprobs,
                    kept_tokens=MAX_KEPT_TOKENS if chosen.has_kept else None,
                    prompt_logprobs=extent.prompt_logprobs,
                    routed_experts_from=said.routed_experts_start_len or 0 if said.return_routed_experts else None,
                    hidden_states_from=said.hidden_states_start_len or 0 if said.return_hidden_states else None,
                    grammar=None if structured is None else structured.grammar,
                ),
                explain=bool(said.explain),
                deadline_s=None if said.deadline is None else arrived_s + said.deadline,
                priority=said.priority or 0,
                service_class=said.service_class or "",
                tag=said.tag or "",
                namespace=said.cache_salt or None,
                retain_s=said.retain,
                cache_hit_threshold=said.cache_hit_threshold or 0.0,
                handover=said.handover,
                keep_stop_token=bool(chosen.no_stop_trim),
            ),
            text=wire.TextOptions(
                stop=tuple(chosen.stop),
                stop_regex=stop_expressions(chosen),
                reports_tokens=True,
                shows_special_tokens=chosen.skip_special_tokens is False,
            ),
            prompt_param=prompt_param,
            grammar_param=None if structured is None else f"sampling_params.{structured.param}",
            param_names={**fields.PARAM_NAMES, **PARAM_NAMES},
            num_answers=num_answers,
            num_choices=num_answers,
            bad_words=tuple(chosen.bad_words),
            shows_partial=True,
            stream=bool(said.stream),
        )
        return service.generate(generation, model, names=names_of(request, answer_id), format=format)


def _in_words_of_vllm(service: Service, model: wire.Model) -> answers.VLLMConfig:
    """Return what trainers read of the configuration. Only a single engine takes weights."""
    if service.dispatcher is not None:
        return answers.VLLMConfig(weight_transfer_config=None)
    backend = "nccl" if model.config.get("device") == "cuda" else "gloo"
    return answers.VLLMConfig(weight_transfer_config=answers.TransferConfig(backend=backend))


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _model(service: Service, name: str | None) -> wire.Model:
    return service.model(service.model_name if name is None else name)
