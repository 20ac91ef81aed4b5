"""Adapters beside draft models and heads on a CUDA device, without a GPU: the model alone drafts, for all requests."""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from adapter_bench import Bench
from adapter_folders import write_adapter
from noted_drafts import Notes, check_alike, drafts_noted
from pagewood.engine.api import SamplingParams
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.runner.cuda.adapters import CUDAAdapters
from seeded_faults import seed_fault
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice
from tiny_models import head_folder, model_folder

pytestmark = pytest.mark.usefixtures("small_buffers")

PROMPTS = [np.random.default_rng(seed).integers(0, 48, 12 + 7 * seed).tolist() for seed in range(3)]
KINDS = ("eagle", "mtp", "draft")
Answers = dict[str, list[int]]


def answered(folder: Path, names: tuple[str | None, ...], **options: Any) -> tuple[Answers, Notes]:
    """Compute all prompts with adapters of these names at once; return the tokens, and drafts without one."""
    build = partial(build_on, RecordingDevice(), flashinfer_torch)
    small: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_running": 8, "max_adapter_rank": 8}
    with pytest.MonkeyPatch.context() as patch:
        notes = drafts_noted(patch)
        own = Bench(folder, build=build, adapters=[name for name in names if name is not None], **small, **options)
        for number, prompt in enumerate(PROMPTS):
            for name in names:
                sampling = SamplingParams(
                    max_tokens=20, temperature=0.0, ignore_eos=True, seed=2 * number + (name is not None)
                )
                own.ask(f"{name} {number}", prompt, name, sampling=sampling)
        own.run(*(f"{name} {number}" for number in range(len(PROMPTS)) for name in names))
        own.engine.close()
    return own.outputs, {key: drafts for key, drafts in notes.items() if key[0] % 2 == 0}


def check(kind: str, folder: Path) -> None:
    """Compare answers with those without drafts, and drafts with those of requests without adapters."""
    architecture = "glm4-moe" if kind == "mtp" else "llama"
    shutil.copytree(model_folder(architecture, has_mtp=kind == "mtp"), folder)
    reference = AutoModelForCausalLM.from_pretrained(model_folder(architecture))
    modules = ["q_proj", "v_proj", "o_proj", "embed_tokens", "lm_head"]
    write_adapter(reference, folder / "a", seed=3, r=4, target_modules=modules)
    drafts: dict[str, Any] = {"speculative": "draft" if kind == "draft" else "eagle"}
    drafts |= {"speculative_control": "fixed", "speculative_num_tokens": 3}
    if kind != "mtp":
        drafter = model_folder("llama", seed=2) if kind == "draft" else head_folder("llama")
        drafts["speculative_model"] = str(drafter)
    plain, _ = answered(folder, (None, "a"))
    mixed, notes = answered(folder, (None, "a"), **drafts)
    assert mixed == plain
    assert all(plain[f"a {number}"] != plain[f"None {number}"] for number in range(len(PROMPTS)))
    alone, others = answered(folder, (None,), **drafts)
    assert alone == {name: tokens for name, tokens in plain.items() if name.startswith("None")}
    check_alike(notes, others)


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_the_model_alone_drafts(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path / "model")


def test_a_head_with_the_adapters_of_a_step_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault([(CUDAAdapters, "left_out", "return _WithoutAdapters(linear, self)", "return linear")], monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check("mtp", tmp_path / "model")
