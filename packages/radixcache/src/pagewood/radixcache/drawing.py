"""Drawings of the tree: Graphviz text, or a tree for a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagewood.radixcache.cache import RadixCache
from pagewood.radixcache.namespaces import Namespace
from pagewood.radixcache.observer import Run

if TYPE_CHECKING:
    from rich.tree import Tree as RichTree

_NUM_SHOWN_TOKENS = 4


@dataclass(slots=True, kw_only=True)
class _Branch:
    """A run or a namespace, with everything that follows it."""

    label: str
    is_locked: bool
    num_pages: int  # written by: _grow
    children: list[_Branch] = field(default_factory=list["_Branch"])  # written by: _grow


def describe(run: Run) -> str:
    """Return one line of text about a run: its position, its first and last tokens, its leases."""
    tokens = run.tokens.tolist()
    if len(tokens) > 2 * _NUM_SHOWN_TOKENS + 1:
        tokens = [*tokens[:_NUM_SHOWN_TOKENS], "…", *tokens[-_NUM_SHOWN_TOKENS:]]
    end = run.num_parent_pages + len(run.pages)
    leases = f", {run.num_leases} leases" if run.num_leases else ""
    return f"pages [{run.num_parent_pages}, {end}): {' '.join(map(str, tokens))}{leases}"


def to_dot(cache: RadixCache, *, label: Callable[[Run], str] = describe, max_children: int = 20) -> str:
    """Return the tree as Graphviz text, for example for `dot -Tsvg`; locked runs are filled.

    Args:
        cache: the cache to draw.
        label: returns the text of a run, for example with its tokens decoded.
        max_children: number of children to show per run, the largest first; the others are combined into one node.
    """
    lines = ["digraph cache {", "  rankdir=LR;", '  node [shape=box, fontname="monospace", style=filled];']
    stack: list[tuple[_Branch, int | None]] = [(root, None) for root in reversed(_grow(cache, label))]
    num_nodes = 0
    while stack:
        branch, parent = stack.pop()
        color = "lightblue" if branch.is_locked else "white"
        lines.append(f'  n{num_nodes} [label="{_escape(branch.label)}", fillcolor={color}];')
        if parent is not None:
            lines.append(f"  n{parent} -> n{num_nodes};")
        stack.extend((child, num_nodes) for child in _shown(branch, max_children))
        num_nodes += 1
    return "\n".join([*lines, "}"])


def to_rich(cache: RadixCache, *, label: Callable[[Run], str] = describe, max_children: int = 20) -> RichTree:
    """Return the tree for `rich.print`; locked runs are bold, all others can be evicted.

    Args:
        cache: the cache to draw.
        label: returns the text of a run, for example with its tokens decoded.
        max_children: number of children to show per run, the largest first; the others are combined into one line.

    Raises:
        ModuleNotFoundError: rich is not installed (`pip install 'pagewood-radixcache[rich]'`).
    """
    from rich.text import Text
    from rich.tree import Tree as RichTree

    top = RichTree(f"{cache.num_pages} pages of {cache.page_size} tokens, {cache.num_locked} locked")
    stack = [(root, top) for root in reversed(_grow(cache, label))]
    while stack:
        branch, parent = stack.pop()
        drawn = parent.add(Text(branch.label, style="bold cyan" if branch.is_locked else ""))
        stack.extend((child, drawn) for child in _shown(branch, max_children))
    return top


def _grow(cache: RadixCache, label: Callable[[Run], str]) -> list[_Branch]:
    """Return a branch for each namespace that has pages."""
    roots: dict[Namespace, _Branch] = {}
    by_last_page: dict[int, _Branch] = {}
    joints: list[tuple[_Branch, _Branch]] = []
    for run in cache.runs():
        if run.parent_page is not None:
            parent = by_last_page[run.parent_page]
        elif run.namespace in roots:
            parent = roots[run.namespace]
        else:
            text = f"namespace {run.namespace!r}: {cache.num_pages_in(run.namespace)} pages"
            parent = roots[run.namespace] = _Branch(label=text, is_locked=False, num_pages=0)
        branch = _Branch(label=label(run), is_locked=run.is_locked, num_pages=len(run.pages))
        by_last_page[int(run.pages[-1])] = branch
        parent.children.append(branch)
        joints.append((parent, branch))
    for parent, branch in reversed(joints):  # children before parents: a run's sum is complete here
        parent.num_pages += branch.num_pages
    return list(roots.values())


def _shown(branch: _Branch, max_children: int) -> list[_Branch]:
    """Return the children to show, the largest last, because the caller takes them from a stack."""
    children = sorted(branch.children, key=lambda child: -child.num_pages)
    shown, others = children[:max_children], children[max_children:]
    if others:
        num_pages = sum(child.num_pages for child in others)
        shown.append(_Branch(label=f"… {len(others)} more, {num_pages} pages", is_locked=False, num_pages=num_pages))
    return shown[::-1]


def _escape(label: str) -> str:
    """Escape text for a quoted Graphviz string."""
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
