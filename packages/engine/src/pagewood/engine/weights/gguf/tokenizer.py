"""tokenizer.json and tokenizer_config.json from the keys of a GGUF file.

Source: llama-vocab.cpp of llama.cpp for the expressions; `transformers` for merges that follow from scores.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, cast

from pagewood.engine.json_fields import Fields
from pagewood.engine.weights.gguf.file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Chinese and Japanese
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_EXPRESSIONS = MappingProxyType(
    {
        **dict.fromkeys(
            ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (_LLAMA3,)
        ),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
        **dict.fromkeys(("gpt-2", "olmo", "mpt", "jais", "phi-2", "exaone4"), (_GPT2,)),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
        **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_O200K,)),
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
        "tekken": (_TEKKEN,),
    }
)
"""By kind of tokenizer: a text is split by each of these in turn."""
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
"""Kinds in which a word that is a token becomes that token, regardless of merges."""
_NAMED = (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("unk", "unknown_token_id"), ("pad", "padding_token_id"))
_LONGEST_PIECE = 1 << 10


def tokenizer_of(file: GGUFFile, *, vocab_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of tokenizer.json and tokenizer_config.json.

    Args:
        file: with the keys `tokenizer.*`.
        vocab_size: rows of the embedding table; there are at most that many tokens.

    Raises:
        ValueError: the kind of tokenizer is not supported, or a key is missing or wrong.
    """
    fields = Fields(str(file.path), file.metadata)
    kind = fields.text("tokenizer.ggml.model")
    tokens = _tokens(fields, vocab_size)
    kinds = _numbers(fields, "tokenizer.ggml.token_type", len(tokens), default=1)
    match kind:
        case "gpt2":
            content = _byte_level(fields, tokens)
        case "llama":
            content = _sentence_pieces(fields, tokens)
        case _:
            raise ValueError(f"{file.path}: tokenizer.ggml.model must be gpt2 or llama, got {kind[:80]!r}")
    content["added_tokens"] = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[i] == _CONTROL,
        }
        for i, token in enumerate(tokens)
        if kinds[i] in (_CONTROL, _USER_DEFINED)
    ]
    named = {
        name: tokens[fields.integer(f"tokenizer.ggml.{key}", high=len(tokens) - 1)]
        for name, key in _NAMED
        if f"tokenizer.ggml.{key}" in file.metadata
    }
    content["post_processor"] = _post_processor(fields, kind, tokens, named)
    config: dict[str, Any] = {f"{name}_token": token for name, token in named.items()}
    template = _chat_template(fields)
    return content, config if template is None else {**config, "chat_template": template}


def _tokens(fields: Fields, vocab_size: int) -> list[str]:
    tokens = fields.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError(f"{fields.source}: tokenizer.ggml.tokens is missing")
    if len(tokens) > vocab_size:
        raise ValueError(
            f"{fields.source}: tokenizer.ggml.tokens must have at most the {vocab_size} rows of token_embd.weight, "
            f"got {len(tokens)}"
        )
    named = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]  # as llama.cpp names them
    if len(set(named)) != len(named):
        seen: set[str] = set()
        first = next(token for token in named if token in seen or seen.add(token))
        raise ValueError(f"{fields.source}: tokenizer.ggml.tokens must differ, got {first[:80]!r} twice")
    return named


def _numbers(fields: Fields, key: str, count: int, *, default: float | None = None) -> list[float]:
    """Return one number for each token."""
    values = fields.values.get(key)
    if values is None and default is not None:
        return [default] * count
    if not isinstance(values, list):
        raise ValueError(f"{fields.source}: {key} must be a list of {count} numbers, got {type(values).__name__}")
    items = cast("list[object]", values)
    if len(items) != count or not all(isinstance(item, int | float) for item in items):
        raise ValueError(f"{fields.source}: {key} must be a list of {count} numbers, got {len(items)} items")
    return cast("list[float]", items)


def _byte_level(fields: Fields, tokens: list[str]) -> dict[str, Any]:
    name = fields.text("tokenizer.ggml.pre", "none")
    if name not in _EXPRESSIONS:
        raise ValueError(
            f"{fields.source}: tokenizer.ggml.pre must be one of {', '.join(_EXPRESSIONS)}, got {name[:80]!r}"
        )
    merges: list[list[str]] = []
    for merge in fields.texts("tokenizer.ggml.merges") or ():
        pair = merge.split(" ")
        if len(pair) != 2:
            raise ValueError(f"{fields.source}: tokenizer.ggml.merges must be pairs of tokens, got {merge[:80]!r}")
        merges.append(pair)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in _EXPRESSIONS[name]
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": {"type": "NFC"} if _QWEN2 in _EXPRESSIONS[name] else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "decoder": {**level, "use_regex": True, "add_prefix_space": True},
        "model": _bpe(tokens, merges, ignore_merges=name in _WHOLE_WORDS),
    }


def _sentence_pieces(fields: Fields, tokens: list[str]) -> dict[str, Any]:
    scores = _numbers(fields, "tokenizer.ggml.scores", len(tokens))
    has_space = fields.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = fields.integer("tokenizer.ggml.unknown_token_id", 0, high=len(tokens) - 1)
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    scheme = "first" if has_space else "never"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **_bpe(tokens, _merges(tokens, scores, fields)),
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges(tokens: list[str], scores: list[float], fields: Fields) -> list[list[str]]:
    """Return the pairs of tokens that make a token, best first: merges of the token with the highest score."""
    ids = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if len(token) > _LONGEST_PIECE:
            raise ValueError(
                f"{fields.source}: tokenizer.ggml.tokens must have at most {_LONGEST_PIECE} characters each, "
                f"got {len(token)}"
            )
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in pairs if a in ids and b in ids]
        found += [
            (score, len(a), len(b), a, b) for a, b in sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        ]
    found.sort(key=lambda item: item[:3], reverse=True)
    return [[a, b] for _, _, _, a, b in found]


def _bpe(tokens: list[str], merges: list[list[str]], *, ignore_merges: bool = False) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
    }


def _post_processor(fields: Fields, kind: str, tokens: list[str], named: dict[str, str]) -> dict[str, Any] | None:
    """Return the post-processor that adds the tokens of beginning and end to a text."""
    begins = kind == "llama" or fields.values.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3", "tekken")
    wanted = {
        "bos": fields.flag("tokenizer.ggml.add_bos_token", begins),
        "eos": fields.flag("tokenizer.ggml.add_eos_token", False),
    }
    added = {name: named[name] for name, is_added in wanted.items() if is_added and name in named}
    if not added:
        return None

    def text(name: str, number: int) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [{"Sequence": {"id": name, "type_id": number}}]
        if "bos" in added:
            own.insert(0, {"SpecialToken": {"id": added["bos"], "type_id": number}})
        if "eos" in added:
            own.append({"SpecialToken": {"id": added["eos"], "type_id": number}})
        return own

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in added.values()
        },
    }


def _chat_template(fields: Fields) -> str | list[dict[str, str]] | None:
    """Return the chat template, or several by name."""
    plain = fields.text("tokenizer.chat_template", "")
    templates = {"default": plain} if plain else {}
    for name in fields.texts("tokenizer.chat_templates") or ():
        templates[name] = fields.text(f"tokenizer.chat_template.{name}")
    if not templates:
        return None
    if list(templates) == ["default"]:
        return plain
    return [{"name": name, "template": template} for name, template in templates.items()]
