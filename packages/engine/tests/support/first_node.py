"""A program that is node 0: `first_node.py OPTIONS`, those of an LLM as JSON. It generates until the group ends."""

from __future__ import annotations

import json
import sys
from typing import Any

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.offline.llm import LLM


def main(options: dict[str, Any]) -> None:
    with LLM(**options) as llm:
        print("ready", flush=True)
        try:
            while True:
                llm.generate(["one", "two"], SamplingParams(max_tokens=100, ignore_eos=True))
        except RunnerLostError as error:
            print(error, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
