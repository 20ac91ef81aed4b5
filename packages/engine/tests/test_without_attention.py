"""Models without attention: their pages index tokens only, and a hit reaches as far as a state.

`test_parity`, `test_family_engines`, `test_recurrent_ranks` and, for CUDA, `test_states_cuda` and
`test_recurrent_ranks_cuda` have Mamba 2 among the other families.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gguf_cases import FILES, write
from pagewood.engine.api import EngineConfig, SamplingParams
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.head_config import HeadNames
from pagewood.engine.models.head_config import _read_mtp as read_mtp
from pagewood.engine.offline.llm import LLM
from pagewood.engine.weights.gguf import folder
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A GGUF file, which has a tokenizer, and the model of `transformers`."""
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")
    reference, _ = write(FILES["mamba2"], tmp_path)
    return tmp_path / "m.gguf", reference


@pytest.fixture
def model(written: tuple[Path, Any]) -> ModelConfig:
    return ModelConfig.from_folder(model_folder(written[0]))


def test_memory_is_that_of_states(model: ModelConfig) -> None:
    layout = model.memory_layout(page_size=16)
    assert layout.bytes_per_page == 16 * 64
    assert model.states is not None
    assert model.states.num_layers == model.num_layers == 3


def test_a_prompt_is_hit_up_to_a_state_within_it(written: tuple[Path, Any]) -> None:
    """States are kept every 256 tokens, though pages are small, and at the end of a prompt."""
    file, reference = written
    prompt = [(7 * i + i // 13) % 97 for i in range(600)]
    prompts = [prompt, [*prompt[:300], 5, 6, 7], [*prompt, 1, 2, 3]]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(file), max_running=1, max_total_tokens=4096, max_length=1024, state_places=8) as llm:
        found = [llm.generate([one], sampling)[0] for one in prompts]
    assert [one.num_cached_tokens for one in found] == [0, 256, 592]
    for one, tokens in zip(found, prompts, strict=True):
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([tokens]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert list(one.tokens) == expected[0, len(tokens) :].tolist()


def test_a_device_is_not_filled_with_an_index(written: tuple[Path, Any]) -> None:
    """Pages of a few bytes a token would fill it with places that no request could use."""
    config = EngineConfig(model=str(written[0]), device="cuda", max_running=3, max_length=64, cuda_graph=False)
    engine = build_on(RecordingDevice(), flashinfer_torch, config, inbox=MemoryInbox(), outbox=MemoryOutbox())
    assert engine.info.num_pages * engine.info.page_size == 3 * 2048
    engine.close()


def test_what_does_not_go_together_is_refused(model: ModelConfig) -> None:
    names = HeadNames(layers=("mtp.layers.0",), projection="mtp.fc", hidden_norm="a", norm="b", token_norm="c")
    with pytest.raises(ValueError, match="a head needs a target with attention, got Mamba2ForCausalLM"):
        read_mtp(names, model)
