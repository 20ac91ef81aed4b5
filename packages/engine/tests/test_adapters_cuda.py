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

from adapter_bench import PROMPTS, Bench, Expected, check_scores, check_tokens, config_of, greedy_tokens, write_models
from adapter_folders import linear_names, write_adapter
from adapter_kinds import KINDS
from cuda_ranks import use_stand_ins
from families.case import Case, build
from group_in_threads import ranks_are_threads
from node_threads import following, over_nodes
from pagewood.engine.api import LoadAdapter
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.runner.cuda.adapters import CUDAAdapters
from seeded_faults import Edit, seed_fault, slow_ones
from stand_ins import flashinfer_torch
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
HEADS = {"head_dim": 64}
"""FlashInfer takes no smaller ones."""


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
    "an adapter begins at the first position": (CUDAAdapters, "begin", "positions >=", "positions * 0 >="),
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


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "num_nodes"),
    [(2, 1, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 2, 1), (2, 2, 1), (2, 1, 2)))],
)
def test_ranks_on_devices(
    num_ranks: int,
    num_stages: int,
    num_nodes: int,
    models: tuple[Path, Mapping[str | None, Any]],
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has its part, also of an adapter that is loaded later."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    folder = models[0]
    options = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages, "num_threads": 4}
    config = config_of(folder, adapters="bc", **SMALL, **options)
    config = config if num_nodes == 1 else over_nodes(num_nodes, config)
    with following(config) if num_nodes > 1 else nullcontext():
        own = bench(folder, RecordingDevice(), config=config)
        own.inbox.put(LoadAdapter(request_id="load", name="a", folder=str(folder / "a")))
        own.run("load")
        check_tokens(own, expected)
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
