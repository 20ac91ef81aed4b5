"""Small tokenizers of every kind, built here; nothing is downloaded."""

# pyright: basic
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from pagewood.engine.text import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 1 + 2 = 3",
    "Übergröße, naïve café, smörgåsbord",
    "你好世界。こんにちは",
    "🎉🎈👩‍👩‍👧 emoji",
]
SPECIAL = ["<|start|>", "<|end|>"]
CHAT_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ('system', 'user', 'assistant') %}
        {{- raise_exception('Unknown role: ' + message['role']) }}
    {%- endif %}
    {%- if loop.index > 40 %}{% break %}{% endif %}
<|start|>{{ message.role }}
{% generation %}{{ message['content'] | trim }}{% endgeneration %}{{ message | tojson }}{{ eos_token }}
{% endfor %}
{%- set state = namespace(seen=messages | length) %}
{%- if add_generation_prompt %}<|start|>assistant {{ state.seen }} {{ strftime_now('%Y') }}
{% endif %}"""


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(" plain é", special=False)])
    return tokenizer


def byte_fallback(*, strip: bool = True) -> tokenizers.Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "fox", "é", "<0xZZ>", "▁▁"]
    pieces += sorted({character for text in CORPUS[:2] for character in text if character != " "} - {"é"})
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def _words(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    vocab = {piece: i for i, piece in enumerate(["<unk>", "▁the", "▁fox", "es", "▁", "▁▁a", "!"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return _words(tokenizer)


def word_piece() -> tokenizers.Tokenizer:
    vocab = {piece: i for i, piece in enumerate(["[UNK]", "the", "##re", "fox", "##es", ".", "do", "n't"])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return _words(tokenizer)


def bare() -> tokenizers.Tokenizer:
    vocab = {piece: i for i, piece in enumerate(["<unk>", "the", "fox", "é"])}
    return _words(tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>")))


def chained(*steps: decoders.Decoder) -> tokenizers.Tokenizer:
    """Return a tokenizer whose decoder has these steps, over pieces that some step treats specially."""
    runs = ["é".encode(), "世".encode(), b"\xff", b" ", b"0"]
    pieces = [f"<0x{byte:02X}>" for run in runs for byte in run]
    pieces += [
        "<0x+a>",
        "<0x-0>",
        "<0x\u0660\u0660>",
        "<0xzz>",
        "▁",
        "▁the",
        "▁▁a",
        "the",
        " ",
        "  fox ",
        "a",
        "ab",
        "abab",
        "b",
    ]
    pieces += [
        "##re",
        "##",
        " do not",
        "n't",
        ".",
        " .",
        "<pad>",
        "|",
        "x|y",
        "end</w>",
        "</w>",
        "Ġfox",
        "Ã",
        "©",
        "世",
        "\ufffd",
    ]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(["<unk>", *pieces]))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if steps:
        tokenizer.decoder = decoders.Sequence(list(steps))
    return _words(tokenizer)


FAMILIES = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_without_strip": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
    "bare": bare,
    "byte_fallback_without_fuse": lambda: chained(decoders.Replace("▁", " "), decoders.ByteFallback()),
    "byte_fallback_stripped_by_piece": lambda: chained(decoders.ByteFallback(), decoders.Strip(" ", 1, 0)),
    "byte_fallback_metaspace": lambda: chained(decoders.ByteFallback(), decoders.Metaspace()),
    "ctc": lambda: chained(decoders.CTC()),
    "bpe_suffix": lambda: chained(decoders.BPEDecoder()),
    "byte_level_stripped": lambda: chained(decoders.ByteLevel(), decoders.Strip(" ", 2, 0)),
    "fused_word_piece": lambda: chained(decoders.Fuse(), decoders.WordPiece()),  # no step follows this exactly
}


@pytest.fixture(scope="session")
def make_chained() -> Callable[..., tokenizers.Tokenizer]:
    """Makes tokenizers with any steps of a decoder."""
    return chained


@pytest.fixture(scope="session", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer of each kind."""
    return Tokenizer(FAMILIES[request.param]())


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder in the format of the Hub, without weights."""
    path = tmp_path_factory.mktemp("model")
    byte_level().save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": {"content": "<|end|>", "__type": "AddedToken", "special": True},
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
