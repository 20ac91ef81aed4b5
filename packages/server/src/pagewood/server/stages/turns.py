"""A queue in which tenants take turns, and the HTTP requests of a tenant."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """Items that wait. Each turn goes to the next tenant, and there to the next group, which gives its oldest item.

    Invariant: an item waits for at most one item of each other group of its tenant, and at most one of each other
    tenant, per item of its own group before it.
    """

    __slots__ = ("_num_items", "_tenants")

    def __init__(self) -> None:
        self._num_items = 0  # written by: put, pop
        self._tenants: dict[str, dict[str, deque[Item]]] = {}  # written by: put, pop
        """Tenant -> group -> its items, the oldest first. What has the next turn is first; nothing is empty."""

    def __len__(self) -> int:
        return self._num_items

    def put(self, item: Item, *, tenant: str, group: str) -> None:
        """Append an item to those of its group; a group that had none waits behind the others of its tenant."""
        self._num_items += 1
        self._tenants.setdefault(tenant, {}).setdefault(group, deque()).append(item)

    def pop(self) -> Item:
        """Remove the item whose turn it is, and return it; there is one."""
        self._num_items -= 1
        tenant, groups = next(iter(self._tenants.items()))
        group, items = next(iter(groups.items()))
        del self._tenants[tenant], groups[group]
        item = items.popleft()
        if items:
            groups[group] = items
        if groups:
            self._tenants[tenant] = groups
        return item
