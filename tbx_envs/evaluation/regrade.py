"""Grading the episodes of an evaluation run again, without the agent: with another judge, or after a fix of the check.

An episode of a dataset's task was saved with the evidence that its check was given, so only the check runs again. The
calls of an episode of our own domains are made again in a fresh world; they must be answered as before, otherwise the
tools have changed and the episode cannot be graded again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tbx_envs.episode import Episode, Fault
from tbx_envs.errors import ConfigError, EnvironmentFault
from tbx_envs.evaluation.files import Row, RunLog, load_rows
from tbx_envs.evaluation.run import row_of
from tbx_envs.evaluation.transcripts import load_episodes
from tbx_envs.runtime import EpisodeOptions
from tbx_envs.sources import source_of, task_hash
from tbx_envs.version import __version__

if TYPE_CHECKING:
    from tbx_envs.thinkingbox.grading.judge import Judge


def regrade(
    source: Path | str,
    rows_path: Path | str,
    *,
    judge: Judge | str | None = "none",
    judge_fingerprint: Mapping[str, Any] | None = None,
    check_timeout_s: float = 60.0,
    uids: Sequence[str] | None = None,
    progress: Callable[[Row], None] | None = None,
    kept: Callable[[Sequence[Row]], None] | None = None,
) -> list[Row]:
    """Grade every episode in `source` again and write rows and episodes beside `rows_path`.

    Void episodes stay void, unless their fault was the check's. An episode whose check fails now is void with that
    fault.

    Args:
        source: folder of the evaluation run.
        rows_path: file of the new rows.
        judge: judge, as in `EpisodeOptions`.
        judge_fingerprint: JSON value that distinguishes this judge from others, for the new fingerprint.
        check_timeout_s: time limit of a check, as in `EpisodeOptions`.
        uids: tasks to grade again; None is all.
        progress: function called with each new row.
        kept: function called once, before the first episode is graded, with the rows of an interrupted run that stay.

    Returns:
        The rows, in the order of the source's episodes.

    Raises:
        ConfigError: `source` holds no evaluation run, or the folder of the new rows holds another one.
        DomainError: a task is not registered.
    """
    source = Path(source)
    original, source_rows = load_rows(source)
    retries = {(row["uid"], row["attempt"]): row["retry"] for row in source_rows}
    chosen = [uid for uid in original["tasks"] if uids is None or uid in set(uids)]
    if not chosen:
        raise ConfigError(f"{source} has none of the tasks asked for; choose other tasks, or give none for all.")
    hashes = {uid: task_hash(uid) for uid in chosen}
    fingerprint = {**original, "tasks": hashes, "tbx": __version__, "regraded": {"judge": judge_fingerprint}}
    log = RunLog(Path(rows_path), json.loads(json.dumps(fingerprint)))
    options = EpisodeOptions(judge=judge, check_timeout_s=check_timeout_s)
    graded_before = {key for key, row in log.rows.items() if row["passed"] is not None}
    if kept is not None:
        kept([log.rows[key] for key in graded_before])
    order: dict[tuple[str, int], None] = {}
    for episode in load_episodes(source / "episodes.jsonl"):
        key = (episode.uid, episode.attempt)
        if episode.uid not in hashes:
            continue
        order[key] = None
        if key in graded_before:
            continue
        graded = regraded(episode, options)
        row = row_of(graded, original["policy"]["name"], retries.get(key, 0), hashes[episode.uid])
        log.append(row, graded)
        if progress is not None:
            progress(row)
    log.rewrite_in_order(list(order))
    return [log.rows[key] for key in order]


def regraded(episode: Episode, options: EpisodeOptions) -> Episode:
    """The episode with the report of a check made now; void when that check has a fault.

    A void episode is returned as it is, unless only its check had a fault: then it has the evidence for another one.
    """
    if episode.report is None and episode.evidence is None:
        return episode
    source = source_of(episode.uid)
    try:
        report, asked = source.grade_again(source.task(episode.uid), episode, options)
    except EnvironmentFault as fault:
        return dataclasses.replace(episode, report=None, reward=None, fault=Fault(fault.kind, str(fault)))
    usage = {**episode.usage, **asked}
    return dataclasses.replace(episode, report=report, reward=report.reward, fault=None, usage=usage)
