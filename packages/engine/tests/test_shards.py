"""Models divided among ranks against the same models whole: every family, over plain torch.

Logits differ in their last bits: a sum over the inputs of a projection becomes a sum of sums, one for each rank.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from families.case import build
from families.registry import DIVIDED
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models import torch_ops
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.parts import attention
from pagewood.engine.models.parts.layer import Layer
from pagewood.engine.models.shard import WHOLE, Shard
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.runner.cuda.ops import CUDAOps
from rank_threads import ThreadExchange, on_ranks, ranks_logits, text_logits, text_states
from seeded_faults import Edit, seed_fault
from stand_ins import flashinfer_torch
from stand_ins.torch_decoding import rotations_at

TOKENS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(5))
NUM_GREEDY = 8


@pytest.fixture(scope="module", params=DIVIDED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    build(DIVIDED[request.param], folder)
    return folder


def _greedy(model: Decoder[Tensor]) -> list[int]:
    """Return the tokens that a model finds likeliest after the first ones of the text."""
    tokens = TOKENS[:5]
    for _ in range(NUM_GREEDY):
        tokens = torch.cat([tokens, text_logits(model, tokens)[-1:].argmax(-1)])
    return tokens[5:].tolist()


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_compute_what_one_does(folder: Path, count: int) -> None:
    def work(
        shard: Shard = WHOLE, exchange: Callable[[Tensor], list[Tensor]] | None = None
    ) -> tuple[Tensor, Tensor, list[int]]:
        model = load_model(folder, TorchOps(exchange=exchange), shard=shard)
        return text_states(model, TOKENS), text_logits(model, TOKENS), _greedy(model)

    (_, whole, greedy), parts = work(), on_ranks(count, work)
    for states, logits, tokens in parts:
        assert torch.equal(states, parts[0][0])
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)
        assert tokens == greedy


@pytest.mark.parametrize("name", ["llama-biases", "olmo2", "gpt-neox", "gpt2", "qwen3-moe"])
def test_ranks_of_the_operations_of_cuda(name: str, tmp_path: Path) -> None:
    """With FlashInfer's in plain torch."""
    build(DIVIDED[name], tmp_path)
    whole = text_logits(load_model(tmp_path, TorchOps()), TOKENS)

    def work(shard: Shard, exchange: Callable[[Tensor], list[Tensor]]) -> Tensor:
        model = load_model(tmp_path, CUDAOps(flashinfer_torch, exchange=ThreadExchange(exchange)), shard=shard)
        within = WholeTexts([layer.mixer for layer in model.config.layers], len(TOKENS))
        rotations = rotations_at(model.ropes, list(range(len(TOKENS))))
        with torch.inference_mode():
            return model(TOKENS, rotations, within, torch.arange(len(TOKENS)))

    for logits in on_ranks(2, work):
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)


def test_a_rank_has_its_part_of_memory_and_weights(tmp_path: Path) -> None:
    """Of every matrix of a layer exactly its share, and of a tied table the share of two."""
    build(DIVIDED["llama"], tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    for count in (1, 2, 4):
        sizes = list[int]()

        def make(weight: Tensor, bias: Tensor | None, sizes: list[int] = sizes) -> torch_ops.TorchLinear:
            sizes.append(weight.numel())
            return torch_ops.TorchLinear(weight, bias)

        model = load_model(tmp_path, TorchOps(make), shard=Shard(count - 1, count))
        layer, shape = config.layers[0], model.config.attentions[0]
        assert (shape.num_heads, shape.num_kv_heads) == (4 // count, max(1, 2 // count))
        qkv = (shape.q_size + 2 * shape.kv_size) * config.hidden_size
        others = shape.q_size * config.hidden_size + 3 * layer.feed_forward.size // count * config.hidden_size
        head = -(-config.vocab_size // count) * config.hidden_size
        assert sum(sizes) == config.num_layers * (qkv + others) + head
        layout = model.config.memory_layout(page_size=4)
        assert layout.bytes_per_page == config.memory_layout(page_size=4).bytes_per_page * shape.num_kv_heads // 2


def test_parts_of_units() -> None:
    assert [Shard(rank, 3).part("n", 6) for rank in range(3)] == [range(2), range(2, 4), range(4, 6)]
    assert [Shard(rank, 4).shared_part("n", 2) for rank in range(4)] == [range(1)] * 2 + [range(1, 2)] * 2
    assert [Shard(rank, 2).shared_part("n", 4) for rank in range(2)] == [range(2), range(2, 4)]
    for whole, count in ((7, 2), (3, 5), (1, 4), (8, 4), (97, 16)):
        parts = [Shard(rank, count).padded_part(whole) for rank in range(count)]
        assert len({len(part) for part in parts}) == 1
        assert np.concatenate(parts)[:whole].tolist() == list(range(whole))


@pytest.mark.parametrize(
    ("fields", "count", "message"),
    [
        ({}, 3, "num_attention_heads must be a multiple of tensor_parallel_size 3, got 4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 16}, 6,
         "num_key_value_heads must be a multiple of tensor_parallel_size 6, got 4"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}, 3,
         "intermediate_size must be a multiple of tensor_parallel_size 3, got 80"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_divided_are_named(
    fields: dict[str, int], count: int, message: str, tmp_path: Path
) -> None:
    build(DIVIDED["llama"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **fields}))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_folder(tmp_path).for_shard(Shard(0, count))
    for rank, count in ((0, 0), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=r"(count must be >= 1|rank must be in \[0, 2\)), got"):
            Shard(rank, count)


FAULTS: dict[str, tuple[str, Edit]] = {
    "every rank takes the rows of the first": (
        "llama", (Shard, "part", "range(self.rank * size, (self.rank + 1) * size)", "range(size)"),
    ),
    "a rank has the keys of the next one": (
        "llama", (Shard, "shared_part", "first = self.rank //", "first = (self.rank + 1) % self.count //"),
    ),
    "values are those of the first heads": (
        "llama", (attention, "_order", "values + in_heads(plain, kv_heads)", "values + in_heads(plain, range(1))"),
    ),
    "every rank adds the bias behind a sum": (
        "llama-biases", (attention, "read_linear", "bias if adds_bias else None", "bias"),
    ),
    "parts are not summed": ("llama", (Layer, "_fed", "fed if self._is_whole", "fed if True")),
    "a norm of all heads sees those of its rank": (
        "olmo2", (torch_ops, "norm_over_ranks", "sum_ranks(means) / split.num_ranks", "means"),
    ),
    "sinks are those of the first heads": (
        "gpt-oss", (attention.SelfAttention, "__init__", "np.asarray(heads[0])", "np.arange(len(heads[0]))"),
    ),
    "the vocabulary of ranks stands in another order": (
        "llama", (torch_ops, "columns_of_ranks", "list(exchange(x))", "list(exchange(x))[::-1]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, edit = FAULTS[name]
    build(DIVIDED[case], tmp_path)
    whole = text_logits(load_model(tmp_path, TorchOps()), TOKENS)
    seed_fault([edit], monkeypatch)
    assert max((logits - whole).abs().max().item() for logits in ranks_logits(tmp_path, TOKENS, 4)) > 1e-2


def test_a_rank_that_adds_in_another_order_has_other_bits(tmp_path: Path) -> None:
    """In its states; logits are the same on all ranks even then, because every rank computes a part of all of them."""
    build(DIVIDED["llama"], tmp_path)

    def work(shard: Shard, exchange: Callable[[Tensor], list[Tensor]]) -> Tensor:
        def reversed_on_one(x: Tensor) -> list[Tensor]:
            found = exchange(x)
            is_sum = x.shape[-1] == model.config.hidden_size
            return found[::-1] if shard.rank == 2 and is_sum else found

        model = load_model(tmp_path, TorchOps(exchange=reversed_on_one), shard=shard)
        return text_states(model, TOKENS)

    first, *others = on_ranks(4, work)
    assert [torch.equal(first, other) for other in others] == [True, False, True]
    torch.testing.assert_close(others[1], first, atol=1e-4, rtol=0)
