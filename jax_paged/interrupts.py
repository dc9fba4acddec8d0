"""Ctrl-C, kept out of places where books are half written."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C inside has its effect at the end; a second one, of somebody who will not wait, at once.

    Python runs signal handlers in the main thread alone, so in others there is nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[Any, ...]] = []

    def note(*args: Any) -> None:
        if caught and callable(handler):
            handler(*args)
        caught.append(args)

    handler = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        # None: one that Python did not install, and cannot call.
        signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
        if caught and callable(handler):
            handler(*caught[0])
