"""The fields that restrict an answer, from OpenAI, vLLM and SGLang, and the grammar that they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.engine.api import Grammar
from pagewood.engine.ebnf import is_ebnf, lark_of_ebnf
from pagewood.server.http.errors import ApiError
from pagewood.server.http.validation import kind

MAX_GRAMMAR_LENGTH = 262_144
"""Characters of a schema, an expression, a list of choices or another grammar, as compact JSON where it is JSON."""

ANY_OBJECT = {"type": "object"}
"""Schema of any JSON object."""


def _object_or_text(value: Any) -> Any:
    if value is None or isinstance(value, dict):
        return cast("Any", value)
    return _text(value, "an object or a string")


def _text(value: Any, expected: str = "a string") -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"expected {expected}, but got {kind(value)} instead")
    if value == "":
        raise ValueError("expected a string that is not empty")
    return value


def _choices(value: Any) -> list[str] | None:
    """Return the choices; an empty list means no restriction."""
    if value is None or value == []:
        return None
    items = cast("list[Any]", value)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"expected an array of strings, but got {_first_kind(value)} instead")
    if not all(items):
        raise ValueError("expected strings that are not empty")
    return items


def _first_kind(value: Any) -> str:
    if not isinstance(value, list):
        return kind(value)
    wrong = next(item for item in cast("list[Any]", value) if not isinstance(item, str))
    return f"an array with {kind(wrong)}"


def _off(value: Any) -> None:
    if value is not None and value is not False:
        raise ValueError("only null and false are supported")


_String = Annotated[str, Field(min_length=1)]
_Schema = Annotated[dict[str, Any] | str | None, BeforeValidator(_object_or_text, dict[str, Any] | _String | None)]
_Text = Annotated[str | None, BeforeValidator(_text, _String | None)]
_Choices = Annotated[list[str] | None, BeforeValidator(_choices, list[_String] | None)]
_Off = Annotated[None, BeforeValidator(_off, Literal[False] | None)]


class JsonSchemaFormat(BaseModel):
    """`response_format.json_schema`. Answers follow the schema also if `strict` is false."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(BaseModel):
    """`response_format`: OpenAI's, and the two forms of structural tags."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None


class StructuredOutputs(BaseModel):
    """`structured_outputs` of vLLM."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: Annotated[_Schema, Field(alias="json")] = None
    regex: _Text = None
    choice: _Choices = None
    grammar: _Text = None
    json_object: bool | None = None
    structural_tag: _Schema = None
    disable_fallback: bool | None = None
    """Without effect: the server never falls back to another library."""
    disable_any_whitespace: _Off = None
    disable_additional_properties: _Off = None
    whitespace_pattern: _Off = None


class StructuredFields(BaseModel):
    """The fields of a request that restrict its answers. At most one of them may be used."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    response_format: ResponseFormat | None = None

    # vLLM; OpenAI's clients send these with `extra_body`.
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema = None
    guided_regex: _Text = None
    guided_choice: _Choices = None
    guided_grammar: _Text = None
    # SGLang
    json_schema: _Schema = None
    regex: _Text = None
    ebnf: _Text = None
    structural_tag: _Schema = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A grammar, and the field of the request that asks for it."""

    grammar: Grammar
    param: str


_Given = tuple[str, Callable[[Any], Grammar], Any]
"""Name of a field, and the function that makes a grammar from its value."""


def constraint(fields: StructuredFields, *, format_param: str = "response_format") -> Constraint | None:
    """Return the grammar of the answers; None: no restriction. The engine checks the grammar.

    Args:
        fields: the request.
        format_param: the client's name of `response_format`.

    Raises:
        ApiError: several fields give a grammar, a field lacks a part, or the grammar's text is too long.
    """
    given = [*_response_format(fields.response_format, format_param), *_structured_outputs(fields.structured_outputs)]
    given += _asked(
        ("guided_json", Grammar.json_schema, fields.guided_json),
        ("guided_regex", Grammar.regex, fields.guided_regex),
        ("guided_choice", Grammar.choice, fields.guided_choice),
        ("guided_grammar", _lark, fields.guided_grammar),
        ("json_schema", Grammar.json_schema, fields.json_schema),
        ("regex", Grammar.regex, fields.regex),
        ("ebnf", _lark, fields.ebnf),
        ("structural_tag", Grammar.structural_tag, fields.structural_tag),
    )
    if len(given) > 1:
        first, second = given[0][0], given[1][0]
        raise ApiError(
            f"'{first}' and '{second}' both say what the answer may be; send only one of them.",
            param=second,
            code="invalid_value",
        )
    if not given:
        return None
    return constrained(*given[0])


def constrained(name: str, make: Callable[[Any], Grammar], value: Any) -> Constraint:
    """Return the constraint of field `name`; `make` makes a grammar from its value.

    Raises:
        ApiError: the value is no grammar, or is too long.
    """
    try:
        grammar = make(value)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(f"Invalid value for '{name}': {reason}.", param=name, code="invalid_grammar") from error
    if len(grammar.text) > MAX_GRAMMAR_LENGTH:
        raise ApiError(
            f"Invalid value for '{name}': expected at most {MAX_GRAMMAR_LENGTH} characters, but got "
            f"{len(grammar.text)} instead.",
            param=name,
            code="invalid_value",
        )
    return Constraint(grammar=grammar, param=name)


def _asked(*fields: _Given) -> Iterator[_Given]:
    return (field for field in fields if field[2] is not None)


def _response_format(format: ResponseFormat | None, given_as: str) -> Iterator[_Given]:
    if format is None:
        return
    parts = {name: getattr(format, name) for name in ("json_schema", "format", "structures", "triggers")}
    parts = {name: value for name, value in parts.items() if value is not None}
    allowed = {"json_schema": {"json_schema"}, "structural_tag": {"format", "structures", "triggers"}}
    for name in parts:
        if name not in allowed.get(format.type, ()):
            param = f"{given_as}.{name}"
            message = f"The '{param}' parameter is not allowed with the type '{format.type}'."
            raise ApiError(message, param=param, code="invalid_value")
    match format.type:
        case "text":
            pass
        case "json_object":
            yield given_as, Grammar.json_schema, ANY_OBJECT
        case "json_schema":
            if format.json_schema is None:
                param = f"{given_as}.json_schema"
                message = f"Missing required parameter: '{param}'."
                raise ApiError(message, param=param, code="missing_required_parameter")
            yield given_as, Grammar.json_schema, format.json_schema.schema_
        case "structural_tag":
            yield given_as, Grammar.structural_tag, {"type": format.type, **parts}


def _structured_outputs(outputs: StructuredOutputs | None) -> Iterator[_Given]:
    if outputs is None:
        return iter(())
    return _asked(
        ("structured_outputs.json", Grammar.json_schema, outputs.json_),
        ("structured_outputs.regex", Grammar.regex, outputs.regex),
        ("structured_outputs.choice", Grammar.choice, outputs.choice),
        ("structured_outputs.grammar", _lark, outputs.grammar),
        ("structured_outputs.json_object", Grammar.json_schema, ANY_OBJECT if outputs.json_object else None),
        ("structured_outputs.structural_tag", Grammar.structural_tag, outputs.structural_tag),
    )


def _lark(text: str) -> Grammar:
    """Return the grammar that a text in Lark or in EBNF describes."""
    return Grammar.lark(lark_of_ebnf(text) if is_ebnf(text) else text)
