import re

import pytest

from tbx_envs.domains import load_domain
from tbx_envs.errors import ConfigError, DomainError
from tbx_envs.evaluation.task_lists import all_uids, select_tasks
from tbx_envs.sources import find_task, is_heldout_family


def test_splits_part_all_tasks():
    train, heldout = select_tasks("train"), select_tasks("heldout")
    assert set(train).isdisjoint(heldout)
    assert set(train) | set(heldout) == set(select_tasks("all")) == set(select_tasks("clinic"))
    assert all(find_task(uid).split == "heldout" for uid in heldout[:5])


def test_a_pattern_selects_what_it_matches_in_canonical_order():
    chosen = select_tasks("clinic/*/00?")
    assert chosen == tuple(uid for uid in all_uids() if re.fullmatch(r"clinic/[a-z_]+/00.", uid))
    assert chosen


def test_a_uid_selects_itself_also_beyond_the_frozen_ones():
    first = all_uids()[0]
    assert select_tasks(first) == (first,)
    fresh = first[:-3] + "99999"
    assert select_tasks(fresh) == (fresh,)


def test_a_file_lists_tasks_in_its_own_order(tmp_path):
    first, second = all_uids()[:2]
    (tmp_path / "list.txt").write_text(f"# two tasks\n{second}  # the second\n\n{first}\n")
    assert select_tasks(str(tmp_path / "list.txt")) == (second, first)


def test_all_problems_of_a_file_are_told_at_once(tmp_path):
    first = all_uids()[0]
    (tmp_path / "list.txt").write_text(f"{first}\n{first}\nclinic/nothing/000\nclinik/x/000\n")
    with pytest.raises(ConfigError, match="3 problem") as raised:
        select_tasks(str(tmp_path / "list.txt"))
    for part in ("listed 2 times", "clinic/nothing/000", "Did you mean 'clinic'?"):
        assert part in str(raised.value)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "list.txt").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="lists no task"):
        select_tasks(str(tmp_path / "list.txt"))


@pytest.mark.parametrize(("asked", "near"), [("heldot", "heldout"), ("trian", "train"), ("clinik", "clinic")])
def test_an_unknown_selection_is_answered_with_near_names(asked, near):
    with pytest.raises(ConfigError, match=f"Did you mean '{near}'"):
        select_tasks(asked)


def test_a_pattern_may_have_brackets_only():
    assert select_tasks("clinic/cancel_visit/00[01]") == ("clinic/cancel_visit/000", "clinic/cancel_visit/001")


def test_a_pattern_that_matches_nothing_says_so():
    with pytest.raises(ConfigError, match=r"no task matches 'clinic/zzz\*'"):
        select_tasks("clinic/zzz*")


def test_an_unknown_uid_is_answered_with_near_ones():
    uid = all_uids()[0]
    with pytest.raises(DomainError, match=f"Did you mean .*{uid}"):
        find_task(uid.replace("clinic", "clinik"))


def test_held_out_families_are_those_without_training_tasks():
    families = load_domain("clinic").families
    trained = {uid.split("/")[1] for uid in select_tasks("train")}
    for name in families:
        assert is_heldout_family(find_task(f"clinic/{name}/000")) == (name not in trained)
