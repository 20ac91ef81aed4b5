"""Traces in files with one request per line: Mooncake's format, and logged OpenAI requests."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from pagewood.schedpolicy.counts import require_count, require_real
from pagewood.schedpolicy.simulation.trace import Trace, TraceRequest

MOONCAKE_BLOCK_SIZE = 512
"""Tokens per hash id in the published Mooncake traces."""

TEXT_BLOCK_SIZE = 64
"""Tokens per key of OpenAI requests."""

_MARKS = frozenset(("hash_ids", "messages", "prompt", "body"))
"""Fields that determine the kind of a line."""

_BYTES_PER_TOKEN = 4
"""UTF-8 bytes per token, if the number of tokens is not given."""


def load_trace(path: str | Path, *, block_size: int = MOONCAKE_BLOCK_SIZE) -> Trace:
    """Read a trace from a file of JSON objects, one per line; blank lines are ignored.

    A line with `hash_ids` is a Mooncake line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one per
    block of `block_size` tokens; equal ids mean that the block and all blocks before it are equal).

    A line with `messages` or `prompt`, at the top level or in a `body` (as in files of OpenAI's batch API), is an
    OpenAI request. Time: `timestamp` (ms) or `created` (unix seconds), else all requests arrive at once. Input length:
    `usage.prompt_tokens`, else one token per 4 bytes. Output length: `usage.completion_tokens`, else
    `max_completion_tokens` or `max_tokens`. Contents are compared as text; `user` is the tenant.

    Both kinds may have `max_new_tokens`, `tenant`, `priority`, `tag` and `deadline_s` (seconds after the arrival).
    Lines need not be sorted; times are relative to the earliest.

    Raises:
        ValueError: A line is malformed (the message gives its number), kinds are mixed, or the file is empty.
        OSError: The file cannot be read.
    """
    path = Path(path)
    require_count("block_size", block_size, least=1)
    reader: _Mooncake | _Texts | None = None
    lines: list[TraceRequest] = []
    first_s = math.inf
    for number, fields in _objects(path):
        if _MARKS.isdisjoint(fields):
            raise ValueError(
                f"{path}:{number}: a request must have hash_ids (Mooncake), or messages or prompt (OpenAI)"
            )
        kind = _Mooncake if "hash_ids" in fields else _Texts
        if reader is None:
            reader = kind(block_size=block_size) if kind is _Mooncake else _Texts()
        try:
            if type(reader) is not kind:
                raise ValueError("lines must be all of one kind, Mooncake or OpenAI")
            request = reader.read(fields)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        first_s = min(first_s, request.arrived_s)
        lines.append(request)
    if reader is None:
        raise ValueError(f"{path} must have at least one request, got none")
    lines.sort(key=lambda request: request.arrived_s)
    from_start = (replace(request, arrived_s=request.arrived_s - first_s) for request in lines)
    return Trace(name=path.name, requests=tuple(from_start), block_size=reader.block_size)


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace as Mooncake lines; optional fields are written only if they differ from the default."""
    with Path(path).open("w", encoding="utf-8") as file:
        for request in trace.requests:
            line: dict[str, Any] = {
                "timestamp": request.arrived_s * 1e3,
                "input_length": request.num_prompt,
                "output_length": request.num_output,
                "hash_ids": list(request.keys),
                "max_new_tokens": request.max_new_tokens,
            }
            optional = {
                "tenant": request.tenant,
                "priority": request.priority,
                "tag": request.tag,
                "deadline_s": request.deadline_s,
            }
            line |= {name: value for name, value in optional.items() if value}
            file.write(json.dumps(line) + "\n")


def _objects(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value: Any = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: a line must be JSON: {error}") from None
            if not isinstance(value, dict):
                raise ValueError(f"{path}:{number}: a line must be a JSON object, got {type(value).__name__}")
            yield number, cast("Mapping[str, Any]", value)


@dataclass(slots=True)
class _Interned:
    """Maps keys of any kind to small numbers, in the order of first use."""

    _numbers: dict[Any, int] = field(default_factory=dict[Any, int])

    def number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


@dataclass(slots=True, kw_only=True)
class _Mooncake:
    block_size: int
    _before: dict[int, int] = field(default_factory=dict[int, int])
    """The key before each key; -1 for the first."""  # written by: _Mooncake
    _interned: _Interned = field(default_factory=_Interned)

    def read(self, fields: Mapping[str, Any]) -> TraceRequest:
        num_prompt = _integer(fields, "input_length")
        hash_ids: Any = fields["hash_ids"]
        if not isinstance(hash_ids, list) or not all(isinstance(key, int) for key in cast("list[Any]", hash_ids)):
            raise ValueError(f"hash_ids must be a list of integers, got {hash_ids!r:.80}")
        keys = tuple(self._interned.number(key) for key in cast("list[int]", hash_ids))
        for key, before in zip(keys, (-1, *keys), strict=False):
            if self._before.setdefault(key, before) != before:
                raise ValueError(
                    f"hash_ids must identify all blocks before them, but one of {hash_ids!r:.60} followed another id"
                )
        arrived_s = _number(fields, "timestamp") / 1e3
        return _request(fields, arrived_s, num_prompt, _integer(fields, "output_length"), keys)


@dataclass(slots=True, kw_only=True)
class _Texts:
    block_size: int = TEXT_BLOCK_SIZE
    _interned: _Interned = field(default_factory=_Interned)

    def read(self, fields: Mapping[str, Any]) -> TraceRequest:
        body: Any = fields.get("body", fields)
        if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
            raise ValueError("body must be an object with messages or prompt")
        both = {**cast("dict[str, Any]", body), **fields}
        text = json.dumps(both["messages"] if "messages" in both else both["prompt"], ensure_ascii=False).encode()
        usage: Any = both.get("usage") or {}
        if not isinstance(usage, dict):
            raise ValueError(f"usage must be an object, got {type(usage).__name__}")
        counted = {**both, **cast("dict[str, Any]", usage)}
        num_prompt = -(-len(text) // _BYTES_PER_TOKEN)
        if "prompt_tokens" in counted:
            num_prompt = _integer(counted, "prompt_tokens")
        names = ("completion_tokens", "max_completion_tokens", "max_tokens")
        name = next((name for name in names if counted.get(name) is not None), None)
        if name is None:
            raise ValueError(f"a request must have one of {', '.join(names)}")
        arrived_s = _number(both, "timestamp") / 1e3 if "timestamp" in both else 0.0
        if "timestamp" not in both and "created" in both:
            arrived_s = _number(both, "created")
        limits = [_integer(both, limit) for limit in names[1:] if both.get(limit) is not None]
        fields_ = {"tenant": both.get("user", ""), "max_new_tokens": max(limits, default=None), **both}
        fields_ = {key: value for key, value in fields_.items() if value is not None}
        return _request(fields_, arrived_s, num_prompt, _integer(counted, name), self._keys(text, num_prompt))

    def _keys(self, text: bytes, num_prompt: int) -> tuple[int, ...]:
        """Return a key for each whole block of the text, at most as many as the prompt has blocks."""
        width = TEXT_BLOCK_SIZE * _BYTES_PER_TOKEN
        keys: list[int] = []
        digest = blake2b(digest_size=16)
        for start in range(0, min(len(text) // width, num_prompt // TEXT_BLOCK_SIZE) * width, width):
            digest.update(text[start : start + width])
            keys.append(self._interned.number(digest.digest()))
        return tuple(keys)


def _request(
    fields: Mapping[str, Any], arrived_s: float, num_prompt: int, num_output: int, keys: tuple[int, ...]
) -> TraceRequest:
    max_new_tokens = max(_integer(fields, "max_new_tokens"), num_output) if "max_new_tokens" in fields else num_output
    return TraceRequest(
        arrived_s=arrived_s,
        num_prompt=num_prompt,
        num_output=num_output,
        max_new_tokens=max_new_tokens,
        keys=keys,
        tenant=str(fields.get("tenant", "")),
        priority=_integer(fields, "priority") if "priority" in fields else 0,
        tag=str(fields.get("tag", "")),
        deadline_s=_number(fields, "deadline_s") if "deadline_s" in fields else None,
    )


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    require_real(name, value)
    try:
        return float(cast("float", value))
    except OverflowError:
        raise ValueError(f"{name} must be finite, got {value!r:.80}") from None


def _integer(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r:.80}")
    return value
