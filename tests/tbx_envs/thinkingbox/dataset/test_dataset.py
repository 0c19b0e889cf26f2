"""A dataset: where its parts are found, which tests are known, and what is wrong with it as a whole."""

import sys

import pytest

from tbx_envs.errors import DomainError
from tbx_envs.thinkingbox.dataset.dataset import Dataset
from tbx_envs.thinkingbox.dataset.problems import DatasetProblems


def file_of(*names, scenario="shop"):
    """A Python file with tests of these names."""
    return "".join(
        f"def {name}(x, judge):\n    '''!\n    scenario: {scenario}\n    query: {name}\n    '''\n" for name in names
    )


def test_a_checkout_and_its_dataset_folder_are_the_same_dataset(written, tmp_path):
    folder = written({"test_case/a.py": file_of("test_a")})
    checkout = folder.parent
    (checkout / "servers").mkdir()
    (checkout / "servers/servers.yaml").write_text("servers: {}")
    (checkout / "releases/v1").mkdir(parents=True)
    (checkout / "releases/v1/testlist_v1.yaml").write_text("- a.py:test_a\n")
    for path in (checkout, folder, str(folder)):
        dataset = Dataset(path)
        assert (dataset.name, dataset.root, dataset.servers_file) == (
            "checkout",
            folder,
            checkout / "servers/servers.yaml",
        )
        assert dataset.uids() == dataset.list_uids("v1") == ("a.py:test_a",)


def test_a_folder_of_another_name_stands_alone(written):
    folder = written({"test_case/a.py": file_of("test_a")}, root="my-tests")
    dataset = Dataset(folder)
    assert (dataset.name, dataset.root, dataset.servers_file, dict(dataset.lists)) == ("my-tests", folder, None, {})


def test_servers_agent_and_name_are_as_given(written, tmp_path, monkeypatch):
    folder = written({"test_case/a.py": file_of("test_a")})
    monkeypatch.delenv("TBX_SERVERS_PYTHON", raising=False)
    assert Dataset(folder).servers_python == sys.executable
    monkeypatch.setenv("TBX_SERVERS_PYTHON", "/from/environment")
    assert Dataset(folder).servers_python == "/from/environment"
    given = Dataset(folder, servers_python="/given", servers=tmp_path / "s.yaml", name="other")
    assert (given.servers_python, given.servers_file, given.name) == ("/given", tmp_path / "s.yaml", "other")
    with pytest.raises(DomainError, match=r"'a/b' cannot name a dataset"):
        Dataset(folder, name="a/b")


def test_where_nothing_is_a_dataset_it_is_told_what_is_wanted(tmp_path):
    with pytest.raises(DomainError, match=r"no dataset at .*there is no such folder.*Give a checkout"):
        Dataset(tmp_path / "none")
    with pytest.raises(DomainError, match=r"it has no dataset/test_case and no test_case folder"):
        Dataset(tmp_path)


def test_all_tests_of_all_folders_are_known_in_the_order_of_their_files(written):
    files = {
        "test_case/b.py": file_of("test_2", "test_1"),
        "test_case/a/deep/er.py": file_of("test_3"),
        "test_case/a.yaml": "test_cases: []",
    }
    assert Dataset(written(files)).uids() == ("er.py:test_3", "b.py:test_2", "b.py:test_1")


def test_of_two_files_with_one_name_the_one_that_the_name_leads_to_is_known(written):
    files = {"test_case/a/a_b.py": file_of("test_1", "test_2"), "test_case/z/a_b.py": file_of("test_1")}
    dataset = Dataset(written(files))
    dataset.refuse_unreadable()
    assert dataset.uids() == ("a_b.py:test_1", "a_b.py:test_2")
    assert dataset.task("a_b.py:test_1").path == "test_case/a/a_b.py"
    first = Dataset(written({"test_case/a_b.py": file_of("test_1")}))  # read before and after the others
    assert first.task("a_b.py:test_1").path == "test_case/a_b.py"


def test_two_files_with_one_name_that_leads_to_neither_are_rejected(written):
    files = {"test_case/x/a.py": file_of("test_1"), "test_case/y/a.py": file_of("test_1")}
    with pytest.raises(DatasetProblems, match=r"test 'test_1' would be a\.py:test_1, like one in test_case/x/a\.py"):
        Dataset(written(files)).refuse_unreadable()


def test_tests_that_would_share_an_id_are_rejected(written):
    text = "test_cases:\n- uid: a b\n- uid: a?b\n"
    with pytest.raises(
        DatasetProblems, match=r"a\.yaml:a b and a\.yaml:a\?b would have the same id, ThinkingBox/a\.yaml\.a_b-v0"
    ):
        Dataset(written({"test_case/a.yaml": text})).refuse_unreadable()


@pytest.mark.parametrize("given", ["file", "names", "release"])
def test_a_test_list_names_the_tests_to_know_in_its_order(written, tmp_path, given):
    folder = written(
        {
            "test_case/a/a_x.py": file_of("test_1", "test_2"),
            "test_case/b.py": file_of("test_1"),
            "test_case/broken.py": "(",
        }
    )
    names = ["b.py:test_1", "a_x.py:test_2", "a/a_x.py:test_1"]
    path = tmp_path / "list.yaml"
    if given == "release":
        path = folder.parent / "releases/v1/testlist_v1.yaml"
        path.parent.mkdir(parents=True)
    path.write_text("".join(f"- {name}\n" for name in names))
    dataset = Dataset(folder, test_list={"file": path, "names": names, "release": "v1"}[given])
    dataset.refuse_unreadable()  # files that are not named are not read
    assert dataset.uids() == ("b.py:test_1", "a_x.py:test_2", "a_x.py:test_1")


def test_all_names_that_lead_to_no_test_are_told(written, tmp_path):
    files = {
        "test_case/ab.py": file_of("test_1") + "def test_s(x):\n    '!{query: a, tags: [skip]}'\n",
        "test_case/deep/er.py": file_of("t"),
    }
    names = ["ab.py", "abc.py:test_1", "ab.py:test_2", "ab.py:test_s", "er.py:t", "ab.py:test_1"]
    dataset = Dataset(written(files), test_list=names)
    with pytest.raises(DatasetProblems) as raised:
        dataset.refuse_unreadable()
    said = [problem.text for problem in raised.value.problems]
    assert len(said) == 5 and dataset.uids() == ("ab.py:test_1",)
    for words, text in zip(
        [
            "write file.py:test",
            "there is no 'abc.py' in its place. Did you mean 'ab.py'?",
            "has no 'test_2'",
            "tags it skip",
            "there is no 'er.py'",
        ],
        said,
        strict=True,
    ):
        assert words in text


def test_a_task_is_built_once_and_only_when_asked_for(written):
    folder = written({"test_case/a.py": file_of("test_1") + file_of("test_2", scenario="none")})
    dataset = Dataset(folder)
    assert dataset.task("a.py:test_1") is dataset.task("a.py:test_1")
    with pytest.raises(
        DatasetProblems,
        match=r"task a\.py:test_2 of dataset 'checkout'.*\n +test_case/a\.py line 8: there is no scenario",
    ):
        dataset.task("a.py:test_2")
    with pytest.raises(DomainError, match=r"unknown task 'a\.py:test_3' in dataset 'checkout'.*Did you mean"):
        dataset.task("a.py:test_3")


def test_validating_tells_every_problem_of_every_file_once(written):
    folder = written(
        {
            "scenario/shop.yaml": "world_state: {}\n",
            "test_case/a.py": file_of("test_1", "test_2"),
            "test_case/b.py": "def broken(:\n",
            "test_case/c.py": file_of("test_1", scenario="none"),
        }
    )
    (folder.parent / "releases/v1").mkdir(parents=True)
    (folder.parent / "releases/v1/testlist_v1.yaml").write_text("- a.py:test_1\n- a.py:test_9\n- a.py\n")
    dataset = Dataset(folder)
    with pytest.raises(DatasetProblems, match=r"dataset 'checkout' in .*checkout: 5 problem\(s\)") as raised:
        dataset.validate()
    assert str(raised.value).splitlines()[1:] == [
        "  dataset/test_case/b.py line 1: this is not Python: invalid syntax",
        "  dataset/scenario/shop.yaml line 1: 'tools' is missing; add it",
        "  dataset/test_case/c.py line 3: there is no scenario 'none'. There is shop.",
        "  releases/v1/testlist_v1.yaml line 2: 'a.py:test_9': there is no such task, or it is tagged skip."
        " Did you mean 'a.py:test_2', 'a.py:test_1', 'c.py:test_1'?",
        "  releases/v1/testlist_v1.yaml line 3: 'a.py' is not the name of a test; write file.py:test",
    ]


def test_a_sound_dataset_is_valid(bikeshop):
    Dataset(bikeshop).validate()


def test_a_list_that_there_is_not_is_answered_with_near_ones(bikeshop):
    with pytest.raises(DomainError, match=r"'bikeshop' has no list 'bikeshop_v2'. Did you mean 'bikeshop_v1'"):
        Dataset(bikeshop).list_uids("bikeshop_v2")


def test_a_folder_without_tests_is_told(tmp_path, written):
    folder = written({})
    (folder / "test_case").rmdir()
    (folder / "test_case").write_text("")
    with pytest.raises(DomainError, match=r"no dataset at"):
        Dataset(folder.parent)
