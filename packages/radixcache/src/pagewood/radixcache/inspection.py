"""Looking at a whole tree: its invariants verified, its edges as text."""

from collections.abc import Iterator

from pagewood.radixcache.arrays import ITEM_BYTES, from_bytes
from pagewood.radixcache.node import Edge
from pagewood.radixcache.observer import Run
from pagewood.radixcache.tree import Tree, last_page


def check(tree: Tree) -> None:
    """Verify every invariant that the classes of this package state.

    Raises:
        AssertionError: one does not hold.
    """
    edges = list(_edges(tree))
    for edge in edges:
        _check_edge(tree, edge)
    _check_orders(tree, edges)
    _check_counts(tree, edges)
    _check_spaces(tree, edges)


def runs(tree: Tree) -> Iterator[Run]:
    """Go through all edges, parents first."""
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
    """Return the tree as text, an edge a line."""
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
    """Go through the roots and all edges, parents first."""
    for space in tree.spaces.values():
        stack = [space.root]
        while stack:
            edge = stack.pop()
            yield edge
            stack.extend(edge.children.values())


def _require(holds: bool, rule: str, edge: Edge | None = None) -> None:
    if not holds:  # not an assert statement: it must work under `python -O` too
        raise AssertionError(rule if edge is None else f"{rule}: {edge!r}")


def _check_edge(tree: Tree, edge: Edge) -> None:
    num_pages = edge.end - edge.start
    _require(num_pages > 0 if edge.parent is not None else edge.end == 0, "an edge holds pages, a root none", edge)
    _require(len(edge.key) == num_pages * tree.page_bytes, "a key holds page_size tokens per page", edge)
    _require(len(edge.values) == num_pages * ITEM_BYTES, "an edge holds one page id per page", edge)
    for first_page, child in edge.children.items():
        _require(child.parent is edge, "a child knows its parent", child)
        _require(child.start == edge.end, "a child starts where its parent ends", child)
        _require(child.space is edge.space, "a path keeps to its namespace", child)
        _require(child.key.startswith(first_page), "a child is found by its first page", child)
        _require(len(first_page) == tree.page_bytes, "a child is found by one page", child)
    num_locked_children = sum(child.num_pins > 0 for child in edge.children.values())
    _require(edge.num_pins == edge.num_leases + num_locked_children, "pins are leases plus locked children", edge)


def _check_orders(tree: Tree, edges: list[Edge]) -> None:
    orders = {id(order): order for order in (tree.order, *(space.order for space in tree.spaces.values()))}
    for order in orders.values():
        order.check([edge for edge in edges if edge.parent and not edge.num_pins and edge.space.order is order])


def _check_counts(tree: Tree, edges: list[Edge]) -> None:
    pages = from_bytes([edge.values for edge in edges]).tolist()
    _require(len(set(pages)) == len(pages), "no page is in the tree twice")
    _require(tree.num_pages == len(pages), "num_pages counts the pages")
    _require(len(tree.pages) == len(pages) and all(page in tree.pages for page in pages), "pages holds the pages")
    num_locked = sum(edge.end - edge.start for edge in edges if edge.num_pins)
    _require(tree.num_locked == num_locked, "num_locked counts the pages of locked edges")


def _check_spaces(tree: Tree, edges: list[Edge]) -> None:
    for name, space in tree.spaces.items():
        mine = [edge for edge in edges if edge.space is space]
        is_needed = bool(space.root.children) or space.root.num_pins > 0 or space.is_limited
        _require(space.name == name, "a namespace is found by its name", space.root)
        _require(is_needed, "a root has a page or a lease", space.root)
        _require(space.is_limited or space.order is tree.order, "limits give an order of one's own", space.root)
        num_locked = sum(edge.end - edge.start for edge in mine if edge.num_pins)
        _require(space.num_locked == num_locked, "num_locked counts those of each namespace", space.root)
        num_pages = sum(edge.end - edge.start for edge in mine)
        _require(space.num_pages == num_pages, "num_pages counts those of each namespace", space.root)
