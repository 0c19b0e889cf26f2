"""A stand-in for the search service that the benchmark's servers expect on 127.0.0.1:8108.

Those servers use Typesense: they create a collection for each session, add a document for each chapter of the rules,
search, and delete the collection. `ensure_search_service` answers their requests with `KnowledgeBase`, unless a service
answers there already: then that one is used, and a foreign one is never stopped by us.

The stand-in is a process of its own (`stand_in`), which belongs to all who use it: each holds a connection to it, its
*lease*, and it ends when the last lease is closed. A lease is closed by the system when its holder ends in any way, so
no user takes the service away from others, and nothing is left after the last one. The first to need it starts it; of
two that do so at the same time, one gets the port, and the other a lease.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tbx_envs.errors import ConfigError
from tbx_envs.thinkingbox.search.stand_in import LEASE_PATH, NAME
from tbx_envs.web import addresses

HOST, PORT = "127.0.0.1", 8108
PROBE_TIMEOUT_S = 15.0  # the service's process may be busy
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
_NUM_TRIES = 5  # another process may start or end the stand-in between two steps of ours
_PROGRAM = Path(__file__).with_name("stand_in.py")
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class SearchService:
    """A search service in use: a stand-in or a foreign service.

    Attributes:
        host, port, url: address of the service.
        ours: True for a stand-in that this process holds a lease of, started by any process.
        instance: id of the stand-in; "" for another kind of service.
    """

    def __init__(self, host: str, port: int, instance: str, lease: _Lease | None) -> None:
        self.host, self.port, self.instance = host, port, instance
        self.url = addresses.url(host, port)
        self.ours = lease is not None
        self._lease = lease
        self._process = os.getpid()

    def answers(self) -> bool:
        """Whether the same service is still there; the collections of one that has ended are lost."""
        if self._process != os.getpid() and self.ours:
            return False
        if self._lease is not None:
            return self._lease.is_held()
        try:
            return not self.ours and _probe(self.host, self.port) == self.instance
        except ConfigError:
            return False

    def close(self) -> None:
        """Release it: a stand-in ends with its last user. A second call, or one in a forked child, does nothing."""
        lease, self._lease = self._lease, None
        if lease is not None and self._process == os.getpid():
            _release(lease)

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
    for _ in range(_NUM_TRIES):
        with _lock:
            lease = _leases.get((host, port))
            if lease is None or not lease.is_held():
                instance = None if port == 0 else _probe(host, port)
                if instance is None:
                    lease = _started(host, port)
                else:
                    lease = _joined(host, port) if instance else None
                    if lease is None:
                        if _probe(host, port) == instance:  # foreign, or of a version without leases
                            return SearchService(host, port, instance, None)
                        continue
            if lease is not None:
                _leases[host, lease.port] = lease
                lease.users += 1
                return SearchService(host, lease.port, lease.instance, lease)
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


# --- leases -------------------------------------------------------------------------------------------------


class _Lease:
    """This process's connection to a stand-in. `users` is guarded by the module's lock."""

    def __init__(self, host: str, port: int, terms: dict[str, Any], sock: socket.socket) -> None:
        self.users = 0
        self.host, self.port = host, port
        self.instance, self.pid = str(terms["instance"]), int(terms["pid"])
        self._sock = sock

    def is_held(self) -> bool:
        """Whether the stand-in is there: it says nothing on this connection until it ends."""
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Give it back, and wait until the stand-in has taken note: after the last it is exiting."""
        with self._sock, contextlib.suppress(OSError):
            self._sock.settimeout(_END_TIMEOUT_S)
            self._sock.shutdown(socket.SHUT_WR)
            while self._sock.recv(4096):
                pass

    def forget(self) -> None:
        """In a forked child: close the copy of the connection, which would keep the stand-in alive."""
        descriptor = self._sock.detach()
        if descriptor >= 0:
            os.close(descriptor)


_lock = threading.Lock()
_leases: dict[tuple[str, int], _Lease] = {}


def _started(host: str, port: int) -> _Lease | None:
    """The first lease of a new stand-in; None when the port is taken.

    Raises:
        ConfigError: it cannot listen there, or did not start.
    """
    ours, its = socket.socketpair()
    with its:
        subprocess.run(  # ends at once: the stand-in is its child, and an orphan afterwards
            [sys.executable, "-I", "-S", str(_PROGRAM), str(its.fileno()), host, str(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            cwd="/",
            start_new_session=True,
            check=False,
        )
    try:
        said = _first_line(ours)
        if said.get("port"):
            return _Lease(host, said["port"], said, ours)
    except BaseException:
        ours.close()
        raise
    ours.close()
    if said.get("taken"):
        return None
    raise ConfigError(f"the search service cannot listen on {host}:{port}: {said.get('why', 'it ended at once')}.")


def _first_line(sock: socket.socket) -> dict[str, Any]:
    sock.settimeout(_START_TIMEOUT_S)
    data = b""
    with contextlib.suppress(OSError):
        while not data.endswith(b"\n") and (more := sock.recv(4096)):
            data += more
    sock.settimeout(None)
    return json.loads(data) if data.endswith(b"\n") else {}


def _joined(host: str, port: int) -> _Lease | None:
    """A lease of the stand-in that is there; None when it gives none, since it is just ending or has no leases."""
    sock = None
    try:
        sock = socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S)
        at = addresses.url(host, port).removeprefix("http://")
        sock.sendall(f"GET {LEASE_PATH} HTTP/1.1\r\nHost: {at}\r\n\r\n".encode())
        response = http.client.HTTPResponse(sock)
        response.begin()
        said = json.loads(response.read())
        if response.status == 200:
            sock.settimeout(None)
            return _Lease(host, port, said, sock)
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        pass
    if sock is not None:
        sock.close()
    return None


def _release(lease: _Lease) -> None:
    with _lock:
        lease.users -= 1
        if lease.users > 0:
            return
        if _leases.get((lease.host, lease.port)) is lease:
            del _leases[lease.host, lease.port]
        lease.close()


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for lease in _leases.values():
        lease.forget()
    _leases.clear()


os.register_at_fork(after_in_child=_forget_in_child)
