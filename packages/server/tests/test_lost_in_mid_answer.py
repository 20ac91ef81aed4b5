"""A death in mid-answer, in every protocol: the answer is that of a server in which nothing dies."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from memory_server import MemoryServer
from pagewood.server.http.errors import unavailable
from pagewood.server.keys.gate import KeyGate
from pagewood.server.keys.key import ApiKey, digest_of
from pagewood.server.keys.quota import Quota
from pagewood.server.messages import wire
from pagewood.server.protocols.common.formats import Usage
from pagewood.server.protocols.native.format import NativeFormat
from pagewood.server.requests.live import LiveRequests
from scripted import listening, paced, scripted_server

pytestmark = pytest.mark.anyio

LOST = unavailable("The engine process died.", code="engine_lost")
KEY = "sk-acme-0123456789"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PROMPT = "A question of more than one page of tokens"
TEXTS = [f"text {n}, of {n} words" for n in range(12)]  # more than the engine has rows
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
THOUGHTS = f"<think>\nHm.\n</think>\n\nSee:{CALL}"
NO_CALL = "<tool_calm>"
"""Its text is held back as long as it may be a call."""
STOP = "One two X"
"""It holds back most of `COUNTED`."""
COUNTED = "One two three"
USER = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
DRAWN = {"temperature": 1, "seed": 5, "max_tokens": 8}
BEAMS = {"use_beam_search": True, "temperature": 0, "max_tokens": 4}
VOLATILE = {"id", "call_id", "item_id", "request_id", "created", "created_at", "completed_at", "e2e_latency"}


def answer_of(prompt: str) -> str:
    """Return what the model answers if it is told to be brief, to call, and so on."""
    return next((text for word, text in ANSWERS.items() if word in prompt), COUNTED)


ANSWERS = {"brief": "Yes.", "think": THOUGHTS, "call": CALL, "calm": NO_CALL}


def said(word: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": word}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request."""

    path: str
    body: dict[str, Any]
    num_hidden: int = 0
    """Messages, at least, after which the client of a stream has got nothing yet."""
    is_drawn: bool = False
    """Whether the answers are hashes; otherwise the model is scripted."""

    @property
    def is_stream(self) -> bool:
        return self.num_hidden > 0


def whole(path: str, *, is_drawn: bool = False, **body: Any) -> Case:
    return Case(path=path, body={"stream": False, **body} if path.startswith("/api") else body, is_drawn=is_drawn)


def stream(path: str, num_hidden: int, **body: Any) -> Case:
    return Case(path=path, body={"stream": True, **body}, num_hidden=num_hidden)


TOOLS = [{"type": "function", "function": FUNCTION}]
LOGPROBS = ["message.output_text.logprobs"]
CASES = {
    "completion": whole(COMPLETIONS, prompt=PROMPT, is_drawn=True, **DRAWN),
    "best-of": whole(COMPLETIONS, prompt=[PROMPT, "b"], n=2, best_of=3, logprobs=1, is_drawn=True, **DRAWN),
    "echo": whole(COMPLETIONS, prompt=[PROMPT, "b"], n=2, echo=True, logprobs=1, is_drawn=True, **DRAWN),
    "some-ended": whole(COMPLETIONS, prompt=["Be brief", "b"], n=2, prompt_logprobs=1),
    "chat-n": whole(CHAT, messages=[USER], n=2, logprobs=True, top_logprobs=1, is_drawn=True, **DRAWN),
    "chat-parts": whole(CHAT, tools=TOOLS, logprobs=True, **said("think")),
    "response": whole(RESPONSES, input="think", include=LOGPROBS, tools=[{"type": "function", **FUNCTION}]),
    "message": whole(MESSAGES, max_tokens=99, **said("think")),
    "ollama-generate": whole("/api/generate", prompt="Hi"),
    "ollama-chat": whole("/api/chat", tools=TOOLS, **said("think")),
    "native": whole(
        "/generate",
        text=[PROMPT, "b"],
        sampling_params={"n": 2, "max_new_tokens": 8, "temperature": 1, "sampling_seed": 5},
        return_logprob=True,
        logprob_start_len=0,
        is_drawn=True,
    ),
    "native-ended": whole("/generate", text=["brief", "b"]),
    "embeddings": whole("/v1/embeddings", input=TEXTS),
    "ollama-embed": whole("/api/embed", input=TEXTS),
    "rerank": whole("/v1/rerank", query="q", documents=TEXTS),
    "score": whole("/v1/score", text_1="q", text_2=TEXTS),
    "beams": whole(COMPLETIONS, prompt=["a", "b"], n=2, best_of=3, is_drawn=True, **BEAMS),
    "chat-beams": whole(CHAT, messages=[USER], n=3, is_drawn=True, **BEAMS),
    "completion-stream": stream(COMPLETIONS, 7, prompt=["a", "b"], stop=[STOP], stream_options={"include_usage": True}),
    "completion-stream-n": stream(COMPLETIONS, 7, prompt="a", n=2, stop=[STOP]),
    "echo-stream": stream(COMPLETIONS, 1, prompt=PROMPT, n=2, echo=True, logprobs=1, max_tokens=5),
    "chat-stream": stream(CHAT, 7, messages=[USER], n=2, stop=[STOP]),
    "chat-stream-parts": stream(CHAT, 7, tools=TOOLS, **said("calm")),
    "chat-stream-hidden": stream(CHAT, 16, include_reasoning=False, **said("think")),
    "response-stream": stream(RESPONSES, 7, input="calm", include=LOGPROBS, tools=[{"type": "function", **FUNCTION}]),
    "message-stream": stream(MESSAGES, 7, max_tokens=99, stop_sequences=[STOP], messages=[USER]),
    "message-stream-parts": stream(
        MESSAGES, 7, max_tokens=99, tools=[{"name": "f", "input_schema": FUNCTION["parameters"]}], **said("calm")
    ),
    "ollama-generate-stream": stream("/api/generate", 7, prompt="Hi", options={"stop": [STOP]}),
    "ollama-chat-stream": stream("/api/chat", 40, tools=TOOLS, **said("call")),
    "native-stream": stream("/generate", 1, text="Hi", sampling_params={"n": 2, "stop": [STOP]}),
}


class Deaths:
    """Lets the engine die for the server after a message of it, and come back; counts messages, and uses of the key."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_messages = 0
        self._after: int | None = None
        """Messages after which it dies; None: it lives."""
        self._is_read = False
        self.num_deaths = 0
        self.uses: Counter[str] = Counter()
        take, admit, charge = LiveRequests.take, Quota.admit, Quota.charge

        def noted_take(live: LiveRequests, answers: wire.Answers) -> None:
            if self._is_read and self.num_messages == self._after:
                self._die(live)
            take(live, answers)
            self.num_messages += 1
            if not self._is_read and self.num_messages == self._after:
                self._die(live)

        def noted_admit(quota: Quota) -> None:
            admit(quota)
            self.uses["requests"] += 1

        def noted_charge(quota: Quota, num_tokens: int) -> None:
            charge(quota, num_tokens)
            self.uses += Counter(charges=1, tokens=num_tokens)

        monkeypatch.setattr(LiveRequests, "take", noted_take)
        monkeypatch.setattr(Quota, "admit", noted_admit)
        monkeypatch.setattr(Quota, "charge", noted_charge)

    def begin(self, after: int | None, *, is_read: bool) -> None:
        """Count messages from now on, and let it die after so many: at once, or when the last one has been read."""
        self.num_messages, self._after, self._is_read = 0, after, is_read

    def _die(self, live: LiveRequests) -> None:
        self._after = None
        self.num_deaths += 1
        live.lost(LOST)
        asyncio.get_running_loop().call_later(0.002, live.resume)


def scrubbed(value: Any) -> Any:
    """Return a value without ids and times."""
    if isinstance(value, dict):
        return {
            key: scrubbed(one)
            for key, one in value.items()  # pyright: ignore[reportUnknownVariableType]
            if key not in VOLATILE and not str(key).endswith("_duration")  # pyright: ignore[reportUnknownArgumentType]
        }
    return [scrubbed(one) for one in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def is_empty(piece: dict[str, Any]) -> bool:
    """Return whether a piece of a stream says nothing; there may be more of them."""
    choices: list[dict[str, Any]] = piece.get("choices") or []
    return bool(choices) and all(
        one["finish_reason"] is None and (one.get("text") == "" or one.get("delta") == {"content": ""})
        for one in choices
    )


def pieces(body: str) -> list[dict[str, Any]]:
    """Return what a body says: the whole answer, or the pieces of a stream, those of each choice in their order."""
    lines = [line.removeprefix("data: ") for line in body.split("\n") if line and not line.startswith("event:")]
    found: list[dict[str, Any]] = []
    for line in lines:
        value = scrubbed({"end": line} if line == "[DONE]" else json.loads(line))
        found += value if isinstance(value, list) else [value]
    return sorted([piece for piece in found if not is_empty(piece)], key=choice_of)


def choice_of(piece: dict[str, Any]) -> float:
    """Return the index of the choice of a piece; choices may take turns in any order."""
    if "output_ids" in piece:
        return piece.get("index", 0)
    return piece["choices"][0]["index"] if piece.get("choices") else math.inf


def counts(server: MemoryServer) -> Counter[str]:
    """Return what the metrics have counted."""
    found: Counter[str] = Counter()
    for account in server.metrics.requests.accounts:
        found.update({f"ended {reason}": num for reason, num in account.num_ended.items()})
        found["prompt"] += account.num_prompt_tokens
        found["output"] += account.num_output_tokens
        found["first"] += sum(account.first_token_s.counts)
    return found


def moments(num_messages: int, *, each_twice: bool) -> list[tuple[int, bool]]:
    """Return when to die, with whether the reader has read what had come: at any of the first and last messages."""
    places = {1, 2, 3, 4, 6, 8, 9, 11, 16, 23, 32, 46, 64, num_messages - 1, num_messages} & {
        *range(1, num_messages + 1)
    }
    if each_twice:
        return [(place, is_read) for place in sorted(places) for is_read in (False, True)]
    return [(place, i % 2 == 1) for i, place in enumerate(sorted(places))]


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
async def test_the_answer_is_that_of_a_quiet_server(
    case: Case, tools_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = Deaths(monkeypatch)
    keys = KeyGate((ApiKey(digest=digest_of(KEY), tenant="acme", tokens_per_minute=10**9),))
    options: dict[str, Any] = {"max_retries": 1, "grammars": False, "gate": keys, "pulse_interval_s": 0.01}
    async with (
        scripted_server(tools_folder, None if case.is_drawn else answer_of, **options) as server,
        listening(server) as url,
        httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {KEY}"}) as client,
        paced(server, step_s=0.001),
    ):
        incidents = server.service.live.incidents

        async def ask(after: int | None, *, is_read: bool = False) -> tuple[httpx.Response, Counter[str]]:
            """Return the answer, with what it was counted for."""
            before = deaths.uses + counts(server)
            deaths.begin(after, is_read=is_read)
            response = await client.post(case.path, json={"model": "echo", **case.body})
            await server.until(lambda: deaths.uses["charges"] == deaths.uses["requests"])
            await server.until_idle()
            return response, deaths.uses + counts(server) - before

        await ask(None)  # fills the cache
        quiet, used = await ask(None)
        assert quiet.status_code == 200, quiet.text
        expected, num_messages = pieces(quiet.text), deaths.num_messages
        num_hidden = 0
        for after, is_read in moments(num_messages, each_twice="use_beam_search" in case.body):
            num_retried = incidents.num_retried
            response, noted = await ask(after, is_read=is_read)
            assert response.status_code == 200, response.text
            if incidents.num_retried > num_retried:
                num_hidden = after
            elif case.is_stream and str(LOST) in response.text:
                continue  # the client had something
            assert pieces(response.text) == expected, f"after message {after}"
            assert noted == used
        assert num_hidden >= max(1, case.num_hidden)
        assert server.service.live.num_held == 0


async def test_another_answer_may_come_after_a_death(tools_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a seed: nothing of the first answer is in the second, which is shorter, or in its usage."""
    deaths = Deaths(monkeypatch)
    answers = [f"<think>\nHm.\n</think>\n\n{COUNTED * 3}", "<think>\nNo.\n</think>\n\nYes"]
    options: dict[str, Any] = {"max_retries": 1, "grammars": False, "pulse_interval_s": 0.01}
    async with scripted_server(tools_folder, lambda _: answers[deaths.num_deaths], **options) as server:
        deaths.begin(40, is_read=True)
        lost = (await server.post(CHAT, {"messages": [USER]})).json()
        await server.until_idle()
        num_counted = counts(server)["output"]
        quiet = (await server.post(CHAT, {"messages": [USER]})).json()
    assert lost["choices"] == quiet["choices"]
    assert lost["choices"][0]["message"]["content"] == "Yes"
    for name in ("completion_tokens", "completion_tokens_details"):
        assert lost["usage"][name] == quiet["usage"][name]
    assert quiet["usage"]["completion_tokens"] < 40 <= num_counted  # a counter never falls


def test_a_native_stream_forgets_counts_of_which_it_has_said_nothing() -> None:
    stream = NativeFormat(id="a", is_array=False).stream(unused)
    said = [wire.Answer("a", "", None, False, None, 7, 3, 2), wire.Answer("a", "t", None, False, None, 7, 0, 1)]
    stream.take(0, said[0])
    assert not stream.has_given
    stream.forget({0})
    event = json.loads(stream.take(0, said[1]).removeprefix(b"data: "))
    assert stream.has_given
    assert (event["meta_info"]["completion_tokens"], event["meta_info"]["cached_tokens"]) == (1, 0)


def unused() -> Usage:
    """Stand for the usage, which a native stream does not ask for."""
    raise NotImplementedError
