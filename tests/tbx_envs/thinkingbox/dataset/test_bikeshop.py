"""Our own small checkout, `tests/data/bikeshop`: every way in which a dataset says something, hydrated."""

import datetime

import pytest

from tbx_envs.messages import BadCall, Text, ToolCall, ToolResult, Turn
from tbx_envs.thinkingbox.dataset.dataset import Dataset


@pytest.fixture
def shop(bikeshop):
    return Dataset(bikeshop)


def test_it_has_fourteen_tasks_on_every_kind_of_server(shop, bikeshop):
    tasks = [shop.task(uid) for uid in shop.uids()]
    assert len(tasks) == 14 and {task.split for task in tasks} == {"train"}
    assert {task.servers for task in tasks} == {("bikes",), ("bikes", "notes"), ("trouble",)}
    assert shop.servers_file == bikeshop / "servers/servers.yaml"
    assert sorted(shop.lists) == ["bikeshop_small", "bikeshop_v1"]
    assert set(shop.list_uids("bikeshop_v1")) == set(shop.uids()) - {"desk_list.yaml:trouble_dies"}


def test_lists_of_scenario_and_test_are_put_together(shop):
    task = shop.task("rentals_main.py:test_refund_after_the_end")
    assert [row["id"] for row in task.init["bikes"]["data_patch"]["bikes"]] == ["B5", "B6"]
    assert task.init["bikes"]["data_patch"]["rentals"][0]["created_at"] == "2025-09-30"
    assert [source["name"] for source in task.init["bikes"]["sources"]] == ["rentals.md", "refunds.md"]
    assert [dict(call.arguments) for call in task.expected_calls][-1] == {"rental_id": "R7", "amount": "5.50"}


def test_calls_of_two_servers_are_told_apart(shop):
    task = shop.task("front_desk.py:test_note_on_the_second_server")
    calls = list(zip(task.expected_servers, [call.tool for call in task.expected_calls], strict=True))
    assert calls == [("bikes", "find_customer"), ("notes", "add_note")]
    choices = {tool.name: tool for tool in task.tools}
    assert list(choices) == ["find_customer", "update_customer", "refund", "add_note", "list_notes", "get_today"]
    assert not choices["add_note"].ends_turn and choices["get_today"].ends_turn  # the last entry of a name counts
    assert choices["refund"].direct_response and choices["find_customer"].argument_descriptions
    assert (task.metadata["desk"], task.metadata["shift"]) == ("front", "early")


def test_fixtures_of_folders_and_scenario_override_each_other(shop):
    assert shop.task("rentals_main.py:test_end_rental").fixtures == {
        "counted": {"type": "collections.Counter", "a": 2},
        "rows": {"type": "collections.Counter", "of": "conftest"},
    }
    assert shop.task("front_desk.py:test_refund_is_told").fixtures == {
        "counted": {"type": "collections.Counter", "a": 1},
        "rows": {"type": "collections.Counter", "of": "scenario"},
    }


def test_what_was_said_before_is_there(shop):
    said = shop.task("front_desk.py:test_next_turn").history
    bad = BadCall(
        "call_before_2", '{"name": "find_customer", "arguments": {}}', "Error: tool arguments must be an object"
    )
    assert said == (
        Text("user", "I am ada@example.org. My number is 555-0177 now."),
        Turn(
            "One moment.",
            (ToolCall("call_before_1", "find_customer", {"email": "ada@example.org"}), bad),
            "The customer must be found first.",
        ),
        ToolResult("call_before_1", "find_customer", '{"id": "C1"}'),
        ToolResult("call_before_2", "", "Error: tool arguments must be an object", "invalid"),
        Turn(calls=(ToolCall("call_before_3", "update_customer", {"customer_id": "C1", "phone": "555-0177"}),)),
        ToolResult("call_before_3", "update_customer", '{"id": "C1", "phone": "555-0177"}'),
        Turn("Your number is changed."),
    )


def test_limits_instructions_clock_and_tags_are_there(shop):
    few = shop.task("rentals_main.py:test_few_turns")
    assert (few.limits.user_turns, few.limits.agent_turns) == (1, 4)
    assert few.bot_instructions.startswith("# Rules of the shop\n") and few.bot_instructions.endswith(
        "south is closed.\n"
    )
    assert few.tags == ("domain:misc", "eval:knowledge-qa:text", "category:user", "from-scenario")
    greeting = shop.task("desk_list.yaml:greeting")
    assert greeting.format_query and greeting.clock == datetime.datetime(2025, 10, 1, 18, 30) and greeting.clock_runs
    today = shop.task("rentals_main.py:test_rental_of_today")
    assert (today.clock, today.clock_runs) == (datetime.datetime(2025, 10, 1, 9), False)
    with pytest.raises(Exception, match=r"unknown task"):
        shop.task("rentals_main.py:test_not_ready")  # tagged skip


def test_the_code_of_a_check_keeps_the_lines_of_its_file(shop):
    task = shop.task("rentals_main.py:test_few_turns")
    source = (shop.root / task.path).read_text().split("\n")
    code = task.test_code.split("\n")
    assert code[-2:] == ["__tb_test_fn = test_few_turns", ""] and len(code) == len(source) + 2
    assert code[task.line - 1] == source[task.line - 1] == "def test_few_turns(x: TestContext, judge: Judge):"
    assert [line for line in code if line.startswith("def test_")] == [source[task.line - 1]]
    compile(task.test_code, task.path, "exec")
