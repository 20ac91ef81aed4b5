"""Measures speculation on a machine that does other work beside it: the first chats of a fresh server.

python benchmarks/drafts_beside_work.py                  # beside a busy process for each core: two minutes on two cores
python benchmarks/drafts_beside_work.py --others 0       # nothing else runs
python benchmarks/drafts_beside_work.py --rounds 1       # only to test the script

Servers with the embedded model are started in turn, with `--speculative off` and `--speculative auto`. Each answers 24
short chats one after another, while the other processes compute. The ratio of the times of a pair is above 1 where
drafts cost time. Texts of a pair are compared.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import httpx

NUM_CHATS = 24
WORDS = ("stone", "river", "cloud", "apple", "window", "garden", "paper", "silver", "forest", "candle")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="pairs of servers")
    parser.add_argument("--others", type=int, default=os.cpu_count() or 1, help="processes that compute beside them")
    options = parser.parse_args()
    ratios: list[float] = []
    for round_ in range(options.rounds):
        seconds: dict[str, float] = {}
        texts: dict[str, list[str]] = {}
        for drafts in random.sample(("off", "auto"), 2):
            seconds[drafts], texts[drafts] = measure(drafts, options.others, seed=round_)
        if texts["off"] != texts["auto"]:
            raise RuntimeError(f"drafts have changed a text: {texts}")
        ratios.append(seconds["auto"] / seconds["off"])
        print(f"off {seconds['off']:6.2f} s, auto {seconds['auto']:6.2f} s, ratio {ratios[-1]:.2f}", flush=True)
    if len(ratios) > 1:
        error = stdev(ratios) / len(ratios) ** 0.5
        print(f"{options.others} other processes: ratio {mean(ratios):.2f} ± {error:.2f} (standard error)")


def measure(drafts: str, num_others: int, *, seed: int) -> tuple[float, list[str]]:
    """Return the seconds of all chats, and their texts."""
    rng = random.Random(seed)
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "pagewood.server", "serve", "--port", "0", "--speculative", drafts],
            stdout=subprocess.PIPE, stderr=log, text=True, cwd=Path(tempfile.gettempdir()),
        )  # fmt: skip
        others: list[subprocess.Popen[bytes]] = []
        try:
            with httpx.Client(base_url=address(server), timeout=300) as client:
                others += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_others)]
                time.sleep(0.5)
                began_s = time.monotonic()
                texts = [chat(client, rng) for _ in range(NUM_CHATS)]
                return time.monotonic() - began_s, texts
        finally:
            for process in (*others, server):
                process.terminate()
                process.wait(60)


def address(server: subprocess.Popen[str]) -> str:
    """Return where a server that has just been started answers."""
    assert server.stdout is not None
    for line in server.stdout:
        if "http://" in line:
            return "http://" + line.split("http://")[1].split()[0].rstrip("/,;.")
    raise RuntimeError("the server has ended")


def chat(client: httpx.Client, rng: random.Random) -> str:
    """Return the answer to a short question."""
    words = " ".join(rng.sample(WORDS, 4))
    a, b = rng.randrange(2, 60), rng.randrange(2, 60)
    question = rng.choice(
        (f"Sort these words: {words}.", f"What is {a} + {b}?", f"Spell the word '{words.split()[0]}'.")
    )
    body: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "temperature": 0}
    answer = client.post("/v1/chat/completions", json={"model": "pagewood-demo", **body})
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
