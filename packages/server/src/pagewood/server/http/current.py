"""The HTTP request that the running code belongs to, for logs and traces."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagewood.server.http.exchange import Exchange

current_exchange: ContextVar[Exchange | None] = ContextVar("pagewood_exchange", default=None)
"""Set while `FrontDoor` serves a request, in the tasks that this request has started, too."""
