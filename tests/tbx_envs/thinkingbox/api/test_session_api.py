"""`tbx serve` over a pool without processes: what each endpoint answers, and what no request can get."""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import httpx
import httpx2
import pytest
from fake_server_pool import SERVERS, FakePool, FakeSession
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from tbx_envs.thinkingbox.api.live_sessions import LiveSessions
from tbx_envs.thinkingbox.api.session_api import create_app
from tbx_envs.web import loopback
from tbx_envs.web.access import Access

VISIBLE = ["echo", "number", "record", "empty", "clock", "hang", "die", "break"]
# What the original's client sends again: (docs of the module); 401 only with a credential.
RETRIED = {401, 429, 502, 503, 504}


class Served:
    """A running server with its pool, and the client of a harness."""

    def __init__(self, url: str, pool: FakePool, sessions: LiveSessions) -> None:
        self.url, self.pool, self.sessions = url, pool, sessions
        self.client = httpx.Client(base_url=url, timeout=20)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        # Not `json=`: httpx refuses half a surrogate pair and nan, which other clients send.
        return self.client.post(path, content=json.dumps(body), headers=headers)

    def value(self, path: str, **body: Any) -> Any:
        reply = self.post(path, body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["success"] is True
        return reply.json()["content"]["value"]

    def error(self, path: str, **body: Any) -> str:
        reply = self.post(path, body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["success"] is False
        assert reply.json()["content"]["type"] == "string"
        return reply.json()["content"]["value"]

    def create(self, shop: dict[str, Any] | None = None, **more: Any) -> tuple[str, FakeSession]:
        name = uuid.uuid4().hex
        self.value(
            "/session_create",
            session_id=name,
            server_config={"shop": shop or {}},
            **{"available_tools": VISIBLE, **more},
        )
        return name, self.pool.sessions[-1]


@contextlib.contextmanager
def serving(access: Access = Access(), *, idle_s: float | None = None, **options: Any) -> Iterator[Served]:  # noqa: B008
    pool = FakePool()
    limits = {"max_body_bytes": options.pop("max_body_bytes")} if "max_body_bytes" in options else {}
    sessions = LiveSessions(pool, servers=SERVERS, **options)
    with loopback.in_thread(create_app(sessions, access, idle_s=idle_s, **limits)) as url:
        served = Served(url, pool, sessions)
        with served.client:
            yield served
    assert pool.closed


@pytest.fixture(scope="module")
def api() -> Iterator[Served]:
    with serving() as served:
        yield served


# --- what a client of the original gets ---------------------------------------------------------------------


def test_a_session_is_created_used_and_destroyed(api: Served) -> None:
    name = uuid.uuid4().hex
    created = api.post(
        "/session_create",
        {"session_id": name, "server_config": {"shop": {"greeting": "hi"}, "notes": {}}, "available_tools": ["echo"]},
    )
    assert created.status_code == 200
    assert created.json() == {
        "success": True,
        "content": {"type": "object", "value": {"shop": {"greeting": "hi"}, "notes": {"greeting": ""}}},
    }
    called = api.post("/call_tool", {"session_id": name, "tool_name": "echo", "arguments": {"text": "é\ud800"}})
    assert called.json() == {"success": True, "content": {"type": "string", "value": "é\ud800"}}
    assert api.value("/get_effects", session_id=name) == {"shop": {"calls": 1}, "notes": {}}
    assert api.value("/session_destroy", session_id=name) == "Ok"
    assert api.pool.sessions[-1].ended == ["closed"]
    assert api.pool.sessions[-1].session_id == name  # servers that ask for it get the client's


def test_tools_are_listed_as_the_original_lists_them(api: Served) -> None:
    name, session = api.create(available_tools=["record", "echo"])
    tools = api.value("/list_tools", session_id=name)["tools"]
    assert list(tools) == ["echo", "record"]  # the server's order
    assert tools["echo"] == {"description": "says echo", "inputSchema": dict(session.tools[0].input_schema)}


def test_health_needs_no_token_and_no_session() -> None:
    with serving(Access(privileged_token="p")) as served:
        assert served.client.get("/health").text == "OK"


def test_session_info_is_kept_and_merged(api: Served) -> None:
    name, _ = api.create()
    assert api.value("/session_info", session_id=name, update={"a": 1}) == {"a": 1}
    assert api.value("/session_info", session_id=name, update={"b": None}) == {"a": 1, "b": None}
    assert api.value("/session_info", session_id=name) == {"a": 1, "b": None}


def test_answers_that_are_not_json_are_wrapped_when_asked(api: Served) -> None:
    name, _ = api.create(always_json_output=True)

    def answer(tool: str, **arguments: Any) -> str:
        return api.value("/call_tool", session_id=name, tool_name=tool, arguments=arguments)

    assert json.loads(answer("echo", text="plain")) == {"result": "plain"}
    assert json.loads(answer("empty")) == {"result": ""}
    assert answer("number") == "42"
    assert answer("record") == '{"ok": true}'


def test_effects_tell_the_calls_when_asked(api: Served) -> None:
    name, _ = api.create(geteffects_proxy_info=True, always_json_output=True)
    api.value("/call_tool", session_id=name, tool_name="echo", arguments={"text": "plain"})
    effects = api.value("/get_effects", session_id=name)
    assert effects["__reserved__proxy_info"] == {
        "tool_calls": [{"tool_name": "echo", "arguments": {"text": "plain"}, "response": '{"result": "plain"}'}]
    }


def test_an_empty_result_is_an_answer(api: Served) -> None:
    name, _ = api.create()
    assert api.value("/call_tool", session_id=name, tool_name="empty", arguments={}) == ""


def test_the_clock_reaches_the_pool() -> None:
    with serving(clock=datetime.datetime(2025, 10, 1, 13)) as served:
        name, _ = served.create()
        shown = served.value("/call_tool", session_id=name, tool_name="clock", arguments={})
        assert shown == "2025-10-01 13:00:00"


# --- mistakes of a client -----------------------------------------------------------------------------------


def test_unknown_names_are_400_in_the_words_of_the_original(api: Served) -> None:
    create = {"session_id": "mistaken", "server_config": {"shop": {}}, "available_tools": ["echo"]}
    assert api.error("/session_create", **{**create, "available_tools": ["echo", "fly"]}) == "Tool fly does not exist"
    assert api.pool.sessions[-1].ended == ["closed"]
    unknown = api.error("/session_create", **{**create, "server_config": {"shpo": {}}})
    assert unknown == "Server shpo does not exist. Did you mean 'shop'? There are: shop, notes"
    api.value("/session_create", **create)  # the id is free after both
    assert api.error("/session_create", **create) == "Session already exists"
    # It exists on the server, yet the session was not given it.
    assert (
        api.error("/call_tool", session_id="mistaken", tool_name="hidden", arguments={}) == "Tool hidden does not exist"
    )
    for path in ("/list_tools", "/get_effects", "/session_info", "/session_destroy"):
        assert api.error(path, session_id="nobody") == "Session does not exist"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "body:"),
        (b'{"session_id": "a b", "tool_name": "x", "arguments": {}}', "session_id:"),
        (b'{"session_id": "", "tool_name": "x", "arguments": {}}', "session_id:"),
        (b'{"session_id": "a", "tool_name": "x", "arguments": []}', "arguments:"),
        (b'{"session_id": "a", "tool_name": "x"}', "arguments:"),
        (b"\xff", "no JSON"),
    ],
)
def test_a_body_that_cannot_be_read_is_400_and_says_where(api: Served, body: bytes, problem: str) -> None:
    reply = api.client.post("/call_tool", content=body)
    assert reply.status_code == 400
    assert reply.json()["content"]["value"].startswith("Invalid input")
    assert problem in reply.json()["content"]["value"]


@pytest.mark.parametrize("timeout", [0, -1, "soon", None, 1e999])
def test_a_session_needs_a_time_limit_that_is_one(api: Served, timeout: Any) -> None:
    body = {"session_id": "a", "server_config": {}, "available_tools": [], "timeout": timeout}
    assert "timeout" in api.client.post("/session_create", content=json.dumps(body)).json()["content"]["value"]


def test_a_body_that_is_too_large_is_413() -> None:
    with serving(max_body_bytes=1000) as served:
        assert served.client.post("/session_create", content=b" " * 1001).status_code == 413
        assert served.client.post("/mcp", content=b" " * 1001).status_code == 413
        name, _ = served.create()
        served.value("/session_info", session_id=name, update={"a": "x" * 600})
        assert "larger than 1000" in served.error("/session_info", session_id=name, update={"b": "x" * 600})


def test_init_that_fails_is_400_and_frees_the_id(api: Served) -> None:
    create = {"session_id": "fails", "server_config": {"shop": {"init": "fails"}}, "available_tools": []}
    assert "__reserved__init answered" in api.error("/session_create", **create)
    api.value("/session_create", **{**create, "server_config": {"shop": {}}})


# --- faults: never retried, never answers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "words"), [("die", "exited with 0"), ("break", "ZeroDivisionError"), ("hang", "timed out")]
)
def test_a_call_that_may_have_run_is_400_and_ends_the_session(api: Served, tool: str, words: str) -> None:
    name, session = api.create(timeout=0.2)
    reply = api.post("/call_tool", {"session_id": name, "tool_name": tool, "arguments": {}})
    assert reply.status_code == 400
    assert words in reply.json()["content"]["value"]
    assert "discarded" in session.ended
    assert len(session.executed) == 1
    for path, more in (("/call_tool", {"tool_name": "echo", "arguments": {"text": "a"}}), ("/get_effects", {})):
        assert api.error(path, session_id=name, **more).startswith("Session does not exist: ")
    assert api.value("/session_destroy", session_id=name) == "Ok"


def test_a_client_with_the_original_s_retries_runs_a_slow_tool_once(api: Served) -> None:
    name, session = api.create(timeout=0.2)
    sent = 0
    while sent < 6:  # first try and five retries
        sent += 1
        reply = api.post("/call_tool", {"session_id": name, "tool_name": "hang", "arguments": {"n": sent}})
        if reply.status_code not in RETRIED:
            break
    assert (sent, session.executed) == (1, [("hang", {"n": 1})])


@pytest.mark.parametrize("effects", ["not an object", float("nan")])
def test_effects_that_cannot_be_read_are_an_error_and_not_empty(api: Served, effects: Any) -> None:
    shop = {"effects": {"value": effects} if isinstance(effects, float) else effects}
    name = uuid.uuid4().hex
    body = json.dumps({"session_id": name, "server_config": {"shop": shop}, "available_tools": []})
    assert api.client.post("/session_create", content=body).status_code == 200
    assert "JSON" in api.error("/get_effects", session_id=name)
    assert api.value("/session_info", session_id=name) == {}  # it lives on


def test_servers_that_start_too_slowly_are_thrown_away_when_they_come(api: Served) -> None:
    before = len(api.pool.sessions)
    api.pool.may_open.clear()
    create = {"session_id": "slow", "server_config": {"shop": {}}, "available_tools": [], "timeout": 0.1}
    assert api.error("/session_create", **create) == "The servers did not start within 0.1 seconds"
    api.pool.may_open.set()
    wait_for(lambda: len(api.pool.sessions) > before and api.pool.sessions[before].ended == ["discarded"])
    api.value("/session_create", **create)


# --- many at once, and the end ------------------------------------------------------------------------------


def test_calls_of_one_session_wait_for_each_other_and_sessions_do_not(api: Served) -> None:
    stuck, stuck_session = api.create(timeout=20)
    names = [api.create() for _ in range(4)]
    with ThreadPoolExecutor(20) as threads:
        api.pool.hanging.clear()
        hung = threads.submit(
            httpx.post,
            f"{api.url}/call_tool",
            json={"session_id": stuck, "tool_name": "hang", "arguments": {}},
            timeout=20,
        )
        assert api.pool.hanging.wait(10)
        calls = [
            threads.submit(
                api.value, "/call_tool", session_id=name, tool_name="echo", arguments={"text": f"{name} {i}"}
            )
            for i in range(8)
            for name, _ in names
        ]
        assert [call.result(20) for call in calls] == [f"{name} {i}" for i in range(8) for name, _ in names]
        assert [session.most_running for _, session in names] == [1, 1, 1, 1]
        stuck_session.discard()
        assert hung.result(20).status_code == 400


def test_when_it_is_full_only_a_new_session_has_to_wait() -> None:
    with serving(max_sessions=2) as served:
        (first, _), (second, _) = served.create(), served.create()
        third = {"session_id": "third", "server_config": {"shop": {}}, "available_tools": []}
        full = served.post("/session_create", third)
        assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
        assert len(served.pool.sessions) == 2  # nothing was started
        assert served.value("/call_tool", session_id=second, tool_name="number", arguments={}) == "42"
        served.value("/session_destroy", session_id=first)
        served.value("/session_create", **third)


def test_destroying_twice_is_no_error(api: Served) -> None:
    name, session = api.create()
    with ThreadPoolExecutor(4) as threads:
        said = [threads.submit(api.value, "/session_destroy", session_id=name) for _ in range(4)]
        assert [one.result(20) for one in said] == ["Ok"] * 4
    assert api.value("/session_destroy", session_id=name) == "Ok"
    assert session.ended == ["closed"]
    assert api.error("/get_effects", session_id=name) == "Session does not exist: it was destroyed"


def test_garbage_collection_ends_unused_sessions() -> None:
    with serving() as served, ThreadPoolExecutor(1) as threads:
        (idle, idle_session), (busy, busy_session) = served.create(), served.create(timeout=20)
        hung = threads.submit(
            httpx.post, f"{served.url}/call_tool", json={"session_id": busy, "tool_name": "hang", "arguments": {}}
        )
        assert served.pool.hanging.wait(10)
        assert served.value("/garbage_collect", inactivity_minutes=10) == {"count": 0, "session_ids": []}
        assert served.value("/garbage_collect", inactivity_minutes=0) == {"count": 1, "session_ids": [idle]}
        assert (idle_session.ended, busy_session.ended) == (["closed"], [])
        busy_session.discard()
        hung.result(20)


def test_idle_sessions_end_by_themselves() -> None:
    with serving(idle_s=0.1) as served:
        _, session = served.create()
        wait_for(lambda: session.ended == ["closed"])


def test_destroy_all_ends_all() -> None:
    with serving() as served:
        sessions = [served.create()[1] for _ in range(3)]
        assert served.value("/session_destroy_all") == "Ok"
        assert [session.ended for session in sessions] == [["closed"]] * 3
        assert len(served.sessions) == 0


def test_the_end_of_the_server_ends_sessions_calls_and_threads() -> None:
    before = set(threading.enumerate())
    with ThreadPoolExecutor(1) as threads:
        with serving() as served:
            _, idle_session = served.create()
            busy, busy_session = served.create()
            hung = threads.submit(
                httpx.post, f"{served.url}/call_tool", json={"session_id": busy, "tool_name": "hang", "arguments": {}}
            )
            assert served.pool.hanging.wait(10)
        assert idle_session.ended == ["closed"]
        assert "discarded" in busy_session.ended
        with contextlib.suppress(httpx.HTTPError):
            hung.result(20)
    wait_for(lambda: set(threading.enumerate()) <= before)


# --- who may what -------------------------------------------------------------------------------------------

EVERY_PATH = (
    "/session_create",
    "/session_destroy",
    "/session_destroy_all",
    "/session_info",
    "/call_tool",
    "/get_effects",
    "/list_tools",
    "/garbage_collect",
    "/mcp",
    "/mcp/",
)
SERVER_TOOL = {
    "tool_name": "__reserved__server_tool",
    "arguments": {"server_name": "shop", "tool_name": "__reserved__geteffects", "arguments": {}},
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    with serving(Access(privileged_token="harness-token", agent_token="agent-token")) as served:
        served.client.headers["Authorization"] = "Bearer harness-token"
        yield served


def test_without_tokens_reserved_names_are_closed_and_everything_else_is_open(api: Served) -> None:
    name, session = api.create()
    for tool in ("__reserved__server_tool", "__reserved__init", "__reserved__geteffects", "__reserved__anything"):
        reply = api.post("/call_tool", {"session_id": name, "tool_name": tool, "arguments": SERVER_TOOL["arguments"]})
        assert reply.status_code == 403
        assert "--token-env" in reply.json()["content"]["value"]
    assert session.executed == []
    assert api.value("/get_effects", session_id=name)  # `tb infer` asks for them
    asked = {"session_id": "r", "server_config": {"shop": {}}, "available_tools": ["__reserved__geteffects"]}
    assert api.error("/session_create", **asked) == "Tool __reserved__geteffects does not exist"


@pytest.mark.parametrize("path", EVERY_PATH)
def test_without_the_right_token_nothing_is_reached(guarded: Served, path: str) -> None:
    with httpx.Client() as client:
        for token in (None, "Bearer wrong", "Bearer", "harness-token", "Basic !!", "Basic aGk6", "Bearer \xe9"):
            headers = {} if token is None else {"Authorization": token.encode("latin-1")}
            reply = client.post(f"{guarded.url}{path}", json={"session_id": "a"}, headers=headers)
            assert (reply.status_code, reply.json()["success"]) == (401, False), token
            assert reply.json()["error"] == "Unauthorized"
            assert reply.headers["WWW-Authenticate"] == "Bearer"


def test_the_agent_s_token_reaches_tools_and_nothing_else(guarded: Served) -> None:
    name, _ = guarded.create()
    agent = {"Authorization": "Bearer agent-token"}
    said = guarded.post("/call_tool", {"session_id": name, "tool_name": "number", "arguments": {}}, **agent)
    assert said.json()["content"]["value"] == "42"
    assert guarded.post("/list_tools", {"session_id": name}, **agent).status_code == 200
    for path in set(EVERY_PATH) - {"/call_tool", "/list_tools", "/mcp", "/mcp/"}:
        reply = guarded.post(path, {"session_id": name}, **agent)
        assert (reply.status_code, path in reply.json()["error"]) == (403, True)
    assert guarded.post("/call_tool", {"session_id": name, **SERVER_TOOL}, **agent).status_code == 403

    async def work(client: Client) -> Any:
        return await client.call_tool("number", {})

    assert over_mcp(guarded, name, work, **agent).content[0].text == "42"


def test_the_privileged_token_reaches_any_tool_of_a_server(guarded: Served) -> None:
    name, _ = guarded.create()
    expected = {"server": "shop", "tool": "__reserved__geteffects", "arguments": {}}
    assert json.loads(guarded.value("/call_tool", session_id=name, **SERVER_TOOL)) == expected
    # A client that knows no token takes it from its address.
    address = guarded.url.replace("http://", "http://harness:harness-token@")
    reply = httpx.post(f"{address}/call_tool", json={"session_id": name, **SERVER_TOOL})
    assert json.loads(reply.json()["content"]["value"]) == expected
    reserved = {"session_id": name, "tool_name": "__reserved__init", "arguments": {}}
    assert guarded.error("/call_tool", **reserved) == "Tool __reserved__init does not exist"
    elsewhere = {**SERVER_TOOL["arguments"], "server_name": "notes"}
    assert guarded.error("/call_tool", session_id=name, tool_name="__reserved__server_tool", arguments=elsewhere)
    assert guarded.error("/call_tool", session_id=name, tool_name="__reserved__server_tool", arguments={})


@pytest.mark.parametrize("path", ["/session_destroy_all", "/call_tool", "/mcp", "/mcp/", "/health", "/nowhere"])
def test_what_a_web_page_sends_is_rejected_at_every_path(api: Served, path: str) -> None:
    host = httpx.URL(api.url).netloc.decode()
    for spoilt in ({"Origin": "http://localhost:3000"}, {"Host": f"evil.example:{httpx.URL(api.url).port}"}):
        reply = api.post(path, {}, **spoilt)
        assert (reply.status_code, reply.json()["success"]) == (403, False)
    assert api.post("/session_info", {"session_id": "nobody"}, Origin=f"http://{host}").status_code == 400


# --- the agent's channel ------------------------------------------------------------------------------------


def over_mcp(served: Served, session_id: str | None, work: Callable[[Client], Any], **headers: str) -> Any:
    if session_id is not None:
        headers["X-TB-Session-Id"] = session_id

    async def run() -> Any:
        async with (
            httpx2.AsyncClient(headers=headers, timeout=20) as http,
            Client(streamable_http_client(f"{served.url}/mcp", http_client=http)) as client,
        ):
            return await work(client)

    return anyio.run(run)


def test_mcp_lists_and_calls_the_tools_of_the_session_in_the_header(api: Served) -> None:
    name, session = api.create()

    async def work(client: Client) -> Any:
        tools = await client.list_tools()
        return tools.tools, await client.call_tool("record", {}), await client.call_tool("echo", {"text": "words"})

    tools, record, echo = over_mcp(api, name, work)
    assert [tool.name for tool in tools] == VISIBLE
    assert dict(tools[0].input_schema) == dict(session.tools[0].input_schema)
    assert (record.content[0].text, record.structured_content) == ('{"ok": true}', {"ok": True})
    assert (echo.content[0].text, echo.structured_content) == ("words", None)
    assert [call[0] for call in session.executed] == ["record", "echo"]


@pytest.mark.parametrize("tool", ["__reserved__server_tool", "__reserved__geteffects", "hidden"])
def test_mcp_reaches_no_reserved_tool_even_with_the_privileged_token(guarded: Served, tool: str) -> None:
    name, session = guarded.create()

    async def work(client: Client) -> Any:
        with pytest.raises(Exception, match=f"Tool {tool} does not exist"):
            await client.call_tool(tool, SERVER_TOOL["arguments"])

    over_mcp(guarded, name, work, Authorization="Bearer harness-token")
    assert session.executed == []


def test_mcp_without_a_session_or_after_its_end_is_an_error(api: Served) -> None:
    async def lists(client: Client) -> Any:
        with pytest.raises(Exception, match=r"Missing X-TB-Session-Id|Session does not exist"):
            await client.list_tools()

    over_mcp(api, None, lists)
    over_mcp(api, "nobody", lists)
    name, _ = api.create()

    async def dies(client: Client) -> Any:
        with pytest.raises(Exception, match="exited with 0"):
            await client.call_tool("die", {})
        with pytest.raises(Exception, match="Session does not exist: die failed"):
            await client.call_tool("number", {})

    over_mcp(api, name, dies)


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Until it holds, or the test fails: for what another thread does shortly after it has answered."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
