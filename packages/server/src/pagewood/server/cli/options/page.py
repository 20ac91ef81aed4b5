"""A page of help: the options that a parser takes, and the length of their descriptions."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from pagewood.engine.api import EngineConfig
from pagewood.server.config import ServeConfig
from pagewood.server.models.pool_config import PoolConfig

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]
"""What subcommands are added to; argparse has no public name for it."""
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

    def setting(self, *names: str, help: str, more: str = "", **settings: Any) -> None:
        """Add an option for the field of its name, or of `dest`, with its type, values and default; see `_fields`."""
        field = settings.get("dest", names[0].removeprefix("--").replace("-", "_"))
        self.add(*names, help=help, more=more, **_fields()[field] | settings)


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


@cache
def _fields() -> dict[str, dict[str, Any]]:
    """Return what `add_argument` gets for the fields of all configurations that have a default, by their names."""
    found: dict[str, dict[str, Any]] = {}
    for config in (EngineConfig, ServeConfig, PoolConfig):
        hints = get_type_hints(config)
        for one in fields(config):
            hint = hints[one.name]
            kind = hint if get_origin(hint) is Literal else next(iter(get_args(hint)), hint)  # of `int | None`: int
            values = {"choices": get_args(kind)} if get_origin(kind) is Literal else {"type": kind}
            found.setdefault(one.name, {"default": one.default, **values})
    return found


def settings_of(options: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """Return the fields of a configuration that options of the same name set; repeatable options are tuples."""
    found = {one.name: getattr(options, one.name) for one in fields(config) if hasattr(options, one.name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]  # of a namespace
