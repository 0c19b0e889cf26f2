"""How many graded built-in episodes does one core run in a second?

One episode of an environment made by `gymnasium.make`: reset, five tool calls (the task's expected ones, so that most
of
them write), the message that ends it, the check, close. The agent costs nothing. Prints one JSON line:

    episodes_per_s            by the wall clock, best of the repeats (others may share the machine)
    episodes_per_cpu_s        by processor time of the process, best of the repeats
    with_make_per_s           the same by the wall clock, with `gymnasium.make` in every episode

    python -m benchmarks.episode [--episodes 100] [--repeats 20]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence

import tbx_envs
from tbx_envs.domains import load_domain
from tbx_envs.env import ToolEnv
from tbx_envs.messages import ToolCall, Turn
from tbx_envs.task import Task

NUM_CALLS = 5
NUM_TASKS = 8


def tasks_to_run(domain_name: str = "clinic") -> list[Task]:
    """Frozen tasks with exactly `NUM_CALLS` expected calls, from the first families that have some."""
    domain = load_domain(domain_name)
    tasks = (domain.task(uid) for uid in domain.uids())
    fitting = (task for task in tasks if len(task.expected_calls) == NUM_CALLS)
    return [task for _, task in zip(range(NUM_TASKS), fitting, strict=False)]


def run_episode(env: ToolEnv) -> None:
    env.reset(seed=0)
    for call in env.task.expected_calls:
        env.step(Turn(calls=(ToolCall("", call.tool, call.arguments),)))
    reward = env.step("It is done. <DONE>")[1]
    env.close()
    if reward != 1.0:
        raise SystemExit(
            f"task {env.task.uid}: the expected calls got reward {reward}, so this would measure something else."
        )


def measure(num_episodes: int, repeats: int) -> dict[str, object]:
    tasks = tasks_to_run()
    envs = [tbx_envs.make(task.uid) for task in tasks]
    order = list(itertools.islice(itertools.cycle(range(len(envs))), num_episodes))

    def kept() -> None:
        for number in order:
            run_episode(envs[number])

    def made() -> None:
        for number in order:
            run_episode(tbx_envs.make(tasks[number].uid))

    for env in envs:  # templates, imports and compiled statements are not measured
        run_episode(env)
    wall_s, cpu_s = zip(*(_seconds(kept) for _ in range(repeats)), strict=True)
    with_make_s, _ = zip(*(_seconds(made) for _ in range(repeats)), strict=True)
    mutating = {tool.name for tool in load_domain("clinic").tools if tool.mutates}
    return {
        "benchmark": "episode",
        "episodes_per_s": round(num_episodes / min(wall_s), 1),
        "episodes_per_cpu_s": round(num_episodes / min(cpu_s), 1),
        "with_make_per_s": round(num_episodes / min(with_make_s), 1),
        "calls": NUM_CALLS,
        "mutating_calls": min(sum(call.tool in mutating for call in task.expected_calls) for task in tasks),
        "episodes": num_episodes,
        "repeats": repeats,
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "tbx": tbx_envs.__version__,
    }


def _seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Wall clock and processor seconds of one run."""
    began, began_cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - began, time.process_time() - began_cpu


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    if hasattr(os, "sched_setaffinity"):  # "one core" means one core
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(json.dumps(measure(options.episodes, options.repeats)))


if __name__ == "__main__":
    main()
