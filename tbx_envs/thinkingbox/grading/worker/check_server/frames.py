"""Messages between tbx and a grade: four bytes with the length, then a JSON object.

An incomplete message is never read as a message: it raises `EOFError` or `ValueError`.

A process that test code starts inherits the socket of its grade, and could write a verdict into it. So tbx reads the
messages of each sender apart, where the system says who sent what (Linux: the kernel attaches the sender's id).
"""

from __future__ import annotations

import collections
import json
import select
import socket
import struct
import time
from typing import Any

MAX_BYTES = 256 * 2**20  # a longer message is a mistake: evidence is a few megabytes at most
_HEAD_BYTES = 4
_PASS_CREDENTIALS: int | None = getattr(socket, "SO_PASSCRED", None)
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
ANYONE = 0  # id of the sender where the system does not say it


def frame(message: dict[str, Any]) -> bytes:
    """The bytes of a message."""
    body = json.dumps(message, default=dict).encode()  # other mappings than dict
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body):,} bytes; at most {MAX_BYTES:,} are sent")
    return len(body).to_bytes(_HEAD_BYTES, "big") + body


class FrameReader:
    """Reads messages from a blocking socket; keeps the beginning of an incomplete one.

    Args:
        sock: connected socket.
        tells_senders: whether to ask the system who sent what.

    Attributes:
        sender: process id of the last message's sender; `ANYONE` where the system does not say it.
    """

    def __init__(self, sock: socket.socket, *, tells_senders: bool = False) -> None:
        self.sender = ANYONE
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._bytes: dict[int, bytearray] = collections.defaultdict(bytearray)  # by sender
        self._asks = False
        if tells_senders and _PASS_CREDENTIALS is not None:
            sock.setsockopt(socket.SOL_SOCKET, _PASS_CREDENTIALS, 1)
            self._asks = True

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
                more, sender = self._receive()
            except ConnectionError:
                more, sender = b"", ANYONE
            if not more:
                raise EOFError("the other end is closed")
            self._bytes[sender] += more
        return message

    def _receive(self) -> tuple[bytes, int]:
        """The next bytes, all of one sender, and who that is."""
        if not self._asks:
            return self._sock.recv(2**20), ANYONE
        data, notes, _, _ = self._sock.recvmsg(2**20, socket.CMSG_SPACE(_CREDENTIALS.size))
        told = notes[0][2] if notes else b""
        return data, _CREDENTIALS.unpack(told)[0] if len(told) == _CREDENTIALS.size else ANYONE

    def _complete(self) -> dict[str, Any] | None:
        for sender, received in self._bytes.items():
            if (message := _taken_from(received)) is not None:
                self.sender = sender
                return message
        return None


def _taken_from(received: bytearray) -> dict[str, Any] | None:
    """The first message of the bytes, which loses it; None while it is incomplete."""
    end = _HEAD_BYTES + int.from_bytes(received[:_HEAD_BYTES], "big")
    if len(received) < _HEAD_BYTES:
        return None
    if end > _HEAD_BYTES + MAX_BYTES:
        raise ValueError("what came is no message")
    if len(received) < end:
        return None
    body = bytes(received[_HEAD_BYTES:end])
    del received[:end]
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError("what came is no message")
    return message
