"""A stand-in for the search service that the benchmark's servers expect on 127.0.0.1:8108.

Those servers use Typesense: they create a collection for each session, add a document for each chapter of the rules,
search, and delete the collection. `ensure_search_service` answers their five requests with `KnowledgeBase` from a
thread of this process, unless a service answers there already: then that one is used, and never stopped by us.

    GET    /collections/{name}              200, or 404
    POST   /collections                     201, or 409 where the name is taken
    POST   /collections/{name}/documents    201
    POST   /multi_search                    200
    DELETE /collections/{name}              200, or 404
    GET    /health                          200, {"ok": true, "service": ..., "instance": ...}

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
import threading
import urllib.parse
import uuid
from collections.abc import Mapping
from typing import Any

from tbx_envs.doors import MAX_JSON_DEPTH, read_json
from tbx_envs.errors import ConfigError
from tbx_envs.thinkingbox.search.search_collections import Collections, RequestError
from tbx_envs.web import addresses
from tbx_envs.web.bodies import BodyTooLarge, refuse_length
from tbx_envs.web.local_requests import why_foreign

HOST, PORT = "127.0.0.1", 8108
MAX_BODY_BYTES = 32 * 2**20
PROBE_TIMEOUT_S = 15.0  # the service's process may be busy
# For a connection that a session leaves open; each costs a thread.
IDLE_TIMEOUT_S = 600.0
NAME = "tbx"


class SearchService:
    """A search service in use: our stand-in or a foreign service.

    Attributes:
        host, port, url: address of the service.
        ours: True for the stand-in of this process.
        instance: id of the stand-in; "" for another kind of service.
    """

    def __init__(self, host: str, port: int, instance: str, stand_in: _StandIn | None) -> None:
        self.host, self.port, self.instance = host, port, instance
        self.url = addresses.url(host, port)
        self.ours = stand_in is not None
        self._stand_in = stand_in
        self._process = os.getpid()

    def answers(self) -> bool:
        """Whether the same service still answers; the collections of one that has ended are lost."""
        stand_in = self._stand_in
        if stand_in is not None:
            return self._process == os.getpid() and stand_in.is_alive
        try:
            return _probe(self.host, self.port) == self.instance
        except ConfigError:
            return False

    def close(self) -> None:
        """Release it: our stand-in ends with its last user. A second call, or one in a forked child, does nothing."""
        stand_in, self._stand_in = self._stand_in, None
        if stand_in is not None and self._process == os.getpid():
            _release(stand_in)

    def __enter__(self) -> SearchService:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def ensure_search_service(host: str = HOST, port: int = PORT) -> SearchService:
    """A search service that answers on `host:port`; the stand-in is started if none does.

    The caller must close the result. Port 0 starts a separate stand-in on a free port.

    Raises:
        ConfigError: the host is not loopback, or the port is in use by something other than a search service.
    """
    if not addresses.is_loopback(host):
        raise ConfigError(
            f"the search service was requested on '{host}'; it has no access control, so it listens on loopback only. "
            f"Use 127.0.0.1."
        )
    # Another process may start or end its stand-in between our probe and our bind.
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
        f"no search service could be started on {host}:{port}: the port is in use, but the program that uses it cuts "
        f"connections. Find that program (`ss -ltnp 'sport = :{port}'`) and end it, or wait."
    )


def _probe(host: str, port: int) -> str | None:
    """The instance of the service that answers ("" for a foreign one), or None when nothing listens.

    Raises:
        ConfigError: something other than a search service answers.
    """
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        status, body = response.status, response.read(4096)
    except ConnectionError:  # nothing listens, or the listener has just ended
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
        f"the servers need a search service on {host}:{port}, but something else is there: {answered}. A search "
        f'service answers with status 200 and {{"ok": true}}. Free the port, or start the service properly.'
    )


class _PortTaken(Exception):
    pass


class _StandIn:
    """The HTTP server with its threads. `users` is guarded by the module's lock."""

    def __init__(self, host: str, port: int) -> None:
        self.users = 1
        self.closed = False
        self.instance = uuid.uuid4().hex
        collections = Collections()
        handler = type("Handler", (_Handler,), {"collections": collections, "instance": self.instance})
        try:
            self.server = _Server((host, port), handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _PortTaken from error
            raise ConfigError(f"the search service cannot listen on {host}:{port}: {error.strerror}.") from error
        self.host, self.port = host, self.server.server_address[1]
        self.collections = collections
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
    """A forked child has our sockets but not our threads: open sockets would keep the port and never answer."""
    global _lock
    _lock = threading.Lock()
    for stand_in in _running.values():
        stand_in.server.drop_sockets()
    _running.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class _Server(http.server.ThreadingHTTPServer):
    """Tracks its connections, so that it can end them while handlers wait for the next request."""

    request_queue_size = 1024
    allow_reuse_port = False  # two stand-ins on one port would each answer some of the requests
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._connections: dict[socket.socket, threading.Thread] = {}
        super().__init__(address, handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer.server_bind asks DNS for our own name
        self.server_name, self.server_port = self.socket.getsockname()[:2]

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
        """Prints nothing: sessions that are killed cut their connections."""

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
    collections: Collections
    instance: str
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
                self._send(200, {"ok": True, "service": NAME, "instance": self.instance})
                return
            status, answer = self.collections.answer(self.command, steps, dict(urllib.parse.parse_qsl(query)), body)
            self._send(status, answer)
        except RequestError as error:
            self._send(error.status, {"message": error.message})

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
        """Errors of the base class (a broken request line, an unknown method), also as JSON."""
        self.close_connection = True
        self._send(404 if code == 501 else code, {"message": message or http.client.responses.get(code, "")})

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
