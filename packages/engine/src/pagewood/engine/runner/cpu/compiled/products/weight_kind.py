"""How packed weights lie in memory, and how many bytes they take.

A projection `[out, in]` lies in panels of 32 outputs, each in the order in which it is read. Inputs are filled up
with zeros to a multiple of 32 (16-bit numbers: of 2), outputs to one of 32.

- BFLOAT16 and BFLOAT16_PAIRS `[in / 2, 32, 2] uint16`.
- FLOAT16 `[in, 32] float16`.
- INT8 `[in / 4, 32, 4] uint8`, a code plus 128; the scales `[out] float32` lie apart.
- the others: two half panels of 16 outputs, each `[in / group]` blocks of: scales `[16] float32`; zeros `[16] uint8` or
  offsets `[16] float32` if the kind has them; codes `[group / 4, 16, 4] uint8`, of which kinds with four bits keep two
  rows in one, the first of them in the low four bits. Groups are of 32 inputs or a multiple, those of INT8_16 kinds and
  of NVFP4 of 16.
- of these, MXFP4 and NVFP4 have codes that are floating point numbers E2M1, and scales of groups `[16] uint8`: of MXFP4
  the exponent of half the scale, as float32 has it; of NVFP4 a number E4M3, to which the scales of outputs
  `[out] float32` apart belong.

The zero of a code is subtracted, 128 if it has eight bits and 8 if it has four, unless the kind has zeros of its own.
The loops replace a number E2M1 by its double plus 12, and 12 is its zero.
An offset is added to the product of code and scale; codes of four bits then have no zero.
"""

from __future__ import annotations

from enum import IntEnum

HALF = 16
"""Outputs of half a panel."""
STEP = 32
"""Inputs of codes are filled up to a multiple of this."""
_SHORT = 16  # inputs of a group, in the kinds with the smallest groups
_LINE = 64  # bytes of a cache line


class WeightKind(IntEnum):
    """A layout of packed weights; for float32 see `matmul`.

    Codes are multiplied with activations of eight bits (`code_tile`), or widened and multiplied with float32
    (`wide_tile`).
    """

    BFLOAT16 = 1
    """Widened, and multiplied with activations in float32."""
    FLOAT16 = 2
    """The same."""
    BFLOAT16_PAIRS = 3
    """Multiplied with activations that are rounded to bfloat16, two inputs at a time; see `pair_dot`."""
    INT8 = 4
    INT4 = 5
    INT4_ZEROS = 6
    INT8_GROUP = 7
    INT8_GROUP_ZEROS = 8
    INT4_OFFSETS = 9
    INT8_GROUP_OFFSETS = 10
    INT8_16 = 11
    INT8_16_OFFSETS = 12
    MXFP4 = 13
    NVFP4 = 14

    @property
    def has_codes(self) -> bool:
        """Whether weights are codes of four or eight bits."""
        return self >= WeightKind.INT8

    @property
    def unit(self) -> int:
        """Inputs are filled up to a multiple of this."""
        return STEP if self.has_codes else 2 if self == WeightKind.BFLOAT16_PAIRS else 1

    @property
    def has_groups(self) -> bool:
        """Whether scales belong to groups of inputs."""
        return self >= WeightKind.INT4

    @property
    def is_float4(self) -> bool:
        """Whether codes are floating point numbers of four bits, and scales of groups have one byte; see `float4`."""
        return self >= WeightKind.MXFP4

    @property
    def has_scales_apart(self) -> bool:
        """Whether every output has a scale behind the panels."""
        return self in (WeightKind.INT8, WeightKind.NVFP4)

    @property
    def has_zeros(self) -> bool:
        """Whether every group has a zero of its own."""
        return self in (WeightKind.INT4_ZEROS, WeightKind.INT8_GROUP_ZEROS)

    @property
    def has_offsets(self) -> bool:
        """Whether every group has a number that is added to its weights."""
        return self in (WeightKind.INT4_OFFSETS, WeightKind.INT8_GROUP_OFFSETS, WeightKind.INT8_16_OFFSETS)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        fours = (WeightKind.INT4, WeightKind.INT4_ZEROS, WeightKind.INT4_OFFSETS, WeightKind.MXFP4, WeightKind.NVFP4)
        return 4 if self in fours else 8

    @property
    def step(self) -> int:
        """Inputs that the loops over codes with groups take at a time; a divisor of every group."""
        shorts = (WeightKind.INT8_16, WeightKind.INT8_16_OFFSETS, WeightKind.NVFP4)
        return _SHORT if self in shorts else STEP

    @property
    def zero(self) -> int:
        """The number that is subtracted from codes, if groups have no zeros."""
        if self.is_float4:
            return 12  # so that the doubles of all numbers become unsigned
        return 0 if self == WeightKind.INT4_OFFSETS else 1 << (self.bits - 1)

    @property
    def factor(self) -> int:
        """What the kernels want sums of activations to be multiplied by: see `code_tile.multiply_codes`."""
        return 1 if self.has_offsets else -1 if self.has_zeros else -self.zero

    @property
    def head_bytes(self) -> int:
        """Bytes of a block before its codes."""
        return (8 if self.has_offsets else 5 if self.has_zeros else 1 if self.is_float4 else 4) * HALF

    @property
    def lines_of_step(self) -> int:
        """Cache lines of a block's codes for one step, and of its head."""
        return -(-self.step * HALF * self.bits // 8 // _LINE) + -(-self.head_bytes // _LINE)

    def block_bytes(self, group: int) -> int:
        """Return the bytes of a block of `group` inputs and 16 outputs."""
        return self.head_bytes + group * HALF * self.bits // 8
