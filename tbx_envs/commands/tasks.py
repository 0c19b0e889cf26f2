"""`tbx tasks`: inspect and validate tasks; `tbx play`: be the agent of one."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from tbx_envs.command_line import ArgumentParser
from tbx_envs.domains import load_domain
from tbx_envs.errors import ConfigError, DomainError, ToolFault, did_you_mean
from tbx_envs.evaluation.task_lists import select_tasks
from tbx_envs.registration import env_id, uid_of
from tbx_envs.rendering import visible
from tbx_envs.sources import find_task, task_hash
from tbx_envs.task import ExpectedCall, Task
from tbx_envs.thinkingbox.dataset import Dataset, dataset_of, refuse_broken, registered_datasets
from tbx_envs.thinkingbox.dataset.records import DatasetTask


def list_tasks(selection: str, long: bool) -> None:
    """Print one uid per line; with `long` its split and the user's first message too."""
    for uid in select_tasks(selection):
        if long:
            task = find_task(uid)
            print(visible(f"{uid}  {task.split:<7}  {' '.join(task.query.split())}"))
        else:
            print(visible(uid))


def show_task(uid: str) -> None:
    """Print a task for people: the request, what the user knows, the expected calls."""
    match find_task(uid):
        case Task() as task:
            print(visible("\n".join(_built_in_lines(task))))
        case DatasetTask() as task:
            print(visible("\n".join(_dataset_lines(task))))


def _built_in_lines(task: Task) -> list[str]:
    family = load_domain(task.domain).families[task.family]
    lines = [
        f"{task.uid}  ({env_id(task.uid)})",
        f"{family.title}",
        "",
        f"split: {task.split}, version {task.version}, sha256 {task_hash(task.uid)}",
        f"limits: {task.limits.user_turns} answers of the user, {task.limits.agent_turns} turns of the agent",
        f"user says first: {task.query}",
        f"user wants: {task.user.request}",
        f"user knows, if asked: {dict(task.user.facts)}",
        f"user confirms or declines: {dict(task.user.consents)}",
        f"world: {', '.join(f'{table} {len(rows)}' for table, rows in task.world.items())} rows",
        "expected calls:",
        *(f"  {_call(call)}" for call in task.expected_calls),
    ]
    return [*lines, f"doing nothing passes: {task.idle_passes}"] if task.idle_passes else lines


def _dataset_lines(task: DatasetTask) -> list[str]:
    dataset = dataset_of(task.uid)
    several = len(task.servers) > 1
    calls = [
        f"  {f'{server}: ' if several else ''}{_call(call)}"
        for server, call in zip(task.expected_servers, task.expected_calls, strict=True)
    ]
    limit = "any number of" if task.limits.agent_turns == sys.maxsize else task.limits.agent_turns
    return [
        f"{task.uid}  ({env_id(task.uid)})",
        f"{dataset.root / task.path} line {task.line}, dataset {dataset.name}",
        "",
        f"split: {task.split}{' (benchmark: for evaluation only)' if task.split == 'heldout' else ''}, sha256 "
        f"{task_hash(task.uid)}",
        f"scenario: {task.scenario}; agent: {task.agent}; tags: {', '.join(task.tags) or 'none'}",
        f"limits: {task.limits.user_turns} answers of the user, {limit} turns of the agent",
        *([f"clock: {task.clock}, {'running' if task.clock_runs else 'standing still'}"] if task.clock else []),
        *([f"said before: {len(task.history)} messages"] if task.history else []),
        *(["texts are filled in with the answers of the servers' init"] if task.format_query else []),
        f"user says first: {task.query.strip()}",
        "user knows:",
        *_indented(task.user_context or "nothing: no one answers after the first message"),
        f"servers: {', '.join(task.servers)}",
        *_wrapped("tools: ", [*(tool.name for tool in task.builtin_tools), *(tool.name for tool in task.tools)]),
        *([f"fixtures: {', '.join(task.fixtures)}"] if task.fixtures else []),
        "golden calls:" if calls else "golden calls: none are given",
        *calls,
    ]


def _call(call: ExpectedCall) -> str:
    return f"{call.tool} {json.dumps(dict(call.arguments), ensure_ascii=False)}"


def _indented(text: str) -> list[str]:
    return [f"  {line}".rstrip() for line in text.strip().splitlines()]


def _wrapped(title: str, names: Sequence[str]) -> list[str]:
    return textwrap.wrap(title + ", ".join(names), 118, subsequent_indent="  ", break_on_hyphens=False)


def validate(name: str, *, start_servers: bool = True) -> None:
    """Check the contract of a domain, or build every task of a dataset and compare its tools with those of its servers.

    Args:
        name: name of a domain or of a registered dataset, or the path of a dataset.
        start_servers: whether to start a dataset's servers, once for each set of them that tasks use.

    Raises:
        DomainError: there are problems; the message lists all of them.
    """
    registered = {dataset.name: dataset for dataset in registered_datasets()}
    if name in registered or Path(name).exists():
        dataset = registered.get(name) or Dataset(name)
        dataset.validate()
        compared = start_servers and dataset.servers_file is not None
        if compared:
            _compare_tools(dataset)
        splits = [dataset.task(uid).split for uid in dataset.uids()]
        print(
            f"{dataset.name}: {len(splits)} tasks of {len(dataset.lists)} lists can be built; "
            f"{splits.count('heldout')} are of the benchmark."
            + (" Their servers have the tools that they offer." if compared else "")
        )
        return
    from tbx_envs.testing.domain_contract import check_domain

    try:
        domain = load_domain(name)
    except DomainError as error:
        refuse_broken()
        near = did_you_mean(name, registered)
        raise DomainError(
            f"{error} Neither is it a registered dataset ({', '.join(registered) or 'none is registered'}) nor "
            f"the path of one.{near}"
        ) from error
    check_domain(name)
    print(f"{name}: {len(domain.uids())} tasks keep the contract.")


def _compare_tools(dataset: Dataset) -> None:
    """Check that servers have the tools that tasks offer.

    Raises:
        DomainError: some do not, or servers cannot be started; the message lists all problems.
    """
    from tbx_envs.thinkingbox.agent_tools import tool_problems
    from tbx_envs.thinkingbox.servers.server_pool import ServerPool
    from tbx_envs.thinkingbox.servers.servers_file import load_servers

    assert dataset.servers_file is not None
    of_servers: dict[tuple[str, ...], list[DatasetTask]] = {}
    for uid in dataset.uids():
        task = dataset.task(uid)
        of_servers.setdefault(task.servers, []).append(task)
    problems: list[str] = []
    servers = load_servers(dataset.servers_file, python=dataset.servers_python)
    with ServerPool(servers, knowledge=False) as pool:
        for names, together in of_servers.items():
            try:
                served = pool.tools(names)
            except (ConfigError, ToolFault) as error:
                problems.append(
                    f"{len(together)} task(s) with servers {', '.join(names)}, as {together[0].uid}: {error}"
                )
                continue
            problems += [f"{task.uid}: {found}" for task in together for found in tool_problems(task, served)]
    if problems:
        raise DomainError(
            f"dataset '{dataset.name}' in {dataset.root}: {len(problems)} problem(s) with tools and servers (leave "
            f"them out with --no-servers):\n  " + "\n  ".join(problems)
        )


def tasks(arguments: Sequence[str]) -> None:
    parser = ArgumentParser("tbx tasks", description="Inspect and validate tasks.")
    actions = parser.add_subparsers(dest="action", required=True)
    listing = actions.add_parser("list", help="uids, one per line: a file of them is a list that `tasks=` accepts")
    selection = "all, train, heldout, datasets, a name, a uid, a pattern, a file"
    listing.add_argument("selection", nargs="?", default="all", help=selection)
    listing.add_argument("--long", action="store_true", help="include split and the user's first message")
    show = actions.add_parser("show", help="everything about one task")
    show.add_argument("uid")
    validating = actions.add_parser("validate", help="check the contract of a domain, or build all tasks of a dataset")
    validating.add_argument("name", nargs="?", default="clinic", help="a domain, a registered dataset or a path")
    validating.add_argument("--no-servers", action="store_true", help="do not start a dataset's servers")
    given = parser.parse_args(arguments)
    match given.action:
        case "list":
            list_tasks(given.selection, given.long)
        case "show":
            show_task(given.uid)
        case _:
            validate(given.name, start_servers=not given.no_servers)


def play_task(arguments: Sequence[str]) -> None:
    parser = ArgumentParser("tbx play", description="Be the agent of one episode, in the terminal.")
    parser.add_argument("task", help="a uid such as clinic/cancel_visit/000, or a Gymnasium id")
    parser.add_argument("--seed", type=int, default=0, help="seed of the simulated user's wording")
    given = parser.parse_args(arguments)
    with contextlib.suppress(ImportError):  # `input` has line editing and a history where this is imported
        import readline  # noqa: F401

    from tbx_envs.env import ToolEnv
    from tbx_envs.play import play

    env = ToolEnv(uid_of(given.task))
    try:
        play(env, given.seed, read=lambda: input("you> "), write=print)
    finally:
        env.close()
