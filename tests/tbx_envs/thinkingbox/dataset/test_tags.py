"""Tags: what each means, what those of a scenario and of a test are together."""

import pytest

from tbx_envs.thinkingbox.dataset.tags import Tags, is_skipped, merge_tags, parse_tags, unknown_values


def test_tags_are_told_apart_by_their_prefix():
    tags = parse_tags(["Label One", "Domain:HR", "EVAL:a:B", "category:x", "category:Y", "Skip", "other:z"])
    assert tags == Tags(("Label One", "other:z"), ("x", "y"), "hr", "a:b", skip=True)
    assert tags.flat() == ("domain:hr", "eval:a:b", "category:x", "category:y", "Label One", "other:z", "skip")


def test_of_several_domains_the_last_one_counts():
    tags = parse_tags(["domain:a", "domain:b", "eval:x", "eval:y"])
    assert (tags.domain, tags.eval_type) == ("b", "y")


@pytest.mark.parametrize("nothing", [None, [], {}])
def test_no_tags(nothing):
    assert parse_tags(nothing) == Tags() and Tags().flat() == ()


def test_tags_of_hydrated_test_cases_are_a_mapping():
    given = {"labels": ["a"], "category": ["c"], "domain": "d", "eval_type": None, "skip": True}
    assert parse_tags(given).flat() == ("domain:d", "category:c", "a", "skip")
    with pytest.raises(ValueError, match=r"tags have no 'colour'; they have labels, category"):
        parse_tags({"colour": "red"})


def test_all_tags_that_are_none_are_told():
    with pytest.raises(ValueError, match=r"tag 5 is not text") as raised:
        parse_tags([5, "domain:", ["a"], "fine"])
    assert len(str(raised.value).splitlines()) == 3


def test_a_test_adds_labels_and_overrides_the_rest():
    scenario = Tags(("s",), ("of scenario",), "d1", "e1", skip=False)
    assert merge_tags(scenario, Tags(("t",), ("of test",), "d2", None)) == Tags(("s", "t"), ("of test",), "d2", "e1")
    assert merge_tags(scenario, Tags(eval_type="e2", skip=True)) == Tags(("s",), (), "d1", "e2", skip=True)


def test_values_that_a_taxonomy_lacks_are_told_with_near_ones():
    taxonomy = {"domain": ("hr", "misc"), "category": ("user",)}
    tags = parse_tags(["domain:mist", "category:user", "category:boss", "eval:anything"])
    domain, category = unknown_values(tags, taxonomy)
    assert domain == "tag 'domain:mist' is not in the taxonomy. Did you mean 'misc'? Known: hr, misc."
    assert "'category:boss'" in category


@pytest.mark.parametrize(
    ("given", "skipped"),
    [(["SKIP"], True), ([5, "skip"], True), (["skipped"], False), ({"skip": True}, True), ({}, False), (None, False)],
)
def test_skip_is_seen_among_unsound_tags(given, skipped):
    assert is_skipped(given) is skipped
