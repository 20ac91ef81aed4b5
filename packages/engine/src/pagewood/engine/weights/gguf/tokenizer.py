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
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
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
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
"""Letters with case, as DeepSeek's first tokenizer lists them, in an expression's brackets."""
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002" + "]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_KIMI = (
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXPRESSIONS = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "smaug-bpe", "dbrx",
                "glm4", "chatglm-bpe",
            ),
            (_LLAMA3,),
        ),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
        "qwen35": (_QWEN35,),
        **dict.fromkeys(("gpt-2", "olmo", "mpt", "jais", "phi-2", "exaone4"), (_GPT2,)),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
        **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_O200K,)),
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
        "tekken": (_TEKKEN,),
        "deepseek-llm": _DEEPSEEK,
        "deepseek-coder": _DEEPSEEK_CODER,
        "seed-coder": (_SEED,),
        "kimi-k2": (_KIMI,),
    }
)  # fmt: skip
"""By kind of tokenizer: a text is split by each of these in turn."""
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"})
"""Kinds in which a word that is a token becomes that token, regardless of merges, and a text begins with a token."""
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
            scores = _numbers(fields, "tokenizer.ggml.scores", len(tokens))
            content = _sentence_pieces(fields, tokens, _merges(tokens, scores, fields), has_space=True)
        case "gemma4":
            content = _sentence_pieces(fields, tokens, _named_merges(fields), has_space=False)
        case _:
            raise ValueError(f"{file.path}: tokenizer.ggml.model must be gpt2, llama or gemma4, got {kind[:80]!r}")
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
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in _EXPRESSIONS[name]
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": {"type": "NFC"} if {_QWEN2, _QWEN35} & {*_EXPRESSIONS[name]} else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "decoder": {**level, "use_regex": True, "add_prefix_space": True},
        "model": _bpe(tokens, _named_merges(fields), ignore_merges=name in _WHOLE_WORDS),
    }


def _named_merges(fields: Fields) -> list[list[str]]:
    """Return the pairs of tokens that a file has, best first."""
    merges: list[list[str]] = []
    for merge in fields.texts("tokenizer.ggml.merges") or ():
        pair = merge.split(" ")
        if len(pair) != 2:
            raise ValueError(f"{fields.source}: tokenizer.ggml.merges must be pairs of tokens, got {merge[:80]!r}")
        merges.append(pair)
    return merges


def _sentence_pieces(fields: Fields, tokens: list[str], merges: list[list[str]], *, has_space: bool) -> dict[str, Any]:
    """Return the tokenizer; `has_space`: whether a text begins with a space if the file does not say it."""
    has_space = fields.flag("tokenizer.ggml.add_space_prefix", has_space)
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
            **_bpe(tokens, merges),
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
    begins = kind in ("llama", "gemma4") or fields.values.get("tokenizer.ggml.pre") in _WHOLE_WORDS
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
