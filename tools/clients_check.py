"""Runs clients, unmodified, against `pagewood serve`: `nox -s clients`.

The arguments are folders with the programs `guidellm` and `lm_eval`.
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
TASK = """\
task: pagewood_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
DOCUMENTS: list[dict[str, Any]] = [
    {"question": f"What is {a} + {b}? It is", "choices": [str(a + b), str(a + b + 3)], "answer": 0}
    for a, b in ((2, 3), (12, 7), (20, 30), (5, 5))
]


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


def check_guidellm(program: Path, url: str, folder: Path) -> None:
    """Run a short benchmark of guidellm, which must report only complete requests."""
    report = folder / "guidellm.json"
    options = {
        "backend": f"kind=openai_http,target={url}",
        "profile": "kind=synchronous",
        "constraint": "kind=max_requests,count=5",
        "tokenizer": f"kind=huggingface_auto,model={model_folder(None)}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}",
        "output": f"kind=json,path={report}",
    }
    run(
        program, "run", "--disable-console", *[word for name, value in options.items() for word in (f"--{name}", value)]
    )
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == 5, totals
    assert totals["errored"] == 0, totals
    print(f"guidellm: {totals}")


def check_lm_eval(program: Path, url: str, folder: Path) -> None:
    """Score a small task by log probabilities of token ids that are echoed."""
    data = folder / "sums.jsonl"
    data.write_text("\n".join(json.dumps(document) for document in DOCUMENTS))
    (folder / "sums.yaml").write_text(TASK.format(data=data))
    arguments = {
        "model": "pagewood-demo", "base_url": f"{url}/v1/completions", "tokenizer": str(model_folder(None)),
        "tokenizer_backend": "huggingface", "tokenized_requests": True, "num_concurrent": 2,
    }  # fmt: skip
    run(
        program, "--model", "local-completions", "--model_args", ",".join(f"{k}={v}" for k, v in arguments.items()),
        "--tasks", "pagewood_sums", "--include_path", str(folder), "--output_path", str(folder / "results"),
    )  # fmt: skip
    [found] = (folder / "results").rglob("results_*.json")
    scores = json.loads(found.read_text())["results"]["pagewood_sums"]
    accuracy = next(value for name, value in scores.items() if name.startswith("acc,"))
    expected = sum(scored(url, one, 0) > scored(url, one, 1) for one in DOCUMENTS) / len(DOCUMENTS)
    assert accuracy == expected, (scores, expected)
    print(f"lm-eval: accuracy {accuracy} of {len(DOCUMENTS)} questions")


def scored(url: str, document: dict[str, Any], choice: int) -> float:
    """Return the log probability of an answer to a question, by one request for its text."""
    question, answer = document["question"], f" {document['choices'][choice]}"
    body = {"model": "pagewood-demo", "prompt": question + answer, "echo": True, "max_tokens": 0, "logprobs": 0}
    found = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["logprobs"]
    pairs = zip(found["text_offset"], found["token_logprobs"], strict=True)
    return sum(logprob for offset, logprob in pairs if offset >= len(question))


def run(program: Path, *words: str) -> None:
    """Run a program without a network."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    subprocess.run([str(program), *words], check=True, timeout=LIMIT_S, env=environment)


def main() -> None:
    """Start a server, and run every client whose program is there."""
    found = [Path(folder) / name for folder in sys.argv[1:] for name in ("guidellm", "lm_eval")]
    programs = {path.name: path for path in found if path.exists()}
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
            for name, check in (("guidellm", check_guidellm), ("lm_eval", check_lm_eval)):
                if name in programs:
                    check(programs[name], url, Path(folder))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
