"""What `tbx tasks` and `tbx show` print."""

from __future__ import annotations

import json
from pathlib import Path

from tbx_envs.domains import load_domain
from tbx_envs.errors import ConfigError
from tbx_envs.evaluate import task_hash
from tbx_envs.registration import env_id
from tbx_envs.task_lists import find_task, select_tasks
from tbx_envs.transcripts import episode_text, load_episodes


def list_tasks(selection: str, long: bool) -> None:
    """One uid a line; with `long` its split and the user's first message, too."""
    for uid in select_tasks(selection):
        if long:
            task = find_task(uid)
            print(f"{uid}  {task.split:<7}  {' '.join(task.query.split())}")
        else:
            print(uid)


def show_task(uid: str) -> None:
    """The task for people: what is asked, what the user knows, what must come out."""
    task = find_task(uid)
    family = load_domain(task.domain).families[task.family]
    calls = [f"  {call.tool} {json.dumps(dict(call.arguments), ensure_ascii=False)}" for call in task.expected_calls]
    lines = [
        f"{task.uid}  ({env_id(task.uid)})",
        f"{family.title}",
        "",
        f"split: {task.split}, version {task.version}, sha256 {task_hash(uid)}",
        f"limits: {task.limits.user_turns} answers of the user, {task.limits.agent_turns} turns of the agent",
        f"user says first: {task.query}",
        f"user wants: {task.user.request}",
        f"user knows, if asked: {dict(task.user.facts)}",
        f"user confirms or declines: {dict(task.user.consents)}",
        f"world: {', '.join(f'{table} {len(rows)}' for table, rows in task.world.items())} rows",
        "expected calls:",
        *calls,
    ]
    if task.idle_passes:
        lines.append(f"doing nothing passes: {task.idle_passes}")
    print("\n".join(lines))


def validate_domain(name: str) -> None:
    """Runs the shipped contract over a domain.

    Raises:
        DomainError: what does not hold.
    """
    from tbx_envs.testing.domain_contract import check_domain

    check_domain(name)
    print(f"{name}: {len(load_domain(name).uids())} tasks hold the contract.")


def show_episodes(folder: Path, uid: str | None, attempt: int | None, outcome: str | None, system: bool) -> None:
    """Transcripts of a campaign's episodes.

    Raises:
        ConfigError: no transcripts there, or none that was asked for.
    """
    outcomes = {True: "passed", False: "failed", None: "void"}
    number = shown = 0
    for episode in load_episodes(folder / "episodes.jsonl"):
        number += 1
        if (
            uid in (None, episode.uid)
            and attempt in (None, episode.attempt)
            and outcome in (None, outcomes[episode.passed])
        ):
            print(("\n\n" if shown else "") + episode_text(episode, system=system))
            shown += 1
    if not shown:
        asked = ", ".join(
            f"{k} {v}" for k, v in (("uid", uid), ("attempt", attempt), ("outcome", outcome)) if v is not None
        )
        raise ConfigError(f"none of {number} episodes in {folder} has {asked}; leave an option out to see more.")
