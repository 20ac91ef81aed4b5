"""Checks that a call written with the names of a function and its parameters is read back with the same names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from pagewood.engine.text.response.lark_rules import LarkRules
from pagewood.engine.text.response.marked_values import MarkedValues
from pagewood.engine.text.response.parser import ResponseParser
from pagewood.engine.text.response.template import Capture, Field, ResponseTemplate, Writing
from pagewood.engine.text.response.tool_schema import Schema, object_forms


class Function(NamedTuple):
    """A function that may be called."""

    name: str
    parameters: Schema
    place: str
    """Its place among the tools of the request."""

    @property
    def path(self) -> str:
        """The place of its parameters, for messages."""
        return f"{self.place} ({self.name:.80}): parameters"


def written_name(field: Field, name: str) -> str:
    """Return the name of a function as calls have it."""
    return name if isinstance(field.shape.name, Capture) or field.content == "pythonic" else json.dumps(name)


def check_readable(
    template: ResponseTemplate, field: Field, writing: Writing, function: Function, lark: LarkRules
) -> None:  # fmt: skip
    """Raise ValueError if a call could not be read back because of its name or the name of a parameter."""
    is_tagged = field.content != "json" or field.dialect.unquoted_keys
    root = function.parameters
    keys = dict.fromkeys(
        key for form in (object_forms(root, root, function.path) if is_tagged else ()) for key in form.properties
    )
    for text in (function.name, *keys):
        if lark.has_special(text):
            raise ValueError(f"{function.place} must have names without special tokens of the model, got {text!r:.100}")
    if _comes_back(template, field, writing, function, keys):
        return
    if not _comes_back(template, field, writing, function, ()):
        raise ValueError(
            f"{function.place} must have a name that calls of this model can have, got {function.name!r:.100}"
        )
    wrong = next((key for key in keys if not _comes_back(template, field, writing, function, [key])), None)
    what = "names of parameters that differ" if wrong is None else "a name that calls of this model can have"
    raise ValueError(
        f"{function.path}.properties must have {what}, got {list(keys) if wrong is None else wrong!r:.200}"
    )


def _comes_back(
    template: ResponseTemplate, field: Field, writing: Writing, function: Function, keys: Iterable[str]
) -> bool:  # fmt: skip
    """Return whether a call with some parameters is read back with the same names."""
    values = MarkedValues(field.dialect, LarkRules({}), {})
    parameter = writing.parameter.replace("{string}", "false")
    if field.content == "json":
        arguments = f"{{{','.join(f'{values.key(key)}0' for key in keys)}}}"
    elif field.content == "pythonic":
        arguments = ", ".join(f"{parameter.replace('{key}', key)}0" for key in keys)
    else:
        arguments = "".join(f"{parameter.replace('{key}', key)}0{writing.parameter_end}" for key in keys)
    call = writing.call.replace("{index}", "0").replace("{name}", written_name(field, function.name))
    text = f"{writing.begin}{call}{arguments}{writing.call_end}{writing.end}"
    tool: dict[str, Any] = {"name": function.name, "parameters": {}}
    parser = ResponseParser(template, tools=[tool])
    parts = [*parser.feed(text), *parser.finish()]
    frame = [(part.kind, part.text) for part in parts if part.kind != "arguments"]
    if frame != [("tool_call", function.name), ("call_end", "")]:
        return False
    read = json.loads("".join(part.text for part in parts if part.kind == "arguments"))
    return list(read) == list(keys)
