"""`pagewood top` with rich, of the extra `top`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pagewood.server.cli.top_screen import HEADINGS, Screen, shortened, size

_STYLES = {"running": "green", "paused": "blue", "draining": "dim"}
_WAITING = "yellow"
_NUM_COLUMNS = 3


def drawn(screen: Screen) -> RenderableType:
    """Return the screen. Text from clients is `Text`, which has no markup."""
    live = screen.live
    assert live is not None
    status = Text.assemble(
        ("Pagewood  ", "bold"), live.model, "   ", (live.detail, "green" if live.status == "ready" else _WAITING)
    )
    status.append("   q ends", "dim")
    return Padding(Group(status, "", _figures(screen), "", _processes(screen), "", _requests(screen)), (1, 2))


def _figures(screen: Screen) -> Table:
    table = Table.grid(padding=(0, 3))
    cells = [Text.assemble((f"{name}  ", "dim"), (value, "bold")) for name, value in screen.figures()]
    for start in range(0, len(cells), _NUM_COLUMNS):
        table.add_row(*cells[start : start + _NUM_COLUMNS])
    return table


def _requests(screen: Screen) -> Table:
    table = Table(box=None, expand=True, header_style="dim", padding=(0, 2, 0, 0))
    for heading in HEADINGS:
        side = "right" if heading in ("OUTPUT", "CACHED", "AGE") else "left"
        table.add_column(heading.capitalize(), justify=side, no_wrap=True, overflow="ellipsis")
    for cells in screen.rows():
        name, stage, *others, why = cells
        style = _STYLES.get(stage, _WAITING)
        table.add_row(Text(shortened(name, 30)), Text(stage, style), *map(Text, others), Text(why, "dim"))
    return table


def _processes(screen: Screen) -> Table:
    table = Table.grid(padding=(0, 3))
    for one in screen.processes:
        table.add_row(Text(one.name, "dim"), Text(str(one.pid), "dim"), f"{one.cpu:.0%}", size(one.rss_bytes))
    return table
