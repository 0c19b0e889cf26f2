"""How many episodes of a ThinkingBox dataset do two cores run in a minute, by each way to run its servers?

One episode here is a session with the task's configuration, all of its expected calls, the effects, and the end; its
check is left out. Prints one JSON line for each way:

    fork        the server is imported once and forked for each session
    spawn       the server is started anew for each session
    original    the dataset's own session proxy does the same through its HTTP API (needs an interpreter that has it)

    sessions_per_minute       by the wall clock, with `concurrency` sessions at a time
    open_s, call_s, effects_s, close_s   medians
    session_mb                memory that one more live session takes: proportional set size of all processes, with 8
                              live sessions of one server against none
    equal                     sessions whose database was the expected one

The dataset and the interpreters come from TBX_DATASETS, TBX_SERVERS_PYTHON and TBX_ORIGINAL_PYTHON, or from options.

    python -m benchmarks.foreign [--tasks-each 4] [--concurrency 4] [--ways fork spawn original]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import tbx_envs
from tbx_envs.backends.server_pool import ServerPool
from tbx_envs.backends.servers_file import load_servers
from tbx_envs.datasets import registered_datasets
from tbx_envs.datasets.dataset import Dataset
from tbx_envs.datasets.records import DatasetTask
from tbx_envs.serving.search_service import ensure_search_service

RELEASE = "thinkingbox_bench_v1"
LIVE = 8  # sessions for measuring memory
START_S = 60.0  # for the original to come up


class Session(Protocol):
    def call(self, name: str, arguments: Mapping[str, Any]) -> Any: ...
    def effects(self) -> Mapping[str, Mapping[str, Any]]: ...
    def close(self) -> None: ...


Open = Callable[[DatasetTask], Session]


@dataclasses.dataclass(frozen=True, slots=True)
class Seconds:
    """Of one session, by part; `call` is the mean of its calls."""

    open: float
    call: float
    effects: float
    close: float
    equal: bool


def run_session(open_session: Open, task: DatasetTask) -> Seconds:
    began = time.perf_counter()
    session = open_session(task)
    opened = time.perf_counter()
    for call in task.expected_calls:
        session.call(call.tool, call.arguments)
    called = time.perf_counter()
    effects = session.effects()[task.servers[0]]
    told = time.perf_counter()
    session.close()
    closed = time.perf_counter()
    return Seconds(
        open=opened - began,
        call=(called - opened) / max(1, len(task.expected_calls)),
        effects=told - called,
        close=closed - told,
        equal=effects["result_db_hash"] == effects["golden_db_hash"],
    )


def measure(way: str, open_session: Open, tasks: Sequence[DatasetTask], concurrency: int) -> dict[str, object]:
    for task in {task.servers[0]: task for task in tasks}.values():  # imports are not part of the question
        open_session(task).close()
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as threads:
        seconds = list(threads.map(lambda task: run_session(open_session, task), tasks))
    wall_s = time.perf_counter() - began
    parts = {
        f"{part}_s": round(statistics.median(getattr(each, part) for each in seconds), 4)
        for part in ("open", "call", "effects", "close")
    }
    return {
        "benchmark": "foreign",
        "way": way,
        "sessions_per_minute": round(60 * len(tasks) / wall_s, 1),
        **parts,
        "session_mb": round(session_bytes(open_session, tasks[0]) / 1e6, 1),
        "equal": sum(each.equal for each in seconds),
        "sessions": len(tasks),
        "calls": round(statistics.mean(len(task.expected_calls) for task in tasks), 1),
        "concurrency": concurrency,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "tbx": tbx_envs.__version__,
    }


# --- memory -------------------------------------------------------------------------------------------------


def session_bytes(open_session: Open, task: DatasetTask) -> float:
    """What one more live session takes, in all processes that we have started."""
    open_session(task).close()
    time.sleep(0.5)  # closed processes end a moment later
    idle = proportional_bytes(descendants(os.getpid()))
    sessions = [open_session(task) for _ in range(LIVE)]
    busy = proportional_bytes(descendants(os.getpid()))
    for session in sessions:
        session.close()
    return (busy - idle) / LIVE


def descendants(pid: int) -> set[int]:
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


def proportional_bytes(pids: set[int]) -> int:
    """Proportional set size: a page that n processes share counts an n-th in each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


# --- ways ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def pooled(dataset: Dataset, start: Any, python: str) -> Iterator[Open]:
    assert dataset.servers_file is not None
    with ServerPool(load_servers(dataset.servers_file, python=python), start=start) as pool:
        yield lambda task: pool.open(task.init, servers=task.servers)


@contextlib.contextmanager
def proxied(dataset: Dataset, python: str) -> Iterator[Open]:
    """The original's session proxy on a free port, with the same search service."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(python).with_name("tb")), "mcp-start", "--port", str(port), "--servers"]
    environment = {**os.environ, "THINKINGBOX_DATA": str(dataset.root)}
    with ensure_search_service():
        proxy = subprocess.Popen(
            [*command, str(dataset.servers_file)],
            env=environment,
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


class ProxySession:
    """A session of the original's proxy, through its HTTP API."""

    def __init__(self, port: int, task: DatasetTask) -> None:
        self.port, self.session_id = port, str(uuid.uuid4())
        names = [choice.name for choice in task.tools]
        config = {server: dict(task.init.get(server, {})) for server in task.servers}
        self._ask("/session_create", server_config=config, available_tools=names, timeout=120)

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
    raise SystemExit(f"the original's proxy did not come up on port {port} within {START_S:g} s.")


def tasks_to_run(dataset: Dataset, tasks_each: int) -> list[DatasetTask]:
    """The first tasks of each server, the servers taking turns."""
    by_server: dict[str, list[DatasetTask]] = {}
    for uid in dataset.list_uids(RELEASE):
        task = dataset.task(uid)
        by_server.setdefault(task.servers[0], []).append(task)
    turns = itertools.zip_longest(*(tasks[:tasks_each] for tasks in by_server.values()))
    return [task for turn in turns for task in turn if task is not None]


def main(arguments: Sequence[str] | None = None) -> None:
    original = os.environ.get("TBX_ORIGINAL_PYTHON")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks-each", type=int, default=4, help="of each server")
    parser.add_argument("--concurrency", type=int, default=4, help="sessions at a time")
    parser.add_argument("--servers-python", default=os.environ.get("TBX_SERVERS_PYTHON"))
    parser.add_argument("--original-python", default=original, help="an interpreter that has the original")
    parser.add_argument(
        "--ways", nargs="+", choices=["fork", "spawn", "original"], default=["fork", "spawn", "original"]
    )
    options = parser.parse_args(arguments)
    if options.servers_python is None:
        raise SystemExit("Set TBX_SERVERS_PYTHON, or give --servers-python: an interpreter with the servers' packages.")
    dataset = next((each for each in registered_datasets() if RELEASE in each.lists), None)
    if dataset is None:
        raise SystemExit(f"Set TBX_DATASETS to a checkout of a dataset that has the list {RELEASE}.")
    if hasattr(os, "sched_setaffinity"):  # "two cores" means two cores
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
    tasks = tasks_to_run(dataset, options.tasks_each)
    for way in options.ways:
        if way == "original" and options.original_python is None:
            continue
        ways = proxied(dataset, options.original_python) if way == "original" else None
        with ways or pooled(dataset, way, options.servers_python) as open_session:
            print(json.dumps(measure(way, open_session, tasks, options.concurrency)), flush=True)


if __name__ == "__main__":
    main()
