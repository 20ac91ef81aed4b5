"""Adapters of experts and of recurrent layers on a CUDA device, without a GPU: against PEFT, and against the CPU.

`test_adapters_cuda.py` compares the kernels, in their interpreter.
"""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

import quantised_folders
from adapter_bench import PROMPTS, Bench, check_scores, config_of
from adapter_folders import References, write_adapters, write_mixture
from cuda_ranks import use_stand_ins
from families.case import build
from families.registry import CASES
from group_in_threads import ranks_are_threads
from pagewood.engine.adapters import peft_folder
from pagewood.engine.api import EngineConfig, LoadAdapter
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.model_folder.adapter_modules import model_modules
from pagewood.engine.runner.cuda.adapters import AdaptedExperts, CUDAAdapters
from pagewood.engine.runner.cuda.low_rank import TorchLowRank
from seeded_faults import Edit, seed_fault, slow_ones
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice

pytestmark = pytest.mark.usefixtures("small_buffers")

SMALL: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_running": 6, "max_adapter_rank": 8, "max_adapter_expert_rank": 8,
}  # fmt: skip
BY_REQUEST = {"tensor_parallel_size": 2, "enable_dp_attention": True}
FAMILIES = (
    "gpt-oss", "mixtral", "qwen3-moe", "granite-moe", "llama4", "qwen2-moe", "olmoe", "gemma4-experts", "granite4",
    "granite-moe-shared", "glm4-moe", "ernie4.5-moe", "minimax-m2", "deepseek3",
)  # fmt: skip
"""Those with experts; the first one has biases, and rows of both projections that take turns."""
RECURRENT = ("qwen3-next", "granite4-moe", "lfm2-moe", "nemotron-h-moe", "olmo-hybrid", "falcon-h1", "kimi-linear")
"""Those with recurrent layers, most of them with experts too."""


def bench(folder: Path, device: RecordingDevice | None = None, **fields: Any) -> Bench:
    built = partial(build_on, device or RecordingDevice(), flashinfer_torch)
    return Bench(folder, build=built, **{**SMALL, "adapters": "abc", **fields})


def tokens(bench: Bench) -> dict[str, list[int]]:
    """Return greedy tokens of all prompts, with each adapter and without."""
    keys = {
        f"{name} {number}": (name, prompt) for name, (number, prompt) in product([None, *"abc"], enumerate(PROMPTS))
    }
    for key, (name, prompt) in keys.items():
        bench.ask(key, prompt, name)
    bench.run(*keys)
    bench.engine.close()
    return {key: bench.outputs[key] for key in keys}


@pytest.mark.parametrize("name", slow_ones(FAMILIES + RECURRENT, *FAMILIES[1:], *RECURRENT))
def test_every_family_computes_what_peft_does_and_the_cpu(name: str, tmp_path: Path) -> None:
    """Slots change while steps are in flight, prefixes are cached, requests preempted; nothing waits for the device."""
    references, device = write_mixture(tmp_path, name), RecordingDevice()
    more: dict[str, Any] = {"chunked_prefill_size": 16, "max_total_tokens": 256, "max_length": 128, "page_size": 4}
    own = bench(tmp_path, device, cuda_graph=name == FAMILIES[0], **more)
    device.waits.clear()
    with device.watching():
        for turn in range(2):
            check_scores(own, references, turn=turn)
    assert set(device.waits) <= {"event.synchronize"}
    assert tokens(own) == tokens(Bench(tmp_path, adapters="abc", max_adapter_rank=8))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, References]:
    folder = tmp_path_factory.mktemp("mixture")
    return folder, write_mixture(folder, "gpt-oss")


def check_slots(mixture: tuple[Path, References], **fields: Any) -> None:
    """Use two slots for three adapters, and load another one under a name in use."""
    folder, references = mixture
    own = bench(folder, cuda_graph=False, **fields)
    check_scores(own, references)
    own.ask("before", PROMPTS[0], "a")
    for _ in range(3):
        own.step()
    own.inbox.put(LoadAdapter(request_id="load", name="a", folder=str(folder / "c"), replaces=True))
    own.run("before", "load")
    check_scores(own, {**references, "a": references["c"]}, turn=1)
    plain = Bench(folder, adapters="a", max_adapter_rank=8)
    plain.ask("before", PROMPTS[0], "a")
    plain.run("before")
    assert own.outputs["before"] == plain.outputs["before"]
    own.engine.close()


FAULTS: dict[str, Edit] = {
    "A and B of another expert": (CUDAAdapters, "pairs", "torch.add(chosen,", "torch.add(chosen.flip(1),"),
    "the slot of another row": (
        CUDAAdapters, "pairs", "slots = self._of_experts[count]", "slots = self._of_experts[count].flip(0)",
    ),
    "all slots have the matrices of the first": (
        CUDAAdapters, "_fill", "slice(slot * site.num_experts, (slot + 1) * site.num_experts)",
        "slice(site.num_experts)",
    ),
    "no scale": (peft_folder._Reader, "_of_experts", "b = scale *", "b ="),
    "a slot keeps the adapter before": (CUDAAdapters, "admit", "is not self._known[number]", "is None"),
    "a slot keeps the experts of the adapter before": (
        CUDAAdapters, "_fill", "slot if packed.changes_experts else self._num_slots", "slot",
    ),
    "an adapter has what the one before has elsewhere": (CUDAAdapters, "_fill", "a.zero_()", ""),
    "both projections have A of the first": (CUDAAdapters, "_fill", "number * rank", "0"),
    "the second product is left out": (AdaptedExperts, "to_second", "adapt(", "id("),
}  # fmt: skip


@pytest.mark.parametrize("fault", slow_ones(["none", *FAULTS], "none", *list(FAULTS)[1:]))
def test_slots_and_faults_that_are_found(
    fault: str, mixture: tuple[Path, References], monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "none":
        check_slots(mixture)
        return
    seed_fault([FAULTS[fault]], monkeypatch)
    with pytest.raises((AssertionError, TypeError)):
        check_slots(mixture)


DIVISIONS: dict[str, dict[str, Any]] = {
    "experts": {"tensor_parallel_size": 2, "expert_parallel": True},
    "parts of experts": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "experts, attention by request": {**BY_REQUEST, "expert_parallel": True},
    "parts of experts, attention by request": BY_REQUEST,
}


@pytest.mark.parametrize("kind", slow_ones(DIVISIONS, *list(DIVISIONS)[1:]))
def test_ranks_have_their_parts(kind: str, mixture: tuple[Path, References], monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    check_slots(mixture, num_threads=4, **DIVISIONS[kind])


@pytest.mark.slow
def test_latents_by_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    check_slots((tmp_path, write_mixture(tmp_path, "deepseek3")), num_threads=4, **BY_REQUEST, expert_parallel=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "gptq"])
def test_experts_in_codes(kind: str, tmp_path: Path) -> None:
    sizes = {"intermediate_size": 96, "moe_intermediate_size": 64, "head_dim": 64}
    build(replace(CASES["qwen3-moe"], extra={**CASES["qwen3-moe"].extra, **sizes}), tmp_path)
    plain: Any = transformers.AutoConfig.from_pretrained(tmp_path)
    if kind == "gptq":
        config, make = (
            {"quant_method": "gptq", "bits": 4, "group_size": 32},
            quantised_folders.gptq(num_bits=4, group=32),
        )
    else:
        config = {"quant_method": "fp8", "weight_block_size": [48, 32]}
        make = quantised_folders.float8_blocks(high=48, wide=32, scale=".weight_scale_inv")
    weights = quantised_folders.quantise(tmp_path, make, config)
    plain.save_pretrained(tmp_path / "read")
    save_file(weights, tmp_path / "read" / "model.safetensors")
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "read", dtype=torch.float32, attn_implementation="eager"
    )
    references = write_adapters(tmp_path, "qwen3-moe", reference)
    own = bench(tmp_path)
    check_scores(own, references, tolerance=5e-3)
    own.engine.close()


@pytest.mark.slow
def test_experts_named_one_by_one(tmp_path: Path) -> None:
    """Each with matrices of its own, some with none, and magnitudes (DoRA): the CPU computes the same."""
    write_mixture(tmp_path, "qwen3-moe")
    modules, random = model_modules(tmp_path), np.random.default_rng(1)
    found: dict[str, torch.Tensor] = {}
    for name, module in modules.modules.items():
        if ".experts." in name and random.random() < 0.7:
            for kind, *shape in (
                ("lora_A.weight", 4, module.inputs), ("lora_B.weight", module.outputs, 4),
                ("lora_magnitude_vector", module.outputs),
            ):  # fmt: skip
                numbers = torch.from_numpy(random.normal(0, 0.3, shape).astype(np.float32))
                found[f"base_model.model.{name}.{kind}"] = numbers.abs() + 1 if "vector" in kind else numbers
    save_file(found, tmp_path / "a" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    more = {"target_modules": ["gate_proj", "up_proj", "down_proj"], "r": 4, "use_dora": True}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**config, **more}))
    assert tokens(bench(tmp_path)) == tokens(Bench(tmp_path, adapters="abc", max_adapter_rank=8))


def test_what_slots_have_no_room_for_is_refused(mixture: tuple[Path, References]) -> None:
    for rank in (0, 2):
        message = rf"max_adapter_expert_rank must be at least [35] on CUDA.*, got {rank}; .*--merge-adapter"
        with pytest.raises(ValueError, match=message):
            bench(mixture[0], cuda_graph=False, max_adapter_expert_rank=rank)
    with pytest.raises(ValueError, match=r"max_adapter_expert_rank must be in \[0, 8\], up to max_adapter_rank, got 9"):
        config_of(mixture[0], **{**SMALL, "max_adapter_expert_rank": 9})
    message = "expert_kernels must be triton with max_adapter_expert_rank 8, because adapters add to each product, got"
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{**SMALL, "dtype": "auto", "expert_kernels": "flashinfer"})


def test_room_is_measured_and_slots_have_none_for_experts_unless_they_may_change(
    mixture: tuple[Path, References], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtures are then those of an engine without adapters."""
    found: dict[int, tuple[int, int]] = {}
    most_groups: list[int] = []
    arrange = TorchLowRank.arrange
    monkeypatch.setattr(
        TorchLowRank, "arrange", lambda own, groups, count: most_groups.append(count) or arrange(own, groups, count)
    )
    for rank in (0, 8):
        most_groups.clear()
        own = bench(mixture[0], adapters="b", cuda_graph=False, max_adapter_expert_rank=rank)
        found[rank] = len(most_groups), max(most_groups)
        if not rank:
            check_scores(own, {name: mixture[1][name] for name in (None, "b")})
        own.engine.close()
    assert found[0][1] == 2  # slots
    assert found[8][1] == 2 * 5  # and experts: in the largest step, as if all rows had adapters
    assert found[8][0] == found[0][0] + 3  # layers
