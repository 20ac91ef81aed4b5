# pyright: basic, reportMissingImports=false
# (other engines have no types)
"""Keeps OpenVINO GenAI loaded, and runs a closed loop of clients on it when it is asked to: a line of JSON each way.

python first_token_worker.py '{"model": "folder", "threads": 2, "max_running": 8, "vocab_size": 32000}'
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from closed_loop import Load, run


class OpenVino:
    """Its continuous batching, stepped by the caller, with its prefix cache."""

    def __init__(self, options: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = options["max_running"]
        how = {"INFERENCE_NUM_THREADS": options["threads"]}
        if options.get("precision"):
            how["INFERENCE_PRECISION_HINT"] = options["precision"]  # otherwise bf16, where the processor has it
        self._pipeline = genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", how)
        self.vocab_size: int = options["vocab_size"]
        self._num_sent = 0
        self._open: dict[str, Any] = {}

    def send(self, name: str, tokens: list[int], num_output: int) -> None:
        """Add a request."""
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_output, True, False
        config.set_eos_token_id(0)  # the folder has no tokenizer that could name one
        config.stop_token_ids = {0}
        self._num_sent += 1
        self._open[name] = self._pipeline.add_request(self._num_sent, ov.Tensor(np.array([tokens], np.int64)), config)

    def step(self) -> list[tuple[str, int, bool]]:
        """Do one step."""
        self._pipeline.step()
        news: list[tuple[str, int, bool]] = []
        for name, handle in list(self._open.items()):
            num_new = 0
            while handle.can_read():
                num_new += sum(len(one.generated_ids) for one in handle.read().values())
            has_ended = handle.get_status() != genai.GenerationStatus.RUNNING
            if has_ended:
                del self._open[name]
            if num_new or has_ended:
                news.append((name, num_new, has_ended))
        return news


def main() -> None:
    """Load, say so, and answer until the input ends."""
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is no answer
    system = OpenVino(options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(asdict(run(system, Load(**asked["load"]), seed=asked["seed"]))), file=answers, flush=True)


if __name__ == "__main__":
    main()
