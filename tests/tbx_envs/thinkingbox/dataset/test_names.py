"""Where tests are found: in folders, by name and in lists."""

import pytest

from tbx_envs.thinkingbox.dataset import names as names_of_tests
from tbx_envs.thinkingbox.dataset.names import find_test_file, read_test_list, release_lists, split_name, uid_of_name
from tbx_envs.thinkingbox.dataset.problems import DatasetProblems


def touched(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_test_files_are_all_python_and_yaml_but_for_two_kinds(tmp_path):
    names = [
        "b.py",
        "a/c.py",
        "a/b/d.yaml",
        "conftest.yaml",
        "a/conftest.yaml",
        "b.meta.yaml",
        "words.txt",
        "e.yml",
        "f.json",
    ]
    touched(tmp_path, *names, "folder.py/inside.py")
    found = [path.relative_to(tmp_path).as_posix() for path in names_of_tests.test_files_in(tmp_path)]
    assert found == ["a/b/d.yaml", "a/c.py", "b.py", "folder.py/inside.py"]


@pytest.mark.parametrize(
    ("there", "found"),
    [
        (["my_test_case.py", "my_test/my_test_case.py"], "my_test_case.py"),
        (["my/my_test_case.py", "my_test/my_test_case.py"], "my_test/my_test_case.py"),
        (["my/my_test_case.py"], "my/my_test_case.py"),
        (["my_test_case.py/my_test_case.py"], None),
        (["my/test/my_test_case.py", "other/my_test_case.py"], None),
        ([], None),
    ],
)
def test_a_name_leads_to_the_longest_prefix_that_has_its_file(tmp_path, there, found):
    touched(tmp_path, *there)
    assert find_test_file(tmp_path, "my_test_case.py") == (found and tmp_path / found)


def test_a_name_may_say_its_folder_but_not_leave_the_tests(tmp_path):
    touched(tmp_path, "test_case/a/b.py", "outside.py")
    folder = tmp_path / "test_case"
    assert find_test_file(folder, "a/b.py") == folder / "a/b.py"
    assert find_test_file(folder, "../outside.py") is None
    assert find_test_file(folder, str(tmp_path / "outside.py")) is None


@pytest.mark.parametrize(
    ("name", "parts"),
    [("a.py:b", ("a.py", "b")), ("a.py", None), ("a:b:c", None), (":b", None), ("a:", None), ("", None)],
)
def test_a_name_has_exactly_one_colon(name, parts):
    assert split_name(name) == parts


def test_a_uid_has_no_folder():
    assert uid_of_name("rentals/a.py:b") == "a.py:b" and uid_of_name("clinic/visit/007") == "clinic/visit/007"


def test_a_list_keeps_its_order(tmp_path):
    (tmp_path / "list.yaml").write_text("# words\n- b.py:x\n- 'a.py:y'\n- b.py:a\n")
    assert read_test_list(tmp_path / "list.yaml") == ("b.py:x", "a.py:y", "b.py:a")


@pytest.mark.parametrize(
    ("text", "lines"),
    [("", [1]), ("a: 1", [1]), ("[]", [1]), ("- a:b\n- 5\n- {a: b}\n- c:d\n- a:b\n", [2, 3, 5])],
)
def test_a_list_that_is_none_is_rejected_with_all_lines(tmp_path, text, lines):
    (tmp_path / "list.yaml").write_text(text)
    with pytest.raises(DatasetProblems) as raised:
        read_test_list(tmp_path / "list.yaml")
    assert [problem.line for problem in raised.value.problems] == lines


def test_releases_give_lists_by_name(tmp_path):
    touched(
        tmp_path,
        "one/testlist_other.yaml",
        "one/README.md",
        "two/testlist_a.yaml",
        "two/testlist_b.yaml",
        "none/x.yaml",
        "testlist_c.yaml",
    )
    lists = {name: path.relative_to(tmp_path).as_posix() for name, path in release_lists(tmp_path).items()}
    assert lists == {
        "one": "one/testlist_other.yaml",
        "two/a": "two/testlist_a.yaml",
        "two/b": "two/testlist_b.yaml",
    }
    assert release_lists(tmp_path / "nowhere") == {}
