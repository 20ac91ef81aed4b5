"""On a CPU the logits of a position are the same bits however they are computed, and no request changes another's."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagewood.engine.model_folder.load import load_model
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.engine.runner.storage import storage_for
from row_driver import DrivenSequence, RowDriver
from scratch import scratch_folder

LENGTH = 150
VOCAB_SIZE = 61
NAN_TOKEN = 60
"""A token whose embedding is NaN; the others have ordinary embeddings."""
PACKERS: dict[str, Callable[[], Packer]] = {
    "float32": lambda: Packer("float32"),
    "bfloat16": lambda: Packer("bfloat16"),
    "bfloat16, activations too": lambda: Packer("bfloat16", activations="bfloat16"),
    "int8": lambda: Packer("int8"),
    "int8, widened": lambda: Packer("int8", activations="float32"),
    "int4": lambda: Packer("int4"),
    "int4, widened": lambda: Packer("int4", activations="float32"),
}
PACKED = [name for name in PACKERS if name != "float32"]
MODELS: dict[str, dict[str, Any]] = {
    "three heads a group": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    "no groups, heads of 8": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
    "one key head, windows": {
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64, "use_sliding_window": True,
        "sliding_window": 37, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip


@functools.cache
def folder_of(model: str) -> Path:
    folder = scratch_folder()
    torch.manual_seed(5)
    config: Any = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=40, intermediate_size=72, num_hidden_layers=2, initializer_range=0.3,
        tie_word_embeddings=False, **MODELS[model],
    )  # fmt: skip
    reference = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        reference.model.embed_tokens.weight[NAN_TOKEN] = torch.nan
    reference.save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model, and what must not matter to it; int8 memory and each form of weights have their own bits."""

    model: str
    int8: bool
    weights: str = "float32"
    page_size: int = 16
    num_threads: int = 1


class Bench:
    """A runner over its own memory, and the driver that feeds it."""

    def __init__(self, setup: Setup) -> None:
        ops = CPUOps(PACKERS[setup.weights]())
        model = load_model(folder_of(setup.model), ops)
        config = model.config
        layout = config.memory_layout(page_size=setup.page_size, dtype="int8" if setup.int8 else "float32", order="HND")
        num_pages = 8 * -(-(LENGTH + 1) // setup.page_size)
        self.storage = storage_for(layout, num_pages)
        kernel = warm_up(layout, packed=ops.variants)
        self.runner = CPURunner(
            model, self.storage, kernel, max_rows=8, max_length=LENGTH + 1, num_threads=setup.num_threads
        )
        self.driver = RowDriver(self.runner, num_pages=num_pages, page_size=setup.page_size)

    def logits(self, sequence: DrivenSequence, counts: list[int], others: list[DrivenSequence]) -> NDArray[np.float32]:
        """Compute `sequence` in grants of `counts` tokens, the last of them repeated; the others go on beside it.

        In step i, others[j] computes 1 + (i + j) % 9 tokens as long as it has any left.
        """
        parts: list[NDArray[np.float32]] = []
        step = 0
        while sequence.num_computed < len(sequence.tokens):
            beside = [
                (other, 1 + (step + j) % 9) for j, other in enumerate(others) if other.num_computed < len(other.tokens)
            ]
            count = min(counts[min(step, len(counts) - 1)], len(sequence.tokens) - sequence.num_computed)
            place = step % (len(beside) + 1)
            grants = [*beside[:place], (sequence, count), *beside[place:]]
            before = sum(min(n, len(other.tokens) - other.num_computed) for other, n in beside[:place])
            result = self.runner.forward(self.driver.batch(grants))
            parts.append(result[before : before + count])
            step += 1
        return np.concatenate(parts)


def tokens_of(seed: int, length: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(0, NAN_TOKEN, length).tolist()


@functools.cache
def by_decoding(model: str, int8: bool, weights: str = "float32") -> NDArray[np.float32]:
    """The logits of sequence 0 at all positions, computed alone, token by token."""
    bench = Bench(Setup(model=model, int8=int8, weights=weights))
    logits = bench.logits(bench.driver.add(tokens_of(0)), [1], [])
    bench.runner.close()
    return logits


@pytest.mark.parametrize(
    ("model", "int8", "weights"),
    [
        *((model, int8, "float32") for model in MODELS for int8 in (False, True)),
        *(("three heads a group", weights == "int4", weights) for weights in PACKED),
    ],
)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_logits_are_the_same_bits_however_they_are_computed(
    model: str, int8: bool, weights: str, data: st.DataObject
) -> None:
    """Decoded alone, in batches, prefilled in chunks, verified among others; with any page size and threads."""
    setup = Setup(
        model=model,
        int8=int8,
        weights=weights,
        page_size=data.draw(st.sampled_from([1, 4, 16, 33, 128])),
        num_threads=data.draw(st.sampled_from([1, 2, 3])),
    )
    counts = data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=12))
    lengths = data.draw(st.lists(st.integers(1, LENGTH), max_size=5))
    bench = Bench(setup)
    others = [bench.driver.add(tokens_of(1 + i, length)) for i, length in enumerate(lengths)]
    logits = bench.logits(bench.driver.add(tokens_of(0)), counts, others)
    bench.runner.close()
    assert np.array_equal(logits, by_decoding(model, int8, weights))


@pytest.mark.parametrize(
    ("chunk", "weights"),
    [*((chunk, "float32") for chunk in (1, 4, 13, 31, 64)), *zip((13, 64, 4, 31, 13, 64), PACKED, strict=True)],
)
def test_every_chunk_length_gives_the_same_bits(chunk: int, weights: str) -> None:
    model = "three heads a group"
    bench = Bench(Setup(model=model, int8=False, num_threads=2, weights=weights))
    logits = bench.logits(bench.driver.add(tokens_of(0)), [chunk], [])
    bench.runner.close()
    assert np.array_equal(logits, by_decoding(model, False, weights))


@pytest.mark.parametrize(
    ("int8", "weights"), [(False, "float32"), (True, "float32"), *((False, weights) for weights in PACKED)]
)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_verified_positions_have_the_bits_of_plain_decoding(int8: bool, weights: str, data: st.DataObject) -> None:
    """Chains of 1 to 8 drafts in up to 8 rows; some end in wrong drafts, over whose KV the next step writes."""
    model, text = "three heads a group", tokens_of(0)
    expected = by_decoding(model, int8, weights)
    page_size, num_threads = data.draw(st.sampled_from([1, 4, 16])), data.draw(st.sampled_from([1, 2]))
    bench = Bench(Setup(model=model, int8=int8, weights=weights, page_size=page_size, num_threads=num_threads))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    rows = [bench.driver.add(text[: rng.integers(1, 80)]) for _ in range(data.draw(st.integers(1, 8)))]
    prompts = [(row, len(row.tokens) - 1) for row in rows if len(row.tokens) > 1]
    if prompts:
        bench.runner.forward(bench.driver.batch(prompts))
    for _ in range(6):
        sizes = [int(n) for n in rng.integers(1, 9, len(rows))]
        batch = bench.driver.batch([(row, 1) for row in rows], drafts=sizes)
        right = [int(rng.integers(0, n + 1)) for n in sizes]
        starts = [len(row.tokens) - 1 for row in rows]
        places = [range(start, start + 1 + n) for start, n in zip(starts, sizes, strict=True)]
        tokens = [
            text[i] if i <= place.start + n_right else (text[i] + 1) % NAN_TOKEN
            for place, n_right in zip(places, right, strict=True)
            for i in place
        ]
        batch = replace(
            batch,
            token_rows=np.repeat(batch.rows, batch.counts),
            token_positions=np.concatenate(places).astype(np.int32),
            token_ids=np.array(tokens, np.int32),
        )
        results = np.split(bench.runner.forward(batch), np.cumsum(batch.counts)[:-1])
        for row, start, n, n_right, logits in zip(rows, starts, sizes, right, results, strict=True):
            assert len(logits) == 1 + n
            assert np.array_equal(logits[: 1 + n_right], expected[start : start + 1 + n_right])
            row.tokens = text[: start + 2 + n_right]
            row.num_computed = row.num_sent_tokens = row.num_prompt = len(row.tokens) - 1
    bench.runner.close()


def test_another_token_changes_the_bits() -> None:
    """What the tests above compare does depend on its input."""
    bench = Bench(Setup(model="three heads a group", int8=False))
    tokens = tokens_of(0)
    tokens[40] = (tokens[40] + 1) % NAN_TOKEN
    logits = bench.logits(bench.driver.add(tokens), [64], [])
    bench.runner.close()
    expected = by_decoding("three heads a group", False)
    assert np.array_equal(logits[:40], expected[:40])
    assert not any(np.array_equal(*rows) for rows in zip(logits[40:], expected[40:], strict=True))


@pytest.mark.parametrize(
    ("model", "int8", "weights", "chunk"),
    [
        *((*one, (1, 5, 64)[i % 3]) for i, one in enumerate(product(MODELS, (False, True), ("float32",)))),
        *(("three heads a group", False, weights, (5, 64, 1)[i % 3]) for i, weights in enumerate(PACKED)),
    ],
)
def test_nan_stays_in_its_own_request_and_does_not_reach_back(model: str, int8: bool, weights: str, chunk: int) -> None:
    """A NaN embedding at position 20 of another request, computed in the same steps and in the same chunks."""
    bench = Bench(Setup(model=model, int8=int8, num_threads=2, weights=weights))
    bad_tokens = tokens_of(0)
    bad_tokens[20] = NAN_TOKEN
    bad, good, fine = (bench.driver.add(tokens) for tokens in (bad_tokens, tokens_of(0), tokens_of(2)))
    parts: dict[int, list[NDArray[np.float32]]] = {0: [], 1: [], 2: []}
    while fine.num_computed < LENGTH:
        result = bench.runner.forward(bench.driver.batch([(sequence, chunk) for sequence in (bad, good, fine)]))
        for row, logits in enumerate(np.split(result, 3)):
            parts[row].append(logits)
    bench.runner.close()
    of_bad, of_good = np.concatenate(parts[0]), np.concatenate(parts[1])
    expected = by_decoding(model, int8, weights)
    assert np.array_equal(of_good, expected)
    assert np.isfinite(np.concatenate(parts[2])).all()
    assert np.array_equal(of_bad[:20], expected[:20])
    assert np.isnan(of_bad[20]).all()
    assert model == "one key head, windows" or np.isnan(of_bad[20:]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("chunk", [1, 30])
def test_bad_kv_memory_of_a_request_stays_its_own(value: float, chunk: int) -> None:
    model = "three heads a group"
    bench = Bench(Setup(model=model, int8=False, page_size=4, num_threads=2))
    bad, good = bench.driver.add(tokens_of(0)), bench.driver.add(tokens_of(0))
    first = bench.runner.forward(bench.driver.batch([(bad, 50), (good, 50)]))
    for layer in range(2):
        bench.storage.layer(layer)[bad.pages[3]] = value
    parts = [first[50:]]
    while good.num_computed < LENGTH:
        result = bench.runner.forward(bench.driver.batch([(bad, chunk), (good, chunk)]))
        of_bad, of_good = np.split(result, 2)
        assert np.isnan(of_bad).all()
        parts.append(of_good)
    bench.runner.close()
    assert np.array_equal(np.concatenate(parts), by_decoding(model, False))
