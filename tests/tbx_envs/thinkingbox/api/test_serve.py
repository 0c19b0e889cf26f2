"""`tbx serve` as a program, with real servers in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tbx_envs.errors import ConfigError
from tbx_envs.thinkingbox.api import serve

# The original's client tries again after these, at most five times (429 without end).
RETRIED = {429, 502, 503, 504}
PROGRAM = "import sys; from tbx_envs.thinkingbox.api.serve import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    command = ["{python}", str(Path(__file__).with_name("counting_server.py"))]
    servers = {"servers": {"counting": {"type": "mcp-process", "command": command}}}
    (folder / "servers.yaml").write_text(json.dumps(servers))  # JSON is YAML
    return folder


class Running:
    def __init__(self, process: subprocess.Popen[str], line: str, log: Path) -> None:
        self.process, self.line, self.log = process, line, log
        self.client = httpx.Client(base_url=line.split()[2], headers={"Authorization": "Bearer harness"}, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def create(self, **config: Any) -> str:
        name = uuid.uuid4().hex
        created = self.post(
            "/session_create",
            session_id=name,
            server_config={"counting": {"log": str(self.log), **config}},
            available_tools=["book", "environment", "nothing"],
            timeout=config.get("timeout", 20),
        )
        assert created.json() == {
            "success": True,
            "content": {"type": "object", "value": {"counting": {"log": str(self.log)}}},
        }
        return name

    def call(self, name: str, tool: str, **arguments: Any) -> httpx.Response:
        return self.post("/call_tool", session_id=name, tool_name=tool, arguments=arguments)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    options = ["--servers", str(folder / "servers.yaml"), "--python", sys.executable, "--port", "0", "--no-knowledge"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *options, "--token-env", "TBX_TEST_TOKEN"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TBX_TEST_TOKEN": "harness"},
    )
    with process:
        assert process.stdout is not None
        running = Running(process, process.stdout.readline(), folder / "log")
        with running.client:
            yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_the_first_line_says_where_what_and_how(running: Running) -> None:
    assert running.line.startswith("tbx serve: http://127.0.0.1:")
    assert running.line.endswith(" serves counting (fork, token, real clock)\n")


def test_a_session_from_beginning_to_end(running: Running) -> None:
    name = running.create()
    listed = running.post("/list_tools", session_id=name).json()["content"]["value"]["tools"]
    assert list(listed) == ["book", "environment", "nothing"]
    assert listed["book"]["description"] == "Book a seat."
    assert running.call(name, "book", seat="1A", wait_s=0).json()["content"]["value"] == '{"booked": "1A"}'
    effects = running.post("/get_effects", session_id=name).json()["content"]["value"]
    assert (effects["counting"]["booked"], effects["counting"]["session"]) == (1, name)
    assert running.post("/session_destroy", session_id=name).status_code == 200


def test_a_slow_mutating_tool_is_executed_once_by_a_client_that_retries(running: Running) -> None:
    running.create()  # imports the server, which may take longer than the time limit below
    name = running.create(timeout=1.0)
    for _ in range(6):
        reply = running.call(name, "book", seat=f"slow {name}", wait_s=30)
        if reply.status_code not in RETRIED:
            break
    assert reply.status_code == 400
    assert reply.json()["success"] is False
    assert "Whether it had an effect is unknown" in reply.json()["content"]["value"]
    assert running.log.read_text().count(f"slow {name}") == 1
    assert running.post("/get_effects", session_id=name).status_code == 400


def test_an_empty_result_is_an_answer_and_wrong_arguments_too(running: Running) -> None:
    name = running.create()
    assert running.call(name, "nothing").json() == {"success": True, "content": {"type": "string", "value": ""}}
    wrong = running.call(name, "book", seat=3)
    assert wrong.json()["success"] is True
    assert "wait_s" in wrong.json()["content"]["value"]


def test_effects_that_are_no_json_are_an_error(running: Running) -> None:
    name = running.create(effects="bad")
    reply = running.post("/get_effects", session_id=name)
    assert (reply.status_code, "not JSON" in reply.text) == (400, True)


def test_servers_do_not_inherit_the_token(running: Running) -> None:
    name = running.create()
    seen = json.loads(running.call(name, "environment").json()["content"]["value"])
    assert "PATH" in seen
    assert "TBX_TEST_TOKEN" not in seen


def test_test_code_reaches_reserved_tools_with_the_token_only(running: Running) -> None:
    name = running.create()
    tool = {"server_name": "counting", "tool_name": "__reserved__geteffects", "arguments": {}}
    reply = running.call(name, "__reserved__server_tool", **tool)
    assert json.loads(reply.json()["content"]["value"])["session"] == name
    body = {"session_id": name, "tool_name": "__reserved__server_tool", "arguments": tool}
    assert httpx.post(f"{running.client.base_url}/call_tool", json=body).status_code == 401


# --- what cannot start ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "reached from other machines, and no token is configured"),
        (["--token-env", "TBX_NOT_SET"], "environment variable TBX_NOT_SET is empty or unset"),
        (["--clock", "yesterday"], "--clock yesterday is not a date and time"),
        (["--clock-runs"], "--clock-runs needs --clock"),
        (["--agent-token-env", "HOME"], "none for the harness"),
        (["--servers", "/no/such/file.yaml"], "/no/such/file.yaml"),
        (["--idle-minutes", "-1"], "--idle-minutes"),
        (["--max-sessions", "0"], "--max-sessions"),
        (["--call-timeout", "0"], "--call-timeout"),
    ],
)
def test_what_cannot_start_says_why(folder: Path, options: list[str], message: str) -> None:
    base = ["--servers", str(folder / "servers.yaml"), "--python", sys.executable, "--port", "0"]
    with pytest.raises(ConfigError, match=message):
        serve.main([*base, *options])


def test_help_needs_no_web_server() -> None:
    code = (
        "import sys; from tbx_envs.thinkingbox.api import serve; "
        "assert not {'uvicorn', 'mcp', 'starlette'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", f"{code}; serve.main(['--help'])"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--token-env NAME" in done.stdout
