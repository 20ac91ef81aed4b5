"""Parses JSON bodies into validated requests, and reports errors in the words of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic_core import ErrorDetails

from pagewood.server.http.errors import ApiError
from pagewood.server.http.json_shape import check_shape, check_values

T = TypeVar("T", bound=BaseModel)
MAX_ERRORS = 1_000
"""Most wrong fields up to which an error names the first."""

_KINDS = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    list: "an array",
    dict: "an object",
}
_EXPECTED = {
    "string_type": "a string",
    "bool_type": "a boolean",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a decimal",
    "list_type": "an array",
    "tuple_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_BOUNDS = {"greater_than_equal": (">=", "ge"), "less_than_equal": ("<=", "le"), "greater_than": (">", "gt")}


def whole(value: Any) -> Any:
    """Return a number without a fraction as an integer; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(whole)
"""Accepts 5.0 for the integer 5. JSON has one type of number, and some clients write all of them with a fraction."""


def integers(value: Any) -> list[int] | None:
    """Return an array of whole numbers, such as token ids; None: the value is something else."""
    if not isinstance(value, list):
        return None
    items = cast("list[Any]", value)
    if float in set(map(type, items)):
        items = [whole(item) for item in items]
    return items if set(map(type, items)) <= {int} else None  # a boolean is not a number


def parse(model: type[T], body: bytes, *, neutral: Mapping[str, tuple[Any, ...]], ignored: frozenset[str]) -> T:
    """Return the request in a JSON body.

    Args:
        model: the supported fields and their types.
        body: JSON.
        neutral: unsupported fields -> their neutral values, which are accepted.
        ignored: fields that have no effect, whatever their value.

    Raises:
        ApiError: the body is not a JSON object or holds too many values, or a field is unknown, wrong, missing or not
            supported.
    """
    num_commas = check_shape(body)
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"We could not parse the JSON body of your request: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise ApiError(f"The body of your request must be a JSON object, but got {kind(content)} instead.")
    fields = cast("dict[str, Any]", content)
    check_values(fields, num_commas)
    for name, allowed in neutral.items():
        if name in fields and not asks_for_nothing(fields[name], allowed):
            raise ApiError(
                f"Unsupported parameter: '{name}' is not supported by this server; leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    return validated(
        model, {name: value for name, value in fields.items() if name not in neutral and name not in ignored}
    )


def parser(model: type[T], *, is_optional: bool = False) -> Callable[[bytes], T]:
    """Return a parser of bodies that have no unsupported fields; see `parse`. An optional body may be empty."""

    def parse_body(body: bytes) -> T:
        return parse(model, body or b"{}" if is_optional else body, neutral={}, ignored=frozenset())

    return parse_body


def validated(model: type[T], value: Any, *, at: tuple[int | str, ...] = ()) -> T:
    """Return a value as a model; `at` is its place in the request, such as ("tools", 0).

    Raises:
        ApiError: it is not such a value.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        if (number := error.error_count()) > MAX_ERRORS:  # to list them takes longer than to find them
            raise ApiError(
                f"The request has {number} fields that are wrong or unknown.", code="invalid_value"
            ) from None
        details = error.errors(include_url=False)[0]
        details["loc"] = (*at, *details["loc"])
        raise _api_error(details) from error


def kind(value: Any) -> str:
    """Return the kind of a JSON value with its article, such as `a string`."""
    return "null" if value is None else _KINDS.get(cast("type[Any]", type(value)), "another value")


def asks_for_nothing(value: Any, neutral: Sequence[Any]) -> bool:
    """Return whether the value of an unsupported field is neutral."""
    # In Python True == 1, in JSON they differ; 0 and 0.0 are the same number in both.
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral)


def describe_unused(schema: dict[str, Any], *, neutral: Mapping[str, tuple[Any, ...]], ignored: Iterable[str]) -> None:
    """Add the fields that are not supported, and those without effect, to the JSON schema of an object."""
    properties = schema["properties"]
    for name, values in neutral.items():
        properties[name] = {
            "enum": list(values),
            "description": "Not supported: only values that have no effect are accepted.",
        }
    for name in sorted(ignored):
        properties[name] = {"description": "Has no effect, whatever its value."}


def _api_error(error: ErrorDetails) -> ApiError:
    """Return the API's error for an error of pydantic."""
    name = _name(error["loc"])
    expected = _EXPECTED.get(error["type"])
    if error["type"] == "extra_forbidden":
        return ApiError(f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter")
    if error["type"] == "missing":
        return ApiError(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    if expected is not None:
        message = f"Invalid type for '{name}': expected {expected}, but got {kind(error['input'])} instead."
        return ApiError(message, param=name, code="invalid_type")
    if error["type"] in _BOUNDS:
        sign, key = _BOUNDS[error["type"]]
        limit = error.get("ctx", {})[key]
        message = f"Invalid value for '{name}': expected a value {sign} {limit}, but got {error['input']} instead."
        return ApiError(message, param=name, code="invalid_value")
    # The message comes from a validator of this package; pydantic puts "Value error" before it.
    message = error["msg"].removeprefix("Value error, ")
    return ApiError(
        f"Invalid value for '{name}': {message}." if name else f"{message}.", param=name, code="invalid_value"
    )


def _name(location: tuple[int | str, ...]) -> str | None:
    """Return `messages[0].role` for ("messages", 0, "role")."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return name.removeprefix(".") or None
