"""Access control of small servers: which requests pass, and in `tbx serve` what each token opens.

Requests that a web page may have sent pass nowhere (`LocalRequests`). In `tbx serve`, a harness may do everything, an
agent may only call its tools.

There are two bearer tokens, the harness's privileged one and the agent's. Without tokens (loopback only) every client
counts as a harness, but reserved tools stay closed, since nothing distinguishes a harness from its agent. The scope of
a request that passed has `state["privileged"]`: whether it came with the privileged token.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hmac
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tbx_envs.errors import ConfigError
from tbx_envs.web.local_requests import why_foreign

OPEN_PATHS = frozenset({"/health"})
AGENT_PATHS = frozenset({"/mcp", "/call_tool", "/list_tools"})


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """The tokens that grant access.

    Attributes:
        privileged_token: token of the harness; None when access needs no token.
        agent_token: token of the agent; None when it has none.

    Raises:
        ConfigError: an agent's token without a privileged one, or the same token for both.
    """

    privileged_token: str | None = dataclasses.field(default=None, repr=False)
    agent_token: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.agent_token is not None and self.privileged_token is None:
            raise ConfigError(
                "there is a token for the agent but none for the harness, which would have no access. Give the "
                "privileged token as well."
            )
        if self.agent_token is not None and self.agent_token == self.privileged_token:
            raise ConfigError("the agent's token and the privileged token are the same. Give two different ones.")

    def allows(self, token: str | None) -> tuple[bool, bool]:
        """(is allowed, is privileged) for the token of a request, which is None when the request has none."""
        if self.privileged_token is None:
            return True, False
        privileged = same_token(token, self.privileged_token)
        return privileged or same_token(token, self.agent_token), privileged


def same_token(given: str | None, wanted: str | None) -> bool:
    """Whether both are there and the same, in a time that does not tell how much of `given` is right."""
    return given is not None and wanted is not None and hmac.compare_digest(given.encode(), wanted.encode())


def read_token(
    purpose: str, *, variable: str | None, file: Path | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """The token in an environment variable or a file; None when neither is named.

    Tokens are not passed on the command line, where every user of the machine can read them.

    Args:
        purpose: which token it is, for messages.
        variable: name of the environment variable.
        file: path of the file.
        environ: environment to read.

    Raises:
        ConfigError: both are named, or the one that is named holds no usable token.
    """
    if variable is not None and file is not None:
        raise ConfigError(f"the {purpose} token is to be read from variable {variable} and from {file}. Name only one.")
    if variable is not None:
        place, text = f"environment variable {variable}", environ.get(variable, "")
    elif file is not None:
        place = f"file {file}"
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the {purpose} token cannot be read from {place}: {error}.") from error
    else:
        return None
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the {purpose} token in {place} is {'empty or unset' if not token else 'not one printable ASCII word'}. "
            f"Put a long random word there (`python -c 'import secrets; print(secrets.token_urlsafe())'`)."
        )
    return token


class LocalRequests:
    """ASGI middleware that lets only requests of this machine's programs through.

    Args:
        app: application behind it.
        refused: maker of the response to another request (status 403), from the reason.
        any_host: True for a server that other machines reach, which must ask for a token (see `why_foreign`).
    """

    def __init__(self, app: ASGIApp, refused: Callable[[str], Response], any_host: bool = False) -> None:
        self._app, self._refused, self._any_host = app, refused, any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no server of ours speaks web sockets, and a page may open one to any address
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        host, origin, site = (headers.getlist(name) for name in ("host", "origin", "sec-fetch-site"))
        _, port = scope.get("server") or (None, None)
        reason = why_foreign(host, origin, site, port=port, any_host=self._any_host)
        if reason is None and not scope["path"].startswith("/"):  # "GET http://other/..." is for a proxy
            reason = "the target of a request must be a path."
        if reason is None:
            await self._app(scope, receive, send)
        else:
            await self._refused(reason)(scope, receive, send)


class Gate:
    """ASGI middleware that passes requests which `Access` allows; behind `tbx_envs.web.local_requests`."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"].rstrip("/")
        allowed, privileged = self._access.allows(_token(headers.get("authorization", "")))
        denial: Response | None = None
        if path in OPEN_PATHS:
            pass
        elif not allowed:
            denial = denied(401, "Unauthorized")
        elif self._access.privileged_token is not None and not privileged and path not in AGENT_PATHS:
            denial = denied(403, f"Forbidden: {path} needs the privileged token; this is the agent's.")
        if denial is not None:
            await denial(scope, receive, send)
            return
        scope.setdefault("state", {})["privileged"] = privileged
        await self._app(scope, receive, send)


def _token(authorization: str) -> str | None:
    """The token of a `Bearer` header; also of `Basic`, which clients send for `http://name:token@host`."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None


def denied(status: int, message: str) -> JSONResponse:
    """The response to a request that is not allowed, in the form of the original's session API."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    content = {"success": False, "error": message, "content": {"type": "string", "value": message}}
    return JSONResponse(content, status_code=status, headers=headers)
