"""Batch invariance to the last bit, with stand-ins of kernels whose results do depend on the batch."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from pagewood.engine.api import SamplingParams
from pagewood.engine.assembly.cuda.build import cuda_ops
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.runner.cuda.drawing.sampler import Sampler
from pagewood.engine.runner.cuda.kernels.invariance import num_empty_grants
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.storage import storage_for
from row_driver import RowDriver
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]
OTHERS = [[7], [2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0, 3, 3, 9, 8]]


@pytest.fixture(autouse=True)
def small_buffers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagewood.engine.runner.cuda.attention.WORKSPACE_BYTES", 1024)
        patch.setattr("pagewood.engine.runner.cuda.staging.STAGING_BYTES", 1024)
        yield


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads": ("Llama", {"num_key_value_heads": 1}),
    "latents": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 2,
        },
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(1)
    kind, extra = MODELS[request.param]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.2, **extra,
    )  # fmt: skip
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


class Bench:
    """A runner, and the logits of the first request of its steps, recorded at the model's head."""

    def __init__(self, folder: Path, *, batch_invariant: bool, sizes: tuple[int, ...] = ()) -> None:
        model = load_model(folder, cuda_ops(flashinfer_torch, torch.device("cpu"), batch_invariant=batch_invariant))
        storage = storage_for(model.config.memory_layout(page_size=4), 101)
        self.device = RecordingDevice()
        self.runner = CUDARunner(
            model, storage, flashinfer_torch, self.device, max_rows=8, max_length=64,
            batch_invariant=batch_invariant, graph_sizes=sizes,
        )  # fmt: skip
        self.driver = RowDriver(self.runner, num_pages=100, page_size=4)
        self.last = torch.empty(0)
        head = model.head

        def watched(x: torch.Tensor) -> torch.Tensor:
            logits = head(x)
            self.last = logits[0].clone()
            return logits

        model.head = watched  # replayed graphs call it too

    def final_logits(self, chunks: list[int], others: list[list[int]]) -> torch.Tensor:
        """Compute TOKENS in chunks, beside requests that decode; return the logits after the last chunk."""
        mine = self.driver.add(TOKENS)
        beside = [self.driver.add(prompt) for prompt in others]
        for sequence in beside:
            self.runner.launch(self.driver.batch([(sequence, 64)])).wait()
            sequence.tokens.append(1)
        for count in chunks:
            self.runner.launch(self.driver.batch([(mine, count), *((other, 1) for other in beside)])).wait()
            for sequence in beside:
                sequence.tokens.append(1)
        return self.last


WAYS: dict[str, tuple[list[int], list[list[int]], tuple[int, ...]]] = {
    "chunks": ([7, 11, 12], [], ()),
    "one at a time": ([1] * 30, [], ()),
    "mixed": ([20, 10], OTHERS, ()),
    "decoded beside others": ([20, 9, 1], OTHERS, ()),
    "by a graph": ([29, 1], [], (1,)),
    "by a padded graph beside others": ([20, 9, 1], OTHERS, (8,)),
}


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_the_same_bits_however_they_are_computed(folder: Path, way: str) -> None:
    chunks, others, sizes = WAYS[way]
    expected = Bench(folder, batch_invariant=True).final_logits([30], [])
    bench = Bench(folder, batch_invariant=True, sizes=sizes)
    assert torch.equal(bench.final_logits(chunks, others), expected)
    assert (bench.device.num_replayed > 0) == bool(sizes)


def test_without_the_mode_some_logits_differ(folder: Path) -> None:
    expected = Bench(folder, batch_invariant=False).final_logits([30], [])
    different = [
        way
        for way, (chunks, others, sizes) in WAYS.items()
        if not torch.equal(Bench(folder, batch_invariant=False, sizes=sizes).final_logits(chunks, others), expected)
    ]
    assert "one at a time" in different
    assert "decoded beside others" in different


def tile_of(num_tokens: int, num_grants: int, group: int) -> int:
    """Return the queries of a tile, by FlashInfer's rule for heads of less than 256."""
    average = num_tokens * group // num_grants
    return 128 if average > 64 else 64 if average > 16 else 16


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 130))
def test_empty_grants_keep_the_tile_of_single_tokens(counts: list[int], group: int) -> None:
    num_tokens, num_grants = sum(counts), len(counts)
    num_empty = num_empty_grants(num_tokens, num_grants, group)
    assert tile_of(num_tokens, num_grants + num_empty, group) == tile_of(1, 1, group)
    if num_tokens == num_grants:
        assert num_empty == 0  # graphs cannot have empty grants, and are planned for single tokens


@given(st.integers(0, 10_000))
def test_sampling_of_a_row_does_not_depend_on_its_neighbours(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows = 5
    logits = torch.from_numpy(rng.standard_normal((num_rows, 60)) * 3).float()
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.5]), top_k=int(rng.choice([0, 1, 7, 100])),
            top_p=rng.choice([1.0, 0.9, 0.01]), min_p=rng.choice([0.0, 0.1]), typical_p=rng.choice([1.0, 0.7, 0.2]),
            top_n_sigma=rng.choice([0.0, 0.8, 2.0]),
        )
        for _ in range(num_rows)
    ]  # fmt: skip
    arrays = SamplingArrays.of(params, rng.integers(-(2**63), 2**63 - 1, num_rows).tolist())
    positions = torch.from_numpy(rng.integers(0, 2**31 - 1, num_rows).astype(np.int32))

    def tokens(rows: slice, filters: Any) -> list[int]:
        mine = arrays.take(np.arange(num_rows)[rows])
        sampler = Sampler.of(mine, torch.from_numpy(mine.flat()), positions[rows])
        return sampler.tokens(filters, logits[rows])[0].tolist()

    together = tokens(slice(None), None)
    assert together == [token for row in range(num_rows) for token in tokens(slice(row, row + 1), None)]
    assert together == tokens(slice(None), flashinfer_torch)


INTERPRETED = """
import torch
from pagewood.engine.runner.cuda.kernels.invariance import heads_by_row, linear_by_row
from pagewood.engine.runner.cuda.kernels.linear_triton import heads_linear, linear

for num_rows, depth, num_columns, has_bias in ((1, 48, 96, True), (70, 100, 130, False), (130, 64, 64, True)):
    x, weight, bias = (torch.randn(size).half() for size in ((num_rows, depth), (num_columns, depth), (num_columns,)))
    result = linear(x, weight, bias if has_bias else None)
    expected = linear_by_row(x.float(), weight.float(), bias.float() if has_bias else None)
    torch.testing.assert_close(result.float(), expected, atol=2e-2, rtol=2e-3)
    assert torch.equal(linear(x[-1:], weight, bias if has_bias else None), result[-1:])

for num_rows, num_heads, plain, values, rank in ((1, 3, 48, 70, 64), (70, 2, 100, 16, 80)):
    matrices = torch.randn(num_heads, plain + values, rank).half()
    queries, sums = torch.randn(num_rows, num_heads, plain + 7).half(), torch.randn(num_rows, num_heads, rank).half()
    for x, weight in ((queries[..., :plain], matrices[:, :plain].transpose(1, 2)), (sums, matrices[:, plain:])):
        result = heads_linear(x, weight)
        torch.testing.assert_close(
            result.float(), heads_by_row(x.float(), weight.float()), atol=2e-2, rtol=2e-3
        )
        assert torch.equal(heads_linear(x[-1:], weight), result[-1:])
"""


INTERPRETED_FEW_ROWS = """
import torch
from torch.nn import functional
from pagewood.engine.runner.cuda.kernels.few_rows_triton import MOST_ACTIVATED, MOST_ROWS, linear, silu_mul

shapes = (1, 48, 9, True), (1, 4096, 5, False), (2, 2500, 4, True), (2, 64, 7, False)
for num_rows, depth, num_columns, has_bias in shapes:
    x, weight, bias = (torch.randn(size).half() for size in ((num_rows, depth), (num_columns, depth), (num_columns,)))
    expected = functional.linear(x.float(), weight.float(), bias.float() if has_bias else None)
    torch.testing.assert_close(linear(x, weight, bias if has_bias else None).float(), expected, atol=2e-2, rtol=2e-3)
many, weight = torch.randn(MOST_ROWS + 1, 32), torch.randn(8, 32)
assert torch.equal(linear(many, weight, None), functional.linear(many, weight))
assert linear(many[:0], weight, None).shape == (0, 8)
for num_rows, columns in ((1, 1300), (5, 512)):
    x = (torch.randn(num_rows, 2 * columns) * 4).half()
    expected = functional.silu(x[:, :columns].float()) * x[:, columns:].float()
    torch.testing.assert_close(silu_mul(x, otherwise=None).float(), expected, atol=1e-3, rtol=1e-3)
assert silu_mul(torch.zeros(MOST_ACTIVATED + 1, 8), otherwise=torch.numel) == (MOST_ACTIVATED + 1) * 8
"""


INTERPRETED_RACE = """
import torch
from pagewood.engine.runner.cuda.drawing import race, race_triton

for num_tokens in (5, 300, 5000):
    weights = (torch.randn(16, num_tokens) * 3).softmax(-1)
    weights[:4] = 1 / num_tokens
    weights[4:8, 1::2] = 0
    seeds, positions = torch.randint(-2**62, 2**62, (16,)), torch.randint(0, 2**31 - 1, (16,)).int()
    tokens = race_triton.first_to_arrive(weights, seeds, positions)
    assert torch.equal(tokens, race.first_to_arrive(weights, seeds, positions))
    assert (weights.gather(1, tokens[:, None]) > 0).all()
weights[3] = torch.nan
assert 0 <= race_triton.first_to_arrive(weights, seeds, positions)[3] < 5000
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
@pytest.mark.parametrize(
    "program", [INTERPRETED, INTERPRETED_FEW_ROWS, INTERPRETED_RACE], ids=["projection", "few rows", "race"]
)
def test_kernels_in_their_interpreter(program: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported, so in a process of its own
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
