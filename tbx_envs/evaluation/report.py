"""Measures for people: tables and a progress bar. Only this module defines how they look."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from tabulate import SEPARATING_LINE, DataRow, Line, TableFormat, tabulate
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.compare import Comparison
from tbx_envs.evaluation.files import Row, load_rows
from tbx_envs.evaluation.pool import BANDS, Pool
from tbx_envs.evaluation.run import summarize
from tbx_envs.files import read_object
from tbx_envs.rendering import visible_line
from tbx_envs.thinkingbox.dataset.guard import MARK

# Without a terminal there is a line of progress after this share of the attempts, or after so much time.
LINE_SHARE, LINE_SECONDS = 0.1, 30.0
_ROW = DataRow("", "  ", "")
_STYLE = TableFormat(
    None, Line("", "-", "  ", ""), None, None, headerrow=_ROW, datarow=_ROW, padding=0, with_header_hide=None
)


class Bar(tqdm):
    """A progress bar; nothing where the stream is no terminal. Close it, or use it as a context manager.

    Args:
        description: words in front of the bar.
        total: number of steps.
        file: stream to draw on; None is standard output.
        kept: steps that were made before; the time that is left is estimated without them.
    """

    monitor_interval = 0  # its thread would live on, and environments fork

    def __init__(self, description: str, total: int, file: TextIO | None = None, *, kept: int = 0) -> None:
        self._stream = file or sys.stdout
        has_size = _has_size(self._stream)
        super().__init__(
            desc=description,
            total=total,
            initial=kept,
            file=self._stream,
            disable=not _is_terminal(self._stream),
            bar_format="{desc} {bar} {n_fmt}/{total_fmt} {elapsed} {remaining}",
            miniters=1,  # else a slow step after many fast ones is not drawn
            dynamic_ncols=has_size,
            ncols=None if has_size else 80,  # tqdm draws nothing on a terminal of size 0, as programs make them
            nrows=None if has_size else 24,
        )

    def step(self, description: str | None = None) -> None:
        """One more step is made; with new words, if given."""
        if description is not None:
            self.set_description_str(description, refresh=False)
        self.update()

    def say(self, words: str) -> None:
        """Prints a line above the bar."""
        if self.disable:
            print(words, file=self._stream, flush=True)  # a log is read while the run goes on
        else:
            self.write(words, file=self._stream)


class RunProgress:
    """A progress bar with the passes and voids so far; where the stream is no terminal, a line now and then.

    While the bar is there, what others print on the terminal (warnings) stands above it.

    Use it as a context manager and call it with each new row.

    Args:
        total: number of attempts.
        file: stream to draw on; None is standard error.
        clock: seconds from any moment on.
    """

    def __init__(self, total: int, file: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._file = file or sys.stderr
        self._clock = clock
        self._bar: Bar | None = None  # without a terminal, or before it is entered
        self._redirected = ExitStack()
        self._made = self._passes = self._voids = 0
        self._started = self._said_at = clock()
        self._said = 0  # attempts that the last line counted

    def __enter__(self) -> RunProgress:
        if _is_terminal(self._file):
            self._bar = Bar("attempts", self._total, self._file)
            above: Any = DummyTqdmFile(self._file)
            for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
                if _is_terminal(stream):
                    self._redirected.enter_context(redirect(above))
        return self

    def __exit__(self, *exception: object) -> None:
        self._redirected.close()
        if self._bar is not None:
            self._bar.close()

    def keep(self, rows: Sequence[Row]) -> None:
        """Start from the rows of an interrupted run; the time that is left is estimated without them."""
        for row in rows:
            self._count(row)
        self._said = self._made
        if self._bar is not None:
            self._bar.leave = False
            self._bar.close()
            self._bar = Bar(self._description(), self._total, self._file, kept=self._made)
        elif rows:
            self._say(f"{self._made} of {self._total} attempts are kept")

    def __call__(self, row: Row) -> None:
        self._count(row)
        if self._bar is not None:
            self._bar.step(self._description())
        elif self._is_time_for_a_line():
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
        if self._file is not None:
            print(line, file=self._file, flush=True)


def _is_terminal(stream: TextIO | None) -> bool:
    """False also where Python has no such stream, since the descriptor was closed when it started."""
    return stream is not None and stream.isatty()


def _has_size(stream: TextIO | None) -> bool:
    """True if it is a terminal that says how wide it is."""
    try:
        return stream is not None and os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # no terminal, or no descriptor
        return False


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


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    totals: Sequence[Sequence[str]] = (),
    *,
    left: Collection[str],
    title: str = "",
) -> str:
    """A table with a line under its headings and a gap before its totals.

    Args:
        headings: headings of the columns.
        rows: texts of the cells.
        totals: rows at the end, after a gap.
        left: headings of the columns that are aligned to the left; the others are numbers.
        title: line above the table.
    """
    gap = [[""] * len(headings)] if totals else []
    # The headings are a row, since tabulate makes columns wider than their headings.
    text = tabulate(
        [headings, SEPARATING_LINE, *([*map(visible_line, row)] for row in (*rows, *gap, *totals))],
        tablefmt=_STYLE,
        colalign=["left" if heading in left else "right" for heading in headings],
        disable_numparse=True,  # cells are shown as they are
    )
    return "\n".join(line.rstrip() for line in ([title] if title else []) + text.splitlines())


def run_table(summary: Mapping[str, Any], k: int, title: str = "") -> str:
    """One line for each family, one for the held-out families together, one for all tasks."""
    unseen = summary["unseen_families"]
    return table(
        ("tasks of", "tasks", "pass@1", "95% interval", *_measures_of_k(k), "void"),
        [(family, *_cells(measured, k)) for family, measured in summary["families"].items()],
        [*([("held-out families", *_cells(unseen, k))] if unseen["tasks"] else []), ("all", *_cells(summary, k))],
        left=("tasks of",),
        title=title,
    )


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
    without = summary["tasks_without_clean_attempts"]
    if without:
        notes.append(f"{without} tasks have no clean attempt and count in no measure.")
    if summary["tasks_short"] > without:
        least, most = summary["attempts_per_task"]
        notes.append(
            f"{summary['tasks_short'] - without} tasks have fewer than {k} clean attempts (from {least} to {most}); "
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


def print_run(summary: Mapping[str, Any], k: int, title: str = "", file: TextIO | None = None) -> None:
    """The table and its notes, on standard output or `file`."""
    print(run_table(summary, k, title), *run_notes(summary, k), sep="\n", file=file)


def comparison_table(comparison: Comparison) -> str:
    """Both evaluation runs and their difference, over the tasks they share."""
    k = comparison.k
    first, second = comparison.measures
    difference = f"{100 * comparison.difference:+.1f} points {interval(comparison.interval, signed=True)}"
    rows = [("pass@1", share(first["pass_at_1"]), share(second["pass_at_1"]), difference)]
    for label, key in ((f"pass@{k}", f"pass_at_{k}"), (f"pass^{k}", f"pass_hat_{k}")):
        rows.append((label, share(first[key]), share(second[key]), _points(first[key], second[key])))
    observed = [measured[f"observed_{k}_of_{k}"] for measured in (first, second)]
    shown = ["-" if count is None else str(count) for count in observed]
    rows.append((f"{k}/{k}", shown[0], shown[1], _more(*observed)))
    voids, made = ([of(measured) for measured in (first, second)] for of in (_voids, _made))
    shown = [f"{void} of {total}" for void, total in zip(voids, made, strict=True)]
    rows.append(("void", shown[0], shown[1], _more(*voids) if made[0] == made[1] else "-"))
    headings = ("measure", "first", "second", "difference")
    return table(headings, rows, left=("measure",), title=f"{first['tasks']} tasks in both")


def _voids(measured: Mapping[str, Any]) -> int:
    return int(measured["voids"])


def _made(measured: Mapping[str, Any]) -> int:
    return int(measured["attempts"]) + _voids(measured)


def _more(first: int | None, second: int | None) -> str:
    """A difference of two counts; a dash where they do not count the same thing."""
    return "-" if first is None or second is None else f"{second - first:+d}"


def print_comparison(comparison: Comparison, names: tuple[str, str], file: TextIO | None = None) -> None:
    """The table, and the number of tasks it leaves out; on standard output or `file`."""
    lines = [
        f"first: {names[0]}",
        f"second: {names[1]}",
        comparison_table(comparison),
        "The interval is a 95% bootstrap over tasks, both runs' attempts at a task drawn together.",
    ]
    k = comparison.k
    if any(measured[f"observed_{k}_of_{k}"] is None for measured in comparison.measures):
        lines.append(
            f"{k}/{k} is only counted in a run of {k} attempts at each task; pass^{k} compares runs of any size."
        )
    if comparison.short:
        lines.append(
            f"{comparison.short} tasks have fewer than {k} clean attempts in one of the runs: only pass@1 has them."
        )
    if comparison.only_first or comparison.only_second:
        lines.append(
            f"Left out: {comparison.only_first} tasks only in the first, {comparison.only_second} only in the second."
        )
    print(*lines, sep="\n", file=file)


def print_pool(pool: Pool, file: TextIO | None = None) -> None:
    """How many tasks are in each band, and which bands were kept; on standard output or `file`."""
    rows, low = [], 0.0
    for band, high in BANDS.items():
        number = sum(task.band == band for task in pool.candidates)
        rows.append((band, f"{low:.2f} to {high:.2f}", str(number), "yes" if band in pool.bands else "no"))
        low = high
    unknown = sum(task.band == "unknown" for task in pool.candidates)
    if unknown:
        rows.append(("unknown", "no clean attempt", str(unknown), "no"))
    title = f"{len(pool.uids)} of {len(pool.candidates)} tasks in the pool"
    print(table(("band", "pass rate", "tasks", "kept"), rows, left=("band", "kept"), title=title), file=file)
    if pool.trained_on_benchmark:
        print(f"It contains tasks of the benchmark: whatever is trained on it is marked {MARK}.", file=file)


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
