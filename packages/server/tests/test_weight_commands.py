"""`pagewood inspect` and `pagewood quantize`, on the embedded model."""

# pyright: basic
# transformers is typed in part only.

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers

from pagewood.engine.model_folder.folder import model_folder
from pagewood.server.cli import main


def test_a_model_is_quantised_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["quantize", str(model_folder(None)), out, "--format", "int4", "--group-size", "64"]) == 0
    shown = capsys.readouterr()
    assert "28 matrices in int4 by nearest, 4.0 MB became 1.2 MB" in shown.out
    assert "not quantised: lm_head" in shown.out
    assert "quantising layers to int4: 4 of 4" in shown.err
    assert main(["inspect", out, "--json", "--weights", "int8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["architecture"] == "LlamaForCausalLM"
    assert {one["loaded"]: one["count"] for one in found["matrices"]} == {"float16": 1, "int4 in groups of 64": 28}
    assert [one["name"] for one in found["errors"]] == ["model.embed_tokens.weight"]
    assert main(["inspect", out, "--weights", "int8"]) == 0
    text = capsys.readouterr().out
    for part in ("2.0 million parameters", "28 of pack-quantized with 4 bits, loaded as int4 in groups of 64",
                 "chat template: yes; response template: yes", "worst outputs first"):  # fmt: skip
        assert part in text
    assert main(["inspect", out, "--weights", "bfloat16", "--activations", "bfloat16"]) == 0
    assert "relative errors with bfloat16 and bfloat16 activations, worst outputs first" in capsys.readouterr().out
    assert (tmp_path / "out" / "eagle" / "config.json").is_file()  # its drafters stay with it


def test_latents_are_shown_beside_the_heads_that_they_stand_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attention of DeepSeek V3 with an eighth of each size: its latents are a 71st of its keys and values."""
    config = transformers.DeepseekV3Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, first_k_dense_replace=2,
        num_attention_heads=128, num_key_value_heads=128, kv_lora_rank=64, q_lora_rank=None, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, max_position_embeddings=64, num_mtp_layers=0,
    )  # fmt: skip
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    shown = re.search(r"128 heads over latents of (\d+) numbers \(their keys and values would be ([\d,]+)\)", text)
    kept = re.search(r"memory of a token's keys and values: float32 ([\d,]+) bytes", text)
    assert shown is not None
    assert kept is not None
    latents, heads, in_all = (int(number.replace(",", "")) for number in (*shown.groups(), *kept.groups()))
    assert (heads, heads // latents) == (128 * (16 + 8 + 16), 71)
    assert in_all == 2 * latents * 4


def test_calibration_is_read_for_gptq_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("What is 12 + 7? " * 40)
    model, out = str(model_folder(None)), str(tmp_path / "out")
    options = ["quantize", model, out, "--format", "int8", "--calibration", str(text)]
    assert main(options) == 2
    assert "--calibration must not be given for --method nearest" in capsys.readouterr().err
    assert main([*options, "--method", "gptq", "--calibration-tokens", "300"]) == 0
    shown = capsys.readouterr()
    assert f"calibration: 1 texts of 320 tokens from {text}" in shown.err
    assert "relative error of outputs for the calibration" in shown.out
    assert main([*options, "--method", "gptq"]) == 2
    assert "OUT must be a new or empty folder" in capsys.readouterr().err


def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["quantize", str(model_folder(None)), out, "--format", "int8", "--group-size", "32"]) == 2
    assert "group_size must be None for int8" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "model must be a folder with a Hugging Face model, a GGUF file, or the name of" in capsys.readouterr().err
