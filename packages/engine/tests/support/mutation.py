"""Damaged copies of bytes, of JSON values and of texts, by a seed."""

from __future__ import annotations

import copy
import random
from typing import Any, cast

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31 - 1, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.5, 1e308, -1e308, float("nan"),
    float("inf"), "", "0", "null", "x" * 3000, "\0", "\ud800", "../../etc/passwd", "{{ 1 }}", "(" * 300, [], [[]],
    [None], [0] * 100, {}, {"": None}, {"type": "x"}, {"$ref": "#"},
)  # fmt: skip
"""Values that readers of JSON files get wrong."""


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with a few places flipped, cut out, repeated, overwritten, or cut off."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(found) + 1)
        end = min(len(found), start + rng.choice((1, 1, 2, 8, 100)))
        match rng.randrange(6):
            case 0 if found:
                found[min(start, len(found) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del found[start:end]
            case 2:
                found[start:start] = found[start:end] * rng.choice((1, 2, 50))
            case 3:
                found[start:end] = rng.randbytes(end - start)
            case 4:
                found[start:start] = rng.choice((b"\0", b"\xff" * 8, b"[" * 500, b"\r\n", b"9" * 400, b"\x93\xdf\xff"))
            case _:
                del found[start:]
    return bytes(found)


def damaged_text(rng: random.Random, text: str) -> str:
    """Return a text whose bytes are damaged."""
    return damaged_bytes(rng, text.encode()).decode(errors="replace")


def damaged_json(rng: random.Random, value: Any) -> Any:
    """Return a JSON value in which a few members are replaced, removed, nested deeply or swapped."""
    found: Any = {"": copy.deepcopy(value)}
    for _ in range(rng.randint(1, 3)):
        places = list(_places(found))
        holder, key = rng.choice(places)
        match rng.randrange(5):
            case 0 if key != "":
                del holder[key]
            case 1:
                for _ in range(rng.choice((1, 5, 200))):
                    holder[key] = rng.choice(([holder[key]], {"type": holder[key]}))
            case 2:
                other_holder, other = rng.choice(places)
                holder[key] = copy.deepcopy(other_holder[other])
            case _:
                holder[key] = copy.deepcopy(rng.choice(STRANGE))
    return found[""]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return the members of all objects and arrays below a value: their holder and their key."""
    found: list[tuple[Any, Any]] = []
    pending = [value]
    while pending:
        one = pending.pop()
        members: list[tuple[Any, Any]] = []
        if isinstance(one, dict):
            members = list(cast("dict[Any, Any]", one).items())
        elif isinstance(one, list):
            members = list(enumerate(cast("list[Any]", one)))[:50]
        found += [(one, key) for key, _ in members]
        pending += [member for _, member in members]
    return found
