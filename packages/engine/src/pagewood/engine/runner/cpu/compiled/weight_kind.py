"""How packed weights lie in memory, and how many bytes they take.

A projection `[out, in]` lies in panels of 32 outputs, each in the order in which it is read. Inputs are filled up
with zeros to a multiple of 32 (16-bit numbers: of 2), outputs to one of 32.

- BFLOAT16 `[in / 2, 32, 2] uint16`.
- FLOAT16 `[in, 32] float16`.
- INT8 `[in / 4, 32, 4] uint8`, a code plus 128; the scales `[out] float32` lie apart.
- the others: two half panels of 16 outputs, each `[in / group]` blocks of: scales `[16] float32`; zeros `[16] uint8` if
  the kind has them; codes `[group / 4, 16, 4] uint8`, of which INT4 keeps two rows in one, the first of them in the low
  four bits.

The zero of a code is subtracted, 128 if it has eight bits and 8 if it has four, unless the kind has zeros of its own.
"""

from __future__ import annotations

from enum import IntEnum

HALF = 16
"""Outputs of half a panel."""
STEP = 32
"""Inputs that the loops over codes take at a time."""


class WeightKind(IntEnum):
    """A layout of packed weights; float32 is not one of them, see `compiled.matmul`."""

    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    INT4 = 4
    INT4_ZEROS = 5
    INT8_GROUP = 6
    INT8_GROUP_ZEROS = 7

    @property
    def has_codes(self) -> bool:
        """Whether weights are codes, which are multiplied with activations of eight bits."""
        return self >= WeightKind.INT8

    @property
    def has_groups(self) -> bool:
        """Whether scales belong to groups of inputs."""
        return self >= WeightKind.INT4

    @property
    def has_zeros(self) -> bool:
        """Whether every group has a zero of its own."""
        return self in (WeightKind.INT4_ZEROS, WeightKind.INT8_GROUP_ZEROS)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self in (WeightKind.INT4, WeightKind.INT4_ZEROS) else 8

    @property
    def zero(self) -> int:
        """The code of 0, if groups have no zeros."""
        return 1 << (self.bits - 1)

    @property
    def head_bytes(self) -> int:
        """Bytes of a block before its codes."""
        return (5 if self.has_zeros else 4) * HALF

    def block_bytes(self, group: int) -> int:
        """Return the bytes of a block of `group` inputs and 16 outputs."""
        return self.head_bytes + group * HALF * self.bits // 8
