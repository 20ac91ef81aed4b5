"""Encoders have the states of `transformers`, and a text's vector is the same bits alone and among others."""

# pyright: basic
# transformers is typed in part only.

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel

from pagewood.engine import LLM
from pagewood.engine.api import PoolingParams
from pagewood.engine.assembly.cpu import encoders as encoder_options
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.families.registry import FAMILIES
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts

VOCAB = 100
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 120, 3)
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 130,
}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
KINDS: dict[str, dict[str, Any]] = {
    "bert": {**SHAPE, "type_vocab_size": 2},
    "roberta": {**SHAPE, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {**SHAPE, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 4, "n_heads": 4, "max_position_embeddings": 130},
    "mpnet": {**SHAPE, "pad_token_id": 1, "max_position_embeddings": 400},
    "modernbert": {**SHAPE, **SPECIAL, "local_attention": 20},
    "nomic_bert": {**SHAPE, "type_vocab_size": 2},
    "gemma3_text": {
        **SHAPE,
        **SPECIAL,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 20,
        "query_pre_attn_scalar": 16,
        "use_bidirectional_attention": True,
        "sliding_window_pattern": 3,
    },
}


def write(folder: Path, kind: str, **changes: Any) -> Any:
    """Write a model of a kind with random weights, and return it."""
    torch.manual_seed(3)
    model = AutoModel.from_config(AutoConfig.for_model(kind, vocab_size=VOCAB, **{**KINDS[kind], **changes})).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return model


def tokenizer() -> Tokenizer:
    """Return a tokenizer of numbers that puts a text between two tokens of its own."""
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w3"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single="w1 $A w2", special_tokens=[("w1", 1), ("w2", 2)])
    return words


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """A folder and the model of `transformers`, for each kind."""
    found: dict[str, tuple[Path, Any]] = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        found[kind] = folder, write(folder, kind)
    return found


def texts(seed: int, kind: str = "") -> list[list[int]]:
    """Return texts; the longest one of MPNet has tokens beyond its last distance."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, length).tolist() for length in (*LENGTHS, *[300] * (kind == "mpnet"))]


@torch.no_grad()
def states(model: Any, text: Sequence[int]) -> np.ndarray:
    """Return the last states `[T, E]` of `transformers`."""
    return model(torch.tensor([text])).last_hidden_state[0].numpy()


def pooled(found: np.ndarray, kind: str) -> np.ndarray:
    match kind:
        case "mean":
            whole = found.mean(0)
        case "cls":
            whole = found[0]
        case _:
            whole = found[-1]
    return whole / np.linalg.norm(whole)


def test_every_encoder_is_compared(folders: dict[str, tuple[Path, Any]]) -> None:
    compared = {type(model).__name__ for _, model in folders.values()}
    encoders = {name.replace("ForMaskedLM", "Model") for name, family in FAMILIES.items() if family.is_encoder}
    heads = {name for name in encoders if name.endswith("ForSequenceClassification")}
    assert compared == encoders - heads
    assert {name.replace("ForSequenceClassification", "Model") for name in heads} == compared - {
        "Gemma3TextModel",
        "MPNetModel",
        "NomicBertModel",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_transformers(folders: dict[str, tuple[Path, Any]], kind: str) -> None:
    folder, model = folders[kind]
    decoder = load_model(folder, TorchOps())
    for text in texts(1, kind):
        where = torch.arange(len(text))
        attention = WholeTexts([layer.mixer for layer in decoder.config.layers], len(text))
        with torch.no_grad():
            own, _ = decoder.states(torch.tensor(text), [one(where) for one in decoder.ropes], attention, where)
        np.testing.assert_allclose(own.numpy(), states(model, text), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers_and_do_not_depend_on_others(
    folders: dict[str, tuple[Path, Any]], kind: str
) -> None:
    folder, model = folders[kind]
    prompts = texts(2, kind)
    with LLM(model=str(folder), num_threads=1) as llm:
        together = llm.embed(prompts)
        alone = np.stack([llm.embed([prompt])[0] for prompt in prompts])
        first = llm.embed(prompts, PoolingParams(kind="cls"))
        last = llm.embed(prompts, PoolingParams(kind="last"))
    assert np.array_equal(together, alone)
    for index, prompt in enumerate(prompts):
        expected = states(model, prompt)
        for found, pooling in ((together, "mean"), (first, "cls"), (last, "last")):
            np.testing.assert_allclose(found[index], pooled(expected, pooling), atol=1e-5)


def test_faults_would_be_noticed(folders: dict[str, tuple[Path, Any]]) -> None:
    """A text that is cut in two steps, and a window that is one position too wide, give other vectors."""
    folder, model = folders["modernbert"]
    prompt = texts(2)[8]
    expected = pooled(states(model, prompt), "mean")

    def vector() -> np.ndarray:
        with LLM(model=str(folder), num_threads=1, max_total_tokens=512) as llm:
            return llm.embed([prompt])[0]

    with patch.object(encoder_options, "replace", lambda config, **_: replace(config, chunked_prefill_size=64)):
        cut = vector()
    read = ModelConfig.from_folder

    def wider(path: Path) -> ModelConfig:
        config = read(path)
        layers = [
            replace(layer, mixer=replace(own, reach=own.reach and own.reach + 1))
            for layer, own in zip(config.layers, config.attentions, strict=True)
        ]
        return replace(config, layers=tuple(layers))

    with patch.object(ModelConfig, "from_folder", wider):
        wide = vector()
    assert np.abs(vector() - expected).max() < 1e-5
    assert np.abs(cut - expected).max() > 1e-4
    assert np.abs(wide - expected).max() > 1e-4


def test_what_only_decoders_do_is_refused(folders: dict[str, tuple[Path, Any]]) -> None:
    folder = str(folders["bert"][0])
    with LLM(model=folder, num_threads=1) as llm:
        [answer] = llm.generate([[5, 6, 7]])
        assert answer.refusal is not None
        assert answer.refusal.message.endswith("this one is an encoder, which makes vectors only")
        with pytest.raises(ValueError, match="must have at most 130 tokens, got 131"):
            llm.embed([[5] * 131])
        assert llm.embed([[5] * 130]).shape == (1, 64)
        assert np.array_equal(llm.embed("w5 w6 w7"), llm.embed([[1, 5, 6, 7, 2]]))
    for fields in (
        {"speculative": "ngram"}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"host_cache_gb": 0.1},
        {"target_step_s": 0.1},
    ):  # fmt: skip
        name = next(iter(fields))
        with pytest.raises(ValueError, match=f"{name} must be left out for an encoder such as BertModel"):
            LLM(model=folder, num_threads=2, **fields)
    with pytest.raises(ValueError, match="device must be cpu for an encoder such as BertModel"):
        LLM(model=folder, device="cuda")


def test_the_older_fields_of_nomic_mean_the_same(folders: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    """Published files have the names of GPT-2, with or without the present ones."""
    fields = json.loads((folders["nomic_bert"][0] / "config.json").read_text())
    older = {
        "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }  # fmt: skip
    own = {
        "activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "n_positions": 8192,
        "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": 2,
        "layer_norm_epsilon": 1e-12, "max_trained_positions": 130,
        "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False, "causal": False,
    }  # fmt: skip
    dropped = {*older, "hidden_act", "rope_parameters", "head_dim", "layer_norm_eps", "max_position_embeddings"}
    alone = {name: value for name, value in fields.items() if name not in dropped}
    alone |= {name: fields[own_name] for own_name, name in older.items()} | own
    both = {**fields, **own, **{name: fields[own_name] for own_name, name in older.items()}}
    expected = ModelConfig.from_folder(folders["nomic_bert"][0])
    for one in (alone, both):
        (tmp_path / "config.json").write_text(json.dumps(one))
        assert ModelConfig.from_folder(tmp_path) == expected


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("nomic_bert", {"prenorm": True}, "prenorm must be absent or null or False"),
        ("nomic_bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction must be absent or null or 1"),
        ("nomic_bert", {"layer_norm_epsilon": 1e-5}, "must say the same, got 1e-12 and 1e-05"),
        ("nomic_bert", {"num_experts": 8}, "num_experts must be absent or null or 0"),
        (
            "gemma3_text",
            {"use_bidirectional_attention": False},
            "use_bidirectional_attention must be absent or null or True",
        ),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type must be absent or null or"),
        ("bert", {"is_decoder": True}, "is_decoder must be absent or null or False"),
        ("modernbert", {"norm_bias": True}, "norm_bias must be absent or null or False"),
        ("modernbert", {"global_attn_every_n_layers": 2}, "layer_types must agree with global_attn_every_n_layers 2"),
        ("modernbert", {"hidden_activation": "relu"}, "hidden_activation must be silu or"),
    ],
)
def test_a_config_that_means_something_else_is_refused(
    folders: dict[str, tuple[Path, Any]], tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    fields = json.loads((folders[kind][0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **changes}))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_folder(tmp_path)


def test_a_checkpoint_of_another_task_has_the_same_model(folders: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    """Tensors of its head are left out, and the names have a prefix."""
    from transformers import AutoModelForMaskedLM

    folder, model = folders["bert"]
    whole = AutoModelForMaskedLM.from_pretrained(folder)
    whole.save_pretrained(tmp_path)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    prompt = texts(4)[4]
    with LLM(model=str(tmp_path), num_threads=1) as llm:
        np.testing.assert_allclose(llm.embed([prompt])[0], pooled(states(model, prompt), "mean"), atol=1e-5)
