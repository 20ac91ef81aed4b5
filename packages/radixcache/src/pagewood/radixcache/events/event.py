"""Events about the blocks of a cache, with the names of vLLM's KV cache events."""

from dataclasses import dataclass
from typing import TypeAlias

from pagewood.radixcache.namespaces import Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Consecutive blocks of one sequence have been cached.

    Attributes:
        block_hashes: names of the blocks, at least one; see `hashing`.
        parent_block_hash: name of the cached block before the first one; None at the start of a sequence.
        token_ids: tokens of the blocks, `block_size` per block.
        block_size: tokens per block.
        namespace: namespace of the blocks; vLLM's event does not have this field.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    namespace: Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks are no longer cached, and neither are the blocks that followed them.

    Attributes:
        block_hashes: names of the blocks, at least one.
    """

    block_hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """A `clear` has left nothing cached in any namespace; `BlockRemoved` events have named the removed blocks."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
