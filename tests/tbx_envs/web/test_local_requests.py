"""Which requests a small server on loopback answers: those of programs here, and none that a web page sent."""

from __future__ import annotations

import asyncio
import hmac

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tbx_envs.web import access
from tbx_envs.web.access import Access, LocalRequests, denied
from tbx_envs.web.local_requests import why_foreign

OURS = ["127.0.0.1:8000", "localhost:8000", "LOCALHOST:8000", "[::1]:8000", "127.0.0.5:8000"]
FOREIGN = [
    *("evil.example:8000", "localhost.evil.example:8000", "evil.localhost:8000", "127.0.0.1.evil.example:8000"),
    *("localhost.:8000", "localhost@evil.example:8000", "192.168.0.7:8000", "0.0.0.0:8000", "[::]:8000", "::1:8000"),
    *("localhost", "127.0.0.1", "[::1]", "localhost:", "localhost:80", "localhost:08001", "localhost:8000:8000"),
    *("127.1:8000", "2130706433:8000", "[::1:8000", "local host:8000", "", " localhost:8000", "locälhost:8000"),
]


@pytest.mark.parametrize("host", OURS)
def test_a_request_that_asks_for_this_machine_and_port_is_of_a_program_here(host: str) -> None:
    assert why_foreign([host], [], [], port=8000) is None
    assert why_foreign([host], [f"http://{host}"], ["same-origin"], port=8000) is None
    assert why_foreign([host], [], ["none"], port=8000) is None  # an address that a person typed


@pytest.mark.parametrize("host", FOREIGN)
def test_a_request_for_another_name_or_port_is_refused(host: str) -> None:
    assert "127.0.0.1:8000, localhost:8000 or [::1]:8000" in (why_foreign([host], [], [], port=8000) or "")


def test_a_host_without_a_port_is_port_80_and_no_host_or_two_of_them_are_refused() -> None:
    assert why_foreign(["localhost"], [], [], port=80) is None
    for hosts in ([], ["localhost:8000", "localhost:8000"], ["localhost:8000", "evil.example"]):
        assert why_foreign(hosts, [], [], port=8000)
    assert why_foreign(["localhost:8000"], [], [], port=None)


FOREIGN_ORIGINS = [
    *("null", "", "http://localhost:3000", "http://localhost", "http://127.0.0.1:8000", "http://[::1]:8000"),
    *("https://evil.example", "http://localhost:8000.evil.example", "http://localhost:8000/", "file://", "http://["),
]


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
def test_a_page_of_another_origin_is_refused_even_from_a_port_of_this_machine(origin: str) -> None:
    for any_host in (False, True):
        for origins in ([origin], ["http://localhost:8000", origin]):
            assert why_foreign(["localhost:8000"], origins, [], port=8000, any_host=any_host)


@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site", "?"])
def test_a_request_that_a_browser_sent_for_another_site_is_refused(site: str) -> None:
    for any_host in (False, True):
        assert why_foreign(["localhost:8000"], [], [site], port=8000, any_host=any_host)


def test_a_server_that_other_machines_reach_answers_under_any_name_but_no_page() -> None:
    assert why_foreign(["tools.example"], [], [], port=8000, any_host=True) is None
    assert why_foreign(["tools.example"], ["http://evil.example"], [], port=8000, any_host=True)


async def _reached(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_the_middleware_reads_the_headers_and_the_port_of_the_connection() -> None:
    app = LocalRequests(_reached, lambda reason: denied(403, reason))
    spoilt: list[tuple[str, dict[str, str] | list[tuple[str, str]]]] = [
        ("/", {"Host": "evil.example:8000"}),
        ("/health", {"Host": "localhost:8001"}),
        ("/", {"Origin": "http://localhost:3000"}),
        ("/", {"Sec-Fetch-Site": "same-site"}),
        ("/", [("Host", "localhost:8000"), ("Host", "localhost:8000")]),
    ]

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000") as client:
            return [(await client.post(path, headers=headers)).status_code for path, headers in [("/", {}), *spoilt]]

    assert asyncio.run(statuses()) == [200, *[403] * len(spoilt)]


def test_a_target_that_is_no_path_and_a_web_socket_reach_no_application() -> None:
    sent: list[str | int] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(str(message.get("status", message["type"])))

    app = LocalRequests(_reached, lambda reason: denied(403, reason))
    scope = {"type": "http", "path": "http://evil.example/", "server": ("::1", 80), "headers": [(b"host", b"[::1]")]}
    for changes in ({"path": "/"}, {}, {"type": "websocket", "path": "/"}):
        asyncio.run(app({**scope, **changes}, None, send))  # type: ignore[arg-type]
    assert [word for word in sent if word != "http.response.body"] == ["200", "403", "websocket.close"]


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    in_constant_time = hmac.compare_digest

    def compare(given: bytes, wanted: bytes) -> bool:
        compared.append(given)
        return in_constant_time(given, wanted)

    monkeypatch.setattr(access.hmac, "compare_digest", compare)  # type: ignore[attr-defined]
    both = Access(privileged_token="harness", agent_token="agent")
    assert [both.allows(given)[0] for given in ("harness", "h", "ägent", "", None)] == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert set(compared) == {b"harness", b"h", "ägent".encode(), b""}
