import io
import json
import sys

import numpy as np
import pytest

from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.compare import compare, compare_folders
from tbx_envs.evaluation.metrics import Tally
from tbx_envs.evaluation.pool import select_pool
from tbx_envs.evaluation.report import (
    RunProgress,
    print_comparison,
    print_pool,
    print_run,
    run_notes,
    run_summary,
    share,
)
from tbx_envs.evaluation.run import run, summarize
from tbx_envs.evaluation.task_lists import select_tasks
from tbx_envs.testing.agents import PrescribedAgent
from tbx_envs.thinkingbox import dataset as datasets

UIDS = (*select_tasks("train")[:3], select_tasks("heldout")[-1])


def run_in(folder, outcome, uids=UIDS, attempts=4, seed=0):
    return run(
        PrescribedAgent(outcome),
        uids,
        attempts=attempts,
        seed=seed,
        rows_path=folder / "rows.jsonl",
        max_void_retries=0,
    )


def printed(show, *arguments):
    text = io.StringIO()
    show(*arguments, file=text)
    return text.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def tally(number, passes, attempts=4, voids=0):
    return Tally(f"a/f/{number:03d}", "f", passes, attempts, voids)


def test_the_difference_is_the_mean_of_the_paired_tasks():
    found = compare([tally(0, 1), tally(1, 4), tally(7, 4)], [tally(1, 4), tally(0, 3), tally(9, 0)], 4)
    assert found.difference == pytest.approx((0.5 + 0.0) / 2)
    assert (found.only_first, found.only_second) == (1, 1)
    assert [measured["pass_at_1"] for measured in found.measures] == [0.625, 0.875]
    assert [measured["observed_4_of_4"] for measured in found.measures] == [1, 1]


def test_pairing_makes_the_interval_of_a_constant_gain_narrow():
    # Tasks differ a lot from each other; every one gains exactly a quarter.
    passes = np.random.default_rng(0).integers(0, 4, 60)
    found = compare(
        [tally(i, int(c)) for i, c in enumerate(passes)], [tally(i, int(c) + 1) for i, c in enumerate(passes)], 4
    )
    assert found.difference == pytest.approx(0.25)
    assert found.interval == pytest.approx((0.25, 0.25))


def test_tasks_that_are_void_on_one_side_are_left_out_and_counted():
    found = compare([tally(0, 2), tally(1, 0, attempts=0, voids=4)], [tally(0, 2), tally(1, 4)], 4)
    assert (found.difference, found.only_second) == (0.0, 1)


def test_runs_without_a_common_task_cannot_be_compared():
    with pytest.raises(ConfigError, match="no task has clean attempts in both"):
        compare([tally(0, 1)], [tally(1, 1)], 4)


def test_eight_of_eight_is_not_counted_in_a_run_of_twenty_attempts():
    # Task 0 always passes; task 1 passes 12 of 20, and by chance 8 of the 8 in the other run.
    twenty = [tally(0, 20, 20), tally(1, 12, 20)]
    found = compare(twenty, [tally(0, 8, 8), tally(1, 8, 8)], 8)
    first, second = found.measures
    assert (first["observed_8_of_8"], second["observed_8_of_8"]) == (None, 2)
    # By hand: C(12, 8) / C(20, 8) = 495 / 125970.
    assert first["pass_hat_8"] == pytest.approx((1 + 495 / 125970) / 2) and second["pass_hat_8"] == 1.0
    lines = printed(print_comparison, found, ("a", "b")).splitlines()
    assert ["8/8", "-", "2", "-"] in [line.split() for line in lines]
    assert ["void", "0", "of", "40", "0", "of", "16", "-"] in [line.split() for line in lines]
    assert any("pass^8 compares runs of any size" in line for line in lines)
    same = printed(print_comparison, compare(twenty, twenty, 20), ("a", "b"))
    assert ["20/20", "1", "1", "+0"] in [line.split() for line in same.splitlines()]


def test_measures_of_k_compare_the_same_tasks():
    short = [tally(0, 4), tally(1, 0, attempts=3, voids=1)]
    found = compare([tally(0, 4), tally(1, 0)], short, 4)
    assert [measured["pass_at_4"] for measured in found.measures] == [1.0, 1.0]  # task 1 is in neither
    assert [measured["pass_at_1"] for measured in found.measures] == [0.5, 0.5] and found.short == 1
    assert "1 tasks have fewer than 4 clean attempts" in printed(print_comparison, found, ("a", "b"))


def test_folders_are_compared_by_their_rows(tmp_path):
    run_in(tmp_path / "before", lambda uid, attempt, tries: "pass" if attempt == 0 else "fail")
    run_in(tmp_path / "after", lambda uid, attempt, tries: "fail" if attempt == 0 else "pass", uids=UIDS[1:])
    found = compare_folders(tmp_path / "before", tmp_path / "after")
    assert found.difference == pytest.approx(0.5)
    text = printed(print_comparison, found, ("before", "after"))
    assert "+50.0 points [+50.0, +50.0]" in text
    assert "1 tasks only in the first" in text


def test_a_task_that_changed_between_two_runs_is_refused(tmp_path):
    for name in ("a", "b"):
        run_in(tmp_path / name, lambda uid, attempt, tries: "pass")
    header = json.loads((tmp_path / "b" / "evaluation.json").read_text())
    header["tasks"][UIDS[0]] = "0" * 64
    (tmp_path / "b" / "evaluation.json").write_text(json.dumps(header))
    with pytest.raises(ConfigError, match=f"such as {UIDS[0]}"):
        compare_folders(tmp_path / "a", tmp_path / "b")


def test_the_report_shows_every_family_the_held_out_ones_and_all(tmp_path):
    run_in(tmp_path, lambda uid, attempt, tries: "void" if (uid, attempt) == (UIDS[0], 0) else "pass")
    summary = run_summary(tmp_path)
    text = printed(print_run, summary, 4)
    for family in {uid.split("/")[1] for uid in UIDS}:
        assert family in text
    lines = text.splitlines()
    assert lines[0].split() == ["tasks", "of", "tasks", "pass@1", "95%", "interval", "pass@4", "pass^4", "4/4", "void"]
    assert set(lines[1]) == {"-", " "}
    gap = lines.index("")
    assert [line.split("  ")[0] for line in lines[gap + 1 : gap + 3]] == ["held-out families", "all"]
    assert {len(line) for line in lines[: gap + 3]} == {0, 75}  # numbers end where their headings end
    assert "1 void attempts (tool 1)" in text
    assert "1 tasks have fewer than 4 clean attempts (from 3 to 4)" in text
    assert "3/4" not in text
    assert summary["observed_4_of_4"] == 3


def test_a_task_without_a_clean_attempt_is_told_apart_from_one_with_few(tmp_path):
    rows = run_in(tmp_path, lambda uid, attempt, tries: "void" if uid == UIDS[0] else "pass", UIDS[:2], attempts=1)
    assert run_notes(summarize(rows, 1), 1) == [
        "1 void attempts (tool 1), 0 repeated after a fault.",
        "1 tasks have no clean attempt and count in no measure.",
    ]


def test_the_report_says_how_often_a_served_user_said_nothing(tmp_path):
    rows = run_in(tmp_path, lambda uid, attempt, tries: "pass", UIDS[:1], attempts=2)
    assert "user_silences" not in summarize(rows, 2)
    for row, silences in zip(rows, (2, 1), strict=True):
        row["usage"] |= {"user_silences": silences, "user_turns": 5}
    (note,) = [note for note in run_notes(summarize(rows, 2), 2) if "said nothing" in note]
    assert "in 3 of 10 answers" in note


def test_an_unfinished_run_is_reported_as_far_as_it_goes(tmp_path):
    run_in(tmp_path, lambda uid, attempt, tries: "pass")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:5]) + '{"uid": "cl')
    summary = run_summary(tmp_path)
    assert (summary["attempts"], summary["missing"]) == (5, 11)
    assert "the evaluation run is unfinished" in printed(print_run, summary, 4)


def test_a_run_is_reported_where_its_dataset_is_not_registered(bikeshop, tmp_path, monkeypatch):
    uids = ("rentals_main.py:test_end_rental", "front_desk.py:test_refund_is_told")
    run_in(tmp_path, lambda uid, attempt, tries: "pass", uids=uids)
    summary = run_summary(tmp_path)
    assert summary["unseen_families"]["tasks"] == 1  # of the benchmark
    for name in ("_registered", "_owners"):
        monkeypatch.setattr(datasets, name, {})
    assert run_summary(tmp_path) == summary
    # Rows of an earlier version do not say which families are held out.
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        del row["heldout_family"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    old = run_summary(tmp_path)
    assert (old["tasks"], old["unseen_families"]["tasks"], old["tasks_unknown"]) == (2, 0, 2)
    assert "2 tasks are not known here" in printed(print_run, old, 4)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no evaluation run"):
        run_summary(tmp_path)


def test_a_line_of_rows_that_is_no_json_is_named(tmp_path):
    run_in(tmp_path, lambda uid, attempt, tries: "pass")
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("oops\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl line 17 is not JSON"):
        run_summary(tmp_path)


def test_the_pool_is_shown_by_band():
    tallies = [Tally(uid, "f", passes, 8) for uid, passes in zip(UIDS[:3], (0, 4, 8), strict=True)]
    made = select_pool(tallies, bands=("medium",), policy={"name": "p"}, seed=0)
    text = printed(print_pool, made)
    assert "1 of 3 tasks in the pool" in text
    assert "0.40 to 0.60" in text


def test_progress_without_a_terminal_is_a_line_for_each_tenth_and_after_half_a_minute():
    text, now = io.StringIO(), [0.0]
    with RunProgress(40, text, clock=lambda: now[0]) as progress:
        for number in range(40):
            now[0] += 61.0 if number == 9 else 1.0
            progress({"passed": None if number == 1 else True})
    lines = text.getvalue().splitlines()
    assert lines[0] == "4 of 40 attempts, 3 passed, 1 void, 0:04"
    counts = [int(line.split()[0]) for line in lines]
    assert counts == [4, 8, 10, 14, 18, 22, 26, 30, 34, 38, 40]
    assert lines[-1] == "40 of 40 attempts, 39 passed, 1 void, 1:40"


def test_the_progress_of_a_resumed_run_starts_at_what_was_kept_and_ends_at_its_total():
    on_terminal, lines = Terminal(), io.StringIO()
    for file in (on_terminal, lines):
        with RunProgress(5, file) as progress:
            progress.keep([{"passed": True}, {"passed": False}, {"passed": True}])
            progress({"passed": True})
            progress({"passed": False})
    assert "5/5" in on_terminal.getvalue() and "3 passed" in on_terminal.getvalue()
    assert "3/5 00:00 ?" in on_terminal.getvalue()  # what was kept says nothing about the time that is left
    assert lines.getvalue().splitlines()[0] == "3 of 5 attempts are kept"
    assert lines.getvalue().splitlines()[-1].startswith("5 of 5 attempts, 3 passed, 0:0")


def test_progress_counts_passes_and_voids_on_a_terminal_below_what_others_print(monkeypatch):
    text = Terminal()
    monkeypatch.setattr("sys.stderr", text)
    with RunProgress(3) as progress:
        for passed in (True, None, False):
            progress({"passed": passed})
            print("a warning", file=sys.stderr)
    assert sys.stderr is text
    # Each stands on a line of its own: the bar in front of it was wiped out.
    assert text.getvalue().count("\ra warning\n") == 3
    assert "1 passed, 1 void" in text.getvalue()
    assert "3/3" in text.getvalue()


def test_a_missing_share_is_a_dash_and_not_a_zero():
    assert share(None) == "-"
    assert share(0.0) == "0.0%"
