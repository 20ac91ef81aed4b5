"""The check of counts that callers pass: this package's own, because a leaf imports no other leaf."""

from numbers import Integral


def require_count(name: str, value: object, *, least: int | None) -> int:
    """Return an integer of Python or numpy as an int.

    Raises:
        ValueError: `value` is less than `least`, if that is given, or is no integer (a float, a bool).
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, got {value!r:.80}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
    return int(value)
