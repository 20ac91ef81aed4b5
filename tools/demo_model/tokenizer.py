"""A byte-level BPE whose merges start at the beginning of a word, so that most words stay split into letters.

A token of several letters always starts with a space, a capital or a mark. "Reverse" and " what" become one token each,
while the answer "enots" stays five letters: what the model has to learn about spelling is small.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from templates import CHAT_TEMPLATE, RESPONSE_TEMPLATE
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

END, PAD, SYSTEM, USER, ASSISTANT = "<|end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, END, SYSTEM, USER, ASSISTANT)

WORD = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
"""Splits text into pieces that no merge crosses; each digit is a piece."""

GROWS = re.compile(r"[ĠA-Z]|[!-/:-@\[-`{-~]")


def piece_counts(texts: Iterable[str]) -> Counter[str]:
    splitter = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    return Counter(piece for text in texts for piece, _ in splitter.pre_tokenize_str(text))


def learn_merges(counts: Counter[str], num_merges: int) -> list[tuple[str, str]]:
    """Return the merges: repeatedly the most frequent pair at the start of a piece; ties go to the lowest code."""
    words = [([*piece], count) for piece, count in sorted(counts.items()) if GROWS.match(piece)]
    merges: list[tuple[str, str]] = []
    while len(merges) < num_merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for parts, count in words:
            if len(parts) > 1:
                pairs[parts[0], parts[1]] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for parts, _ in words:
            if len(parts) > 1 and (parts[0], parts[1]) == best:
                parts[:2] = ["".join(best)]
    return merges


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return the vocabulary: special tokens, then the 256 bytes, then the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = learn_merges(piece_counts(texts), vocab_size - len(SPECIAL) - len(alphabet))
    tokens = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "response_template": RESPONSE_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
