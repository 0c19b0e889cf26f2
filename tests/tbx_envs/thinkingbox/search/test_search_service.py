"""The stand-in for the search service, asked over HTTP as the benchmark's servers ask."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from tbx_envs.errors import ConfigError
from tbx_envs.thinkingbox.search.search_collections import Collections, RequestError
from tbx_envs.thinkingbox.search.search_service import HOST, PORT, SearchService, ensure_search_service
from tbx_envs.thinkingbox.search.stand_in import Server

CHAPTERS = [
    ("refunds", "Refunds are paid within five days."),
    ("bikes", "A broken bike costs 40.00."),
    ("hours", "The station opens at eight."),
]
QUERY = {"group_by": "source", "exclude_fields": "embedding", "per_page": 10, "highlight_fields": "text"}


@pytest.fixture(scope="module")
def service() -> Iterator[SearchService]:
    with ensure_search_service(port=0) as service:
        yield service


@pytest.fixture
def client(service: SearchService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, headers={"X-TYPESENSE-API-KEY": "Fake"}) as client:
        yield client


def fill(client: httpx.Client, name: str, chapters: list[tuple[str, str]]) -> None:
    assert client.post("/collections", json={"name": name, "fields": []}).status_code == 201
    for number, (source, text) in enumerate(chapters):
        document = {"id": f"s{number}", "source": source, "chunk_index": 0, "content": text, "text": text}
        assert client.post(f"/collections/{name}/documents", json=document).status_code == 201


def search(client: httpx.Client, name: str, query: str, **more: Any) -> list[dict[str, Any]]:
    """The hits, read and ordered as the servers do it."""
    searches = [
        {"q": query, "query_by": "embedding,text", "sort_by": "_text_match:desc,_vector_distance:asc"},
        {"q": "", "query_by": "text", "sort_by": "_text_match:desc"},
    ]
    reply = client.post("/multi_search", params={**QUERY, "collection": name, **more}, json={"searches": searches})
    assert reply.status_code == 200, reply.text
    results = reply.json()["results"]
    assert len(results) == 2
    assert results[1]["grouped_hits"] == []
    hits = [hit for group in results[0]["grouped_hits"] for hit in group["hits"]]
    assert all(isinstance(hit["text_match"], int) and hit["vector_distance"] <= 1 for hit in hits)
    return sorted(hits, key=lambda hit: hit.get("vector_distance", 2.0))


def sources(hits: list[dict[str, Any]]) -> list[str]:
    return [hit["document"]["source"] for hit in hits]


def test_a_session_of_the_benchmark_s_servers(client: httpx.Client) -> None:
    missing = client.get("/collections/one")
    assert (missing.status_code, missing.json()) == (404, {"message": "No collection named 'one' found."})
    fill(client, "one", CHAPTERS)
    assert client.get("/collections/one").json()["num_documents"] == 3
    hits = search(client, "one", "what does a broken bike cost")
    assert sources(hits) == ["bikes", "refunds", "hours"]  # the best, then the others in their own order
    assert hits[0]["document"] == {
        "id": "s1",
        "source": "bikes",
        "chunk_index": 0,
        "content": CHAPTERS[1][1],
        "text": CHAPTERS[1][1],
    }
    assert [hit["vector_distance"] < 1 for hit in hits] == [True, False, False]
    assert client.delete("/collections/one").json()["name"] == "one"
    assert client.get("/collections/one").status_code == 404
    assert client.delete("/collections/one").status_code == 404
    assert (
        client.post("/multi_search", params={"collection": "one"}, json={"searches": [{"q": "a"}]}).status_code == 404
    )


def test_collections_know_nothing_of_each_other(client: httpx.Client) -> None:
    fill(client, "left", [("a", "refund")])
    fill(client, "right", [("b", "refund"), ("c", "bike")])
    assert sources(search(client, "left", "refund")) == ["a"]
    assert sources(search(client, "right", "bike")) == ["c", "b"]
    client.delete("/collections/left")
    assert sources(search(client, "right", "refund")) == ["b", "c"]


def test_hits_of_one_source_are_one_group_of_at_most_three(client: httpx.Client) -> None:
    fill(client, "groups", [("a", "refund")] * 2 + [("b", "refund refund")] + [("a", "refund refund refund")] * 3)
    reply = client.post("/multi_search", params={**QUERY, "collection": "groups"}, json={"searches": [{"q": "refund"}]})
    result = reply.json()["results"][0]
    assert [(group["group_key"], group["found"], len(group["hits"])) for group in result["grouped_hits"]] == [
        (["a"], 5, 3),
        (["b"], 1, 1),
    ]
    assert (result["found"], result["found_docs"], result["out_of"]) == (2, 6, 6)
    ungrouped = {"searches": [{"q": "refund", "collection": "groups", "per_page": 2}]}
    assert len(client.post("/multi_search", json=ungrouped).json()["results"][0]["hits"]) == 2


def test_sources_can_be_chosen(client: httpx.Client) -> None:
    fill(client, "chosen", CHAPTERS)
    assert sources(search(client, "chosen", "bike", filter_by="source:=hours || source:=refunds")) == [
        "refunds",
        "hours",
    ]
    assert sources(search(client, "chosen", "*", filter_by="source:=`hours`")) == ["hours"]
    assert search(client, "chosen", "  ") == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/", None, 404),
        ("GET", "/collections", None, 404),
        ("GET", "/collections/mistakes/documents/search", None, 404),
        ("PUT", "/collections/mistakes", b"{}", 404),
        ("BREW", "/health", None, 404),
        ("POST", "/collections", None, 400),
        ("POST", "/collections", b"[]", 400),
        ("POST", "/collections", b"{", 400),
        ("POST", "/collections", b'{"name": 3}', 400),
        ("POST", "/collections", b'{"name": "mistakes"}', 409),
        ("POST", "/collections/mistakes/documents", b'{"source": "a"}', 400),
        ("POST", "/collections/mistakes/documents", b'{"id": "taken", "text": "again"}', 409),
        ("POST", "/collections/nobody/documents", b'{"text": "a"}', 404),
        ("POST", "/multi_search", b'{"searches": 3}', 400),
        ("POST", "/multi_search", b'{"searches": [{"q": "a", "collection": "mistakes", "group_by": "id"}]}', 400),
        ("POST", "/multi_search", b'{"searches": [{"q": "a", "collection": "mistakes", "filter_by": "id:>3"}]}', 400),
        ("POST", "/multi_search", b'{"searches": [{"q": "a", "collection": "mistakes", "per_page": "x"}]}', 400),
    ],
)
def test_what_cannot_be_answered_is_an_error_in_json(
    client: httpx.Client, method: str, path: str, body: bytes | None, status: int
) -> None:
    if client.post("/collections", json={"name": "mistakes"}).status_code == 201:
        client.post("/collections/mistakes/documents", json={"id": "taken", "content": "a"})
    reply = client.request(method, path, content=body)
    assert reply.status_code == status
    assert isinstance(reply.json()["message"], str)


@pytest.mark.parametrize(
    ("header", "status"),
    [("Transfer-Encoding: chunked", 411), ("Content-Length: 1000000000", 413), ("Content-Length: -1", 413)],
)
def test_a_body_without_a_stated_length_or_with_a_huge_one_is_not_read(
    service: SearchService, header: str, status: int
) -> None:
    with socket.create_connection((service.host, service.port)) as connection:
        connection.sendall(f"POST /collections HTTP/1.1\r\nHost: localhost:{service.port}\r\n{header}\r\n\r\n".encode())
        reply = b"".join(iter(lambda: connection.recv(4096), b""))  # until it is closed
    assert reply.startswith(f"HTTP/1.1 {status} ".encode())
    assert b'{"message": "a body ' in reply


@pytest.mark.parametrize(
    "spoilt", [{"Host": "evil.example:8108"}, {"Origin": "http://localhost:3000"}, {"Sec-Fetch-Site": "same-site"}]
)
def test_what_a_web_page_sends_is_refused_and_changes_nothing(client: httpx.Client, spoilt: dict[str, str]) -> None:
    fill(client, "kept", CHAPTERS)
    for method, path in (("DELETE", "/collections/kept"), ("GET", "/health"), ("POST", "/multi_search")):
        reply = client.request(method, path, headers=spoilt, content=b"{}")
        assert (reply.status_code, list(reply.json())) == (403, ["message"])
    assert client.delete("/collections/kept").status_code == 200


def test_many_sessions_at_once(service: SearchService) -> None:
    def session(number: int) -> list[str]:
        name = f"many-{number}"
        with httpx.Client(base_url=service.url) as client:
            fill(client, name, [(f"{name}-{i}", f"word{i} common") for i in range(8)])
            found = sources(search(client, name, "word5"))
            client.delete(f"/collections/{name}")
        return found

    with ThreadPoolExecutor(16) as threads:
        for number, found in enumerate(threads.map(session, range(24))):
            assert found[0] == f"many-{number}-5"
            assert len(found) == 8


def test_texts_in_any_script_survive(client: httpx.Client) -> None:
    chapters = [("退款", "退款政策 é 🚲 \u0000"), ("other", "words")]
    fill(client, "scripts", chapters)
    hits = search(client, "scripts", "退款")
    assert (hits[0]["document"]["source"], hits[0]["document"]["text"]) == chapters[0]


def test_the_longest_unused_collections_are_forgotten_first() -> None:
    collections = Collections(max_collections=3)
    for name in "abc":
        collections.answer("POST", ["collections"], {}, {"name": name})
    collections.answer("GET", ["collections", "a"], {}, None)  # used
    collections.answer("POST", ["collections"], {}, {"name": "d"})
    assert len(collections) == 3
    with pytest.raises(RequestError):
        collections.answer("GET", ["collections", "b"], {}, None)
    for name in "acd":
        assert collections.answer("GET", ["collections", name], {}, None)[0] == 200


def test_sessions_with_the_same_chapters_share_texts_and_index() -> None:
    collections = Collections()
    for name in "ab":
        collections.answer("POST", ["collections"], {}, {"name": name})
        for source, text in CHAPTERS:
            collections.answer(
                "POST", ["collections", name, "documents"], {}, {"source": source, "text": "".join(list(text))}
            )
        collections.answer("POST", ["multi_search"], {"collection": name}, {"searches": [{"q": "bike"}]})
    documents = [list(collections._collections[name].documents.values()) for name in "ab"]
    assert all(left["text"] is right["text"] for left, right in zip(*documents, strict=True))
    assert len(collections._bases) == 1
    for name in "ab":
        collections.answer("DELETE", ["collections", name], {}, None)
    collections._bases.clear()
    assert len(collections._snippets) == 0


@pytest.mark.skipif(
    "TBX_DATASETS" not in os.environ or "TBX_SERVERS_PYTHON" not in os.environ,
    reason="TBX_DATASETS (a checkout of the public data) and TBX_SERVERS_PYTHON (who runs its servers) are not set",
)
def test_a_real_server_of_the_benchmark_searches_in_it_and_clears_up() -> None:
    root = Path(os.environ["TBX_DATASETS"].split(":")[0]) / "servers" / "tb_business_ops_servers_202606"
    server = StdioServerParameters(
        command=os.environ["TBX_SERVERS_PYTHON"],
        args=["-m", "tb_business_ops_servers_202606.mcp_sandbox_consulting"],
        env={"PYTHONPATH": str(root), "FASTMCP_LOG_LEVEL": "ERROR"},
    )
    sources = [{"name": source, "snippets": [text]} for source, text in CHAPTERS]

    async def session(collections: Collections) -> tuple[int, list[str], int]:
        async with Client(stdio_client(server)) as client:
            await client.call_tool("__reserved__init", {"config": {"sources": sources}})
            filled = len(collections)
            asked = {"query": "what does a broken bike cost", "max_results": 2}
            found = await client.call_tool("knowledge_base_search_policy", asked)
            await client.call_tool("__reserved__teardown", {})
        snippets = json.loads(found.content[0].text)["snippets"]
        return filled, [snippet["source"] for snippet in snippets], len(collections)

    try:
        service = Server((HOST, PORT), Collections())
    except OSError:
        pytest.skip("another search service answers on 8108, into which we cannot look")
    with service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        assert anyio.run(session, service.collections) == (1, ["bikes", "refunds"], 0)
        service.shutdown()
        thread.join()


# --- who runs it --------------------------------------------------------------------------------------------


def test_the_stand_in_lives_as_long_as_its_last_user() -> None:
    before = set(threading.enumerate())
    first = ensure_search_service(port=0)
    second = ensure_search_service(port=first.port)
    assert first.ours
    assert second.ours
    with httpx.Client(base_url=first.url) as client:
        client.get("/health")  # the connection stays open
        first.close()
        first.close()
        assert second.answers()
        assert client.get("/health").json() == {"ok": True, "service": "tbx", "instance": second.instance}
        second.close()
        assert set(threading.enumerate()) <= before
        with pytest.raises(httpx.TransportError):
            client.get("/health")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((first.host, first.port))
    with ensure_search_service(port=first.port) as again:
        assert again.ours
        assert again.instance != first.instance


def test_other_hosts_than_loopback_are_rejected() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "example.org", ""):
        with pytest.raises(ConfigError, match=r"Use 127\.0\.0\.1"):
            ensure_search_service(host, 0)
    with ensure_search_service("localhost", 0) as service:
        assert httpx.get(f"{service.url}/health").status_code == 200


class Answers(http.server.BaseHTTPRequestHandler):
    status, body = 200, b'{"ok": true}'

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def somebody_else(status: int, body: bytes) -> Iterator[int]:
    handler = type("Other", (Answers,), {"status": status, "body": body})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_a_service_that_is_there_is_used_and_never_stopped() -> None:
    with somebody_else(200, b'{"ok": true}') as port:
        service = ensure_search_service(port=port)
        assert (service.ours, service.instance) == (False, "")
        assert service.answers()
        service.close()
        assert httpx.get(f"{service.url}/health").json() == {"ok": True}
    assert not service.answers()


@pytest.mark.parametrize(("status", "body"), [(200, b"<html>"), (200, b'{"ok": false}'), (404, b"{}"), (200, b"[]")])
def test_a_port_with_something_else_on_it_is_an_error_that_says_what(status: int, body: bytes) -> None:
    with (
        somebody_else(status, body) as port,
        pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*status {status}.*Free the port"),
    ):
        ensure_search_service(port=port)


def test_a_port_that_speaks_no_http_is_an_error_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def speak() -> None:
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b"220 mail ready\r\n")
            connection.close()

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(ConfigError, match="something else is there"):
            ensure_search_service(port=port)
        thread.join()


def test_a_port_whose_holder_cuts_connections_is_an_error_too() -> None:
    with socket.socket() as holder:  # bound, and never listens
        holder.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="the program that uses it cuts connections"):
            ensure_search_service(port=holder.getsockname()[1])


@pytest.mark.parametrize("how", ["end", "kill"])
def test_the_stand_in_of_a_process_that_ends_goes_on_for_the_others(how: str) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    port = int(holder.stdout.readline())
    with ensure_search_service(port=port) as service:
        with httpx.Client(base_url=service.url) as client:
            fill(client, "mine", CHAPTERS)
            if how == "kill":
                holder.kill()
            holder.communicate()
            assert service.answers() and sources(search(client, "mine", "bike"))[0] == "bikes"
        assert service._lease is not None
        pid = service._lease.pid
    wait_until_gone(pid)  # the last one out
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((service.host, service.port))


HOLDER = """
import sys
from tbx_envs.thinkingbox.search.search_service import ensure_search_service
with ensure_search_service(port=0) as service:
    print(service.port, flush=True)
    sys.stdin.read()
"""


def test_the_stand_in_ends_when_its_last_user_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        with ensure_search_service(port=port) as service:
            assert service._lease is not None
            pid = service._lease.pid
        os.kill(pid, 0)
        holder.kill()
    wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    for _ in range(1000):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":  # waits for the system's first process
                    return
        except OSError:
            return
        threading.Event().wait(0.01)
    raise AssertionError("it outlives its last user")


def test_a_stand_in_that_ends_is_noticed_and_another_one_is_not_taken_for_it() -> None:
    with ensure_search_service(port=0) as service:
        assert service._lease is not None
        os.kill(service._lease.pid, signal.SIGKILL)
        for _ in range(1000):
            if not service.answers():
                break
            threading.Event().wait(0.01)
        with ensure_search_service(port=service.port) as next_one:
            assert next_one.answers() and next_one.instance != service.instance
            assert not service.answers()  # a service answers, but not the one that had our collections


def test_users_that_start_at_the_same_time_share_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    holder = HOLDER.replace("port=0", f"port={port}").replace("service.port", "service.instance")
    holders = [
        subprocess.Popen([sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    instances = [other.stdout.readline() for other in holders if other.stdout is not None]
    for other in holders:
        other.communicate()
    assert len(set(instances)) == 1 and len(instances[0].strip()) == 32


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork")  # other tests of this process have threads, JAX its own
def test_a_forked_child_neither_owns_nor_keeps_the_stand_in() -> None:
    service = ensure_search_service(port=0)
    from_child, to_parent = os.pipe()
    from_parent, to_child = os.pipe()
    with httpx.Client(base_url=service.url) as client, open(from_child) as lines:
        client.get("/health")
        assert service._lease is not None
        lease = service._lease._sock.fileno()
        child = os.fork()
        if child == 0:  # pragma: no cover
            said: dict[str, Any] = {}
            try:
                said["answers"] = service.answers()
                said["kept"] = [number for number in (lease,) if _is_open(number)]
                service.close()
                with ensure_search_service(port=service.port) as seen:
                    said["ours"], said["same"] = seen.ours, seen.instance == service.instance
                os.write(to_parent, json.dumps(said).encode() + b"\n")
                os.read(from_parent, 1)  # stays alive until the parent has looked
            finally:
                os._exit(0)
        assert json.loads(lines.readline()) == {"answers": False, "kept": [], "ours": True, "same": True}
        assert client.get("/health").status_code == 200
        service.close()
        with pytest.raises(ConnectionRefusedError):  # although the child lives
            socket.create_connection((service.host, service.port))
        os.write(to_child, b"x")
        os.waitpid(child, 0)
    for end in (to_parent, from_parent, to_child):
        os.close(end)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
