"""A drawing of the tree shows every run once, below its parent."""

import re
from io import StringIO

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from pagewood.radixcache import RadixCache, Run
from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.drawing import describe, to_dot, to_rich


def ids(*items: int) -> Int32:
    return np.array(items, np.int32)


@pytest.fixture
def cache() -> RadixCache:
    cache = RadixCache(2)
    cache.insert(np.arange(12, dtype=np.int32), ids(*range(10, 16)))
    cache.insert(ids(0, 1, 9, 9), ids(10, 20))
    cache.insert(ids(7, 7), ids(30), "tenant")
    cache.lock(cache.match(ids(0, 1)).node)
    return cache


def test_dot_shows_the_tree(cache: RadixCache) -> None:
    assert to_dot(cache).splitlines() == [
        "digraph cache {",
        "  rankdir=LR;",
        '  node [shape=box, fontname="monospace", style=filled];',
        '  n0 [label="namespace None: 7 pages", fillcolor=white];',
        '  n1 [label="pages [0, 1): 0 1, 1 leases", fillcolor=lightblue];',
        "  n0 -> n1;",
        '  n2 [label="pages [1, 6): 2 3 4 5 … 8 9 10 11", fillcolor=white];',
        "  n1 -> n2;",
        '  n3 [label="pages [1, 2): 9 9", fillcolor=white];',
        "  n1 -> n3;",
        "  n4 [label=\"namespace 'tenant': 1 pages\", fillcolor=white];",
        '  n5 [label="pages [0, 1): 7 7", fillcolor=white];',
        "  n4 -> n5;",
        "}",
    ]


def test_a_custom_label_is_escaped() -> None:
    cache = RadixCache(1)
    cache.insert(ids(1), ids(1))
    assert r'[label="a \"b\" \\c\nd", ' in to_dot(cache, label=lambda run: 'a "b" \\c\nd')


def test_many_children_are_combined() -> None:
    cache = RadixCache(1)
    for first in range(5):
        cache.insert(np.arange(first, 2 * first + 1, dtype=np.int32), np.arange(9, dtype=np.int32) + 10 * first)
    labels = re.findall(r'label="(.*?)"', to_dot(cache, max_children=2))
    assert labels[1:] == ["pages [0, 5): 4 5 6 7 8", "pages [0, 4): 3 4 5 6", "… 3 more, 6 pages"]


def test_the_largest_subtree_is_shown_first() -> None:
    cache = RadixCache(1)
    for index, prompt in enumerate([(9, 9, 9, 9), (1, 2, 3, 3), (1, 2, 4), (1, 5)]):
        cache.insert(ids(*prompt), np.arange(len(prompt), dtype=np.int32) + 10 * index)
    labels = re.findall(r'label="(.*?)"', to_dot(cache, max_children=1))
    assert labels == [
        "namespace None: 10 pages",
        "pages [0, 1): 1",
        "pages [1, 2): 2",
        "pages [2, 4): 3 3",
        "… 1 more, 1 pages",
        "… 1 more, 1 pages",
        "… 1 more, 4 pages",
    ]


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=8))
def test_every_run_is_below_its_parent(prompts: list[list[int]]) -> None:
    cache = RadixCache(1)
    for index, prompt in enumerate(prompts):
        cache.insert(ids(*prompt), np.arange(len(prompt), dtype=np.int32) + 10 * index)

    def name(run: Run) -> str:
        return str(int(run.pages[-1]))

    dot = to_dot(cache, label=name)
    labels = dict(re.findall(r'(n\d+) \[label="(.*?)"', dot))
    arrows = {(labels[parent], labels[child]) for parent, child in re.findall(r"(n\d+) -> (n\d+);", dot)}
    root = f"namespace None: {cache.num_pages} pages"
    assert arrows == {(root if run.parent_page is None else str(run.parent_page), name(run)) for run in cache.runs()}


def test_an_empty_cache_is_an_empty_drawing() -> None:
    assert len(to_dot(RadixCache(1)).splitlines()) == 4


def test_a_long_chain_needs_no_recursion() -> None:
    cache = RadixCache(1)
    node = cache.root()
    for page in range(3000):
        node = cache.lock(cache.insert(ids(page), ids(page), after=node).node)
    assert to_dot(cache).count("->") == 3000


def test_a_terminal_shows_a_tree(cache: RadixCache) -> None:
    console = pytest.importorskip("rich.console", reason="the tree for a terminal needs rich, the extra [rich]")
    shown = console.Console(width=60, record=True, force_terminal=True, file=StringIO())
    shown.print(to_rich(cache))
    styled = shown.export_text(styles=True, clear=False)
    assert shown.export_text().splitlines() == [
        "8 pages of 2 tokens, 1 locked",
        "├── namespace None: 7 pages",
        "│   └── pages [0, 1): 0 1, 1 leases",
        "│       ├── pages [1, 6): 2 3 4 5 … 8 9 10 11",
        "│       └── pages [1, 2): 9 9",
        "└── namespace 'tenant': 1 pages",
        "    └── pages [0, 1): 7 7",
    ]
    assert "\x1b[1;36mpages [0, 1): 0 1" in styled
    assert "\x1b[1;36mpages [1, 6)" not in styled


def test_a_description_fits_on_a_line(cache: RadixCache) -> None:
    cache.insert(np.arange(50, 20_050, dtype=np.int32), np.arange(100, 10_100, dtype=np.int32))
    assert max(len(describe(run)) for run in cache.runs()) < 80
