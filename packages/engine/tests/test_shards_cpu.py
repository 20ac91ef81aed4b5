"""Models divided among ranks on the CPU: every family, in every part's form, against the same models whole.

The ranks are threads with memory of their own, which exchange through a segment as processes do.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from torch import Tensor

from families.case import Case, build
from families.registry import DIVIDED
from pagewood.engine.api import ActivationFormat, WeightFormat
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.shard import WHOLE, Shard
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.exchange import Exchange
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.engine.runner.ranks.segment import Segment, segment_bytes
from pagewood.engine.runner.storage import storage_for
from rank_threads import on_ranks
from row_driver import RowDriver

PAGE_SIZE, NUM_PAGES = 4, 200
_LOADING = Lock()
PROMPTS = [np.random.default_rng(length).integers(0, 97, length).tolist() for length in (37, 1, 5, 64)]


def _results(
    folder: Path,
    form: WeightFormat,
    shard: Shard = WHOLE,
    exchange: Exchange | None = None,
    *,
    activations: ActivationFormat = "auto",
) -> tuple[Tensor, list[list[int]]]:
    """Return logits of a prompt in two chunks, and greedy tokens of several prompts together."""
    with _LOADING:  # kernels are compiled once
        ops = CPUOps(Packer(form, activations=activations), exchange=exchange)
        model = load_model(folder, ops, dtype=torch.float32 if form == "float32" else None, shard=shard)
        layout = model.config.memory_layout(page_size=PAGE_SIZE, order="HND")
        kernel = warm_up(layout, head_dims=model.config.head_dims, packed=ops.variants, others=tuple(ops.units))
        storage = storage_for(layout, NUM_PAGES)
        runner = CPURunner(model, storage, kernel, max_rows=8, max_length=100, num_threads=1)
    driver = RowDriver(runner, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    first = driver.add(PROMPTS[0])
    logits = [torch.from_numpy(runner.forward(driver.batch([(first, chunk)]))).clone() for chunk in (30, 7)]
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(sequences, num_tokens=8, chunk=50)
    runner.close()
    return torch.cat(logits), [one.output for one in sequences]


def _on_ranks(
    folder: Path, form: WeightFormat, count: int, *, activations: ActivationFormat = "auto"
) -> Sequence[tuple[Tensor, list[list[int]]]]:
    segment = Segment.in_memory(np.zeros(segment_bytes(count), np.uint8), count)

    def work(shard: Shard, _: Callable[[Tensor], list[Tensor]]) -> tuple[Tensor, list[list[int]]]:
        try:
            return _results(folder, form, shard, segment.exchange(shard.rank), activations=activations)
        except BaseException as error:
            segment.end(shard.rank, str(error))
            raise

    return on_ranks(count, work)


USUAL = (
    "llama-one-kv-head", "olmo2", "gpt-neox", "gpt-oss", "deepseek3",
)  # fmt: skip
"""Cases with most kinds of parts; others differ from them in numbers, and `test_shards.py` compares them."""


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in DIVIDED]
)
def test_ranks_compute_what_one_does(name: str, tmp_path: Path) -> None:
    build(DIVIDED[name], tmp_path)
    whole, greedy = _results(tmp_path, "float32")
    for logits, tokens in _on_ranks(tmp_path, "float32", 2):
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)
        assert tokens == greedy


ROUNDED = ["llama", "qwen3-moe", "gpt-neox", "deepseek3"]
WHOLE_GROUPS = Case(kind="Llama", extra={"intermediate_size": 128})
"""Half of its inputs, and of those of a head's outputs, are whole groups of 32."""


def _error(logits: Tensor, exact: Tensor) -> Tensor:
    """Return the error of the median token: rounding makes a few tokens of a mixture choose other experts."""
    return (torch.linalg.vector_norm(logits - exact, dim=1) / torch.linalg.vector_norm(exact, dim=1)).median()


@pytest.mark.parametrize(("name", "form"), [*((name, "int8") for name in ROUNDED), ("whole-groups", "int4")])
def test_weights_that_are_rounded_are_those_of_one_rank(name: str, form: WeightFormat, tmp_path: Path) -> None:
    """Their scales are those of whole rows, so that ranks differ only where sums are added in another order."""
    build(WHOLE_GROUPS if name == "whole-groups" else DIVIDED[name], tmp_path)
    whole, greedy = _results(tmp_path, form, activations="float32")
    for logits, tokens in _on_ranks(tmp_path, form, 2, activations="float32"):
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)
        assert tokens == greedy


@pytest.mark.parametrize("form", ["bfloat16", "int4"])
@pytest.mark.parametrize("name", ROUNDED)
def test_ranks_round_weights_as_well_as_one_does(name: str, form: WeightFormat, tmp_path: Path) -> None:
    """With groups of their own, because half of the inputs are no whole groups."""
    build(DIVIDED[name], tmp_path)
    exact, _ = _results(tmp_path, "float32")
    whole = _results(tmp_path, form, activations="float32")[0]
    ranks = [one for one, _ in _on_ranks(tmp_path, form, 2, activations="float32")]
    assert torch.equal(ranks[0], ranks[1])
    assert _error(ranks[0], exact) < 1.03 * _error(whole, exact)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", ROUNDED)
def test_ranks_round_activations_as_well_as_one_does(name: str, form: WeightFormat, tmp_path: Path) -> None:
    """Each is compared with its weights and activations in float32."""
    build(DIVIDED[name], tmp_path)
    whole = _error(_results(tmp_path, form)[0], _results(tmp_path, form, activations="float32")[0])
    exact = _on_ranks(tmp_path, form, 2, activations="float32")[0][0]
    assert _error(_on_ranks(tmp_path, form, 2)[0][0], exact) < 1.1 * whole
