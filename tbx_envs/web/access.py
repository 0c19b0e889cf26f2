"""Who may ask what of `tbx serve`: a harness everything, an agent only its tools.

Two bearer tokens, the privileged one for the harness and the agent's. With neither (loopback only) whoever connects is
taken for a harness, but reserved tools stay closed, since nothing tells a harness from its agent then. The scope of a
request that passed says in `state["privileged"]` whether the privileged token came with it.
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
    """The tokens; None where there is none.

    Raises:
        ConfigError: an agent's token without a privileged one, or the same for both.
    """

    privileged_token: str | None = dataclasses.field(default=None, repr=False)
    agent_token: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.agent_token is not None and self.privileged_token is None:
            raise ConfigError(
                "there is a token for the agent but none for the harness, which could do nothing then. Give the "
                "privileged token as well."
            )
        if self.agent_token is not None and self.agent_token == self.privileged_token:
            raise ConfigError("the agent's token and the privileged token are the same. Give two different ones.")

    def allows(self, token: str | None) -> tuple[bool, bool]:
        """(may pass at all, is privileged) for the token of a request, None when it has none."""
        if self.privileged_token is None:
            return True, False
        privileged = _same(token, self.privileged_token)
        return privileged or _same(token, self.agent_token), privileged


def _same(given: str | None, wanted: str | None) -> bool:
    return given is not None and wanted is not None and hmac.compare_digest(given.encode(), wanted.encode())


def read_token(
    purpose: str, *, variable: str | None, file: Path | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """The token in a named environment variable or a file; None when neither is named.

    A token is no argument of a command line, where every user of the machine can read it.

    Raises:
        ConfigError: both are named, or there is no usable token in it.
    """
    if variable is not None and file is not None:
        raise ConfigError(f"the {purpose} token is asked for in variable {variable} and in {file}. Name one of them.")
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
    """ASGI middleware: lets pass what `Access` allows, and nothing that a web page sent."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"].rstrip("/")
        allowed, privileged = self._access.allows(_token(headers.get("authorization", "")))
        refusal: Response | None = None
        if not _from_here(headers.get("origin")):
            refusal = _refused(403, "Forbidden: a web page of another origin may not use this server.")
        elif path in OPEN_PATHS:
            pass
        elif not allowed:
            refusal = _refused(401, "Unauthorized")
        elif self._access.privileged_token is not None and not privileged and path not in AGENT_PATHS:
            refusal = _refused(403, f"Forbidden: {path} needs the privileged token; this is the agent's.")
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["privileged"] = privileged
        await self._app(scope, receive, send)


def _token(authorization: str) -> str | None:
    """Of `Bearer token`; also of `Basic`, which is what clients make of `http://name:token@host`."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None


def _from_here(origin: str | None) -> bool:
    """Browsers name the page that sends a request; programs do not."""
    if origin is None:
        return True
    try:
        return urllib.parse.urlsplit(origin).hostname in LOOPBACK_NAMES
    except ValueError:
        return False


def _refused(status: int, message: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    content = {"success": False, "error": message, "content": {"type": "string", "value": message}}
    return JSONResponse(content, status_code=status, headers=headers)
