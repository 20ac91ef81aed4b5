"""Adapters on a CUDA device, without a GPU: on one that records waits, against PEFT; and kernels interpreted."""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from adapter_bench import (
    BUILDS,
    NAMES,
    PROMPTS,
    Bench,
    Expected,
    check_scores,
    check_tokens,
    config_of,
    greedy_tokens,
    write_models,
)  # fmt: skip
from adapter_folders import HEADS, linear_names, write_adapter
from adapter_kinds import KINDS
from cuda_ranks import pages_are_on_a_device, use_stand_ins
from families.case import Case, build
from group_in_threads import ranks_are_threads
from node_threads import following, over_nodes
from pagewood.engine.api import LoadAdapter
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.runner.cuda.adapters import CUDAAdapters
from pagewood.engine.runner.cuda.division import RequestDivision
from pagewood.engine.weight_commands import Sleep, WakeUp
from seeded_faults import Edit, seed_fault, slow_ones
from stand_ins import flashinfer_torch
from stand_ins.nccl_gloo import NCCLGroup
from stand_ins.recording_device import RecordingDevice

pytestmark = pytest.mark.usefixtures("small_buffers")

OPTIONS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "without graphs": {"cuda_graph": False},
    "batch-invariant, small chunks": {"batch_invariant": True, "chunked_prefill_size": 8, "max_running": 9},
    "drafts from the text": {"speculative": "ngram", "speculative_num_tokens": 4},
    "one slot": {"max_adapters": 1},
}  # fmt: skip
SMALL: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_running": 6, "max_adapter_rank": 8}
BY_REQUEST = {"tensor_parallel_size": 2, "enable_dp_attention": True}


def bench(folder: Path, device: RecordingDevice, **fields: Any) -> Bench:
    return Bench(folder, build=partial(build_on, device, flashinfer_torch), **{**SMALL, **fields})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str | None, Any]]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_models(folder, Case(kind="Qwen3", extra=HEADS))


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Mapping[str | None, Any]]) -> Expected:
    return greedy_tokens(models[1])


@pytest.mark.parametrize("kind", slow_ones(OPTIONS, *list(OPTIONS)[1:]))
def test_tokens_are_those_of_peft(kind: str, models: tuple[Path, Mapping[str | None, Any]], expected: Expected) -> None:
    """Slots change while steps are in flight, and nothing waits for the device."""
    device = RecordingDevice()
    own = bench(models[0], device, **OPTIONS[kind])
    device.waits.clear()
    with device.watching():
        check_tokens(own, expected)
    assert set(device.waits) <= {"event.synchronize"}
    own.engine.close()


def test_every_kind_computes_what_peft_does(tmp_path: Path) -> None:
    case = Case(kind="Llama", extra={"attention_bias": True, "mlp_bias": True, **HEADS})
    references: dict[str | None, Any] = {None: build(case, tmp_path)}
    for number, (kind, fields) in enumerate(KINDS.items()):
        whole = {"target_modules": linear_names(references[None]), **fields}
        references[kind] = write_adapter(copy.deepcopy(references[None]), tmp_path / kind, seed=number, **whole)
    own = bench(tmp_path, RecordingDevice(), adapters=list(KINDS), max_adapter_rank=128, cuda_graph=False)
    check_scores(own, references)
    own.engine.close()


def test_loading_while_requests_run(models: tuple[Path, Mapping[str | None, Any]], expected: Expected) -> None:
    folder = models[0]
    own = bench(folder, RecordingDevice(), adapters="a", max_adapters=1)
    own.ask("first", PROMPTS[0], "a")
    for _ in range(3):
        own.step()
    own.inbox.put(LoadAdapter(request_id="load", name="a", folder=str(folder / "b"), replaces=True))
    own.run("first", "load")
    own.ask("second", PROMPTS[0], "a")
    own.run("second")
    assert (own.outputs["first"], own.outputs["second"]) == (expected["a", 0], expected["b", 0])
    own.engine.close()


FAULTS: dict[str, Edit] = {
    "a slot keeps the adapter before": (CUDAAdapters, "admit", "is not self._known[number]", "is None"),
    "ranks that an adapter lacks stay": (CUDAAdapters, "_fill", "a.zero_()", ""),
    "an adapter begins at the first position": (CUDAAdapters, "begin", "sources - rows *", "0 * rows *"),
    "the last layer has the slots of other tokens": (CUDAAdapters, "narrow", "index_select(0, wanted)", "clone()"),
    "steps with few adapters have none": (CUDAAdapters, "admit", ">= 0).any()", ">= 0).all()"),
}  # fmt: skip


@pytest.mark.parametrize("fault", slow_ones(FAULTS, *list(FAULTS)[1:]))
def test_faults_are_found(
    fault: str,
    models: tuple[Path, Mapping[str | None, Any]],
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed_fault([FAULTS[fault]], monkeypatch)
    own = bench(models[0], RecordingDevice(), max_adapters=1, cuda_graph=False)
    with pytest.raises(AssertionError):
        check_tokens(own, expected)


DIVISIONS: dict[str, dict[str, Any]] = {
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "two stages of two ranks": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "two hosts": {"tensor_parallel_size": 2, "num_nodes": 2},
    **{f"by request, {kind}": {**BY_REQUEST, **fields} for kind, fields in OPTIONS.items()},
    "by request on two hosts": {**BY_REQUEST, "num_nodes": 2},
    "by request, a small pool": {
        **BY_REQUEST, "page_size": 4, "max_total_tokens": 160, "max_length": 64, "chunked_prefill_size": 16,
        "schedule_conservativeness": 0.05,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", slow_ones(DIVISIONS, *(DIVISIONS.keys() - {"by request, graphs"})))
def test_ranks_on_devices(
    kind: str,
    models: tuple[Path, Mapping[str | None, Any]],
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has its part, also of an adapter that is loaded later."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    if "graphs" in kind:
        monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCLGroup, raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    folder, device = models[0], RecordingDevice()
    options = {**SMALL, "num_threads": 4, **DIVISIONS[kind]}
    num_nodes = options.pop("num_nodes", 1)
    config = config_of(folder, adapters="bc", **options)
    config = config if num_nodes == 1 else over_nodes(num_nodes, config)
    with following(config) if num_nodes > 1 else nullcontext():
        own = bench(folder, device, config=config)
        own.inbox.put(LoadAdapter(request_id="load", name="a", folder=str(folder / "a")))
        own.run("load")
        check_tokens(own, expected)
        assert ("pool" in kind) <= (own.engine.counters().num_preempted > 0)
        assert (kind == "by request, graphs") <= (device.num_replayed > 0)
        own.engine.close()


@pytest.mark.parametrize("device", slow_ones(BUILDS, *BUILDS))
def test_by_request_prefixes_come_back_from_the_host_and_adapters_sleep(
    device: str,
    models: tuple[Path, Mapping[str | None, Any]],
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each prompt with each adapter, in pools that hold few of them; and then behind every kind of sleep."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    if device == "cuda":
        pages_are_on_a_device(monkeypatch)
    build, small = BUILDS[device]
    pool: dict[str, Any] = {"page_size": 4, "max_total_tokens": 128, "max_length": 64, "host_cache_gb": 0.02}
    own = Bench(models[0], build=build, num_threads=4, **{**small, **BY_REQUEST, **pool})
    sleeps: list[dict[str, Any]] = [
        {"tags": ("weights",)}, {"tags": ("kv_cache",)}, {"tags": ("weights", "kv_cache", "scheduling")},
    ]  # fmt: skip
    for turn in range(2 + len(sleeps)):
        if turn >= 2:
            assert own.tell(Sleep(request_id=f"sleep {turn}", **sleeps[turn - 2])) is None
            assert own.tell(WakeUp(request_id=f"wake {turn}")) is None
        for number in range(len(PROMPTS)):
            for name in NAMES:
                request_id = f"{turn} {name} {number}"
                own.ask(request_id, PROMPTS[number], name)
                own.run(request_id)
                assert own.outputs[request_id] == expected[name, number], request_id
                num_cached = own.ends[request_id].num_cached_tokens
                assert turn == 0 or num_cached >= len(PROMPTS[number]) - 4, request_id
    assert own.engine.violation() is None
    own.engine.close()


FAULTS_BY_REQUEST: dict[str, Edit] = {
    "a rank takes rows of another for its own": (
        CUDAAdapters, "begin", "division.own(every)", "every[: division.num_own]",
    ),
    "rows of all ranks lie in another order": (
        CUDAAdapters, "_of_all", "return self._every", "return self._every.flip(0)",
    ),
    "wanted rows of all ranks have one slot": (CUDAAdapters, "_of_all", ".gather_numbers(", ".gather_numbers(0 * "),
    "logits have the slots of other rows": (CUDAAdapters, "pick", "(0, gathered)", "(0, gathered.flip(0))"),
    "a rank knows the adapters of its requests only": (
        RequestDivision, "arrays", "adapter_slots=whole.adapter_slots,", "adapter_slots=whole.adapter_slots * 0 - 1,",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", slow_ones(["none", *FAULTS_BY_REQUEST], "none", *FAULTS_BY_REQUEST))
def test_faults_by_request_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at both ends of the model."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    references: dict[str | None, Any] = {None: build(Case(kind="Llama", extra=HEADS), tmp_path)}
    for seed, name in enumerate("ab"):
        fields = {"r": 4, "target_modules": ["embed_tokens", "lm_head", *linear_names(references[None])]}
        references[name] = write_adapter(copy.deepcopy(references[None]), tmp_path / name, seed=seed, **fields)
    if fault != "none":
        seed_fault([FAULTS_BY_REQUEST[fault]], monkeypatch)
    own = bench(tmp_path, RecordingDevice(), adapters="ab", num_threads=4, **BY_REQUEST)
    with nullcontext() if fault == "none" else pytest.raises(AssertionError):
        check_scores(own, references)
    own.engine.close()


INTERPRETED = """
import torch
from gpu_checks.adapters import compare_adapters, compare_experts

print(compare_adapters(torch.device("cpu"), [((70, 40, 24), 100, 32, 3), ((130,), 64, 16, 1)], [1, 9, 130]))
print(compare_experts(torch.device("cpu"), [(3, 24, 70, 2, 16, 2)], [1, 9]))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
def test_the_kernels_in_their_interpreter() -> None:
    """They compute what torch does, and a row has the same bits alone and beside others."""
    tools = str(Path(__file__).parents[3] / "tools")
    path = os.pathsep.join([tools, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Triton reads this when it is imported, so in a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True)
