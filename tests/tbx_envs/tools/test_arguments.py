from typing import Annotated, Literal

import jsonschema
import pytest

from tbx_envs.tools.arguments import InvalidCall, checked_arguments, find_tool, transport_problem
from tbx_envs.tools.tool import Tool, ToolContext, tool


@tool(mutates=False)
def move(
    context: ToolContext,
    *,
    visit_id: Annotated[str, "Id of the visit."],
    days: Annotated[int, "How many days."],
    hours: Annotated[float | None, "Hours."] = None,
    urgent: Annotated[bool | None, "Is it urgent?"] = None,
    reason: Annotated[Literal["ill", "busy"] | None, "Why."] = None,
    people: Annotated[list[str] | None, "Who comes."] = None,
) -> str:
    """Move a visit."""
    return "moved"


@tool(mutates=False)
def look(context: ToolContext) -> str:
    """Look."""
    return "seen"


VALID = {"visit_id": "V1", "days": 2}


@pytest.mark.parametrize(
    ("name", "written", "becomes"),
    [
        ("days", "35", 35),
        ("days", " -3 ", -3),
        ("days", 35.0, 35),
        ("hours", "3.5", 3.5),
        ("hours", "7", 7.0),
        ("hours", 7, 7),
        ("urgent", "true", True),
        ("urgent", "False", False),
        ("visit_id", 35, "35"),
        ("people", '["Ann", 3]', ["Ann", "3"]),
        ("people", ["Ann"], ["Ann"]),
    ],
)
def test_harmless_types_are_coerced(name, written, becomes):
    value = checked_arguments(move, {**VALID, name: written})[name]
    assert value == becomes and type(value) is type(becomes)


def test_null_for_an_optional_argument_is_as_if_it_were_not_there():
    assert checked_arguments(move, {**VALID, "reason": None}) == VALID


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("days", "three"),
        ("days", "3.5"),
        ("days", 3.5),
        ("days", 1e300),
        ("days", True),
        ("days", 2**63),
        ("days", "9223372036854775808"),
        ("days", "٣"),
        ("hours", float("nan")),
        ("hours", "inf"),
        ("hours", "1e999"),
        ("urgent", 1),
        ("urgent", "yes"),
        ("visit_id", 1.5),
        ("visit_id", True),
        ("visit_id", "\ud800"),
        ("visit_id", {"id": "V1"}),
        ("visit_id", object()),
        ("reason", "ILL"),
        ("people", "Ann"),
        ("people", '["Ann"'),
        ("people", [["Ann"]]),
        ("days", None),
    ],
)
def test_what_does_not_fit_is_rejected_and_the_argument_named(name, value):
    with pytest.raises(InvalidCall, match=rf"move was not called\..*{name}"):
        checked_arguments(move, {**VALID, name: value})


def test_all_problems_of_a_call_are_in_one_message():
    with pytest.raises(InvalidCall) as error:
        checked_arguments(move, {"vist_id": "V1", "days": "soon", "reason": "bussy", "people": ["Ann", 3.5]})
    assert str(error.value) == (
        "move was not called. Unknown argument \"vist_id\". Did you mean 'visit_id'? visit_id is required "
        'and missing. days must be an integer, got "soon". reason must be one of "ill", "busy", got "bussy". '
        "Did you mean 'busy'? people[1] must be a string, got 3.5. Its arguments: visit_id (string, required), "
        'days (integer, required), hours (number), urgent (boolean), reason (one of "ill", "busy"), people '
        "(array of string)."
    )


@pytest.mark.parametrize(
    ("arguments", "wording"),
    [
        ([1], "move was not called. Arguments must be a JSON object, got [1]."),
        ({"visit_id": None, "days": 1}, "move was not called. visit_id must be a string, got null."),
        ({**VALID, "days": 10**30}, "move was not called. days is beyond 64 bits."),
        ({**VALID, "hours": float("inf")}, "move was not called. hours must be a finite number."),
        ({**VALID, "people": "Ann"}, 'move was not called. people must be an array of string, got "Ann".'),
        (
            {**VALID, "visit_id": "\udc00"},
            "move was not called. visit_id contains half a surrogate pair, which is no valid text.",
        ),
        ({**VALID, 7: 1}, "move was not called. Unknown argument 7."),
    ],
)
def test_the_wording_of_argument_errors_is_pinned(arguments, wording):
    with pytest.raises(InvalidCall) as error:
        checked_arguments(move, arguments)
    assert str(error.value).startswith(wording + " Its arguments: visit_id (string, required)")


def test_a_tool_without_arguments_says_so():
    with pytest.raises(InvalidCall) as error:
        checked_arguments(look, {"at": "x"})
    assert str(error.value) == 'look was not called. Unknown argument "at". It takes no arguments.'


def test_an_unknown_tool_is_answered_with_near_names():
    tools = {"move": move, "look": look}
    assert find_tool(tools, "move") is move
    with pytest.raises(InvalidCall) as error:
        find_tool(tools, "moove")
    assert str(error.value) == "There is no tool \"moove\". Did you mean 'move'? Tools: move, look."
    with pytest.raises(InvalidCall, match="There is no tool null"):
        find_tool(tools, None)


def test_no_text_of_the_validating_library_reaches_the_model():
    foreign = Tool("t", "T.", {"type": "object", "properties": {"n": {"type": "integer", "minimum": 5}}}, False, print)
    theirs = next(jsonschema.Draft202012Validator(dict(foreign.input_schema)).iter_errors({"n": 3})).message
    with pytest.raises(InvalidCall) as error:
        checked_arguments(foreign, {"n": 3})
    assert theirs not in str(error.value)
    assert "n breaks the rule minimum 5, got 3." in str(error.value)


def test_a_long_wrong_value_is_cut_and_stays_valid_text():
    with pytest.raises(InvalidCall) as error:
        checked_arguments(move, {**VALID, "reason": "🙂" * 10_000})
    assert len(str(error.value)) < 500
    str(error.value).encode("utf-8")


def test_what_no_transport_can_carry_is_found_before_it_is_sent():
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    assert transport_problem("move", VALID) is None
    for name, arguments in [
        (7, VALID),
        ("\ud800", VALID),
        ("move", [1]),
        ("move", {1: 2}),
        ("move", {"\ud800": 2}),
        ("move", {"days": {1, 2}}),
        ("move", {"people": nested}),
        ("move", {"days": float("nan")}),
        ("move", {"people": [{"a": 10**30}]}),
    ]:
        problem = transport_problem(name, arguments)
        assert problem is not None
        problem.encode("utf-8")


def test_an_answer_is_short_however_much_is_wrong():
    many = {f"p{number}": "x" for number in range(4000)}
    for written in (many, {**VALID, "people": [7.5] * 4000}, {"x" * 100_000: 1}):
        with pytest.raises(InvalidCall) as wrong:
            checked_arguments(move, written)
        assert len(str(wrong.value)) < 3000
    with pytest.raises(InvalidCall, match="And more like these"):
        checked_arguments(move, many)
    assert len(transport_problem("x" * 100_000, {"a": float("nan")})) < 400
