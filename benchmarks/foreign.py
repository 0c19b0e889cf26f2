"""How many graded episodes of a ThinkingBox dataset do two cores run in a minute, by each way to run its servers?

One episode is the oracle's: a session with the task's configuration, all of its expected calls, the effects, the task's
own test on them, the end. Every episode must pass. Tasks whose test asks a judge are left out. Prints one JSON line for
each way:

    fork        ToolEnv; the server is imported once and forked for each session, tests run in the warm worker
    spawn       the same, but the server is started anew for each session
    original    the dataset's own session proxy through its HTTP API, and for each episode a fresh process of its own
                test worker, as the original does it; its agent costs nothing here (needs an interpreter that has it)

    episodes_per_minute       by the wall clock, with `concurrency` episodes at a time, after one warm-up episode of
    each
                              server. `by_round`: of each round; the ways take turns
    ratio                     episodes per minute, relative to the original's in the same run
    cpu_s, cpu_ratio          processor seconds of one episode, all processes together, and the original's relative to
                              them, which other work on the machine hardly changes
    session_mb                memory that one more live session takes: proportional set size of all processes, with 8
                              live sessions of one server against none

With `--sessions` each line also says how long the parts of an ungraded session take (`open_s`, `call_s`, `effects_s`,
`close_s`, medians), and how many `sessions_per_minute` there are.

The dataset and the interpreters come from TBX_DATASETS, TBX_SERVERS_PYTHON and TBX_ORIGINAL_PYTHON, or from options.

    python -m benchmarks.foreign [--tasks-each 4] [--concurrency 4] [--rounds 3] [--ways fork spawn original]
                                 [--sessions]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

import tbx_envs
from benchmarks.original_proxy import graded_episode, proxied, versions_of
from tbx_envs.agents import Attempt
from tbx_envs.agents.oracle import OracleAgent
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.thinkingbox.dataset import registered_datasets
from tbx_envs.thinkingbox.dataset.dataset import Dataset
from tbx_envs.thinkingbox.dataset.records import DatasetTask
from tbx_envs.thinkingbox.runtime import close_shared
from tbx_envs.thinkingbox.search.search_service import ensure_search_service
from tbx_envs.thinkingbox.servers.server_pool import ServerPool
from tbx_envs.thinkingbox.servers.servers_file import load_servers

RELEASE = "thinkingbox_bench_v1"
WAYS = ("fork", "spawn", "original")
LIVE = 8  # sessions for measuring memory
SETTLE_S = 0.5  # processes that were closed end a moment later
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Session(Protocol):
    def call(self, name: str, arguments: Mapping[str, Any]) -> Any: ...
    def effects(self) -> Mapping[str, Mapping[str, Any]]: ...
    def close(self) -> None: ...


Open = Callable[[DatasetTask], Session]
Runner = Callable[[Sequence[DatasetTask]], None]  # graded episodes, all of which must pass


# --- graded episodes ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """All tasks run once in one way."""

    wall_s: float
    cpu_s: float


def measure_rounds(runners: Mapping[str, Runner], tasks: Sequence[DatasetTask], rounds: int) -> dict[str, list[Round]]:
    """The ways take turns, so that other work on the machine affects them all."""
    for runner in runners.values():  # imports are not measured
        runner(list({task.servers[0]: task for task in tasks}.values()))
    measured: dict[str, list[Round]] = {way: [] for way in runners}
    for _ in range(rounds):
        for way, runner in runners.items():
            began_cpu, began = cpu_seconds(), time.perf_counter()
            runner(tasks)
            wall_s = time.perf_counter() - began
            time.sleep(SETTLE_S)
            measured[way].append(Round(wall_s, cpu_seconds() - began_cpu))
    return measured


def ours(start: Literal["fork", "spawn"], concurrency: int) -> Runner:
    agent = OracleAgent(concurrency=concurrency, options=EpisodeOptions(judge="yes", start=start))

    def runner(tasks: Sequence[DatasetTask]) -> None:
        for episode in agent.run(Attempt(task.uid, 0, 0) for task in tasks):
            if not episode.passed:
                why = episode.fault.message if episode.fault else "\n".join(episode.report.differences)
                raise SystemExit(f"task {episode.uid}, {start}: its expected calls did not pass: {why}")

    return runner


def originals(open_session: Open, python: str, concurrency: int) -> Runner:
    def run_one(task: DatasetTask) -> None:
        if not graded_episode(open_session(task), task, python):
            raise SystemExit(f"task {task.uid}, original: its expected calls did not pass.")

    def runner(tasks: Sequence[DatasetTask]) -> None:
        with ThreadPoolExecutor(concurrency) as threads:
            list(threads.map(run_one, tasks))

    return runner


def figures(rounds: Mapping[str, Sequence[Round]], way: str, num_tasks: int) -> dict[str, object]:
    def per_minute(some: Sequence[Round]) -> float:
        return 60 * num_tasks * len(some) / sum(each.wall_s for each in some)

    def cpu_s(some: Sequence[Round]) -> float:
        return sum(each.cpu_s for each in some) / (num_tasks * len(some))

    mine, peers = rounds[way], rounds.get("original")
    compared = {
        "ratio": round(per_minute(mine) / per_minute(peers), 1) if peers else None,
        "cpu_ratio": round(cpu_s(peers) / cpu_s(mine), 1) if peers else None,
    }
    return {
        "episodes_per_minute": round(per_minute(mine), 1),
        "by_round": [round(per_minute([each]), 1) for each in mine],
        "passed": num_tasks * len(mine),  # `ours` and `originals` stop at the first that does not pass
        "cpu_s": round(cpu_s(mine), 3),
        **compared,
    }


# --- ungraded sessions --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of one session, by part; `call` is the mean of its calls."""

    open: float
    call: float
    effects: float
    close: float


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
    if effects["result_db_hash"] != effects["golden_db_hash"]:
        raise SystemExit(f"task {task.uid}: its expected calls did not lead to the expected database.")
    return Seconds(opened - began, (called - opened) / max(1, len(task.expected_calls)), told - called, closed - told)


def measure_sessions(open_session: Open, tasks: Sequence[DatasetTask], concurrency: int) -> dict[str, object]:
    for task in {task.servers[0]: task for task in tasks}.values():
        open_session(task).close()
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as threads:
        seconds = list(threads.map(lambda task: run_session(open_session, task), tasks))
    wall_s = time.perf_counter() - began
    parts = {
        f"{field.name}_s": round(statistics.median(getattr(each, field.name) for each in seconds), 4)
        for field in dataclasses.fields(Seconds)
    }
    return {"sessions_per_minute": round(60 * len(tasks) / wall_s, 1), **parts}


@contextlib.contextmanager
def pooled(dataset: Dataset, start: Any, python: str) -> Iterator[Open]:
    assert dataset.servers_file is not None
    with ServerPool(load_servers(dataset.servers_file, python=python), start=start) as pool:
        yield lambda task: pool.open(task.init, servers=task.servers)


# --- resources of processes ---------------------------------------------------------------------------------


def session_bytes(open_session: Open, task: DatasetTask) -> float:
    """Memory of one more live session, in this process and all its descendants."""
    open_session(task).close()
    time.sleep(SETTLE_S)
    idle = proportional_bytes(family())
    sessions = [open_session(task) for _ in range(LIVE)]
    busy = proportional_bytes(family())
    for session in sessions:
        session.close()
    return (busy - idle) / LIVE


def family() -> set[int]:
    """This process and its descendants."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(entry)] = int(stat_fields(int(entry))[1])
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on, the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def proportional_bytes(pids: set[int]) -> int:
    """Proportional set size: a page that n processes share counts an n-th in each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def cpu_seconds() -> float:
    """Processor time so far of this process and its descendants, including those that have ended and were awaited."""
    total = 0
    for pid in family():
        with contextlib.suppress(OSError):
            total += sum(map(int, stat_fields(pid)[11:15]))
    return total / TICKS_PER_S


# --- the whole ----------------------------------------------------------------------------------------------


def tasks_to_run(dataset: Dataset, tasks_each: int) -> list[DatasetTask]:
    """The first tasks of each server whose tests ask no judge, interleaved by server."""
    by_server: dict[str, list[DatasetTask]] = {}
    for uid in dataset.list_uids(RELEASE):
        task = dataset.task(uid)
        if not any(config.get("rubrics_yesno") for config in task.init.values()):
            by_server.setdefault(task.servers[0], []).append(task)
    turns = itertools.zip_longest(*(tasks[:tasks_each] for tasks in by_server.values()))
    return [task for turn in turns for task in turn if task is not None]


def measure(dataset: Dataset, ways: Sequence[str], options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One record for each way."""
    tasks = tasks_to_run(dataset, options.tasks_each)
    load_before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        runners = {way: ours(way, options.concurrency) for way in WAYS[:2] if way in ways}
        if "original" in ways:
            opener = stack.enter_context(proxied(dataset, options.original_python))
            runners["original"] = originals(opener, options.original_python, options.concurrency)
        stack.callback(close_shared)
        rounds = measure_rounds(runners, tasks, options.rounds)
    surroundings = {
        "episodes": len(tasks) * options.rounds,
        "tasks": len(tasks),
        "calls": round(statistics.mean(len(task.expected_calls) for task in tasks), 1),
        "concurrency": options.concurrency,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 1) for load in (load_before, os.getloadavg()[0])],
        "python": platform.python_version(),
        "tbx": tbx_envs.__version__,
        **versions_of(options.servers_python, "fastmcp", "mcp"),
        **(versions_of(options.original_python, "thinkingbox") if "original" in ways else {}),
    }
    for way in ways:
        is_peer = way == "original"
        with (
            proxied(dataset, options.original_python) if is_peer else pooled(dataset, way, options.servers_python)
        ) as open_session:
            memory = {"session_mb": round(session_bytes(open_session, tasks[0]) / 1e6, 1)}
            parts = measure_sessions(open_session, tasks, options.concurrency) if options.sessions else {}
        yield {"way": way, **figures(rounds, way, len(tasks)), **memory, **parts, **surroundings}


def main(arguments: Sequence[str] | None = None) -> None:
    original = os.environ.get("TBX_ORIGINAL_PYTHON")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks-each", type=int, default=4, help="number of tasks of each server")
    parser.add_argument("--concurrency", type=int, default=4, help="episodes at a time")
    parser.add_argument("--rounds", type=int, default=3, help="number of times that each way runs all tasks")
    parser.add_argument("--servers-python", default=os.environ.get("TBX_SERVERS_PYTHON"))
    parser.add_argument("--original-python", default=original, help="an interpreter that has the original")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--sessions", action="store_true", help="measure the parts of ungraded sessions too")
    options = parser.parse_args(arguments)
    if not options.servers_python:
        raise SystemExit("Set TBX_SERVERS_PYTHON, or give --servers-python: an interpreter with the servers' packages.")
    dataset = next((each for each in registered_datasets() if RELEASE in each.lists), None)
    if dataset is None:
        raise SystemExit(f"Set TBX_DATASETS to a checkout of a dataset that has the list {RELEASE}.")
    if dataset.servers_python != options.servers_python:
        dataset = tbx_envs.register_dataset(dataset.root, servers_python=options.servers_python)
    if hasattr(os, "sched_setaffinity"):  # "two cores" means two cores
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
    ways = [way for way in options.ways if way != "original" or options.original_python]
    with ensure_search_service() as service:  # one for all ways
        if service.instance and not service.ours:
            raise SystemExit(
                f"Another process's stand-in answers on {service.url} and may end at any time; wait for it."
            )
        for record in measure(dataset, ways, options):
            print(json.dumps({"benchmark": "foreign", **record}), flush=True)
    if len(ways) < len(options.ways):
        why = "TBX_ORIGINAL_PYTHON is not set and --original-python not given"
        print(json.dumps({"benchmark": "foreign", "way": "original", "skipped": why}))


if __name__ == "__main__":
    main()
