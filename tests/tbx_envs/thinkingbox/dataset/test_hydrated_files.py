"""JSONL files of hydrated test cases: each line stands for itself."""

import json

import pytest

from tbx_envs.errors import ConfigError, DomainError
from tbx_envs.messages import Text
from tbx_envs.task import ExpectedCall, Limits
from tbx_envs.thinkingbox.dataset.dataset import Dataset
from tbx_envs.thinkingbox.dataset.problems import DatasetProblems


def case(uid="a.py:test_a", **changes):
    """A line as the original writes it."""
    tool = {"name": "buy", "override_description": None, "override_arg_description": None, "direct_response": None}
    golden = {"golden_test_case": {"tool_interactions": [{"tool": "buy", "parameters": {"n": None}}]}}
    return {
        "uid": uid,
        "agent": {"system_instructions": "Be kind.", "builtin_tools": []},
        "scenario": {
            "world_state": {"shop": {"rows": [1]}},
            "tools": [{**tool, "is_end_turn": False}],
            "bot_instructions": "Rules.",
            "tags": {"labels": ["of-scenario"], "category": [], "domain": None, "eval_type": None, "skip": False},
            "fixtures": {},
            "metadata": {"clock": "2025-10-01T00:00:00"},
        },
        "history": [{"T": "Text", "role": "user", "content": "before", "metadata": {}}],
        "query": "Hello.",
        "test_code": "__tb_test_fn = print\n",
        "bot_instructions": "More.",
        "user_context": None,
        "max_user_sim_turns": 2,
        "max_agent_sim_turns": 9223372036854775807,
        "init": {"shop": {"rows": [2], **golden}},
        "format_query": True,
        "metadata": {
            "scenario": "shop",
            "agent": "think",
            "test_case_file": "/x/a.py",
            "test_case_name": "test_a",
            "own": 1,
        },
        "tags": {"labels": ["of-scenario", "t"], "category": [], "domain": "misc", "eval_type": None, "skip": False},
        "fixtures": {"f": {"type": "m.f", "n": 1}},
        **changes,
    }


@pytest.fixture
def jsonl(tmp_path):
    def write(*lines):
        path = tmp_path / "cases.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    return write


def test_a_line_becomes_a_task(jsonl):
    dataset = Dataset(jsonl("", case(), case("a.py:test_b")))
    assert (dataset.name, dataset.uids(), dict(dataset.lists)) == ("cases", ("a.py:test_a", "a.py:test_b"), {})
    task = dataset.task("a.py:test_a")
    assert (task.path, task.line, task.scenario, task.agent) == ("cases.jsonl", 2, "shop", "think")
    assert task.init["shop"]["rows"] == [1, 2] and task.servers == ("shop",)
    assert task.expected_calls == (ExpectedCall("buy", {"n": None}),)
    assert task.tags == ("domain:misc", "of-scenario", "t")  # they are merged already
    assert task.bot_instructions == "Rules.\nMore." and task.history == (Text("user", "before"),)
    assert task.limits == Limits(2, 9223372036854775807) and task.format_query
    assert task.metadata == {"clock": "2025-10-01T00:00:00", "own": 1} and task.clock.year == 2025
    assert task.fixtures == {"f": {"type": "m.f", "n": 1}}


def test_lines_that_are_no_cases_are_told_at_once(jsonl):
    dataset = Dataset(jsonl("{", case(), "[1]", case(), {"uid": "a"}, case("b.py:x", query=5)))
    with pytest.raises(DatasetProblems) as raised:
        dataset.refuse_unreadable()
    assert [problem.line for problem in raised.value.problems] == [1, 3, 4, 5]
    assert "a.py:test_a is already at line 2" in str(raised.value)
    with pytest.raises(DatasetProblems) as raised:
        dataset.validate()
    assert [problem.line for problem in raised.value.problems] == [1, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tags": {"colour": 1}}, "tags have no 'colour'"),
        ({"history": [{"T": "Song"}]}, "Song"),
        ({"init": {"shop": {"golden_test_case": {"tool_interactions": [5]}}}}, "call 0 of golden_test_case"),
    ],
)
def test_what_is_wrong_in_a_line_is_told(jsonl, changes, said):
    with pytest.raises(DatasetProblems, match=rf"(?s)cases\.jsonl line 1: .*{said}"):
        Dataset(jsonl(case(**changes))).task("a.py:test_a")


def test_a_file_says_itself_which_tests_and_agents_there_are(jsonl):
    with pytest.raises(ConfigError, match=r"leave test_list and agent out"):
        Dataset(jsonl(case()), agent="other")


def test_a_file_of_another_kind_is_no_dataset(tmp_path):
    (tmp_path / "cases.json").write_text("{}")
    with pytest.raises(DomainError, match=r"no dataset at .*cases\.json"):
        Dataset(tmp_path / "cases.json")
