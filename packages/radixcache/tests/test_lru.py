"""The order of eviction, edge by edge."""

from pagewood.radixcache.lru import LeafLRU
from pagewood.radixcache.node import Edge


def chain(length: int) -> list[Edge]:
    edges = [Edge(None, None, b"", b"", 0, 0, {})]
    for end in range(1, length + 1):
        edges.append(Edge(None, edges[-1], b"", b"", end - 1, end, {}))
    return edges


def test_an_empty_order_has_no_oldest() -> None:
    assert LeafLRU().oldest() is None


def test_touch_moves_a_path_deepest_first() -> None:
    lru = LeafLRU()
    _, a, b, c = chain(3)
    other = chain(1)[1]
    for edge in (c, b, a, other):
        lru.add(edge)
    lru.touch(b)
    assert list(lru) == [c, other, b, a]
    assert lru.oldest() is c


def test_touch_stops_where_the_path_is_locked() -> None:
    lru = LeafLRU()
    _, a, b, c = chain(3)
    a.num_pins = 1
    other = chain(1)[1]
    for edge in (c, b, other):
        lru.add(edge)
    lru.touch(c)
    assert list(lru) == [other, c, b]


def test_a_removed_edge_keeps_no_neighbours_alive() -> None:
    lru = LeafLRU()
    first, second, third = (chain(1)[1] for _ in range(3))
    for edge in (first, second, third):
        lru.add(edge)
    lru.remove(second)
    assert not {id(second.older), id(second.newer)} & {id(first), id(third)}
    assert list(lru) == [first, third]
