"""Every kind of file that tbx keeps, damaged in every way: told by name, with what is wrong and what to do."""

import json
import shutil

import pytest
from full_disks import files_limited_to

from tbx_envs.agents.scripted import ScriptedAgent
from tbx_envs.errors import ConfigError, StorageError
from tbx_envs.evaluation.files import load_rows
from tbx_envs.evaluation.pool import BANDS, load_pool, save_pool, select_pool
from tbx_envs.evaluation.provenance import mark_provenance, provenance
from tbx_envs.evaluation.regrade import regrade
from tbx_envs.evaluation.report import run_summary
from tbx_envs.evaluation.run import run, tallies_of
from tbx_envs.evaluation.task_lists import select_tasks
from tbx_envs.evaluation.transcripts import load_episodes
from tbx_envs.files import (
    CHECKSUMS,
    append_line,
    damage,
    parsed_json,
    read_records,
    write_checksums,
    write_json,
    write_lines,
)

UIDS = ("clinic/cancel_visit/000", "clinic/cancel_visit/001")
POLICY = {"name": "scripted", "error_rate": 0.5}


def evaluated(folder):
    agent = ScriptedAgent(error_rate=0.5)
    return run(agent, UIDS, attempts=1, seed=1, rows_path=folder / "rows.jsonl", max_void_retries=0, policy=POLICY)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with one file of each kind."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    rows = evaluated(folder)
    write_json(folder / "summary.json", {"pass_at_1": 0.5})
    write_json(folder / "run.json", {"command": "tbx evaluate"})
    save_pool(select_pool(tallies_of(rows), bands=tuple(BANDS), policy=POLICY, seed=1), folder / "pool.json")
    (folder / "tasks.txt").write_text("\n".join(UIDS) + "\n")
    return folder


READERS = {
    "evaluation.json": lambda folder: load_rows(folder),
    "rows.jsonl": lambda folder: load_rows(folder),
    "episodes.jsonl": lambda folder: list(load_episodes(folder / "episodes.jsonl")),
    "summary.json": lambda folder: run_summary(folder),
    "run.json": lambda folder: mark_provenance(folder, "marked"),
    "pool.json": lambda folder: load_pool(folder / "pool.json"),
    "tasks.txt": lambda folder: select_tasks(str(folder / "tasks.txt")),
}
JSON = {
    "empty": b"",
    "half of it": b'{"uid": "a", ',
    "another value": b"[1]\n",
    "null": b"null\n",
    "a text": b'"uid"\n',
    "not UTF-8": b'{"uid": "\xff\xfe"}\n',
    "zeros": bytes(64) + b"\n",
    "deep": b"[" * 100_000 + b"\n",
}
RECORDS = {"of something else": b'{"a": 1}\n', "with other kinds": b'{"uid": 7, "attempt": "b", "transcript": 3}\n'}
# In which states a kind of file is no damage: rows and episodes may be none yet, and a last line without its line break
# is one that was being written.
FINE = {
    ("rows.jsonl", "empty"),
    ("rows.jsonl", "half of it"),
    ("episodes.jsonl", "empty"),
    ("episodes.jsonl", "half of it"),
}
FINE |= {(name, damage) for name in ("summary.json", "run.json") for damage in RECORDS}
CASES = [(name, content) for name in READERS if name != "tasks.txt" for content in JSON | RECORDS]
CASES += [("tasks.txt", "not UTF-8"), ("tasks.txt", "empty")]


def test_what_is_not_damaged_is_read(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    for read in READERS.values():
        read(folder)


@pytest.mark.parametrize(("name", "content"), CASES)
def test_a_damaged_file_is_told_by_name_with_what_to_do(finished, tmp_path, name, content):
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / name).write_bytes((JSON | RECORDS)[content])
    if (name, content) in FINE:
        READERS[name](folder)
        return
    with pytest.raises(ConfigError) as error:
        READERS[name](folder)
    said = str(error.value)
    assert str(folder / name) in said or (name == "tasks.txt" and content == "empty")
    assert not any(word in said for word in ("Traceback", "JSONDecodeError", "KeyError", "object is not"))


@pytest.mark.parametrize("content", [content for content in JSON | RECORDS if ("rows.jsonl", content) not in FINE])
def test_a_run_is_not_resumed_on_damaged_rows_and_keeps_them(finished, tmp_path, content):
    folder = shutil.copytree(finished, tmp_path / "run")
    whole = (folder / "rows.jsonl").read_bytes()
    (folder / "rows.jsonl").write_bytes(damaged := whole + (JSON | RECORDS)[content])
    with pytest.raises(ConfigError, match=r"rows\.jsonl line 3"):
        evaluated(folder)
    assert (folder / "rows.jsonl").read_bytes() == damaged


def test_a_run_whose_episodes_are_gone_is_neither_resumed_nor_graded_again(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "episodes.jsonl").unlink()
    with pytest.raises(
        ConfigError, match=r"episodes\.jsonl: the episodes are not there, and rows\.jsonl .* has 2 rows"
    ):
        evaluated(folder)
    with pytest.raises(ConfigError, match=r"episodes\.jsonl: episodes of an evaluation run are not there"):
        regrade(folder, tmp_path / "again" / "rows.jsonl")


@pytest.mark.parametrize(
    ("damage_of", "said"),
    [
        (lambda lines: [], "lacks the episodes of 2 of the 2 rows"),
        (lambda lines: lines[1:], "lacks the episodes of 1 of the 2 rows .*, such as attempt 0 at "),
        (lambda lines: [lines[0], lines[1][:-9]], "lacks the episodes of 1 of the 2 rows"),  # cut off, its row is whole
        (lambda lines: [lines[0].replace(b"clinic", b"cliniq"), lines[1]], "lacks the episodes of 1 of the 2 rows"),
        (lambda lines: [*lines, b"\n"], "line 3 is not JSON"),
        (lambda lines: [*lines, b"[" * 100_000 + b"\n"], "line 3 is not JSON .*nested too deeply"),
        (lambda lines: [*lines, b'{"uid": [], "attempt": 0}\n'], "line 3: not one of episodes .*: 'uid' is "),
    ],
)
def test_a_run_that_lacks_episodes_of_its_rows_is_not_resumed_and_loses_no_more(finished, tmp_path, damage_of, said):
    folder = shutil.copytree(finished, tmp_path / "run")
    lines = (folder / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "episodes.jsonl").write_bytes(damaged := b"".join(damage_of(lines)))
    with pytest.raises(ConfigError, match=rf"episodes\.jsonl.*{said}.*Restore it from a copy"):
        evaluated(folder)
    assert (folder / "episodes.jsonl").read_bytes() == damaged


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("evaluation.json", '"name": ', '"n": ', "of its policy, 'name' is missing"),
        ("rows.jsonl", '"family": ', '"family": [], "f": ', r"'family' is \[\]"),
        ("rows.jsonl", '"family": ', '"f": ', "'family' is missing"),
    ],
)
def test_a_key_that_a_report_needs_is_missed_when_the_file_is_read(finished, tmp_path, name, old, new, said):
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / name).write_text((folder / name).read_text().replace(old, new))
    with pytest.raises(ConfigError, match=said):
        load_rows(folder)


def test_a_record_of_a_run_that_is_no_text_comes_back_as_it_was_when_the_next_run_is_refused(tmp_path):
    (tmp_path / "run.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="refused"), provenance(tmp_path, {}, ["tbx", "evaluate"]):
        raise ConfigError("refused")
    assert (tmp_path / "run.json").read_bytes() == b"\xff\xfe"


def test_a_disk_that_fills_up_costs_what_is_being_written_and_nothing_else(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with files_limited_to(60):
        with pytest.raises(
            StorageError, match=r"summary\.json cannot be written: .*; what was there before is unchanged"
        ):
            write_json(folder / "summary.json", {"pass_at_1": "x" * 100})
        for name in ("rows.jsonl", "tasks.txt"):  # one is above the limit already, one comes to it
            with pytest.raises(StorageError, match="Make room"):
                append_line(folder / name, "y" * 100)
        with pytest.raises(StorageError, match=r"\.jsonl cannot be written"):
            (folder / "rows.jsonl").unlink()
            evaluated(folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: after.get(name) for name in before if name != "rows.jsonl"} == {
        name: before[name] for name in before if name != "rows.jsonl"
    }
    (folder / "episodes.jsonl").unlink()
    assert [row["passed"] for row in evaluated(folder)] == [row["passed"] for row in load_rows(finished)[1]]


def test_checksums_tell_every_file_that_was_changed_emptied_or_removed(tmp_path):
    (tmp_path / "inner").mkdir()
    for name in ("a", "b", "c", "inner/d"):
        (tmp_path / name).write_bytes(name.encode() * 5)
    assert damage(tmp_path) is None
    write_checksums(tmp_path)
    assert damage(tmp_path) == []
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"bbbbc")
    (tmp_path / "inner" / "d").unlink()
    assert damage(tmp_path) == ["a is empty", "b has other content than was saved (5 bytes)", "inner/d is missing"]
    assert damage(tmp_path, lambda name: name == "c") == []
    (tmp_path / CHECKSUMS).write_text("{}")
    assert damage(tmp_path) == [f"{CHECKSUMS} lists no file"]
    (tmp_path / CHECKSUMS).write_text('{"../elsewhere": "0"}')
    assert damage(tmp_path) == ["../elsewhere is no file of the folder"]
    (tmp_path / CHECKSUMS).unlink()
    (tmp_path / CHECKSUMS).mkdir()
    assert "Is a directory" in damage(tmp_path)[0]


@pytest.mark.parametrize("size", [3, 5000])
def test_a_line_that_was_cut_off_takes_no_part_in_the_next_one(tmp_path, size):
    """Its process was killed while it wrote."""
    path = tmp_path / "lines.jsonl"
    for kept in ([], ['{"n": 1}', '{"n": 2}']):
        path.write_text("".join(f"{line}\n" for line in kept) + '{"' + "n" * size)
        append_line(path, json.dumps({"n": "\ud800"}, ensure_ascii=False))
        read = [record for _, record in read_records(path, "lines", to_do="")]
        assert read == [*map(json.loads, kept), {"n": "\ud800"}]


def test_what_cannot_be_encoded_is_written_as_json_reads_it_back(tmp_path):
    write_json(tmp_path / "a.json", {"name": "\udcff"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"name": "\udcff"}
    with pytest.raises(ZeroDivisionError):
        write_lines(tmp_path / "a.json", (str(1 // number) for number in (1, 0)))
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ['{"a": 1, "b": {"c": 1, "c": 1}}', "[NaN]", "-Infinity", "1e400", '{"a": 1} x'])
def test_json_is_read_strictly(text):
    with pytest.raises(ValueError, match=r"twice|no number|too large|Extra data"):
        parsed_json(text)
    assert parsed_json('{"a": [1, 2.5e300, null, "é"]}') == json.loads('{"a": [1, 2.5e300, null, "é"]}')
