"""What follows the pooling: heads of rerankers and Dense modules, against `transformers` and plain numpy."""

# pyright: basic
# transformers is typed in part only.

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from pagewood.engine import LLM
from pagewood.engine.model_folder.vector_recipe import HeadScoring, read_vector_recipe
from pagewood.engine.text.tokenizer import Tokenizer as OwnTokenizer

VOCAB = 60
SHAPE: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 50, "num_labels": 1, "vocab_size": VOCAB,
}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
HEADS: Mapping[str, Mapping[str, Any]] = {
    "bert": {**SHAPE, "type_vocab_size": 2},
    "roberta": {**SHAPE, "type_vocab_size": 1, "pad_token_id": 4},
    "xlm-roberta": {**SHAPE, "type_vocab_size": 1, "pad_token_id": 4},
    "distilbert": {
        "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 50, "num_labels": 1,
        "vocab_size": VOCAB,
    },
    "modernbert": {**SHAPE, **SPECIAL, "local_attention": 20, "classifier_pooling": "mean"},
}  # fmt: skip
QUERY, DOCUMENTS = "w5 w6 w7", ["w8 w9", "w10 " * 30, "w5 w6 w7", "w11"]


def words() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w3"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="w1 $A w2", pair="w1 $A w2 $B:1 w2:1", special_tokens=[("w1", 1), ("w2", 2)]
    )
    return tokenizer


def write(folder: Path, kind: str, model_class: Any = AutoModelForSequenceClassification) -> Any:
    torch.manual_seed(5)
    model = model_class.from_config(AutoConfig.for_model(kind, **HEADS[kind])).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    words().save(str(folder / "tokenizer.json"))
    return model


@torch.no_grad()
def logit(model: Any, query: str, document: str) -> float:
    pair = words().encode(query, document)
    types = {"token_type_ids": torch.tensor([pair.type_ids])} if model.config.model_type == "bert" else {}
    return float(model(torch.tensor([pair.ids]), **types).logits[0, 0])


@pytest.mark.parametrize("kind", HEADS)
def test_scores_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = write(tmp_path, kind)
    with LLM(model=str(tmp_path), num_threads=1) as llm:
        found = {one.index: one.score for one in llm.rerank(QUERY, DOCUMENTS)}
        alone = [llm.rerank(QUERY, [one])[0].score for one in DOCUMENTS]
        with pytest.raises(ValueError, match="this model scores pairs of texts and makes no vectors: use rerank"):
            llm.embed(QUERY)
        with pytest.raises(ValueError, match=r"documents\[0\] must have at most \d+ tokens, got 66"):
            llm.rerank(QUERY, ["w10 " * 60])
    logits = np.array([logit(model, QUERY, one) for one in DOCUMENTS])
    np.testing.assert_allclose([found[index] for index in range(4)], 1 / (1 + np.exp(-logits)), atol=1e-5)
    assert alone == [found[index] for index in range(4)]
    assert np.ptp(logits) > 0.01


def test_types_of_tokens_count(tmp_path: Path) -> None:
    """Without them, the scores of a model that has two types are others."""
    model = write(tmp_path, "bert")
    encode_pair = OwnTokenizer.encode_pair

    def without_types(self: OwnTokenizer, first: str, second: str, **arguments: Any) -> Any:
        return encode_pair(self, first, second, **{**arguments, "type_stride": 0})

    with patch.object(OwnTokenizer, "encode_pair", without_types), LLM(model=str(tmp_path), num_threads=1) as llm:
        [wrong] = llm.rerank(QUERY, DOCUMENTS[:1])
    assert abs(wrong.score - 1 / (1 + np.exp(-logit(model, QUERY, DOCUMENTS[0])))) > 1e-4


@pytest.mark.parametrize(
    ("fields", "scoring"),
    [
        ({}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, True),
        ({"id2label": {"0": "a", "1": "b"}}, "a model that scores pairs must have one label, got 2"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}}, "must be Sigmoid or Identity, got relu"),
        ({"sentence_transformers": {"activation_fn": "own.Fn"}}, "activation_fn must be one of Identity, Tanh"),
    ],
)
def test_the_activation_of_scores_is_that_of_the_folder(tmp_path: Path, fields: dict[str, Any], scoring: Any) -> None:
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": 60}
    config |= {"id2label": {"0": "LABEL_0"}, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if isinstance(scoring, str):
        with pytest.raises(ValueError, match=scoring):
            read_vector_recipe(tmp_path)
        return
    found = read_vector_recipe(tmp_path).scoring
    assert isinstance(found, HeadScoring)
    assert (found.is_probability, found.type_stride) == (scoring, 60)
    assert found.score(np.array([-800.0], np.float32)) == (0.0 if scoring else -800.0)


@pytest.mark.parametrize("longest", range(3, 20))
@pytest.mark.parametrize("lengths", [(3, 9), (9, 3), (6, 6), (1, 12), (12, 1), (0, 5)])
def test_pairs_are_cut_as_by_tokenizers(longest: int, lengths: tuple[int, int]) -> None:
    texts = [" ".join(f"w{20 + number}" for number in range(length)) for length in lengths]
    reference = words()
    reference.enable_truncation(longest, strategy="longest_first")
    expected = reference.encode(texts[0], texts[1])
    found = OwnTokenizer(words()).encode_pair(*texts, longest=longest, type_stride=100)
    assert found.tolist() == [one + 100 * kind for one, kind in zip(expected.ids, expected.type_ids, strict=True)]


def with_modules(
    folder: Path, *modules: tuple[int, int, str | None], bias: bool = True
) -> list[dict[str, torch.Tensor]]:
    """Write Dense modules of the given sizes and activations behind a mean; return their tensors."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(modules), "Normalize"]
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    written: list[dict[str, torch.Tensor]] = []
    for index, (inputs, outputs, activation) in enumerate(modules, 2):
        (folder / f"{index}_Dense").mkdir()
        fields = {"in_features": inputs, "out_features": outputs, "bias": bias}
        if activation is not None:
            fields["activation_function"] = activation
        (folder / f"{index}_Dense" / "config.json").write_text(json.dumps(fields))
        tensors = {"linear.weight": torch.randn(outputs, inputs)}
        if bias:
            tensors["linear.bias"] = torch.randn(outputs)
        save_file(tensors, folder / f"{index}_Dense" / "model.safetensors")
        written.append(tensors)
    return written


@pytest.mark.parametrize("bias", [True, False])
def test_dense_modules_follow_the_pooling(tmp_path: Path, bias: bool) -> None:
    model = write(tmp_path, "bert", AutoModel)
    first, second = with_modules(tmp_path, (32, 80, None), (80, 12, "torch.nn.modules.linear.Identity"), bias=bias)
    with torch.no_grad():
        mean = model(torch.tensor([[1, 5, 6, 2]])).last_hidden_state[0].mean(0)
        hidden = torch.tanh(torch.nn.functional.linear(mean, first["linear.weight"], first.get("linear.bias")))
        whole = torch.nn.functional.linear(hidden, second["linear.weight"], second.get("linear.bias")).numpy()
    with LLM(model=str(tmp_path), num_threads=1) as llm:
        assert llm.embed([]).shape == (0, 12)
        [found] = llm.embed("w5 w6")
        [again, _] = llm.embed(["w5 w6", "w7"])
    np.testing.assert_allclose(found, whole / np.linalg.norm(whole), atol=1e-5)
    assert np.array_equal(found, again)


def test_damaged_modules_are_named(tmp_path: Path) -> None:
    write(tmp_path, "bert", AutoModel)
    with_modules(tmp_path, (33, 8, None))
    with pytest.raises(ValueError, match=r"must have linear.weight with 32 columns, got \(8, 33\)"):
        LLM(model=str(tmp_path), num_threads=1)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"must exist; pickled weights are not read"):
        LLM(model=str(tmp_path), num_threads=1)
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps([modules[0], modules[2], modules[1]]))
    with pytest.raises(ValueError, match="must have Dense behind Pooling, got Transformer, Dense, Pooling"):
        read_vector_recipe(tmp_path)
