"""A batch of a server as processes: its engine is killed, then all of it, and the next server goes on."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from serving import Server, is_alive, until

pytestmark = pytest.mark.slow
NUM_LINES = 400
OPTIONS = ("--max-total-tokens", "16384", "--threads", "1", "--batch-lines", "4")


def line(number: int) -> str:
    question = [{"role": "user", "content": f"What is {number % 20} + {number // 20}?"}]
    body = {"model": "pagewood-demo", "messages": question, "temperature": 0, "max_tokens": 24}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"


def num_answered(server: Server, batch: str) -> int:
    counts = server.openai.batches.retrieve(batch).request_counts
    return 0 if counts is None else counts.completed


def test_a_batch_outlives_its_engine_and_its_server(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with closing(Server(tmp_path / "one", *OPTIONS, "--batch-store", store)) as server:
        engine = server.children()["engine_process"]
        file = server.openai.files.create(
            file=("in.jsonl", "".join(map(line, range(NUM_LINES))).encode()), purpose="batch"
        )
        batch = server.openai.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        ).id
        until(lambda: num_answered(server, batch) > 2)
        os.kill(engine, signal.SIGKILL)
        until(lambda: not is_alive(engine))
        before = num_answered(server, batch)
        until(lambda: num_answered(server, batch) > before + 4)
        assert server.openai.batches.retrieve(batch).status == "in_progress"
        server.process.kill()
        server.process.wait()
    kept = (tmp_path / "store" / "batches" / batch / "results").read_text().splitlines()
    with closing(Server(tmp_path / "two", *OPTIONS, "--batch-store", store)) as server:
        until(lambda: server.openai.batches.retrieve(batch).status == "completed", limit_s=600)
        done = server.openai.batches.retrieve(batch)
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        assert done.output_file_id is not None
        text = server.openai.files.content(done.output_file_id).text.splitlines()
        assert {*kept[:-1]} <= {*text}  # the last one may have been cut
        answers = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, text)}
        assert answers.keys() == {str(number) for number in range(NUM_LINES)}
        assert answers["47"]["choices"][0]["message"]["content"] == "7 + 2 = 9"
        assert f"batch {batch} is completed: {NUM_LINES} of {NUM_LINES} lines answered, 0 failed" in server.stderr()
