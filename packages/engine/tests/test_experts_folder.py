"""Fields of configurations with experts, their description, and their memory."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from families.case import build
from families.registry import CASES
from pagewood.engine.api import EngineConfig, WeightFormat
from pagewood.engine.build import build_engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.inspection import inspect_model
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.models import torch_experts, torch_ops
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts.experts import ExpertsConfig
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.weights.loaded_model import load_cpu_model
from pagewood.engine.runner.storage import storage_for
from row_driver import RowDriver
from seeded_faults import Edit, seed_fault


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixture")
    build(CASES["qwen3-moe"], made)
    return made


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    values = {**json.loads((folder / "config.json").read_text()), **changes}
    return {name: value for name, value in values.items() if value != "absent"}


def read(tmp_path: Path, values: dict[str, Any]) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_folder(tmp_path)


def router_of(model: ModelConfig) -> Any:
    [part] = {layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, ExpertsConfig)}
    return part.router


def test_fields_that_are_null_absent_or_have_other_names(folder: Path, tmp_path: Path) -> None:
    plain = config(folder)
    assert router_of(read(tmp_path, plain)).renormalises
    assert not router_of(read(tmp_path, config(folder, norm_topk_prob=None))).renormalises
    renamed = config(folder, num_experts=6, num_local_experts="absent")
    assert router_of(read(tmp_path, renamed)).num_experts == 6
    assert router_of(read(tmp_path, config(folder, num_experts_per_tok=2))).num_chosen == 2
    nothing: tuple[object, ...] = ([], None, "absent")
    for dense in nothing:
        assert read(tmp_path, config(folder, mlp_only_layers=dense)).layers[1].feed_forward.size == 48
    kinds = [type(layer.feed_forward) for layer in read(tmp_path, config(folder, decoder_sparse_step=3)).layers]
    assert [kind is ExpertsConfig for kind in kinds] == [False, False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 7}, "num_experts and num_local_experts must say the same, got 7 and 6"),
        ({"num_local_experts": 0}, "num_local_experts must be >= 1, got 0"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be in [1, 6], got 7"),
        ({"moe_intermediate_size": "wide"}, "moe_intermediate_size must be a whole number, got 'wide'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be in [1, "),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        ({"n_group": 2}, "n_group must be absent or null or 1, got 2"),
        ({"scoring_func": "sigmoid"}, "scoring_func must be absent or null or 'softmax', got 'sigmoid'"),
    ],
)
def test_a_wrong_file_is_an_error_with_field_rule_and_value(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, config(folder, **changes))


def test_groups_that_do_not_divide_and_a_dense_family_with_experts(tmp_path: Path) -> None:
    build(CASES["deepseek3"], tmp_path)
    for changes, message in (
        ({"n_group": 3}, "n_group must divide the 8 experts, got 3"),
        ({"topk_group": 5}, "topk_group must be in [1, 4], got 5"),
        ({"n_group": 8, "topk_group": 4}, "best_of_group must be 1 or 2, and a group have as many experts, got 2"),
        ({"topk_group": 1}, "num_experts_per_tok must be at most 2, the experts of the chosen groups, got 3"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be absent or null or 1, got 2"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read(tmp_path, config(tmp_path, **changes))
        restore(tmp_path, changes)
    values = config(tmp_path, architectures=["LlamaForCausalLM"])
    with pytest.raises(ValueError, match="n_routed_experts must be absent or null or 0, got 8"):
        read(tmp_path, values)


def restore(folder: Path, changes: dict[str, Any]) -> None:
    """Restore the fields that a change has replaced."""
    values = json.loads((folder / "config.json").read_text())
    values |= {name: {"n_group": 4, "topk_group": 2, "moe_layer_freq": 1}[name] for name in changes}
    (folder / "config.json").write_text(json.dumps(values))


def test_inspection_counts_what_a_token_uses(folder: Path) -> None:
    found = inspect_model(folder)
    idle = 2 * 3 * 3 * 48 * 64  # layers with experts, experts that are not chosen, matrices, inner size, hidden size
    assert found.num_parameters - found.num_active_parameters == idle == found.model.num_idle_parameters
    assert sum(one.count for one in found.matrices) == 2 + 3 * 4 + 2 * 6 * 3 + 3  # routers are not rounded


def test_inspection_of_whole_experts_on_ranks(folder: Path, tmp_path: Path) -> None:
    """The first of two ranks has two experts of each layer here, and by inner size half of all six."""
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"layers": {layer: [0, 0, 1, 1, 1, 1] for layer in (0, 2)}}))
    halves = inspect_model(folder, tensor_parallel_size=2)
    own = inspect_model(folder, tensor_parallel_size=2, expert_parallel=True, expert_map=str(file))
    of_expert = 2 * 3 * 48 * 64 * 4  # layers with experts, matrices, inner size, hidden size, bytes
    assert halves.weights_bytes["float32"] - own.weights_bytes["float32"] == (6 / 2 - 2) * of_expert
    assert own.num_parameters == halves.num_parameters
    for options, message in (
        ({"expert_parallel": True}, "expert_parallel must be False with tensor_parallel_size 1, got True"),
        ({"expert_map": "map.json"}, "expert_map must be None without expert_parallel, got 'map.json'"),
    ):
        with pytest.raises(ValueError, match=message):
            inspect_model(folder, **options)  # pyright: ignore[reportArgumentType]


def test_a_mixture_that_does_not_fit_is_refused_before_anything_is_laid_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lays_out(*_: object, **__: object) -> None:
        raise AssertionError("weights must not be laid out")

    monkeypatch.setattr("pagewood.engine.assembly.cpu.build.available_memory_bytes", lambda: 500_000)
    monkeypatch.setattr(CPUOps, "experts", lays_out)
    with pytest.raises(ValueError, match=r"model must fit into the 0\.0 GB of memory .*, got 0\.0 GB of weights"):
        build_engine(
            EngineConfig(device="cpu", model=str(folder), max_total_tokens=256),
            inbox=MemoryInbox(),
            outbox=MemoryOutbox(),
        )


def test_a_mixture_of_many_gigabytes_is_refused_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four layers of Qwen3 30B-A3B's sizes, in a file without its numbers, which takes no room."""
    values: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
        "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151_936,
        "norm_topk_prob": True, "max_position_embeddings": 4096, "eos_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    sizes = {"model.embed_tokens": (151_936, 2048), "lm_head": (151_936, 2048), "model.norm": (2048,)}
    for layer in (f"model.layers.{number}." for number in range(4)):
        sizes |= {f"{layer}{name}_layernorm": (2048,) for name in ("input", "post_attention")}
        sizes |= {f"{layer}self_attn.{name}_norm": (128,) for name in "qk"}
        sizes |= {f"{layer}self_attn.{name}_proj": (rows, 2048) for name, rows in (("q", 4096), ("k", 512), ("v", 512))}
        sizes |= {f"{layer}self_attn.o_proj": (2048, 4096), f"{layer}mlp.gate": (128, 2048)}
        for expert in (f"{layer}mlp.experts.{number}." for number in range(128)):
            sizes |= {f"{expert}{name}_proj": (768, 2048) for name in ("gate", "up")}
            sizes[f"{expert}down_proj"] = (2048, 768)
    header, end = dict[str, Any](), 0
    for name, shape in sizes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)

    def lays_out(*_: object, **__: object) -> None:
        raise AssertionError("weights must not be read")

    monkeypatch.setattr("pagewood.engine.assembly.cpu.build.available_memory_bytes", lambda: 3_000_000_000)
    monkeypatch.setattr(CPUOps, "embedding", lays_out)
    monkeypatch.setattr(CPUOps, "experts", lays_out)
    sizes_of: dict[WeightFormat, str] = {"auto": f"{end / 1e9:.1f}", "float32": f"{end / 1e9 * 2:.1f}"}
    for weights, gigabytes in sizes_of.items():
        message = rf"must fit into the 3\.0 GB of memory that are available, got {re.escape(gigabytes)} GB of weights"
        with pytest.raises(ValueError, match=message):
            build_engine(
                EngineConfig(device="cpu", model=str(tmp_path), weights=weights, max_total_tokens=256),
                inbox=MemoryInbox(),
                outbox=MemoryOutbox(),
            )


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rounded_experts_are_kept_and_mapped(
    form: WeightFormat, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The router, whose numbers are not kept, is read again, and the logits have the same bits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found: list[Any] = []
    with caplog.at_level("INFO"):
        for _ in range(2):
            loaded = load_cpu_model(folder, form, digest=ModelDigest(folder))
            layout = loaded.model.config.memory_layout(page_size=4, dtype="float32", order="HND")
            kernel = warm_up(layout, packed=loaded.variants, others=loaded.units)
            runner = CPURunner(loaded.model, storage_for(layout, 16), kernel, max_rows=1, max_length=64, num_threads=1)
            driver = RowDriver(runner, num_pages=16, page_size=4)
            found.append(runner.forward(driver.batch([(driver.add(list(range(20))), 20)])).copy())
            runner.close()
    assert "weights mapped from" in caplog.text
    assert (found[0] == found[1]).all()
    assert np.isfinite(found[0]).all()


FAULTS: dict[str, Edit] = {
    "a router that picks by the unbiased scores": (
        torch_experts, "choose", "scores if bias is None else scores + bias", "scores"
    ),
    "shares of biased scores": (torch_experts, "choose", "scores.gather(1, chosen)", "ranked.gather(1, chosen)"),
    "groups by their best expert alone": (torch_experts, "choose", "router.best_of_group", "1"),
    "results in the order of experts": (
        torch_experts.TorchExperts, "__call__", "tokens, ranks = (chosen == self._first + expert)",
        "chosen = chosen.sort(-1).values; tokens, ranks = (chosen == self._first + expert)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_routing_are_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against `transformers`, by a mixture with groups and a bias for the choice."""
    reference = build(CASES["deepseek3"], tmp_path)
    tokens = torch.randint(1, 97, (40,))
    with torch.inference_mode():
        exact = reference(tokens[None]).logits[0]
        assert torch.allclose(whole_text(tmp_path, tokens), exact, atol=1e-4)
        seed_fault([FAULTS[fault]], monkeypatch)
        monkeypatch.setattr(torch_ops, "choose", torch_experts.choose)
        assert not torch.allclose(whole_text(tmp_path, tokens), exact, atol=1e-4)


def whole_text(folder: Path, tokens: Tensor) -> Tensor:
    """Return the logits at all positions, by the parts over plain torch."""
    model, length = load_model(folder, TorchOps()), len(tokens)
    attention = WholeTexts([layer.mixer for layer in model.config.layers], length)
    return model(tokens, [rope(torch.arange(length)) for rope in model.ropes], attention, torch.arange(length))
