"""Names that the README of tbx 0.1 showed still work, with a DeprecationWarning."""

import importlib
import re
import subprocess
import sys
import warnings

import pytest

import tbx_envs
from tbx_envs.agents import Attempt
from tbx_envs.agents.idle import IdleAgent
from tbx_envs.commands import cli
from tbx_envs.commands.hydra_programs import renamed as renamed_argument
from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.run import run

# As the README of 0.1 imported them, and where they are now.
OLD_PATHS = [
    ("tbx_envs.evaluate", "run_campaign", "tbx_envs.evaluation.run", "run"),
    ("tbx_envs.evaluate", "summarize", "tbx_envs.evaluation.run", "summarize"),
    ("tbx_envs.policies.turns", "play_turns", "tbx_envs.agents.turns", "play_turns"),
    ("tbx_envs.task_lists", "select_tasks", "tbx_envs.evaluation.task_lists", "select_tasks"),
]

# The README's own example of an agent, word for word but for the folder.
README_EXAMPLE = """
from tbx_envs.evaluate import run_campaign, summarize
from tbx_envs.messages import ToolCall, Turn
from tbx_envs.policies.turns import play_turns
from tbx_envs.task_lists import select_tasks


def agent(attempt, opening):  # the opening has the task, the messages said so far and the tools
    words = opening.task.query.removeprefix("Hi, ").removeprefix("Hello, this is ").split()
    results = yield Turn(calls=(ToolCall("", "find_patient", {"name": " ".join(words[:2]).strip(".")}),))
    yield Turn(text=f"I found {results[0].text}, and can do no more. <DONE>")


class MyPlayer:
    def play(self, attempts):
        return play_turns(attempts, agent)


tasks = select_tasks("clinic/cancel_visit/00?")
rows = run_campaign(MyPlayer(), tasks, attempts=2, seed=0, rows_path="runs/mine/rows.jsonl", max_void_retries=2)
assert summarize(rows, attempts=2)["pass_at_1"] == 0.0  # doing nothing is never right: a refusal leaves a record
"""


def python(*arguments, cwd):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=100)


def imported_anew(module, monkeypatch):
    """An old module as if no one had imported it in this process before."""
    parts = module.split(".")
    for end in range(2, len(parts) + 1):
        monkeypatch.delitem(sys.modules, ".".join(parts[:end]), raising=False)
    return importlib.import_module(module)


@pytest.mark.parametrize(("old_module", "old_name", "module", "name"), OLD_PATHS)
def test_an_old_import_path_gives_the_object_of_the_new_one(old_module, old_name, module, name, monkeypatch):
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        old = imported_anew(old_module, monkeypatch)
    assert given[-1].category is DeprecationWarning
    assert re.match(rf"{old_module} \(.*\b{old_name}\b.*\) has moved: import from tbx_envs", str(given[-1].message))
    assert getattr(old, old_name) is getattr(importlib.import_module(module), name)
    if name != old_name:
        assert f"{old_name}, now {name}" in str(given[-1].message)
    assert getattr(tbx_envs, name) is getattr(old, old_name)  # where the message sends people


def test_an_old_module_has_only_its_old_names(monkeypatch):
    with pytest.warns(DeprecationWarning):
        old = imported_anew("tbx_envs.evaluate", monkeypatch)
    assert {name for name in vars(old) if not name.startswith("__")} == {"run_campaign", "summarize"}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tbx_envs.no_such_module")


def test_the_example_in_the_readme_of_the_first_version_runs_and_each_old_name_warns(tmp_path):
    (tmp_path / "mine.py").write_text(README_EXAMPLE)
    done = python("-W", "always::DeprecationWarning", "mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for old in ("tbx_envs.evaluate", "tbx_envs.policies.turns", "tbx_envs.task_lists", "MyPlayer.play(attempts)"):
        assert any("mine.py" in line and old in line for line in done.stderr.splitlines()), (old, done.stderr)
    assert len((tmp_path / "runs" / "mine" / "rows.jsonl").read_text().splitlines()) == 20
    silent = python("-W", "error::DeprecationWarning", "mine.py", cwd=tmp_path)
    assert "DeprecationWarning" in silent.stderr and silent.returncode == 1


def test_an_agent_with_the_old_method_makes_the_same_attempts(tmp_path):
    class Player:
        def play(self, attempts):
            return IdleAgent().run(attempts)

    settings = {"attempts": 2, "seed": 3, "max_void_retries": 0, "policy": {"name": "idle"}}
    uids = ["clinic/cancel_visit/000", "clinic/waive_fee/000"]
    with pytest.warns(DeprecationWarning, match=r"Player\.play\(attempts\) is now called run\(attempts\)"):
        old = run(Player(), uids, rows_path=tmp_path / "old" / "rows.jsonl", **settings)
    new = run(IdleAgent(), uids, rows_path=tmp_path / "new" / "rows.jsonl", **settings)
    assert [{**row, "seconds": {}} for row in old] == [{**row, "seconds": {}} for row in new]


def test_an_object_that_cannot_run_attempts_is_no_agent(tmp_path):
    with pytest.raises(ConfigError, match=r"list is not an agent: it has no method run\(attempts\)"):
        run([], ["clinic/cancel_visit/000"], attempts=1, seed=0, rows_path=tmp_path / "rows.jsonl", max_void_retries=0)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lapse=0.3", "error_rate=0.3"),
        ("+lapse=0.3", "+error_rate=0.3"),
        ("++lapse=0.1,0.3", "++error_rate=0.1,0.3"),
        ("~lapse", "~error_rate"),
    ],
)
def test_the_old_key_means_the_new_one(given, meant):
    with pytest.warns(DeprecationWarning, match="the key 'lapse' is now called 'error_rate'"):
        assert renamed_argument(given) == meant


@pytest.mark.parametrize(
    "given", ["error_rate=0.3", "policy=lapse", "lapses=1", "model.lapse=1", "-m", "tasks='a=lapse'"]
)
def test_arguments_that_only_look_like_the_old_key_stay(given):
    assert renamed_argument(given) == given


@pytest.mark.parametrize("command", ["evaluate", "sft", "warmstart"])
def test_the_command_line_takes_the_old_key_and_the_old_command(command, tmp_path):
    done = python("-m", "tbx_envs.commands.cli", command, "lapse=0.75", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\nerror_rate: 0.75\n" in f"\n{done.stdout}"
    assert "the key 'lapse' is now called 'error_rate'; the old name works until tbx 0.3" in done.stderr
    assert ("`tbx warmstart` is now called `tbx sft`" in done.stderr) == (command == "warmstart")


def test_the_old_command_is_not_listed():
    assert "sft" in cli.commands() and "warmstart" not in cli.commands()


def test_the_number_of_an_attempt_has_its_old_name():
    with pytest.warns(DeprecationWarning, match=r"attempt\.index"):
        assert Attempt("clinic/cancel_visit/000", 3, 1).attempt == 3
