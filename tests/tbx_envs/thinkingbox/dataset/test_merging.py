"""What a test's init adds to its scenario's world state."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbx_envs.thinkingbox.dataset.merging import merged, merged_init

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


def reference(base, addition):
    """The rules one by one, changing a copy in place; a list, so that null is told from nothing."""
    result = copy.deepcopy(base)
    stack = [(result, addition)]
    if not (type(base) is type(addition) and isinstance(base, dict | list)):
        return copy.deepcopy(addition)
    while stack:
        into, more = stack.pop()
        if isinstance(into, list):
            for item in more:
                into.append(copy.deepcopy(item))
            continue
        for key in more:
            if any(isinstance(into.get(key), kind) and isinstance(more[key], kind) for kind in (dict, list)):
                stack.append((into[key], more[key]))
            else:
                into[key] = copy.deepcopy(more[key])
    return result


@settings(deadline=None)
@given(values, values)
def test_merging_follows_the_rules_and_changes_neither_side(base, addition):
    before = copy.deepcopy((base, addition))
    result = merged(base, addition)
    assert repr(result) == repr(reference(base, addition))  # with the order of keys, and 1 told from True
    assert (base, addition) == before


@pytest.mark.parametrize(
    ("base", "addition", "result"),
    [
        (
            {"l": [1, 2], "d": {"a": 1, "b": 2}},
            {"l": [4], "d": {"b": 11, "c": 12}},
            {"l": [1, 2, 4], "d": {"a": 1, "b": 11, "c": 12}},
        ),
        ({"a": {"b": 1}}, {"a": None}, {"a": None}),
        ({"a": None}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": [1]}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": [[1]]}, {"a": [[1]]}, {"a": [[1], [1]]}),
    ],
)
def test_merging_by_hand(base, addition, result):
    assert merged(base, addition) == result


@pytest.mark.parametrize("nothing", [None, {}, [], "", 0])
def test_a_server_of_which_the_scenario_says_nothing_gets_the_tests_configuration(nothing):
    assert merged_init({"a": nothing}, {"a": {"l": [1]}}) == {"a": {"l": [1]}}


def test_servers_keep_the_scenarios_order_and_those_of_the_test_follow():
    init = merged_init({"b": {"x": 1}, "a": {}}, {"c": {}, "a": {"y": 2}})
    assert list(init.items()) == [("b", {"x": 1}), ("a", {"y": 2}), ("c", {})]


def test_without_an_init_of_the_test_the_scenario_is_taken_as_it_is():
    assert merged_init({"a": {"x": None}}, {}) == {"a": {"x": None}}
