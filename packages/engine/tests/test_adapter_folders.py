"""What is refused of folders of adapters, by the name of the field or tensor, and what damaged ones do: only errors."""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

import json
import random
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mutation import damaged_bytes, damaged_json
from pagewood.engine.adapters.modules import ModelModules, Module, expert_stacks
from pagewood.engine.adapters.peft_folder import read_adapter
from scale import scaled

PLACE, EMBEDDING = "base_model.model.model.layers.0.self_attn", "base_model.model.model.embed_tokens"
CONFIG = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none",
    "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "modules_to_save": None, "peft_version": "0.21.2",
}  # fmt: skip
SIZES = {"q_proj": 8, "v_proj": 4}
MODEL = ModelModules(
    modules={
        "model.embed_tokens": Module(inputs=6, outputs=8, takes_tokens=True),
        "lm_head": Module(inputs=8, outputs=6),
        **{
            f"model.layers.0.self_attn.{name}": Module(inputs=8, outputs=size)
            for name, size in (("q_proj", 8), ("v_proj", 4))
        },
    },
    num_heads=2,
    numbers=lambda name: np.ones((SIZES.get(name.rpartition(".")[2], 6), 8), np.float32),
    biases=lambda name: np.zeros(SIZES.get(name.rpartition(".")[2], 6), np.float32),
)


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"q_proj.lora_A": (2, 8), "q_proj.lora_B": (8, 2), "v_proj.lora_A": (2, 8), "v_proj.lora_B": (4, 2)}
    return {f"{PLACE}.{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    folder: Path, *, config: dict[str, Any] | None = None, changed: dict[str, np.ndarray | None] | None = None
) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    found = {**tensors(), **(changed or {})}
    save_file({name: array for name, array in found.items() if array is not None}, folder / "adapter_model.safetensors")
    return folder


def test_what_is_read_is_scaled(tmp_path: Path) -> None:
    weights = read_adapter(write(tmp_path), MODEL, max_rank=4)
    own, change = tensors(), weights.changes["model.layers.0.self_attn.v_proj"]
    np.testing.assert_array_equal(change.a, own[f"{PLACE}.v_proj.lora_A.weight"])
    np.testing.assert_array_equal(change.b, 2 * own[f"{PLACE}.v_proj.lora_B.weight"])
    assert weights.version() == read_adapter(write(tmp_path), MODEL, max_rank=4).version()
    other = read_adapter(write(tmp_path, config={"lora_alpha": 5}), MODEL, max_rank=4)
    assert other.version() != weights.version()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"), ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("trainable_token_indices", [1]), ("trainable_token_indices", [-1]),
        ("trainable_token_indices", {"lm_head": [1]}),
        ("trainable_token_indices", [1, 1]), ("trainable_token_indices", [1, 2, 3, 4, 5]),
        ("alora_invocation_tokens", []), ("alora_invocation_tokens", [-1]),
        ("alora_invocation_tokens", "x"), ("layer_replication", [[0, 1]]),
        ("use_qalora", True), ("use_bdlora", {"x": 1}), ("kasa_config", {"x": 1}), ("something_new", 1),
        ("bias", "all"), ("r", 9), ("r", 0), ("r", "2"), ("lora_alpha", float("inf")), ("rank_pattern", {"q_proj": 9}),
        ("rank_pattern", {"(": 2}), ("rank_pattern", {"q" * 2000: 2}), ("alpha_pattern", {"q_proj": "x"}),
        ("target_modules", ["q_proj"]), ("use_dora", True), ("lora_bias", True),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_its_name(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=field):
        read_adapter(write(tmp_path, config={field: value}), MODEL, max_rank=4)


def test_an_activation_is_part_of_the_version(tmp_path: Path) -> None:
    found = [
        read_adapter(write(tmp_path, config={"alora_invocation_tokens": tokens}), MODEL, max_rank=4)
        for tokens in (None, [1, 2], [1, 3])
    ]
    assert [one.invocation for one in found] == [(), (1, 2), (1, 3)]
    assert len({one.version() for one in found}) == 3
    with pytest.raises(ValueError, match="bias must be none with alora_invocation_tokens"):
        read_adapter(write(tmp_path, config={"alora_invocation_tokens": [1], "bias": "lora_only"}), MODEL, max_rank=4)


def test_an_expression_that_takes_others_for_ever_takes_no_time(tmp_path: Path) -> None:
    read_adapter(write(tmp_path, config={"alpha_pattern": {"(([a-z_.0-9]+)+)+!": 3}}), MODEL, max_rank=4)


@pytest.mark.parametrize(
    ("name", "array", "error"),
    [
        (f"{PLACE}.q_proj.lora_A.weight", np.zeros((3, 8), np.float32), "must have shape"),
        (f"{PLACE}.q_proj.lora_A.weight", np.zeros((2, 8), np.int32), "one of the dtypes"),
        (f"{PLACE}.q_proj.lora_A.weight", np.full((2, 8), np.nan, np.float32), "finite"),
        (f"{PLACE}.q_proj.lora_A.weight", None, "lora_A.weight of .*q_proj must be there"),
        (f"{PLACE}.k_proj.lora_A.weight", np.zeros((2, 8), np.float32), "k_proj is not a module"),
        (f"{PLACE}.q_proj.lora_magnitude_vector", np.zeros(8, np.float32), "by use_dora"),
        (f"{PLACE}.q_proj.base_layer.bias", np.zeros(8, np.float32), "by bias"),
        ("base_model.model.lm_head.weight", np.zeros((6, 8), np.float32), "modules_to_save must name lm_head"),
        ("base_model.model.lm_head.base_layer.weight", np.zeros((7, 8), np.float32), "must have shape"),
        (f"{EMBEDDING}.weight", np.zeros((6, 8), np.float32), "modules_to_save must name .*embed_tokens"),
        (f"{EMBEDDING}.token_adapter.trainable_tokens_delta", np.zeros((1, 8), np.float32), "must have shape"),
        (f"{PLACE}.q_proj.weight", np.zeros((8, 8), np.float32), "modules_to_save must name .*q_proj"),
        (f"{EMBEDDING}.lora_embedding_A", np.zeros((2, 6), np.float32), "target_modules must name"),
        ("x", np.zeros(1, np.float32), "not a tensor of a supported kind"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_their_name(
    name: str, array: np.ndarray | None, error: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=error):
        read_adapter(write(tmp_path, changed={name: array}), MODEL, max_rank=4)


HEAD = "base_model.model.lm_head"


def test_modules_that_are_replaced_have_the_rank_of_their_difference(tmp_path: Path) -> None:
    """Only some rows of this head differ; the same with too many, with other changes, and without its matrix."""
    rows = np.ones((6, 8), np.float32)
    rows[[1, 4]] += np.arange(16, dtype=np.float32).reshape(2, 8)
    config: dict[str, Any] = {"modules_to_save": ["lm_head"]}
    change = read_adapter(write(tmp_path, config=config, changed={f"{HEAD}.weight": rows}), MODEL, max_rank=4).changes[
        "lm_head"
    ]
    assert change.a is not None
    assert change.b is not None
    assert len(change.a) == 2
    np.testing.assert_array_equal(change.b @ change.a, rows - 1)
    table: dict[str, np.ndarray | None] = {f"{EMBEDDING}.weight": rows}
    embedding = read_adapter(
        write(tmp_path, config={"modules_to_save": ["embed_tokens"]}, changed=table), MODEL, max_rank=4
    ).changes["model.embed_tokens"]
    assert embedding.a is not None
    assert embedding.b is not None
    np.testing.assert_array_equal((embedding.b @ embedding.a).T, rows - 1)
    shifted, low = rows + np.arange(2, 8, dtype=np.float32)[:, None], np.zeros((2, 8), np.float32)
    cases: tuple[tuple[dict[str, np.ndarray | None], dict[str, Any], str], ...] = (
        (
            {f"{HEAD}.weight": shifted},
            config,
            "lm_head.*6 x 8, is not of a rank of at most 4",
        ),
        ({f"{HEAD}.weight": rows[:5]}, config, "must have shape"),
        (
            {f"{HEAD}.weight": rows, f"{HEAD}.lora_A.weight": low},
            config,
            "the only change of lm_head",
        ),
        ({f"{HEAD}.bias": rows[:, 0]}, config, "got its bias only"),
        ({}, config, "lm_head of modules_to_save must have a whole matrix"),
        ({f"{HEAD}.weight": rows}, {**config, "alora_invocation_tokens": [1]}, "modules_to_save must be null"),
        (table, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, "ensure_weight_tying"),
        ({}, {"modules_to_save": "lm_head"}, "modules_to_save"),
    )
    for changed, wanted, error in cases:
        with pytest.raises(ValueError, match=error):
            read_adapter(write(tmp_path, config=wanted, changed=changed), MODEL, max_rank=4)


def test_files_that_are_missing_or_pickled(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_adapter(tmp_path, MODEL, max_rank=4)
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="pickled weights are not read"):
        read_adapter(tmp_path, MODEL, max_rank=4)


EXPERTS = {f"model.layers.0.mlp.experts.{e}.{name}": one for e in range(3) for name, one in (
    ("gate_proj", Module(inputs=8, outputs=5)), ("up_proj", Module(inputs=8, outputs=5)),
    ("down_proj", Module(inputs=5, outputs=8)),
)}  # fmt: skip


@pytest.mark.parametrize(
    "model", [MODEL, replace(MODEL, modules={**MODEL.modules, **EXPERTS}, stacks=expert_stacks(EXPERTS))]
)
def test_damaged_folders_are_errors(model: ModelModules, tmp_path: Path) -> None:
    """No other exception, no hang, and no memory beyond that of an adapter."""
    place = "base_model.model.model.layers.0.mlp.experts"
    shapes = {"base_layer.lora_A": (6, 8), "base_layer.lora_B": (10, 6), "lora_A": (6, 5), "lora_B": (8, 6)}
    own = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]} if model.stacks else {}
    more = {f"{place}.{name}.weight": np.ones(one, np.float32) for name, one in shapes.items()} if own else {}
    write(tmp_path, config=own, changed={**more})
    assert len(read_adapter(tmp_path, model, max_rank=4).changes) == (2 + 9 if own else 2)
    config, data = json.loads((tmp_path / "adapter_config.json").read_text()), tmp_path / "adapter_model.safetensors"
    whole, num_errors, before = data.read_bytes(), 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = scaled(150)
    for seed in range(count):
        rng = random.Random(seed)
        data.write_bytes(damaged_bytes(rng, whole) if seed % 2 else whole)
        damaged = config if seed % 2 else damaged_json(rng, config)
        text = json.dumps(damaged)
        (tmp_path / "adapter_config.json").write_bytes(
            damaged_bytes(rng, text.encode()) if seed % 6 == 0 else text.encode()
        )
        try:
            read_adapter(tmp_path, model, max_rank=4)
        except ValueError:
            num_errors += 1
    assert num_errors > count // 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
