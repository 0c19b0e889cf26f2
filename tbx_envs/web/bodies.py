"""Bodies of requests: the one place that reads them, up to a size that the application names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the search service reads sizes here, and has no web framework
    from starlette.requests import Request


class BodyTooLarge(Exception):
    """A body that is not read. The message says how large it may be."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request. One that is announced as too large is refused before anything of it is read.

    Raises:
        BodyTooLarge: it has more bytes than that.
        ClientDisconnect: the client went away before all of it was read.
    """
    refuse_length(request.headers.get("content-length", ""), max_bytes)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise BodyTooLarge(f"a body of more than {max_bytes} bytes")
    return bytes(body)


def refuse_length(announced: str, max_bytes: int) -> None:
    """Refuse the length that a `Content-Length` header announces; "" announces none.

    Raises:
        BodyTooLarge: it is more than that, or no length.
    """
    if announced and not (announced.isascii() and announced.isdecimal() and len(announced) < 20):
        raise BodyTooLarge(f"a body of length {announced[:40]!r}; wanted a number of bytes")
    if announced and int(announced) > max_bytes:
        raise BodyTooLarge(f"a body of more than {max_bytes} bytes")
