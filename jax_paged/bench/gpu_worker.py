"""A process for calls that may hang or crash: a GPU recovers from neither within the process that caused it."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["CallError", "Worker"]

# After any other error the GPU's context may be lost, so the process ends with it.
_HARMLESS = (NotImplementedError, ImportError, ValueError, AssertionError)


class CallError(Exception):
    """A call that raised, hung or ended its process; the message is one line that says which."""


class Worker:
    """Runs calls in another process, started when it is needed and again after one is lost.

    Example:
        >>> with Worker() as worker:
        ...     worker.call(math.sqrt, 2.0, timeout_s=10)
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Any = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        """Returns `function(*args)`; function, arguments and result are pickled.

        Raises:
            CallError: the function raised, took longer than `timeout_s` seconds, or its process ended.
        """
        if self._process is None:
            self._start()
        self._connection.send((function, args))
        if not self._connection.poll(timeout_s):
            self.close()
            raise CallError(f"hung: no answer in {timeout_s:.0f} s")
        try:
            result, error, goes_on = self._connection.recv()
        except EOFError:
            self._process.join(10)
            exit_code = self._process.exitcode
            self.close()
            raise CallError(f"crashed: the process ended with {exit_code=}") from None
        if not goes_on:
            self.close()
        if error is not None:
            raise CallError(error)
        return result

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is seen here when the process ends

    def close(self) -> None:
        """Ends the process; the next call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = None


def _serve(connection: Connection) -> None:
    """Answers calls with (result, error, whether it goes on) until the other end is closed."""
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, str | None, bool] = (function(*args), None, True)
        # Whatever it is, the caller wants to go on with other calls.
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            answer = (None, f"{type(error).__name__}: {first_line[:160]}", isinstance(error, _HARMLESS))
        connection.send(answer)
        if not answer[2]:
            return
