"""A page of help: the options that a parser takes, and the length of their descriptions."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any

_HELP_COLUMN = 35


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=_HELP_COLUMN)


FORMATTER: Any = _formatter
"""`formatter_class` of parsers whose options have long names. argparse calls it with `prog`, but asks for a class."""


@dataclass(frozen=True, slots=True)
class Group:
    """Options below one heading."""

    arguments: argparse._ArgumentGroup  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for it
    page: Page

    def add(self, *names: str, help: str, more: str = "", **settings: Any) -> None:
        """Add an option, if the page takes it.

        Args:
            names: its names, first the one that `Page.only` has.
            help: one line with the default.
            more: sentences that follow unless the page is brief.
            settings: as in `add_argument`.
        """
        if self.page.only is not None and names[0] not in self.page.only:
            return
        shown = help if self.page.is_brief or not more else f"{help}. {more}"
        self.arguments.add_argument(*names, help=shown, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A parser whose options are chosen by name."""

    parser: argparse.ArgumentParser
    only: frozenset[str] | None = None
    """First names of the options that it takes; None: all."""
    is_brief: bool = False
    """Whether only the first line of each help is shown."""

    def group(self, title: str) -> Group:
        """Return a new group; without options, its title is not shown."""
        return Group(self.parser.add_argument_group(title), self)


def settings_of(options: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """Return the fields of a configuration that options of the same name set; repeatable options are tuples."""
    found = {one.name: getattr(options, one.name) for one in fields(config) if hasattr(options, one.name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]  # of a namespace
