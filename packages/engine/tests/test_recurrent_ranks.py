"""Models with recurrent layers on ranks and in stages of the CPU: the tokens of one process, with the same hits.

Ranks are threads here but for one test. The faults in `FAULTS` are seeded one at a time, and each is found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from families.case import build
from families.registry import CASES, RECURRENT, deep
from group_in_threads import ranks_are_threads
from node_threads import over_nodes
from pagewood.engine.api import EngineConfig
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts import channel_delta, gated_delta, short_convolution, state_space
from pagewood.engine.models.shard import Shard
from pagewood.engine.runner.cpu.program.division import RequestDivision
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.ranks import following as following_ranks
from pressed import found, say_the_same
from seeded_faults import Edit, seed_fault

FEW = ("granite4-groups", "qwen3-next")
"""Ranks that share a group, and heads of keys."""
STAGED = (
    "lfm2-biases", "granite4-states", "granite4-groups", "granite4-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe",
    "mamba2",
)  # fmt: skip
BY_REQUEST: dict[str, Any] = {
    "tensor_parallel_size": 2, "enable_dp_attention": True, "max_running": 4, "max_total_tokens": 160,
    "state_places": 10,
}  # fmt: skip


def can_be_divided(folder: Path, count: int) -> bool:
    """Return whether a model has the heads for this many ranks."""
    try:
        ModelConfig.from_folder(folder).for_shard(Shard(0, count))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "name", [one if one in FEW else pytest.param(one, marks=pytest.mark.slow) for one in RECURRENT]
)
def test_ranks_have_the_tokens_of_one_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have heads or channels of the recurrence; four have copies of what there is less of."""
    build(CASES[name], tmp_path)
    ranks_are_threads(monkeypatch)
    expected = found(tmp_path)
    assert sum(one.num_cached for one in expected) > 0
    if name not in FEW:
        assert found(tmp_path, tensor_parallel_size=2) == expected
    if name in FEW or can_be_divided(tmp_path, 4):
        assert found(tmp_path, tensor_parallel_size=4) == expected


@pytest.mark.parametrize(
    "name",
    ["lfm2", *(pytest.param(one, marks=pytest.mark.slow) for one in STAGED)],
)
def test_stages_have_the_tokens_of_one_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the states of its own layers."""
    build(deep(name), tmp_path)
    ranks_are_threads(monkeypatch)
    expected = found(tmp_path)
    stages: dict[str, Any] = {"pipeline_parallel_size": 2}
    assert say_the_same(found(tmp_path, **stages), expected)
    if name == "lfm2":
        return
    others: list[dict[str, Any]] = [{"overlap": True}, {"tensor_parallel_size": 2}]
    for options in others:
        assert say_the_same(found(tmp_path, **stages, **options), expected)


@pytest.mark.parametrize(
    "name", [one if one == "qwen3-next" else pytest.param(one, marks=pytest.mark.slow) for one in RECURRENT]
)
def test_ranks_divide_states_by_request(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has whole recurrent layers, and the states of its own requests."""
    build(CASES[name], tmp_path)
    ranks_are_threads(monkeypatch)
    two = found(tmp_path, **BY_REQUEST)
    assert say_the_same(two, found(tmp_path))
    assert sum(one.num_cached for one in two) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["rfff", "rrff"])
def test_a_stage_may_have_no_recurrent_layer(kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(deep("qwen3.5", kinds), tmp_path)
    ranks_are_threads(monkeypatch)
    expected = found(tmp_path)
    assert say_the_same(found(tmp_path, pipeline_parallel_size=2), expected)


@pytest.mark.slow
def test_hosts_and_processes_have_the_tokens_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(deep("granite4-moe"), tmp_path)
    expected = found(tmp_path)
    assert found(tmp_path, tensor_parallel_size=2) == expected
    assert say_the_same(found(tmp_path, **BY_REQUEST), expected)
    ranks_are_threads(monkeypatch)
    config = over_nodes(2, EngineConfig(num_threads=2, tensor_parallel_size=2))
    hosts: dict[str, Any] = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": config.master_addr}
    assert found(tmp_path, **hosts) == expected
    assert say_the_same(found(tmp_path, **{**hosts, **BY_REQUEST}), expected)


_ROWS = "found.append(np.arange(start + units.start * size, start + units.stop * size))"
_OTHER_ROWS = "found.append(np.arange(start, start + len(units) * size))"
FAULTS: dict[str, tuple[str, Edit]] = {
    "a rank has the rows of the first one": ("qwen3-next", (gated_delta, "rows_of", _ROWS, _OTHER_ROWS)),
    "a norm takes its own part for all": (
        "granite4-states", (CPUOps, "norm_groups", "num_squares=size", "num_squares=x.size")
    ),
    "a norm adds squares of another group": (
        "granite4-groups", (CPUOps, "norm_groups", "one == shared.number", "True")
    ),
    "a rank has channels of the first one": ("lfm2", (short_convolution, "rows_of", _ROWS, _OTHER_ROWS)),
    "a rank has heads of the first one": ("granite4-groups", (state_space, "rows_of", _ROWS, _OTHER_ROWS)),
    "a rank has gates of the first one": ("kimi-linear", (channel_delta, "rows_of", _ROWS, _OTHER_ROWS)),
    "a rank leaves states in other places": (
        "lfm2", (following_ranks, "_follow", "segment.launched[rank, 0] = number",
                 "segment.launched[rank, 0] = number; batch.states[:, 1] ^= batch.state_copies.size > 0"),
    ),
    "ranks by request share places": (
        "lfm2", (RequestDivision, "over", "num_states=num_states", "num_states=max(1, num_states // 3)")
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, edit = FAULTS[name]
    build(CASES[case], tmp_path)
    ranks_are_threads(monkeypatch)
    expected = found(tmp_path)
    seed_fault([edit], monkeypatch)
    options: dict[str, Any] = BY_REQUEST if "by request" in name else {"tensor_parallel_size": 4}
    assert not say_the_same(found(tmp_path, **options), expected)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen3.5", {"tensor_parallel_size": 4}, "linear_num_value_heads must be a multiple of .* 4, got 2"),
        ("granite4-states", {"tensor_parallel_size": 3}, "mamba_n_heads must be a multiple of .* 3, got 4"),
        ("kimi-linear", {"tensor_parallel_size": 3}, "linear_attn_config must be a multiple of .* 3, got 4"),
        ("lfm2", {"tensor_parallel_size": 3}, "hidden_size must be a multiple of tensor_parallel_size 3, got 64"),
        ("lfm2", {"pipeline_parallel_size": 2}, "pipeline_parallel_size must be at most 1, the number of layers with"),
        ("lfm2", BY_REQUEST | {"state_places": 3}, "state_places of each rank must be at least .* 2, got 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(name: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    build(CASES[name], tmp_path)
    with pytest.raises(ValueError, match=message):
        found(tmp_path, num_threads=4, **options)


def test_states_are_divided_by_heads_and_channels(tmp_path: Path) -> None:
    for name, parts in (("granite4-groups", 4), ("qwen3-next", 4), ("lfm2", 4), ("kimi-linear", 4)):
        build(CASES[name], tmp_path / name)
        model = ModelConfig.from_folder(tmp_path / name)
        whole, own = model.states, model.for_shard(Shard(1, parts)).states
        assert whole is not None
        assert own is not None
        for array, part in zip(whole.arrays, own.arrays, strict=True):
            if array.name == "matrices":
                assert parts * part.shape[0] == array.shape[0]
