"""Requests of programs on this machine, told from requests that a web page made a browser send.

A small server on loopback without a token trusts every client. A browser on the same machine reaches it for any
page: a page of another origin can send requests (and then their `Origin` or `Sec-Fetch-Site` says so), and one whose
own name was made to lead to 127.0.0.1 can read the answers too (DNS rebinding; then `Host` is that name). So a request
passes only if it asks for this machine by a loopback name and this port, and says of no other origin.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tbx_envs.web import addresses

_DEFAULT_PORT = 80  # of a Host without one
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9.-]+))(?::([0-9]{1,5}))?", re.ASCII)


def why_foreign(
    hosts: Sequence[str], origins: Sequence[str], sites: Sequence[str], *, port: int | None, any_host: bool = False
) -> str | None:
    """Why a request may come from a web page of another origin; None when it comes from a program or a page of ours.

    Args:
        hosts: values of its `Host` headers.
        origins: values of its `Origin` headers.
        sites: values of its `Sec-Fetch-Site` headers, which browsers send.
        port: port of the server; None where it is not known.
        any_host: True where a server is reached by names that it does not know, and asks for a token instead.
    """
    if not any_host and (len(hosts) != 1 or not _is_here(hosts[0], port)):
        shown = ", ".join(repr(host[:80]) for host in hosts) or "none"
        return (
            f"the Host of a request must be 127.0.0.1:{port}, localhost:{port} or [::1]:{port}; it is {shown}. Through "
            f"a tunnel, use the same port on both sides."
        )
    own = {f"{scheme}://{host.lower()}" for host in hosts for scheme in ("http", "https")}
    if any(origin.lower() not in own for origin in origins):
        return "a web page of another origin may not use this server."
    if any(site.lower() not in ("same-origin", "none") for site in sites):
        return "a web page of another site may not use this server."
    return None


def _is_here(host: str, port: int | None) -> bool:
    """Whether a `Host` is a loopback address or `localhost`, with this port."""
    parts = _HOST.fullmatch(host.lower())
    if parts is None:
        return False
    in_brackets, name, given_port = parts.groups()
    return int(given_port or _DEFAULT_PORT) == port and addresses.is_loopback(in_brackets or name)
