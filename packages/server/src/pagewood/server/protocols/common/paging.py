"""Pages of lists: the `limit`, the `order` and the `after` of a query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import Request

from pagewood.server.http.errors import ApiError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Generic[T]):
    """One page of a list."""

    shown: list[T]
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Which page a client asks for."""

    limit: int
    is_ascending: bool
    after: str | None
    """Id of the last item of the page before; None: it is the first page."""

    def cut(self, items: Sequence[T], id_of: Callable[[T], str]) -> Cut[T]:
        """Return the page.

        Args:
            items: all of them, the oldest first.
            id_of: returns the id of an item.

        Raises:
            ApiError: no item has the id `after`.
        """
        ordered = list(items) if self.is_ascending else list(reversed(items))
        if self.after is not None:
            index = next((index for index, item in enumerate(ordered) if id_of(item) == self.after), None)
            if index is None:
                raise ApiError(f"No item '{self.after[:100]}' is in this list.", param="after", code="invalid_value")
            ordered = ordered[index + 1 :]
        return Cut(shown=ordered[: self.limit], has_more=len(ordered) > self.limit)


def read_page(request: Request, *, most: int, default: int) -> Page:
    """Return the page that a query asks for; by default the latest items come first.

    Args:
        request: with the query.
        most: highest `limit`.
        default: `limit` of a query without one.

    Raises:
        ApiError: a parameter is wrong.
    """
    query = request.query_params
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most):
        raise ApiError(
            f"Invalid value for 'limit': expected a number in [1, {most}], but got '{limit[:20]}' instead.",
            param="limit",
            code="invalid_value",
        )
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(
            f"Invalid value for 'order': expected 'asc' or 'desc', but got '{order[:20]}' instead.",
            param="order",
            code="invalid_value",
        )
    return Page(limit=int(limit), is_ascending=order == "asc", after=query.get("after"))
