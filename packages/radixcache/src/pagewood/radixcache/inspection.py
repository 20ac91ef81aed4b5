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
    _check_order(tree, edges)
    _check_counts(tree, edges)


def runs(tree: Tree) -> Iterator[Run]:
    """Go through all edges, parents first."""
    for edge in _edges(tree):
        if edge.parent is not None:
            yield Run(
                namespace=edge.namespace,
                parent_page=last_page(edge.parent),
                num_parent_pages=edge.start,
                tokens=from_bytes([edge.key]),
                pages=from_bytes([edge.values]),
                num_leases=edge.num_leases,
                is_locked=edge.num_pins > 0,
            )


def dump(tree: Tree) -> str:
    """Return the tree as text, an edge a line."""
    ranks = {id(edge): rank for rank, edge in enumerate(tree.lru)}
    lines: list[str] = []
    for edge in _edges(tree):
        if edge.parent is None:
            lines.append(f"{edge.namespace!r}: {edge.num_leases} leases")
            continue
        state = f"rank {ranks[id(edge)]}" if id(edge) in ranks else f"{edge.num_leases} leases, {edge.num_pins} pins"
        tokens, pages = from_bytes([edge.key]).tolist(), from_bytes([edge.values]).tolist()
        lines.append(f"  [{edge.start}, {edge.end}) tokens {tokens} pages {pages} {state}")
    return "\n".join(lines)


def _edges(tree: Tree) -> Iterator[Edge]:
    """Go through the roots and all edges, parents first."""
    for root in tree.roots.values():
        stack = [root]
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
        _require(child.namespace == edge.namespace, "a path keeps to its namespace", child)
        _require(child.key.startswith(first_page), "a child is found by its first page", child)
        _require(len(first_page) == tree.page_bytes, "a child is found by one page", child)
    num_locked_children = sum(child.num_pins > 0 for child in edge.children.values())
    _require(edge.num_pins == edge.num_leases + num_locked_children, "pins are leases plus locked children", edge)


def _check_order(tree: Tree, edges: list[Edge]) -> None:
    ranks: dict[int, int] = {}
    for rank, edge in enumerate(tree.lru):
        _require(edge.older.newer is edge and edge.newer.older is edge, "neighbours in the order agree", edge)
        ranks[id(edge)] = rank
    unlocked = [edge for edge in edges if edge.parent is not None and not edge.num_pins]
    _require(ranks.keys() == {id(edge) for edge in unlocked}, "the order holds the unlocked edges")
    for edge in unlocked:
        rank, parent_rank = ranks[id(edge)], ranks.get(id(edge.parent), len(ranks))
        _require(rank < parent_rank, "an edge is older than its parent", edge)


def _check_counts(tree: Tree, edges: list[Edge]) -> None:
    pages = from_bytes([edge.values for edge in edges]).tolist()
    _require(len(set(pages)) == len(pages), "no page is in the tree twice")
    _require(tree.num_pages == len(pages), "num_pages counts the pages")
    num_locked = sum(edge.end - edge.start for edge in edges if edge.num_pins)
    _require(tree.num_locked == num_locked, "num_locked counts the pages of locked edges")
    num_pages_in = dict.fromkeys(tree.roots, 0)
    for edge in edges:
        num_pages_in[edge.namespace] += edge.end - edge.start
        if edge.parent is None:
            _require(bool(edge.children) or edge.num_pins > 0, "a root has a page or a lease", edge)
    _require(tree.num_pages_in == num_pages_in, "num_pages_in counts the pages of each namespace")
