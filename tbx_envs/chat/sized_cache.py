"""A cache of the latest results, bounded by the bytes that they take and not by their number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")

_LARGEST_SHARE = 16  # an entry that would fill more than this part of the cache is not kept


class SizedCache(Generic[V]):
    """Results by key, the least recently used dropped first. Thread-safe; two threads may compute the same result.

    Args:
        max_bytes: how much all entries together may take.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def get(self, key: Hashable, make: Callable[[], V], size: Callable[[V], int]) -> V:
        """The result of that key; made, and kept if it is not too large, when there is none.

        Args:
            key: what the result depends on.
            make: makes the result.
            size: bytes that a result and its key take, about.
        """
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
        made = make()
        num_bytes = size(made)
        if num_bytes * _LARGEST_SHARE <= self._max_bytes:
            with self._lock:
                self._keep(key, made, num_bytes)
        return made

    def _keep(self, key: Hashable, made: V, num_bytes: int) -> None:
        if key not in self._entries:
            self.num_bytes += num_bytes
            self._entries[key] = made, num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._entries.popitem(last=False)[1][1]
