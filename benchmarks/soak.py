"""Does anything but the truth come of many episodes in which things break?

Episodes of the built-in clinic tasks and of a small dataset run side by side. In some of them a fault is injected: the
server dies, is stopped, is slow or talks nonsense; its fork server, the check worker or the search service is killed or
stopped; the user raises; the test crashes, hangs or leaves processes. What an episode deserves is known beforehand and
by no part of tbx: its agent makes the right calls or wrong ones. The server writes every call that it executes into a
ledger, under an id that no other call has. Counted, and wrong if there is one:

    wrong_rewards   rewards other than the deserved one, or any reward where the fault leaves no verdict
    double_writes   calls that were executed twice
    lost_writes     calls that were answered and are not in the ledger
    leaks           processes, descriptors, threads and files that are left when everything is closed
    errors          exceptions that are no void episode

Voids are allowed where something breaks, also for neighbours of the episode that it was meant for; `idle_voids` counts
those of episodes without a fault of their own. Prints a progress bar and one JSON line; the status is 1 if anything is
wrong.

    python -m benchmarks.soak [--episodes 10000] [--concurrency 4] [--faults 0.25] [--seed 0]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import os
import platform
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tbx_envs
from tbx_envs.domains import in_process, load_domain
from tbx_envs.episode import Episode
from tbx_envs.evaluation.report import RunProgress
from tbx_envs.messages import ToolCall, Turn
from tbx_envs.registration import frozen_uids
from tbx_envs.seeding import derive
from tbx_envs.thinkingbox import runtime
from tbx_envs.thinkingbox.grading import test_code
from tbx_envs.thinkingbox.search import search_service
from tbx_envs.thinkingbox.servers import launcher
from tbx_envs.thinkingbox.servers.server_pool import ServerPool
from tbx_envs.vector import EpisodeSlots
from tbx_envs.version import __version__

LIMIT_S = 5.0  # of a call and of a check; nothing that works takes as long
SILENCE_S = 5.0  # of a program that is stopped; 30 s in earnest
NUM_CLINIC_TASKS = 60
AMOUNTS = (3, 4)

# What can break in an episode of the dataset, with how often it is drawn. True: no verdict can be reached.
BREAKS = {
    "server killed": (6, True),
    "server stopped": (1, True),
    "slow": (1, True),
    "garbage": (6, True),
    "exit": (6, True),
    "server leaves processes": (4, False),
    "test aborts": (4, True),
    "test hangs": (0.5, True),
    "test raises": (4, True),
    "test leaves processes": (6, False),
    "fork server killed": (2, False),
    "fork server stopped": (0.3, False),
    "worker killed": (2, False),
    "worker stopped": (0.3, False),
    "search service killed": (1, False),
}
TESTS = {"test aborts": "test_abort", "test hangs": "test_hang", "test raises": "test_raise"}
TESTS |= {"test leaves processes": "test_leave"}

SERVER = """
import json, os, subprocess, sys, time

paid = []

def send(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

def call(name, given):
    if name == "__reserved__init":
        return {}
    if name == "__reserved__geteffects":
        return {"paid": paid}
    if name == "garbage":
        print("the drawer is stuck", flush=True)
    if name == "exit":
        os._exit(3)
    if name == "slow":
        time.sleep(600)
    if name == "leave":
        sleep = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
        subprocess.Popen(sleep)
        subprocess.Popen(sleep, start_new_session=True)
    if name == "pay":
        with open("ledger", "a") as ledger:
            ledger.write(given["id"] + "\\n")
        paid.append(given["amount"])
    return {"pid": os.getpid()}

NAMES = ["__reserved__init", "__reserved__geteffects", "pay", "look", "garbage", "exit", "slow", "leave"]
TOOLS = [{"name": name, "description": name, "inputSchema": {"type": "object"}} for name in NAMES]

def main():
    for line in sys.stdin:
        request = json.loads(line)
        number, method, params = request.get("id"), request["method"], request.get("params") or {}
        if method == "initialize":
            told = {"capabilities": {"tools": {}}, "serverInfo": {"name": "till", "version": "1"}}
            send({"id": number, "result": {"protocolVersion": params["protocolVersion"], **told}})
        elif method == "tools/list":
            send({"id": number, "result": {"tools": TOOLS}})
        elif method == "tools/call":
            text = json.dumps(call(params["name"], params.get("arguments") or {}))
            send({"id": number, "result": {"content": [{"type": "text", "text": text}], "isError": False}})

if __name__ == "__main__":
    main()
"""

TEST = '''
def test_{name}(x, judge):
    """!
    scenario: shop
    query: Please pay.
    """
    {before}
    assert x.effects["till"]["paid"] == {amounts}, x.effects
'''
BEFORE = {
    "pay": "pass",
    "abort": "import os; os.abort()",
    "hang": "while True: pass",
    "raise": "1 / 0",
    "leave": (
        "import os, subprocess; subprocess.Popen(['sleep', '3600'], start_new_session=True)\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0: os.execvp('sleep', ['sleep', '3600'])\n"
        "        os._exit(0)"
    ),
}


def write_dataset(folder: Path) -> None:
    tests = (TEST.format(name=name, before=before, amounts=list(AMOUNTS)) for name, before in BEFORE.items())
    tools = "".join(f"\n- name: {name}" for name in ("pay", "look", "garbage", "exit", "slow", "leave"))
    files = {
        "servers/till.py": SERVER,
        "servers/servers.yaml": (
            'servers:\n  till:\n    type: mcp-process\n    command: ["{python}", "till.py"]\n    cwd: .\n'
        ),
        "dataset/agent/think.yaml": "system_instructions: Be kind.\nbuiltin_tools: []\n",
        "dataset/scenario/shop.yaml": f"world_state:\n  till: {{}}\ntools:{tools}\n",
        "dataset/test_case/soak.py": "\n".join(tests),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


# --- one episode --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to happen in an episode, and what it then deserves.

    Attributes:
        number: number of the episode.
        uid: its task.
        right: whether the agent makes the right calls, and so deserves 1.0 instead of 0.0.
        fault: what breaks; "" for nothing.
        moment: number of the calls before it breaks.
        no_verdict: whether a reward of any kind would be wrong.
    """

    number: int
    uid: str
    right: bool
    fault: str
    moment: int
    no_verdict: bool


def plan_of(seed: int, number: int, share: float) -> Plan:
    draw = random.Random(derive(seed, "soak", number))
    breaks, right, moment = draw.random() < share, draw.random() < 0.6, draw.randrange(len(AMOUNTS) + 1)
    if draw.random() < 0.4:
        uid = draw.choice(frozen_uids("clinic")[:NUM_CLINIC_TASKS])
        return Plan(number, uid, right, "user raises" if breaks else "", moment, breaks)
    fault = draw.choices(list(BREAKS), [often for often, _ in BREAKS.values()])[0] if breaks else ""
    moment = 0 if fault == "server stopped" else moment  # in a call: at the end it has two minutes to tell its effects
    uid = f"soak.py:{TESTS.get(fault, 'test_pay')}"
    return Plan(number, uid, right, fault, moment, bool(fault) and BREAKS[fault][1])


class Soak:
    """The episodes, what they deserve, and their results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answered: list[str] = []
        self._lock = threading.Lock()
        self._slots = threading.local()
        self._made: list[EpisodeSlots] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.reasons: collections.Counter[str] = collections.Counter()

    def run(self, plan: Plan) -> None:
        """Run an episode and judge its outcome."""
        try:
            episode = self._clinic(plan) if "/" in plan.uid else self._till(plan)
        except Exception as error:  # the boundary of the soak test: any error is counted and shown
            self._note("errors", f"{plan}: {type(error).__name__}: {error}")
            return
        kind = "void" if episode.fault is not None else "scored"
        self._note(f"{kind} with a fault" if plan.fault else f"{kind}")
        deserved = None if plan.no_verdict else float(plan.right)
        if episode.fault is None and episode.reward != deserved:
            self._note("wrong_rewards", f"{plan}: reward {episode.reward}, deserved {deserved}")
        if episode.fault is not None and episode.reward is not None:
            self._note("wrong_rewards", f"{plan}: void with reward {episode.reward}")
        if episode.fault is not None and not plan.fault:
            self._note("idle_voids")
            self.reasons[episode.fault.message.partition("\n")[0][:160]] += 1

    def _note(self, what: str, how: str = "") -> None:
        with self._lock:
            self.counts[what] += 1
            if how and len(self.wrong) < 20:
                self.wrong.append(f"{what}: {how}")

    def _slots_with(self, user_raises: bool) -> EpisodeSlots:
        """The slots of this thread."""
        if not hasattr(self._slots, "made"):
            limits = {"tool_timeout_s": LIMIT_S, "check_timeout_s": LIMIT_S}
            self._slots.made = [EpisodeSlots(1, **limits), EpisodeSlots(1, user=raising_user, **limits)]
            self._made += self._slots.made
        return self._slots.made[user_raises]

    def _clinic(self, plan: Plan) -> Episode:
        slots = self._slots_with(plan.fault == "user raises")
        if not slots.start(0, plan.uid, seed=plan.number).ended:
            task = slots.env(0).task
            calls = task.expected_calls if plan.right else task.expected_calls[:-1]
            for call in calls:
                slots.advance({0: Turn(calls=(ToolCall("", call.tool, call.arguments),))})
            words = "Is that all?" if plan.fault else "It is done. <DONE>"
            slots.advance({0: Turn(words)})
        if not plan.right and task_passes_without_last_call(plan.uid):
            return dataclasses.replace(slots.episode(0, 0), reward=0.0)
        return slots.episode(0, 0)

    def _till(self, plan: Plan) -> Episode:
        slots = self._slots_with(False)
        if not slots.start(0, plan.uid, seed=plan.number).ended:
            self._play(slots, plan)
        return slots.episode(0, 0)

    def _play(self, slots: EpisodeSlots, plan: Plan) -> None:
        amounts = AMOUNTS if plan.right else (*AMOUNTS[:-1], AMOUNTS[-1] + 1)
        for moment in range(len(amounts) + 1):
            if moment == plan.moment and not self._break(slots, plan.fault):
                return
            if moment < len(amounts):
                ident = f"{plan.number}-{moment}"
                if self._call(slots, "pay", id=ident, amount=amounts[moment]) is None:
                    return
                with self._lock:
                    self._answered.append(ident)
        slots.advance({0: Turn("It is done. <DONE>")})

    def _break(self, slots: EpisodeSlots, fault: str) -> bool:
        """Let it break; False when that has ended the episode."""
        tools = {"slow": "slow", "garbage": "garbage", "exit": "exit", "server leaves processes": "leave"}
        if fault in tools:
            return self._call(slots, tools[fault]) is not None
        if fault.startswith("server "):
            answer = self._call(slots, "look")
            if answer is None:
                return False
            send(answer["pid"], fault)
        elif fault.startswith(("fork server ", "worker ")):
            for pid, command in children_of(os.getpid()):
                if ("fork_server.py" if fault.startswith("fork") else "grading/worker") in command:
                    send(pid, fault)
        elif fault.startswith("search service "):
            for lease in list(search_service._leases.values()):
                send(lease.pid, fault)
        return True

    def _call(self, slots: EpisodeSlots, tool: str, **arguments: Any) -> Any:
        """The answer of a tool of the till; None when the episode has ended."""
        outcome = slots.advance({0: Turn(calls=(ToolCall("", tool, arguments),))})[0]
        return None if outcome.ended else json.loads(outcome.messages[-1].text)

    def close(self) -> None:
        for slots in self._made:
            slots.close()
        self._made.clear()
        runtime.close_shared()
        in_process._close_drivers()

    def audit(self) -> None:
        """Compare the ledger with what was answered."""
        path = self._folder / "servers" / "ledger"
        executed = collections.Counter(path.read_text().split() if path.is_file() else ())
        for ident, times in executed.items():
            if times > 1:
                self._note("double_writes", f"{ident} was executed {times} times")
        for ident in self._answered:
            if not executed[ident]:
                self._note("lost_writes", f"{ident} was answered and not executed")


def task_passes_without_last_call(uid: str) -> bool:
    """Whether leaving out the last expected call leaves the right world: it reads, or there is none."""
    task = tbx_envs.find_task(uid)
    if not task.expected_calls:
        return True
    tools = {tool.name: tool for tool in load_domain(task.domain).tools}
    return not tools[task.expected_calls[-1].tool].mutates


def raising_user(task: Any, domain: Any, seed: int) -> Any:
    class Raising:
        can_end = False

        def answer(self, transcript: Any) -> str:
            raise RuntimeError("the line is dead")

    return Raising()


def send(pid: int, fault: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP if fault.endswith("stopped") else signal.SIGKILL)


# --- what is left -------------------------------------------------------------------------------------------


def children_of(pid: int) -> Iterator[tuple[int, str]]:
    """Ids and command lines of a process's children."""
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
            for child in file.read().split():
                with contextlib.suppress(OSError), open(f"/proc/{child}/cmdline") as command:
                    yield int(child), command.read().replace("\0", " ")


def processes_in(folder: Path) -> list[str]:
    """Command lines of the living processes that work in a folder, or were started from it, but this one."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as command, open(f"/proc/{pid}/stat") as stat:
            told = command.read().replace("\0", " ")
            works = os.readlink(f"/proc/{pid}/cwd")
            if int(pid) != os.getpid() and stat.read().rpartition(")")[2].split()[0] != "Z":
                found += [told] if str(folder) in f"{told} {works}" else []
    return found


def held(folder: Path) -> dict[str, Any]:
    """What this process holds, apart from memory."""
    return {
        "processes": processes_in(folder) + [command for _, command in children_of(os.getpid())],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(path.name for path in folder.iterdir()),
    }


def soak(episodes: int, concurrency: int, share: float, seed: int) -> dict[str, Any]:
    """Run the soak test; the figures of the module's docstring."""
    folder = Path(tempfile.mkdtemp(prefix="tbx-soak-"))
    was, tempfile.tempdir = tempfile.tempdir, str(folder)
    test_code.SILENCE_S = launcher.SILENCE_S = SILENCE_S  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as free:  # a search service of its own, since it is killed
        runtime.ServerPool = functools.partial(ServerPool, knowledge_port=free.getsockname()[1])  # type: ignore[misc]
    began = time.monotonic()
    try:
        write_dataset(folder)
        dataset = tbx_envs.register_dataset(folder / "dataset", servers_python=sys.executable)
        soaked = Soak(folder)
        _episodes(soaked, [Plan(-1 - n, uid, True, "", 0, False) for n, uid in enumerate(dataset.uids()[:1])], 1)
        soaked.close()  # what is made once for a process is made now
        before = held(folder)
        soaked = Soak(folder)
        _episodes(soaked, [plan_of(seed, number, share) for number in range(episodes)], concurrency)
        soaked.close()
        after = _settled(folder, before)
        soaked.audit()
        leaks = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
    finally:
        tempfile.tempdir = was
        shutil.rmtree(folder, ignore_errors=True)
    names = ("wrong_rewards", "double_writes", "lost_writes", "errors", "idle_voids")
    return {
        "episodes": episodes,
        **{name: soaked.counts[name] for name in names},
        "leaks": leaks,
        **{name: count for name, count in sorted(soaked.counts.items()) if name not in names},
        "shown": soaked.wrong,
        "reasons_of_idle_voids": dict(soaked.reasons.most_common(5)),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }


def _episodes(soaked: Soak, plans: list[Plan], concurrency: int) -> None:
    with RunProgress(len(plans)) as progress, ThreadPoolExecutor(concurrency) as threads:
        for _ in threads.map(soaked.run, plans):
            wrong = {name: soaked.counts[name] for name in ("wrong_rewards", "errors")}
            progress({"passed": not any(wrong.values())})


def _settled(folder: Path, before: dict[str, Any]) -> dict[str, Any]:
    """What is held once that is what was held before, or after 20 s: killed processes take a moment to go."""
    for _ in range(200):
        after = held(folder)
        if after == before:
            break
        time.sleep(0.1)
    return after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=4, help="episodes at the same time")
    parser.add_argument("--faults", type=float, default=0.25, help="share of episodes in which something breaks")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    figures = soak(given.episodes, given.concurrency, given.faults, given.seed)
    about = {"seed": given.seed, "tbx": __version__, "python": platform.python_version(), "cores": os.cpu_count()}
    print(json.dumps({**figures, **about}, ensure_ascii=False))
    wrong = ("wrong_rewards", "double_writes", "lost_writes", "errors", "leaks")
    raise SystemExit(1 if any(figures[name] for name in wrong) else 0)


if __name__ == "__main__":
    main()
