"""Pools over the servers of the bike shop, one by fork and one by spawn for the whole run of tests."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from tbx_envs.thinkingbox.servers.servers_file import load_servers

SERVERS_FILE = Path(__file__).parents[3] / "data" / "bikeshop" / "servers" / "servers.yaml"


@pytest.fixture(scope="session")
def shop_servers():
    return load_servers(SERVERS_FILE, python=sys.executable)


@pytest.fixture(scope="session")
def pool_of(shop_servers):
    """The pool that starts servers by `how`, made once. Its sessions are the tests' to close."""
    from tbx_envs.thinkingbox.servers.server_pool import ServerPool

    pools = {}

    def build(how):
        if how not in pools:
            pools[how] = ServerPool(shop_servers, start=how, knowledge=False, call_timeout_s=30, start_timeout_s=60)
        return pools[how]

    yield build
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=["fork", "spawn"])
def how(request):
    return request.param


@pytest.fixture
def pool(pool_of, how):
    return pool_of(how)


@pytest.fixture
def trouble_with(shop_servers):
    """The server `trouble`, misbehaving from the start, and whatever else is changed about it."""

    def build(at_start="", **changes):
        server = shop_servers["trouble"]
        return dataclasses.replace(server, env={**server.env, "BIKESHOP_TROUBLE": at_start}, **changes)

    return build
