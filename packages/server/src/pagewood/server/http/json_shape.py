"""The number of values in a JSON body, counted in its bytes to limit the work of parsing before it begins.

A value of a few bytes takes microseconds and a kilobyte to be checked, so a body within `--max-body-bytes` could hold
up the event loop for seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from pagewood.server.http.errors import ApiError

MAX_CONTAINERS = 16_384
"""Most objects and arrays of a body. Checking that many takes 0.05 s, during which the event loop is blocked."""
MAX_STRINGS = 131_072
"""Most strings of a body, names of fields included."""
MAX_VALUES = 131_072
"""Most values of a body beside the token ids in `ID_FIELDS`."""
MAX_IDS = 1_200_000
"""Most token ids of a body: more than the longest windows of models have."""
ID_FIELDS = ("prompt", "input", "input_ids", "tokens")
"""Fields that may hold arrays of token ids, or arrays of such arrays, which are checked as a whole."""


class Shape(NamedTuple):
    """Counts of a JSON text."""

    num_containers: int
    num_strings: int
    num_commas: int


def shape_of(body: bytes) -> Shape:
    """Return the counts of a JSON text; those of a text that is not JSON are meaningless.

    If there are more than `MAX_STRINGS` strings, the other counts are 0.
    """
    text = body.replace(rb"\\", b"").replace(rb"\"", b"")  # from the left, as a reader of JSON pairs backslashes
    num_strings = (text.count(b'"') + 1) // 2
    if num_strings > MAX_STRINGS:
        return Shape(0, num_strings, 0)
    outside = b"".join(text.split(b'"')[::2])
    return Shape(outside.count(b"{") + outside.count(b"["), num_strings, outside.count(b","))


def check_shape(body: bytes) -> int:
    """Check that a body holds no more values than are read in a fraction of a second.

    Returns:
        The largest possible number of commas that separate values.

    Raises:
        ApiError: it holds more.
    """
    # These include characters in strings, so they are upper bounds of the counts: nearly every body passes here.
    at_most = Shape(body.count(b"{") + body.count(b"["), (body.count(b'"') + 1) // 2, body.count(b","))
    if (
        at_most.num_containers <= MAX_CONTAINERS
        and at_most.num_strings <= MAX_STRINGS
        and at_most.num_commas <= MAX_VALUES
    ):
        return at_most.num_commas
    shape = shape_of(body)
    _check(shape.num_strings, MAX_STRINGS, "strings and names")
    _check(shape.num_containers, MAX_CONTAINERS, "objects and arrays")
    _check(shape.num_commas, MAX_IDS, "token ids")
    return shape.num_commas


def check_values(fields: Mapping[str, Any], num_commas: int) -> None:
    """Check the number of values in a body beside token ids; `num_commas` is that of `check_shape`.

    Raises:
        ApiError: there are too many.
    """
    if num_commas <= MAX_VALUES:
        return
    for name in ID_FIELDS:
        if isinstance(value := fields.get(name), list):
            items = cast("list[Any]", value)
            num_commas -= len(items) + sum([len(cast("list[Any]", one)) for one in items if isinstance(one, list)])
    _check(num_commas, MAX_VALUES, "values beside token ids")


def _check(number: int, most: int, what: str) -> None:
    if number > most:
        raise ApiError(
            f"The body of your request must hold at most {most} {what}, but it holds {number}.", code="too_many_values"
        )
