"""Measures for people: tables and a progress bar on the console. Only this module defines how they look."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.compare import Comparison
from tbx_envs.evaluation.files import Row, load_rows
from tbx_envs.evaluation.pool import BANDS, Pool
from tbx_envs.evaluation.run import summarize
from tbx_envs.files import read_object
from tbx_envs.thinkingbox.dataset.guard import MARK

# Without a terminal there is a line of progress after this share of the attempts, or after so much time.
LINE_SHARE, LINE_SECONDS = 0.1, 30.0


class RunProgress:
    """A progress bar with the passes and voids so far; where the console is no terminal, a line now and then.

    Use it as a context manager and call it with each new row.

    Args:
        total: number of attempts.
        console: console to draw on; None is standard error.
        clock: seconds from any moment on.
    """

    def __init__(
        self, total: int, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("attempts", total=total)
        self._made = self._passes = self._voids = 0
        self._started = self._said_at = clock()
        self._said = 0  # attempts that the last line counted

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def keep(self, rows: Sequence[Row]) -> None:
        """Start from the rows of an interrupted run; the time that is left is estimated without them."""
        for row in rows:
            self._count(row)
        self._said = self._made
        self._progress.reset(self._task, completed=self._made, description=self._description())
        if rows and not self._console.is_terminal:
            self._say(f"{self._made} of {self._total} attempts are kept")

    def __call__(self, row: Row) -> None:
        self._count(row)
        self._progress.update(self._task, advance=1, description=self._description())
        if not self._console.is_terminal and self._is_time_for_a_line():
            self._said, self._said_at = self._made, self._clock()
            minutes, seconds = divmod(round(self._said_at - self._started), 60)
            self._say(f"{self._made} of {self._total} attempts, {self._description()}, {minutes}:{seconds:02}")

    def _count(self, row: Row) -> None:
        self._made += 1
        self._passes += row["passed"] is True
        self._voids += row["passed"] is None

    def _description(self) -> str:
        return f"{self._passes} passed" + (f", {self._voids} void" if self._voids else "")

    def _is_time_for_a_line(self) -> bool:
        return (
            self._made == self._total
            or self._made - self._said >= LINE_SHARE * self._total
            or self._clock() - self._said_at >= LINE_SECONDS
        )

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def run_summary(folder: Path | str, seed: int = 0) -> dict[str, Any]:
    """The measures of an evaluation run on disk, finished or not.

    Raises:
        ConfigError: the folder holds no evaluation run, or no row.
    """
    fingerprint, rows = load_rows(folder)
    if not rows:
        raise ConfigError(f"{folder} holds an evaluation run without any row. Resume it with `tbx evaluate`.")
    missing = len(fingerprint["tasks"]) * fingerprint["attempts"] - len(rows)
    summary = summarize(rows, fingerprint["attempts"], seed)
    return {
        "policy": fingerprint["policy"]["name"],
        "k": fingerprint["attempts"],
        **summary,
        **({MARK: True} if fingerprint["policy"].get(MARK) else {}),
        **_written_costs(Path(folder)),
        "missing": missing,
    }


def _written_costs(folder: Path) -> dict[str, Any]:
    """The costs that the finished evaluation run wrote into its summary, since rows contain no prices."""
    path = folder / "summary.json"
    to_do = "Remove it: `tbx evaluate` in the same output_dir writes it again."
    written = read_object(path, "the summary of an evaluation run", to_do=to_do) if path.is_file() else {}
    return {"costs": written["costs"]} if "costs" in written else {}


def run_table(summary: Mapping[str, Any], k: int, title: str = "") -> Table:
    """One line for each family, one for the held-out families together, one for all tasks."""
    table = _table(title)
    table.add_column("tasks of", no_wrap=True)
    for column in ("tasks", "pass@1", "95% interval", *_measures_of_k(k), "void"):
        table.add_column(column, justify="right", no_wrap=True)
    for family, measured in summary["families"].items():
        table.add_row(family, *_cells(measured, k))
    table.add_section()
    if summary["unseen_families"]["tasks"]:
        table.add_row("held-out families", *_cells(summary["unseen_families"], k))
    table.add_row("all", *_cells(summary, k), style="bold")
    return table


def _table(title: str) -> Table:
    """A table style that fits into eighty columns."""
    return Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def _measures_of_k(k: int) -> list[str]:
    """The columns beyond pass@1; none with one attempt at each task."""
    return [f"pass@{k}", f"pass^{k}", f"{k}/{k}"] if k > 1 else []


def _cells(measured: Mapping[str, Any], k: int) -> list[str]:
    of_k = [
        share(measured[f"pass_at_{k}"]),
        share(measured[f"pass_hat_{k}"]),
        str(measured[f"observed_{k}_of_{k}"]),
    ]
    return [
        str(measured["tasks"]),
        share(measured["pass_at_1"]),
        interval(measured["pass_at_1_interval"]),
        *(of_k if k > 1 else []),
        str(measured["voids"]),
    ]


def run_notes(summary: Mapping[str, Any], k: int) -> list[str]:
    """What a reader of the table must also know: voids, tasks with too few attempts, missing rows."""
    notes = []
    if summary.get(MARK):
        notes.append("The policy was trained on tasks of the benchmark: this says nothing about other tasks.")
    if k > 1:
        plug_in = share(summary[f"pass_hat_{k}_plug_in"])
        notes.append(f"pass^{k} is unbiased; its plug-in (c/n)^{k} is {plug_in}.")
    if summary["voids"] or summary["retries"]:
        kinds = ", ".join(f"{kind} {number}" for kind, number in summary["void_kinds"].items()) or "none remained"
        notes.append(f"{summary['voids']} void attempts ({kinds}), {summary['retries']} repeated after a fault.")
    if summary.get("user_silences"):
        notes.append(
            f"The simulated user's model said nothing in {summary['user_silences']} of {summary['user_answers']} "
            f'answers; "I don\'t know." was said for it. Episodes with too many of these are void.'
        )
    for uid, reason in summary.get("set_aside", {}).items():
        notes.append(f"Set aside, since it cannot be run: {uid}: {reason}")
    if summary["tasks_short"]:
        least, most = summary["attempts_per_task"]
        notes.append(
            f"{summary['tasks_short']} tasks have fewer than {k} clean attempts (from {least} to {most}); "
            f"they count in pass@1, and not in pass@{k}, pass^{k} and {k}/{k}."
        )
    if summary.get("costs"):
        notes.append(_cost_note(summary["costs"], k))
    if summary.get("tasks_unknown"):
        notes.append(
            f"{summary['tasks_unknown']} tasks are not known here, so the held-out families are without them. Register "
            f"their dataset (TBX_DATASETS)."
        )
    if summary.get("missing"):
        notes.append(f"{summary['missing']} attempts have not been made yet: the evaluation run is unfinished.")
    return notes


def _cost_note(costs: Mapping[str, Any], k: int) -> str:
    roles = ", ".join(f"{role} {_money(of_role['cost'])}" for role, of_role in costs["roles"].items())
    return (
        f"Cost of the run, voids included: {_money(costs['total'])} ({roles}); for each success "
        f"{_money(costs['per_success'])}, for each task with {k}/{k} {_money(costs['per_reliable_task'])}. In the "
        f"currency of the prices given."
    )


def _money(amount: float | None) -> str:
    return "unknown" if amount is None else f"{amount:.4g}"


def print_run(summary: Mapping[str, Any], k: int, title: str = "", console: Console | None = None) -> None:
    """The table and its notes."""
    console = console or Console()
    console.print(run_table(summary, k, title))
    for note in run_notes(summary, k):
        console.print(note)


def comparison_table(comparison: Comparison) -> Table:
    """Both evaluation runs and their difference, over the tasks they share."""
    k = comparison.k
    first, second = comparison.measures
    table = _table(f"{first['tasks']} tasks in both")
    table.add_column("measure")
    for name in ("first", "second", "difference"):
        table.add_column(name, justify="right")
    table.add_row(
        "pass@1",
        share(first["pass_at_1"]),
        share(second["pass_at_1"]),
        f"{100 * comparison.difference:+.1f} points {interval(comparison.interval, signed=True)}",
    )
    for label, key in ((f"pass@{k}", f"pass_at_{k}"), (f"pass^{k}", f"pass_hat_{k}")):
        table.add_row(label, share(first[key]), share(second[key]), _points(first[key], second[key]))
    observed = [measured[f"observed_{k}_of_{k}"] for measured in (first, second)]
    table.add_row(f"{k}/{k}", *("-" if count is None else str(count) for count in observed), _more(*observed))
    voids, made = ([of(measured) for measured in (first, second)] for of in (_voids, _made))
    cells = (f"{void} of {total}" for void, total in zip(voids, made, strict=True))
    table.add_row("void", *cells, _more(*voids) if made[0] == made[1] else "-")
    return table


def _voids(measured: Mapping[str, Any]) -> int:
    return int(measured["voids"])


def _made(measured: Mapping[str, Any]) -> int:
    return int(measured["attempts"]) + _voids(measured)


def _more(first: int | None, second: int | None) -> str:
    """A difference of two counts; a dash where they do not count the same thing."""
    return "-" if first is None or second is None else f"{second - first:+d}"


def print_comparison(comparison: Comparison, names: tuple[str, str], console: Console | None = None) -> None:
    """The table, and the number of tasks it leaves out."""
    console = console or Console()
    console.print(f"first: {names[0]}\nsecond: {names[1]}", soft_wrap=True)
    console.print(comparison_table(comparison))
    console.print("The interval is a 95% bootstrap over tasks, both runs' attempts at a task drawn together.")
    k = comparison.k
    if any(measured[f"observed_{k}_of_{k}"] is None for measured in comparison.measures):
        console.print(
            f"{k}/{k} is only counted in a run of {k} attempts at each task; pass^{k} compares runs of any size."
        )
    if comparison.short:
        console.print(
            f"{comparison.short} tasks have fewer than {k} clean attempts in one of the runs: only pass@1 has them."
        )
    if comparison.only_first or comparison.only_second:
        console.print(
            f"Left out: {comparison.only_first} tasks only in the first, {comparison.only_second} only in the second."
        )


def print_pool(pool: Pool, console: Console | None = None) -> None:
    """How many tasks are in each band, and which bands were kept."""
    console = console or Console()
    table = _table(f"{len(pool.uids)} of {len(pool.candidates)} tasks in the pool")
    for column in ("band", "pass rate", "tasks", "kept"):
        table.add_column(column, justify="left" if column in ("band", "kept") else "right")
    low = 0.0
    for band, high in BANDS.items():
        number = sum(task.band == band for task in pool.candidates)
        table.add_row(band, f"{low:.2f} to {high:.2f}", str(number), "yes" if band in pool.bands else "no")
        low = high
    unknown = sum(task.band == "unknown" for task in pool.candidates)
    if unknown:
        table.add_row("unknown", "no clean attempt", str(unknown), "no")
    console.print(table)
    if pool.trained_on_benchmark:
        console.print(f"It contains tasks of the benchmark: whatever is trained on it is marked {MARK}.")


def share(value: float | None) -> str:
    """A share in percent; a dash for None."""
    return "-" if value is None else f"{100 * value:.1f}%"


def interval(ends: Sequence[float] | None, *, signed: bool = False) -> str:
    """An interval of shares in percent; a dash for None."""
    if ends is None:
        return "-"
    low, high = (f"{100 * end:+.1f}" if signed else f"{100 * end:.1f}" for end in ends)
    return f"[{low}, {high}]"


def _points(first: float | None, second: float | None) -> str:
    return "-" if first is None or second is None else f"{100 * (second - first):+.1f} points"


def as_json(summary: Mapping[str, Any]) -> str:
    """The summary as it is written to `summary.json`."""
    return json.dumps(summary, indent=2)
