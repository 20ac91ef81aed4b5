"""Several models behind one server, with real processes: clients of all protocols, and the death of an engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Generator
from pathlib import Path

import openai
import pytest

from pagewood.engine.model_folder.folder import model_folder
from serving import Server, command, until

PROMPT = "What is 12 + 7?"
ANSWER = "12 + 7 = 19"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("alpha", "beta", "damaged"):
        shutil.copytree(model_folder(None), folder / name)
    (folder / "damaged" / "tokenizer.json").write_text("{}")  # the tokenizer finds it sooner than the engine anything
    server = Server(
        folder,
        *("--models-dir", str(folder), "--pin-model", "alpha", "--threads", "1", "--max-total-tokens", "16384"),
        *("--max-running-requests", "4", "--log-level", "warning"),
    )
    yield server
    server.close()
    assert server.process.returncode == 0
    assert not server.sockets()


def states(server: Server) -> dict[str, str]:
    return {one["id"]: one["status"]["value"] for one in server.http.get("/models").json()["data"]}


def ask(server: Server, model: str) -> str | None:
    answer = server.openai.chat.completions.create(
        model=model, messages=[{"role": "user", "content": PROMPT}], max_tokens=20, temperature=0
    )
    assert answer.model == model
    return answer.choices[0].message.content


def engines(server: Server) -> set[int]:
    """Return the process ids of the engines."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text().split("\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == server.process.pid and "pagewood.server.processes.engine_process" in words:
            found.add(int(entry.name))
    return found


def test_a_pinned_model_is_loaded_and_the_server_is_ready_before(server: Server) -> None:
    ready = server.http.get("/ready")
    assert ready.status_code == 200
    assert [one["model"] for one in ready.json()["models"]] == ["alpha", "beta", "damaged"]
    assert server.http.get("/health").status_code == 200
    assert [one.id for one in server.openai.models.list()] == ["alpha", "beta", "damaged"]
    assert server.http.get("/api/tags").json()["models"][1]["name"] == "beta:latest"
    until(lambda: states(server)["alpha"] == "loaded")
    assert states(server)["beta"] == "unloaded"
    assert server.http.get("/health/generate").json()["status"] == "ok"


def test_a_request_loads_its_model_and_the_others_go_on(server: Server) -> None:
    until(lambda: states(server)["alpha"] == "loaded")
    texts: list[str | None] = []
    thread = threading.Thread(target=lambda: texts.append(ask(server, "beta")))
    thread.start()
    until(lambda: states(server)["beta"] == "loading")
    assert ask(server, "alpha") == ANSWER
    thread.join(100)
    assert texts == [ANSWER]
    ollama = pytest.importorskip("ollama")
    with ollama.Client(host=server.url) as client:
        for name in ("alpha", "beta:latest"):
            answer = client.chat(model=name, messages=[{"role": "user", "content": PROMPT}], options={"temperature": 0})
            assert answer.message.content == ANSWER
        assert [one.model for one in client.ps().models] == ["alpha:latest", "beta:latest"]
    found = server.http.get("/api/v0/models").json()["data"]
    assert [one["state"] for one in found] == ["loaded", "loaded", "not-loaded"]
    metrics = server.admin.get("/metrics").text
    assert 'pagewood_model_state{model_name="beta",state="loaded"} 1.0' in metrics
    assert 'pagewood_engine_up{model_name="beta"} 1.0' in metrics
    assert 'process_resident_memory_bytes{process="beta/engine"}' in metrics
    assert metrics.count("# TYPE pagewood_engine_up ") == 1


def test_a_model_that_cannot_be_loaded_says_why(server: Server) -> None:
    with pytest.raises(openai.InternalServerError) as refused:
        ask(server, "damaged")
    assert refused.value.code == "model_load_failed"
    assert "tokenizer process of damaged ended with code 1" in str(refused.value).replace("tokenizer-0", "tokenizer")
    assert "tokenizer.json" in str(refused.value)
    assert states(server)["damaged"] == "unloaded"
    with pytest.raises(openai.NotFoundError, match="does not exist; this server has 'alpha', 'beta', 'damaged'"):
        ask(server, "gamma")


@pytest.mark.slow
def test_the_engine_of_one_model_dies_and_the_other_goes_on(server: Server) -> None:
    until(lambda: states(server)["alpha"] == "loaded")
    server.admin.post("/models/unload", json={"model": "beta"})
    until(lambda: states(server)["beta"] == "unloaded" and len(engines(server)) == 1)
    others = engines(server)
    body = {"model": "beta", "prompt": PROMPT, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    expected = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    (engine,) = engines(server) - others
    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        first = next(lines)
        os.kill(engine, signal.SIGKILL)
        chunks = [json.loads(line) for line in (first, *lines) if line != "[DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    until(lambda: server.http.get("/ready").json()["incidents"]["restarts"] == 1)
    assert [ask(server, name) for name in ("alpha", "beta")] == [ANSWER] * 2  # beta may still be on its way back
    until(lambda: len(engines(server)) == 2)
    assert "the engine process of beta ended with code -9 and is being restarted" in server.stderr()


def test_admins_choose_the_model_that_a_command_concerns(server: Server) -> None:
    until(lambda: states(server)["alpha"] == "loaded")
    refused = server.admin.post("/flush_cache", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "missing_required_parameter")
    assert server.admin.post("/flush_cache?model=alpha", json={}).status_code == 200
    assert server.admin.get("/server_info?model=alpha").json()["model"] == "alpha"
    assert server.http.post("/models/load", json={"model": "alpha"}).status_code == 403
    assert server.admin.post("/models/load", json={"model": "alpha"}).json() == {"success": True}
    live = server.admin.get("/dashboard/events?model=alpha").json()
    assert live["model"] == "alpha"


def test_what_a_client_asks_for_the_life_of_a_model(server: Server) -> None:
    ask(server, "beta")
    body = {"model": "beta", "keep_alive": "10m", "prompt": PROMPT, "stream": False}
    server.http.post("/api/generate", json=body)
    loaded = {one["name"]: one["expires_at"] for one in server.http.get("/api/ps").json()["models"]}
    assert loaded["alpha:latest"].startswith("9999")
    assert not loaded["beta:latest"].startswith("9999")
    gone = server.http.post("/api/generate", json={"model": "beta", "keep_alive": 0, "stream": False})
    assert gone.json()["done_reason"] == "unload"
    until(lambda: states(server)["beta"] == "unloaded")
    assert [one["name"] for one in server.http.get("/api/ps").json()["models"]] == ["alpha:latest"]
    assert ask(server, "alpha") == ANSWER


@pytest.mark.slow
def test_models_take_turns(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        shutil.copytree(model_folder(None), tmp_path / name)
    server = Server(
        tmp_path,
        *("--model", str(tmp_path / "alpha"), "--model", str(tmp_path / "beta"), "--models-max", "1"),
        *("--served-model-name", "one", "--served-model-name", "org/two", "--max-total-tokens", "16384"),
    )
    try:
        texts: list[str | None] = []

        def work(name: str) -> None:
            texts.append(ask(server, name))

        threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "org/two", "one", "org/two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert texts == [ANSWER] * 4
        assert sorted(states(server).values()) == ["loaded", "unloaded"]
        loads = [line for line in server.admin.get("/metrics").text.splitlines() if 'outcome="loaded"' in line]
        assert [line.rpartition(" ")[2] for line in loads] == ["1.0", "1.0"]
    finally:
        server.close()


def test_options_of_several_models(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    shutil.copytree(model_folder(None), tmp_path / "a")
    shutil.copytree(model_folder(None), tmp_path / "other" / "a")
    own, twin = str(tmp_path / "a"), str(tmp_path / "other" / "a")
    for arguments, message in (
        (("--pin-model", "a"), "pinned needs several models (--model A --model B, or --models-dir)"),
        (("--models-dir", str(tmp_path / "none")), "models_dir must hold folders or GGUF files of models"),
        (("--model", own, "--model", twin), "models must have different names, got a twice"),
        (("--model", own, "--model", twin, "--served-model-name", "x"), "served_model_name must be given for each"),
        (("--model", own, "--model", twin, "--merge-adapter", "x"), "merge_adapter must not be given with several"),
    ):
        found = command("serve", *arguments)
        assert found.returncode == 2, found
        assert message in found.stderr, json.dumps(found.stderr)
