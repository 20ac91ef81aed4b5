"""Inspection of a whole tree: verifying its invariants, and listing its edges."""

from collections.abc import Iterator

from pagewood.radixcache.arrays import ITEM_BYTES, from_bytes
from pagewood.radixcache.node import Edge
from pagewood.radixcache.observer import Run
from pagewood.radixcache.tree import Tree, last_page


def check(tree: Tree) -> None:
    """Verify every invariant that the classes of this package state.

    Raises:
        AssertionError: an invariant does not hold.
    """
    edges = list(_edges(tree))
    for edge in edges:
        _check_edge(tree, edge)
    _check_orders(tree, edges)
    _check_counts(tree, edges)
    _check_spaces(tree, edges)


def runs(tree: Tree) -> Iterator[Run]:
    """Iterate over all edges, parents first."""
    for edge in _edges(tree):
        if edge.parent is not None:
            yield Run(
                namespace=edge.space.name,
                parent_page=last_page(edge.parent),
                num_parent_pages=edge.start,
                tokens=from_bytes([edge.key]),
                pages=from_bytes([edge.values]),
                num_leases=edge.num_leases,
                is_locked=edge.num_pins > 0,
            )


def dump(tree: Tree) -> str:
    """Return the tree as text, one line per edge."""
    orders = {id(space.order): space.order for space in tree.spaces.values()}
    ranks = {id(edge): rank for order in orders.values() for rank, edge in enumerate(order)}
    lines: list[str] = []
    for edge in _edges(tree):
        if edge.parent is None:
            lines.append(f"{edge.space.name!r}: {edge.num_leases} leases")
            continue
        place = f"rank {ranks[id(edge)]}" if id(edge) in ranks else "unlocked"
        state = f"{edge.num_leases} leases, {edge.num_pins} pins" if edge.num_pins else place
        tokens, pages = from_bytes([edge.key]).tolist(), from_bytes([edge.values]).tolist()
        lines.append(f"  [{edge.start}, {edge.end}) tokens {tokens} pages {pages} {state}")
    return "\n".join(lines)


def _edges(tree: Tree) -> Iterator[Edge]:
    """Iterate over the roots and all edges, parents first."""
    for space in tree.spaces.values():
        stack = [space.root]
        while stack:
            edge = stack.pop()
            yield edge
            stack.extend(edge.children.values())


def _require(holds: bool, rule: str, edge: Edge | None = None) -> None:
    if not holds:  # no assert statement: this must also work under `python -O`
        raise AssertionError(rule if edge is None else f"{rule}: {edge!r}")


def _check_edge(tree: Tree, edge: Edge) -> None:
    num_pages = edge.end - edge.start
    _require(
        num_pages > 0 if edge.parent is not None else edge.end == 0, "an edge must hold pages, and a root none", edge
    )
    _require(len(edge.key) == num_pages * tree.page_bytes, "a key must hold page_size tokens per page", edge)
    _require(len(edge.values) == num_pages * ITEM_BYTES, "an edge must hold one page id per page", edge)
    for first_page, child in edge.children.items():
        _require(child.parent is edge, "parent of a child must be the edge that holds it", child)
        _require(child.start == edge.end, "a child must start where its parent ends", child)
        _require(child.space is edge.space, "a path must stay in one namespace", child)
        _require(child.key.startswith(first_page), "the key of a child in children must be its first page", child)
        _require(len(first_page) == tree.page_bytes, "the key of a child in children must be one page long", child)
    num_locked_children = sum(child.num_pins > 0 for child in edge.children.values())
    _require(
        edge.num_pins == edge.num_leases + num_locked_children,
        "num_pins must be num_leases plus the locked children",
        edge,
    )


def _check_orders(tree: Tree, edges: list[Edge]) -> None:
    orders = {id(order): order for order in (tree.order, *(space.order for space in tree.spaces.values()))}
    for order in orders.values():
        order.check([edge for edge in edges if edge.parent and not edge.num_pins and edge.space.order is order])


def _check_counts(tree: Tree, edges: list[Edge]) -> None:
    pages = from_bytes([edge.values for edge in edges]).tolist()
    _require(len(set(pages)) == len(pages), "no page may be in the tree twice")
    _require(tree.num_pages == len(pages), "num_pages must be the number of pages")
    _require(
        len(tree.pages) == len(pages) and all(page in tree.pages for page in pages),
        "pages must hold exactly the pages of the tree",
    )
    num_locked = sum(edge.end - edge.start for edge in edges if edge.num_pins)
    _require(tree.num_locked == num_locked, "num_locked must be the number of pages of locked edges")


def _check_spaces(tree: Tree, edges: list[Edge]) -> None:
    for name, space in tree.spaces.items():
        mine = [edge for edge in edges if edge.space is space]
        is_needed = bool(space.root.children) or space.root.num_pins > 0 or space.is_limited
        _require(space.name == name, "a namespace must be stored under its name", space.root)
        _require(is_needed, "a namespace must have a page, a lease or a limit", space.root)
        _require(
            space.is_limited or space.order is tree.order,
            "a namespace without limits must use the shared order",
            space.root,
        )
        num_locked = sum(edge.end - edge.start for edge in mine if edge.num_pins)
        _require(
            space.num_locked == num_locked,
            "num_locked of a namespace must be the number of its locked pages",
            space.root,
        )
        num_pages = sum(edge.end - edge.start for edge in mine)
        _require(space.num_pages == num_pages, "num_pages of a namespace must be the number of its pages", space.root)
