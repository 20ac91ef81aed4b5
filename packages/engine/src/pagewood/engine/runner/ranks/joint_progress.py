"""One progress of all ranks that load a model."""

from __future__ import annotations

from pagewood.engine.runner.ranks.messages import Doing
from pagewood.engine.runner.ranks.rank_names import RankNames

_START = Doing(what="starting", done=0, total=1)


class JointProgress:
    """What each rank does until it is ready, and one report of all of them.

    Stages have the order in which any rank has reached them, so the rank that is furthest behind is known.

    Args:
        names: of the ranks.
    """

    __slots__ = ("_doing", "_names", "_stages")

    def __init__(self, names: RankNames) -> None:
        self._names = names
        self._doing = [_START] * names.count  # contents written by: note
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
        what = "; ".join(f"{self._names.joined(ranks[one])}: {one}" for one in (first, *others)) if others else first
        return Doing(what=what, done=sum(one.done for one in behind), total=sum(one.total for one in behind))
