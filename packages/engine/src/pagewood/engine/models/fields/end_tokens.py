"""The end of sequence that a folder's tokenizer names, and the ids of its tokens. Imports neither torch nor
transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from pagewood.engine.json_fields import Fields

_MAX_TOKEN = (1 << 24) - 1


def tokenizer_end(folder: Path) -> int | None:
    """Return the id of `eos_token` in tokenizer_config.json, else in special_tokens_map.json; None: neither has one.

    Raises:
        ValueError: a file is damaged, or the token is neither a text nor an object with a `content`.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if not file.is_file():
            continue
        fields = Fields.from_file(file)
        if fields.values.get("eos_token") is not None:
            return _id_of(folder, fields, _content(fields))
    return None


def token_ids(file: Path) -> dict[str, int]:
    """Return the id of every token in a tokenizer.json, added tokens included.

    Raises:
        ValueError: the file is damaged.
    """
    fields = Fields.from_file(file)
    model = fields.section("model") or fields.empty("model")
    vocab = model.values.get("vocab")
    ids: dict[str, int] = {}
    if isinstance(vocab, dict):
        ids.update(cast("dict[str, int]", vocab))
    elif isinstance(vocab, list):  # a list of (piece, score)
        ids.update({str(pair[0]): i for i, pair in enumerate(cast("list[list[object]]", vocab)) if pair})
    added = fields.values.get("added_tokens")
    for token in cast("list[object]", added) if isinstance(added, list) else []:
        if isinstance(token, dict):
            entry = Fields(f"{file}: added_tokens", cast("dict[str, object]", token))
            ids[entry.text("content")] = entry.integer("id", high=_MAX_TOKEN)
    return ids


def _content(fields: Fields) -> str:
    value = fields.values["eos_token"]
    if isinstance(value, dict):
        return Fields(f"{fields.source}: eos_token", cast("dict[str, object]", value)).text("content")
    return fields.text("eos_token")


def _id_of(folder: Path, fields: Fields, token: str) -> int | None:
    """Return the id of a token: from `added_tokens_decoder`, which is short, else from tokenizer.json."""
    decoder = fields.section("added_tokens_decoder") or fields.empty("added_tokens_decoder")
    for number, entry in decoder.values.items():
        if isinstance(entry, dict) and cast("dict[str, object]", entry).get("content") == token and number.isdecimal():
            return int(number)
    file = folder / "tokenizer.json"
    return token_ids(file).get(token) if file.is_file() else None
