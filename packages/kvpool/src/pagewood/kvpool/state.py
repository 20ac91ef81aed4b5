"""Pages that hold the state of a recurrent layer instead of token positions."""

from dataclasses import dataclass

from pagewood.kvpool.arrays import PageArray, check_at_least_one, pages_within, total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """The fixed-size state of one request in every recurrent layer (Mamba, linear attention): a page is a state.

    Invariant: each array of one layer of a pool is one C-contiguous array `[pages, *shape]`.

    Attributes:
        num_layers: Recurrent layers of the model, >= 1.
        arrays: What the state of one layer consists of, at least one array, their names distinct: for Mamba 2 a `conv`
            `(channels, kernel - 1)` and an `ssm` `(heads, head_dim, state_dim)`.
    """

    num_layers: int
    arrays: tuple[PageArray, ...]

    def __post_init__(self) -> None:
        check_at_least_one(num_layers=self.num_layers)
        names = [array.name for array in self.arrays]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"arrays must be at least one, with distinct names, got {names}")

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one state over all layers."""
        return total_bytes(self.num_layers, self.arrays)

    def pages_for(self, num_bytes: int) -> int:
        """Return how many states fit into `num_bytes`, counting all layers.

        Raises:
            ValueError: Not even one does.
        """
        return pages_within(num_bytes, self.bytes_per_page)
