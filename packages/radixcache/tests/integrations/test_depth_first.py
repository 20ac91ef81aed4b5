"""Depth first by weight, against a recursion over all prefixes."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given

from pagewood.radixcache.integrations.depth_first import depth_first_by_weight
from pagewood.radixcache.namespaces import Namespace

PREFIXES = st.lists(st.tuples(st.sampled_from([None, "a"]), st.lists(st.integers(0, 2), max_size=5)), max_size=14)


def walk(paths: list[tuple[object, ...]], start: tuple[object, ...]) -> list[int]:
    """Return the indices below a prefix: larger branches first, of equals the one that was met first; own ones last."""
    below = [path for path in paths if path[: len(start)] == start]
    branches = list(dict.fromkeys(path[: len(start) + 1] for path in below if len(path) > len(start)))
    branches.sort(key=lambda branch: -sum(path[: len(branch)] == branch for path in below))
    order = [index for branch in branches for index in walk(paths, branch)]
    return order + [index for index, path in enumerate(paths) if path == start]


@given(PREFIXES)
@example([("a", []), ("a", [0]), (None, [0])])
def test_the_order_is_that_of_a_recursion(prefixes: list[tuple[Namespace, list[int]]]) -> None:
    given_prefixes = [(name, np.array(pages, np.int32)) for name, pages in prefixes]
    # Pages of different namespaces differ; here their names stand before the first page.
    paths: list[tuple[object, ...]] = [((name, pages[0]), *pages[1:]) if pages else () for name, pages in prefixes]
    order = depth_first_by_weight(given_prefixes)
    assert sorted(order) == list(range(len(prefixes)))
    met = [name for name, pages in prefixes if pages]
    if met == sorted(met, key=met.index):  # otherwise equal branches of two namespaces may be met in another order
        assert order == walk(paths, ())


def test_long_shared_prefixes_are_skipped_at_once() -> None:
    shared = np.arange(100_000, dtype=np.int32)
    prefixes = [(None, np.append(shared, np.int32(n % 2))) for n in range(5)]
    assert depth_first_by_weight([*prefixes, (None, shared[:10])]) == [0, 2, 4, 1, 3, 5]
