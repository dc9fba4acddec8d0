"""Small arithmetic the kernels share, for integers >= 0, in Python or traced."""

from typing import Any


def floordiv(a: Any, b: int) -> Any:
    """a / b, rounded down: a shift where b is a power of two, and never the sign handling of `//`."""
    if isinstance(a, int):
        return a // b
    import jax  # here: the reports on compiled kernels begin without it

    return a >> (b.bit_length() - 1) if b & (b - 1) == 0 else jax.lax.div(a, jax.numpy.int32(b))


def cdiv(a: Any, b: int) -> Any:
    """a / b, rounded up."""
    return floordiv(a + (b - 1), b)


def round_up(a: Any, b: int) -> Any:
    """The first multiple of b that is >= a."""
    return cdiv(a, b) * b
