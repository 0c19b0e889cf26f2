"""The original's session proxy, through its HTTP API, and its test worker, to compare our server sessions with."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tbx_envs.messages import DONE_MARK, Text, ToolCall, ToolResult, Turn
from tbx_envs.thinkingbox.dataset.dataset import Dataset
from tbx_envs.thinkingbox.dataset.records import DatasetTask
from tbx_envs.thinkingbox.grading.evidence import evidence_of

START_S = 60.0  # time limit for the proxy to start
# The worker requires a judge's configuration; tasks that would ask the judge are not run.
NO_JUDGE = {"type": "aoai", "deployment": "none", "endpoint_url": "http://127.0.0.1:9"}


class ProxySession:
    """A session of the original's proxy."""

    def __init__(self, port: int, task: DatasetTask) -> None:
        self.port, self.session_id = port, str(uuid.uuid4())
        names = [choice.name for choice in task.tools]
        config = {server: dict(task.init.get(server, {})) for server in task.servers}
        self.init_result = self._ask("/session_create", server_config=config, available_tools=names, timeout=120)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return self._ask("/call_tool", tool_name=name, arguments=dict(arguments))

    def effects(self) -> Any:
        return self._ask("/get_effects")

    def close(self) -> None:
        self._ask("/session_destroy")

    def _ask(self, path: str, **body: Any) -> Any:
        answer = ask(self.port, path, {"session_id": self.session_id, **body})
        if not answer["success"]:
            raise SystemExit(f"the original's proxy refused {path}: {answer['content']['value']}")
        return answer["content"]["value"]


@contextlib.contextmanager
def proxied(dataset: Dataset, python: str) -> Iterator[Callable[[DatasetTask], ProxySession]]:
    """A function that opens sessions of a proxy on a free port; the proxy ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    proxy = subprocess.Popen(
        [
            str(Path(python).with_name("tb")),
            *("mcp-start", "--port", str(port)),
            *("--servers", str(dataset.servers_file)),
        ],
        env={**os.environ, "THINKINGBOX_DATA": str(dataset.root)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(port, proxy)
        yield lambda task: ProxySession(port, task)
    finally:
        with contextlib.suppress(OSError):
            ask(port, "/session_destroy_all", {})
        proxy.terminate()
        proxy.wait(30)


def graded_episode(session: ProxySession, task: DatasetTask, python: str) -> bool:
    """The expected calls, the effects, the original's verdict, the end of the session, in the original's order."""
    messages: list[Any] = [Text("system", text) for text in (task.system_instructions, task.bot_instructions) if text]
    messages += [*task.history, Text("user", task.query)]
    opening = len(messages)
    for number, call in enumerate(task.expected_calls):
        answer = session.call(call.tool, call.arguments)
        call_id = f"call_{number}"
        messages += [
            Turn(calls=(ToolCall(call_id, call.tool, call.arguments),)),
            ToolResult(call_id, call.tool, answer),
        ]
    evidence = evidence_of(
        (*messages, Turn(text=DONE_MARK)),
        effects=session.effects(),
        init_result=session.init_result,
        session_id=session.session_id,
        metadata={},
        opening=opening,
    )
    passed = worker_passes(task, evidence, python)
    session.close()
    return passed


def worker_passes(task: DatasetTask, evidence: Mapping[str, Any], python: str) -> bool:
    """The verdict of a fresh worker, as the original starts one for each episode."""
    request = {
        "code": task.test_code,
        "judge_config": NO_JUDGE,
        "judge_type": "legacy",
        "fixtures_config": task.fixtures,
        "test_context": evidence,
        "test_uid": task.uid,
        "dns_cache": None,
    }
    worker = subprocess.run(
        [python, "-m", "thinkingbox.cli.testscript_worker"], input=json.dumps(request), capture_output=True, text=True
    )
    answer = worker.stdout.rpartition("\0")[2]
    if worker.returncode or not answer:
        raise SystemExit(f"task {task.uid}: the original's worker gave no result: {worker.stderr.strip()[-1000:]}")
    result = json.loads(answer)
    return bool(result["result"]) and not result["is_system_error"]


def versions_of(python: str, *packages: str) -> dict[str, str]:
    """Versions of packages of another interpreter."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python} lacks one of {', '.join(packages)}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)


def ask(port: int, path: str, body: Mapping[str, Any]) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                connection.close()
                return
        time.sleep(0.2)
    raise SystemExit(f"the original's proxy did not start on port {port} within {START_S:g} s.")
