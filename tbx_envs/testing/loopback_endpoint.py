"""A model server without a model: chat completions on this machine, which answer and fail as a script says.

    with LoopbackEndpoint(lambda asked: Says("Hello")) as server:
        endpoint = ChatEndpoint(EndpointConfig(server.base_url, "any"))

It records all requests and how many were open at the same time, so that a test does not rely on the client's own
report.
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
        number: number in the order of arrival, from 0.
        path: path of the address.
        headers: headers by name in lower case.
        body: JSON body.
    """

    number: int
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Says:
    """A completion.

    Attributes:
        text: content.
        calls: (name, arguments as JSON text) of each tool call; ids are given in order.
        reasoning: `reasoning_content`; "" leaves it out.
        finish_reason: finish reason; None is `tool_calls` with calls, otherwise `stop`.
        usage: token counts in OpenAI's form; None leaves them out.
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
        status: HTTP status.
        body: JSON, or text that is sent as it is.
        headers: further headers; `content-type` replaces that of JSON.
    """

    status: int = 200
    body: Any = dataclasses.field(default_factory=dict)
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class EchoesKey:
    """An error whose message contains all headers of the request, including the one with the key."""

    status: int = 401


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """The connection is closed.

    Attributes:
        in_body: True closes it after half of the body, False before anything is sent.
    """

    in_body: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Drips:
    """One byte after the other, without end.

    Attributes:
        headers: True sends the headers slowly too, False sends them at once.
        pause_s: pause between two bytes.
    """

    headers: bool = False
    pause_s: float = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class Silence:
    """No answer until the client disconnects or the server is closed."""


Reply = Says | Answers | EchoesKey | Cut | Drips | Silence


def in_order(*replies: Reply) -> Callable[[Asked], Reply]:
    """A script: the n-th request gets the n-th reply, and all later ones the last."""
    return lambda asked: replies[min(asked.number, len(replies) - 1)]


class LoopbackEndpoint:
    """The server, which listens as soon as it is made. Close it, or use it as a context manager.

    Args:
        reply: script; called in the request's own thread. An exception is answered with status 500.

    Attributes:
        base_url: address for `EndpointConfig`.
        asked: all requests so far, in order of arrival.
        most_at_once: highest number of requests that were being answered at the same time.
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

    # --- called by the handler of a request ---------------------------------------------------------------------

    def _answer_to(self, path: str, headers: Mapping[str, str], body: Any) -> tuple[Asked, Reply]:
        """The script's reply. The request stops counting as running before the client can receive the answer."""
        with self._lock:
            asked = Asked(len(self.asked), path, headers, body)
            self.asked.append(asked)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            return asked, self._reply(asked)
        except Exception as error:  # the script's boundary: the client, and so the test, sees the error
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
    """A completion in the form of OpenAI's servers."""
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
        """Ignores clients that disconnect; nothing else is raised here."""


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
