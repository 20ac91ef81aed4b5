"""`pagewood serve` with real processes, real sockets, the real OpenAI client and the embedded model."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from openai import APIStatusError, AsyncOpenAI

from pagewood.engine import LLM, BeamSearchParams
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.text import Tokenizer
from pagewood.server.keys.run_key import FOLDER_VARIABLE
from pagewood.server.messages.links import address
from serving import LIMIT_S, MODEL, Server, children, command, is_alive, key_files, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A server for tests that leave it intact."""
    server = Server(tmp_path_factory.mktemp("serve"))
    yield server
    server.until_idle()
    server.close()


@pytest.fixture
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A server that a test may break."""
    server = Server(tmp_path_factory.mktemp("own"), "--tokenizer-workers", "1", "--drain-seconds", "1")
    yield server
    server.close()


PROCESSORS = """
def ban(tokens, logits, *, ids):
    logits[ids] = float("-inf")

def fail(tokens, logits):
    raise ZeroDivisionError("by the operator's code")
"""


@pytest.fixture(scope="module")
def extended_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A server with the operator's logits processors, that may have 128 open files."""
    folder = tmp_path_factory.mktemp("extended")
    (folder / "my_processors.py").write_text(PROCESSORS)
    options = [word for name in ("ban", "fail") for word in ("--logits-processor", f"{name}=my_processors:{name}")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        server = Server(folder, *options, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)))
    yield server
    server.until_idle()
    server.close()


def ask(server: Server, text: str, **options: Any) -> Any:
    create: Any = server.openai.chat.completions.create
    return create(model=MODEL, messages=[{"role": "user", "content": text}], **options)


QUESTION = "What can you do?"
LONG: dict[str, Any] = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}


def test_chat_whole_and_streamed(server: Server) -> None:
    whole = ask(server, QUESTION)
    assert whole.choices[0].finish_reason == "stop"
    assert len(whole.choices[0].message.content) > 10
    stream = ask(server, QUESTION, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].choices[0].finish_reason == "stop"
    # One chunk per token of text, one for the role, and one for the finish reason.
    assert len(chunks) == whole.usage.completion_tokens - 1 + 2


def test_the_model_answers(server: Server) -> None:
    assert ask(server, "What is 2 + 3?").choices[0].message.content.strip().endswith("5")


def test_many_clients_at_once(server: Server) -> None:
    questions = [f"What is {n} + {n}?" for n in range(12)]
    alone = [ask(server, question).choices[0].message.content for question in questions]

    async def together() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def streamed(question: str) -> str:
                messages: Any = [{"role": "user", "content": question}]
                stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*[streamed(question) for question in questions])

    assert asyncio.run(together()) == alone


def test_completions_stop_and_multi_byte_text(server: Server) -> None:
    whole = ask(server, QUESTION).choices[0].message.content
    stop = whole[8:13]
    cut = ask(server, QUESTION, stop=stop)
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    echoed = server.openai.completions.create(model=MODEL, prompt="Füße 世界 🎉", echo=True, max_tokens=3)
    assert echoed.choices[0].text.startswith("Füße 世界 🎉")
    ids = server.openai.completions.create(model=MODEL, prompt=[[5, 6, 7], [8, 9]], max_tokens=3)
    assert [choice.index for choice in ids.choices] == [0, 1]
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 5


def test_several_answers_are_those_of_a_process(server: Server) -> None:
    text = "Repeat these words: " + "stone river cloud " * 10
    whole = ask(server, text, n=3, seed=2, temperature=1, max_tokens=12)
    texts = [""] * 3
    for chunk in ask(server, text, n=3, seed=2, temperature=1, max_tokens=12, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] == ask(server, text, seed=2, temperature=1, max_tokens=12).choices[0].message.content
    before = server.until_idle()["num_tokens"]
    prompt = text + "and more " * 10  # not cached
    answers = ask(server, prompt, n=8, max_tokens=1)
    assert server.until_idle()["num_tokens"] - before < answers.usage.prompt_tokens + 8 * 16 + 8


def test_native_requests_are_explained_and_have_deadlines(server: Server) -> None:
    ids = server.http.post("/tokenize", json={"text": "Explain this prompt, which no other test has. " * 3}).json()
    body = {"input_ids": ids["tokens"], "sampling_params": {"max_new_tokens": 4}, "explain": True}
    page = 16
    for num_cached in (0, (ids["count"] - 1) // page * page):
        began_s = time.time()
        meta = server.http.post("/generate", json=body).json()["meta_info"]
        assert meta["cache"]["cached_tokens"] == meta["cached_tokens"] == num_cached
        assert meta["cache"]["cause"] in (("complete", "page_rounding") if num_cached else ("never_seen",))
        names = ("received_s", "queued_s", "admitted_s", "first_token_s", "finished_s")
        times = [began_s - 1, *(meta["timings"][name] for name in names), time.time() + 1]
        assert times == sorted(times), "the processes have one clock"
    lines = server.http.post("/generate", json={**body, "stream": True}).text.split("\n\n")
    shown = ["cache" in json.loads(line.removeprefix("data: "))["meta_info"] for line in lines[:-2]]
    assert shown == [True] + [False] * (len(shown) - 1)
    long = {"input_ids": ids["tokens"], "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
    refused = server.http.post("/generate", json={**long, "deadline": 0.05})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "deadline_exceeded")
    for deadline_s in (0.2, 0.5, 2.0):  # a busy machine may not even begin before the first
        late = {**long, "deadline": deadline_s, "stream": True}
        lines = server.http.post("/generate", json=late).text.split("\n\n")
        if len(lines) > 1:
            break
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert 1 < len(lines) < 1900
    server.until_idle()


def test_beam_search_finds_what_it_finds_offline(server: Server) -> None:
    for question, length_penalty in ((QUESTION, 1.0), ("What is 12 + 7?", -1.0)):
        body = {"use_beam_search": True, "length_penalty": length_penalty, "early_stopping": True}
        answer = ask(server, question, n=4, max_tokens=30, extra_body=body)
        with LLM() as llm:
            prompt = llm.tokenizer.encode_chat([{"role": "user", "content": question}])
            params = BeamSearchParams(beam_width=4, max_tokens=30, length_penalty=length_penalty, early_stopping=True)
            (result,) = llm.beam_search(prompt, params)
        found = [(choice.message.content, choice.finish_reason) for choice in answer.choices]
        assert found == [(one.text, one.finish.value) for one in result.sequences]


def test_a_text_is_scored_as_by_transformers(server: Server) -> None:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    text = "What is 12 + 7? It is 19, and the wörd stone is not 石."
    create: Any = server.openai.completions.create
    scored = create(model=MODEL, prompt=text, echo=True, max_tokens=0, logprobs=3).choices[0]
    assert scored.text == text
    folder = model_folder(None)
    ids = Tokenizer.from_folder(folder).encode(text).tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=2e-3)
    assert "".join(scored.logprobs.tokens).startswith("What is 12 + 7? It is 19")
    starts = [text[offset] for offset in scored.logprobs.text_offset]
    assert all(token[0] in (start, "\ufffd") for token, start in zip(scored.logprobs.tokens, starts, strict=True))
    # What it generates has the log probabilities that it gets as a prompt.
    answer = ask(server, QUESTION, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == answer.choices[0].message.content
    assert all(entry.logprob <= entry.top_logprobs[0].logprob + 1e-6 for entry in entries)


def test_a_second_identical_request_is_cached(server: Server) -> None:
    text = "Remember these words: " + "stone river cloud " * 10
    first, second = [ask(server, text, max_tokens=4) for _ in range(2)]
    assert first.choices[0].message.content == second.choices[0].message.content
    num_prompt = second.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == (num_prompt - 1) // 16 * 16


def test_errors_reach_the_client_typed(server: Server) -> None:
    with pytest.raises(APIStatusError) as error:
        ask(server, "word " * 5000)
    assert (error.value.status_code, error.value.code) == (400, "context_length_exceeded")
    with pytest.raises(APIStatusError) as error:
        ask(server, "x", extra_body={"mood": 1})
    assert error.value.param == "mood"
    headers = {"Content-Type": "application/json"}
    assert server.http.post("/v1/completions", content=b"x" * (17 * 1024 * 1024), headers=headers).status_code == 413


def test_what_a_browser_may_not_do(server: Server) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    for headers, status in (
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Origin": server.url}, 200),
    ):
        answer = server.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == status, headers
        until(lambda answer=answer: answer.headers["x-request-id"] in server.stderr())


def test_the_log_shows_the_engine_and_every_request(server: Server) -> None:
    answer = server.openai.with_options(default_headers={"X-Request-Id": "my-trace"}).chat.completions.with_raw_response
    messages: Any = [{"role": "user", "content": QUESTION}]
    headers = answer.create(model=MODEL, messages=messages, max_tokens=3).headers
    assert headers["x-request-id"] == "my-trace"
    until(lambda: "id=my-trace " in server.stderr())
    (line,) = [line for line in server.stderr().splitlines() if "id=my-trace " in line]
    assert " INFO    http pagewood.server.requests: POST /v1/chat/completions 200 id=my-trace " in line
    assert line.endswith("tokens_out=3")


def test_a_half_closed_client_gets_its_answer(server: Server) -> None:
    content = httpx.Request("POST", server.url, json={"model": MODEL, "prompt": "a", "max_tokens": 200}).content
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:  # type: ignore[arg-type]
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"HTTP/1.1 200 OK" in answer
    assert b'"finish_reason"' in answer


def test_idle_connections_do_not_lock_others_out(extended_server: Server) -> None:
    address = ("127.0.0.1", int(extended_server.url.rpartition(":")[2]))
    idle = [socket.create_connection(address) for _ in range(200)]
    assert extended_server.http.get("/health").status_code == 200
    assert ask(extended_server, QUESTION).choices[0].finish_reason == "stop"
    for connection in idle:
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_closed_connection_frees_its_pages(server: Server, stream: bool) -> None:
    idle = server.until_idle()
    body = {"model": MODEL, "prompt": ["a"] * 32, "stream": stream, "max_tokens": 1500, "ignore_eos": True}
    with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:  # type: ignore[arg-type]
        content = httpx.Request("POST", server.url, json=body).content
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        until(lambda: server.ready()["engine"]["num_running"] > 0)
    after = server.until_idle()
    assert after["num_tokens"] - idle["num_tokens"] < 32 * 1400
    assert after["num_free_pages"] + after["num_cached_pages"] == after["num_pages"]


def test_live_data_come_from_all_processes(server: Server) -> None:
    request = server.openai.completions.create(model=MODEL, prompt="Once", stream=True, **LONG)
    next(iter(request))
    live = server.admin.get("/dashboard/events").json()
    children = server.children()
    expected = {"http": server.process.pid} | {name.removesuffix("_process"): pid for name, pid in children.items()}
    assert {one["name"]: one["pid"] for one in live["processes"]} == expected
    assert all(one["rss_bytes"] > 1 << 20 for one in live["processes"])
    assert [one["stage"] for one in live["engine"]["requests"]] == ["running"]
    assert live["names"][0].startswith("cmpl-")
    assert not any(branch["text"] for branch in live["engine"]["tree"]["branches"])
    assert server.http.post("/abort", json={"rid": live["names"][0]}).json() == {"aborted": 1}
    request.close()


def test_only_the_engine_has_torch(server: Server) -> None:
    processes = {"http": server.process.pid, **server.children()}
    assert set(processes) == {"http", "engine_process", "tokenizer_process", "detokenizer_process"}
    with_torch = [name for name, pid in processes.items() if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]
    assert with_torch == ["engine_process"]


def test_sockets_are_private_and_refuse_pickle(server: Server) -> None:
    (folder,) = server.sockets()
    assert folder.stat().st_mode & 0o777 == 0o700
    before = server.children()
    with zmq.Context() as context:
        for name in ("tokenizer-0", "engine-0", "detokenizer", "http"):
            with context.socket(zmq.PUSH) as push:
                push.connect(address(folder, name))
                push.send(pickle.dumps({"request_id": "a"}))
                push.close(linger=5000)
    until(lambda: server.stderr().count("dropped a malformed message") == 4)
    assert ask(server, QUESTION).choices[0].finish_reason == "stop"
    assert server.children() == before


def test_nothing_is_left_behind_of_a_killed_server(own_server: Server) -> None:
    """Nor of one that gets SIGTERM or SIGINT: see the tests that lose processes and resume a conversation."""
    end_under_load(own_server, signal.SIGKILL)


def end_under_load(own_server: Server, number: signal.Signals) -> None:
    create: Any = own_server.openai.completions.create  # more work than the server can do before it stops
    stream = create(model=MODEL, prompt=[QUESTION] * 64, stream=True, **LONG)
    next(iter(stream))
    pids = own_server.children().values()
    assert len(pids) == 3
    own_server.process.send_signal(number)
    with pytest.raises(Exception, match="shutting down" if number != signal.SIGKILL else "onnection"):
        list(stream)
    code = own_server.process.wait(LIMIT_S)
    assert code == (0 if number != signal.SIGKILL else -signal.SIGKILL)
    assert "Traceback" not in own_server.stderr()
    until(lambda: not any(is_alive(pid) for pid in pids) and not own_server.sockets())
    assert len(key_files(own_server.folder)) == (number == signal.SIGKILL)


def test_a_start_can_be_interrupted(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("start")
    process = subprocess.Popen(
        [sys.executable, "-m", "pagewood.server", "serve", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), FOLDER_VARIABLE: str(folder / "runtime")},
    )
    assert process.stderr is not None
    assert any(line == "pagewood: importing torch\n" for line in process.stderr)
    pids = children(process.pid).values()
    assert len(pids) == 3
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 0
    assert "Traceback" not in rest
    assert not any(is_alive(pid) for pid in pids)
    assert not list(folder.glob("pagewood-*"))
    assert not key_files(folder)


def test_a_process_that_dies_is_replaced(own_server: Server) -> None:
    """Afterwards, SIGTERM leaves nothing behind."""
    for module in ("tokenizer_process", "detokenizer_process", "engine_process"):
        stage = module.removesuffix("_process")
        pid = own_server.children()[module]
        stream = iter(ask(own_server, QUESTION, stream=True, **LONG))
        next(stream)
        if stage == "tokenizer":
            # Requests that have left the tokenizer go on; one that is in it when it dies is sent to the next.
            own_server.admin.post("/pause", json={}).raise_for_status()  # so that the stream does not end meanwhile
            os.kill(pid, signal.SIGSTOP)
            num_live = own_server.ready()["requests"]["live"]
            with socket.create_connection(own_server.url.removeprefix("http://").split(":")) as connection:  # type: ignore[arg-type]
                content = httpx.Request("POST", own_server.url, json={"model": MODEL, "prompt": "a"}).content
                head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                head += "Content-Type: application/json\r\n"
                head += f"Content-Length: {len(content)}\r\n\r\n"
                connection.sendall(head.encode() + content)
                until(lambda num=num_live: own_server.ready()["requests"]["live"] == num + 1)
                own_server.lose(stage)
                until(lambda: "tokenizer_process" in own_server.children())
                own_server.admin.post("/resume", json={}).raise_for_status()
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
            assert b" 200 " in answer.splitlines()[0]
            assert own_server.ready()["incidents"] | {"retried": 1, "lost": 0} == own_server.ready()["incidents"]
            assert len(list(stream)) > 100
        else:
            own_server.lose(stage)
            if stage == "engine":
                assert own_server.http.get("/health").status_code == 200
            assert len(list(stream)) > 100
        until(lambda: own_server.http.get("/ready").status_code == 200)
        assert ask(own_server, QUESTION).choices[0].finish_reason == "stop"
        assert own_server.children()[module] != pid
        counters = own_server.until_idle()
        assert counters["num_free_pages"] + counters["num_cached_pages"] == counters["num_pages"]
    end_under_load(own_server, signal.SIGTERM)


def test_a_conversation_is_resumed_after_a_restart(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With write-back, nothing is on the disk before the server stops. At last, SIGINT leaves nothing behind."""
    tmp_path = tmp_path_factory.mktemp("kv")  # short, because paths of sockets must be
    first, second = tmp_path / "first", tmp_path / "second"
    options = [
        "--tokenizer-workers", "1", "--host-cache-gb", "0.2", "--cache-write-policy", "write_back",
        "--disk-cache-path", str(tmp_path / "kv"), "--disk-cache-gb", "0.2", "--drain-seconds", "1",
    ]  # fmt: skip
    question = "Remember these words: " + "stone river cloud " * 30
    messages: Any = [{"role": "user", "content": question}]

    def say(to: Server) -> Any:
        create: Any = to.openai.chat.completions.create
        return create(model=MODEL, messages=messages, max_tokens=20, extra_body={"ignore_eos": True})

    first.mkdir()
    with closing(Server(first, *options)) as before:
        asked = say(before)
        before.process.terminate()
        assert before.process.wait(LIMIT_S) == 0
        assert "Traceback" not in before.stderr()
    assert say(server).choices[0].message.content == asked.choices[0].message.content

    messages = [
        *messages,
        {"role": "assistant", "content": asked.choices[0].message.content},
        {"role": "user", "content": QUESTION},
    ]
    second.mkdir()
    with closing(Server(second, *options)) as after:
        resumed = say(after)
        num_cached = resumed.usage.prompt_tokens_details.cached_tokens
        assert num_cached >= asked.usage.prompt_tokens // 16 * 16
        assert after.until_idle()["num_tokens"] == resumed.usage.prompt_tokens - num_cached + 20 - 1
        end_under_load(after, signal.SIGINT)
    assert resumed.choices[0].message.content == say(server).choices[0].message.content


@pytest.mark.parametrize(
    "speculative", ["ngram", *(pytest.param(name, marks=pytest.mark.slow) for name in ("draft", "eagle"))]
)
def test_speculation_changes_no_answer(server: Server, tmp_path: Path, speculative: str) -> None:
    """The counts of draft tokens are in the usage, in /ready and in the log, only if the engine speculates."""
    questions = ["Say it twice: stone river cloud moon", "Count from 1 to 20.", QUESTION]
    options: dict[str, Any] = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
    plain = [ask(server, question, **options) for question in questions]
    details = [answer.usage.completion_tokens_details.model_dump(exclude_unset=True) for answer in plain]
    assert details == [{"reasoning_tokens": 0}] * len(plain)
    assert "speculation" not in server.ready()
    fixed = ["--speculative", speculative, "--speculative-num-tokens", "3", "--speculative-control", "fixed"]
    with closing(Server(tmp_path, *fixed)) as drafting:
        num_drafted = 0
        for question, expected in zip(questions, plain, strict=True):
            answer = ask(drafting, question, **options)
            assert answer.choices[0].message.content == expected.choices[0].message.content
            assert answer.usage.completion_tokens == expected.usage.completion_tokens
            assert answer.usage.completion_tokens_details.rejected_prediction_tokens >= 0
            *_, last = ask(drafting, question, stream=True, stream_options={"include_usage": True}, **options)
            drafts = last.usage.completion_tokens_details
            num_drafted += drafts.accepted_prediction_tokens + drafts.rejected_prediction_tokens
        assert num_drafted > 0
        until(lambda: drafting.ready()["speculation"]["num_accepted"] > 0)
        drafting.until_idle()
        drafting.process.terminate()
        assert drafting.process.wait(LIMIT_S) == 0
        lines = [line for line in drafting.stderr().splitlines() if " speculation: " in line]
        assert len(lines) == 1, drafting.stderr()
        assert " INFO    engine pagewood.server.processes.engine_side: " in lines[0]


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagewood.server", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_logits_processors_by_name(server: Server, extended_server: Server) -> None:
    """Of the operator's module, for one request beside others; their failures end one request."""
    own = extended_server
    plain = ask(server, QUESTION, temperature=0, max_tokens=8)
    banned = Tokenizer.from_folder(model_folder(None)).encode(plain.choices[0].message.content).tolist()
    both = {"temperature": 0, "max_tokens": 8}
    bias = ask(server, QUESTION, logit_bias={str(token): -100 for token in banned}, **both)
    named = [{"name": "ban", "arguments": {"ids": banned}}]
    found = ask(own, QUESTION, extra_body={"logits_processors": named}, **both)
    assert found.choices[0].message.content == bias.choices[0].message.content
    assert found.choices[0].message.content != plain.choices[0].message.content
    with pytest.raises(APIStatusError, match="logits of this request are not numbers") as failed:
        ask(own, QUESTION, extra_body={"logits_processors": ["fail"]})
    assert failed.value.status_code == 500
    for name, code in (("eval", "unknown_logits_processor"), ("ban", "invalid_value")):
        with pytest.raises(APIStatusError, match="logits_processors") as refused:
            ask(own, QUESTION, extra_body={"logits_processors": [name]})
        assert (refused.value.status_code, refused.value.code) == (400, code)
    assert ask(own, QUESTION, **both).choices[0].message.content == plain.choices[0].message.content
    assert "logits processor 'fail' failed; its request ends" in own.stderr()
    assert "ZeroDivisionError: by the operator's code" in own.stderr()


def test_a_server_that_cannot_start_says_why(server: Server, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    taken = command("serve", "--port", port)
    assert taken.returncode == 2
    assert taken.stderr == f"pagewood: error: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    missing = command("serve", "--port", "0", "--model", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert "model must be a folder" in missing.stderr
    empty = command("serve", "--port", "0", "--model", str(tmp_path))
    assert empty.returncode == 2
    assert empty.stderr == f"pagewood: error: model must be a folder with a config.json, got '{tmp_path}'\n"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = run("serve", "--port", "0", "--model", str(tmp_path))
    assert broken.returncode == 1
    error, *_ = (line for line in broken.stderr.splitlines() if line.startswith("pagewood: error: "))
    assert f" process ended with code 1 before the server was ready: {tmp_path}/tokenizer.json cannot be read" in error
    assert "Traceback" not in broken.stderr
    broken = run("serve", "--port", "0", "--host-cache-gb", "90000")
    (error,) = (line for line in broken.stderr.splitlines() if line.startswith("pagewood: error: "))
    assert "before the server was ready: host_cache_gb must fit into the " in error
    assert "Traceback" not in broken.stderr


def test_chat_in_the_terminal(server: Server) -> None:
    answer = ask(server, QUESTION).choices[0].message.content
    result = run("chat", "--url", server.url, stdin=f"{QUESTION}\n\n/clear\n{QUESTION}\n/exit\n")
    assert result.stderr == ""
    assert result.stdout.count(answer) == 2
    assert "new conversation" in result.stdout
    too_long = command("chat", "--url", server.url, stdin="word " * 5000 + "\n")
    assert "maximum context length" in too_long.stderr
    no_server = command("chat", "--url", "http://127.0.0.1:9")
    assert no_server.returncode == 2
    assert "no server answers" in no_server.stderr


def test_generate_without_a_server(server: Server) -> None:
    result = command("generate", QUESTION, "What is 2 + 3?")
    assert result.returncode == 0, result.stderr
    expected = [ask(server, text).choices[0].message.content for text in (QUESTION, "What is 2 + 3?")]
    assert result.stdout == "".join(f"{text}\n" for text in expected)
    refused = command("generate", "--max-length", "64", "word " * 200)
    assert refused.returncode == 1
    assert "maximum context length" in refused.stderr
