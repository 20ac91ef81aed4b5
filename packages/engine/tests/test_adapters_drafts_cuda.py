"""Adapters beside draft models and heads on a CUDA device, without a GPU: the model alone drafts, for all requests."""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from adapter_bench import BUILDS, Bench
from adapter_folders import EXPERTS, write_adapter
from cuda_ranks import use_stand_ins
from group_in_threads import ranks_are_threads
from noted_drafts import Notes, check_alike, drafts_noted
from pagewood.engine.api import SamplingParams
from pagewood.engine.runner.cuda.adapters import CUDAAdapters
from seeded_faults import seed_fault
from tiny_models import head_folder, model_folder

pytestmark = pytest.mark.usefixtures("small_buffers")

PROMPTS = [np.random.default_rng(seed).integers(0, 48, 12 + 7 * seed).tolist() for seed in range(3)]
KINDS = ("eagle", "mtp", "draft")
Answers = dict[str, list[int]]


def answered(
    folder: Path, names: tuple[str | None, ...], *, device: str = "cuda", then: Path | None = None, **options: Any
) -> tuple[Answers, Notes]:
    """Compute all prompts with adapters of these names at once; return the tokens, and drafts without one.

    With the weights of the folder `then`, after the same prompts with those that it begins with.
    """
    build, small = BUILDS[device]
    options = {**small, "max_running": 8, **options}
    with pytest.MonkeyPatch.context() as patch:
        notes = drafts_noted(patch)
        own = Bench(folder, build=build, adapters=[name for name in names if name is not None], **options)
        for is_last in [False, True] if then else [True]:
            for number, prompt in enumerate(PROMPTS):
                for name in names:
                    sampling = SamplingParams(
                        max_tokens=20, temperature=0.0, ignore_eos=True, seed=2 * number + (name is not None)
                    )
                    own.ask(f"{name} {number}", prompt, name, sampling=sampling)
            own.run(*(f"{name} {number}" for number in range(len(PROMPTS)) for name in names))
            if then and not is_last:
                assert own.update("new", then) is None
                for found in (own.outputs, own.ends, notes):
                    found.clear()
        own.engine.close()
    return own.outputs, {key: drafts for key, drafts in notes.items() if key[0] % 2 == 0}


def write(kind: str, folder: Path, *, seed: int = 0, **fields: Any) -> dict[str, Any]:
    """Write a model with an adapter; return the options of drafts."""
    architecture = "glm4-moe" if kind == "mtp" else "llama"
    shutil.copytree(model_folder(architecture, seed=seed, has_mtp=kind == "mtp"), folder)
    reference = AutoModelForCausalLM.from_pretrained(model_folder(architecture))
    modules = ["q_proj", "v_proj", "o_proj", "embed_tokens", "lm_head"]
    write_adapter(reference, folder / "a", seed=3, r=4, target_modules=modules, **fields)
    drafts: dict[str, Any] = {"speculative": "draft" if kind == "draft" else "eagle"}
    drafts |= {"speculative_control": "fixed", "speculative_num_tokens": 3}
    if kind != "mtp":
        drafter = model_folder("llama", seed=2) if kind == "draft" else head_folder("llama")
        drafts["speculative_model"] = str(drafter)
    return drafts


def check(kind: str, folder: Path) -> None:
    """Compare answers with those without drafts, and drafts with those of requests without adapters."""
    drafts = write(kind, folder)
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", BUILDS)
def test_new_weights_under_adapters_with_drafts(device: str, kind: str, tmp_path: Path) -> None:
    """Answers are those of an engine with these weights, and drafts those of one without adapters."""
    experts: dict[str, Any] = {"target_parameters": EXPERTS} if kind == "mtp" else {}
    rank: dict[str, Any] = {"max_adapter_expert_rank": 8} if experts and device == "cuda" else {}
    write(kind, tmp_path / "new", seed=1, **experts)
    drafts = write(kind, tmp_path / "old", **experts)
    plain, _ = answered(tmp_path / "new", (None, "a"), device=device, **rank)
    found, notes = answered(tmp_path / "old", (None, "a"), device=device, then=tmp_path / "new", **drafts, **rank)
    assert found == plain
    if device == "cuda":
        _, others = answered(tmp_path / "new", (None,), device=device, **drafts)
        check_alike(notes, others)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_attention_by_request(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights that change, too."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    options: dict[str, Any] = {"tensor_parallel_size": 2, "enable_dp_attention": True, "num_threads": 4}
    write(kind, tmp_path / "new", seed=1)
    drafts = write(kind, tmp_path / "old")
    for then in (None, tmp_path / "new"):
        plain, _ = answered(then or tmp_path / "old", (None, "a"))
        assert answered(tmp_path / "old", (None, "a"), then=then, **drafts, **options)[0] == plain
