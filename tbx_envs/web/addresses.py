"""Addresses of this machine: which are loopback, and their URLs."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """True when only programs of this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url(host: str, port: int) -> str:
    """URL of a server; IPv6 addresses get their brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
