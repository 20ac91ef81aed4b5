"""The number of random examples of the engine's property tests: `PAGEWOOD_TEST_SCALE` times the usual one."""

import os

_SCALE = int(os.environ.get("PAGEWOOD_TEST_SCALE", "1"))


def scaled(number: int) -> int:
    """Return the number of examples to try where `number` is usual."""
    return number * _SCALE
