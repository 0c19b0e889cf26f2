import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbx_envs.chat.typed_values import typed_arguments


def typed(text, schema, **root):
    return typed_arguments({"x": text}, {"properties": {"x": schema}, **root})["x"]


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "35", "35"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, " a ", " a "),
        ({"type": "string"}, '["a"]', '["a"]'),
        ({"type": "integer"}, "35", 35),
        ({"type": "integer"}, " -3\n", -3),
        ({"type": "integer"}, "35.0", 35),
        ({"type": "integer"}, "35.5", "35.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "", ""),
        ({"type": "integer"}, "thirty", "thirty"),
        ({"type": "integer"}, "9" * 30, "9" * 30),
        ({"type": "number"}, "3.5", 3.5),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "3.0", 3.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, '["a", {"b": null}]', ["a", {"b": None}]),
        ({"type": "array"}, "a, b", "a, b"),
        ({"type": "array"}, "[1] and more", "[1] and more"),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ({"type": "object"}, '"a"', '"a"'),
        ({"type": "null"}, "None", None),
        (NULLABLE, "null", None),
        (NULLABLE, "None", None),
        (NULLABLE, "nothing", "nothing"),
        (NULLABLE, "35", "35"),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "4", 4),
        ({"type": ["string", "array"]}, '["a"]', ["a"]),
        ({"type": ["string", "array"]}, "a", "a"),
        ({"type": ["string", "integer"]}, "007", "007"),
        ({"type": ["string", "integer"]}, "7", "7"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": [[1], {}]}, "[1]", [1]),
        ({"const": True}, "true", True),
        ({"allOf": [{"type": "integer"}]}, "2", 2),
        ({"anyOf": [{"type": "integer"}, {}]}, "2", "2"),
        ({}, "2", "2"),
        ({}, '{"a": 1}', '{"a": 1}'),
        (True, "2", "2"),
        ({"type": 3}, "2", "2"),
        ({"type": "int"}, "2", "2"),
        ({"$ref": "#/$defs/Missing"}, "2", "2"),
    ],
)
def test_a_text_gets_a_type_of_its_schema_or_stays_text(schema, text, value):
    assert json.dumps(typed(text, schema)) == json.dumps(value)  # True is not 1, 3.0 is not 3


def test_references_are_followed_and_circles_end():
    definitions = {
        "Size": {"enum": [1, 2]},
        "Shoe": {"type": "object"},
        "Circle": {"anyOf": [{"$ref": "#/$defs/Circle"}, {"type": "integer"}]},
    }
    assert typed("2", {"$ref": "#/$defs/Size"}, **{"$defs": definitions}) == 2
    assert typed('{"a": 1}', {"anyOf": [{"$ref": "#/$defs/Shoe"}, {"type": "null"}]}, **{"$defs": definitions}) == {
        "a": 1
    }
    assert typed("2", {"$ref": "#/$defs/Circle"}, **{"$defs": definitions}) == "2"


@pytest.mark.parametrize("schema", [{}, {"properties": None}, {"properties": {"y": {"type": "integer"}}}])
def test_an_argument_that_the_schema_does_not_know_stays_text(schema):
    assert typed_arguments({"x": "3"}, schema) == {"x": "3"}


types = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object", "other"])
schemas = st.recursive(
    st.fixed_dictionaries({"type": types | st.lists(types) | st.integers()}) | st.just({}) | st.none(),
    lambda inner: st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
    max_leaves=4,
)


@given(st.text(max_size=20) | st.sampled_from(["null", "-0", "1e5", "[[]]", "{}", "1.0", "-1.0e3"]), schemas)
def test_a_value_is_the_text_or_what_the_text_says_in_json(text, schema):
    value = typed(text, schema)
    words = {"None": None, "True": True, "False": False}
    assert value == text or value == words.get(text.strip()) or value == json.loads(text)
