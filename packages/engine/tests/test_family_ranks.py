"""Every family on two ranks of the CPU: its tokens are those of one process, in chunks, batches and after hits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asked_twice import answered, outputs, small
from families.case import build
from families.registry import DIVIDED
from group_in_threads import ranks_are_threads
from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly import rank_process
from pagewood.engine.build import build_engine
from pagewood.engine.core.observe.expert_load import ExpertLoad
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.expert_division import expert_layers
from seeded_faults import seed_fault

BY_REQUEST = ("qwen3-moe", "deepseek3")
FEW = ("olmo2", "qwen3-moe")
MIXTURES = [
    name for name, case in DIVIDED.items()
    if any(kind in case.kind for kind in ("Moe", "Mixtral", "GptOss", "Llama4", "DeepseekV", "MiniMax"))
    and "dense" not in name and case.extra.get("num_local_experts") != 0
]  # fmt: skip
TWO_BY_REQUEST: dict[str, Any] = {"tensor_parallel_size": 2, "enable_dp_attention": True}
PARAMETERS = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in DIVIDED]


@pytest.mark.parametrize("name", PARAMETERS)
def test_tokens_are_those_of_one_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ranks and with four, some of which have copies of KV heads."""
    build(DIVIDED[name], tmp_path)
    ranks_are_threads(monkeypatch)
    expected = answered(small(tmp_path))
    assert answered(small(tmp_path, tensor_parallel_size=2)) == expected
    if name not in FEW:
        assert answered(small(tmp_path, tensor_parallel_size=4, num_threads=4)) == expected


@pytest.mark.parametrize("name", [name if name in BY_REQUEST else pytest.param(name, marks=pytest.mark.slow)
                                  for name in DIVIDED])  # fmt: skip
def test_attention_by_request(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks has the whole attention, and pages of its own."""
    build(DIVIDED[name], tmp_path)
    ranks_are_threads(monkeypatch)
    assert answered(small(tmp_path, **TWO_BY_REQUEST)) == answered(small(tmp_path))


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_by_request_with_whole_experts(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents in eight bits; with four ranks some have no row."""
    build(DIVIDED["deepseek3"], tmp_path)
    ranks_are_threads(monkeypatch)
    whole: dict[str, Any] = {"num_threads": 4, "kv_cache_dtype": "int8"}
    ranks = {"tensor_parallel_size": count, "enable_dp_attention": True, "expert_parallel": True}
    found = answered(small(tmp_path, expert_map=mapping(tmp_path, count), **whole, **ranks))
    assert found == answered(small(tmp_path, **whole))


def mapping(folder: Path, count: int) -> str:
    """Return a map that turns the ranks of experts around, with a copy of the first one of each layer on all."""
    layers: dict[int, list[object]] = {}
    for layer, experts in expert_layers(ModelConfig.from_folder(folder)).items():
        layers[layer] = [list(range(count)), *((-one) % count for one in range(1, experts.router.num_experts))]
    file = folder / "experts.json"
    file.write_text(json.dumps({"layers": layers}))
    return str(file)


@pytest.mark.parametrize("name", [name if name == "qwen3-moe" else pytest.param(name, marks=pytest.mark.slow)
                                  for name in MIXTURES])  # fmt: skip
def test_ranks_with_whole_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are counted, and in a process without ranks the same ones by expert."""
    build(DIVIDED[name], tmp_path)
    ranks_are_threads(monkeypatch)
    found: list[list[list[int]]] = []
    loads: list[ExpertLoad] = []
    for count in (1, 2):
        config = small(
            tmp_path, tensor_parallel_size=count, expert_load="experts", expert_parallel=count > 1,
            expert_map=mapping(tmp_path, count) if count > 1 else None,
        )  # fmt: skip
        inbox, outbox = MemoryInbox(), MemoryOutbox()
        engine = build_engine(config, inbox=inbox, outbox=outbox)
        engine.measure()
        found.append(outputs(engine, inbox, outbox))
        measurement = engine.measurement()
        assert measurement is not None
        assert measurement.experts is not None
        loads.append(measurement.experts)
    assert found[1] == found[0]
    assert loads[1].rows == loads[0].rows
    assert loads[0].rank_rows == ()
    assert sum(loads[1].rank_rows) == sum(map(sum, loads[0].rows.values())) > 0
    assert min(loads[1].rank_rows) > 0
    assert loads[1].expert_imbalance == loads[0].expert_imbalance > 1
    assert loads[1].rank_imbalance >= 1


def test_options_of_experts_are_refused_for_a_model_without() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"expert_load": "ranks"}, r"expert_load must be off for a model without experts \(.*\), got ranks"),
        ({"expert_parallel": True, "tensor_parallel_size": 2}, "expert_parallel must be False for a model without"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            build_engine(EngineConfig(num_threads=2, **options), inbox=MemoryInbox(), outbox=MemoryOutbox())


def test_a_rank_that_reads_another_map_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(DIVIDED["qwen3-moe"], tmp_path)
    ranks_are_threads(monkeypatch)
    seed_fault([(rank_process, "_runner", "division=rank.division", "division=' by expert 0'")], monkeypatch)
    config = EngineConfig(
        model=str(tmp_path), num_threads=2, tensor_parallel_size=2, expert_parallel=True, max_total_tokens=1024
    )
    with pytest.raises(ValueError, match="expert_map must say the same on all ranks"):
        build_engine(config, inbox=MemoryInbox(), outbox=MemoryOutbox())


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_with_whole_experts(count: int, tmp_path: Path) -> None:
    """Real ones, with int8 weights, which all ranks keep in the cache folder in files of their own."""
    build(DIVIDED["deepseek3"], tmp_path)
    found: list[list[list[int]]] = []
    for turn in range(3):
        ranks: dict[str, Any] = {} if not turn else {"tensor_parallel_size": count, "expert_parallel": True}
        more: dict[str, Any] = {"expert_map": mapping(tmp_path, count) if turn else None, **ranks}
        found.append(answered(small(tmp_path, num_threads=4, weights="int8" if turn == 2 else "auto", **more)))
    assert found[1] == found[0]
    assert all(len(tokens) == 8 for tokens in found[2])
