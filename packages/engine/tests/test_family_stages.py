"""Every family in stages of the CPU: its tokens are those of one process, in chunks, batches and after hits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asked_twice import answered, small
from families.case import build
from families.registry import DIVIDED
from group_in_threads import ranks_are_threads
from pagewood.engine.api import EngineConfig
from pagewood.engine.models.config import ModelConfig
from random_traffic import check_alike

FEW = ("gemma4-small", "olmo2")
PARAMETERS = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in DIVIDED]


def in_stages(folder: Path, num_stages: int, *, num_ranks: int = 1, expert_parallel: bool = False) -> list[list[int]]:
    """Return what an engine answers."""
    return answered(
        small(
            folder, num_threads=num_stages * num_ranks, pipeline_parallel_size=num_stages,
            tensor_parallel_size=num_ranks, expert_parallel=expert_parallel,
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_tokens_are_those_of_one_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two stages, with as many as the model allows up to four, and with two of two ranks."""
    build(DIVIDED[name], tmp_path)
    ranks_are_threads(monkeypatch)
    expected = in_stages(tmp_path, 1)
    most = min(4, 1 + len(ModelConfig.from_folder(tmp_path).cuts))
    assert most > 1
    assert in_stages(tmp_path, 2) == expected
    if name in FEW:
        return
    if most > 2:
        assert in_stages(tmp_path, most) == expected
    assert in_stages(tmp_path, 2, num_ranks=2) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek3"])
def test_stages_of_ranks_with_whole_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(DIVIDED[name], tmp_path)
    ranks_are_threads(monkeypatch)
    assert in_stages(tmp_path, 2, num_ranks=2, expert_parallel=True) == in_stages(tmp_path, 1)


DEEP = replace(DIVIDED["qwen3"], extra={**DIVIDED["qwen3"].extra, "num_hidden_layers": 5, "layer_types": None})
"""A model of five layers."""


@pytest.mark.parametrize(
    ("num_stages", "num_ranks", "seeds", "options"),
    [
        (2, 1, range(2, 3), {}),
        *(
            pytest.param(num_stages, num_ranks, seeds, options, marks=pytest.mark.slow)
            for num_stages, num_ranks, seeds, options in [
                (2, 1, range(5), {}), (3, 1, range(5), {}), (2, 2, range(5), {}), (4, 1, range(5), {}),
                (4, 1, range(5, 10), {"overlap": True}), (2, 2, range(5, 10), {"overlap": True}),
                (4, 1, range(10, 13), {"speculative": "suffix", "speculative_control": "fixed"}),
                (2, 2, range(10, 13), {"speculative": "suffix", "speculative_control": "fixed"}),
                (4, 1, range(13, 16), {"host_cache_gb": 0.0002}), (2, 2, range(13, 16), {"host_cache_gb": 0.0002}),
            ]
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("are_processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_random_traffic_with_chunks_preemption_and_aborts(
    num_stages: int, num_ranks: int, seeds: range, options: dict[str, Any], are_processes: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    build(DEEP if num_stages > 3 else DIVIDED["qwen3"], tmp_path)
    if not are_processes:
        ranks_are_threads(monkeypatch)
    small = EngineConfig(
        model=str(tmp_path), num_threads=num_stages * num_ranks, pipeline_parallel_size=num_stages,
        tensor_parallel_size=num_ranks, max_running=6, chunked_prefill_size=8, page_size=4, max_total_tokens=160,
        max_length=80, schedule_conservativeness=0.05, **options,
    )  # fmt: skip
    whole = EngineConfig(model=str(tmp_path), num_threads=1, max_running=6, page_size=4, max_total_tokens=2048)
    assert sum(check_alike(whole, small, seed) for seed in seeds) > 0
