"""The chat templates of a model's folder, in every form in which `transformers` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

_DEFAULT = "default"
_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
_OF_PROCESSORS = "chat_template.json"


def chat_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a folder by name; "default" is the one without a name.

    Separate files replace `chat_template` of tokenizer_config.json: `chat_template.jinja` is the default, and
    `additional_chat_templates/NAME.jinja` has the name NAME. `chat_template.json`, which older processors have, counts
    if there is nothing else.

    Raises:
        ValueError: a file is damaged or has another form.
    """
    files = {path.stem: path for path in sorted((folder / _FOLDER).glob("*.jinja")) if path.is_file()}
    if (folder / _FILE).is_file():
        files[_DEFAULT] = folder / _FILE
    if files:
        return {name: _text(path) for name, path in files.items()}
    for name in ("tokenizer_config.json", _OF_PROCESSORS):
        found = _templates(folder / name)
        if found:
            return found
    return {}


def read_json(file: Path) -> dict[str, object]:
    """Return the object in a JSON file; an empty one if the file does not exist.

    Raises:
        ValueError: the file does not hold a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        value = cast("object", json.loads(_text(file)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} must hold JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return cast("dict[str, object]", value)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8: {error}") from error


def _templates(file: Path) -> dict[str, str]:
    """Return the templates in field `chat_template` of a JSON file: one, an object of them by name, or a list."""
    value = read_json(file).get("chat_template")
    match value:
        case None:
            return {}
        case str():
            return {_DEFAULT: value}
        case dict():
            named = list(cast("dict[object, object]", value).items())
        case list():
            named = [_pair(file, index, entry) for index, entry in enumerate(cast("list[object]", value))]
        case _:
            raise ValueError(
                f"{file}: chat_template must be a string, a list of objects with name and template, or an object of "
                f"strings, got {type(value).__name__}"
            )
    templates: dict[str, str] = {}
    for name, source in named:
        if not isinstance(name, str) or not isinstance(source, str):
            raise ValueError(f"{file}: chat_template {name!r:.80} must be a string, got {type(source).__name__}")
        if templates.setdefault(name, source) != source:
            raise ValueError(f"{file}: chat_template must have one template for each name, got two for {name!r:.80}")
    return templates


def _pair(file: Path, index: int, entry: object) -> tuple[object, object]:
    match entry:
        case {"name": str(name), "template": str(source)}:
            return name, source
        case _:
            raise ValueError(
                f"{file}: chat_template[{index}] must be an object with the strings name and template, got "
                f"{entry!r:.80}"
            )
