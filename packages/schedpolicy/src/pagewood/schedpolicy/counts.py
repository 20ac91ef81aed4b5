"""The checks of counts and real numbers that callers pass: this package's own, because a leaf imports no other leaf."""

from numbers import Integral, Real


def require_count(name: str, value: object, *, least: int | None = None) -> int:
    """Return an integer of Python or numpy as an int.

    Raises:
        ValueError: `value` is less than `least`, if that is given, or is no integer (a float, a bool).
    """
    if type(value) is int and (least is None or value >= least):
        return value  # what it nearly always is
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, got {value!r:.80}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
    return int(value)


def require_real(name: str, value: object) -> None:
    """Check that a value is a number of Python or numpy, whole or not.

    Raises:
        ValueError: It is something else, such as a string, None or a bool.
    """
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise ValueError(f"{name} must be a number, got {value!r:.80}")
