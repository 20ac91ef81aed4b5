"""What stands in a layer in place of a part that it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pagewood.engine.models.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentConfig:
    """No mixer, or no feed-forward, with the answers of both kinds of parts."""

    @property
    def position_configs(self) -> tuple[()]:
        """Nothing: it needs to know no positions."""
        return ()

    @property
    def window(self) -> None:
        """None: it has no keys that could be behind a window."""
        return None

    @property
    def size(self) -> int:
        """0: no projection has inputs."""
        return 0

    def for_length(self, length: int) -> Self:
        """Return itself."""
        return self

    def for_shard(self, shard: Shard) -> Self:
        """Return itself: every rank lacks it."""
        return self
