"""Runs clients, unmodified, against `pagewood serve`: `nox -s clients`.

The arguments are the folders of the programs `guidellm` and `lm_eval`, which the page `docs/howto/evaluate.md` calls.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from pagewood.engine.model_folder.folder import model_folder

LIMIT_S = 300
NUM_TOKENS = 16
PAGE = Path(__file__).parents[1] / "docs" / "howto" / "evaluate.md"
ADDRESS = "http://127.0.0.1:8000"
_BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def check_vllm_form(url: str) -> None:
    """Send a request as `vllm bench serve` does, and read its stream as it does."""
    body = {
        "model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"],
        "prompt": "What is 12 + 7?", "repetition_penalty": 1.0, "max_tokens": NUM_TOKENS, "logprobs": None,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.0,
    }  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]", lines[-1]
    usage = json.loads(lines[-2])["usage"]
    assert usage["completion_tokens"] == NUM_TOKENS, usage
    print(f"vllm bench serve: {usage}")


def check_recipes(programs: list[Path], url: str, folder: Path) -> None:
    """Write the files of the page, run its commands without a network, and look at what they report."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "MODEL": str(model_folder(None)), "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
    }  # fmt: skip
    commands: list[str] = []
    for language, name, text in _BLOCK.findall(PAGE.read_text()):
        if language == "sh":
            commands.append(text.replace(ADDRESS, url))
        else:
            (folder / name).write_text(text)
    for command in commands:
        subprocess.run(["bash", "-c", command], check=True, timeout=LIMIT_S, env=environment, cwd=folder)
    check_scores(url, folder)
    totals = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (20, 0), totals
    print(f"guidellm: {totals}")


def check_scores(url: str, folder: Path) -> None:
    """Compare what lm-eval reports with answers and log probabilities that are asked for here."""
    found: dict[str, dict[str, Any]] = {}
    for report in (folder / "results").rglob("results_*.json"):
        found |= json.loads(report.read_text())["results"]
    sums, choices = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("sums", "choices")
    )
    answers = [answered(url, one["question"]).rstrip(".").split()[-1] == one["answer"] for one in sums]
    assert found["sums"]["exact_match,last"] == sum(answers) / len(sums), (found, answers)
    best = [max(range(len(one["choices"])), key=lambda i, one=one: scored(url, one, i)) for one in choices]
    rights = [place == one["right"] for place, one in zip(best, choices, strict=True)]
    assert found["choices"]["acc,none"] == sum(rights) / len(choices), (found, best)
    print(f"lm-eval: {sum(answers)} of {len(sums)} answers and {sum(rights)} of {len(choices)} choices are right")


def answered(url: str, question: str) -> str:
    """Return the answer to a question."""
    messages = [{"role": "user", "content": question}]
    body = {"model": "pagewood-demo", "messages": messages, "max_tokens": 48, "temperature": 0}
    return httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def scored(url: str, document: dict[str, Any], choice: int) -> float:
    """Return the log probability of an answer to a question, by one request for its tokens."""
    messages = [{"role": "user", "content": document["question"]}]
    before = httpx.post(f"{url}/tokenize", json={"messages": messages}).json()["tokens"]
    text = {"text": document["choices"][choice], "add_special_tokens": False}
    tokens = httpx.post(f"{url}/tokenize", json=text).json()["tokens"]
    body = {"model": "pagewood-demo", "prompt": before + tokens, "echo": True, "max_tokens": 0, "logprobs": 0}
    found = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
    return sum(found[len(before) :])


def main() -> None:
    """Start a server, and run all clients."""
    command = [sys.executable, "-m", "pagewood.server", "serve", "--port", "0"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            url = next(match[0] for line in server.stdout if (match := re.search(r"http://\S+", line)))
            deadline_s = time.monotonic() + LIMIT_S
            while httpx.get(f"{url}/ready").status_code != 200:
                assert time.monotonic() < deadline_s, "the server is not ready"
                time.sleep(0.2)
            check_vllm_form(url)
            check_recipes([Path(folder) for folder in sys.argv[1:]], url, Path(folder))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
