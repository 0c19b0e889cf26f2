"""The search service ends while sessions use it: what the tools then say is never scored."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading

import pytest

from tbx_envs.errors import ToolFault
from tbx_envs.thinkingbox.search import search_service
from tbx_envs.thinkingbox.servers.server_pool import ServerPool

CONFIG = {"bikes": {"sources": [{"name": "Damage.md", "snippets": ["A damaged bike goes to repair."]}]}}
GONE = r"the search service at http://127\.0\.0\.1:\d+, .* has gone.* is void and can be attempted again"


class Owner:
    """A stand-in, and how to lose it."""

    def __init__(self) -> None:
        self.service = search_service.ensure_search_service(port=0)
        self.port, self.pid = self.service.port, self.service._lease.pid

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for _ in range(1000):
            if not self.service.answers():
                break
            threading.Event().wait(0.01)
        self.service.close()


@pytest.fixture
def owner():
    owner = Owner()
    yield owner
    owner.end()


@pytest.fixture
def pool(shop_servers, owner):
    bikes = dataclasses.replace(shop_servers["bikes"], env={"BIKESHOP_SEARCH_PORT": str(owner.port)})
    with ServerPool({"bikes": bikes}, knowledge_port=owner.port) as pool:
        yield pool


def opened(pool):
    return pool.open(CONFIG, servers=["bikes"])


def search(session):
    return session.call("search_policy", {"query": "damaged"})


def found(session):
    return [hit["source"] for hit in json.loads(search(session).text)["snippets"]]


def test_sessions_that_were_opened_with_it_are_void_and_new_ones_find_another(pool, owner):
    searching, finished, late = opened(pool), opened(pool), opened(pool)
    assert found(searching) == found(finished) == ["Damage.md"]
    rejected = searching.call("find_customer", {"email": "nobody@example.org"})
    assert "error" in json.loads(rejected.text)  # an error while the service is there is an answer
    owner.end()
    with pytest.raises(ToolFault, match=GONE):
        search(searching)
    with pytest.raises(ToolFault, match=GONE):
        finished.effects()
    with pytest.raises(ToolFault, match="this session is over"):
        finished.effects()
    again = opened(pool)
    assert found(again) == ["Damage.md"] and again.effects()["bikes"]["diff"] == []
    with pytest.raises(ToolFault, match=GONE):  # a service is there, and it is another
        search(late)
    again.close()


def lose_when_asked(pool, owner, monkeypatch, *, always=False):
    """Let the owner end when the pool has just seen that it is there; the list of services that were seen."""
    seen, ask = [], pool._engine.search_service

    def ask_and_lose(port):
        seen.append(seen[0] if always and seen else ask(port))
        owner.end()
        return seen[-1]

    monkeypatch.setattr(pool._engine, "search_service", ask_and_lose)
    return seen


def test_a_session_that_is_just_being_opened_is_opened_anew(pool, owner, monkeypatch):
    seen = lose_when_asked(pool, owner, monkeypatch)
    session = opened(pool)
    assert len({service.instance for service in seen}) == 2
    assert found(session) == ["Damage.md"] and session.effects()["bikes"]["diff"] == []
    session.close()


def test_it_is_opened_anew_once(pool, owner, monkeypatch):
    seen = lose_when_asked(pool, owner, monkeypatch, always=True)
    with pytest.raises(ToolFault, match=GONE) as caught:
        opened(pool)
    assert len(seen) == 2 and "was not initialised" in str(caught.value.__cause__)


def test_an_init_that_fails_with_the_service_there_is_a_fault_at_once(pool, owner, monkeypatch):
    asked = []
    ask = pool._engine.search_service
    monkeypatch.setattr(pool._engine, "search_service", lambda port: asked.append(port) or ask(port))
    with pytest.raises(ToolFault, match="was not initialised"):
        pool.open({"bikes": {"sources": [{}]}}, servers=["bikes"])
    assert asked == [owner.port]


def test_a_pool_with_a_service_of_its_own_sends_it_no_request(pool, owner, monkeypatch):
    owner.end()
    session = opened(pool)
    monkeypatch.setattr(search_service, "_probe", None)
    other = opened(pool)
    for each in (session, other):
        assert found(each) == ["Damage.md"]
        each.call("find_customer", {"email": "nobody@example.org"})
        each.effects()
        each.close()
