"""Where a model is cut into stages, against a brute-force search, and what a stage reads of a checkpoint."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from families.case import build
from families.registry import CASES, DIVIDED
from pagewood.engine.model_folder import load
from pagewood.engine.model_folder.load import layer_bytes, load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.stage import NO_HEAD, Stage, divide, stages_of
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.runner.ranks.agreement import check_layers
from pagewood.engine.runner.ranks.messages import Loaded
from rank_threads import text_logits, text_states
from seeded_faults import seed_fault

FEW = ("gemma4-small", "gpt2", "qwen3-moe")
PARAMETERS = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in DIVIDED]


def heaviest(weights: list[int], cuts: tuple[int, ...], head: int) -> int:
    edges = [0, *cuts, len(weights)]
    sums = [sum(weights[first:stop]) for first, stop in pairwise(edges)]
    return max([*sums[:-1], sums[-1] + head])


@given(st.lists(st.integers(1, 50), min_size=2, max_size=9), st.integers(2, 4), st.integers(0, 60), st.data())
def test_the_heaviest_stage_is_as_light_as_possible(
    weights: list[int], count: int, head: int, data: st.DataObject
) -> None:
    allowed = data.draw(st.lists(st.sampled_from(range(1, len(weights))), unique=True, min_size=1))
    if len(allowed) < count - 1:
        with pytest.raises(ValueError, match=f"pipeline_parallel_size must be at most {len(allowed) + 1} for a model"):
            divide(weights, count, allowed, head=head)
        return
    cuts = divide(weights, count, allowed, head=head)
    assert set(cuts) <= set(allowed)
    assert len(cuts) == count - 1
    best = min(heaviest(weights, one, head) for one in combinations(sorted(allowed), count - 1))
    assert heaviest(weights, cuts, head) == best


def test_a_model_is_cut_only_where_no_layer_reads_memory_of_an_earlier_stage(tmp_path: Path) -> None:
    build(CASES["gemma4-small"], tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    sources = [getattr(layer.mixer, "source", None) for layer in config.layers]
    assert any(source is not None for source in sources)
    for cut in range(1, config.num_layers):
        is_allowed = all(source is None or source >= cut for source in sources[cut:])
        assert (cut in config.cuts) == is_allowed
        stage = Stage(cut, config.num_layers, config.num_layers)
        if not is_allowed:
            with pytest.raises(ValueError, match=r"layers \d to \d of \d must have layer \d, whose memory layer \d"):
                config.for_stage(stage)
    with pytest.raises(ValueError, match=f"must be at most {1 + len(config.cuts)} for a model of {config.num_layers}"):
        divide([1] * config.num_layers, config.num_layers, config.cuts)


def test_bytes_are_those_that_are_stored(tmp_path: Path) -> None:
    build(CASES["llama"], tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    (layers, head), (elements, outputs) = (layer_bytes(tmp_path, config, is_stored=one) for one in (True, False))
    assert layers == [4 * one for one in elements]
    assert head == 4 * outputs == 4 * config.vocab_size * config.hidden_size
    per_layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 80
    assert elements == [per_layer] * config.num_layers


class Recorder:
    """Keeps what a stage sends for the next one."""

    needs = NO_HEAD

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def send(self, x: Tensor) -> None:
        self.sent.append(x.clone())

    def receive(self, tokens: Tensor, size: int) -> Tensor:
        x = self.sent.pop(0)
        assert x.shape == (len(tokens), size)
        return x


def in_stages(folder: Path, cuts: tuple[int, ...], tokens: Tensor) -> Tensor:
    """Return the logits of a text by stages over plain torch, one after the other."""
    relay = Recorder()
    stages = stages_of(cuts, ModelConfig.from_folder(folder).num_layers)
    models: list[Decoder[Tensor]] = [load_model(folder, TorchOps(), stage=one, relay=relay) for one in stages]
    for model in models[:-1]:
        text_states(model, tokens)
    logits = text_logits(models[-1], tokens)
    assert not relay.sent
    return logits


@pytest.mark.parametrize("name", PARAMETERS)
def test_logits_of_stages_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    build(CASES[name], tmp_path)
    tokens = torch.arange(5, 35)
    whole, cuts = text_logits(load_model(tmp_path, TorchOps()), tokens), ModelConfig.from_folder(tmp_path).cuts
    for some in dict.fromkeys((cuts[:1], cuts[-1:], cuts)):
        torch.testing.assert_close(in_stages(tmp_path, some, tokens), whole, rtol=1e-5, atol=1e-5)


def nothing(folder: Path, config: ModelConfig, *, files: object = None) -> int:
    del folder, config
    return 0


def test_a_stage_reads_its_own_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(CASES["llama"], tmp_path)
    read: list[str] = []

    class Watched(Checkpoint):
        def check(self, parts: object, *args: object, **options: object) -> object:  # pyright: ignore
            read.extend(name for name, _ in parts)  # pyright: ignore
            return super().check(parts, *args, **options)  # pyright: ignore

    num_layers = ModelConfig.from_folder(tmp_path).num_layers
    monkeypatch.setattr(load, "check_weights", nothing)  # it reads all headers
    monkeypatch.setattr(load, "Checkpoint", Watched)
    found: list[set[str]] = []
    for stage in stages_of((1, 2), num_layers):
        read.clear()
        load_model(tmp_path, TorchOps(), stage=stage, relay=Recorder())
        found.append(set(read))
    for number, names in enumerate(found):
        assert {name for name in names if ".layers." in name} == {
            name for name in names if f".layers.{number}." in name
        }
    assert "model.embed_tokens.weight" in found[0] - found[1]
    assert {"model.norm.weight", "lm_head.weight"} <= found[2] - found[1]


def loaded(layers: tuple[int, int]) -> Loaded:
    return Loaded(
        num_pages=1, max_length=1, num_states=0, state_interval=0, page_bytes=1, state_bytes=0, layers=layers,
        division="",
    )  # fmt: skip


def test_a_layer_that_two_stages_compute_is_refused() -> None:
    stages = stages_of((2, 4), 6)
    check_layers((0, 2), [loaded((2, 4)), loaded((4, 6))], stages)
    check_layers((0, 2), [loaded((0, 2)), *[loaded((2, 4))] * 2, *[loaded((4, 6))] * 2], stages)
    for own, others in (((0, 3), ((2, 4), (4, 6))), ((0, 2), ((1, 4), (4, 6))), ((0, 2), ((2, 4), (5, 6)))):
        with pytest.raises(ValueError, match=r"rank \d must have layers \d to \d of 6, got layers \[\d, \d\)"):
            check_layers(own, [loaded(one) for one in others], stages)


def test_wrong_stages_are_refused() -> None:
    for first, stop, num in ((0, 0, 2), (1, 3, 2), (-1, 1, 2)):
        with pytest.raises(ValueError, match="layers of a stage must be some of"):
            Stage(first, stop, num)


def test_a_residual_stream_that_lacks_the_last_part_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault([(Decoder, "_hand_over", "if pending is not None:", "if pending is None:")], monkeypatch)
    with pytest.raises(AssertionError):
        test_logits_of_stages_are_those_of_the_whole("llama", tmp_path)
