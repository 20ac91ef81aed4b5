"""Every family in a whole engine with everything else at once, against one request at a time without any of it.

The load has prompts that begin alike, more of them than fit in memory, in chunks; grammars; penalties; log
probabilities of answers and prompts; vectors; requests that are aborted. It is served plainly, with drafts from the
text, with those of a draft model, with those of the checkpoint's own layer, and over int8 memory; with overlap and
without. Tokens, log probabilities and vectors are those of the plain run, to the bit (a mean of states is rounded once
a chunk). So what `test_parity.py` compares with `transformers` holds for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from families.case import build
from families.changed import disturbed, with_next_prediction, with_prediction
from families.registry import CASES, RECURRENT
from speculating import Drafter, Report, mixed_load, plain_engines, run

FEW = ("gemma4-small", "llama4", "gpt-oss", "deepseek3", "lfm2", "qwen3-next")
"""Two sizes of heads and KV of earlier layers; attention within chunks; sinks and experts; latents; states."""
PREDICTING = ("deepseek3", "deepseek3-dense", "deepseek32", "glm4-moe", "glm4-lite")
"""Families whose checkpoints may have a layer for multi-token prediction, in the naming of DeepSeek and GLM."""
NEXT_PREDICTING = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "qwen3.5-vl", "qwen3.5-vl-moe")
"""Those in the naming of Qwen."""


def marked(names: Any) -> list[Any]:
    """Return the names, most of them as slow tests."""
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(autouse=True)
def oracles() -> Iterator[None]:
    """Close the plain engines of a model when its test ends."""
    with plain_engines():
        yield


def served(
    folder: Path, kind: str, *, seed: int = 0, overlap: bool = True, temperature: float = 0.8, **options: Any
) -> Report:
    """Serve the load; `kind` says what drafts: off, ngram, draft or prediction."""
    match kind:
        case "off":
            drafter = None
        case "draft":
            drafter = Drafter(kind="draft", folder=folder.parent / "draft")
        case "prediction":
            drafter = Drafter(kind="eagle")
        case _:
            drafter = Drafter(kind=kind)
    load = mixed_load(seed, temperature=temperature, overlap=overlap)
    return run(load, model=folder, drafter=drafter, num_threads=1, **options)


@pytest.mark.parametrize("name", marked(CASES))
def test_everything_at_once(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build(CASES[name], folder)
    if name in RECURRENT:
        build(CASES["llama"], tmp_path / "draft")  # a draft model must have no recurrent layers
        loads: list[tuple[str, dict[str, Any]]] = [
            ("off", {}), ("ngram", {"overlap": False}), ("ngram", {"kv_cache_dtype": "int8"}),
            ("draft", {"state_places": 5}),
        ]  # fmt: skip
        found = [served(folder, kind, seed=seed, **load) for seed, (kind, load) in enumerate(loads)]
        assert sum(report.num_cached_tokens for report in found) > 0, [report.num_cached_tokens for report in found]
        assert all(report.num_aborted for report in found)
        assert sum(report.num_preempted for report in found) > 0
        assert sum(report.counts.num_drafted - report.counts.num_accepted for report in found[1:]) > 20
        return
    disturbed(folder, tmp_path / "draft")
    reports = {
        "plain": served(folder, "off"),
        "text": served(folder, "ngram", seed=1, overlap=False),
        "draft": served(folder, "draft", seed=2),
        "int8": served(folder, "ngram", seed=3, kv_cache_dtype="int8"),
    }
    assert all(report.num_cached_tokens for report in reports.values())
    assert all(report.num_aborted for report in reports.values())
    assert sum(report.num_preempted for report in reports.values()) > 0
    assert reports["text"].counts.num_drafted + reports["int8"].counts.num_drafted > 0
    assert reports["draft"].counts.num_accepted > 10


@pytest.mark.parametrize("name", marked((*PREDICTING, *NEXT_PREDICTING)))
def test_the_layer_that_predicts_changes_no_answer(name: str, tmp_path: Path) -> None:
    build(CASES[name], tmp_path / "plain")
    add = with_next_prediction if name in NEXT_PREDICTING else with_prediction
    folder = add(tmp_path / "plain", tmp_path / "model")
    for seed in range(2):
        report = served(folder, "prediction", seed=seed, overlap=seed == 0)
        assert report.num_preempted > 0
        assert report.counts.num_accepted > 0
    if name in NEXT_PREDICTING:  # rejection sampling keeps greedy texts only
        report = served(folder, "prediction", seed=2, temperature=0.0, speculative_verify="rejection")
        assert report.counts.num_accepted > 0
        assert served(folder, "prediction", seed=3, control="adaptive").num_preempted > 0
        assert served(folder, "suffix", seed=4, control="adaptive").num_preempted > 0
