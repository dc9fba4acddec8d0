"""Arguments of the wrong kind, told where they come in: by name, with what would do."""

import operator
from typing import Any

__all__ = ["flag", "function", "integer", "integers"]


def integer(name: str, value: Any, least: int, *, or_none: bool = False) -> Any:
    """The value as an int, of at least `least`; or None, where that is allowed.

    Raises:
      ValueError: it is something else.
    """
    if value is None and or_none:
        return None
    wanted = f"an integer of at least {least}{', or None' if or_none else ''}"
    if isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be {wanted}")
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} must be {wanted}") from None
    if number < least:
        raise ValueError(f"{name}={value!r} must be {wanted}")
    return number


def integers(least: int, *, or_none: bool = False, **values: Any) -> list[Any]:
    """`integer` of each, in their order."""
    return [integer(name, value, least, or_none=or_none) for name, value in values.items()]


def flag(**values: Any) -> None:
    """Raises ValueError unless each is True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False")


def function(**values: Any) -> None:
    """Raises ValueError unless each can be called, or is None."""
    for name, value in values.items():
        if value is not None and not callable(value):
            raise ValueError(f"{name}={value!r} must be a function, or None")
