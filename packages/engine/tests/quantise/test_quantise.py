"""Folders that `quantise_model` writes: `transformers` and this engine read the same weights from them."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import gguf_files
import quantised_folders
import tiny_models
from families.case import build
from families.registry import CASES
from pagewood.engine.api import WeightFormat
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.models.torch_recurrence import WholeTextStates
from pagewood.engine.offline.llm import LLM
from pagewood.engine.quantise import Calibration, Scheme, compressed_folder, quantise_model, read_calibration
from pagewood.engine.quantise.layers import read_layers, run_layer
from pagewood.engine.quantise.rounding import relative_error, round_to_nearest, round_with_feedback
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.engine.runner.storage import storage_for
from row_driver import RowDriver

INT4, GPTQ, INT8 = Scheme(format="int4"), Scheme(format="int4", method="gptq"), Scheme(format="int8")
WIDE = Scheme(format="int4", group_size=64)
TOKENS = torch.randint(0, 60, (12, 32), generator=torch.Generator().manual_seed(5))
CALIBRATION = Calibration(tokens=TOKENS, source="random tokens")
PAGE_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16 with biases, whose matrices have 64 or 96 inputs."""
    made = tmp_path_factory.mktemp("plain")
    quantised_folders.write_model(made, attention_bias=True)
    file = made / "model.safetensors"
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}, file)
    return made


def read(folder: Path) -> dict[str, Tensor]:
    """Return all weights as this engine reads them."""
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain: Any = transformers.AutoModelForCausalLM.from_config(config)
    checkpoint = Checkpoint(folder, dtype=torch.float32)
    own = {name: checkpoint.stack([(name, len(p))], *p.shape[1:]) for name, p in plain.named_parameters()}
    checkpoint.finish(ignored=lambda name: False)
    return own


def peer_of(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def logits(folder: Path, tokens: list[int], form: WeightFormat) -> Tensor:
    """Return the logits at all positions as the CPU runner computes them."""
    ops = CPUOps(Packer(form))
    model = load_model(folder, ops, dtype=torch.float32 if form == "float32" else None)
    config = model.config
    layout = config.memory_layout(page_size=PAGE_SIZE, dtype="float32", order="HND")
    kernel = warm_up(layout, packed=ops.variants)
    runner = CPURunner(model, storage_for(layout, 16), kernel, max_rows=1, max_length=64, num_threads=1)
    driver = RowDriver(runner, num_pages=16, page_size=PAGE_SIZE)
    found = runner.forward(driver.batch([(driver.add(tokens), len(tokens))])).copy()
    runner.close()
    return torch.from_numpy(found)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("scheme", [INT8, INT4, GPTQ, WIDE], ids=["int8", "int4", "gptq", "groups of 64"])
def test_transformers_and_this_engine_read_the_same(scheme: Scheme, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = quantise_model(folder, out, scheme, calibration=CALIBRATION)
    assert len(summary.matrices) == (12 if scheme is WIDE else 14)  # 96 inputs are no groups of 64
    assert ("model.layers.0.mlp.down_proj" in summary.ignored) == (scheme is WIDE)
    assert summary.num_bytes_after == sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    assert summary.num_bytes_before == sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    own = read(out)
    peer = peer_of(out)
    tokens = TOKENS[:1]
    with torch.no_grad():
        theirs = peer(tokens).logits[0]  # and its weights are decompressed now
        assert peer.model.layers[0].mlp.up_proj.weight.ndim == 2
        found = dict(peer.named_parameters())
        for name, weight in own.items():
            if scheme.format == "int4" or "_proj" not in name:
                assert found[name].equal(weight), name
        plain = peer_of(folder)
        before = plain(tokens).logits[0]
        for name, parameter in plain.named_parameters():
            parameter.copy_(own[name])
        expected = plain(tokens).logits[0]
    assert 0.002 < distance(expected, before) < 0.5  # something was rounded
    assert distance(theirs, expected) < (1e-6 if scheme.format == "int4" else 0.05)  # activations are rounded too
    assert distance(logits(out, tokens[0].tolist(), "float32"), expected) < 1e-5
    assert distance(logits(out, tokens[0].tolist(), "auto"), theirs) < 0.05  # activations are rounded here
    for row in summary.matrices:
        assert row.output_error is not None
        assert row.weight_error == pytest.approx(_distance_of(row.name, folder, own), rel=1e-3)


def _distance_of(name: str, folder: Path, own: dict[str, Tensor]) -> float:
    return distance(own[name], load_file(folder / "model.safetensors")[name].float())


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_layers_compute_what_transformers_computes(architecture: str) -> None:
    folder = tiny_models.model_folder(architecture, seed=3, noise=0.1)
    config = ModelConfig.from_folder(folder)
    kind = "Qwen2ForCausalLM" if architecture == "mimo" else config.architecture
    peer: Any = getattr(transformers, kind).from_pretrained(folder).eval()
    with torch.no_grad():
        states = peer(TOKENS[:3], output_hidden_states=True).hidden_states
    x = states[0]
    for layer in read_layers(config, Checkpoint(folder, dtype=torch.float32)):
        x = run_layer(layer, x, config)
        if layer.index + 1 < config.num_layers:  # the last of the peer's is behind its norm
            torch.testing.assert_close(x, states[layer.index + 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(peer.model.norm(x), states[-1], rtol=1e-4, atol=1e-4)


def optimal_feedback(weight: Tensor, hessian: Tensor, scheme: Scheme) -> Tensor:
    """Round input by input; after each, fit the inputs that are left to the outputs by least squares, from scratch."""
    exact = weight.double()
    scales = round_to_nearest(weight, scheme, torch.float32).scales.double()
    wide = scales.repeat_interleave(weight.shape[1] // scales.shape[1], dim=1)
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(len(hessian)).double()
    rounded, rest = exact.clone(), list(range(weight.shape[1]))
    for at in torch.argsort(hessian.diagonal(), descending=True, stable=True).tolist():
        codes = (rounded[:, at] / wide[:, at]).round().clamp(scheme.lowest, scheme.highest)
        rounded[:, at] = codes * wide[:, at]
        rest.remove(at)
        done = [k for k in range(weight.shape[1]) if k not in rest]
        if rest:
            pull = (rounded - exact)[:, done] @ damped[done][:, rest]
            rounded[:, rest] = exact[:, rest] - torch.linalg.solve(damped[rest][:, rest], pull.T).T
    return rounded.float()


@pytest.mark.parametrize("scheme", [GPTQ, Scheme(format="int8", method="gptq")], ids=["int4", "int8"])
def test_feedback_is_that_of_least_squares(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewood.engine.quantise.rounding._BLOCK", 24)
    torch.manual_seed(1)
    inputs = torch.randn(200, 64) @ torch.randn(64, 64) * torch.linspace(0.2, 2, 64)
    weight, hessian = torch.randn(16, 64), inputs.T @ inputs
    found = round_with_feedback(weight, hessian, scheme, torch.float32).values()
    expected = optimal_feedback(weight, hessian, scheme)
    differ = (found - expected).abs() > 1e-5
    assert int(differ.any(dim=1).sum()) <= 1  # a tie in a row changes what follows
    nearest = round_to_nearest(weight, scheme, torch.float32).values()
    assert relative_error(weight, found, hessian) < 0.6 * relative_error(weight, nearest, hessian)
    direct = ((found - weight) @ inputs.T).norm() / (weight @ inputs.T).norm()
    assert relative_error(weight, found, hessian) == pytest.approx(float(direct), rel=1e-3)


def test_inputs_that_were_never_seen_are_rounded_by_themselves() -> None:
    weight, hessian = torch.randn(4, 32, generator=torch.Generator().manual_seed(2)), torch.zeros(32, 32)
    hessian[:8, :8] = torch.eye(8)
    found = round_with_feedback(weight, hessian, GPTQ, torch.float32)
    assert found.codes.equal(round_to_nearest(weight, GPTQ, torch.float32).codes)
    with pytest.raises(ValueError, match=r"inputs of calibration must be finite"):
        round_with_feedback(weight, hessian + math.nan, GPTQ, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_belong_to_scales_that_are_rounded_first(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    weight[1] *= 1e-9  # below the numbers of float16
    weight[2] = 0
    for scheme in (INT4, INT8):
        found = round_to_nearest(weight, scheme, dtype)
        assert found.scales.dtype == dtype
        assert found.scales.isfinite().all()
        scales = found.scales.float().repeat_interleave(64 // found.scales.shape[1], dim=1).abs()
        error = (found.values() - weight).abs()
        inside = (weight.abs() < 6.9 * scales) if scheme is INT4 else (weight.abs() < 126.9 * scales)
        assert (error[inside] <= 0.5001 * scales[inside]).all()


def test_an_embedding_model_keeps_its_pooling(tmp_path: Path) -> None:
    """The vectors of the mean are near to those of the original, and not to those of the last token."""
    source, last = tmp_path / "source", tmp_path / "last"
    shutil.copytree(model_folder(None), source)
    shutil.copytree(model_folder(None), last)
    modules = ["Transformer", "Pooling", "Normalize"]
    (source / "modules.json").write_text(
        json.dumps(
            [
                {
                    "idx": i,
                    "name": str(i),
                    "path": f"{i}_{kind}" if i else "",
                    "type": f"sentence_transformers.models.{kind}",
                }
                for i, kind in enumerate(modules)
            ]
        )
    )
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    quantise_model(source, source / "int8", INT8)  # inside the folder that is copied
    texts = ["The king of France", "A tree", "bread and butter"]
    vectors: list[Any] = []
    for made in (source, source / "int8", last):
        with LLM(made, max_total_tokens=512, num_threads=1) as llm:
            vectors.append(llm.embed(texts))
    original, rounded, other = vectors
    assert (np.sum(original * rounded, axis=1) > 0.999).all()
    assert (np.sum(original * other, axis=1) < 0.98).all()


def test_several_files_and_others_beside_them(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    (source / "tokenizer_config.json").write_text("{}")
    (source / "draft").mkdir()
    (source / "draft" / "config.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (source / "pytorch_model.bin").write_text("not copied")
    whole, split = tmp_path / "whole", tmp_path / "split"
    quantise_model(source, whole, INT8)
    monkeypatch.setattr(compressed_folder, "_LARGEST_FILE", 20_000)
    quantise_model(source, split, INT8)
    index = json.loads((split / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert sorted(path.name for path in split.iterdir() if path.suffix != ".safetensors") == [
        "additional_chat_templates", "config.json", "draft", "generation_config.json", "model.safetensors.index.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert (split / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert (split / "draft" / "config.json").is_file()
    one, other = read(whole), read(split)
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


def test_a_gguf_file_of_plain_numbers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWOOD_CACHE", str(tmp_path / "cache"))
    plain = tmp_path / "plain"
    quantised_folders.write_model(plain)
    expected = gguf_files.write_gguf(plain, tmp_path / "m.gguf", architecture="llama")
    quantise_model(model_folder(tmp_path / "m.gguf"), tmp_path / "out", INT8)
    own = read(tmp_path / "out")
    assert all(distance(own[name], weight) < 0.02 for name, weight in expected.items())
    gguf_files.write_gguf(plain, tmp_path / "q.gguf", architecture="llama", kinds=["Q8_0"])
    with pytest.raises(ValueError, match=r"plain numbers to be quantised, got .* of gguf Q8_0"):
        quantise_model(model_folder(tmp_path / "q.gguf"), tmp_path / "other", INT8)


def test_what_cannot_be_done(folder: Path, tmp_path: Path) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"format": "int8", "group_size": 32}, r"group_size must be None for int8.*, got 32"),
        ({"format": "int4", "group_size": 48}, "group_size must be one of 32, 64, 128, got 48"),
        ({"format": "int5"}, "format must be one of int8, int4, got 'int5'"),
        ({"format": "int4", "method": "awq"}, "method must be one of nearest, gptq, got 'awq'"),
    )
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            Scheme(**options)
    with pytest.raises(ValueError, match=r"calibration must be given for the method gptq, got None"):
        quantise_model(folder, tmp_path / "out", GPTQ)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match=r"OUT must be a new or empty folder"):
        quantise_model(folder, tmp_path / "full", INT8)
    quantise_model(folder, tmp_path / "done", INT8)
    with pytest.raises(ValueError, match=r"plain numbers to be quantised, got .* of int-quantized with 8 bits"):
        quantise_model(tmp_path / "done", tmp_path / "again", INT8)
    assert not (tmp_path / "again").exists()
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = load_file(broken / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 5] = math.inf
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name}: weights must be finite, got 1 numbers"):
        quantise_model(broken, tmp_path / "out", INT8)
    assert not (tmp_path / "out" / "config.json").exists()


def test_texts_of_a_calibration(tmp_path: Path) -> None:
    folder = model_folder(None)
    limits = {"vocab_size": 512, "max_position": 2048}
    found = read_calibration(folder, None, num_tokens=1500, **limits)
    assert found.tokens.shape == (3, 512)
    assert "pydoc_data.topics" in found.source
    text = tmp_path / "text.txt"
    text.write_text("What is 12 + 7? " * 20)
    assert read_calibration(folder, text, num_tokens=10_000, **limits).tokens.shape[0] == 1
    chats = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "What is 12 + 7?"}, {"role": "assistant", "content": "19"}]
    chats.write_text(json.dumps({"messages": messages}) + "\n\n" + json.dumps({"text": "plain"}) + "\n")
    tokens = read_calibration(folder, chats, num_tokens=100, **limits).tokens
    from pagewood.engine.text import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    chat = tokenizer.encode_chat(messages, add_generation_prompt=False)
    np.testing.assert_array_equal(tokens[0], np.concatenate([chat, tokenizer.encode("plain")]))
    for line, message in (
        ("{", "line 1 must be JSON"),
        ('{"role": 1}', 'must be an object with "messages" or "text"'),
        ('{"messages": [1]}', "line 1"),
        ('{"messages": []}', "line 1: messages must hold at least one message"),
        ("", "must hold at least one token"),
    ):
        chats.write_text(line)
        with pytest.raises(ValueError, match=message):
            read_calibration(folder, chats, num_tokens=100, **limits)
    text.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"must be UTF-8"):
        read_calibration(folder, text, num_tokens=100, **limits)
    with pytest.raises(ValueError, match=r"num_tokens must be >= 1, got 0"):
        read_calibration(folder, None, num_tokens=0, **limits)
    with pytest.raises(ValueError, match=r"must be below the vocabulary's size 100"):
        read_calibration(folder, None, num_tokens=10, vocab_size=100, max_position=2048)


@pytest.mark.parametrize("scheme", [GPTQ, INT8], ids=["int4 gptq", "int8"])
def test_experts_are_rounded_each_by_itself(scheme: Scheme, tmp_path: Path) -> None:
    """The router stays as it is, and an expert's Hessian is that of the tokens that chose it."""
    case = CASES["qwen3-moe"]
    build(replace(case, extra={**case.extra, "moe_intermediate_size": 64}), tmp_path / "plain")
    summary = quantise_model(tmp_path / "plain", tmp_path / "out", scheme, calibration=CALIBRATION)
    names = {one.name for one in summary.matrices}
    of_experts = {f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight" for layer in (0, 2)
                  for expert in range(6) for part in ("gate", "up", "down")}  # fmt: skip
    assert of_experts <= names
    assert "model.layers.0.mlp.gate" in summary.ignored
    assert all(one.weight_error < 0.2 for one in summary.matrices)
    tokens = torch.arange(30)
    exact, rounded = (
        _whole_text(load_model(folder, TorchOps()), tokens) for folder in (tmp_path / "plain", tmp_path / "out")
    )
    ops = CPUOps()
    assert {name.removesuffix(".weight") for name in of_experts}.isdisjoint(summary.ignored)
    load_model(tmp_path / "out", ops, dtype=None)
    assert {kind for kind, _ in ops.variants} >= {WeightKind.INT8 if scheme is INT8 else WeightKind.INT4}
    error = torch.linalg.vector_norm(rounded - exact) / torch.linalg.vector_norm(exact)
    assert 1e-3 < error < 0.5


def test_experts_that_no_token_chooses_are_rounded_to_nearest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One token chooses three of six experts; the others have no inputs by which errors could be measured."""
    case = CASES["qwen3-moe"]
    build(replace(case, extra={**case.extra, "moe_intermediate_size": 64}), tmp_path / "plain")
    few = Calibration(tokens=TOKENS[:1, :1], source="one token")
    summary = quantise_model(tmp_path / "plain", tmp_path / "out", GPTQ, calibration=few)
    nearest = quantise_model(tmp_path / "plain", tmp_path / "near", replace(GPTQ, method="nearest"))
    idle = {one.name for one in summary.matrices if one.output_error is None}
    assert len(idle) == 2 * 3 * 3  # layers with experts, experts that one token leaves out, matrices
    assert all(".mlp.experts." in name for name in idle)
    assert caplog.text.count("no token of the calibration reaches 6 of 14 projections of layer") == 2
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "near"))
    same = {name for name in found if found[name].equal(expected[name])}
    assert {name.replace(".weight", ".weight_packed") for name in idle} <= same
    assert "model.layers.0.self_attn.o_proj.weight_packed" not in same
    assert nearest.num_bytes_after == summary.num_bytes_after


@torch.inference_mode()
def _whole_text(model: Decoder[Tensor], tokens: Tensor) -> Tensor:
    attention = WholeTexts([layer.mixer for layer in model.config.layers], len(tokens))
    rotations = [rope(torch.arange(len(tokens))) for rope in model.ropes]
    states = WholeTextStates(len(tokens))
    return model(tokens, rotations, attention, torch.arange(len(tokens)), recurrence=states)


@pytest.mark.parametrize("scheme", [INT8, pytest.param(GPTQ, marks=pytest.mark.slow)], ids=["int8", "gptq"])
def test_rows_that_several_projections_read_are_written_once(scheme: Scheme, tmp_path: Path) -> None:
    """Queries and gates of the attention of Qwen 3.5 are one matrix."""
    case, out = CASES["qwen3.5"], tmp_path / "out"
    sizes = {"hidden_size": 128, "intermediate_size": 128, "linear_value_head_dim": 64}
    reference = build(replace(case, extra={**case.extra, **sizes}), tmp_path / "plain")
    summary = quantise_model(tmp_path / "plain", out, scheme, calibration=CALIBRATION)
    names = [one.name for one in summary.matrices]
    assert len(names) == len(set(names)) == 3 * 3 + 4 + 4 * 3  # all but the small ones of gates
    checkpoint = Checkpoint(out, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in names:
                parameter.copy_(checkpoint.numbers(name, *parameter.shape))
        expected = reference(TOKENS[:1]).logits[0]
    found = _whole_text(load_model(out, TorchOps(), dtype=torch.float32), TOKENS[0])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_rows_that_are_read_apart_are_written_with_the_others(tmp_path: Path) -> None:
    """Those for decays of Mamba 2 are never rounded further when they are read."""
    build(CASES["granite4-moe"], tmp_path / "plain")
    quantise_model(tmp_path / "plain", tmp_path / "out", INT8)
    plain, written = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "out"))
    name = "model.layers.0.mamba.in_proj.weight"
    assert written[name].dtype == torch.int8
    assert written[name].shape == plain[name].shape


def test_rows_that_are_read_in_another_order_are_written_in_their_own(tmp_path: Path) -> None:
    """ERNIE's heads are reordered when they are read, in plain numbers and in codes."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    config = transformers.Ernie4_5Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, use_bias=True
    )
    plain, tokens = tmp_path / "plain", TOKENS[0].tolist()
    reference: Any = transformers.Ernie4_5ForCausalLM(config).eval()
    reference.save_pretrained(plain)
    with torch.inference_mode():
        wanted = reference(TOKENS[:1]).logits[0]
    assert distance(logits(plain, tokens, "float32"), wanted) < 1e-5
    cases: list[tuple[Scheme, WeightFormat]] = [(INT8, "float32"), (INT8, "auto"), (GPTQ, "auto")]
    for scheme, form in cases:
        written = tmp_path / f"{scheme.format}-{form}"
        quantise_model(plain, written, scheme, calibration=CALIBRATION)
        assert distance(logits(written, tokens, form), wanted) < (0.1 if scheme is INT8 else 0.5)
