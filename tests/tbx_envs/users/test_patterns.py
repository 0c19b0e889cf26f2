"""The oracle is `re.search`; the work is counted in the places where a pattern is tried."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbx_envs.domains import load_domain
from tbx_envs.users import patterns
from tbx_envs.users.patterns import first_match

CLINIC = load_domain("clinic")
OF_CLINIC = [*CLINIC.consents.values(), *(topic.pattern for topic in CLINIC.topics.values())]
PATTERNS = [*OF_CLINIC, r"paper.*\?", r"a(b|c.*d).*e|x", r"[.*|]y.*z", r"\.*a|b\|.*c", r"aa.*a?a", r"(?i)a.*b"]
WORDS = ["accept ", "fee ", "$2", "agree", "ok ", "\n", ". ", "charged ", "shall I", "paper", "?", *"abcdexyz|.", " "]


@given(st.lists(st.sampled_from(WORDS), max_size=14).map("".join))
def test_a_pattern_is_found_where_re_finds_it(said):
    for pattern in PATTERNS:
        found = re.search(pattern, said, re.IGNORECASE)
        assert first_match(pattern, said) == (found.start() if found else None), pattern


class Counted:
    """A pattern that counts how often it is tried at a place."""

    def __init__(self, pattern):
        self.pattern, self.tried = pattern, 0

    def match(self, text, start):
        self.tried += 1
        return self.pattern.match(text, start)

    def search(self, text):
        return self.pattern.search(text)


@pytest.fixture
def counted():
    """The searches of a pattern, counted."""
    patterns._searches.cache_clear()

    def of(pattern):
        searches = patterns._searches(pattern)
        for search in searches:
            search._whole = Counted(search._whole)
        return [search._whole for search in searches]

    yield of
    patterns._searches.cache_clear()


@pytest.mark.parametrize("said", ["accept ", "fee ", "accept fee\n", "fee $2 agree\n", "agree\nfee "])
def test_of_thousands_of_requests_hardly_any_looks_through_the_rest_of_its_line(said, counted):
    searches = counted(CLINIC.consents["late_fee"])
    assert len(searches) == 2 and all(search.tried == 0 for search in searches)
    for size in (1, 10, 100):
        first_match(CLINIC.consents["late_fee"], said * (80 * size))
    assert sum(search.tried for search in searches) <= 2 * 3


@pytest.mark.parametrize("pattern", OF_CLINIC)
def test_no_pattern_of_the_clinic_looks_through_a_line_in_another_way(pattern):
    """Repetition without a bound stands outside of parentheses, or repeats white space only."""
    rest = pattern.replace(r"\s*", "")
    alternatives = list(patterns._split(rest, "|"))
    assert all(alternative.count("*") + alternative.count("+") <= 1 for alternative in alternatives)
    assert all("*" not in part and "+" not in part for one in alternatives for part in patterns._split(one, ".*"))
