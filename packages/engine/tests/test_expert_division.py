"""Experts divided among ranks as wholes: maps, what ranks read, and logits against whole models, over torch."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from families.case import Case, build
from families.registry import DIVIDED
from pagewood.engine.api import EngineConfig
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.expert_division import divided_by_expert, division_mark, expert_layers
from pagewood.engine.models.expert_map import ExpertPlacement, read_expert_map
from pagewood.engine.models.parts.experts import RouterConfig
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stored.tensor_files import SafetensorsFiles
from pagewood.engine.models.torch_experts import TorchPlacing, choose
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cuda.ops import CUDAOps
from pagewood.engine.runner.ranks.agreement import check_division
from pagewood.engine.runner.ranks.messages import CanMeet
from rank_threads import ThreadExchange, on_ranks, ranks_logits, text_logits
from stand_ins import flashinfer_torch
from stand_ins.torch_decoding import rotations_at

TOKENS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(5))
Change = Callable[[ModelConfig], ModelConfig]
SIXES: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 96,
    "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
}  # fmt: skip
"""Numbers that three ranks divide; those of experts need not be divisible."""


def has_experts(case: Case) -> bool:
    if case.extra.get("num_local_experts") == 0:  # Granite 4 without a mixture
        return False
    return any(name in case.kind for name in ("Moe", "MoE", "Mixtral", "GptOss", "Llama4", "DeepseekV", "MiniMax"))


MIXTURES = [name for name, case in DIVIDED.items() if has_experts(case) and "dense" not in name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six experts in the layers 0 and 2 of 3."""
    made = tmp_path_factory.mktemp("mixture")
    build(DIVIDED["qwen3-moe"], made)
    return made


def mapped(file: Path, layers: dict[Any, Any]) -> Path:
    file.write_text(json.dumps({"layers": layers}))
    return file


def by_expert(count: int, file: Path | None = None) -> list[Change]:
    return [partial(divided_by_expert, num_ranks=count, file=file)] * count


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_consecutive_experts_are_divided_with_one_more_for_the_first_ranks(num_ranks: int) -> None:
    own = ExpertPlacement.contiguous(6, num_ranks)
    counts = [len(own.experts_of(rank)) for rank in range(num_ranks)]
    assert sum(counts) == 6
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1
    assert own.is_plain
    assert [own.first_of(rank) for rank in range(num_ranks)] == [sum(counts[:rank]) for rank in range(num_ranks)]
    with pytest.raises(ValueError, match="tensor_parallel_size must be at most 6, the number of experts, with"):
        ExpertPlacement.contiguous(6, 7)


def test_placed_experts_are_numbered_by_rank() -> None:
    own = ExpertPlacement(num_ranks=2, ranks=((1,), (0, 1), (0,)))
    assert own.placed_experts().tolist() == [1, 2, 0, 1]
    assert own.placed_ranks().tolist() == [0, 0, 1, 1]
    assert own.table().tolist() == [[2, -1], [0, 3], [1, -1]]
    assert (own.num_placed, own.first_of(1), own.is_plain) == (4, 2, False)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(0, 1000))
def test_a_row_decides_who_computes_its_experts(num_ranks: int, seed: int) -> None:
    """Each expert goes to a rank that has it; alone and among others to the same; copies share the rows."""
    generator = np.random.default_rng(seed)
    ranks = [tuple(np.flatnonzero(generator.random(num_ranks) < 0.5).tolist()) or (0,) for _ in range(6)]
    ranks[0] = tuple(range(num_ranks))
    own = ExpertPlacement(num_ranks=num_ranks, ranks=tuple(ranks))
    logits = torch.from_numpy(generator.standard_normal((64, 6)).astype(np.float32))
    chosen, _ = choose(logits, RouterConfig(num_experts=6, num_chosen=3), None)
    place = TorchPlacing(own, torch.device("cpu"))
    placed = place(chosen, logits)
    assert torch.equal(torch.from_numpy(own.placed_experts())[placed.long()], chosen)
    assert torch.equal(torch.cat([place(chosen[i : i + 1], logits[i : i + 1]) for i in range(64)]), placed)


def test_copies_share_the_rows() -> None:
    """With all experts on all ranks, each has one of a row's three; one that may choose between two takes turns."""
    logits = torch.randn(300, 6, generator=torch.Generator().manual_seed(1))
    chosen, _ = choose(logits, RouterConfig(num_experts=6, num_chosen=3), None)
    own = ExpertPlacement(num_ranks=3, ranks=((0, 1, 2),) * 6)
    ranks = torch.from_numpy(own.placed_ranks())[TorchPlacing(own, torch.device("cpu"))(chosen, logits).long()]
    assert torch.equal(ranks.sort(-1).values, torch.arange(3, dtype=torch.int32).expand(300, 3))
    assert (torch.bincount(ranks[:, 0], minlength=3) > 60).all()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({1: [0] * 6}, r"layers must be those with experts \(0, 2\), got '1'"),
        ({"first": []}, r"layers must be those with experts \(0, 2\), got 'first'"),
        ({0: 5}, "layer 0 must be a list of 6 experts, got 5"),
        ({0: [0, 1]}, "layer 0 must list the ranks of 6 experts, got 2"),
        ({2: [0, 1, 0, 1, 0, 2]}, r"layer 2: ranks of expert 5 must be in \[0, 2\), got 2"),
        ({2: [0, 1, [], 1, 0, 1]}, "layer 2: expert 2 must have at least one rank, got none"),
        ({2: [0, 1, [1, 1], 1, 0, 1]}, r"layer 2: expert 2 must have each of its ranks once, got \[1, 1\]"),
        ({2: [0, 1, "all", 1, 0, 1]}, 'layer 2: expert 2 must be a rank or a list of ranks, got "all"'),
        ({2: [0, True, 0, 1, 0, 1]}, "layer 2: expert 1 must be a rank or a list of ranks, got true"),
        ({2: [0] * 6}, "layer 2: rank 1 must have at least one of 6 experts, got none"),
    ],
)
def test_a_wrong_map_is_an_error_with_layer_expert_rule_and_value(
    layers: dict[Any, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    model = ModelConfig.from_folder(folder)
    with pytest.raises(ValueError, match=f"map.json: {message}"):
        divided_by_expert(model, 2, file=mapped(tmp_path / "map.json", layers))


def test_a_map_has_layers_only_and_those_it_leaves_out_are_consecutive(folder: Path, tmp_path: Path) -> None:
    file = mapped(tmp_path / "map.json", {"2": [1, [1, 0], 0, 1, 0, 1]})
    found = read_expert_map(file, {0: 6, 2: 6}, 2)
    assert found[0] == ExpertPlacement.contiguous(6, 2)
    assert found[2].ranks == ((1,), (0, 1), (0,), (1,), (0,), (1,))
    file.write_text(json.dumps({"layers": {}, "physical": 3}))
    with pytest.raises(ValueError, match="must have the field layers only, got 'physical'"):
        read_expert_map(file, {0: 6}, 2)
    with pytest.raises(FileNotFoundError):
        divided_by_expert(ModelConfig.from_folder(folder), 2, file=tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_parallel": True}, "expert_parallel must be False with tensor_parallel_size 1, got True"),
        ({"tensor_parallel_size": 2, "expert_map": "a.json"}, "expert_map must be None without expert_parallel, got"),
        ({"expert_load": "all"}, "expert_load must be one of off, ranks, experts, got 'all'"),
        ({"expert_load": "ranks", "device": "cuda"}, "expert_load must be off on CUDA, .* got ranks"),
        (
            {"expert_load": "ranks", "model_impl": "transformers"},
            "expert_load must be off with model_impl transformers",
        ),
    ],
)
def test_options_that_have_no_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_ranks_with_another_map_than_rank_0_are_refused(folder: Path, tmp_path: Path) -> None:
    model = ModelConfig.from_folder(folder)
    one = division_mark(divided_by_expert(model, 2))
    other = division_mark(divided_by_expert(model, 2, file=mapped(tmp_path / "map.json", {0: [1, 0, 0, 1, 0, 1]})))
    check_division(one, [CanMeet(division=one, has_device=True), CanMeet(division=one, has_device=True)])
    check_division("", [CanMeet(division="", has_device=True)])
    with pytest.raises(ValueError, match=r"expert_map must say the same on all ranks, got .* on rank 2"):
        check_division(one, [CanMeet(division=one, has_device=True), CanMeet(division=other, has_device=True)])


def copies(folder: Path, file: Path, count: int, *, seed: int = 0) -> Path:
    """Return a map with experts in any order, and copies of about every third one."""
    generator, layers = np.random.default_rng(seed), dict[Any, Any]()
    for layer, experts in expert_layers(ModelConfig.from_folder(folder)).items():
        num = experts.router.num_experts
        own = generator.permutation([rank % count for rank in range(num)]).tolist()
        layers[layer] = [sorted({rank, (rank + 1) % count}) if one % 3 == 0 else rank for one, rank in enumerate(own)]
    return mapped(file, layers)


def check(folder: Path, tmp_path: Path, count: int) -> None:
    whole = text_logits(load_model(folder, TorchOps()), TOKENS)
    for file in (None, copies(folder, tmp_path / "map.json", count)):
        found = ranks_logits(folder, TOKENS, count, changes=by_expert(count, file))
        for logits in found:
            torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)
            assert torch.equal(logits.argmax(-1), whole.argmax(-1))


def test_two_ranks_compute_what_one_does(folder: Path, tmp_path: Path) -> None:
    check(folder, tmp_path, 2)


def test_the_numbers_of_experts_need_not_be_divisible(tmp_path: Path) -> None:
    """Five experts with an inner size of 40, and shared ones, on three ranks."""
    case = DIVIDED["qwen3-moe"]
    extra = {**case.extra, **SIXES, "num_experts": 5, "num_local_experts": 5, "moe_intermediate_size": 40}
    build(replace(case, extra=extra), tmp_path)
    check(tmp_path, tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_every_family_with_experts(name: str, count: int, tmp_path: Path) -> None:
    case = DIVIDED[name]
    if count == 3:
        heads = {} if "num_key_value_heads" not in case.extra else {"num_key_value_heads": 6}
        own = {field: value for field, value in SIXES.items() if field in case.extra or not field.startswith("shared")}
        if "qk_rope_head_dim" in case.extra:
            del own["head_dim"]  # latents have sizes of their own
        case = replace(case, extra={**case.extra, **own, **heads})
    build(case, tmp_path)
    assert expert_layers(ModelConfig.from_folder(tmp_path))
    if count > min(one.router.num_experts for one in expert_layers(ModelConfig.from_folder(tmp_path)).values()):
        with pytest.raises(ValueError, match="tensor_parallel_size must be at most"):
            divided_by_expert(ModelConfig.from_folder(tmp_path), count)
        return
    check(tmp_path, tmp_path, count)


@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_ranks_of_the_operations_of_cuda(name: str, tmp_path: Path) -> None:
    """With FlashInfer's in plain torch."""
    build(DIVIDED[name], tmp_path)
    whole = text_logits(load_model(tmp_path, TorchOps()), TOKENS)
    change = by_expert(2, copies(tmp_path, tmp_path / "map.json", 2))[0]

    def work(shard: Shard, exchange: Callable[[Tensor], list[Tensor]]) -> Tensor:
        ops = CUDAOps(flashinfer_torch, exchange=ThreadExchange(exchange))
        model = load_model(tmp_path, ops, shard=shard, change=change)
        within = WholeTexts([layer.mixer for layer in model.config.layers], len(TOKENS))
        with torch.inference_mode():
            return model(TOKENS, rotations_at(model.ropes, list(range(len(TOKENS)))), within, torch.arange(len(TOKENS)))

    for logits in on_ranks(2, work):
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)


def test_a_rank_reads_the_tensors_of_its_experts_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, original = set[str](), SafetensorsFiles.read

    def noted(self: SafetensorsFiles, name: str) -> Tensor:
        read.add(name)
        return original(self, name)

    monkeypatch.setattr(SafetensorsFiles, "read", noted)
    change = by_expert(2, mapped(tmp_path / "map.json", {0: [1, 0, 1, 0, [0, 1], 0]}))[0]
    for dtype in (torch.float32, None):
        read.clear()
        ops: Any = CPUOps() if dtype is None else TorchOps()
        load_model(folder, ops, dtype=dtype, shard=Shard(1, 2), change=change)
        names = {".".join(name.split(".")[2:6:3]) for name in read if ".experts." in name}
        assert names == {"0.0", "0.2", "0.4", "2.3", "2.4", "2.5"}


def test_a_fault_in_the_map_of_one_rank_is_seen_in_the_logits(folder: Path, tmp_path: Path) -> None:
    """An expert that two ranks compute, one that no rank computes, and the map of another layer."""
    whole = text_logits(load_model(folder, TorchOps()), TOKENS)
    right = [0, 0, 0, 1, 1, 1]
    maps: Sequence[dict[Any, Any]] = (
        {0: [0, 0, 1, 1, 1, 1]},  # rank 1: expert 2 is computed by both
        {0: [0, 0, 0, 0, 1, 1]},  # rank 1: expert 3 is computed by none
        {0: [1, 0, 1, 0, 1, 0], 2: right},  # rank 1 has the maps of layers 0 and 2 exchanged
    )
    rest: Sequence[dict[Any, Any]] = ({}, {}, {0: right, 2: [1, 0, 1, 0, 1, 0]})
    for number, (own, other) in enumerate(zip(rest, maps, strict=True)):
        files = [mapped(tmp_path / f"{number}.{rank}.json", one) for rank, one in enumerate((own, other))]
        changes = [by_expert(2, file)[0] for file in files]
        found = ranks_logits(folder, TOKENS, 2, changes=changes)
        assert (found[0] - whole).abs().max() > 1e-2
