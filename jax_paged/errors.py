"""The library's own exceptions; a plain wrong argument is a ValueError, a missing feature NotImplementedError."""


class InvariantError(RuntimeError):
    """A `check()` found pages, locks or counters that contradict each other: a bug in this library."""


class OutOfPages(RuntimeError):
    """The pool has too few free pages for what was asked; nothing has changed.

    The message always starts with "OOM", so that it can be told from other errors by its text alone. Callers
    name the pages needed, the pages free, and the option to change.
    """

    def __init__(self, message: str):
        super().__init__(message if message.startswith("OOM") else f"OOM: {message}")


class ModelError(ValueError):
    """A model or tokenizer that cannot be loaded: not found, damaged, or of a kind that is not supported."""


class RequestError(ValueError):
    """A request that can never run; nothing has changed, and others go on. Names the value, the limit and the way
    out.
    """
