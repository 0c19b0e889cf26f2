"""Schemas of servers as they are published, without starting one. The oracle is jsonschema on the server's own."""

import jsonschema
import pytest

from tbx_envs.errors import ToolFault
from tbx_envs.thinkingbox.servers.foreign_tools import published_schema

NODE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}},
    "required": ["name"],
}
RECURSIVE = {
    "a tree": {"properties": {"tree": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": NODE}},
    "the root": {"properties": {"tree": {"$ref": "#"}, "name": {"type": "string"}}},
    "a root that is a reference": {
        "$ref": "#/$defs/Root",
        "$defs": {"Root": {"properties": {"tree": {"$ref": "#/$defs/Root"}, "name": {"type": "string"}}}},
    },
    "each other, with a name that is escaped": {
        "properties": {"tree": {"$ref": "#/$defs/a~1b"}},
        "$defs": {
            "a/b": {"properties": {"tree": {"$ref": "#/$defs/C"}}},
            "C": {"properties": {"name": {"type": "string"}, "tree": {"$ref": "#/$defs/a~1b"}}},
        },
    },
    "a part of a definition": {
        "properties": {"tree": {"$ref": "#/$defs/Node/properties/next"}},
        "$defs": {"Node": {**NODE, "properties": {**NODE["properties"], "next": {"$ref": "#/$defs/Node"}}}},
    },
}


def nested(levels, name):
    value = {"name": name}
    for _ in range(levels):
        value = {"tree": value, "next": value, "name": "x"}
    return {"tree": value}


@pytest.mark.parametrize("schema", RECURSIVE.values(), ids=RECURSIVE)
def test_a_recursive_schema_is_published_and_means_the_same(schema):
    published = published_schema("s", "t", schema)
    jsonschema.Draft202012Validator.check_schema(published)
    verdicts = set()
    for levels in range(6):
        for name in ("x", 7):
            instance = nested(levels, name)
            wanted = jsonschema.Draft202012Validator(schema).is_valid(instance)
            assert jsonschema.Draft202012Validator(published).is_valid(instance) == wanted, instance
            verdicts.add(wanted)
    assert verdicts == {True, False}


def test_references_that_multiply_stay_references():
    levels = {f"D{n}": {"properties": {side: {"$ref": f"#/$defs/D{n + 1}"} for side in "ab"}} for n in range(40)}
    schema = {"title": "Laughs", "properties": {"x": {"$ref": "#/$defs/D0"}}, "$defs": {**levels, "D40": {}}}
    assert published_schema("s", "t", schema) == {name: value for name, value in schema.items() if name != "title"}


@pytest.mark.parametrize("reference", ["#/$defs/Nothing", "http://elsewhere/schema.json", "other"])
def test_a_reference_to_nothing_is_a_fault_that_names_it(reference):
    with pytest.raises(ToolFault, match="tool 't': its schema refers to"):
        published_schema("s", "t", {"properties": {"x": {"$ref": reference}}})
