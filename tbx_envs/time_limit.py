"""A call with a time limit: it runs in a thread of its own, which is abandoned when the limit has passed.

Nothing else can end a wait for code that loops or blocks. An abandoned thread is not stopped, and cannot keep the
process alive. Not guaranteed: the limit, where the code blocks the whole interpreter inside a C extension.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float | None, call: Callable[[], T]) -> T:
    """The result of `call`, or what it raises.

    Args:
        seconds: time limit; None calls it in this thread, without one.
        call: function without arguments; it sees this thread's context variables.

    Raises:
        TimeoutError: it did not return in time.
    """
    if seconds is None:
        return call()
    results: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:  # it is raised in the caller's thread
            results.put((None, error))

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="tbx-limited", daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no result within {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
