"""The page of metrics, from the calls that define their families."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence

from pagewood.server.metrics import native

_SUFFIX = {"counter": "_total", "gauge": "", "histogram": ""}
_Names = Mapping[str, ast.expr]
"""What the variables of a loop stand for in one round."""


def metrics_page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Metrics", "",
        "Made from the definitions of the families. Every series has the label `model_name`, beside those named here. "
        "`--metrics-compat` adds those of vLLM and SGLang under their names.", "",
        "| series | kind | labels | |", "|---|---|---|---|",
    ]  # fmt: skip
    module = ast.parse(inspect.getsource(native))
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    for function in functions.values():
        for call, names in _calls(function.body, {}):
            assert isinstance(call.func, ast.Attribute)
            name, text = (_text(argument, names) for argument in call.args[:2])
            labels = ", ".join(f"`{label}`" for label in sorted(_labels(call, function, functions)))
            series = f"{native.PREFIX}{name}{_SUFFIX[call.func.attr]}"
            lines.append(f"| `{series}` | {call.func.attr} | {labels} | {text} |")
    return "\n".join([*lines, ""])


def _calls(body: Sequence[ast.stmt], names: _Names) -> Iterator[tuple[ast.Call, _Names]]:
    """Yield the calls that add a family; those in a loop over a tuple once for each of its items."""
    for statement in body:
        if isinstance(statement, ast.For):
            assert isinstance(statement.iter, ast.Tuple), "families are added in loops over tuples"
            for item in statement.iter.elts:
                target = statement.target
                pairs = [(target, item)]
                if isinstance(target, ast.Tuple) and isinstance(item, ast.Tuple):
                    pairs = list(zip(target.elts, item.elts, strict=True))
                bound = {one.id: value for one, value in pairs if isinstance(one, ast.Name)}
                yield from _calls(statement.body, {**names, **bound})
        elif isinstance(statement, ast.If):
            yield from _calls([*statement.body, *statement.orelse], names)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            if isinstance(call.func, ast.Attribute) and call.func.attr in _SUFFIX:
                yield call, names


def _labels(node: ast.AST, function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> set[str]:
    """Return the keys of the dicts in an expression, and in what its names and calls stand for."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            found |= {str(key.value) for key in part.keys if isinstance(key, ast.Constant)}
        elif isinstance(part, ast.Name) and part.id in functions:
            found |= _labels(functions[part.id], functions[part.id], {})
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            for one in ast.walk(function):
                if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == part.id:
                    found |= _labels(one.value, function, functions)
    return found


def _text(node: ast.expr, names: _Names) -> str:
    """Return the string that an expression stands for."""
    if isinstance(node, ast.Name):
        return _text(names[node.id], names)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, names)
    assert isinstance(node, ast.Constant)
    return str(node.value)
