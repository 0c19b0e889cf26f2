"""`KnowledgeBase`: a word search over snippets of text, ranked by BM25 (library `bm25s`).

The order of hits is a function of snippets and query alone: equal scores keep the snippets' order. Constructing a base
is cheap; the index over a handful of long documents takes a few milliseconds and is built by the first search.

Source: BM25 as Lucene computes it (k1 1.5, b 0.75), https://arxiv.org/abs/2407.03618 section 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.abc
import logging
import os
import re
import sys
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

# Lucene's list for English: words that are in every text are not indexed.
_STOP_WORDS = """a an and are as at be but by for if in into is it no not of on or such that the their then there these
they this to was will with"""
STOP_WORDS = frozenset(_STOP_WORDS.split())

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
        """(index of the snippet, score) of all hits, best first."""
        known = [word for word in words(query) if word in self._vocabulary]
        if not known:
            return []
        scores = self._index.get_scores(known).tolist()
        found = [(position, score) for position, score in enumerate(scores) if score > 0]
        return sorted(found, key=lambda hit: (-hit[1], hit[0]))

    @functools.cached_property
    def _words(self) -> list[list[str]]:
        return [words(snippet.text) for snippet in self.snippets]

    @functools.cached_property
    def _vocabulary(self) -> frozenset[str]:
        return frozenset().union(*self._words)

    @functools.cached_property
    def _index(self) -> Any:
        # float64, so that two machines agree on the order of close scores.
        index = _bm25s().BM25(k1=1.5, b=0.75, method="lucene", dtype="float64", backend="numpy")
        index.index(self._words, show_progress=False)
        return index


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


def _bm25s() -> ModuleType:
    """The library, imported at the first search and without the side effects of its import.

    Where JAX is installed, `import bm25s` imports it and starts its backend, which takes the memory of a GPU. Its
    progress bars keep a thread even when they are hidden. Its logger is set to DEBUG, so that every index writes lines
    into whatever the program logs to.
    """
    with _import_lock:
        if "bm25s" not in sys.modules:
            with _bare_import():
                import bm25s
            logging.getLogger("bm25s").setLevel(logging.WARNING)
    import bm25s

    return bm25s


_import_lock = threading.Lock()


@contextlib.contextmanager
def _bare_import() -> Iterator[None]:
    """A context in which bm25s finds neither accelerators not yet imported (in this thread) nor progress bars."""
    finder = _WithoutAccelerators(threading.get_ident())
    kept = os.environ.get("DISABLE_TQDM")
    sys.meta_path.insert(0, finder)
    os.environ["DISABLE_TQDM"] = "1"
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        del os.environ["DISABLE_TQDM"]
        if kept is not None:
            os.environ["DISABLE_TQDM"] = kept


class _WithoutAccelerators(importlib.abc.MetaPathFinder):
    """Makes JAX and Numba appear not to be installed, for one thread."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in ("jax", "numba") and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("bm25s searches with numpy here", name=fullname)
