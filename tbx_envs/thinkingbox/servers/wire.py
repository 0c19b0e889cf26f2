"""MCP over a connected socket, one JSON message a line, which detects at once that the other side broke the protocol.

`Wire` provides the two streams that mcp's `ClientSession` needs. Where the library would log, drop a message or wait
for ever, the connection ends here, and `broken` says why: the end of the stream, a line that is not a message (a
`print`), an answer to a request that was never sent.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from types import TracebackType
from typing import Any, Self

import anyio
import mcp_types as types
from mcp.shared.message import SessionMessage

from tbx_envs.doors import read_json

_READ_BYTES = 1 << 18
_LINE_LIMIT_BYTES = 256 << 20  # far above any database that is returned as effects
_SHOWN = 200


class Wire:
    """One side of a connection; all of it runs in the thread of one event loop.

    Args:
        link: connected, non-blocking socket.

    Attributes:
        broken: reason why the connection ended; None while it is open.
        reader, writer: streams for `ClientSession`.
    """

    def __init__(self, link: socket.socket) -> None:
        self.broken: str | None = None
        self.reader, self.writer = _Reader(self), _Writer(self)
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._arrived: deque[SessionMessage] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []  # parts of the current line
        self._part_bytes = 0
        self._unsent = b""
        self._unanswered: set[str] = set()
        self._half_closed = False
        self._loop.add_reader(link.fileno(), self._receive)

    async def receive(self) -> SessionMessage:
        while not self._arrived:
            if self.broken is not None:
                raise anyio.EndOfStream
            self._waiting = self._loop.create_future()
            await self._waiting
        return self._arrived.popleft()

    def send(self, message: types.JSONRPCMessage) -> None:
        if self.broken is not None or self._half_closed:
            raise anyio.BrokenResourceError
        if isinstance(message, types.JSONRPCRequest):
            self._unanswered.add(str(message.id))
        waits = bool(self._unsent)
        self._unsent += message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        if not waits:
            self._flush()

    def half_close(self) -> None:
        """Shut down the sending side once everything has been sent."""
        self._half_closed = True
        if not self._unsent:
            self._shut()

    def close(self) -> None:
        self._break("it was closed")
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link.fileno())
            self._loop.remove_writer(self._link.fileno())
            self._link.close()

    def _flush(self) -> None:
        try:
            sent = self._link.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # the other side has closed; what it sent before is still read, and then its end
            self._unsent = b""
            self._loop.remove_writer(self._link.fileno())
            return
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.add_writer(self._link.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._link.fileno())
            if self._half_closed:
                self._shut()

    def _shut(self) -> None:
        try:
            self._link.shutdown(socket.SHUT_WR)
        except OSError:  # already closed
            return

    def _receive(self) -> None:
        try:
            data = self._link.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._link.fileno())
            rest = b"".join(self._parts)
            self._break(f"it wrote {_shown(rest)} and closed its stdout" if rest else "it closed its stdout")
            return
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._parts.append(line)
            self._take(b"".join(self._parts))
            self._parts, self._part_bytes = [], 0
        self._parts.append(rest)
        self._part_bytes += len(rest)
        if self._part_bytes > _LINE_LIMIT_BYTES:
            self._parts = []
            self._break(f"it wrote a line of more than {_LINE_LIMIT_BYTES >> 20} MiB to its stdout")

    def _take(self, line: bytes) -> None:
        if self.broken is not None:
            return
        try:
            message = _message_in(line)
        except ValueError:
            self._break(f"it wrote {_shown(line)} to its stdout, which is no message of the protocol")
            return
        if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
            if str(message.id) not in self._unanswered:
                self._break(f"it answered {_shown(line)}, which belongs to no request")
                return
            self._unanswered.discard(str(message.id))
            _complete(message)
        self._arrived.append(SessionMessage(message))
        self._wake()

    def _break(self, why: str) -> None:
        if self.broken is None:
            self.broken = why
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class _Stream:
    """Base of both streams. Closing a stream does nothing: the owner of the wire closes the socket."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def aclose(self) -> None:
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Reader(_Stream):
    async def receive(self) -> SessionMessage:
        return await self._wire.receive()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage:
        try:
            return await self._wire.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


class _Writer(_Stream):
    async def send(self, item: SessionMessage, /) -> None:
        self._wire.send(item.message)


class Completing:
    """The reader of another transport, whose results of tools are completed like ours.

    Args:
        reader: stream of the library's transport.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    async def receive(self) -> SessionMessage | Exception:
        received: SessionMessage | Exception = await self._reader.receive()
        if isinstance(received, SessionMessage):
            _complete(received.message)
        return received

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        await self._reader.aclose()

    async def __aenter__(self) -> Self:
        await self._reader.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._reader.__aexit__(kind, error, trace)


def _complete(message: types.JSONRPCMessage) -> None:
    """Add the empty list of parts to a result that has null there, or `structuredContent` alone. Servers write both,
    and the library takes neither."""
    if isinstance(message, types.JSONRPCResponse):
        result = message.result
        if result.get("content") is None and {"content", "structuredContent"} & result.keys():
            result["content"] = []


def _message_in(line: bytes) -> types.JSONRPCMessage:
    """The message of a line. The library rejects half of a surrogate pair, which Python's json writes without ado.

    Raises:
        ValueError: it is none.
    """
    try:
        return types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        value = read_json(line)
        if value == json.loads(line):  # nothing was cleaned
            raise
        return types.jsonrpc_message_adapter.validate_python(value, by_name=False)


def _shown(line: bytes) -> str:
    text = line[:_SHOWN].decode(errors="replace")
    return repr(text + "..." if len(line) > _SHOWN else text)
