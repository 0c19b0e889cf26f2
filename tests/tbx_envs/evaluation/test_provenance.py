import importlib.metadata
import json
import shutil
import subprocess
import sys

import pytest

from tbx_envs.errors import CheckpointError, ConfigError, DomainError
from tbx_envs.evaluation.provenance import library_versions, provenance, remove_traces, write_provenance
from tbx_envs.version import __version__


def test_a_run_records_its_command_configuration_and_versions(tmp_path):
    write_provenance(tmp_path / "run", {"seed": 3}, ["tbx", "evaluate", "seed=3"])
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["command"] == ["tbx", "evaluate", "seed=3"]
    assert record["config"] == {"seed": 3}
    assert record["tbx"] == __version__
    assert record["libraries"]["scipy"] == importlib.metadata.version("scipy")


def test_libraries_that_are_not_installed_are_left_out(monkeypatch):
    def version(name):
        if name == "jax":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "jax" not in library_versions()
    assert library_versions()["numpy"] == "1"


def test_the_commit_is_the_packages_own_and_never_that_of_a_repository_around_it(tmp_path):
    import tbx_envs

    # A copy of the package as it is in a virtual environment inside another repository.
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    copied = tmp_path / "site" / "tbx_envs"
    shutil.copytree(tbx_envs.__path__[0], copied, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "readme").write_text("theirs")
    for arguments in (["init", "-q"], ["add", "readme"], ["commit", "-q", "-m", "theirs"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    code = "from tbx_envs.evaluation.provenance import commit; print(commit())"

    def found():
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path / "site", capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert found() == "None"
    for arguments in (["add", "site"], ["commit", "-q", "-m", "ours"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert found() == head
    (copied / "version.py").write_text('__version__ = "9"\n')
    assert found() == head + "+"


def test_a_run_that_is_refused_leaves_where_the_earlier_one_came_from(tmp_path):
    with provenance(tmp_path, {"seed": 1}, ["tbx", "evaluate", "seed=1"]):
        pass
    with pytest.raises(ConfigError), provenance(tmp_path, {"seed": 2}, ["tbx", "evaluate", "seed=2"]):
        raise ConfigError("another run is there")
    assert json.loads((tmp_path / "run.json").read_text())["config"] == {"seed": 1}
    with pytest.raises(ValueError), provenance(tmp_path, {"seed": 3}, ["tbx", "evaluate", "seed=3"]):
        raise ValueError("began, and broke")
    assert json.loads((tmp_path / "run.json").read_text())["config"] == {"seed": 3}
    told = r"has a run of `tbx evaluate`\. Choose another output_dir for `tbx train`"
    with pytest.raises(ConfigError, match=told), provenance(tmp_path, {"seed": 4}, ["tbx", "train"]):
        pytest.fail("it must not begin")
    assert json.loads((tmp_path / "run.json").read_text())["config"] == {"seed": 3}
    with provenance(tmp_path, {"seed": 5}, ["tbx", "pool"]):  # chosen from the attempts that are there
        pass


def test_a_refused_run_leaves_no_folder_and_never_takes_one_away_that_holds_something(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "evaluate" / "now"
    for error in (ConfigError("no"), DomainError("no such task"), CheckpointError("another model")):
        with pytest.raises(type(error)), provenance(folder, {}, ["tbx"], {".hydra/config.yaml": "a: 1\n"}):
            assert (folder / ".hydra/config.yaml").read_text() == "a: 1\n"
            raise error
        remove_traces(folder)
        assert list(tmp_path.iterdir()) == []
    remove_traces(tmp_path)  # where the person is, as with output_dir=.
    assert tmp_path.is_dir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "notes").write_text("mine")
    folder.mkdir(parents=True)
    remove_traces(folder)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["notes"]
    remove_traces(tmp_path / "runs")
    remove_traces(folder)  # is gone
    assert (tmp_path / "runs" / "notes").read_text() == "mine"


RUNS_UNTIL_ITS_INPUT_ENDS = """
import sys
from tbx_envs.evaluation.provenance import provenance
with provenance(sys.argv[1], {"seed": 1}, ["tbx", "train"]):
    print("here", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_in_a_runs_folder_until_the_first_has_ended_in_any_way(tmp_path):
    command = [sys.executable, "-c", RUNS_UNTIL_ITS_INPUT_ENDS, str(tmp_path / "run")]
    for end in (lambda process: process.kill(), lambda process: process.stdin.close()):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout.readline() == "here\n"
            with (
                pytest.raises(ConfigError, match=rf"process {first.pid} is working .* another output_dir"),
                provenance(tmp_path / "run", {"seed": 2}, ["tbx", "train"]),
            ):
                pytest.fail("two runs in one folder")
            assert json.loads((tmp_path / "run" / "run.json").read_text())["config"] == {"seed": 1}
            end(first)
            first.wait(timeout=60)
        with provenance(tmp_path / "run", {"seed": 3}, ["tbx", "train"]):
            assert json.loads((tmp_path / "run" / "run.json").read_text())["config"] == {"seed": 3}
