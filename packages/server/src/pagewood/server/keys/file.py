"""The keys of a file, and those of the environment."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pagewood.server.keys.key import ApiKey, checked_digest

KEY_VARIABLE = "PAGEWOOD_API_KEY"
ADMIN_VARIABLE = "PAGEWOOD_ADMIN_KEY"
_OTHERS = 0o077
"""Rights of other users on a file."""

_log = logging.getLogger(__name__)


class _Written(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A key as JSON."""

    key: str
    tenant: str = ""
    name: str = ""
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_priority: int | None = None
    models: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None


def read_keys(path: Path) -> list[ApiKey]:
    """Return the keys of a file: one on each line, plain, as a digest, or as a JSON object; or a JSON array of objects.

    Empty lines and lines that begin with `#` mean nothing.

    Raises:
        ValueError: the file cannot be read, is wrong or holds no key. The message names the line, and quotes no key.
    """
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the key file {path} cannot be read: {error}") from error
    if text.lstrip().startswith("["):
        written = [(f"key {i}", one) for i, one in enumerate(_array(path, text), 1)]
    else:
        lines = [(f"line {i}", line.strip()) for i, line in enumerate(text.splitlines(), 1)]
        written = [(where, _line(path, where, line)) for where, line in lines if line and not line.startswith("#")]
    keys = [_key(path, where, one) for where, one in written]
    if not keys:
        raise ValueError(f"the key file {path} must hold at least one key, got none")
    if mode & _OTHERS and any(not one.key.startswith("sha256:") for _, one in written):
        _log.warning("other users may read the keys in %s; chmod 600, or keep digests (sha256:...) instead", path)
    return keys


def keys_of_environment(environment: Mapping[str, str]) -> list[ApiKey]:
    """Return the keys of `PAGEWOOD_API_KEY` and `PAGEWOOD_ADMIN_KEY`, if they are set.

    Raises:
        ValueError: a key is too short, or cannot be sent.
    """
    found: list[ApiKey] = []
    for variable, admin in ((KEY_VARIABLE, False), (ADMIN_VARIABLE, True)):
        if key := environment.get(variable):
            try:
                found.append(ApiKey(digest=checked_digest(key), admin=admin))
            except ValueError as error:
                raise ValueError(f"{variable}: {error}") from None
    return found


def _array(path: Path, text: str) -> Sequence[_Written]:
    try:
        return msgspec.json.decode(text, type=list[_Written])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the key file {path} is wrong: {error}") from None


def _line(path: Path, where: str, line: str) -> _Written:
    if not line.startswith("{"):
        return _Written(key=line)
    try:
        return msgspec.json.decode(line, type=_Written)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the key file {path} is wrong, {where}: {error}") from None


def _key(path: Path, where: str, written: _Written) -> ApiKey:
    fields = {name: getattr(written, name) for name in written.__struct_fields__ if name != "key"}
    try:
        return ApiKey(digest=checked_digest(written.key), **fields)
    except ValueError as error:
        raise ValueError(f"the key file {path} is wrong, {where}: {error}") from None
