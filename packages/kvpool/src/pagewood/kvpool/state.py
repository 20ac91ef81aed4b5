"""The layout of pages that hold the state of recurrent layers instead of token positions."""

from dataclasses import dataclass

from pagewood.kvpool.arrays import PageArray, check_at_least_one, pages_within, total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """The fixed-size state of one request in every recurrent layer (Mamba, linear attention). A page is one state.

    Invariant: in one layer of a pool, each array is one C-contiguous array `[pages, *shape]`.

    Attributes:
        num_layers: Recurrent layers of the model, >= 1.
        arrays: The arrays of the state of one layer, at least one, with distinct names. For Mamba 2 these are `conv`
            `(channels, kernel - 1)` and `ssm` `(heads, head_dim, state_dim)`.
    """

    num_layers: int
    arrays: tuple[PageArray, ...]

    def __post_init__(self) -> None:
        check_at_least_one(num_layers=self.num_layers)
        names = [array.name for array in self.arrays]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"arrays must not be empty and must have distinct names, got {names}")

    @property
    def bytes_per_page(self) -> int:
        """Size of one state over all layers, in bytes."""
        return total_bytes(self.num_layers, self.arrays)

    def pages_for(self, num_bytes: int) -> int:
        """Return the number of states, with all layers, that fit into `num_bytes`.

        Raises:
            ValueError: `num_bytes` is less than one state.
        """
        return pages_within(num_bytes, self.bytes_per_page)
