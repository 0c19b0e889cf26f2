"""The guard of the benchmark: what is refused, and what its override marks."""

import dataclasses
import json
import re
import sys

import pytest

from tbx_envs.errors import ConfigError, DomainError
from tbx_envs.evaluation.metrics import Tally
from tbx_envs.evaluation.pool import load_pool, refuse_heldout, save_pool, select_pool
from tbx_envs.evaluation.provenance import mark_provenance, write_provenance
from tbx_envs.evaluation.task_lists import select_tasks
from tbx_envs.files import write_json
from tbx_envs.messages import Text
from tbx_envs.sources import find_task, is_heldout_family, task_hash
from tbx_envs.thinkingbox.dataset import benchmark, guard, register_dataset
from tbx_envs.thinkingbox.dataset.benchmark import benchmark_keys, lock_text, parse_lock
from tbx_envs.thinkingbox.dataset.dataset import Dataset
from tbx_envs.thinkingbox.dataset.guard import (
    MARK,
    benchmark_uids,
    is_marked_policy,
    mark_policy,
    refuse_benchmark,
    write_lock,
)

TEST = '''
def {name}(x, judge):
    """!
    scenario: shop
    query: {query}
    user_context: {context}
    init:
      shop: {{data_patch: {patch}, golden_test_case: {{tool_interactions: {calls}}}}}
    """
'''
ORIGINAL = {
    "name": "test_a",
    "query": "Sell me a bike, please: the “café” one.",
    "context": "You are Ada.",
    "patch": "{bikes: [{id: B1, price: 7, note: null}, {id: B2, price: 9.5, note: Red}]}",
    "calls": "[{tool: sell, parameters: {bike: B1, to: Ada}}, {tool: note, parameters: {text: Sold}}]",
}
OTHER = {
    "query": "Mend my wheel.",
    "context": "You are Ben.",
    "patch": "{bikes: [{id: B3, price: 8, note: Blue}]}",
    "calls": "[{tool: mend, parameters: {bike: B3}}]",
}


def written_test(**fields):
    """A file of one test; its texts are quoted as YAML does it."""
    texts = {name: "'" + fields[name].replace("'", "''") + "'" for name in ("query", "context")}
    return TEST.format(**{**fields, **texts})


@pytest.fixture
def locked(written, monkeypatch):
    """A benchmark of one task, `bench.py:test_a`; gives the folder that it was written from."""
    folder = written({"test_case/bench.py": written_test(**ORIGINAL)}, root="bench")
    keys = parse_lock(lock_text([Dataset(folder).task("bench.py:test_a")]))
    monkeypatch.setattr(benchmark, "benchmark_keys", lambda: keys)
    monkeypatch.setattr("tbx_envs.thinkingbox.dataset.assembly.benchmark_keys", lambda: keys)
    return folder


@pytest.fixture
def copied(locked, written):
    """Registers a dataset with one task, changed from the benchmark's; gives its uid."""

    def copy(file="other.py", scenario=None, **changes):
        files = {f"test_case/{file}": written_test(**{**ORIGINAL, "name": "test_copy", **changes})}
        folder = written(files | ({"scenario/shop.yaml": scenario} if scenario else {}))
        [uid] = register_dataset(folder).uids()
        return uid

    return copy


def pool_of(*uids, **options):
    tallies = [Tally(uid, "f", 4, 8) for uid in uids]
    return select_pool(tallies, bands=("medium",), policy={"name": "p"}, seed=0, **options)


def test_the_benchmarks_tasks_are_held_out(locked):
    register_dataset(locked)
    assert find_task("bench.py:test_a").split == "heldout" and is_heldout_family(find_task("bench.py:test_a"))
    assert Dataset(locked).uids("heldout") == ("bench.py:test_a",) and Dataset(locked).uids("train") == ()
    with pytest.raises(
        ConfigError, match=r"1 of 2 tasks are of thinkingbox_bench_v1 .* such as bench\.py:test_a"
    ) as said:
        refuse_benchmark(["clinic/cancel_visit/000", "bench.py:test_a"], purpose="training")
    assert "training on them would spoil it" in str(said.value)
    assert "train_on_benchmark_and_mark_results=true" in str(said.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},  # another name, in another file
        {"scenario": "world_state: {shop: null}\ntools: [{name: more}]\nbot_instructions: Other rules."},
        {"context": "You are Ben."},
        {"context": ""},
        {"query": "Sell me a bicycle, please: the “café” one."},  # one word
        {"calls": "[]"},  # another grading
        # Each key alone, with all else another task's.
        OTHER | {"query": ORIGINAL["query"]},
        OTHER | {"patch": ORIGINAL["patch"]},
        OTHER | {"calls": ORIGINAL["calls"]},
        # The query, written differently.
        OTHER | {"query": 'sell  me a BIKE please the "cafe" one'},
        OTHER | {"query": "Sell me a bi\u200bke\u00ad, please \u2014 the \uff02cafe\u0301\uff02 one\u2026"},
        OTHER | {"query": "\uff33\uff25ll me a b\u200dike, please; the Cafe\u0301 one!"},
        OTHER | {"context": ORIGINAL["query"]},  # said by the user later
        # The rows in another order, with other keys first, other marks, and columns that hold nothing.
        OTHER | {"patch": "{bikes: [{price: '9.5', note: RED., id: b2}, {price: 7.0, id: B1}], shops: []}"},
        # The calls in another order, with other keys first.
        OTHER
        | {
            "calls": "[{parameters: {text: sold}, tool: note}, "
            "{parameters: {to: ada, gift: null, bike: B1}, tool: sell}]"
        },
    ],
)
def test_a_copy_is_rejected_whatever_it_is_called_and_whatever_else_was_changed(copied, changes):
    uid = copied(**changes)
    assert benchmark_uids([uid]) == (uid,)
    with pytest.raises(ConfigError, match=rf"1 of 1 tasks are of .* such as {re.escape(uid)}"):
        refuse_heldout([uid])


def test_a_copy_whose_request_was_said_before_is_rejected(locked):
    task = Dataset(locked).task("bench.py:test_a")
    moved = dataclasses.replace(
        task, uid="x.py:test_b", query="Well?", init={}, expected_calls=(), history=(Text("user", task.query),)
    )
    assert benchmark.benchmark_keys().has(moved)
    assert not benchmark.benchmark_keys().has(dataclasses.replace(moved, history=(Text("assistant", task.query),)))


def test_a_task_with_the_uid_of_one_is_rejected_whatever_it_holds(locked, written):
    register_dataset(written({"test_case/bench.py": written_test(**{**ORIGINAL, **OTHER})}))
    assert benchmark_uids(["bench.py:test_a"]) == ("bench.py:test_a",)


@pytest.mark.parametrize(
    "changes",
    [
        OTHER,
        OTHER | {"context": ORIGINAL["context"]},  # a context is shared by many tasks
        OTHER | {"patch": "{bikes: [{id: B1, price: 8}, {id: B2, price: 9.5, note: Red}]}"},
        OTHER | {"patch": "{}", "calls": "[]"},  # two tasks without rows and calls have nothing in common
    ],
)
def test_another_task_is_not_rejected(copied, changes):
    uid = copied(**changes)
    refuse_benchmark([uid], purpose="training")
    assert find_task(uid).split == "train" and not pool_of(uid).trained_on_benchmark


def test_built_in_tasks_are_no_part_of_it():
    refuse_benchmark(select_tasks("all"), purpose="training")  # without registering any dataset


def test_a_pool_rejects_the_benchmark_and_with_the_override_is_marked(copied, tmp_path):
    uid = copied()
    with pytest.raises(ConfigError, match=r"a pool on them would spoil it"):
        pool_of(uid)
    pool = pool_of(uid, train_on_benchmark=True)
    assert pool.trained_on_benchmark and pool.locks == {} and pool.candidates[0].content_hash == task_hash(uid)
    save_pool(pool, tmp_path / "pool.json")
    record = json.loads((tmp_path / "pool.json").read_text())
    assert record[MARK] is True and load_pool(tmp_path / "pool.json") == pool
    write_json(tmp_path / "unmarked.json", {**record, MARK: False})
    with pytest.raises(ConfigError, match=rf"of the benchmark, such as {uid}, and the file is not marked {MARK}"):
        load_pool(tmp_path / "unmarked.json")


def test_a_pool_of_a_version_without_marks_is_read(tmp_path):
    save_pool(pool_of("clinic/cancel_visit/000"), tmp_path / "pool.json")
    record = json.loads((tmp_path / "pool.json").read_text())
    assert record.pop(MARK) is False
    write_json(tmp_path / "old.json", record)
    assert load_pool(tmp_path / "old.json").trained_on_benchmark is False


def test_the_override_lets_no_held_out_task_of_our_own_through():
    with pytest.raises(ConfigError, match=r"held out for evaluation"):
        refuse_heldout(select_tasks("heldout")[:1], train_on_benchmark=True)


def test_a_changed_file_changes_the_hash_of_its_task(copied, written):
    other = OTHER | {"query": "Another."}
    before = task_hash(copied(**other))
    assert task_hash(copied(**other)) == before
    assert task_hash(copied(**other | {"query": "Yet another."})) != before


# --- marks --------------------------------------------------------------------------------------------------


def test_policies_and_runs_are_marked(tmp_path):
    assert not is_marked_policy(tmp_path)
    mark_policy(tmp_path)
    assert is_marked_policy(str(tmp_path)) and json.loads((tmp_path / f"{MARK}.json").read_text()) == {MARK: True}
    mark_provenance(tmp_path / "run", MARK)  # a run from Python has no such file
    write_provenance(tmp_path / "run", {"seed": 0}, ["tbx", "train"])
    mark_provenance(tmp_path / "run", MARK)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record[MARK] is True and record["command"] == ["tbx", "train"]


# --- the lock -----------------------------------------------------------------------------------------------


def test_the_lock_that_ships_has_507_tasks_and_no_words_of_theirs():
    keys = benchmark_keys()
    assert len(keys.uids) == len(keys.patches) == len(keys.calls) == 507
    assert len(keys.queries) == 505  # two are said in two tasks
    assert all(re.fullmatch(r"\w+\.py:test_\w+", uid) for uid in keys.uids)


@pytest.mark.parametrize("line", ["a.py:b", f"a.py:b {'0' * 64} -", f"a.py:b {'0' * 64} - short", "a b c d e"])
def test_a_lock_with_a_line_that_is_none_is_rejected(line):
    with pytest.raises(
        DomainError, match=r"benchmark\.lock line 2: wanted '<uid> <query key> <patch key> <calls key>'"
    ):
        parse_lock(f"# words\n{line}\n")


def test_an_empty_lock_rejects_nothing(bikeshop):
    keys, dataset = parse_lock("# nothing\n"), Dataset(bikeshop)
    assert not any(keys.has(dataset.task(uid)) for uid in dataset.uids())


def test_a_task_without_rows_or_calls_has_no_key_of_them(locked):
    bare = dataclasses.replace(
        Dataset(locked).task("bench.py:test_a"), query="...", init={"shop": {}}, expected_calls=()
    )
    assert lock_text([bare]).splitlines()[-1] == "bench.py:test_a - - -"
    none = dataclasses.replace(bare, uid="other.py:test_b", user_context=None)
    assert not parse_lock(lock_text([bare])).has(none)
    two = dataclasses.replace(bare, init={name: {"data_patch": {"rows": [name]}} for name in ("shop", "desk")})
    with pytest.raises(DomainError, match="2 servers have a data_patch"):
        lock_text([two])


def test_the_lock_is_written_from_the_benchmarks_list(written, tmp_path, monkeypatch, capsys):
    folder = written(
        {"test_case/bench.py": written_test(**ORIGINAL) + written_test(**{**ORIGINAL, "name": "test_not"})}
    )
    path = folder.parent / "releases/thinkingbox_bench_v1/testlist_thinkingbox_bench_v1.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("- bench.py:test_a\n")
    monkeypatch.setattr(guard, "__file__", str(tmp_path / "guard.py"))
    written_to = write_lock(str(folder.parent))
    assert written_to == tmp_path / "benchmark.lock"
    keys = parse_lock(written_to.read_text())
    dataset = Dataset(folder)
    assert keys.uids == {"bench.py:test_a"} and keys.has(dataset.task("bench.py:test_not"))
    monkeypatch.setattr(sys, "argv", ["guard", "lock", str(folder.parent)])
    monkeypatch.setattr(guard, "write_lock", lambda checkout: f"lock of {checkout}")
    guard.main()
    assert capsys.readouterr().out == f"written: lock of {folder.parent}\n"
    path.unlink()
    with pytest.raises(DomainError, match=r"thinkingbox_bench_v1"):
        write_lock(str(folder.parent))
