"""How large and how deep a tree of drafts is, for the host and for the runner alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The drafts of one grant as a tree below its last known token, which is node 0; node j is draft j - 1."""

    tokens: tuple[int, ...]
    """The tokens of nodes 1, 2, ..."""
    parents: tuple[int, ...]
    """The parents of the same nodes; each comes before its children."""

    def __len__(self) -> int:
        """Return the number of drafts."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree of drafts. Its root, the last known token, is not counted."""

    num_nodes: int
    """Most nodes."""
    topk: int
    """Most children of a node, and most nodes of a beam; 2 or more."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: a level could not have `topk` nodes.
        """
        if not 2 <= self.topk <= self.num_nodes:
            raise ValueError(f"topk must be in [2, num_nodes], got {self.topk} with {self.num_nodes} nodes")

    @property
    def depth(self) -> int:
        """The depth of the largest tree.

        Twice as deep as a full beam would fill it or more costs passes that rarely yield a token; two levels more than
        that allow for trees that are narrow where the drafter is sure. A tree of several nodes is less deep than a
        chain of as many, so that it can be told from one.
        """
        return max(1, min(self.num_nodes - 1, -(-self.num_nodes // self.topk) + 2))

    @property
    def widths(self) -> tuple[int, ...]:
        """[depth - 1], nodes of the beam at each depth but the last; they never rise.

        A node of a beam needs a slot for its KV, and a grant has pages for `num_nodes` slots behind the last known
        token. So beams are narrower than `topk` where full ones would need more.
        """
        num_levels = self.depth - 1
        if num_levels == 0:
            return ()
        each, rest = divmod(self.num_nodes, num_levels)
        return tuple(min(self.topk, each + (level < rest)) for level in range(num_levels))

    def depth_of(self, num_nodes: int) -> int:
        """Return the most that a tree of `num_nodes` >= 1 nodes may be deep, whose beams have the same widths."""
        num_slots, depth = 0, 1
        for width in self.widths:
            num_slots += width
            if num_slots > num_nodes or depth + 1 >= num_nodes:
                break
            depth += 1
        return depth
