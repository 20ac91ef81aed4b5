# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""Tokenizers as the text of a `tokenizer.json`, built from what every machine has; nothing is downloaded."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pagewood.engine.model_folder.folder import model_folder

END = "<|end|>"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer with the number of logits of a model, and its end of sequence."""

    json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer itself."""
        return tokenizers.Tokenizer.from_str(self.json)


def embedded() -> Vocabulary:
    """Return the vocabulary of the embedded model: 512 tokens."""
    text = (model_folder(None) / "tokenizer.json").read_text(encoding="utf-8")
    return Vocabulary(text, 512, (1,))


@functools.cache
def trained(vocab_size: int, num_megabytes: int) -> Vocabulary:
    """Return a byte-level BPE of the Python library's sources; its model has 64 more logits than it has tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # not ours
    tokenizer.decoder = decoders.ByteLevel()  # not ours
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, "<|other_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(_sources(num_megabytes << 20), trainer)
    return Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size() + 64, (0, 1))


def _sources(num_bytes: int) -> Iterator[str]:
    roots = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            text = file.read_text(encoding="utf-8", errors="replace")
            yield text
            num_bytes -= len(text)
            if num_bytes <= 0:
                return
