"""The page of all commands and options, from the parsers that read them."""

from __future__ import annotations

import argparse

from pagewood.server.cli.main import COMMANDS


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command by its name."""
    found = argparse.ArgumentParser(prog="pagewood").add_subparsers()
    for command in COMMANDS:
        command.add_parser(found)
    return dict(found.choices)


def options_page() -> str:
    """Return the page as Markdown."""
    lines = ["# Commands and options", "", "Made from the parsers of the command `pagewood`.", ""]
    for name, parser in parsers().items():
        lines += [f"## pagewood {name}", "", f"{_text(parser.description or '')}", ""]
        for group in parser._action_groups:  # argparse has no public name for it
            shown = [action for action in group._group_actions if "--help" not in action.option_strings]
            if not shown:
                continue
            lines += [f"### {name}: {group.title}", "", "| option | |", "|---|---|"]
            lines += [f"| {_names(action)} | {_help(action, parser)} |" for action in shown]
            lines.append("")
    return "\n".join(lines)


def _names(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return f"`{value}`"
    value = "" if action.nargs == 0 else f" {value}"
    return "<br>".join(f"`{name}{value}`" for name in action.option_strings)


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    formatter = parser._get_formatter()
    return _text(formatter._expand_help(action)) if action.help else ""


def _text(text: str) -> str:
    """Return text of a page of help as Markdown of a cell."""
    for sign in "\\<>|*_[]{":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ")
