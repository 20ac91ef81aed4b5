"""The tokens of a tokenizer that a model has logits for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast


def within(tokenizer: str, vocab_size: int) -> str:
    """Return a `tokenizer.json` without the tokens whose ids a model has no logits for.

    Some checkpoints have tokens that were added and never trained. A model cannot draw them, so no mask has them.
    """
    value = json.loads(tokenizer)
    if not isinstance(value, dict):
        return tokenizer
    fields = cast("dict[str, Any]", value)
    added = cast("list[dict[str, Any]]", fields.get("added_tokens") or [])
    model = cast("dict[str, Any]", fields.get("model") or {})
    vocab: Any = model.get("vocab") or {}
    ids: list[int] = [*(token["id"] for token in added), *_ids(vocab)]
    if max(ids, default=0) < vocab_size:
        return tokenizer
    fields["added_tokens"] = [token for token in added if token["id"] < vocab_size]
    if isinstance(vocab, Mapping):
        kept = {piece: index for piece, index in cast("dict[str, int]", vocab).items() if index < vocab_size}
        model["vocab"] = kept
        if merges := cast("list[str | list[str]]", model.get("merges")):
            model["merges"] = [merge for merge in merges if _is_within(merge, kept)]
    else:
        model["vocab"] = vocab[:vocab_size]
    return json.dumps(fields)


def _ids(vocab: Any) -> Iterable[int]:
    return cast("dict[str, int]", vocab).values() if isinstance(vocab, Mapping) else range(len(vocab))


def _is_within(merge: str | list[str], vocab: Mapping[str, int]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in vocab and right in vocab and left + right in vocab
