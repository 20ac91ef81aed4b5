"""Programs on a server with OpenAI's completions API, with the standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from pagewood.engine.api import Grammar
from pagewood.engine.program.backend import Answer, OnText, Prompt, Sampling, Usage, best_choice, num_shared
from pagewood.engine.text import ChatTemplateError, ReadStops, Tokenizer

_MAX_ERROR_CHARACTERS = 500
"""Most characters of an answer that is not JSON, in an error."""

_Read = Callable[[http.client.HTTPResponse], Answer]


class RemoteError(RuntimeError):
    """The server could not be reached, refused a request, or answered with something else than a completion."""


class RemoteBackend:
    """Runs programs on a server: Pagewood, or another with OpenAI's `/v1/completions`. Invariant: it keeps no text.

    With a tokenizer, prompts are sent as token ids, exactly as a `LocalBackend` computes them. Without one, they are
    sent as text, and programs with roles are refused, because the server's chat endpoint cannot continue a turn.

    `select` sends all choices in one request, with `echo`, `logprobs` and `max_tokens` 0. The server computes the
    text before them once for each choice, because `echo` asks for log probabilities of the whole prompt. Grammars are
    sent as `structured_outputs`, as vLLM has it, `top_k` and `stop_regex` by their names, and a `priority` that is not
    0 as it is: higher goes first in Pagewood, last in vLLM.

    Use it as `with RemoteBackend(...) as backend`, or call `close`.

    Args:
        url: of the server, with or without `/v1`.
        model: its name at the server.
        api_key: sent as a bearer token; None: none is sent.
        tokenizer: of the model, or its folder.
        timeout_s: longest wait for the next bytes of an answer.
        max_connections: requests at the same time; others wait.

    Raises:
        ValueError: an argument is wrong, or the folder has no tokenizer.
    """

    __slots__ = ("_api_key", "_location", "_model", "_pool", "_timeout_s", "_tokenizer")

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        tokenizer: Tokenizer | str | Path | None = None,
        timeout_s: float = 600.0,
        max_connections: int = 32,
    ) -> None:
        location = urllib.parse.urlsplit(url)
        if location.scheme not in ("http", "https") or not location.hostname:
            raise ValueError(f"url must be http://host or https://host, got {url!r}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
        if max_connections < 1:
            raise ValueError(f"max_connections must be >= 1, got {max_connections}")
        self._location = location
        self._model = model
        self._api_key = api_key
        self._tokenizer = Tokenizer.from_folder(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(max_connections, "pagewood-remote")

    def render(self, prompt: Prompt) -> str:
        """Return the whole text of a prompt.

        Raises:
            ChatTemplateError: it has roles, and there is no tokenizer or its template rejects them.
        """
        return prompt.render(self._known_tokenizer()) if prompt.is_conversation else prompt.text

    def complete(
        self, prompt: Prompt, sampling: Sampling, priority: int, *, on_text: OnText | None = None
    ) -> Future[Answer]:
        """Continue a text."""

        offer = sampling.offer
        # With tools, stop strings act on content only, so this side looks for them.
        has_read_stops = offer is not None and bool(sampling.stop or sampling.stop_regex)
        is_streamed = on_text is not None or has_read_stops
        usage_options = {"include_usage": True} | ({"continuous_usage_stats": True} if has_read_stops else {})

        def body() -> dict[str, Any]:
            grammar = sampling.grammar if offer is None else offer.grammar(self._known_tokenizer(), prompt)
            named: dict[str, Any] = {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": sampling.seed,
                "stop": None if has_read_stops else list(sampling.stop) or None,
                "stop_regex": None if has_read_stops else list(sampling.stop_regex) or None,
                "structured_outputs": None if grammar is None else _structured(grammar),
                "stream": True if is_streamed else None,
                "stream_options": usage_options if is_streamed else None,
            }
            given = {name: value for name, value in named.items() if value is not None}
            return {"prompt": self._encode(prompt, ""), "max_tokens": sampling.max_tokens, **given}

        def read(response: http.client.HTTPResponse) -> Answer:
            make_stops = None if offer is None else offer.stops(sampling, self._known_tokenizer(), prompt)
            if is_streamed:
                answer = _read_stream(response, on_text, None if make_stops is None else make_stops())
            else:
                answer = _read_whole(response)
            return answer if offer is None else offer.read(answer, self._known_tokenizer(), prompt)

        return self._request(body, read, priority)

    def score(self, prompt: Prompt, choices: Sequence[str], priority: int) -> Future[Answer]:
        """Score choices, all in one request."""
        prompts: list[list[int] | str] = []

        def body() -> dict[str, Any]:
            prompts.extend(self._encode(prompt, more) for more in ("", *choices))
            return {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}

        return self._request(body, lambda found: _read_scores(found, prompts, choices), priority)

    def close(self) -> None:
        """Wait for the requests that run, and drop those that have not begun. May be called twice."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> RemoteBackend:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _known_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ChatTemplateError("roles need the chat template: pass tokenizer= to RemoteBackend")
        return self._tokenizer

    def _encode(self, prompt: Prompt, more: str) -> list[int] | str:
        if self._tokenizer is None:
            return self.render(prompt) + more
        return prompt.encode(self._tokenizer, more=more)

    def _request(self, body: Callable[[], dict[str, Any]], read: _Read, priority: int) -> Future[Answer]:
        answer = Future[Answer]()

        def exchange() -> None:
            try:
                fields = body() | {"model": self._model}
                if priority:
                    fields["priority"] = priority
                found = self._exchange(fields, read, answer)
            except Exception as error:  # the variable gets every error
                with contextlib.suppress(InvalidStateError):  # it was cancelled
                    answer.set_exception(error)
            else:
                with contextlib.suppress(InvalidStateError):
                    answer.set_result(found)

        waiting = self._pool.submit(exchange)
        answer.add_done_callback(lambda _: waiting.cancel())
        waiting.add_done_callback(lambda one: one.cancelled() and answer.cancel())
        return answer

    def _exchange(self, fields: Mapping[str, Any], read: _Read, answer: Future[Answer]) -> Answer:
        kind = http.client.HTTPSConnection if self._location.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._location.hostname or "", self._location.port, timeout=self._timeout_s)
        try:
            connection.connect()
            line = connection.sock  # the connection forgets it when the answer ends with the connection
            answer.add_done_callback(lambda one: one.cancelled() and _hang_up(line))
            headers = {"Content-Type": "application/json"}
            if self._api_key is not None:
                headers["Authorization"] = f"Bearer {self._api_key}"
            path = self._location.path.rstrip("/").removesuffix("/v1")
            connection.request("POST", f"{path}/v1/completions", json.dumps(fields), headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    raise RemoteError(f"the server answered {response.status}: {_error_text(response.read())}")
                return read(response)
        except (OSError, http.client.HTTPException) as error:
            address = f"{self._location.scheme}://{self._location.netloc}"
            raise RemoteError(f"the request to {address} failed: {error or type(error).__name__}") from error
        finally:
            connection.close()


def _hang_up(line: socket.socket) -> None:
    """Wake the thread that reads; the server ends the request."""
    with contextlib.suppress(OSError):  # it has ended meanwhile
        line.shutdown(socket.SHUT_RDWR)


def _structured(grammar: Grammar) -> dict[str, Any]:
    """Return the field that asks for a grammar.

    Raises:
        ValueError: the API has no form for it.
    """
    if grammar.after:
        raise ValueError(f"grammar.after must be empty for a server, got {grammar.after[:50]}")
    match grammar.kind:
        case "json_schema":
            return {"json": grammar.text}
        case "choice":
            return {"choice": json.loads(grammar.text)}
        case "lark":
            return {"grammar": grammar.text}
        case "regex" | "structural_tag":
            return {grammar.kind: grammar.text}


def _read_whole(response: http.client.HTTPResponse) -> Answer:
    found = _object(response.read())
    choice = _choices(found, 1)[0]
    return Answer(text=str(choice["text"]), finish=str(choice.get("finish_reason")), usage=_usage(found))


def _read_stream(response: http.client.HTTPResponse, on_text: OnText | None, stops: ReadStops | None) -> Answer:
    """Return the answer of a stream; `stops` ends it, and with the connection the request."""
    texts: list[str] = []
    finish, usage = "", Usage()

    def take(text: str) -> None:
        if text:
            texts.append(text)
            if on_text is not None:
                on_text(text)

    for chunk in _events(response):
        usage = _usage(chunk) if chunk.get("usage") else usage
        for choice in cast("list[dict[str, Any]]", chunk.get("choices", [])):
            finish = choice.get("finish_reason") or finish
            text = str(choice.get("text") or "")
            take(text if stops is None else stops.push(text))
        if stops is not None and stops.matched is not None:
            return Answer(text="".join(texts), finish="stop", usage=usage)
    if not finish:
        raise RemoteError("the server ended the stream before the answer was complete")
    if stops is not None:
        take(stops.flush())
        finish = finish if stops.matched is None else "stop"
    return Answer(text="".join(texts), finish=finish, usage=usage)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the objects of server-sent events."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        chunk = _object(data)
        if "error" in chunk:
            raise RemoteError(f"the server ended the stream with an error: {_error_text(data)}")
        yield chunk


def _read_scores(
    response: http.client.HTTPResponse, prompts: Sequence[list[int] | str], choices: Sequence[str]
) -> Answer:
    found = _object(response.read())
    tokens: list[Sequence[object]] = []
    logprobs: list[list[float]] = []
    for prompt, choice in zip(prompts, _choices(found, len(prompts)), strict=True):
        entries = cast("dict[str, list[Any]] | None", choice.get("logprobs"))
        if not entries:
            raise RemoteError("the server must answer echo with log probabilities, but there are none")
        tokens.append(entries["tokens"] if isinstance(prompt, str) else prompt)
        logprobs.append(entries["token_logprobs"][: len(tokens[-1])])  # some servers still generate a token
    num_before = num_shared(tokens)
    usage = _usage(found)
    usage = Usage(num_prompt_tokens=usage.num_prompt_tokens, num_cached_tokens=usage.num_cached_tokens)
    return best_choice(choices, [each[num_before:] for each in logprobs[1:]], usage)


def _choices(found: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    choices = cast("list[dict[str, Any]]", found.get("choices", []))
    if len(choices) != count:
        raise RemoteError(f"the server must answer with {count} choices, got {len(choices)}")
    return sorted(choices, key=lambda choice: int(choice.get("index", 0)))


def _usage(found: Mapping[str, Any]) -> Usage:
    usage = cast("dict[str, Any]", found.get("usage") or {})
    details = cast("dict[str, Any]", usage.get("prompt_tokens_details") or {})
    return Usage(
        num_prompt_tokens=usage.get("prompt_tokens") or 0,
        num_cached_tokens=details.get("cached_tokens") or 0,
        num_output_tokens=usage.get("completion_tokens") or 0,
    )


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RemoteError(f"the server must answer with a JSON object, got {_error_text(data)}")
    return cast("dict[str, Any]", found)


def _error_text(data: bytes) -> str:
    """Return the message of an error, or else the beginning of the answer."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(data)["error"]["message"])
    return data[:_MAX_ERROR_CHARACTERS].decode(errors="replace")
