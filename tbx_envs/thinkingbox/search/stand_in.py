"""The stand-in's program: a search service over HTTP that lives as long as someone holds a lease of it.

    python -I -S stand_in.py FD HOST PORT

FD is a socket, the first lease. One line of JSON is written there: `{"port": ..., "instance": ..., "pid": ...}`, or,
when it cannot listen, `{"taken": bool, "why": ...}`. It needs the standard library only, and this package without its
`__init__`, which would import Gymnasium.

    GET    /collections/{name}              200, or 404
    POST   /collections                     201, or 409 where the name is taken
    POST   /collections/{name}/documents    201
    POST   /multi_search                    200
    DELETE /collections/{name}              200, or 404
    GET    /health                          200, {"ok": true, "service": ..., "instance": ...}
    GET    /tbx-lease                       200, {"instance": ..., "pid": ...}; the connection is a lease

Any API key is accepted, and the service listens on loopback only. Collections are independent. Collections that are
never deleted (by a server that was killed) are evicted when there are too many, least recently used first. A search in
an unknown collection is 404 as a whole, where Typesense answers 200 and hides it: a missing collection must not look
like rules without a match.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import http.server
import json
import os
import socket
import socketserver
import sys
import threading
import types
import urllib.parse
import uuid
from collections.abc import Mapping
from typing import Any

if __name__ == "__main__":
    bare = types.ModuleType("tbx_envs")
    bare.__path__ = [os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))]
    sys.modules["tbx_envs"] = bare

from tbx_envs.doors import MAX_JSON_DEPTH, read_json
from tbx_envs.thinkingbox.search.search_collections import Collections, RequestError
from tbx_envs.web.bodies import BodyTooLarge, refuse_length
from tbx_envs.web.local_requests import why_foreign

MAX_BODY_BYTES = 32 * 2**20
# For a connection that a session leaves open; each costs a thread.
IDLE_TIMEOUT_S = 600.0
NAME = "tbx"
LEASE_PATH = "/tbx-lease"


def main(descriptor: int, host: str, port: int) -> None:
    """Serve until the last lease is closed."""
    first = socket.socket(fileno=descriptor)
    if os.fork():  # the process that started it has nothing to wait for
        os._exit(0)
    first.set_inheritable(False)
    try:
        server = Server((host, port), Collections())
    except OSError as error:
        _say(first, {"taken": error.errno == errno.EADDRINUSE, "why": error.strerror})
        return
    threading.Thread(target=server.hold, args=(first,), daemon=True).start()
    _say(first, {"port": server.server_port, **server.lease_terms()})
    server.serve_forever(poll_interval=0.1)
    server.server_close()
    os._exit(0)  # cuts the connections that are left, the last lease among them


def _say(sock: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(json.dumps(message).encode() + b"\n")


class Server(http.server.ThreadingHTTPServer):
    """The HTTP server.

    Attributes:
        instance: id that no other stand-in has.
        collections: what it searches in.
    """

    request_queue_size = 1024
    allow_reuse_port = False  # two stand-ins on one port would each answer some of the requests
    daemon_threads = True

    def __init__(self, address: tuple[str, int], collections: Collections) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.instance, self.collections = uuid.uuid4().hex, collections
        self._lock = threading.Lock()
        self._num_leases = 1  # of the process that starts it
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer.server_bind asks DNS for our own name
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: sessions that are killed cut their connections."""

    def lease_terms(self) -> dict[str, Any]:
        return {"instance": self.instance, "pid": os.getpid()}

    def lend(self) -> bool:
        """Whether another lease is given; not after the last one was closed."""
        with self._lock:
            if self._num_leases:
                self._num_leases += 1
            return self._num_leases > 0

    def hold(self, lease: socket.socket) -> None:
        """Wait until a lease is closed. With the last one the server ends, and this does not return."""
        with contextlib.suppress(OSError):
            lease.settimeout(None)
            while lease.recv(4096):
                pass
        with self._lock:
            self._num_leases -= 1
            last = not self._num_leases
        if last:
            self.shutdown()
            threading.Event().wait()  # the lease's end is the process's end, so that its holder can wait for that
        lease.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    # Head and body are sent in one packet: a second packet would wait for the client's delayed acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True
    timeout = IDLE_TIMEOUT_S

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _answer(self) -> None:
        try:
            self._refuse_foreign()
            body = self._body()
            path, _, query = self.path.partition("?")
            steps = [urllib.parse.unquote(step) for step in path.strip("/").split("/")]
            if (self.command, steps) == ("GET", ["health"]):
                self._send(200, {"ok": True, "service": NAME, "instance": self.server.instance})
                return
            if (self.command, path) == ("GET", LEASE_PATH):
                self._lease()
                return
            status, answer = self.server.collections.answer(
                self.command, steps, dict(urllib.parse.parse_qsl(query)), body
            )
            self._send(status, answer)
        except RequestError as error:
            self._send(error.status, {"message": error.message})

    def _lease(self) -> None:
        self.close_connection = True
        if not self.server.lend():
            raise RequestError(503, "the service is ending.")
        self._send(200, self.server.lease_terms(), keep=True)
        self.wfile.flush()
        self.server.hold(self.connection)

    def _refuse_foreign(self) -> None:
        """Check that no web page sent the request (`tbx_envs.web.local_requests`).

        Raises:
            RequestError: one may have.
        """
        host, origin, site = (self.headers.get_all(name, []) for name in ("Host", "Origin", "Sec-Fetch-Site"))
        if reason := why_foreign(host, origin, site, port=self.connection.getsockname()[1]):
            self.close_connection = True  # its body is not read
            raise RequestError(403, reason)

    def _body(self) -> Any:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            self.close_connection = True
            raise RequestError(411, "a body needs a Content-Length.")
        length = self.headers.get("Content-Length", "0")
        try:
            refuse_length(length, MAX_BODY_BYTES)
        except BodyTooLarge as error:
            self.close_connection = True
            raise RequestError(413, f"{error}.") from error
        data = self.rfile.read(int(length))
        if not data:
            return None
        try:
            return read_json(data, max_depth=MAX_JSON_DEPTH)
        except ValueError as error:
            raise RequestError(400, f"the body is no JSON: {error}") from error

    def _send(self, status: int, answer: Mapping[str, Any], *, keep: bool = False) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection and not keep:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors of the base class (a broken request line, an unknown method), also as JSON."""
        self.close_connection = True
        self._send(404 if code == 501 else code, {"message": message or http.client.responses.get(code, "")})

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
