"""GGUF files: weights are those that the `gguf` package reads, tokens and answers those of `transformers`."""

# pyright: basic
# gguf, torch and transformers are typed in part only.

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import normalize

import gguf
import numpy as np
import pytest
import regex
import tokenizers
import torch
import transformers
from tokenizers import pre_tokenizers

import gguf_files
import quantised_folders
import small_disk
from pagewood.engine import LLM, SamplingParams
from pagewood.engine.model_folder.folder import default_sampling, find_drafter, model_folder, model_name
from pagewood.engine.model_folder.load import check_weights, load_model
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts.rope import LinearScaling, Llama3Scaling, YarnScaling
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.stored.checkpoint_files import checkpoint_files
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.text import Tokenizer
from pagewood.engine.weights.gguf import folder
from pagewood.engine.weights.gguf.keys import unknown_keys
from pagewood.engine.weights.gguf.parts import open_gguf
from rank_threads import ranks_logits, text_logits

ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
END = {"tokenizer.ggml.eos_token_id": 2}
GROUPS_OF_32 = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
SMALL_BLOCKS = {
    "Q2_K": "Float16", "Q3_K": "Float16", "IQ4_NL": "Int8Group", "IQ4_XS": "Int8Group", "MXFP4": "Float4",
}  # fmt: skip
EXACT = {
    "Q4_0": "Int4",
    "Q4_1": "Int4",
    "Q5_0": "Int8Group",
    "Q5_1": "Int8Group",
    "Q8_0": "Int8Group",
    "Q4_K": "Int4",
    "Q5_K": "Int8Group",
    "Q6_K": "Int8Group",
    "F32": "Float32",
    "F16": "Float16",
    "BF16": "BFloat16",
}
TEXTS = [
    "What is 12 + 7?",
    "  two  spaces\n\n\nand lines\r\n",
    "don't WE'LL it's",
    "naïve façade, Straße",
    "日本語 テキスト",
    "1234567 89",
    "a\tb",
    "emoji 🙂🙃",
    "",
    " ",
    "x=y+1; // note",
    "<|user|>text<|end|>",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of these files only: that of kernels stays."""
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_the_cache_folder_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PAGEWOOD_CACHE", "/d")
    assert folder.cache_root() == Path("/d/gguf")
    monkeypatch.delenv("PAGEWOOD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/a/b")
    assert folder.cache_root() == Path("/a/b/pagewood/gguf")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/c")
    assert folder.cache_root() == Path("/home/c/.cache/pagewood/gguf")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model for each architecture; that of llama has 256 inputs everywhere, as K-quants need."""
    made: dict[str, Path] = {}
    for name, kind in ARCHITECTURES.items():
        made[name] = tmp_path_factory.mktemp(name)
        quantised_folders.write_model(made[name], architecture=kind, tie_word_embeddings=name == "qwen3")
    return made


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose projections have 256 or 512 inputs."""
    made = tmp_path_factory.mktemp("wide")
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=256, intermediate_size=512, num_hidden_layers=1, head_dim=64, eos_token_id=0,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    return made


def compare(file: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    """Compare all weights; return the forms of the matrices."""
    made = model_folder(file)
    checkpoint = Checkpoint(made, dtype=torch.float32)
    forms: list[str] = []
    for name, weight in expected.items():
        if weight.ndim == 1:
            assert checkpoint.stack([(name, len(weight))]).equal(weight), name
            continue
        [form] = checkpoint.forms([(name, len(weight))], weight.shape[1])
        forms.append(type(form).__name__)
        values = torch.from_numpy(form.dequantised())
        largest = weight.abs().amax(dim=1)
        allowed = 2.0**-11 if forms[-1] == "Float16" else 2.0**-22
        assert bool(((values - weight).abs().amax(dim=1) <= allowed * largest).all()), (name, forms[-1])
    checkpoint.finish(ignored=lambda name: False)
    check_weights(made, ModelConfig.from_folder(made))
    return forms


@pytest.mark.parametrize("kind", GROUPS_OF_32)
def test_groups_of_32_inputs(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    expected = gguf_files.write_gguf(folders["llama"], tmp_path / "m.gguf", architecture="llama", kinds=[kind])
    assert set(compare(tmp_path / "m.gguf", expected)) == {EXACT[kind]}


@pytest.mark.parametrize("kind", K_QUANTS)
def test_random_blocks_of_256_inputs(kind: str, wide: Path, tmp_path: Path) -> None:
    expected = gguf_files.write_gguf(wide, tmp_path / "m.gguf", architecture="llama", kinds=[kind])
    assert set(compare(tmp_path / "m.gguf", expected)) == {EXACT[kind]}


@pytest.mark.parametrize("kind", SMALL_BLOCKS)
def test_blocks_of_few_bits_and_of_tables(kind: str, wide: Path, tmp_path: Path) -> None:
    expected = gguf_files.write_gguf(wide, tmp_path / "m.gguf", architecture="llama", kinds=[kind])
    assert set(compare(tmp_path / "m.gguf", expected)) == {SMALL_BLOCKS[kind]}


@pytest.mark.parametrize("kind", [*K_QUANTS, *SMALL_BLOCKS, "Q4_0", "Q5_1"])
def test_ranks_have_parts_of_blocks(kind: str, wide: Path, tmp_path: Path) -> None:
    gguf_files.write_gguf(wide, tmp_path / "m.gguf", architecture="llama", kinds=[kind])
    made, tokens = model_folder(tmp_path / "m.gguf"), torch.arange(30)
    whole = text_logits(load_model(made, TorchOps()), tokens)
    for count in (2, 4):
        found = ranks_logits(made, tokens, count)[0]
        torch.testing.assert_close(found, whole, atol=float(2e-6 * whole.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_types_may_differ_in_a_file(architecture: str, folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    expected = gguf_files.write_gguf(
        folders[architecture], file, architecture=architecture, kinds=["Q8_0", "F16", "Q4_0", "Q5_1", "F32"]
    )
    assert set(compare(file, expected)) == {"Int8Group", "Float16", "Int4", "Float32"}
    config, own = ModelConfig.from_folder(folders[architecture]), ModelConfig.from_folder(model_folder(file))
    for name in ("architecture", "num_layers", "tied_embeddings", "ropes", "windows"):
        assert getattr(own, name) == getattr(config, name), name
    epsilon = own.norm.epsilon  # which the file has in float32
    assert epsilon == pytest.approx(config.norm.epsilon)
    attention = config.attentions[0]
    qk_norm = None if attention.qk_norm is None else own.norm
    assert own.attentions[0] == replace(attention, qk_norm=qk_norm)
    assert own.eos_token_ids == (0,)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return activations with eight bits and a scale for each token."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_answers_are_those_of_transformers(
    architecture: str, kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """With codes of eight bits, activations have eight bits too, as `rounded` gives them to transformers."""
    file = tmp_path / "m.gguf"
    weights = gguf_files.write_gguf(folders[architecture], file, architecture=architecture, kinds=[kind])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folders[architecture], dtype=torch.float32)
    model.load_state_dict(weights, strict=architecture != "qwen3")
    if kind == "Q8_0":
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda module, inputs: rounded(inputs[0]))
    prompt = [3, 17, 9, 41, 5, 28]
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with torch.no_grad():
        scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    with LLM(str(file), max_running=1, max_total_tokens=64, max_length=64) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
        [completion] = llm.generate([prompt], sampling)
    assert list(completion.tokens) == expected[0, len(prompt) :].tolist()
    found = [one.logprob for one in completion.prompt_logprobs]
    wanted = [float(scores[i, token]) for i, token in enumerate(prompt[1:])]
    assert found == pytest.approx(wanted, abs=1e-4 if kind == "F16" else 0.02)


def test_a_file_answers_like_the_folder_that_it_was_made_of(tmp_path: Path) -> None:
    demo, file = model_folder(None), tmp_path / "demo.gguf"
    template = (demo / "chat_template.jinja").read_text()
    tokenizer = gguf_files.byte_level_tokenizer(demo / "tokenizer.json", pre="gpt-2")
    keys = {"tokenizer.chat_template": template, "general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    gguf_files.write_gguf(demo, file, architecture="llama", tokenizer=tokenizer, keys=keys)
    sampling = SamplingParams(temperature=0, max_tokens=16)
    with LLM(max_running=1, max_total_tokens=256) as llm:
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "Reverse: stone"}]).tolist()
        [expected] = llm.generate([prompt], sampling)
    with LLM(str(file), max_running=1, max_total_tokens=256) as llm:
        assert llm.tokenizer.encode_chat([{"role": "user", "content": "Reverse: stone"}]).tolist() == prompt
        [found] = llm.generate([prompt], sampling)
    assert found.tokens == expected.tokens
    assert found.text == expected.text
    made = model_folder(str(file))
    assert model_name(file) == "demo"
    assert (default_sampling(made).temperature, default_sampling(made).top_k) == (0.5, 7)
    assert find_drafter(made, "auto").kind == "ngram"


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_byte_level_tokens_are_those_of_transformers(pre: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    values = gguf_files.byte_level_tokenizer(model_folder(None) / "tokenizer.json", pre=pre)
    values["tokenizer.ggml.token_type"][4] = 4  # user-defined: matched whole, but part of the text
    gguf_files.write_gguf(model_folder(None), file, architecture="llama", tokenizer=values)
    reference: Any = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    own = Tokenizer.from_folder(model_folder(file))
    for text in TEXTS:
        expected = reference.encode(text, add_special_tokens=False)
        if pre == "qwen2":
            expected = reference.encode(normalize("NFC", text), add_special_tokens=False)
        assert own.encode(text, add_special_tokens=False).tolist() == expected, text
        assert own.decode(expected, skip_special_tokens=False) == reference.decode(expected), text
    assert "<|assistant|>" not in own.special_tokens
    assert "<|user|>" in own.special_tokens


SPLITS = {
    "gpt-4o": (
        "Don't SHOUT: HelloWorld's 12345!\n",
        ["Don't", " SHOUT", ":", " Hello", "World's", " ", "123", "45", "!\n"],
    ),
    "minimax-m2": ("it'll /\n 1234", ["it'll", " /\n", " ", "123", "4"]),
    "glm4": ("Don't HelloWorld 12345", ["Don", "'t", " HelloWorld", " ", "123", "45"]),
    "deepseek-v3": (
        "a_b (x) \u4f60\u597d!\u30ab 12345\n",
        ["a", "_b", " (", "x", ")", " ", "\u4f60\u597d", "!", "\u30ab", " ", "123", "45", "\n"],
    ),
    "exaone4": ("it's 2024", ["it", "'s", " 2024"]),
    "command-r": ("it's 24", ["it", "'s", " ", "2", "4"]),
    "kimi-k2": (
        "Don't HelloWorld\u4f60\u597d\u30ab 12345 /\n",
        ["Don't", " Hello", "World", "\u4f60\u597d", "\u30ab", " ", "123", "45", " /\n"],
    ),
    "deepseek-llm": (
        "it's a \u4f60\u597d! 123\n\n x ",
        ["it", "'", "s", " a", " ", "\u4f60\u597d", "!", " ", "123", "\n", "\n", " x", " "],
    ),
    "deepseek-coder": ("f(x) + 12\n", ["f", "(", "x", ")", " + ", "1", "2", "\n"]),
    "seed-coder": ("we'LL a!\n\n 12", ["we", "'LL", " a", "!", "\n\n", " ", "1", "2"]),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_words_that_an_expression_makes(pre: str, tmp_path: Path) -> None:
    values = gguf_files.byte_level_tokenizer(model_folder(None) / "tokenizer.json", pre=pre)
    gguf_files.write_gguf(model_folder(None), tmp_path / "m.gguf", architecture="llama", tokenizer=values)
    own = tokenizers.Tokenizer.from_file(str(model_folder(tmp_path / "m.gguf") / "tokenizer.json"))
    text, words = SPLITS[pre]
    found = [text[start:end] for _, (start, end) in own.pre_tokenizer.pre_tokenize_str(text)]
    assert found == words


WIDE = (
    "It's HelloWorld's DON'T we'LL 1234567 \u0663\u0664 x\u00b2\u2460",
    "\u4f60\u597d\u4e16\u754c, \u30ab\u30bf\u30ab\u30ca\u3072\u3089 \ud55c\uad6d\uc5b4\u3005x\u4f60A\u4f60",
    " \t\n \r\n\n  indented\n\n\tx = y[1:2] # c++\u2026 \u2018quoted\u2019\u3002\uff01 \n",
    "na\u00efve \u00dcber \u0441\u043b\u043e\u0432\u043e \u0394\u03c5 \u0540\u0561\u0575 \u10d0\u10d1",
    "\u0939\u093f\u0928\u094d\u0926\u0940 e\u0301 \u2126\u212b\u01c5",
    "\U0001f389\U0001f3fd \u20ac5 a_b@c.de </s> `~^|$+<=> \u00b5m \ufb01n \uff21\uff42 \U00010400 \u00a0\u3000 end  ",
)


def split_by(expressions: tuple[str, ...], text: str) -> list[str]:
    """Return the words that expressions make one after the other, by another engine."""
    words = [text]
    for expression in expressions:
        found: list[str] = []
        for word in words:
            end = 0
            for match in regex.finditer(expression, word, flags=regex.V1):
                found += [word[end : match.start()], match.group()]
                end = match.end()
            found.append(word[end:])
        words = [word for word in found if word]
    return words


_UPPER = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
_LOWER = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
OTHER_EXPRESSIONS = {
    "kimi-k2": (
        rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)(?:'(?i:s|t|re|ve|m|ll|d))?"
        r"|\p{N}{1,3}|\x20?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "seed-coder": (
        r"'(?i:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\x20?[^\s\p{L}\p{N}]+|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
}
"""Expressions with the same meaning, written in another way."""
ENGINES = (
    "llama3", "qwen2", "gpt-2", "starcoder", "gpt-4o", "deepseek-v3", "tekken", "deepseek-llm", "deepseek-coder",
    "seed-coder", "kimi-k2",
)  # fmt: skip
"""A name of each expression."""


@pytest.mark.parametrize("pre", ENGINES)
def test_words_are_those_of_another_engine(pre: str, tmp_path: Path) -> None:
    """Of Python's `regex`, for texts in many scripts."""
    values = gguf_files.byte_level_tokenizer(model_folder(None) / "tokenizer.json", pre=pre)
    gguf_files.write_gguf(model_folder(None), tmp_path / "m.gguf", architecture="llama", tokenizer=values)
    file = model_folder(tmp_path / "m.gguf") / "tokenizer.json"
    own = tokenizers.Tokenizer.from_file(str(file))
    steps = json.loads(file.read_text(encoding="utf-8"))["pre_tokenizer"]["pretokenizers"][:-1]
    expressions = OTHER_EXPRESSIONS.get(pre) or tuple(step["pattern"]["Regex"] for step in steps)
    random = np.random.default_rng(5)
    characters = list("".join(WIDE))
    mixed = ["".join(characters[i] for i in random.integers(0, len(characters), 40)) for _ in range(20)]
    for text in (*WIDE, *mixed):
        found = [text[start:end] for _, (start, end) in own.pre_tokenizer.pre_tokenize_str(text)]
        assert found == split_by(expressions, text)


def test_digits_are_split_for_smollm(tmp_path: Path) -> None:
    """SmolLM's tokenizer.json has Digits and GPT-2's expression; `transformers` does not know its name in files."""
    source = model_folder(None) / "tokenizer.json"
    values = gguf_files.byte_level_tokenizer(source, pre="smollm")
    gguf_files.write_gguf(model_folder(None), tmp_path / "m.gguf", architecture="llama", tokenizer=values)
    reference = tokenizers.Tokenizer.from_file(str(source))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    reference.pre_tokenizer = pre_tokenizers.Sequence(steps)
    own = Tokenizer.from_folder(model_folder(tmp_path / "m.gguf"))
    for text in TEXTS:
        assert own.encode(text, add_special_tokens=False).tolist() == reference.encode(text).ids, text


def test_sentence_pieces_are_those_of_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    values = gguf_files.sentence_pieces(size=340)
    shutil.copytree(folders["llama"], source)
    write_wide_vocabulary(source, 340)
    gguf_files.write_gguf(
        source, tmp_path / "m.gguf", architecture="llama", tokenizer=values, keys={"tokenizer.ggml.eos_token_id": 2}
    )
    reference: Any = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    own = Tokenizer.from_folder(model_folder(tmp_path / "m.gguf"))
    random = np.random.default_rng(3)
    letters = [*" abcdefghilmnorstu", "é", "\n"]
    texts = ["".join(letters[i] for i in random.integers(0, len(letters), 30)) for _ in range(40)]
    for text in [*texts, *TEXTS]:
        assert own.encode(text).tolist() == reference.encode(text), text
        ids = reference.encode(text, add_special_tokens=False)
        assert own.encode(text, add_special_tokens=False).tolist() == ids
        assert own.decode(ids) == reference.decode(ids), text
    assert own.encode("a").tolist()[0] == 1  # the token that begins a text
    assert ModelConfig.from_folder(model_folder(tmp_path / "m.gguf")).eos_token_ids == (2,)


def test_gemma_4s_tokens_are_those_of_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its merges stand in the file, and lead to other tokens than scores would."""
    pieces = gguf_files.sentence_pieces(size=340)
    tokens: list[str] = [*pieces["tokenizer.ggml.tokens"][:-1], "\n\n"]
    pairs = [(one[:i], one[i:]) for one in tokens[259:] for i in range(1, len(one))]
    pairs = [(a, b) for a, b in pairs if a in tokens and b in tokens]
    merges = [pairs[i] for i in np.random.default_rng(5).permutation(len(pairs))]
    values = {
        **{key: value for key, value in pieces.items() if not key.endswith("scores")},
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.pre": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    source = tmp_path / "source"
    shutil.copytree(folders["llama"], source)
    write_wide_vocabulary(source, 340)
    gguf_files.write_gguf(
        source, tmp_path / "m.gguf", architecture="llama", tokenizer=values, keys={"tokenizer.ggml.eos_token_id": 2}
    )
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "mask_token": "<unk>"}
    vocab = {token: number for number, token in enumerate(tokens)}
    reference: Any = transformers.GemmaTokenizer(vocab=vocab, merges=merges, **names)
    own = Tokenizer.from_folder(model_folder(tmp_path / "m.gguf"))
    random = np.random.default_rng(3)
    letters = [*" abcdefghilmnorstu", "é", "\n"]
    texts = ["".join(letters[i] for i in random.integers(0, len(letters), 30)) for _ in range(40)]
    for text in [*texts, *TEXTS]:
        ids = reference.encode(text, add_special_tokens=False)
        assert own.encode(text).tolist() == [1, *ids], text
        assert own.encode(text, add_special_tokens=False).tolist() == ids, text
        assert own.decode(ids) == reference.decode(ids), text


def write_wide_vocabulary(path: Path, size: int) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.randn(size, weights[name].shape[1])
    save_file(weights, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": size}))


def test_merges_decide_as_sentence_pieces_do(folders: dict[str, Path], tmp_path: Path) -> None:
    """The score of what two pieces make decides, however long they are."""
    values = gguf_files.sentence_pieces(size=340)
    tokens, scores = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"]
    source = tmp_path / "source"
    shutil.copytree(folders["llama"], source)
    write_wide_vocabulary(source, 340)
    gguf_files.write_gguf(
        source, tmp_path / "m.gguf", architecture="llama", tokenizer=values, keys={"tokenizer.ggml.eos_token_id": 2}
    )
    own = tokenizers.Tokenizer.from_file(str(model_folder(tmp_path / "m.gguf") / "tokenizer.json"))
    known = dict(zip(tokens, scores, strict=True))
    random = np.random.default_rng(4)
    parts = [token for token in tokens[259:] if not token.startswith("▁")]
    for _ in range(100):
        word = "▁" + "".join(parts[i] for i in random.integers(0, len(parts), 6))
        pieces = list(word)
        while True:  # llama.cpp's loop: the best pair, the leftmost of equal ones
            pairs = [(known[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in known]
            if not pairs:
                break
            at = -max(pairs)[1]
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        assert own.encode(word[1:], add_special_tokens=False).tokens == pieces


def llama3_factors(base: float, head_dim: int, factor: float) -> list[float]:
    """The loop of llama.cpp's converter for Llama 3.1."""
    factors: list[float] = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * base ** (i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def test_ropes_that_are_scaled(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    keys: dict[str, Any] = {"llama.rope.freq_base": 500000.0}
    factors = llama3_factors(500000.0, 16, 32.0)
    gguf_files.write_gguf(folders["llama"], file, architecture="llama", keys=keys, rope_factors=factors)
    scaling = ModelConfig.from_folder(model_folder(file)).ropes[0].scaling
    assert scaling == Llama3Scaling(
        factor=32.0, original_length=8192, low_frequency_factor=1.0, high_frequency_factor=4.0
    )
    check_weights(model_folder(file), ModelConfig.from_folder(model_folder(file)))
    factors[3] *= 1.1
    gguf_files.write_gguf(folders["llama"], file, architecture="llama", keys=keys, rope_factors=factors)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight must hold the factors of Llama 3's scaling"):
        model_folder(file)
    keys = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    keys["llama.rope.scaling.original_context_length"] = 64
    gguf_files.write_gguf(folders["llama"], file, architecture="llama", keys=keys)
    scaling = ModelConfig.from_folder(model_folder(file)).ropes[0].scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.original_length) == (4.0, 64)


def test_templates_have_names(folders: dict[str, Path], tmp_path: Path) -> None:
    keys = {
        "tokenizer.chat_template": "plain {{ messages[0].content }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools {{ messages[0].content }}",
    }
    gguf_files.write_gguf(folders["llama"], tmp_path / "m.gguf", architecture="llama", keys=keys)
    own = Tokenizer.from_folder(model_folder(tmp_path / "m.gguf"))
    assert own.render_chat([{"role": "user", "content": "a"}]) == "plain a"
    assert own.render_chat([{"role": "user", "content": "a"}], tools=[{}]) == "tools a"


def test_a_changed_file_has_another_folder(folders: dict[str, Path], tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "m.gguf"
    gguf_files.write_gguf(folders["llama"], file, architecture="llama")
    first = model_folder(file)
    assert first == model_folder(str(file))
    assert first.parent == cache
    stamp = ModelDigest(first).wait()
    gguf_files.write_gguf(folders["llama"], file, architecture="llama", kinds=["F16"])
    assert model_folder(file) != first
    assert ModelDigest(model_folder(file)).wait() != stamp
    assert len(list(cache.iterdir())) == 2  # no temporary ones are left


def test_a_cache_folder_that_cannot_be_written(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_files.write_gguf(folders["llama"], tmp_path / "m.gguf", architecture="llama")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "file" / "cache")
    made = model_folder(tmp_path / "m.gguf")
    check_weights(made, ModelConfig.from_folder(made))
    shutil.rmtree(made)


def test_a_header_that_changes_without_a_trace_in_size_and_time(
    folders: dict[str, Path], tmp_path: Path, cache: Path
) -> None:
    file = tmp_path / "m.gguf"
    gguf_files.write_gguf(folders["llama"], file, architecture="llama", keys={"llama.rope.freq_base": 5000.0})
    first, before = model_folder(file), file.stat()
    assert ModelConfig.from_folder(first).ropes[0].theta == 5000.0
    gguf_files.write_gguf(folders["llama"], file, architecture="llama", keys={"llama.rope.freq_base": 6000.0})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert ModelConfig.from_folder(model_folder(file)).ropes[0].theta == 6000.0


def test_a_full_disk_leaves_no_folders(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "m.gguf"
    gguf_files.write_gguf(folders["llama"], file, architecture="llama")
    with small_disk.mounted(tmp_path / "disk", num_bytes=8192) as disk:
        monkeypatch.setattr(folder, "cache_root", lambda: disk / "gguf")
        made = model_folder(file)
        check_weights(made, ModelConfig.from_folder(made))
        shutil.rmtree(made)
        assert list((disk / "gguf").iterdir()) == []
        message = f"of {file} cannot be kept in {disk / 'gguf'}, so each start reads them again"
        assert message in caplog.text
        assert "No space left on device; make room there, or set PAGEWOOD_CACHE to a folder" in caplog.text
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        with pytest.raises(ValueError, match=f"neither {disk / 'gguf'} nor {disk} can be written .*set PAGEWOOD_CACHE"):
            model_folder(file)
        assert [path.name for path in disk.iterdir()] == ["gguf"]


def test_a_cache_folder_that_is_read_only_is_used(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "m.gguf"
    gguf_files.write_gguf(folders["llama"], file, architecture="llama")
    with small_disk.mounted(tmp_path / "disk", num_bytes=1 << 20) as disk:
        monkeypatch.setattr(folder, "cache_root", lambda: disk / "gguf")
        kept = model_folder(file)
        small_disk.forbid_writing(disk)
        assert model_folder(file) == kept
        os.utime(file)
        made = model_folder(file)
        assert made.parent == Path(tempfile.gettempdir())
        assert "Read-only file system" in caplog.text
        shutil.rmtree(made)


def test_folders_of_processes_that_were_killed_are_removed(
    folders: dict[str, Path], tmp_path: Path, cache: Path
) -> None:
    for name, age_s in (("new-old", 90_000), ("new-now", 0)):
        (cache / name).mkdir(parents=True)
        then_s = time.time() - age_s
        os.utime(cache / name, (then_s, then_s))
    gguf_files.write_gguf(folders["llama"], tmp_path / "m.gguf", architecture="llama")
    model_folder(tmp_path / "m.gguf")
    assert [path.name for path in cache.glob("new-*")] == ["new-now"]


def scaling_of(folders: dict[str, Path], file: Path, keys: dict[str, Any], **options: Any) -> Any:
    named = {f"llama.{key}": value for key, value in keys.items()}
    gguf_files.write_gguf(folders["llama"], file, architecture="llama", keys=named, **options)
    return ModelConfig.from_folder(model_folder(file)).ropes[0].scaling


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, None),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.factor": 2.0}, 2.0),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, 2.0),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scaling.type": "yarn"}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, None),
        ({"rope.scaling.type": "none", "rope.scale_linear": 2.0}, None),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.factor": 1.0}, None),
    ],
)
def test_positions_are_stretched_as_llama_cpp_does(
    keys: dict[str, Any], factor: float | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Without a type it is linear; the older key counts where the newer one is absent; `none` ignores both."""
    scaling = scaling_of(folders, tmp_path / "m.gguf", keys)
    if factor is None:
        assert scaling is None
    else:
        assert isinstance(scaling, LinearScaling)
        assert scaling.factor == factor


def test_all_numbers_of_yarn_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.yarn_beta_fast": 16.0,
        "rope.scaling.yarn_beta_slow": 2.0,
        "rope.scaling.yarn_ext_factor": 1.0,
        "rope.scaling.attn_factor": 1.0,
    }
    scaling = scaling_of(folders, tmp_path / "m.gguf", keys)
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.beta_fast, scaling.beta_slow) == (4.0, 16.0, 2.0)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_keys_that_stretch_beside_a_tensor_of_factors(key: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """llama.cpp applies both."""
    factors = llama3_factors(10000.0, 16, 8.0)
    file = tmp_path / "m.gguf"
    with pytest.raises(ValueError, match=r"must not stretch .* beside the tensor rope_freqs\.weight, got linear by 2"):
        scaling_of(folders, file, {key: 2.0}, rope_factors=factors)
    with pytest.raises(ValueError, match=r"attn_factor must be absent or 1, got 2"):
        scaling_of(folders, file, {"rope.scaling.attn_factor": 2.0}, rope_factors=factors)
    assert isinstance(scaling_of(folders, file, {key: 1.0}, rope_factors=factors), Llama3Scaling)
    assert isinstance(scaling_of(folders, file, {key: 2.0}, rope_factors=[1.0] * 8), LinearScaling)


def test_keys_that_are_neutral_are_accepted(folders: dict[str, Path], tmp_path: Path) -> None:
    keys = {
        "attention.scale": 0.25,
        "logit_scale": 1.0,
        "final_logit_softcapping": 0.0,
        "attention.causal": True,
        "attention.sliding_window_pattern": [False, False],
        "expert_used_count": 2,
        "vocab_size": 60,
    }
    assert scaling_of(folders, tmp_path / "m.gguf", keys) is None


def test_keys_that_are_not_known_are_named_in_the_log(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"llama.something.new": 1.0, "general.sampling.penalty_repeat": 1.3, "general.sampling.temp": 0.5}
    gguf_files.write_gguf(folders["llama"], tmp_path / "m.gguf", architecture="llama", keys=keys)
    model_folder(tmp_path / "m.gguf")
    assert "keys that are not known are ignored: llama.something.new\n" in caplog.text
    assert "advice on drawing tokens is not followed in general.sampling.penalty_repeat\n" in caplog.text
    assert "general.sampling.temp" not in caplog.text


def test_every_key_of_the_package_gguf_is_known(folders: dict[str, Path], tmp_path: Path) -> None:
    """Except those of other kinds of models: recurrent ones, those with encoders, Gemma 3n."""
    file = tmp_path / "m.gguf"
    gguf_files.write_gguf(folders["llama"], file, architecture="llama")
    read = open_gguf(file)
    sections = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Attention.Indexer, gguf.Keys.Rope)
    values = (value for section in sections for name, value in vars(section).items() if name.isupper())
    for value in values:
        read.metadata[str(value).replace("{arch}", "llama")] = 0
    assert {key.removeprefix("llama.") for key in unknown_keys(read, "llama")} == OF_OTHER_MODELS


OF_OTHER_MODELS = {
    "features_length", "decoder_start_token_id", "decoder_block_count", "time_mix_extra_dim", "time_decay_extra_dim",
    "altup.active_idx", "altup.num_inputs", "{dense}_feat_in", "{dense}_feat_out", "attention.group_norm_epsilon",
    "attention.decay_lora_rank", "attention.iclr_lora_rank", "attention.value_residual_mix_lora_rank",
    "attention.gate_lora_rank",
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.attention.scale": 0.1}, r"attention\.scale must be absent or 1 / sqrt\(16\), 0\.25, got 0\.1"),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale must be absent or 1, got 0\.5"),
        ({"llama.final_logit_softcapping": 30.0}, r"llama\.final_logit_softcapping must be absent or 0, got 30\.0"),
        ({"llama.attention.causal": False}, r"attention\.causal must be absent or true, got False"),
        ({"llama.attention.sliding_window_pattern": [True, False]}, r"must be absent or 0, got \[True, False\]"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, r"yarn_log_multiplier must be absent or 0, got 0\.1"),
        ({"llama.rope.scaling.yarn_ext_factor": 1.0}, r"yarn_ext_factor must be absent or 0, got 1"),
        ({"llama.rope.scaling.factor": 0.5}, r"rope\.scaling\.factor must be 0 or in \[1, 4096\], got 0\.5"),
        ({"llama.expert_count": 8}, r"llama\.expert_used_count is missing"),
        ({"split.count": 3}, r"split\.count must be 1, got 3: parts are files named name-00001-of-00003\.gguf"),
        ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count must be 16, the size of a head, got 8"),
        ({"llama.rope.scaling.type": "longrope"}, "must be none, linear or yarn, got 'longrope'"),
        ({"llama.block_count": "two"}, r"llama\.block_count must be a whole number, got 'two'"),
        ({"llama.attention.head_count_kv": [2, 2]}, "must be a whole number"),
        ({"tokenizer.ggml.pre": "superbpe"}, r"tokenizer\.ggml\.pre must be one of llama-bpe, .* got 'superbpe'"),
        ({"tokenizer.ggml.model": "bert"}, "must be gpt2, llama or gemma4, got 'bert'"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "must differ, got 'a' twice"),
        ({"tokenizer.ggml.tokens": [str(i) for i in range(61)]}, r"at most the 60 rows of token_embd\.weight, got 61"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "must be pairs of tokens, got 'a b c'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type must be a list of 60 numbers, got 2 items"),
        ({"tokenizer.ggml.bos_token_id": 60}, r"bos_token_id must be in \[0, 59\], got 60"),
    ],
)
def test_keys_that_are_not_supported(
    keys: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    gguf_files.write_gguf(folders["llama"], tmp_path / "m.gguf", architecture="llama", keys=keys)
    with pytest.raises(ValueError, match=message):
        model_folder(tmp_path / "m.gguf")


def write_parts(folder: Path, into: Path, count: int, **options: Any) -> tuple[list[Path], dict[str, torch.Tensor]]:
    """Write the parts of a file: all keys in the first, and tensors in turn; return them and all weights."""
    into.mkdir(exist_ok=True)
    read: dict[str, torch.Tensor] = {}
    paths = [into / f"m-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    for number, path in enumerate(paths):
        read |= gguf_files.write_gguf(
            folder, path, architecture="llama", kinds=["Q4_0", "F16"], part=(number, count), **options
        )
    return paths, read


def test_a_file_in_parts(folders: dict[str, Path], tmp_path: Path, cache: Path) -> None:
    paths, expected = write_parts(folders["llama"], tmp_path / "parts", 3)
    compare(paths[0], expected)
    made = model_folder(paths[0])
    assert model_name(paths[0]) == "m"
    assert [path.resolve() for path in checkpoint_files(made)] == [path.resolve() for path in paths]
    links = tmp_path / "links"  # as a cache of downloads has them: links to files with other names
    links.mkdir()
    for number, path in enumerate(paths):
        (links / path.name).symlink_to(path.rename(tmp_path / f"blob{number}"))
    compare(links / paths[0].name, expected)
    assert len(list(cache.iterdir())) == 2  # these are other files


def test_parts_that_do_not_belong_together(folders: dict[str, Path], tmp_path: Path) -> None:
    paths, _ = write_parts(folders["llama"], tmp_path / "parts", 3)
    with pytest.raises(ValueError, match=r"must be the first part, m-00001-of-00003\.gguf, got part 2"):
        model_folder(paths[1])
    kept = paths[2].read_bytes()
    shutil.copy(paths[1], paths[2])
    with pytest.raises(ValueError, match=r"00003-of-00003\.gguf: split\.no must be 2, got 1"):
        model_folder(paths[0])
    paths[2].unlink()
    with pytest.raises(FileNotFoundError, match=r"all of its 3 parts, but m-00003-of-00003\.gguf does not exist"):
        model_folder(paths[0])
    others, _ = write_parts(folders["llama"], tmp_path / "others", 2)
    shutil.copy(others[1], paths[2])
    with pytest.raises(ValueError, match=r"split\.count must be 3, got 2"):
        model_folder(paths[0])
    paths[2].write_bytes(kept)
    write_parts(folders["llama"], tmp_path / "parts", 3, keys={"split.tensors.count": 7})
    with pytest.raises(ValueError, match=r"the parts must hold 7 tensors \(split\.tensors\.count\), got 21"):
        model_folder(paths[0])
    gguf_files.write_gguf(folders["llama"], paths[1], architecture="llama", part=(1, 3), holds_all=True)
    with pytest.raises(ValueError, match=r"names of tensors must differ, got '.*', which"):
        model_folder(paths[0])


def test_merges_of_unknown_tokens_are_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.merges": ["no such"]}
    gguf_files.write_gguf(folders["llama"], tmp_path / "m.gguf", architecture="llama", keys=keys)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(model_folder(tmp_path / "m.gguf"))


def test_another_architecture(folders: dict[str, Path], tmp_path: Path) -> None:
    gguf_files.write_gguf(folders["llama"], tmp_path / "m.gguf", architecture="gemma3n")
    with pytest.raises(ValueError, match=r"must be one of llama, llama4, qwen2moe, .* got 'gemma3n'"):
        model_folder(tmp_path / "m.gguf")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"no GGUF")
    with pytest.raises(FileNotFoundError, match="must be a folder with a Hugging Face model, a GGUF file"):
        model_folder(tmp_path / "m.gguf")
