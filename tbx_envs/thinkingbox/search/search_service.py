"""A stand-in for the search service that the benchmark's servers expect on 127.0.0.1:8108.

Their servers talk to a Typesense: a collection for each session, one document for each chapter of the policy, a
search, and the collection's end. `ensure_search_service` answers those five requests with `KnowledgeBase` from a
thread of this process, unless a service answers there already: then that one is used, and never stopped by us.

    GET    /collections/{name}              200, or 404
    POST   /collections                     201, or 409 where the name is taken
    POST   /collections/{name}/documents    201
    POST   /multi_search                    200
    DELETE /collections/{name}              200, or 404
    GET    /health                          200, {"ok": true, "service": ..., "instance": ...}

Any API key is accepted, and only loopback is listened on. Collections know nothing of each other. Those that are never
deleted (a server that was killed) are forgotten when there are too many, the longest unused first. A search in an
unknown collection is 404 as a whole, where Typesense answers 200 and hides it: an empty result must not be mistaken
for a policy that says nothing.
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
import threading
import urllib.parse
import uuid
from collections.abc import Mapping
from typing import Any

from tbx_envs.errors import ConfigError
from tbx_envs.thinkingbox.search.search_collections import Collections, Refused
from tbx_envs.web import addresses

HOST, PORT = "127.0.0.1", 8108
MAX_BODY_BYTES = 32 * 2**20
PROBE_TIMEOUT_S = 15.0  # its process may be busy
# A connection that a session keeps open and forgets; every one of them costs a thread.
IDLE_TIMEOUT_S = 600.0
NAME = "tbx"


class SearchService:
    """A search service in use, ours or somebody else's.

    Attributes:
        host, port, url: where it answers.
        ours: it is the stand-in of this process.
        instance: which stand-in it is; "" when it is no stand-in.
    """

    def __init__(self, host: str, port: int, instance: str, stand_in: _StandIn | None) -> None:
        self.host, self.port, self.instance = host, port, instance
        self.url = addresses.url(host, port)
        self.ours = stand_in is not None
        self._stand_in = stand_in
        self._process = os.getpid()

    def answers(self) -> bool:
        """Whether the same service still answers; collections of one that went away are lost."""
        stand_in = self._stand_in
        if stand_in is not None:
            return self._process == os.getpid() and stand_in.is_alive
        try:
            return _probe(self.host, self.port) == self.instance
        except ConfigError:
            return False

    def close(self) -> None:
        """Let go of it: our stand-in ends with its last user. A second call, or one in a forked child, does nothing."""
        stand_in, self._stand_in = self._stand_in, None
        if stand_in is not None and self._process == os.getpid():
            _release(stand_in)

    def __enter__(self) -> SearchService:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def ensure_search_service(host: str = HOST, port: int = PORT) -> SearchService:
    """A search service that answers on `host:port`; the stand-in is started if none does.

    Close what is returned. Port 0 starts a stand-in of one's own on a free port.

    Raises:
        ConfigError: the host is not loopback, or the port is taken by something that is no search service.
    """
    if not addresses.is_loopback(host):
        raise ConfigError(
            f"the search service was asked for on '{host}'; it knows no access control, so it listens on loopback "
            f"only. Use 127.0.0.1."
        )
    # Another process may start its stand-in, or end it, between our look and our bind.
    for _ in range(5):
        with _lock:
            stand_in = _running.get((host, port))
            if stand_in is not None:
                stand_in.users += 1
                return SearchService(host, stand_in.port, stand_in.instance, stand_in)
            with contextlib.suppress(_PortTaken):
                stand_in = _StandIn(host, port)
                _running[host, stand_in.port] = stand_in
                return SearchService(host, stand_in.port, stand_in.instance, stand_in)
        instance = _probe(host, port)
        if instance is not None:
            return SearchService(host, port, instance, None)
    raise ConfigError(
        f"no search service could be started on {host}:{port}: the port is taken, yet whoever holds it cuts "
        f"connections. See who holds it (`ss -ltnp 'sport = :{port}'`) and end that, or wait."
    )


def _probe(host: str, port: int) -> str | None:
    """The instance of the service that answers ("" for a foreign one), or None where nobody listens.

    Raises:
        ConfigError: something else answers.
    """
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        status, body = response.status, response.read(4096)
    except ConnectionError:  # nobody listens, or the listener just ended
        return None
    except (OSError, http.client.HTTPException) as error:
        raise _not_a_service(host, port, f"it answered GET /health with {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    try:
        health = json.loads(body)
    except ValueError:
        health = None
    if status != 200 or not isinstance(health, dict) or health.get("ok") is not True:
        said = body[:120].decode("utf-8", "replace")
        raise _not_a_service(host, port, f"it answered GET /health with status {status} and {said!r}")
    return str(health.get("instance", "")) if health.get("service") == NAME else ""


def _not_a_service(host: str, port: int, answered: str) -> ConfigError:
    return ConfigError(
        f"the servers need a search service on {host}:{port}, and something else is there: {answered}. A search "
        f'service says 200 and {{"ok": true}}. Free the port, or start the service properly.'
    )


class _PortTaken(Exception):
    pass


class _StandIn:
    """The HTTP server with its threads. `users` is guarded by the module's lock."""

    def __init__(self, host: str, port: int) -> None:
        self.users = 1
        self.closed = False
        self.instance = uuid.uuid4().hex
        shelf = Collections()
        handler = type("Handler", (_Handler,), {"shelf": shelf, "instance": self.instance})
        try:
            self.server = _Server((host, port), handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _PortTaken from error
            raise ConfigError(f"the search service cannot listen on {host}:{port}: {error.strerror}.") from error
        self.host, self.port = host, self.server.server_address[1]
        self.shelf = shelf
        self._thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.1}, name="tbx-search", daemon=True
        )
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return not self.closed and self._thread.is_alive()

    def close(self) -> None:
        self.closed = True
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
        self.server.end_connections()


_lock = threading.Lock()
_running: dict[tuple[str, int], _StandIn] = {}


def _release(stand_in: _StandIn) -> None:
    with _lock:
        stand_in.users -= 1
        if stand_in.users > 0:
            return
        _running.pop((stand_in.host, stand_in.port), None)
        stand_in.close()


def _forget_in_child() -> None:
    """A forked child has our sockets but not our threads: left open, they would keep the port and never answer."""
    global _lock
    _lock = threading.Lock()
    for stand_in in _running.values():
        stand_in.server.drop_sockets()
    _running.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class _Server(http.server.ThreadingHTTPServer):
    """Remembers its connections, so that it can end them: a handler waits in its connection for the next request."""

    request_queue_size = 1024
    allow_reuse_port = False  # two stand-ins on one port would each answer some of the requests
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._connections: dict[socket.socket, threading.Thread] = {}
        super().__init__(address, handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks DNS for our own name
        self.server_name, self.server_port = self.server_address[:2]

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), name="tbx-search-client", daemon=True
        )
        self._connections[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._connections.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A session that was killed cuts its connection; that is nothing to print."""

    def end_connections(self) -> None:
        for connection, thread in list(self._connections.items()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()

    def drop_sockets(self) -> None:
        for inherited in (self.socket, *self._connections):
            # Not close(), which waits for the handler's files on the same socket.
            descriptor = inherited.detach()
            if descriptor >= 0:
                os.close(descriptor)


class _Handler(http.server.BaseHTTPRequestHandler):
    shelf: Collections
    instance: str
    protocol_version = "HTTP/1.1"
    # Head and body leave in one packet: in two, the second would wait for the client's delayed acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True
    timeout = IDLE_TIMEOUT_S

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _answer(self) -> None:
        try:
            body = self._body()
            path, _, query = self.path.partition("?")
            steps = [urllib.parse.unquote(step) for step in path.strip("/").split("/")]
            if (self.command, steps) == ("GET", ["health"]):
                self._send(200, {"ok": True, "service": NAME, "instance": self.instance})
                return
            status, answer = self.shelf.answer(self.command, steps, dict(urllib.parse.parse_qsl(query)), body)
            self._send(status, answer)
        except Refused as refused:
            self._send(refused.status, {"message": refused.message})

    def _body(self) -> Any:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            self.close_connection = True
            raise Refused(411, "a body needs a Content-Length.")
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise Refused(413, f"a body of {length} bytes; at most {MAX_BODY_BYTES} are read.")
        data = self.rfile.read(int(length))
        if not data:
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is no JSON: {error}") from error

    def _send(self, status: int, answer: Mapping[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses (a broken request line, an unknown method), as JSON too."""
        self.close_connection = True
        self._send(404 if code == 501 else code, {"message": message or http.client.responses.get(code, "")})

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
