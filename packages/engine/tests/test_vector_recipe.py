"""How folders make vectors and scores, and the calls of `LLM` and `AsyncLLM`, against `transformers`."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from pagewood.engine import LLM, AsyncLLM, PoolingParams, SamplingParams
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.model_folder.vector_recipe import PairScoring, cosine, read_vector_recipe, with_end
from pagewood.engine.text import Tokenizer
from seeded_faults import seed_fault

ERROR = 1e-4
MODULES = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"]
NORMALIZE = "sentence_transformers.models.Normalize"
LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
TEXTS = ["The king of France", "A tree", "a long sentence about bread, butter and the king of all trees"]


def write(folder: Path, modules: list[str], **files: Any) -> Path:
    """Write modules.json, the files of further modules as `module_config`, and others by their stem."""
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_x" if i else "", "type": kind} for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_x").mkdir(exist_ok=True)
    for name, content in files.items():
        file = folder / "1_x" / "config.json" if name == "module_config" else folder / f"{name}.json"
        file.write_text(json.dumps(content))
    return folder


def demo_copy(folder: Path) -> Path:
    """Copy the embedded model without its drafters."""
    for file in model_folder(None).iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    return folder


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean", "embedding_dimension": 32}, "mean"),
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_folder_says_the_pooling(config: dict[str, Any], kind: Any, normalize: bool, tmp_path: Path) -> None:
    modules = [*MODULES, NORMALIZE] if normalize else MODULES
    recipe = read_vector_recipe(write(tmp_path, modules, module_config=config))
    assert recipe.pooling == PoolingParams(kind=kind, normalize=normalize)


def test_a_folder_that_says_nothing_gives_the_last_state_normalised(tmp_path: Path) -> None:
    recipe = read_vector_recipe(tmp_path)
    assert recipe.pooling == PoolingParams(kind="last", normalize=True)
    assert (recipe.text("Hello"), recipe.longest(99), recipe.scoring) == ("Hello", 99, None)


def test_prompts_go_before_a_text(tmp_path: Path) -> None:
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    recipe = read_vector_recipe(
        write(
            tmp_path,
            [MODULES[0]],
            config_sentence_transformers={"prompts": prompts, "default_prompt_name": "query"},
            sentence_bert_config={"max_seq_length": 20, "do_lower_case": True},
        )
    )
    assert recipe.text("King") == "instruct: find\nquery:king"
    assert recipe.text("King", prompt_name="document") == "king"
    assert (recipe.longest(99), recipe.longest(9)) == (20, 9)
    assert [recipe.prompt_of("query"), read_vector_recipe(tmp_path / "1_x").prompt_of("query")] == ["query", None]
    with pytest.raises(ValueError, match="prompt_name must be one of query, document, got 'passage'"):
        recipe.text("King", prompt_name="passage")


def test_an_end_token_is_appended_once(tmp_path: Path) -> None:
    folder = demo_copy(tmp_path)
    assert read_vector_recipe(folder).end_token is None
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_eos_token": True}))
    end = read_vector_recipe(folder).end_token
    assert end == 1
    assert with_end(np.array([5, 6], np.int32), end).tolist() == [5, 6, 1]
    assert with_end(np.array([5, 1], np.int32), end).tolist() == [5, 1]
    with LLM(folder, max_total_tokens=1024) as llm:
        tokens = [*llm.tokenizer.encode(TEXTS[0]).tolist(), end]
        assert llm.embed(TEXTS[0]).tolist() == llm.embed([tokens]).tolist()
        assert llm.embed([tokens[:-1]]).tolist() != llm.embed([tokens]).tolist()


@pytest.mark.parametrize(
    ("modules", "config", "message"),
    [
        ([*MODULES, "sentence_transformers.models.LSTM"], {"pooling_mode": "mean"}, "LogitScore, got LSTM"),
        (MODULES, {"pooling_mode_max_tokens": True}, "must be one of lasttoken, mean, cls, got max"),
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "got cls and mean"),
        (MODULES, {}, "got none"),
        (MODULES, {"pooling_mode": "mean", "include_prompt": False}, "include_prompt must be true, got false"),
        ([MODULES[0], LOGIT_SCORE], {"true_token_id": 5, "false_token_id": None}, "scores of one logit"),
    ],
)
def test_what_is_not_supported_is_an_error(
    modules: list[str], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        read_vector_recipe(write(tmp_path, modules, module_config=config))


@pytest.mark.parametrize("content", ["{", "{}", "[1]", '[{"type": "x.Pooling", "path": "../elsewhere"}]'])
def test_a_damaged_list_of_modules_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ValueError, match=r"modules\.json"):
        read_vector_recipe(tmp_path)


@pytest.mark.parametrize(("architecture", "model_type"), [("ElectraModel", "electra"), ("AlbertModel", "albert")])
def test_an_encoder_without_a_table_is_refused(architecture: str, model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": model_type}))
    shutil.copyfile(model_folder(None) / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(
        ValueError, match=f"got {architecture}, an encoder other than Gemma3TextModel, BertForMaskedLM, "
    ):
        LLM(tmp_path)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_total_tokens=4096, max_running=8) as model:
        yield model


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_folder(None), dtype=torch.float32)


def states(reference: Any, tokens: list[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        return reference.model(torch.tensor([tokens])).last_hidden_state[0].numpy()


def test_embed_gives_the_vectors_of_transformers(llm: LLM, reference: Any) -> None:
    for prompts in (TEXTS, TEXTS[0], [llm.tokenizer.encode(text).tolist() for text in TEXTS], np.array([5, 6, 7])):
        rows = llm.embed(prompts)
        assert rows.dtype == np.float32
        several = [prompts] if isinstance(prompts, (str, np.ndarray)) else prompts
        tokens = [llm.tokenizer.encode(one).tolist() if isinstance(one, str) else list(one) for one in several]
        expected = np.stack([states(reference, one)[-1] for one in tokens])
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        assert rows.shape == expected.shape
        assert np.abs(rows - expected).max() < ERROR
    means = llm.embed(TEXTS, PoolingParams(kind="mean", normalize=False, dimensions=7))
    for row, text in zip(means, TEXTS, strict=True):
        assert np.abs(row - states(reference, llm.tokenizer.encode(text).tolist()).mean(0)[:7]).max() < ERROR
    assert llm.embed([]).shape == (0, 192)


def test_embed_and_rerank_of_an_asyncio_program_are_the_same(llm: LLM) -> None:
    async def run() -> tuple[Any, Any]:
        async with AsyncLLM(max_total_tokens=4096) as other:
            rows, ranked = await asyncio.gather(other.embed(TEXTS), other.rerank(TEXTS[0], TEXTS, top_n=2))
            return rows, ranked

    rows, ranked = asyncio.run(run())
    assert rows.tolist() == llm.embed(TEXTS).tolist()
    assert ranked == llm.rerank(TEXTS[0], TEXTS, top_n=2)


def test_a_model_that_is_no_reranker_compares_vectors(llm: LLM) -> None:
    ranked = llm.rerank("king", TEXTS)
    query, rows = llm.embed("king")[0], llm.embed(TEXTS)
    expected = sorted(((float(query @ row), index) for index, row in enumerate(rows)), reverse=True)
    assert [one.index for one in ranked] == [index for _, index in expected]
    assert [one.score for one in ranked] == pytest.approx([score for score, _ in expected], abs=1e-6)
    assert cosine(query, np.zeros_like(query)) == 0.0


def rerank_scores(folder: Path, reference: Any, texts: list[str], true_token: int, false_token: int) -> list[float]:
    tokenizer = Tokenizer.from_folder(folder)
    scores: list[float] = []
    for text in texts:
        with torch.no_grad():
            logits = reference(torch.tensor([tokenizer.encode(text).tolist()])).logits[0, -1].double()
        scores.append(float(torch.stack([logits[false_token], logits[true_token]]).softmax(0)[1]))
    return scores


@pytest.mark.parametrize("has_template", [False, True])
def test_a_reranker_compares_the_logits_of_two_tokens(has_template: bool, tmp_path: Path, reference: Any) -> None:
    folder = demo_copy(tmp_path)
    write(folder, [MODULES[0], LOGIT_SCORE], module_config={"true_token_id": 73, "false_token_id": 87})
    template = (
        "{% for message in messages %}{% if message.role == 'query' %}Q: {{ message.content }}"
        "{% elif message.role == 'document' %} D: {{ message.content }}{% else %}{{ message.content }} {% endif %}"
        "{% endfor %} A:"
    )
    if has_template:
        (folder / "chat_template.jinja").write_text(template)
    scoring = read_vector_recipe(folder).scoring
    assert isinstance(scoring, PairScoring)
    assert scoring.has_template == has_template
    if has_template:
        texts = [f"Judge Q: king D: {text} A:" for text in TEXTS]
    else:
        texts = [scoring.text("king", text, instruction="Judge") for text in TEXTS]
        assert "<Instruct>: Judge\n<Query>: king\n<Document>: A tree<|im_end|>\n" in texts[1]
    expected = rerank_scores(folder, reference, texts, 73, 87)
    with LLM(folder, max_total_tokens=4096) as llm:
        ranked = llm.rerank("king", TEXTS, instruction="Judge")
    assert [one.index for one in ranked] == sorted(range(3), key=lambda i: -expected[i])
    assert [one.score for one in ranked] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)


def test_a_reranker_is_recognised_by_its_classifier(tmp_path: Path) -> None:
    folder = demo_copy(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "classifier_from_token": ["a", "b"]}))
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    scoring = read_vector_recipe(folder).scoring
    assert isinstance(scoring, PairScoring)
    assert (scoring.false_token, scoring.true_token, scoring.has_template) == (vocab["a"], vocab["b"], False)
    (folder / "config.json").write_text(json.dumps({**config, "classifier_from_token": ["a", "nowhere to be found"]}))
    with pytest.raises(ValueError, match="must have the token 'nowhere to be found'"):
        read_vector_recipe(folder)


def test_a_decoder_without_the_prefix_of_its_tensors_is_read(tmp_path: Path, llm: LLM) -> None:
    """As Qwen3-Embedding is stored."""
    folder = demo_copy(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): one for name, one in tensors.items()}, folder / "model.safetensors")
    with LLM(folder, max_total_tokens=1024) as other:
        assert other.embed(TEXTS).tolist() == llm.embed(TEXTS).tolist()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.embed(5), TypeError, "prompts must be"),
        (lambda llm: llm.embed(["a", ""]), ValueError, r"prompts\[1\] must hold at least one token"),
        (lambda llm: llm.embed("a", SamplingParams()), TypeError, "pooling must be PoolingParams"),
        (lambda llm: llm.embed("a", PoolingParams(dimensions=193)), ValueError, r"dimensions must be in \[1, 192\]"),
        (lambda llm: llm.embed("a", prompt_name="query"), ValueError, "this model has no prompts"),
        (lambda llm: llm.embed([[5] * 2049]), ValueError, r"prompts\[0\] must have at most 2048 tokens, got 2049"),
        (lambda llm: llm.rerank("a", []), ValueError, "documents must hold at least one string"),
        (lambda llm: llm.rerank("a", "b"), TypeError, "documents a sequence of strings"),
        (lambda llm: llm.rerank("a", ["b"], top_n=0), ValueError, "top_n must be None or >= 1, got 0"),
        (lambda llm: llm.rerank("a", ["b"], instruction="c"), ValueError, "instruction must be None"),
    ],
)
def test_wrong_arguments_are_errors(call: Any, error: type[Exception], message: str, llm: LLM) -> None:
    with pytest.raises(error, match=message):
        call(llm)


def test_the_probability_of_the_wrong_token_is_found(
    tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagewood.engine.model_folder import vector_recipe

    seed_fault([(vector_recipe.PairScoring, "score_of", "self.true_token", "self.false_token")], monkeypatch)
    with pytest.raises(AssertionError):
        test_a_reranker_compares_the_logits_of_two_tokens(False, tmp_path, reference)
