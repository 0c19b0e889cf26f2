"""Datasets in Gymnasium's registry: by a call, by the environment, in workers."""

import json
import multiprocessing
import os
import subprocess
import sys
import warnings

import gymnasium
import pytest

import tbx_envs
from tbx_envs.errors import ConfigError, DomainError
from tbx_envs.evaluation.task_lists import select_tasks
from tbx_envs.registration import env_id, uid_of
from tbx_envs.sources import find_task, is_heldout_family
from tbx_envs.thinkingbox import dataset as datasets
from tbx_envs.thinkingbox.dataset import (
    Dataset,
    dataset_of,
    register_dataset,
    register_from_environment,
    registered_datasets,
)

PROGRAM = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import tbx_envs
imported = {name.partition(".")[0] for name in sys.modules}
import gymnasium
from tbx_envs.thinkingbox.dataset import dataset_of
UID = "front_desk.py:test_refund_is_told"
def answer(ask):
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
print(json.dumps({
    "ids": [name for name in gymnasium.registry if ".py." in name or ".yaml." in name],
    "heavy": sorted(imported & {"mcp", "pydantic", "sqlalchemy", "httpx", "jax"}),
    "warnings": [[w.category.__name__, str(w.message)] for w in caught],
    "query": answer(lambda: dataset_of(UID).task(UID).query),
    "python": answer(lambda: dataset_of(UID).servers_python),
}))
"""


def in_a_new_process(**environ):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(ran.stdout)


@pytest.fixture
def shop(written):
    """A dataset with two tests."""
    test = "def test_{}(x, judge):\n    '!{{scenario: shop, query: {}}}'\n"
    return written({"test_case/shop_a.py": test.format(1, "one") + test.format(2, "two")})


def test_each_test_has_an_id_that_leads_back_to_it(bikeshop):
    dataset = tbx_envs.register_dataset(bikeshop)
    assert registered_datasets() == (dataset,)
    uids = dataset.uids()
    assert len(uids) == 14 and all(uid.count(":") == 1 for uid in uids)
    ids = [env_id(uid) for uid in uids]
    assert "ThinkingBox/front_desk.py.test_refund_is_told-v0" in ids
    assert [uid_of(name) for name in ids] == [uid_of(uid) for uid in uids] == list(uids)
    for name, uid in zip(ids, uids, strict=True):
        spec = gymnasium.spec(name)
        assert (spec.kwargs["uid"], spec.reward_threshold, spec.entry_point) == (uid, 1.0, "tbx_envs.env:ToolEnv")
        assert dataset_of(uid) is dataset and find_task(uid).uid == uid


def test_ids_lead_back_to_uids_without_a_registry():
    assert uid_of("ThinkingBox/a_b.py.test_x-v0") == "a_b.py:test_x"
    assert uid_of("ThinkingBox/a.yaml.x.y-v0") == "a.yaml:x.y"
    assert uid_of("ThinkingBox/clinic.cancel_visit.007-v0") == "clinic/cancel_visit/007"
    assert uid_of("a.py:test_x") == "a.py:test_x"


def test_a_uid_that_is_no_id_still_leads_back(written):
    text = "test_cases:\n- {uid: two words, scenario: shop, query: a, test_code: b}\n"
    register_dataset(written({"test_case/a.yaml": text}))
    assert env_id("a.yaml:two words") == "ThinkingBox/a.yaml.two_words-v0"
    assert uid_of("ThinkingBox/a.yaml.two_words-v0") == "a.yaml:two words"


def test_registering_again_reads_the_files_anew(shop):
    first = register_dataset(shop)
    assert select_tasks("checkout") == ("shop_a.py:test_1", "shop_a.py:test_2")
    path = shop / "test_case/shop_a.py"
    path.write_text(path.read_text().replace("test_2", "test_3").replace("one", "uno"))
    assert find_task("shop_a.py:test_1").query == "one"
    second = register_dataset(shop)
    assert registered_datasets() == (second,) and second is not first
    assert find_task("shop_a.py:test_1").query == "uno"
    assert env_id("shop_a.py:test_2") not in gymnasium.registry and env_id("shop_a.py:test_3") in gymnasium.registry
    with pytest.raises(DomainError, match=r"unknown task 'shop_a.py:test_2'. Did you mean"):
        find_task("shop_a.py:test_2")


def test_a_test_list_registers_only_what_it_names(bikeshop):
    dataset = register_dataset(bikeshop, test_list="bikeshop_small")
    assert (
        select_tasks("datasets")
        == dataset.uids()
        == ("front_desk.py:test_refund_is_told", "rentals_main.py:test_end_rental")
    )
    assert select_tasks("bikeshop_small") == dataset.uids()
    with pytest.raises(DomainError, match=r"11 problem\(s\)"):
        select_tasks("bikeshop_v1")


def test_two_datasets_with_the_same_tests_are_rejected_and_both_named(shop, written):
    register_dataset(shop)
    other = written({"test_case/shop_a.py": (shop / "test_case/shop_a.py").read_text()}, root="second")
    with pytest.raises(
        DomainError, match=r"datasets 'checkout' .* and 'second' .* both have shop_a.py:test_1 and 1 more"
    ):
        register_dataset(other)
    assert [dataset.name for dataset in registered_datasets()] == ["checkout"]
    third = register_dataset(written({"test_case/other.py": "def t(x):\n    '!query: a'\n"}, root="third"))
    assert select_tasks("datasets") == ("shop_a.py:test_1", "shop_a.py:test_2", *third.uids())


def test_two_datasets_of_one_name_are_rejected(shop, written):
    register_dataset(shop, name="one")
    other = written({"test_case/other.py": "def t(x):\n    '!query: a'\n"}, root="second")
    with pytest.raises(DomainError, match=r"two datasets have the name 'one'"):
        register_dataset(other, name="one")
    for reserved in ("all", "clinic", "datasets"):
        with pytest.raises(DomainError, match=rf"cannot be named '{reserved}'"):
            register_dataset(other, name=reserved)


def test_a_dataset_that_cannot_be_read_is_not_registered(written):
    with pytest.raises(DomainError, match=r"this is not Python"):
        register_dataset(written({"test_case/a.py": "("}))
    assert registered_datasets() == ()


def test_without_any_dataset_it_is_told_how_to_get_one():
    with pytest.raises(DomainError, match=r"no dataset is registered. Set TBX_DATASETS"):
        find_task("a.py:test")
    with pytest.raises(ConfigError, match=r"no dataset is registered"):
        select_tasks("datasets")
    with pytest.raises(ConfigError, match=r"no task matches 'a\.py:\*'. 0 tasks are known\."):
        select_tasks("a.py:*")


# --- tasks by name ------------------------------------------------------------------------------------------


def test_selections_of_built_in_tasks_do_not_depend_on_datasets(bikeshop):
    before = {name: select_tasks(name) for name in ("all", "train", "heldout", "clinic", "*", "clinic/*/00?")}
    register_dataset(bikeshop)
    assert {name: select_tasks(name) for name in before} == before


def test_names_lists_patterns_uids_and_files_select_a_datasets_tasks(bikeshop, tmp_path):
    dataset = register_dataset(bikeshop)
    assert select_tasks("datasets") == select_tasks("bikeshop") == dataset.uids()
    assert (
        len(select_tasks("bikeshop_v1")) == 13
        and select_tasks("bikeshop_v1")[0] == "rentals_main.py:test_refund_after_the_end"
    )
    assert select_tasks("front_desk.py:*") == tuple(uid for uid in dataset.uids() if uid.startswith("front_desk.py:"))
    assert select_tasks("*:greeting") == select_tasks("desk_list.yaml:greeting") == ("desk_list.yaml:greeting",)
    listed = ("rentals_main.py:test_few_turns", "desk_list.yaml:greeting", "clinic/cancel_visit/000")
    (tmp_path / "list.yaml").write_text(f"- rentals/{listed[0]}\n- {listed[1]}\n- {listed[2]}\n")
    (tmp_path / "list.txt").write_text("\n".join(listed))
    assert select_tasks(str(tmp_path / "list.yaml")) == select_tasks(str(tmp_path / "list.txt")) == listed
    assert select_tasks(str(dataset.lists["bikeshop_small"])) == select_tasks("bikeshop_small")


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("bikeshop_v2", "bikeshop_v1"),
        ("bikshop", "bikeshop"),
        ("front_desk.py:test_refund", "front_desk.py:test_refund_is_told"),
    ],
)
def test_an_unknown_selection_is_answered_with_near_names(bikeshop, asked, near):
    register_dataset(bikeshop)
    with pytest.raises(ConfigError, match=rf"Did you mean .*'{near}'"):
        select_tasks(asked)


def test_all_unknown_tasks_of_a_list_are_told(bikeshop, tmp_path):
    register_dataset(bikeshop)
    (tmp_path / "list.yaml").write_text("- front_desk.py:none\n- other.py:none\n- front_desk.py:test_next_turn\n")
    with pytest.raises(ConfigError, match=r"2 problem\(s\)"):
        select_tasks(str(tmp_path / "list.yaml"))


def test_lists_of_one_name_in_two_datasets_are_told_apart_by_their_paths(bikeshop, written):
    register_dataset(bikeshop)
    folder = written({"test_case/a.py": "def t(x):\n    '!query: a'\n"})
    path = folder.parent / "releases/bikeshop_v1/testlist_mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("- a.py:t\n")
    register_dataset(folder)
    with pytest.raises(ConfigError, match=r"different lists 'bikeshop_v1': .* and .*testlist_mine"):
        select_tasks("bikeshop_v1")
    assert select_tasks(str(path)) == ("a.py:t",)


def test_families_of_datasets_are_unseen_only_where_they_are_the_benchmarks(bikeshop):
    register_dataset(bikeshop)
    assert not is_heldout_family(find_task("desk_list.yaml:greeting"))


# --- the environment ----------------------------------------------------------------------------------------


def test_a_new_process_knows_what_the_environment_names(bikeshop, tmp_path):
    own = tmp_path / "mine" / "test_case"
    own.mkdir(parents=True)
    (own / "mine.py").write_text("def t(x):\n    '!query: a'\n")
    seen = in_a_new_process(TBX_DATASETS=f"{bikeshop}::{tmp_path / 'mine'}", TBX_SERVERS_PYTHON="/some/python")
    assert len(seen["ids"]) == 15 and seen["warnings"] == []
    assert {"ThinkingBox/mine.py.t-v0", "ThinkingBox/desk_list.yaml.greeting-v0"} <= set(seen["ids"])
    assert seen["heavy"] == [] and seen["query"] == "I want 4 back for rental R1." and seen["python"] == "/some/python"


def test_a_broken_entry_warns_at_import_and_is_an_error_when_used(bikeshop, tmp_path):
    (tmp_path / "broken/test_case").mkdir(parents=True)
    (tmp_path / "broken/test_case/a.py").write_text("x = 1; y = 2\nz = 3; w = 4\n")
    seen = in_a_new_process(TBX_DATASETS=f"{tmp_path / 'broken'}:{tmp_path / 'none'}")
    (kind, first), (_, second) = seen["warnings"]
    assert kind == "RuntimeWarning" and seen["ids"] == []
    assert "broken is not registered" in first and "2 problem(s)" in first and "line 1" in first and "none" in second
    for words in ("TBX_DATASETS has paths that could not be registered", "line 1", "line 2", "there is no such folder"):
        assert words in seen["query"]


def test_a_broken_entry_does_not_disturb_the_others(bikeshop, tmp_path):
    with pytest.warns(RuntimeWarning, match=r"no dataset at"):
        register_from_environment({"TBX_DATASETS": f"{tmp_path}:{bikeshop}"})
    assert len(select_tasks("bikeshop")) == 14 and select_tasks("desk_list.yaml:*")
    for asked in ("datasets", "none.py:test", "none.py:*", "bikshop"):
        with pytest.raises(DomainError, match=r"could not be registered:\n.*no dataset at"):
            select_tasks(asked)


def test_an_empty_variable_names_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_from_environment({"TBX_DATASETS": " : "})
    assert registered_datasets() == () and datasets._broken == {}


def test_spawned_workers_know_the_ids_of_what_was_registered_here(bikeshop):
    """A worker of Gymnasium's is a new process that imports tbx_envs and gets a spec."""
    register_dataset(bikeshop)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        query = pool.apply(find_query, ("ThinkingBox/front_desk.py.test_refund_is_told-v0",))
    assert query == "I want 4 back for rental R1."


def find_query(name):
    return find_task(gymnasium.spec(name).kwargs["uid"]).query


def test_what_was_registered_is_told_with_its_options_and_forgotten_with_them(bikeshop, monkeypatch):
    uids = Dataset(bikeshop).uids()
    register_dataset(bikeshop, name="shop", test_list=uids[:1], servers_python="python9")
    told = dict(os.environ)
    for name in ("_registered", "_owners", "_given"):
        monkeypatch.setattr(datasets, name, {})
    register_from_environment(told)
    (again,) = registered_datasets()
    assert (again.name, again.uids(), again.servers_python) == ("shop", uids[:1], "python9")
