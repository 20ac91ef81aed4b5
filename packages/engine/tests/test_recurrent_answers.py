"""Several answers to a prompt, and beams, of models with recurrent layers: each goes on from a state that is shared."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from families.case import build
from families.registry import CASES
from pagewood.engine import LLM, BeamSearchParams
from pagewood.engine.api import SamplingParams
from pagewood.engine.model_folder.folder import model_folder as embedded_folder

SAMPLING = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=4, max_tokens=16, ignore_eos=True)
NAMES = ("granite4-groups", "qwen3-next", "lfm2", "kimi-linear", "mamba2")


@pytest.mark.parametrize(
    "name", [one if one == "qwen3-next" else pytest.param(one, marks=pytest.mark.slow) for one in NAMES]
)
def test_several_answers_and_beams_are_those_without_a_cache(name: str, tmp_path: Path) -> None:
    """Also with few places of states, and with memory for a few answers only."""
    build(CASES[name], tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):  # of other tokens, which are not read
        shutil.copy(embedded_folder(None) / file, tmp_path)
    prompts = [np.random.default_rng(seed).integers(3, 90, 21 + 9 * seed).tolist() for seed in range(3)]
    small = {"max_total_tokens": 160, "max_length": 100, "state_places": 10, "schedule_conservativeness": 0.05}
    ways: list[dict[str, Any]] = [{"prefix_cache": False}, {}, small]
    found: list[Any] = []
    for options in ways:
        whole = {"max_running": 8, "max_total_tokens": 4096, "page_size": 4, **options}
        with LLM(tmp_path, num_threads=1, weights="float32", **whole) as llm:
            several = llm.generate(prompts, SAMPLING, n=4)
            beams = llm.beam_search(prompts, BEAMS)
            assert llm._engine.violation() is None  # pyright: ignore[reportPrivateUsage]
            if not options:
                assert any(one.num_cached_tokens > 0 for each in several for one in each)
            found.append(
                (
                    [[one.tokens for one in each] for each in several],
                    [[(one.tokens, one.score) for one in each.sequences] for each in beams],
                )
            )
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert all(len({*each}) > 1 for each in found[0][0])
