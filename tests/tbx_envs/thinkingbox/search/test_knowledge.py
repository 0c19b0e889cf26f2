from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbx_envs.thinkingbox.search.knowledge import STOP_WORDS, Hit, KnowledgeBase, Snippet, words

REFUNDS = Snippet("refunds", "Refunds are paid within five days, to the card that was charged.")
BIKES = Snippet("bikes", "A bike that comes back broken costs 40.00. Broken bikes are never lent.")
HOURS = Snippet("hours", "The station café opens at eight.")
BASE = KnowledgeBase([REFUNDS, BIKES, HOURS])


def bm25_by_hand(documents: list[list[str]], query: list[str]) -> list[float]:
    """Lucene's BM25, one document and one word at a time."""
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for word in query:
            having = sum(word in other for other in documents)
            rarity = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            times = document.count(word)
            score += rarity * times / (times + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean))
        scores.append(score)
    return scores


WORD = st.sampled_from(["refund", "bike", "card", "kafé", "退", "7"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(WORD, min_size=1, max_size=12), min_size=1, max_size=8), st.lists(WORD, max_size=6))
def test_ranking_equals_bm25_by_hand(documents: list[list[str]], query: list[str]) -> None:
    base = KnowledgeBase(Snippet(str(number), " ".join(document)) for number, document in enumerate(documents))
    expected = bm25_by_hand(documents, query)
    found = base.ranking(" ".join(query))
    assert {position for position, _ in found} == {position for position, score in enumerate(expected) if score > 0}
    for position, score in found:
        assert score == pytest.approx(expected[position], rel=1e-9)
    # Best first; among equals the snippets' own order.
    assert found == sorted(found, key=lambda hit: (-hit[1], hit[0]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(WORD, max_size=12), min_size=1, max_size=8).filter(any),
    st.lists(WORD, min_size=1, max_size=6),
)
def test_scores_are_those_of_the_library_bm25s_bit_for_bit(documents: list[list[str]], query: list[str]) -> None:
    import bm25s

    library = bm25s.BM25(k1=1.5, b=0.75, method="lucene", dtype="float64", backend="numpy")
    library.index(documents, show_progress=False)
    known = [word for word in query if any(word in document for document in documents)]
    expected = library.get_scores(known).tolist() if known else [0.0] * len(documents)
    base = KnowledgeBase(Snippet(str(number), " ".join(document)) for number, document in enumerate(documents))
    assert sorted(base.ranking(" ".join(query))) == [(place, score) for place, score in enumerate(expected) if score]


def test_a_search_gives_the_best_hits_with_their_rank() -> None:
    hits = BASE.search("Which BIKE is broken, and is my refund paid?")
    assert [(hit.source, hit.rank) for hit in hits] == [("bikes", 1), ("refunds", 2)]
    assert isinstance(hits[0], Hit)
    assert hits[0].text == BIKES.text
    assert hits[0].score > hits[1].score > 0
    assert BASE.search("bike refund", limit=1) == [hits[0]] or len(BASE.search("bike refund", limit=1)) == 1


def test_equal_snippets_keep_their_order() -> None:
    base = KnowledgeBase([Snippet("b", "one refund"), Snippet("a", "one refund"), Snippet("c", "other words")] * 2)
    assert [hit.source for hit in base.search("refund", limit=10)] == ["b", "a", "b", "a"]


@pytest.mark.parametrize("query", ["", "   ", "?!", "the of and", "unheard", "\ud800"])
def test_a_query_without_known_words_finds_nothing(query: str) -> None:
    assert BASE.search(query) == []


@pytest.mark.parametrize("snippets", [[], [Snippet("empty", "")], [Snippet("stop", "the of and"), Snippet("", "!")]])
def test_a_base_without_words_finds_nothing(snippets: list[Snippet]) -> None:
    assert KnowledgeBase(snippets).search("refund") == []


@pytest.mark.parametrize("limit", [0, -1])
def test_no_hits_are_given_when_none_are_asked_for(limit: int) -> None:
    assert BASE.search("refund", limit=limit) == []


def test_case_width_accents_and_plurals() -> None:
    assert BASE.search("CAFE\u0301S")[0].source == "hours"  # decomposed, upper case, plural
    assert words("Ｒｅｆｕｎｄｓ １２３") == ["refund", "123"]
    assert words("policies boxes buses glass status is") == ["policy", "boxe", "buse", "glass", "status"]
    assert words("snake_case x-ray 40.00") == ["snake", "case", "x", "ray", "40", "00"]


def test_scripts_without_spaces_are_found_by_part() -> None:
    base = KnowledgeBase([Snippet("zh", "退款政策"), Snippet("th", "นโยบาย"), Snippet("ja", "自転車を返す")])
    assert base.search("退款")[0].source == "zh"
    assert base.search("自転車")[0].source == "ja"
    assert base.search("นโยบาย")[0].source == "th"


def test_stop_words_are_the_library_s() -> None:
    from bm25s.stopwords import STOPWORDS_EN

    assert frozenset(STOPWORDS_EN) == STOP_WORDS


def test_many_threads_find_the_same() -> None:
    base = KnowledgeBase([REFUNDS, BIKES, HOURS])
    expected = BASE.search("broken bike refund")
    found: list[list[Hit]] = []
    threads = [threading.Thread(target=lambda: found.append(base.search("broken bike refund"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8
