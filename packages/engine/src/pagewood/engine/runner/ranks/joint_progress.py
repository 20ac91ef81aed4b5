"""One progress of all ranks that load a model."""

from __future__ import annotations

from pagewood.engine.runner.ranks.messages import Doing

_START = Doing(what="starting", done=0, total=1)


class JointProgress:
    """What each rank does until it is ready, and one report of all of them.

    Stages have the order in which any rank has reached them, so the rank that is furthest behind is known.

    Args:
        count: of ranks.
        per_node: ranks of a host; None: all.
    """

    __slots__ = ("_doing", "_per_node", "_stages")

    def __init__(self, count: int, *, per_node: int | None = None) -> None:
        self._per_node = per_node or count
        self._doing = [_START] * count  # contents written by: note
        self._stages = {_START.what: 0}
        """What ranks do -> its place in their order."""  # contents written by: note

    def note(self, rank: int, doing: Doing) -> None:
        """Note what a rank does now."""
        self._stages.setdefault(doing.what, len(self._stages))
        self._doing[rank] = doing

    def report(self) -> Doing:
        """Return what the ranks do, with the count of those that are furthest behind.

        If they do different things, the text names the ranks of each, the furthest behind first.
        """
        ranks: dict[str, list[int]] = {}
        for rank, doing in enumerate(self._doing):
            ranks.setdefault(doing.what, []).append(rank)
        first, *others = sorted(ranks, key=self._stages.__getitem__)
        behind = [self._doing[rank] for rank in ranks[first]]
        what = "; ".join(f"{self._named(ranks[one])}: {one}" for one in (first, *others)) if others else first
        return Doing(what=what, done=sum(one.done for one in behind), total=sum(one.total for one in behind))

    def _named(self, ranks: list[int]) -> str:
        """Return as in "rank 1" or "ranks 0, 2"; on several hosts as in "node 0 rank 1, node 1 ranks 2, 3"."""
        nodes: dict[int, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(rank // self._per_node, []).append(rank)
        found = [f"rank{'s' * (len(one) > 1)} {', '.join(map(str, one))}" for one in nodes.values()]
        if self._per_node == len(self._doing):
            return found[0]
        return ", ".join(f"node {node} {text}" for node, text in zip(nodes, found, strict=True))
