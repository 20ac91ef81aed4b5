"""Response templates: how a model writes reasoning and calls, as data that a checkpoint carries.

The form is version 1 of the `response_template` in `tokenizer_config.json`, as transformers reads it:

    {"start_anchor": "<|im_start|>assistant\\n",
     "fields": {"reasoning_content": {"open": "<think>", "close": "</think>"},
                "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": true, "content": "json",
                               "transform": {"type": "function", "function": "{content}"}},
                "content": {"close": "<|im_end|>"}}}

Beyond version 1, a template may have these keys, which transformers does not know:

- `detect` of the template: `model_types`, and lists of strings; a chat template must hold all strings of one list.
- `as` of a field: the part of the message that it stands for, so that a part can be written in several ways.
- `bare` of a field: calls may also begin the answer without `open`, if there are tools with their names.
- `content: "pythonic"`: calls `[f(a=1), g(b="x")]`; with `in_lines` in its `content_args`, lines of calls.
- `name_as_key` in the `content_args` of json: a call is `{"f": {"a": 1}}`, an object whose only key is the name. Such a
  field has no `transform`.
- A group `string` in a `tag_pattern`: the parameter itself marks its value as a text ("true") or as JSON ("false").
- `write` of a field of calls: the texts that a model writes around names and arguments, for grammars (see `Writing`).
- Fields with `content` json or pythonic may lack a close: then they end with their value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from pagewood.engine.text.response import expressions
from pagewood.engine.text.response.expressions import Expression, Node, spellings
from pagewood.engine.text.response.values import Dialect

Fields: TypeAlias = Mapping[str, Any]

KINDS: Mapping[str, Literal["content", "reasoning", "calls"]] = {
    "content": "content",
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
    "thinking": "reasoning",
    "tool_calls": "calls",
}
_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern", "detect"}
_FIELD_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each", "as", "bare", "write",
}  # fmt: skip
_TEXTS = ("text", "int", "float", "bool")
_CALLS = ("json", "xml-inline", "kv-lines", "pythonic")
_ARGUMENTS = {
    "text": {"strip"},
    "json": {"unquoted_keys", "string_delims", "allow_non_json", "name_as_key"},
    "xml-inline": {"tag_pattern", "value_parser", "merge_duplicates"},
    "kv-lines": {"line_sep", "kv_sep", "value_parser", "strip"},
    "pythonic": {"in_lines"},
}
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_MAX_FIELDS = 32
_MAX_LITERALS = 32
_MAX_FILE = 1 << 24


@dataclass(frozen=True, slots=True)
class Capture:
    """A named group of the expression that opens a section."""

    name: str


Key: TypeAlias = tuple[str, ...]
"""A place in the parsed content: the keys that lead there; empty: the whole content."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The places of the name, the arguments and the id of a call."""

    name: Capture | Key
    arguments: Key
    id: Capture | Key | None = None


@dataclass(frozen=True, slots=True)
class Parameters:
    """How parameters are written one by one."""

    open: Expression | None
    close: Expression | None
    """Texts before and after the value, after the key; None: the content can only be read when it is complete."""
    whole: Any
    """RE2's pattern of the whole parameter; None for lines."""
    separators: tuple[str, str]
    """Between lines, and between key and value in a line."""
    is_json: bool
    """Whether a value without a type in the schema is read as JSON, if possible."""
    merges: bool
    """Whether values of equal keys become a list."""


@dataclass(frozen=True, slots=True)
class Writing:
    """The texts that a model writes around calls; in `call`, `{name}` stands for the name, `{index}` for a number.

    All calls: `begin`, the calls with `between` them, `end`; `lead` may come before. A call: `call`, the arguments,
    `call_end`. Parameters, if they are written one by one: `parameter` with `{key}`, the value, `parameter_end`; in
    `parameter`, `{string}` stands for true if the value is a text, and for false if it is JSON.
    """

    lead: str = ""
    begin: str = ""
    call: str = ""
    call_end: str = ""
    between: str | None = ""
    """None: an answer has only one call."""
    end: str = ""
    parameter: str = ""
    parameter_end: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """A kind of section of an answer."""

    name: str
    kind: Literal["content", "reasoning", "calls"]
    open: Expression | None
    close: Expression | None
    content: str = "text"
    strips: bool = True
    """Whether white space around the text is dropped."""
    join: str = "\n"
    """Separator between the texts of two sections."""
    is_bare: bool = False
    each: bool = False
    """Whether the content is a list of calls."""
    name_as_key: bool = False
    """Whether the only key of a call in JSON is its name, and the value has its arguments."""
    in_lines: bool = False
    """Whether calls in Python stand one after another, without brackets around them."""
    shape: Shape = Shape(("function", "name"), ("function", "arguments"))
    dialect: Dialect = Dialect()  # noqa: RUF009 (frozen)
    parameters: Parameters | None = None
    writing: Writing | None = None


@dataclass(frozen=True, slots=True)
class Detection:
    """The features of models whose answers a template describes."""

    model_types: tuple[str, ...] = ()
    chat_template: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """The format of a model's answers. Invariant: at most one field has no open, and has the text outside of all
    sections.

    Make one with `from_json`, `from_folder` or `named`.
    """

    fields: tuple[Field, ...]
    anchor: Expression
    """The text at the end of the prompt, before the answer of the assistant."""

    @staticmethod
    def from_json(value: object) -> ResponseTemplate:
        """Read a template from its JSON value.

        Raises:
            ValueError: it is not a template of version 1, or uses an unsupported feature; the message names the place.
        """
        spec = _object(value, "response_template")
        if spec.get("version", 1) != 1:
            raise ValueError(f"response_template.version must be 1, got {spec['version']!r:.100}")
        _check_keys(spec, "response_template", _TEMPLATE_KEYS)
        _object(spec.get("defaults", {}), "response_template.defaults")
        raw = _object(spec.get("fields"), "response_template.fields")
        if not 1 <= len(raw) <= _MAX_FIELDS:
            raise ValueError(f"response_template.fields must hold 1 to {_MAX_FIELDS} fields, got {len(raw)}")
        known = {name: _object(field, f"fields.{name}") for name, field in raw.items()}
        known = {name: field for name, field in known.items() if field.get("as", name) in KINDS}
        outside = [name for name, field in known.items() if "open" not in field and "open_pattern" not in field]
        outside = [name for name in outside if not known[name].get("bare")]
        if len(outside) > 1:
            raise ValueError(f"at most one field may lack an open, got {outside}")
        fields = tuple(_field(name, field) for name, field in known.items())
        if any(field.name in outside and field.kind == "calls" for field in fields):
            raise ValueError(f"fields.{outside[0]} must have an open: calls need one")
        anchor = _delimiter(spec, "response_template", "start_anchor")
        if anchor is None:
            raise ValueError("response_template must have a start_anchor or start_anchor_pattern")
        anchor = Expression("response_template.start_anchor", anchor)
        _detection(spec.get("detect", {}))
        return ResponseTemplate(fields, anchor)

    @staticmethod
    def named(name: str) -> ResponseTemplate:
        """Return a shipped template; `names` lists them.

        Raises:
            ValueError: there is no template of that name.
        """
        if name not in ResponseTemplate.names():
            raise ValueError(f"response template must be one of {', '.join(ResponseTemplate.names())}, got {name!r}")
        return _shipped(name)

    @staticmethod
    @cache
    def names() -> tuple[str, ...]:
        """Return the names of the templates that are shipped."""
        files = (resources.files("pagewood.engine.text.response") / "templates").iterdir()
        return tuple(sorted(file.name[:-5] for file in files if file.name.endswith(".json")))

    @staticmethod
    def from_folder(folder: str | Path) -> ResponseTemplate | None:
        """Return the template of a model folder; None if it is unknown.

        It is the one in `tokenizer_config.json` or `response_template.json`. Otherwise it is a shipped one: the
        template with the most features in the chat template, or that of the `model_type`.

        Raises:
            ValueError: a file cannot be read, or the template that it carries is wrong.
        """
        folder = Path(folder)
        own = folder / "response_template.json"
        config = _read(folder / "tokenizer_config.json")
        carried = _read(own) if own.is_file() else config.get("response_template")
        if carried is not None:
            try:
                return ResponseTemplate.from_json(carried)
            except ValueError as error:
                raise ValueError(f"{folder}: {error}") from error
        detections = {name: _detection(_raw(name).get("detect", {})) for name in ResponseTemplate.names()}
        chat_template = _chat_template(folder, config)
        best: tuple[int, str] | None = None
        for name, detection in detections.items():
            for features in detection.chat_template:
                if all(feature in chat_template for feature in features):
                    best = max(best or (0, ""), (sum(map(len, features)), name))
        if best is not None:
            return _shipped(best[1])
        model_type = _read(folder / "config.json").get("model_type")
        of_type = (name for name, detection in detections.items() if model_type in detection.model_types)
        found = next(of_type, None)
        return None if found is None else _shipped(found)

    @property
    def has_calls(self) -> bool:
        """Whether answers may call functions."""
        return any(field.kind == "calls" for field in self.fields)

    def marks_with(self, tokens: Iterable[str]) -> frozenset[str]:
        """Return the texts that marks contain; empty if no section begins, and no reasoning or call ends, with one.

        If they are special tokens, answers must be decoded with these special tokens, to be read.
        """
        needed = [
            one for field in self.fields for one in (field.open, None if field.kind == "content" else field.close)
        ]
        if not _in_marks(needed, tokens):
            return frozenset()
        return _in_marks([one for field in self.fields for one in (field.open, field.close)], tokens)

    @property
    def outside(self) -> Field | None:
        """The field of the text outside of all sections; None: such text is still content."""
        return next((field for field in self.fields if field.open is None and not field.is_bare), None)


def _in_marks(marks: Iterable[Expression | None], tokens: Iterable[str]) -> frozenset[str]:
    texts = [text for mark in marks if mark is not None for text in spellings(mark.node)]
    return frozenset(token for token in tokens if any(token in text for text in texts))


@cache
def _shipped(name: str) -> ResponseTemplate:
    return ResponseTemplate.from_json(_raw(name))


def _raw(name: str) -> Fields:
    file = resources.files("pagewood.engine.text.response") / "templates" / f"{name}.json"
    return _object(json.loads(file.read_text(encoding="utf-8")), name)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    if file.stat().st_size > _MAX_FILE:
        raise ValueError(f"{file} must have at most {_MAX_FILE} bytes, got {file.stat().st_size}")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} must hold JSON: {error}") from error
    return dict(_object(value, str(file)))


def _chat_template(folder: Path, config: Fields) -> str:
    """Return the text of all chat templates."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    carried = config.get("chat_template", "")
    return carried if isinstance(carried, str) else "".join(_texts(carried))


def _texts(value: object) -> list[str]:
    templates = cast("list[object]", value) if isinstance(value, list) else []
    found = [cast("Fields", item).get("template") for item in templates if isinstance(item, dict)]
    return [text for text in found if isinstance(text, str)]


def _object(value: object, where: str) -> Fields:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a JSON object, got {value!r:.100}")
    return cast("Fields", value)


def _check_keys(fields: Fields, where: str, known: set[str]) -> None:
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"{where} must have only keys that are known, got {', '.join(map(repr, unknown))}")


def _detection(value: object) -> Detection:
    where = "response_template.detect"
    detect = _object(value, where)
    _check_keys(detect, where, {"model_types", "chat_template"})
    features = detect.get("chat_template", [])
    if not isinstance(features, list):
        raise ValueError(f"{where}.chat_template must be a list of lists of texts, got {features!r:.100}")
    lists = [_strings(one, f"{where}.chat_template") for one in cast("list[object]", features)]
    return Detection(_strings(detect.get("model_types", []), f"{where}.model_types"), tuple(lists))


def _strings(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[object]", value)):
        raise ValueError(f"{where} must be a list of texts, got {value!r:.100}")
    return tuple(cast("list[str]", value))


def _delimiter(fields: Fields, where: str, key: str) -> Node | None:
    """Return the expression of a literal, several literals or a pattern."""
    pattern = f"{key}_pattern"
    if key in fields and pattern in fields:
        raise ValueError(f"{where} must not have both {key} and {pattern}")
    if pattern in fields:
        return expressions.parse(f"{where}.{pattern}", fields[pattern])
    if key not in fields:
        return None
    value = fields[key]
    literals = [value] if isinstance(value, str) else value
    if (
        not isinstance(literals, list)
        or not 1 <= len(cast("list[object]", literals)) <= _MAX_LITERALS
        or not all(isinstance(item, str) and item for item in cast("list[object]", literals))
    ):
        raise ValueError(f"{where}.{key} must be a text, or 1 to {_MAX_LITERALS} texts, got {value!r:.100}")
    return expressions.from_literals(f"{where}.{key}", cast("list[str]", literals)).node


def _field(name: str, field: Fields) -> Field:
    where = f"fields.{name}"
    _check_keys(field, where, _FIELD_KEYS)
    kind = KINDS[field.get("as", name)]
    for key in ("repeats", "optional", "transform_each", "bare"):
        _flag(field, where, key)
    join = field.get("join", "\n")
    if not isinstance(join, str) or ("join" in field and not field.get("repeats")):
        raise ValueError(f"{where}.join must be a text, and needs repeats: true, got {join!r:.100}")
    content = field.get("content", "text")
    if content not in (_CALLS if kind == "calls" else _TEXTS):
        raise ValueError(f"{where}.content must be one of {', '.join(_CALLS if kind == 'calls' else _TEXTS)}, "
                         f"got {content!r:.100}")  # fmt: skip
    given = _object(field.get("content_args", {}), f"{where}.content_args")
    _check_keys(given, f"{where}.content_args", _ARGUMENTS.get(content, {"strip"}))
    open_node, close_node = _delimiter(field, where, "open"), _delimiter(field, where, "close")
    strips = _flag(given, f"{where}.content_args", "strip", default=True) if kind != "calls" else True
    # White space before a section belongs to the text around it, which drops it; the same holds after a section.
    open_ = None if open_node is None else Expression(f"{where}.open", expressions.without_leading_space(open_node))
    if close_node is not None and strips:
        close_node = expressions.without_leading_space(close_node)
    close = None if close_node is None else Expression(f"{where}.close", close_node)
    if kind != "calls":
        if "transform" in field:
            raise ValueError(f"{where}.transform is supported for tool_calls only")
        if field.get("bare") or "write" in field:
            raise ValueError(f"{where} must have no bare and no write, which are for calls")
        join = join if strips or "join" in field else ""
        return Field(name, kind, open_, close, strips=strips, join=join)
    names = () if open_ is None else open_.names
    each = _flag(field, where, "transform_each")
    if close is None and content not in ("json", "pythonic"):
        raise ValueError(f"{where} must have a close, because its content {content} has no end of its own")
    name_as_key = _flag(given, f"{where}.content_args", "name_as_key")
    if name_as_key and ("transform" in field or names):
        raise ValueError(f"{where} must have no transform and no groups, because name_as_key says where names are")
    in_lines = _flag(given, f"{where}.content_args", "in_lines")
    if in_lines and field.get("bare"):
        raise ValueError(f"{where} must not be bare, because calls in lines have no bracket that begins them")
    has_shape = content != "pythonic" and not name_as_key
    return Field(
        name, kind, open_, close, content, join=join, is_bare=bool(field.get("bare")), each=each,
        name_as_key=name_as_key, in_lines=in_lines,
        shape=_shape(field, where, names, content, each=each) if has_shape else Shape((), ()),
        dialect=_dialect(given, f"{where}.content_args"), parameters=_parameters(given, where, content),
        writing=_writing(field.get("write"), f"{where}.write"),
    )  # fmt: skip


def _flag(fields: Fields, where: str, key: str, *, default: bool = False) -> bool:
    value = fields.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{where}.{key} must be true or false, got {value!r:.100}")
    return value


def _dialect(given: Fields, where: str) -> Dialect:
    delims: Any = given.get("string_delims", [])
    if not isinstance(delims, list) or not all(
        isinstance(pair, list) and len(cast("list[object]", pair)) == 2
        and all(isinstance(mark, str) and mark for mark in cast("list[object]", pair))
        for pair in cast("list[object]", delims)
    ):  # fmt: skip
        raise ValueError(f"{where}.string_delims must be pairs of texts, got {delims!r:.100}")
    pairs = tuple((pair[0], pair[1]) for pair in cast("list[list[str]]", delims))
    return Dialect(string_delims=pairs, unquoted_keys=_flag(given, where, "unquoted_keys"))


def _parameters(given: Fields, where: str, content: str) -> Parameters | None:
    if content not in ("xml-inline", "kv-lines"):
        return None
    where = f"{where}.content_args"
    parser = _object(given.get("value_parser") or {}, f"{where}.value_parser")
    _check_keys(parser, f"{where}.value_parser", {"name", "args"})
    if parser.get("name", "text") not in (*_TEXTS, "json"):
        raise ValueError(f"{where}.value_parser.name must be json or text, got {parser['name']!r:.100}")
    is_json = parser.get("name") == "json"
    if content == "kv-lines":
        separators = given.get("line_sep", "\n"), given.get("kv_sep", ":")
        if not all(isinstance(text, str) and text for text in separators):
            raise ValueError(f"{where}.line_sep and kv_sep must be texts, got {separators!r:.100}")
        return Parameters(None, None, None, separators, is_json, False)
    where = f"{where}.tag_pattern"
    node = expressions.parse(where, given.get("tag_pattern"))
    merges = _flag(given, where, "merge_duplicates")
    opening, closing = _split(node)
    names: Sequence[str] = () if opening is None else Expression(where, opening).names
    if opening is None or closing is None or merges:
        whole = expressions.compile_whole(where, node)
        names = tuple(whole.groupindex)
    else:
        whole = None
    if "string" in names and whole is not None:
        raise ValueError(f"{where} must have (?P<value>.*?) between two texts, if it has a group named string")
    if "key" not in names:
        raise ValueError(f"{where} must have a group named key, got {given.get('tag_pattern')!r:.100}")
    if whole is not None:
        return Parameters(None, None, whole, ("", ""), is_json, merges)
    first, second = cast("Node", opening), cast("Node", closing)
    return Parameters(Expression(where, first), Expression(where, second), None, ("", ""), is_json, merges)


def _split(node: Node) -> tuple[Node | None, Node | None]:
    """Return the texts before and after `(?P<value>.*?)`; None if the expression is not of that form."""
    for index, item in enumerate(node.items if node.kind == "sequence" else ()):
        if item.kind == "group" and item.text == "value":
            before = Node("sequence", items=node.items[:index])
            behind = Node("sequence", items=node.items[index + 1 :])
            value = item.items[0].items[0] if len(item.items[0].items) == 1 else item.items[0]
            is_any = value.kind == "repeat" and value.lazy and value.low == 0 and value.items[0].text == "."
            if is_any and expressions.least_of(before) and expressions.least_of(behind):
                return before, behind
    return None, None


def _shape(field: Fields, where: str, captures: Sequence[str], content: str, *, each: bool) -> Shape:
    """Return the places of the parts of a call, from the `transform`."""
    transform = field.get("transform")
    where = f"{where}.transform"
    is_whole = content != "json"
    if transform is None:
        if is_whole or captures:
            raise ValueError(f"{where} must say where the name of a call is")
        return Shape(("function", "name"), ("function", "arguments"), ("id",))
    outer = _object(transform, where)
    inner = outer.get("function", outer)
    if isinstance(inner, str):
        path = _placeholder(inner, where, captures, each=each)
        if isinstance(path, Capture) or is_whole:
            raise ValueError(f"{where}.function must be a part of the content, got {inner!r:.100}")
        return Shape((*path, "name"), (*path, "arguments"), (*path, "id"))
    function = _object(inner, f"{where}.function")
    name = _placeholder(function.get("name"), f"{where}.function.name", captures, each=each)
    arguments = _placeholder(function.get("arguments"), f"{where}.function.arguments", captures, each=each)
    id_ = _placeholder(outer["id"], f"{where}.id", captures, each=each) if "id" in outer else None
    if isinstance(arguments, Capture) or (is_whole and arguments):
        raise ValueError(f"{where}.function.arguments must be the content or a part of it")
    if is_whole and not isinstance(name, Capture):
        raise ValueError(f"{where}.function.name must be a named group of open_pattern")
    if not isinstance(name, Capture) and name == arguments[: len(name)]:
        raise ValueError(f"{where}.function.name must be another part of the content than the arguments")
    return Shape(name, arguments, id_)


def _placeholder(value: object, where: str, captures: Sequence[str], *, each: bool) -> Capture | Key:
    found = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"{where} must be a placeholder such as {{content}}, got {value!r:.100}")
    root, *keys = found[1].split(".")
    if root in captures and not keys:
        return Capture(root)
    if each:
        return (root, *keys)
    if root != "content":
        raise ValueError(f"{where} must name the content or a group of open_pattern, got {value!r:.100}")
    return tuple(keys)


def _writing(value: object, where: str) -> Writing | None:
    if value is None:
        return None
    texts = _object(value, where)
    _check_keys(texts, where, set(Writing.__dataclass_fields__))
    for key, text in texts.items():
        if not isinstance(text, str) and (key != "between" or text is not None):
            raise ValueError(f"{where}.{key} must be a text, got {text!r:.100}")
    return Writing(**texts)
