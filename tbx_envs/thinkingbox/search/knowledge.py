"""`KnowledgeBase`: a word search over snippets of text, ranked by BM25.

The order of hits is a function of snippets and query alone: equal scores keep the snippets' order. Constructing a base
is cheap; the index over a handful of long documents takes a few milliseconds and is built by the first search.

Source: BM25 as Lucene computes it (k1 1.5, b 0.75), https://arxiv.org/abs/2407.03618 section 2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

# Lucene's list for English: words that are in every text are not indexed.
_STOP_WORDS = """a an and are as at be but by for if in into is it no not of on or such that the their then there these
they this to was will with"""
STOP_WORDS = frozenset(_STOP_WORDS.split())

_K1, _B = 1.5, 0.75  # how soon a repeated word counts no more; how much the length of a snippet counts

# Scripts without spaces between words: every character counts as a word.
_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Snippet:
    """A piece of knowledge.

    Attributes:
        source: name of the document that it is from.
        text: text of the snippet.
    """

    source: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """A snippet that shares words with the query.

    Attributes:
        source: name of the document that it is from.
        text: text of the snippet.
        score: BM25 score, above zero; comparable within one search only.
        rank: place in the result; 1 is the best.
    """

    source: str
    text: str
    score: float
    rank: int


class KnowledgeBase:
    """Searchable snippets. Immutable and thread-safe."""

    def __init__(self, snippets: Iterable[Snippet]) -> None:
        self.snippets = tuple(snippets)

    def search(self, query: str, limit: int = 3) -> list[Hit]:
        """At most `limit` hits, best first; empty when no snippet shares a word with the query."""
        found = self.ranking(query)[: max(limit, 0)]
        return [
            Hit(self.snippets[position].source, self.snippets[position].text, score, rank)
            for rank, (position, score) in enumerate(found, start=1)
        ]

    def ranking(self, query: str) -> list[tuple[int, float]]:
        """(position of the snippet, score) of all hits, best first."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in words(query):
            for position, score in self._index.get(word, ()):
                scores[position] += score
        return sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))

    @functools.cached_property
    def _index(self) -> Mapping[str, list[tuple[int, float]]]:
        """Word -> (position of each snippet that has it, what it adds to that snippet's score)."""
        counts = [Counter(words(snippet.text)) for snippet in self.snippets]
        lengths = [count.total() for count in counts]
        mean_length = sum(lengths) / max(len(lengths), 1)
        having = Counter(word for count in counts for word in count)
        index = defaultdict(list)
        for position, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, times in count.items():
                rarity = math.log(1 + (len(counts) - having[word] + 0.5) / (having[word] + 0.5))
                saturation = times / (_K1 * ((1 - _B) + _B * length / mean_length) + times)
                index[word].append((position, rarity * saturation))
        return dict(index)


def words(text: str) -> list[str]:
    """The words of a text as they are indexed: without case, width variants, stop words and plural endings."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return [_singular(word) for word in _WORD.findall(folded) if word not in STOP_WORDS]


def _singular(word: str) -> str:
    """The word without an English plural ending, by the three rules of Harman's S-stemmer (1991)."""
    if len(word) < 4:
        return word
    if word.endswith("ies") and not word.endswith(("eies", "aies")):
        return word[:-3] + "y"
    if word.endswith("es") and not word.endswith(("aes", "ees", "oes")):
        return word[:-1]
    if word.endswith("s") and not word.endswith(("us", "ss")):
        return word[:-1]
    return word
