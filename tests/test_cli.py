"""Plain subcommands run in this process; Hydra's programs in processes of their own, since Hydra has global
state."""

import errno
import io
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tbx_envs.commands import cli
from tbx_envs.commands.cli import commands, main
from tbx_envs.evaluation.task_lists import select_tasks
from tbx_envs.version import __version__

UID = select_tasks("train")[0]


@pytest.fixture(scope="module")
def warm():
    """A process that runs `tbx` in children (`warm_tbx.py`)."""
    program = pathlib.Path(__file__).with_name("warm_tbx.py")
    with subprocess.Popen(
        [sys.executable, "-P", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as made:
        yield made
        made.stdin.close()


@pytest.fixture
def tbx(warm, tmp_path_factory):
    """Runs `tbx` with these arguments in that folder."""

    def run(*arguments, cwd):
        told = tmp_path_factory.mktemp("told")
        files = {name: str(told / name) for name in ("stdout", "stderr")}
        warm.stdin.write(json.dumps({"arguments": arguments, "cwd": str(cwd), **files}) + "\n")
        warm.stdin.flush()
        status = int(warm.stdout.readline())
        texts = {name: pathlib.Path(path).read_text() for name, path in files.items()}
        return subprocess.CompletedProcess(["tbx", *arguments], status, **texts)

    return run


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """A small evaluation run of the scripted agent with errors."""
    folder = tmp_path_factory.mktemp("cli") / "scripted"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tbx_envs.commands.cli", "evaluate", "policy=scripted", "error_rate=1.0"),
            *("tasks=clinic/*/000", "attempts=3", f"output_dir={folder}"),
        ],
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return folder, done


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in commands())


def test_no_command_is_an_error_that_shows_the_help(capsys):
    assert main([]) == 2
    assert "usage: tbx COMMAND" in capsys.readouterr().out


def test_an_unknown_command_is_answered_with_a_near_one(capsys):
    assert main(["evalaute"]) == 2
    assert "unknown command 'evalaute'. Did you mean 'evaluate'?" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_tasks_are_listed_one_a_line(capsys):
    assert main(["tasks", "list", "heldout"]) == 0
    assert capsys.readouterr().out.split() == list(select_tasks("heldout"))
    assert main(["tasks", "list", "--long", UID]) == 0
    assert capsys.readouterr().out.startswith(f"{UID}  train    ")


def test_a_task_is_shown_with_what_is_expected(capsys):
    assert main(["tasks", "show", UID]) == 0
    text = capsys.readouterr().out
    assert "ThinkingBox/clinic." in text
    assert "expected calls:" in text


def test_errors_of_ours_are_one_message_and_exit_code_two(capsys):
    assert main(["tasks", "show", "clinic/nothing/000"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("DomainError: unknown task 'clinic/nothing/000'")
    assert "Traceback" not in told


def test_the_traceback_is_shown_on_request(monkeypatch):
    from tbx_envs.errors import DomainError

    monkeypatch.setenv("TBX_TRACEBACK", "1")
    with pytest.raises(DomainError):
        main(["tasks", "show", "clinic/nothing/000"])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "kept/rows.jsonl"),
            "kept/rows.jsonl cannot be read or",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "a file, cannot be read or written: No space left on dev"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_message(error, told, monkeypatch, capsys):
    def fail(*given):
        raise error

    monkeypatch.setattr(type(commands()["report"]), "run", fail)
    assert main(["report", "kept"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("StorageError: ") and told in said and said.count("\n") == 1
    monkeypatch.setenv("TBX_TRACEBACK", "1")
    with pytest.raises(OSError):
        main(["report", "kept"])


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("arguments", [["--help"], ["tasks", "list"]])
def test_output_that_no_one_reads_is_no_error_and_output_without_room_is_told(arguments, monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    for descriptor, code in ((writing, 0), (os.open("/dev/full", os.O_WRONLY), 2)):
        with open(descriptor, "w") as output:
            monkeypatch.setattr(sys, "stdout", output)
            assert main(arguments) == code
    monkeypatch.setattr(sys, "stdout", None)  # closed when Python started
    assert main(arguments) == 0
    assert "No space left on device" in capsys.readouterr().err


def test_a_name_that_the_terminal_cannot_show_is_shown_escaped(monkeypatch):
    with io.TextIOWrapper(io.BytesIO(), "ascii") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["tasks"]) == 2
        print("b\u00fcro\udcff", file=output, flush=True)
        assert output.buffer.getvalue() == rb"b\xfcro\udcff" + b"\n"


@pytest.mark.parametrize(("name", "resumes"), [("evaluate", True), ("train", True), ("play", False), ("sft", False)])
def test_an_interruption_says_how_to_resume_what_can_be(name, resumes, monkeypatch, capsys):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(commands()[name]), "run", interrupted)
    assert main([name]) == 130
    said = capsys.readouterr().err
    assert said.startswith("interrupted") and ("resumes from here" in said) == resumes


def test_evaluate_writes_rows_summary_transcripts_and_where_they_came_from(scripted):
    folder, done = scripted
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * len(select_tasks("clinic/*/000"))
    for row in rows:
        assert {"uid", "attempt", "passed", "reward", "fault", "finish_reason"} <= row.keys()
    summary = json.loads((folder / "summary.json").read_text())
    share = sum(row["passed"] for row in rows) / len(rows)
    assert summary["pass_at_1"] == pytest.approx(share)
    assert 0.0 < share < 1.0
    assert len((folder / "episodes.jsonl").read_text().splitlines()) == len(rows)
    run = json.loads((folder / "run.json").read_text())
    assert run["config"]["policy"] == "scripted"
    assert run["config"]["output_dir"] == str(folder)
    assert run["libraries"]["numpy"]
    assert "held-out families" in done.stdout


def test_report_shows_what_evaluate_wrote(scripted, capsys):
    folder, _ = scripted
    assert main(["report", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    written = json.loads((folder / "summary.json").read_text())
    assert {key: shown[key] for key in written if key != "seed"} == {k: v for k, v in written.items() if k != "seed"}
    assert main(["report", str(folder)]) == 0
    assert "pass@1" in capsys.readouterr().out


def test_compare_with_itself_finds_no_difference(scripted, capsys):
    folder, _ = scripted
    assert main(["compare", str(folder), str(folder)]) == 0
    assert "+0.0 points [+0.0, +0.0]" in capsys.readouterr().out


def test_show_picks_transcripts(scripted, capsys):
    folder, _ = scripted
    assert main(["show", str(folder), "--uid", "clinic/cancel_visit/000", "--attempt", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("clinic/cancel_visit/000, attempt 1, seed ")
    assert text.count(", attempt ") == 1
    assert main(["show", str(folder), "--outcome", "void"]) == 2
    assert "none of" in capsys.readouterr().err


@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_sweep_gives_every_run_its_own_folder_wherever_its_option_stands(tbx, tmp_path, place):
    arguments = ["policy=oracle,idle", f"tasks={UID}", "attempts=1", f"output_dir={tmp_path}/sweep"]
    arguments.insert(place, "-m")
    done = tbx("evaluate", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    measured = [json.loads((tmp_path / "sweep" / n / "summary.json").read_text()) for n in "01"]
    assert [(summary["policy"], summary["pass_at_1"]) for summary in measured] == [("oracle", 1.0), ("idle", 0.0)]


def test_pool_freezes_the_tasks_of_the_wanted_bands(tbx, tmp_path):
    arguments = ("pool", "policy=scripted", f"tasks={UID}", "attempts=4", f"output_dir={tmp_path}/pool")
    assert tbx(*arguments, "bands=[too_easy]", cwd=tmp_path).returncode == 0
    pool = json.loads((tmp_path / "pool" / "pool.json").read_text())
    assert [(task["uid"], task["band"], task["kept"]) for task in pool["tasks"]] == [(UID, "too_easy", True)]
    records = [tmp_path / "pool" / name for name in ("run.json", ".hydra/overrides.yaml", ".hydra/config.yaml")]
    before = [path.read_text() for path in records]
    again = tbx(*arguments, "bands=[easy,too_easy]", cwd=tmp_path)
    assert again.returncode == 2
    assert "holds another pool" in again.stderr
    assert [path.read_text() for path in records] == before and "bands=[too_easy]" in before[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["policy=orcale"], "Did you mean 'oracle'?"),
        (["policy=oracle", "tasks=heldot"], "Did you mean 'heldout'?"),
        (["policy=oracle", "attempts=0"], "attempts: Input should be greater than 0"),
        (["polcy=oracle"], "there is no key 'polcy'. Did you mean 'policy'?"),
        (["-m", "policy=orcale"], "Did you mean 'oracle'?"),
        (["policy=oracle", "tasks=heldot", "output_dir=there/a"], "Did you mean 'heldout'?"),
        (["policy=oracle", "output_dir="], "output_dir= names no folder."),
        (
            ["agent=endpoint", "output_dir=runs/é=1"],
            "agent.endpoint.base_url, agent.endpoint.model missing. Add agent.",
        ),
        (["policy=oracle", "output_dir=/dev/null/a"], "StorageError: /dev/null/a cannot be read or written: Not a dir"),
    ],
)
def test_a_misspelt_run_is_told_what_is_wrong_ends_with_two_and_leaves_nothing(tbx, tmp_path, arguments, told):
    done = tbx("evaluate", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_looking_at_tasks_and_evaluating_without_a_model_import_no_jax(tmp_path):
    code = (
        f"import sys; from tbx_envs.commands.cli import main; sys.stdout = sys.stderr\nmain(['tasks', 'list']); "
        f"main(['evaluate', 'policy=oracle', 'tasks={UID}', 'attempts=1', "
        f"'output_dir={tmp_path}/o'])\nprint([m for m in ('jax', 'flax', 'transformers', 'torch') if m in "
        f"sys.modules], file=sys.__stdout__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_module_that_no_extra_installs_is_not_explained_away(monkeypatch):
    class Broken:
        summary = ""

        def run(self, arguments):
            raise ModuleNotFoundError("No module named 'tbx_envs.nothing'", name="tbx_envs.nothing")

    monkeypatch.setattr(cli, "commands", lambda: {"report": Broken()})
    with pytest.raises(ModuleNotFoundError, match=r"tbx_envs\.nothing"):
        main(["report"])
