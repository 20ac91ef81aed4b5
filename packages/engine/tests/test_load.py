"""Weights of a folder: fused as they are read, and refused if anything about them is wrong."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.stored.checkpoint_files import checkpoint_files, tensor_names
from pagewood.engine.runner.cpu.program.ops import CPUOps

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
}


def tensors() -> dict[str, Tensor]:
    shapes = {"model.embed_tokens": (11, 8), "model.norm": (8,), "lm_head": (11, 8)}
    for i in range(2):
        layer = {
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8),
            "mlp.gate_proj": (12, 8),
            "mlp.up_proj": (12, 8),
            "mlp.down_proj": (8, 12),
            "input_layernorm": (8,),
            "post_attention_layernorm": (8,),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def save(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "model.safetensors")


def load(folder: Path) -> None:
    load_model(folder, CPUOps())


def test_progress_counts_every_tensor(folder: Path) -> None:
    save(folder, tensors())
    reports: list[tuple[str, int, int]] = []
    load_model(folder, CPUOps(), progress=lambda *step: reports.append(step))
    assert reports == [("reading weights", i + 1, 21) for i in range(21)]


def test_parts_are_stacked_and_converted(folder: Path) -> None:
    save(folder, {"a": torch.full((2, 3), 1.5, dtype=torch.bfloat16), "b": torch.full((1, 3), 2, dtype=torch.float16)})
    checkpoint = Checkpoint(folder, dtype=torch.float32)
    assert checkpoint.stack([("a", 2), ("b", 1)], 3).equal(torch.tensor([[1.5] * 3, [1.5] * 3, [2.0] * 3]))
    checkpoint.finish(ignored=lambda name: False)


def test_shards_are_found_by_their_index(folder: Path) -> None:
    weights = tensors()
    names = sorted(weights)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for i in range(2):
        save_file({name: weights[name] for name in names[i::2]}, folder / f"part-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    load(folder)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        load(folder)


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_of_copies_of_a_tensor_the_one_counts_that_the_index_names(folder: Path) -> None:
    weights, other = tensors(), {"model.norm.weight": torch.full((8,), 7.0)}
    for right, wrong in (("a", "b"), ("b", "a")):
        save_file(weights, folder / f"{right}.safetensors")
        save_file(other, folder / f"{wrong}.safetensors")
        write_index(folder, {**dict.fromkeys(weights, f"{right}.safetensors"), "x": f"{wrong}.safetensors"})
        norm = Checkpoint(folder, dtype=torch.float32).stack([("model.norm.weight", 8)])
        assert norm.equal(weights["model.norm.weight"])


def test_copies_of_a_tensor_that_the_index_does_not_list(folder: Path) -> None:
    weights = tensors()
    save_file(weights, folder / "a.safetensors")
    save_file({"extra": torch.zeros(2), "model.norm.weight": torch.zeros(8)}, folder / "b.safetensors")
    write_index(
        folder,
        {name: "a.safetensors" for name in weights if name != "model.norm.weight"} | {"extra": "b.safetensors"},
    )
    with pytest.raises(
        ValueError, match=r"must say which file has model\.norm\.weight, got it in a\.safetensors and b\.safetensors"
    ):
        load(folder)


def test_an_index_that_names_the_wrong_file_of_a_tensor(folder: Path) -> None:
    weights = tensors()
    save_file(weights, folder / "a.safetensors")
    save_file({"extra": torch.zeros(2)}, folder / "b.safetensors")
    write_index(folder, dict.fromkeys(weights, "a.safetensors") | {"model.norm.weight": "b.safetensors"})
    with pytest.raises(ValueError, match=r"b\.safetensors must hold model\.norm\.weight, .* got it in a\.safetensors"):
        load(folder)


def test_a_single_file_comes_before_the_shards_of_an_old_index(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in `transformers`."""
    old, new = tensors(), tensors()
    save_file(old, folder / "old.safetensors")
    write_index(folder, dict.fromkeys(old, "old.safetensors"))
    save(folder, new)
    norm = Checkpoint(folder, dtype=torch.float32).stack([("model.norm.weight", 8)])
    assert norm.equal(new["model.norm.weight"])
    assert tensor_names(folder) == new.keys()
    assert "model.safetensors is read, and model.safetensors.index.json with its 1 files is not" in caplog.text
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert norm.equal(file.get_tensor("model.norm.weight"))


def test_an_index_that_makes_a_part_of_the_single_file(folder: Path) -> None:
    weights = tensors()
    save(folder, weights)
    save_file({"extra": torch.zeros(2)}, folder / "other.safetensors")
    write_index(folder, dict.fromkeys(weights, "model.safetensors"))
    load(folder)  # the same file
    write_index(folder, dict.fromkeys(weights, "model.safetensors") | {"extra": "other.safetensors"})
    with pytest.raises(ValueError, match=r"model\.safetensors must hold all weights, .* in other\.safetensors"):
        load(folder)


def test_a_gguf_file_beside_safetensors_is_not_read(folder: Path) -> None:
    """`transformers` takes the safetensors too."""
    weights = tensors()
    save(folder, weights)
    (folder / "model.gguf").write_bytes(b"GGUF, but not whole")
    load(folder)
    assert tensor_names(folder) == weights.keys()
    assert checkpoint_files(folder) == [folder / "model.safetensors"]
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    write_index(folder, dict.fromkeys(weights, "a.safetensors"))
    load(folder)
    assert checkpoint_files(folder) == [folder / "a.safetensors"]


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_never_read(folder: Path, file: str) -> None:
    (folder / file).write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="pickles"):
        load(folder)


def test_no_weights(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load(folder)


def test_a_missing_tensor(folder: Path) -> None:
    weights = tensors()
    del weights["model.layers.1.mlp.up_proj.weight"]
    save(folder, weights)
    with pytest.raises(ValueError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_an_unexpected_tensor(folder: Path) -> None:
    save(folder, {**tensors(), "model.layers.0.self_attn.q_proj.bias": torch.zeros(8)})
    with pytest.raises(ValueError, match=r"1 unexpected tensors, the first is .*q_proj\.bias"):
        load(folder)


def test_a_tensor_of_another_shape(folder: Path) -> None:
    save(folder, {**tensors(), "model.layers.0.mlp.down_proj.weight": torch.zeros(12, 8)})
    with pytest.raises(ValueError, match=r"down_proj\.weight must have shape \(8, 12\), got \(12, 8\)"):
        load(folder)


def test_a_tensor_of_whole_numbers(folder: Path) -> None:
    save(folder, {**tensors(), "model.norm.weight": torch.zeros(8, dtype=torch.int8)})
    with pytest.raises(ValueError, match="must hold floating point numbers"):
        load(folder)


def test_a_damaged_file(folder: Path) -> None:
    save(folder, tensors())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_a_tensor_of_numbers_that_need_a_scale(folder: Path, dtype: torch.dtype) -> None:
    save(folder, {**tensors(), "model.norm.weight": torch.zeros(8).to(dtype)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight must hold floating point numbers \(F32, BF16"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 2**24}, r"embed_tokens\.weight must have shape \(16777216, 8\), got \(11, 8\)"),
        ({"hidden_size": 2**20}, r"embed_tokens\.weight must have shape \(11, 1048576\)"),
        ({"intermediate_size": 2**22}, r"gate_proj\.weight must have shape \(4194304, 8\)"),
        ({"num_hidden_layers": 4096}, r"lacks the tensor model\.layers\.2\.input_layernorm\.weight"),
        ({"num_hidden_layers": 1}, r"10? unexpected tensors|9 unexpected tensors"),
        ({"num_attention_heads": 2**14}, r"q_proj\.weight must have shape \(65536, 8\)"),
        ({"head_dim": 512}, r"q_proj\.weight must have shape \(1024, 8\)"),
    ],
)
def test_sizes_are_compared_with_the_headers_before_memory_is_taken(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    save(folder, tensors())
    reads: list[tuple[str, int, int]] = []
    with pytest.raises(ValueError, match=message):
        load_model(folder, CPUOps(), progress=lambda *step: reads.append(step))
    assert reads == []


def header(text: bytes, *, length: int | None = None, data: bytes = b"") -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def encoded(**entries: object) -> bytes:
    return json.dumps(entries).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        header(b"{}", length=2**63),
        header(b"{}", length=2**64 - 1),
        header(b"{}", length=3),
        header(b"{"),
        header(b"[]"),
        header(b"\xff\xfe"),
        header(b"[" * 100_000),
        header(encoded(a=entry([2], [0, 8]), b=entry([2], [4, 12])), data=bytes(12)),
        header(encoded(a=entry([2], [8, 0])), data=bytes(8)),
        header(encoded(a=entry([2], [0, 4])), data=bytes(4)),
        header(encoded(a=entry([2**40, 2**40], [0, 8])), data=bytes(8)),
        header(encoded(a=entry([-1], [0, 8])), data=bytes(8)),
        header(encoded(a=entry([2], [0, 8], "X99")), data=bytes(8)),
        header(encoded(a=entry([2], [0, 8])), data=bytes(3)),
        header(encoded(a=entry([2], [0, 8])), data=bytes(30)),
    ],
    ids=range(17),
)
def test_a_hostile_header(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load(folder)


def test_a_folder_in_place_of_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", "\x00", "\ud800"])
def test_an_index_names_only_files_of_its_folder(folder: Path, name: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ValueError, match=r"weight_map must name \*\.safetensors files in the folder"):
        load(folder)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_are_read_or_refused(folder: Path, data: st.DataObject) -> None:
    """Headers are small here, so that most changes hit one."""
    save(folder, {"model.norm.weight": torch.zeros(8)})
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(ValueError):
        Checkpoint(folder, dtype=torch.float32).stack([("model.norm.weight", 8)])


def test_redundant_tensors_are_ignored(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    weights = tensors()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save(folder, {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)})
    load(folder)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_tied_output_projection_must_equal_the_embedding(folder: Path, prefix: str) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    weights = tensors()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"][7, 3] += 1
    save(folder, {f"{prefix}{name.removeprefix('model.')}" if "lm_head" not in name else name: weights[name]
                  for name in weights})  # fmt: skip
    message = rf"lm_head\.weight must equal {prefix}embed_tokens\.weight because tie_word_embeddings .* row 7 differs"
    with pytest.raises(ValueError, match=message):
        load(folder)
    weights["lm_head.weight"] = weights["lm_head.weight"][:10]
    save(folder, weights)
    with pytest.raises(ValueError, match=r"lm_head\.weight must equal .* got \(\(10, 8\), 'F32'\)"):
        load(folder)


def test_a_tied_pair_may_be_stored_as_the_output_projection_alone(folder: Path) -> None:
    weights = tensors()
    table = weights.pop("model.embed_tokens.weight")
    weights["lm_head.weight"] = table
    save(folder, weights)
    with pytest.raises(ValueError, match=r"lacks the tensor model\.embed_tokens\.weight"):
        load(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    load(folder)
    assert Checkpoint(folder, dtype=torch.float32).stack([("model.embed_tokens.weight", 11)], 8).equal(table)
