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
from pagewood.server.protocols.openai import tokens
from pagewood.server.requests import live_request
from pagewood.server.requests.live import LiveRequests
from pagewood.server.stages.detokenizing import TextStreams, _Open  # pyright: ignore[reportPrivateUsage]
from scripted import listening, paced, scripted_server
from seeded_faults import Edit, seed_fault

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
    is_drawn: bool = False
    """Whether the answers are hashes; otherwise the model is scripted."""


def whole(path: str, *, is_drawn: bool = False, **body: Any) -> Case:
    return Case(path=path, body={"stream": False, **body} if path.startswith("/api") else body, is_drawn=is_drawn)


def stream(path: str, *, is_drawn: bool = False, **body: Any) -> Case:
    return Case(path=path, body={"stream": True, **body}, is_drawn=is_drawn)


TOOLS = [{"type": "function", "function": FUNCTION}]
LOGPROBS = ["message.output_text.logprobs"]
CASES = {
    "unseeded": whole(COMPLETIONS, prompt=PROMPT, is_drawn=True, **{**DRAWN, "seed": None}),
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
        sampling_params={
            "n": 2,
            "max_new_tokens": 8,
            "temperature": 1,
            "sampling_seed": 5,
            "custom_params": {"return_top_p_token_ids": True},
        },
        return_logprob=True,
        logprob_start_len=0,
        return_routed_experts=True,
        return_hidden_states=True,
        hidden_states_start_len=-1,
        is_drawn=True,
    ),
    "tokens-stream": stream(
        "/inference/v1/generate",
        token_ids=[*range(9, 40)],
        sampling_params={"n": 2, "max_tokens": 8, "temperature": 1, "seed": 5},
        return_routed_experts=True,
        return_sampling_mask=True,
        is_drawn=True,
    ),
    "native-ended": whole("/generate", text=["brief", "b"]),
    "embeddings": whole("/v1/embeddings", input=TEXTS),
    "ollama-embed": whole("/api/embed", input=TEXTS),
    "rerank": whole("/v1/rerank", query="q", documents=TEXTS),
    "score": whole("/v1/score", text_1="q", text_2=TEXTS),
    "beams": whole(COMPLETIONS, prompt=["a", "b"], n=2, best_of=3, is_drawn=True, **BEAMS),
    "chat-beams": whole(CHAT, messages=[USER], n=3, is_drawn=True, **BEAMS),
    "completion-stream": stream(COMPLETIONS, prompt=["a", "b"], stop=[STOP], stream_options={"include_usage": True}),
    "completion-stream-n": stream(COMPLETIONS, prompt="a", n=2, stop=[STOP]),
    "echo-stream": stream(COMPLETIONS, prompt=PROMPT, n=2, echo=True, logprobs=1, max_tokens=5),
    "chat-stream": stream(CHAT, messages=[USER], n=2, stop=[STOP]),
    "chat-stream-parts": stream(CHAT, tools=TOOLS, **said("calm")),
    "chat-stream-think": stream(CHAT, tools=TOOLS, logprobs=True, top_logprobs=1, **said("think")),
    "chat-stream-drawn": stream(CHAT, messages=[USER], n=2, logprobs=True, top_logprobs=1, is_drawn=True, **DRAWN),
    "chat-stream-hidden": stream(CHAT, include_reasoning=False, **said("think")),
    "response-stream": stream(RESPONSES, input="calm", include=LOGPROBS, tools=[{"type": "function", **FUNCTION}]),
    "message-stream": stream(MESSAGES, max_tokens=99, stop_sequences=[STOP], messages=[USER]),
    "message-stream-parts": stream(
        MESSAGES, max_tokens=99, tools=[{"name": "f", "input_schema": FUNCTION["parameters"]}], **said("calm")
    ),
    "ollama-generate-stream": stream("/api/generate", prompt="Hi", options={"stop": [STOP]}),
    "ollama-chat-stream": stream("/api/chat", tools=TOOLS, **said("call")),
    "native-stream": stream("/generate", text="Hi", sampling_params={"n": 2, "stop": [STOP]}),
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

        def noted_admit(quota: Quota, *, takes_place: bool = True) -> None:
            admit(quota, takes_place=takes_place)
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
    """Return when to die, with whether the reader has read what had come; of many messages, rather the first and last.

    In the middle of a long answer, one death costs as much as whole tests of short ones.
    """
    few = {1, 2, 4, 9, 23, 64} if num_messages > 50 else {1, 2, 3, 4, 6, 8, 9, 11, 16, 23, 32, 46}
    places = {*few, num_messages - 1, num_messages} & {*range(1, num_messages + 1)}
    if each_twice:
        return [(place, is_read) for place in sorted(places) for is_read in (False, True)]
    return [(place, i % 2 == 1) for i, place in enumerate(sorted(places))]


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
async def test_the_answer_is_that_of_a_quiet_server(
    case: Case, tools_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = Deaths(monkeypatch)
    monkeypatch.setattr(tokens, "MAX_MASK_TOKENS", 13)
    keys = KeyGate((ApiKey(digest=digest_of(KEY), tenant="acme", tokens_per_minute=10**9),))
    options: dict[str, Any] = {"max_retries": 1, "grammars": False, "gate": keys, "pulse_interval_s": 0.01}
    async with (
        scripted_server(tools_folder, None if case.is_drawn else answer_of, **options) as server,
        listening(server) as url,
        httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client,
        paced(server, step_s=0.001),
    ):
        incidents = server.service.live.incidents

        async def ask(after: int | None, *, is_read: bool = False) -> tuple[httpx.Response, Counter[str]]:
            """Return the answer, with what it was counted for."""
            server.service.live._num_seeds = 0  # pyright: ignore[reportPrivateUsage]  # not ours
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
        num_survived = 0
        for after, is_read in moments(num_messages, each_twice="use_beam_search" in case.body):
            num_retried = incidents.num_retried
            response, noted = await ask(after, is_read=is_read)
            assert response.status_code == 200, response.text
            num_survived += incidents.num_retried > num_retried
            assert pieces(response.text) == expected, f"after message {after}"
            assert noted == used
        assert num_survived >= min(num_messages - 1, 1)
        assert server.service.live.num_held == 0


FAULTS: dict[str, tuple[str, Edit]] = {
    "a token is sent twice": ("chat-stream", (TextStreams, "_answer", "open_.replay(", "len(")),
    "a token is lost at the seam": (
        "completion", (LiveRequests, "_answer", "request.output.extend(answer.output)", "request.output.append(7)")
    ),
    "tokens are not kept": ("chat-stream", (LiveRequests, "take", "request.output.extend(answer.output)", "pass")),
    "the seed is drawn anew": (
        "unseeded", (live_request, "_begun", "seed=None if seed is None else", "seed=len(request.output) or")
    ),
    "half of a section is forgotten": (
        "chat-stream-parts", (_Open, "replay", "self._take(_New(), (token,))", "pass")
    ),
    "places of tokens begin anew": ("echo-stream", (_Open, "replay", "self.entries.skip(tokens)", "pass")),
    "ids that filters left are counted anew": (
        "tokens-stream", (live_request, "_begun", "num_kept=request.num_kept", "num_kept=0")
    ),
    "the prompt is shown again": ("echo", (TextStreams, "_open", "and is_new", "")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_found(fault: str, tools_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, edit = FAULTS[fault]
    seed_fault([edit], monkeypatch)
    with pytest.raises(AssertionError):
        await test_the_answer_is_that_of_a_quiet_server(CASES[name], tools_folder, monkeypatch)
