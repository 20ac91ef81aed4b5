# pyright: basic, reportMissingImports=false
# (trl is not a dependency of this package)
"""trl's client for vLLM, unmodified, against `pagewood serve`: answers, scores, the cache, and updates beside it.

It sends weights over NCCL on CUDA only, and says so itself. So a trainer of our own sends them, over gloo and as files
in shared memory, between two calls of the client.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewood.engine.model_folder.folder import model_folder
from serving import Server

pytest.importorskip("trl", reason="needs trl; nox -s integrations installs it")
vllm_client = import_module("trl.generation.vllm_client")  # what it lacks is an error, and no reason to skip

STUB = Path(__file__).parents[3] / "engine" / "tests" / "support" / "trainer_stub.py"
SHARED = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where updates may lie."""
    with tempfile.TemporaryDirectory(dir=SHARED) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("trl"), "--weights", "float32", "--update-folder", str(folder))
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_client, "is_vllm_available", lambda **_: True)  # it is used for transfers over NCCL only
        client = vllm_client.VLLMClient(base_url=server.url, connection_timeout=60)
    client.session.headers.update(server.admin.headers)  # the key of admins, for what trainers do
    return client


def prompts(server: Server) -> list[list[int]]:
    questions = ("What is 12 + 7?", "Reverse: stone")
    messages = [{"messages": [{"role": "user", "content": text}]} for text in questions]
    return [server.http.post("/tokenize", json=body).json()["tokens"] for body in messages]


def test_answers_and_their_scores(client: Any, server: Server) -> None:
    """The end of an answer is a token like the others, and its scores are those of the whole text."""
    ids = prompts(server)
    found = client.generate(ids, n=2, logprobs=0, **GREEDY)
    assert found["prompt_ids"] == ids
    answers = found["completion_ids"]
    assert answers[0] == answers[1] != answers[2] == answers[3]
    texts = [server.http.post("/detokenize", json={"tokens": one}).json()["text"] for one in answers]
    assert [texts[0], texts[2]] == ["12 + 7 = 19", "enots"]
    assert [[[token] for token in one] for one in answers] == found["logprob_token_ids"]
    assert answers[0][-1] == answers[2][-1]  # the end of the turn
    whole = [[*prompt, *answer] for prompt, answer in zip(ids, answers[::2], strict=True)]
    scores = client.get_sequence_logprobs(whole, [len(one) for one in ids], top_logprobs=4)
    for row, answer in enumerate(answers[::2]):
        assert [one for [one] in scores["actual_token_ids"][row]] == answer
        assert scores["actual_logprobs"][row] == found["logprobs"][2 * row]
    chats = client.chat([[{"role": "user", "content": "What is 12 + 7?"}]], logprobs=2, **GREEDY)
    assert chats["prompt_ids"] == ids[:1]
    assert chats["completion_ids"] == answers[:1]
    assert all(len(top) in (2, 3) for [top] in zip(*chats["logprobs"][:1], strict=True))
    bound = client.generate(ids[:1], structured_outputs_regex="[0-9]{2}", **GREEDY)
    assert len(bound["completion_ids"][0]) >= 1


def test_what_it_asks_before_it_sends_weights(client: Any) -> None:
    assert client.get_world_size() == 1
    assert client.get_server_info()["weight_transfer_config"] == {"backend": "gloo"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_client, "get_ip", lambda: "127.0.0.1", raising=False)
        with pytest.raises(NotImplementedError, match="needs a CUDA device"):
            client.init_communicator(device="cpu")
    with pytest.raises(Exception, match="an update must have tensors"), client.weight_update():
        pass  # nothing is sent between its beginning and its end


def test_weights_of_our_own_trainer(client: Any, server: Server, folder: Path) -> None:
    """Over gloo in vLLM's words, and in files; the client then sees the new weights, and no prefix of the old ones."""
    ids = prompts(server)
    before = client.generate(ids, **GREEDY)
    tensors = {name: one.float() for name, one in sorted(load_file(model_folder(None) / "model.safetensors").items())}
    generator = torch.Generator().manual_seed(0)
    others = {name: one * (1 + 0.05 * torch.randn(one.shape, generator=generator)) for name, one in tensors.items()}
    save_file(others, folder / "other.safetensors")
    save_file(tensors, folder / "same.safetensors")

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    arguments = [sys.executable, str(STUB), str(port), "2", "weight_transfer", str(folder / "other.safetensors")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as process:
        init = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        }
        update = {
            "names": list(others),
            "dtype_names": [str(one.dtype).removeprefix("torch.") for one in others.values()],
            "shapes": [list(one.shape) for one in others.values()],
        }
        client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": init})
        client._start_weight_update()
        client._post(f"{client.base_url}/update_weights", json={"update_info": update})
        assert client.generate(ids, **GREEDY) == before
        client._finish_weight_update()
        process.communicate(timeout=30)
    changed = client.generate(ids, **GREEDY)
    assert changed["logprobs"] != before["logprobs"]
    assert client._get(f"{client.base_url}/weight_info") == {"weight_version": "1"}

    client._post(f"{client.base_url}/update_weights_from_files", json={"files": [str(folder / "same.safetensors")]})
    assert client.generate(ids, **GREEDY) == before
    client.reset_prefix_cache()
    assert client.generate(ids, **GREEDY) == before
    for path in ("pause?mode=keep", "resume"):
        assert client.session.post(f"{client.base_url}/{path}").status_code == 200
