"""What happens to the blocks of a cache, in the words of vLLM's KV cache events."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Blocks that follow each other have become cached.

    Attributes:
        block_hashes: their names, at least one; see `hashing`.
        parent_block_hash: name of the block that they follow, which is cached; None at the start of a sequence.
        token_ids: their tokens, `block_size` for each.
        block_size: tokens per block.
        namespace: where they are cached; this field is not vLLM's.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    namespace: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks are not cached any more, nor is what followed them.

    Attributes:
        block_hashes: their names, at least one.
    """

    block_hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is cached any more, in no namespace, after a `clear`; `BlockRemoved` has named what it removed."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
