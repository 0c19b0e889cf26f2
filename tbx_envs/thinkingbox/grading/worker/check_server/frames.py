"""Messages between tbx and a grade: four bytes with the length, then a JSON object.

An incomplete message is never read as a message: it raises `EOFError` or `ValueError`.
"""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any

MAX_BYTES = 256 * 2**20  # a longer message is a mistake: evidence is a few megabytes at most
_HEAD_BYTES = 4


def frame(message: dict[str, Any]) -> bytes:
    """The bytes of a message."""
    body = json.dumps(message, default=dict).encode()  # other mappings than dict
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body):,} bytes; at most {MAX_BYTES:,} are sent")
    return len(body).to_bytes(_HEAD_BYTES, "big") + body


class FrameReader:
    """Reads messages from a blocking socket; keeps the beginning of an incomplete one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._bytes = bytearray()

    def read(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None when it did not arrive in time.

        Raises:
            EOFError: the other end is closed.
            ValueError: the data is not a message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._complete()) is None:
            left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            if not self._poll.poll(left_ms):
                return None
            try:
                more = self._sock.recv(2**20)
            except ConnectionError:
                more = b""
            if not more:
                raise EOFError("the other end is closed")
            self._bytes += more
        return message

    def _complete(self) -> dict[str, Any] | None:
        end = _HEAD_BYTES + int.from_bytes(self._bytes[:_HEAD_BYTES], "big")
        if len(self._bytes) < _HEAD_BYTES:
            return None
        if end > _HEAD_BYTES + MAX_BYTES:
            raise ValueError("what came is no message")
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_HEAD_BYTES:end])
        del self._bytes[:end]
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ValueError("what came is no message")
        return message
