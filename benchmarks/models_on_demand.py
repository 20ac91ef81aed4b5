"""Measures how long a request waits for its model to be loaded, beside one whose model is loaded.

    python benchmarks/models_on_demand.py            # two models of 110M random weights; some minutes on two cores
    python benchmarks/models_on_demand.py --quick    # tiny ones, only to see that the script works

`pagewood serve --model A --model B` with room for one of them: requests of four tokens go to A and B in turn, so each
waits until the other model is unloaded and its own is loaded; a second request to the same model follows. Then the
server has room for both, one is unloaded by `keep_alive: 0`, and the next request loads it into the free place. Shown
are medians over the rounds, with the slowest in brackets, in seconds until the whole answer is there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from end_to_end.model import FULL, QUICK, ModelShape, write_served

NAMES = ("a", "b")
LIMIT_S = 300.0


class Server:
    """A server of both models."""

    def __init__(self, folder: Path, *, most: int) -> None:
        """Start it; `most` is how many models it keeps loaded."""
        models = [word for name in NAMES for word in ("--model", str(folder / name), "--served-model-name", name)]
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pagewood.server", "serve", *models, "--models-max", str(most), "--port", "0"),
                *("--log-level", "error", "--max-total-tokens", "8192"),
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        assert self._process.stdout is not None
        line = next((line for line in self._process.stdout if line.startswith("Pagewood serves")), None)
        if line is None:
            self._log.seek(0)
            raise RuntimeError(self._log.read())
        self._url = line.split(" at ")[1].split()[0]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a request."""
        request = urllib.request.Request(
            f"{self._url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)

    def ask_s(self, name: str) -> float:
        """Return how long a short answer takes."""
        began_s = time.perf_counter()
        self.post("/v1/completions", {"model": name, "prompt": "The answer is", "max_tokens": 4, "ignore_eos": True})
        return time.perf_counter() - began_s

    def unload(self, name: str) -> None:
        """Unload a model, and wait until it is."""
        self.post("/api/generate", {"model": name, "keep_alive": 0, "stream": False})
        while any(one["name"].partition(":")[0] == name for one in self._loaded()):
            time.sleep(0.05)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def _loaded(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self._url}/api/ps", timeout=LIMIT_S) as answer:
            return json.load(answer)["models"]


def in_turns(server: Server, num_rounds: int) -> dict[str, list[float]]:
    """Return times of requests, with room for one model."""
    found: dict[str, list[float]] = {"in place of the other model": [], "loaded": []}
    for name in NAMES:
        server.ask_s(name)  # programs are compiled
    for _ in range(num_rounds):
        for name in NAMES:
            found["in place of the other model"].append(server.ask_s(name))
            found["loaded"].append(server.ask_s(name))
    return found


def into_a_free_place(server: Server, num_rounds: int) -> dict[str, list[float]]:
    """Return times of requests, with room for both."""
    found: list[float] = []
    for name in NAMES:
        server.ask_s(name)
    for _ in range(num_rounds):
        server.unload(NAMES[0])
        found.append(server.ask_s(NAMES[0]))
    return {"into a free place": found}


def _write(folder: Path, shape: ModelShape) -> float:
    """Write both models, with the tokenizer of the embedded one; return the size of one in units of 1e9 bytes."""
    for seed, name in enumerate(NAMES):
        write_served(shape, folder / name, seed=seed)
    return sum(path.stat().st_size for path in (folder / NAMES[0]).glob("*.safetensors")) / 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="tiny models and one round; times do not count")
    options = parser.parse_args()
    num_rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="on-demand-") as folder:
        size_gb = _write(Path(folder), QUICK if options.quick else FULL)
        results: dict[str, list[float]] = {}
        parts: list[tuple[int, Callable[[Server, int], dict[str, list[float]]]]] = [
            (1, in_turns),
            (2, into_a_free_place),
        ]
        for most, measure in parts:
            server = Server(Path(folder), most=most)
            try:
                results |= measure(server, num_rounds)
            finally:
                server.close()
    print(f"two models of {size_gb:.2f} GB each\n\n| request | number | median, s (slowest) |\n|---|--:|--:|")
    for name, times in results.items():
        print(f"| {name} | {len(times)} | {median(times):.2f} ({max(times):.2f}) |")


if __name__ == "__main__":
    main()
