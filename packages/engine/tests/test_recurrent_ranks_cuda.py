"""Models with recurrent layers on ranks and in stages of CUDA devices without a GPU: the answers of one device.

Ranks are threads, on stand-ins. `test_recurrent_ranks.py` has the same for CPUs. The faults in `FAULTS` are seeded one
at a time, and each is found.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from adapter_bench import Bench, check_scores
from adapter_folders import changeable, write_adapter
from cuda_ranks import small, use_stand_ins
from families.case import Case, build
from families.registry import CASES, deep
from group_in_threads import ranks_are_threads
from node_threads import over_nodes
from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.core.loop import Engine
from pagewood.engine.model_folder.adapter_modules import model_modules
from pagewood.engine.models.parts import gated_delta, short_convolution, state_space
from pagewood.engine.models.parts.channel_delta import ChannelDelta
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.cuda.state_memory import CUDAStates
from pagewood.engine.runner.ranks import following as following_ranks
from pressed import Answer, found, say_the_same
from random_traffic import check_alike
from seeded_faults import Edit, seed_fault, slow_ones
from stand_ins import flashinfer_torch
from stand_ins.nccl_gloo import NCCLGroup
from stand_ins.recording_device import RecordingDevice

pytestmark = pytest.mark.usefixtures("small_buffers")

RANKS: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
BOTH: dict[str, Any] = {**RANKS, **STAGES}
KIMI = replace(
    CASES["kimi-linear"],
    extra={
        **CASES["kimi-linear"].extra, "layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4,
    },
    file={
        **CASES["kimi-linear"].file,
        "linear_attn_config": {
            **CASES["kimi-linear"].file["linear_attn_config"], "full_attn_layers": [2, 4], "kda_layers": [1, 3],
        },
    },
)  # fmt: skip
DIVIDED = (
    "granite4-states", "granite4-groups", "qwen3-next", "lfm2", "falcon-h1", "falcon-h1-norm-last", "olmo-hybrid",
    "nemotron-h", "mamba2", "kimi-linear",
)  # fmt: skip
"""Mamba 2 whose ranks share a group, and with groups; a gated delta rule; a short convolution; Mamba 2 beside attention
without a norm, and with one; filters that are apart; layers without a mixer; Mamba 2 alone; and decays by channel."""
STAGED: dict[str, Case] = {
    "lfm2": deep("lfm2", "rrffrr"),
    "qwen3.5": deep("qwen3.5"),
    "granite4-groups": deep("granite4-groups"),
    "falcon-h1": CASES["falcon-h1"],
    "kimi-linear": KIMI,
    "mamba2": deep("mamba2"),
    "none in the second": deep("qwen3.5", "rrff"),
    "none in the first": deep("qwen3.5", "ffrf"),
}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines for CUDA, and their other ranks, use the stand-ins."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)


def made(config: EngineConfig, *, device: RecordingDevice | None = None, **links: Any) -> Engine:
    return build_on(device or RecordingDevice(), flashinfer_torch, config, **links)


def on_devices(folder: Path, *, device: RecordingDevice | None = None, **options: Any) -> list[Answer]:
    """Return what an engine on stand-ins answers."""
    return found(folder, build=partial(made, device=device), device="cuda", dtype="float32", **options)


@pytest.mark.parametrize("name", slow_ones(DIVIDED, *DIVIDED[1:]))
def test_ranks_answer_as_the_cpu(name: str, tmp_path: Path) -> None:
    """And so as one device, see `test_states_cuda`."""
    build(CASES[name], tmp_path)
    expected = found(tmp_path)
    assert sum(one.num_cached for one in expected) > 0
    assert on_devices(tmp_path, **RANKS) == expected
    if name in ("granite4-groups", "qwen3-next"):
        assert on_devices(tmp_path, tensor_parallel_size=4, batch_invariant=True, overlap=False) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGED)
def test_stages_answer_as_the_cpu(name: str, tmp_path: Path) -> None:
    """Each has the states of its own layers, if any are recurrent."""
    build(STAGED[name], tmp_path)
    expected = found(tmp_path)
    assert say_the_same(on_devices(tmp_path, **STAGES), expected)
    if name == "qwen3.5":
        assert on_devices(tmp_path) == expected
        for options in ({**STAGES, "overlap": True}, BOTH):
            assert say_the_same(on_devices(tmp_path, **options), expected)


@pytest.mark.parametrize("options", [STAGES, *(pytest.param(one, marks=pytest.mark.slow)
                                                    for one in (RANKS, BOTH))])  # fmt: skip
def test_ranks_with_a_device_each_have_graphs(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups of torch are stand-ins too, with the same methods."""
    build(deep("granite4-groups"), tmp_path)
    expected = found(tmp_path)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCLGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    device = RecordingDevice()
    assert say_the_same(on_devices(tmp_path, device=device, **options), expected)
    assert device.num_replayed > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [RANKS, STAGES])
def test_processes_answer_as_the_cpu(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(deep("qwen3.5"), tmp_path)
    use_stand_ins(monkeypatch)
    assert say_the_same(on_devices(tmp_path, **options), found(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("options", [RANKS, STAGES, BOTH])
def test_two_hosts_answer_as_one_device(options: dict[str, Any], tmp_path: Path) -> None:
    build(deep("qwen3.5"), tmp_path)
    expected = found(tmp_path)
    config = over_nodes(2, EngineConfig(device="cuda", **options))
    hosts: dict[str, Any] = {"nnodes": 2, "master_addr": config.master_addr}
    assert say_the_same(on_devices(tmp_path, **options, **hosts), expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [RANKS, STAGES, {**STAGES, "overlap": True}])
def test_random_traffic_has_the_tokens_of_one_device(options: dict[str, Any], tmp_path: Path) -> None:
    """Chunks, hits, preemption and aborts."""
    build(deep("granite4-groups"), tmp_path)
    few: dict[str, Any] = {
        "max_running": 6, "chunked_prefill_size": 8, "max_total_tokens": 160, "max_length": 80, "state_places": 9,
        "schedule_conservativeness": 0.05,
    }  # fmt: skip
    whole, ranked = small(tmp_path, max_running=6, max_total_tokens=2048), small(tmp_path, **few, **options)
    assert sum(check_alike(whole, ranked, seed, build=made) for seed in range(3)) > 0


_ROWS = "found.append(np.arange(start + units.start * size, start + units.stop * size))"
_OTHER_ROWS = "found.append(np.arange(start, start + len(units) * size))"
_BATCH = "assert isinstance(batch, Batch)"
FAULTS: dict[str, tuple[Case, dict[str, Any], Edit]] = {
    "a stage has the states of another layer": (
        STAGED["lfm2"], STAGES, (CUDAStates, "convolve", "self._places[layer]", "0 * self._places[layer]")
    ),
    "a rank forgets copies": (
        CASES["lfm2"], RANKS, (following_ranks, "_follow", _BATCH, f"{_BATCH}; batch.state_copies[:, 1] = 0")
    ),
    "the second stage keeps states of the position before": (
        STAGED["lfm2"], STAGES,
        (CUDARunner, "_launch", "slot = self._staging.take()",
         "batch.state_copies[:, 1] -= self._is_last; slot = self._staging.take()"),
    ),
    "a rank has heads of another one": (
        CASES["granite4-states"], RANKS, (state_space, "rows_of", _ROWS, _OTHER_ROWS)
    ),
    "a rank has rows of another one": (
        CASES["qwen3-next"], RANKS, (gated_delta, "rows_of", _ROWS, _OTHER_ROWS)
    ),
    "a rank has channels of another one": (
        CASES["lfm2"], RANKS, (short_convolution, "rows_of", _ROWS, _OTHER_ROWS)
    ),
    "a rank has decays of another one": (
        CASES["kimi-linear"], RANKS, (ChannelDelta, "__init__", "rates[numbers]", "rates[: len(numbers)]")
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, options, edit = FAULTS[name]
    build(case, tmp_path)
    expected = found(tmp_path)
    seed_fault([edit], monkeypatch)
    assert not say_the_same(on_devices(tmp_path, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [RANKS, STAGES], ids=["ranks", "stages"])
@pytest.mark.parametrize("name", ["qwen3.5", "granite4-groups", "lfm2", "kimi-linear"])
def test_adapters_of_recurrent_layers_compute_what_peft_does(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    reference = build(STAGED[name] if name == "kimi-linear" else deep(name), tmp_path)
    known = changeable(name, reference, model_modules(tmp_path))
    changed = write_adapter(copy.deepcopy(reference), tmp_path / "a", r=4, lora_alpha=6, **known)
    own: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_length": 128, "max_adapter_rank": 8}
    own |= {"max_adapter_expert_rank": 4} if name == "kimi-linear" else {}
    bench = Bench(tmp_path, build=made, adapters="a", num_threads=2, **own, **options)
    check_scores(bench, {None: reference, "a": changed})
    bench.engine.close()
