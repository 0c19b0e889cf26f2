"""`tbx report`, `tbx compare` and `tbx show`: the measures and transcripts of evaluation runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tbx_envs.command_line import ArgumentParser
from tbx_envs.errors import ConfigError
from tbx_envs.evaluation import report
from tbx_envs.evaluation.compare import compare_folders
from tbx_envs.evaluation.pool import read_pool
from tbx_envs.evaluation.transcripts import episode_text, load_episodes


def report_folder(arguments: Sequence[str]) -> None:
    parser = ArgumentParser("tbx report", description="The measures of an evaluation run, finished or not.")
    parser.add_argument("folder", help="output_dir of `tbx evaluate` or `tbx pool`")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    given = parser.parse_args(arguments)
    summary = report.run_summary(given.folder)
    if given.json:
        print(report.as_json(summary))
        return
    report.print_run(summary, summary["k"], title=f"policy {summary['policy']}, {given.folder}")
    pool_path = Path(given.folder) / "pool.json"
    if pool_path.is_file():
        report.print_pool(read_pool(pool_path))


def compare(arguments: Sequence[str]) -> None:
    parser = ArgumentParser("tbx compare", description="Two evaluation runs side by side, paired by task.")
    parser.add_argument("first", help="output_dir of the evaluation run to compare with")
    parser.add_argument("second", help="output_dir of the other evaluation run")
    given = parser.parse_args(arguments)
    report.print_comparison(compare_folders(given.first, given.second), (given.first, given.second))


def show(arguments: Sequence[str]) -> None:
    parser = ArgumentParser("tbx show", description="Transcripts of an evaluation run.")
    parser.add_argument("folder", help="output_dir of `tbx evaluate` or `tbx pool`")
    parser.add_argument("--uid", help="only this task")
    parser.add_argument("--attempt", type=int, help="only this attempt")
    parser.add_argument("--outcome", choices=("passed", "failed", "void"), help="only episodes with this outcome")
    parser.add_argument("--system", action="store_true", help="include the rules that the agent was given")
    given = parser.parse_args(arguments)
    show_episodes(Path(given.folder), given.uid, given.attempt, given.outcome, given.system)


def show_episodes(folder: Path, uid: str | None, attempt: int | None, outcome: str | None, system: bool) -> None:
    """Print the transcripts of an evaluation run's episodes.

    Args:
        folder: folder of the evaluation run.
        uid: only this task; None is all.
        attempt: only this attempt; None is all.
        outcome: only episodes that `passed`, `failed` or are `void`; None is all.
        system: True includes the system's messages.

    Raises:
        ConfigError: the folder has no transcripts, or none matches.
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
