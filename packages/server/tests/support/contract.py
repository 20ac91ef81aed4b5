"""Requests that schemathesis makes of the OpenAPI document, sent to a whole server, and checks of its answers."""

from __future__ import annotations

import asyncio
import copy
import importlib
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from streams import check_stream

_GENERAL: Any = importlib.import_module("schemathesis.checks")  # its types are unknown in part
_OPENAPI: Any = importlib.import_module("schemathesis.specs.openapi.checks")
CHECKS = [
    _GENERAL.not_a_server_error,
    _OPENAPI.status_code_conformance,
    _OPENAPI.content_type_conformance,
    _OPENAPI.response_schema_conformance,
    _OPENAPI.negative_data_rejection,
    _OPENAPI.unsupported_method,
]
PASSED = {name: name for name in ("method", "url", "json", "headers", "params")} | {"data": "content"}
"""Arguments as schemathesis makes them for requests -> their names in httpx."""
ALTERNATIVES = {
    "structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "ebnf",
    "json_schema", "regex", "structural_tag", "use_beam_search", "length_penalty", "early_stopping", "stop_regex",
    "logits_processors", "tools", "tool_choice", "min_tokens", "min_new_tokens", "best_of", "input_ids",
    "stream_options", "top_logprobs", "prompt_logprobs", "format", "text_format", "thinking", "output_config",
    "previous_response_id", "prompt_name", "instruct",
}  # fmt: skip
"""Fields that contradict most other fields, or have few values that the server accepts; negative cases have them."""
_TEXT = {"type": "string", "minLength": 1, "maxLength": 50, "pattern": "^[ -~]*$"}
_DOCUMENT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 257}, "maxItems": 20}
NARROW: dict[str, dict[str, Any]] = {
    "model": {"const": "echo"},
    "max_tokens": {"const": 4},
    "max_completion_tokens": {"const": 4},
    "max_new_tokens": {"const": 4},
    "max_output_tokens": {"const": 4},
    "num_predict": {"const": 4},
    "num_ctx": {"const": 100},
    "dimensions": {"const": 4},
    "n": {"enum": [1, 3]},
    "prompt": _TEXT,
    "text": _TEXT,
    "content": _TEXT,
    "input": _TEXT,
    "text_1": _TEXT,
    "query": _TEXT,
    "documents": {"type": "array", "items": {"anyOf": [_TEXT, _DOCUMENT]}, "minItems": 1},
    "tokens": _TOKENS,
    "stop_token_ids": _TOKENS,
    "logit_bias": {"type": "object", "properties": {"65": {"type": "number", "minimum": -100, "maximum": 100}}},
    "stream": {"type": "boolean"},
    "return_logprob": {"const": True},
    "logprobs": {"const": True},
}
"""Fields -> values of which the server accepts all."""
MESSAGE = {"role": {"enum": ["system", "user", "assistant"]}, "content": _TEXT}


@contextmanager
def serving(folder: Path) -> Generator[Any]:
    """Run a server in a loop of its own, and yield a function that sends a request to it and returns the answer."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    def send(**request: Any) -> Any:
        answer = run(server.admin.request(**request))
        if request["url"].endswith("/pause"):  # otherwise no later request would be answered
            run(server.admin.post("/resume", json={}))
        if request["url"].endswith("/drain"):
            run(server.admin.post("/drain", json={"is_draining": False}))
        return answer

    server = MemoryServer(folder, Tokenizer.from_folder(folder), limit=64, grammars=True)
    run(server.start())
    try:
        yield send
        run(server.until_idle())
    finally:
        run(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def check_contract(send: Any, *, num_cases: int) -> Counter[int]:
    """Send about that many requests; return how many answers had each status.

    Raises:
        BaseException: an answer is an error of the server, or is not what the document says.
    """
    document = send(method="GET", url="/openapi.json").json()
    for operation in [one for methods in document["paths"].values() for one in methods.values()]:
        operation.pop("security", None)  # schemathesis would make keys up; `send` has one
    statuses: Counter[int] = Counter()
    kept = send(method="POST", url="/v1/responses", json={"model": "echo", "input": "Hi"}).json()["id"]
    narrowed = _narrowed(document, response_id=kept)
    for mode, described in ((GenerationMode.POSITIVE, narrowed), (GenerationMode.NEGATIVE, document)):
        schema: Any = schemathesis.openapi.from_dict(described)
        operations = [found.ok() for found in schema.get_all_operations()]
        for operation in operations:
            num_examples = max(1, num_cases // (2 * len(operations)))
            if "requestBody" not in document["paths"][operation.path][operation.method]:
                num_examples = min(num_examples, 3 if mode is GenerationMode.POSITIVE else 0)
            if num_examples:
                _check(operation, mode, send, statuses, num_examples, document)
    return statuses


def _check(
    operation: Any,
    mode: GenerationMode,
    send: Any,
    statuses: Counter[int],
    num_examples: int,
    document: dict[str, Any],
) -> None:
    def check(case: Any) -> None:
        request = case.as_transport_kwargs(base_url="http://memory")
        passed = {theirs: request[ours] for ours, theirs in PASSED.items() if request.get(ours) is not None}
        response = send(**passed, timeout=60)
        statuses[response.status_code] += 1
        # schemathesis does not know that a body that is too long is a reason to reject wrong data.
        unsuitable = [_OPENAPI.negative_data_rejection] if response.status_code == 413 else []
        case.validate_response(response, checks=CHECKS, excluded_checks=unsuitable)
        check_stream(document, operation.path, operation.method, response)

    run: Any = given(case=operation.as_strategy(generation_mode=mode))(check)
    settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )(run)()


def _narrowed(document: dict[str, Any], *, response_id: str) -> dict[str, Any]:
    """Return the document with fewer valid requests: most of them can be answered, in a short time."""
    found = copy.deepcopy(document)
    schemas = found["components"]["schemas"]
    for name, schema in schemas.items():
        if "." in name:  # of answers
            continue
        properties = schema.get("properties", {})
        for field in ALTERNATIVES & properties.keys():
            del properties[field]
        for field, narrow in NARROW.items():
            if "enum" not in properties.get(field, {"enum": ()}):
                properties[field] = narrow
        if "stream" in properties:
            schema.setdefault("required", []).append("stream")  # otherwise streams are rare
    message = {"type": "object", "properties": MESSAGE, "required": [*MESSAGE], "additionalProperties": False}
    schemas |= dict.fromkeys(("Message", "AnthropicMessage", "OllamaMessage"), message)
    response = schemas["ResponsesRequest"]["properties"]
    response["input"] = {"anyOf": [_TEXT, {"type": "array", "items": message, "minItems": 1}]}
    del response["text"]
    for name in ("GenerateRequest", "TokenizeRequest"):
        properties = schemas[name]["properties"]
        for other in schemas["TemplateRequest"]["properties"].keys() - {"model"}:
            del properties[other]
        schemas[name]["required"] = ["text", *({"return_logprob", "stream"} & properties.keys())]
    for name in ("ChatRequest", "TemplateRequest"):
        del schemas[name]["properties"]["continue_final_message"]
    for path, methods in found["paths"].items():
        for parameter in methods.get("get", {}).get("parameters", ()) if path.startswith("/v1/responses/") else ():
            if parameter["in"] == "path":
                parameter["schema"] = {"const": response_id}
    return found
