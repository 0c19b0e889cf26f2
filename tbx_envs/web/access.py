"""Access control of `tbx serve`: a harness may do everything, an agent may only call its tools.

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
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tbx_envs.errors import ConfigError

OPEN_PATHS = frozenset({"/health"})
AGENT_PATHS = frozenset({"/mcp", "/call_tool", "/list_tools"})
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})


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
        privileged = _same(token, self.privileged_token)
        return privileged or _same(token, self.agent_token), privileged


def _same(given: str | None, wanted: str | None) -> bool:
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


class Gate:
    """ASGI middleware: passes requests that `Access` allows, and none that a web page sent."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"].rstrip("/")
        allowed, privileged = self._access.allows(_token(headers.get("authorization", "")))
        denial: Response | None = None
        if not _is_local(headers.get("origin")):
            denial = _denied(403, "Forbidden: a web page of another origin may not use this server.")
        elif path in OPEN_PATHS:
            pass
        elif not allowed:
            denial = _denied(401, "Unauthorized")
        elif self._access.privileged_token is not None and not privileged and path not in AGENT_PATHS:
            denial = _denied(403, f"Forbidden: {path} needs the privileged token; this is the agent's.")
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


def _is_local(origin: str | None) -> bool:
    """Whether a request comes from a page of this machine or from no page; only browsers send an `Origin`."""
    if origin is None:
        return True
    try:
        return urllib.parse.urlsplit(origin).hostname in LOOPBACK_NAMES
    except ValueError:
        return False


def _denied(status: int, message: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    content = {"success": False, "error": message, "content": {"type": "string", "value": message}}
    return JSONResponse(content, status_code=status, headers=headers)
