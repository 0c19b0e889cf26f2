"""A served model without a model: chat completions on this machine, answered and failing as a script says.

    with LoopbackEndpoint(lambda asked: Says("Hello")) as server:
        endpoint = ChatEndpoint(EndpointConfig(server.base_url, "any"))

It keeps what it was asked and counts how many requests were there at the same time, so that a test of a client need
not believe the client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        number: from 0, in the order of arrival.
        path: of the address.
        headers: names in lower case.
        body: its JSON.
    """

    number: int
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Says:
    """A completion.

    Attributes:
        text: its content.
        calls: (name, arguments as JSON text) of its tool calls, ids given in order.
        reasoning: its `reasoning_content`; "" leaves it out.
        finish_reason: None is `tool_calls` with calls, else `stop`.
        usage: as OpenAI counts; None leaves it out.
    """

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = dataclasses.field(
        default_factory=lambda: {
            "prompt_tokens": 100,
            "completion_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 60},
            "completion_tokens_details": {"reasoning_tokens": 4},
        }
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """Any answer.

    Attributes:
        status: of HTTP.
        body: JSON, or text sent as it is.
        headers: further ones; `content-type` replaces that of JSON.
    """

    status: int = 200
    body: Any = dataclasses.field(default_factory=dict)
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class EchoesKey:
    """An error whose message holds all headers of the request, the one with the key included."""

    status: int = 401


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """The connection is closed.

    Attributes:
        in_body: after half of the body; otherwise before anything is sent.
    """

    in_body: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Drips:
    """One byte after the other, for ever.

    Attributes:
        headers: they drip too; otherwise they come at once.
        pause_s: between two bytes.
    """

    headers: bool = False
    pause_s: float = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class Silence:
    """Nothing, until the client leaves or the server is closed."""


Reply = Says | Answers | EchoesKey | Cut | Drips | Silence


def in_order(*replies: Reply) -> Callable[[Asked], Reply]:
    """A script: the n-th request gets the n-th reply, the last one ever after."""
    return lambda asked: replies[min(asked.number, len(replies) - 1)]


class LoopbackEndpoint:
    """The server; listens as soon as it is made. Close it, or use it as a context manager.

    Args:
        reply: what to answer; called in a thread of the request's own. What it raises is answered with status 500.

    Attributes:
        base_url: for `EndpointConfig`.
        asked: all requests so far, in order of arrival.
        most_at_once: how many requests were being answered at the same time, at most.
    """

    def __init__(self, reply: Callable[[Asked], Reply]) -> None:
        self.asked: list[Asked] = []
        self.most_at_once = 0
        self._reply = reply
        self._running = 0
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="loopback", daemon=True)
        self._thread.start()

    def __enter__(self) -> LoopbackEndpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and threads; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # --- what the handler of a request calls --------------------------------------------------------------------

    def _answer_to(self, path: str, headers: Mapping[str, str], body: Any) -> tuple[Asked, Reply]:
        """What the script says. The request counts as running until then, so before the client can know the answer."""
        with self._lock:
            asked = Asked(len(self.asked), path, headers, body)
            self.asked.append(asked)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            return asked, self._reply(asked)
        except Exception as error:  # the script's boundary: a client sees it, and the test's assertions with it
            return asked, Answers(500, {"error": {"message": f"the script raised {type(error).__name__}: {error}"}})
        finally:
            with self._lock:
                self._running -= 1

    @contextlib.contextmanager
    def _connected(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _send(self, out: _Handler, asked: Asked, reply: Reply) -> None:
        match reply:
            case Says():
                out.send(200, completion_body(reply, asked.number))
            case Answers(status, body, headers):
                out.send(status, body, headers)
            case EchoesKey(status):
                out.send(status, {"error": {"message": f"not with these headers: {dict(asked.headers)}"}})
            case Cut(in_body):
                out.cut(completion_body(Says("half"), asked.number) if in_body else None)
            case Drips(headers, pause_s):
                out.drip(headers, lambda: not self._closing.wait(pause_s))
            case Silence():
                out.wait_for_the_client_to_leave()


def completion_body(says: Says, number: int = 0) -> dict[str, Any]:
    """A completion as OpenAI's servers send it."""
    message: dict[str, Any] = {"role": "assistant", "content": says.text or None}
    if says.reasoning:
        message["reasoning_content"] = says.reasoning
    if says.calls:
        message["tool_calls"] = [
            {"id": f"sent_{number}_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(says.calls)
        ]
    reason = says.finish_reason or ("tool_calls" if says.calls else "stop")
    body: dict[str, Any] = {
        "id": f"completion-{number}",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    }
    if says.usage is not None:
        body["usage"] = dict(says.usage)
    return body


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # all are joined when it is closed
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no news; nothing else is raised here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: without it every answer takes 40 ms
    endpoint: LoopbackEndpoint

    def handle(self) -> None:
        with self.endpoint._connected(self.connection):
            super().handle()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked, reply = self.endpoint._answer_to(self.path, headers, json.loads(content))
        self.endpoint._send(self, asked, reply)

    def send(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response_only(status)
        for name, value in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def cut(self, body: Any) -> None:
        self.close_connection = True
        if body is not None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])

    def drip(self, headers: bool, go_on: Callable[[], bool]) -> None:
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        self.wfile.write(b"x-slow: " if headers else b"content-type: application/json\r\n\r\n")
        while go_on():
            self.wfile.write(b" ")

    def wait_for_the_client_to_leave(self) -> None:
        self.close_connection = True
        self.connection.recv(1)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing."""


def _handler(endpoint: LoopbackEndpoint) -> type[_Handler]:
    return type("_BoundHandler", (_Handler,), {"endpoint": endpoint})
