"""Small arithmetic the kernels share."""

from typing import Any


def cdiv(a: Any, b: int) -> Any:
    """a / b, rounded up; for a >= 0."""
    return (a + b - 1) // b


def round_up(a: Any, b: int) -> Any:
    """The first multiple of b that is >= a."""
    return cdiv(a, b) * b
