"""Episodes of an evaluation run graded again, without the agent: with another judge, a mended check, a newer version.

An episode of a dataset's task was saved with the evidence that its check was given, so nothing of it is run again but
the check. An episode of our own domains has its calls made again in a fresh world; they must be answered as they were,
else the tools have changed and it cannot be graded again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tbx_envs.domains import load_domain
from tbx_envs.domains.runtime import DomainRuntime
from tbx_envs.episode import CheckReport, Episode, Fault
from tbx_envs.errors import CheckFault, ConfigError, EnvironmentFault
from tbx_envs.evaluation.files import Row, RunLog, load_rows
from tbx_envs.evaluation.run import row_of, task_hash
from tbx_envs.evaluation.task_lists import find_task
from tbx_envs.evaluation.transcripts import load_episodes
from tbx_envs.messages import ToolCall, ToolResult, Turn
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.task import Task
from tbx_envs.thinkingbox.dataset.records import DatasetTask
from tbx_envs.version import __version__


def regrade(
    source: Path | str,
    rows_path: Path | str,
    *,
    judge: Any = "none",
    judge_fingerprint: Any = None,
    check_timeout_s: float = 60.0,
    uids: Sequence[str] | None = None,
    progress: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Grade every episode in `source` again and write rows and episodes beside `rows_path`.

    Void episodes stay void, unless it was the check that failed. One whose check fails now is void with that fault.

    Args:
        source: folder of the run.
        judge: as in `EpisodeOptions`.
        judge_fingerprint: what tells this judge from others, for the new run's fingerprint.
        uids: only these tasks; None is all.
        progress: called with each new row.

    Returns:
        The rows, in the order of the source's episodes.

    Raises:
        ConfigError: no run there, or another one where the rows go.
        DomainError: a task that is not registered.
    """
    source = Path(source)
    played, source_rows = load_rows(source)
    retries = {(row["uid"], row["attempt"]): row["retry"] for row in source_rows}
    chosen = [uid for uid in played["tasks"] if uids is None or uid in set(uids)]
    if not chosen:
        raise ConfigError(f"{source} has none of the tasks asked for; choose others, or leave tasks out.")
    hashes = {uid: task_hash(uid) for uid in chosen}
    fingerprint = {**played, "tasks": hashes, "tbx": __version__, "regraded": {"judge": judge_fingerprint}}
    log = RunLog(Path(rows_path), json.loads(json.dumps(fingerprint)))
    options = EpisodeOptions(judge=judge, check_timeout_s=check_timeout_s)
    graded_before = {key for key, row in log.rows.items() if row["passed"] is not None}
    order: dict[tuple[str, int], None] = {}
    for episode in load_episodes(source / "episodes.jsonl"):
        key = (episode.uid, episode.attempt)
        if episode.uid not in hashes:
            continue
        order[key] = None
        if key in graded_before:
            continue
        graded = regraded(episode, options)
        row = row_of(graded, played["policy"]["name"], retries.get(key, 0), hashes[episode.uid])
        log.append(row, graded)
        if progress is not None:
            progress(row)
    log.rewrite_in_order(list(order))
    return [log.rows[key] for key in order]


def regraded(episode: Episode, options: EpisodeOptions) -> Episode:
    """The episode with the report of a check made now; void when that check fails.

    A void episode stays as it is, unless all that failed was its check: then what the check was given is there.
    """
    if episode.report is None and episode.evidence is None:
        return episode
    task = find_task(episode.uid)
    usage = dict(episode.usage)
    try:
        if isinstance(task, Task):
            report = _replayed(task, episode, options)
        else:
            report, asked = _checked(task, episode, options)
            usage |= asked
    except EnvironmentFault as fault:
        return dataclasses.replace(episode, report=None, reward=None, fault=Fault(fault.kind, str(fault)))
    return dataclasses.replace(episode, report=report, reward=report.reward, fault=None, usage=usage)


def _checked(task: DatasetTask, episode: Episode, options: EpisodeOptions) -> tuple[CheckReport, dict[str, int]]:
    """What the task's test says of the evidence that was saved, and the judge's tokens."""
    if episode.evidence is None:
        raise CheckFault(f"task {episode.uid}: the episode was saved without evidence, so it cannot be graded again.")
    from tbx_envs.thinkingbox.runtime import grade, judge_of, judge_usage

    judge = judge_of(options.judge)
    report = grade(task, episode.transcript, episode.evidence, judge, options.check_timeout_s)
    return report, judge_usage(judge)


def _replayed(task: Task, episode: Episode, options: EpisodeOptions) -> CheckReport:
    """The check after the episode's calls were made again in a fresh world."""
    calls = {
        call.id: call
        for said in episode.transcript
        if isinstance(said, Turn)
        for call in said.calls
        if isinstance(call, ToolCall)
    }
    stage = DomainRuntime(task, load_domain(task.domain), options, episode.seed)
    try:
        for said in episode.transcript:
            if not isinstance(said, ToolResult) or said.call_id not in calls:
                continue
            call = calls[said.call_id]
            answer = stage.call(call.name, call.arguments)
            if (answer.text, answer.status) != (said.text, said.status):
                raise CheckFault(
                    f"task {task.uid}: {call.name} ({call.id}) answers otherwise than when the episode was played, so "
                    f"it cannot be graded again. Then: {said.text[:200]!r}. Now: {answer.text[:200]!r}."
                )
        return stage.check(episode.transcript, None)
    finally:
        stage.close()
