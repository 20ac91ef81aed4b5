"""Measures how much int8 KV memory changes the logits of the embedded model and of a 110M model with random weights.

python benchmarks/int8_logits.py             # about a minute
python benchmarks/int8_logits.py FOLDER...   # other models, with random tokens
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from end_to_end.model import FULL, write_model
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.storage import storage_for
from pagewood.engine.text import Tokenizer
from row_driver import RowDriver

PAGE_SIZE, NUM_PAGES, CHUNK = 16, 64, 37
NUM_RANDOM = 200
QUESTIONS = (
    "What can you do?",
    "What is 12 + 7?",
    "What day comes 10 days after Monday?",
    "Spell the word 'banana' backwards.",
    "Sort these words: stone river cloud apple.",
)


def logits(model: Decoder[Any], prompts: list[list[int]], dtype: str) -> NDArray[np.float64]:
    """Return the logits at all positions of the prompts, computed in chunks."""
    config = model.config
    layout = config.memory_layout(page_size=PAGE_SIZE, dtype=dtype, order="HND")
    kernel = warm_up(layout)
    runner = CPURunner(model, storage_for(layout, NUM_PAGES), kernel, max_rows=1, max_length=1024, num_threads=2)
    parts: list[NDArray[np.float32]] = []
    for prompt in prompts:
        driver = RowDriver(runner, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        sequence = driver.add(prompt)
        while sequence.num_computed < len(prompt):
            parts.append(runner.forward(driver.batch([(sequence, CHUNK)])).copy())
    runner.close()
    return np.concatenate(parts).astype(np.float64)


def row(name: str, folder: Path, prompts: list[list[int]]) -> str:
    """Compare int8 with fp32 KV memory on a model; return a row of the table."""
    model = load_model(folder, CPUOps())
    exact, rounded = (logits(model, prompts, dtype) for dtype in ("float32", "int8"))
    error = rounded - exact
    of_norm = np.linalg.norm(error) / np.linalg.norm(exact)
    of_largest = np.abs(error).max() / np.abs(exact).max()
    same = (exact.argmax(1) == rounded.argmax(1)).mean()
    return f"| {name} | {of_norm:.2%} | {np.abs(error).max():.3f} | {of_largest:.2%} | {same:.1%} | {len(exact)} |"


def main() -> None:
    """Measure and print a table."""
    rng = np.random.default_rng(0)

    def random_tokens(folder: Path) -> list[list[int]]:
        return [rng.integers(0, load_model(folder, CPUOps()).config.vocab_size, NUM_RANDOM).tolist()]

    print("| model | error / logits (norms) | largest error | of the largest logit | same greedy token | positions |")
    print("|---|--:|--:|--:|--:|--:|")
    for folder in map(Path, sys.argv[1:]):
        print(row(folder.name, folder, random_tokens(folder)))
    if len(sys.argv) > 1:
        return
    embedded = model_folder(None)
    tokenizer = Tokenizer.from_folder(embedded)
    chats = [list(tokenizer.encode_chat([{"role": "user", "content": question}])) for question in QUESTIONS]
    print(row("embedded, its questions", embedded, chats), flush=True)
    print(row("embedded, random tokens", embedded, random_tokens(embedded)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_model(FULL, Path(folder), seed=0)
        print(row("110M, random weights and tokens", Path(folder), random_tokens(Path(folder))))


if __name__ == "__main__":
    main()
