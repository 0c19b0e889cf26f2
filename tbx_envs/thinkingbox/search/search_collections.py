"""Collections of documents and searches in them: the requests and answers of the search service's stand-in.

Ranking is by BM25 instead of embeddings. `vector_distance` is 1 / (1 + score), so that sorting by it gives our order.
Snippets that do not match come last with distance 1, since a search by embedding returns all snippets, too.
"""

from __future__ import annotations

import collections
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tbx_envs.thinkingbox.search.knowledge import KnowledgeBase, Snippet

MAX_COLLECTIONS = 4096
# Searches of one scenario's sessions share an index; this many are kept.
_MAX_BASES = 64
# Typesense's defaults of `per_page` and `group_limit`.
PER_PAGE, GROUP_LIMIT = 10, 3


class RequestError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        message: text of the answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class _Collection:
    def __init__(self, name: str, fields: Any) -> None:
        self.name, self.fields = name, fields
        self.documents: dict[str, dict[str, Any]] = {}
        self.snippets: list[Snippet] = []

    def described(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "fields": self.fields,
            "num_documents": len(self.documents),
            "default_sorting_field": "",
            "created_at": 0,
        }


class Collections:
    """The collections and the answers to requests, without HTTP. Thread-safe."""

    def __init__(self, max_collections: int = MAX_COLLECTIONS) -> None:
        self._max = max_collections
        self._lock = threading.Lock()
        self._collections: collections.OrderedDict[str, _Collection] = collections.OrderedDict()
        # Sessions of one scenario add the same chapters: they share the texts and one index.
        self._snippets: weakref.WeakValueDictionary[tuple[str, str], Snippet] = weakref.WeakValueDictionary()
        self._bases: collections.OrderedDict[tuple[Snippet, ...], KnowledgeBase] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._collections)

    def answer(
        self, method: str, steps: list[str], parameters: Mapping[str, str], body: Any
    ) -> tuple[int, dict[str, Any]]:
        """(status, JSON object) for one request.

        Args:
            method: HTTP method.
            steps: parts of the path.
            parameters: query parameters.
            body: JSON value of the body, None when it is empty.

        Raises:
            RequestError: the request is answered with an error.
        """
        match method, steps:
            case "GET", ["collections", name]:
                with self._lock:
                    return 200, self._find(name).described()
            case "POST", ["collections"]:
                return 201, self._create(_object(body))
            case "POST", ["collections", name, "documents"]:
                return 201, self._add(name, _object(body))
            case "DELETE", ["collections", name]:
                return 200, self._delete(name)
            case "POST", ["multi_search"]:
                return 200, {"results": list(self._searches(parameters, _object(body)))}
        raise RequestError(404, f"Not Found: this stand-in has no {method} /{'/'.join(steps)}.")

    def _find(self, name: str) -> _Collection:
        if name not in self._collections:
            raise RequestError(404, f"No collection named '{name}' found.")
        self._collections.move_to_end(name)
        return self._collections[name]

    def _create(self, schema: dict[str, Any]) -> dict[str, Any]:
        name = schema.get("name")
        if not isinstance(name, str) or not name:
            raise RequestError(400, "a collection needs a `name`.")
        with self._lock:
            if name in self._collections:
                raise RequestError(409, f"A collection with name '{name}' already exists.")
            while len(self._collections) >= self._max:
                self._collections.popitem(last=False)
            collection = self._collections[name] = _Collection(name, schema.get("fields", []))
            return collection.described()

    def _add(self, name: str, document: dict[str, Any]) -> dict[str, Any]:
        text = document.get("text", document.get("content"))
        source = document.get("source", "")
        if not isinstance(text, str) or not isinstance(source, str):
            raise RequestError(400, "a document needs a `text`, and `source` must be a string.")
        with self._lock:
            collection = self._find(name)
            identity = str(document.get("id", len(collection.documents)))
            if identity in collection.documents:
                raise RequestError(409, f"A document with id {identity} already exists.")
            snippet = self._snippets.setdefault((source, text), Snippet(source, text))
            shared = {"source": snippet.source, "text": snippet.text}
            if document.get("content") == text:
                shared["content"] = snippet.text
            collection.documents[identity] = {**document, "id": identity, **shared}
            collection.snippets.append(snippet)
        return document

    def _delete(self, name: str) -> dict[str, Any]:
        with self._lock:
            described = self._find(name).described()
            del self._collections[name]
        return described

    def _searches(self, common: Mapping[str, str], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        searches = body.get("searches")
        if not isinstance(searches, list) or not all(isinstance(search, dict) for search in searches):
            raise RequestError(400, "`searches` must be a list of objects.")
        for search in searches:
            parameters = {**common, **search}
            with self._lock:
                collection = self._find(str(parameters.get("collection", "")))
                documents, base = list(collection.documents.values()), self._base(tuple(collection.snippets))
            yield _found(documents, base, parameters)

    def _base(self, snippets: tuple[Snippet, ...]) -> KnowledgeBase:
        if snippets not in self._bases:
            if len(self._bases) >= _MAX_BASES:
                self._bases.popitem(last=False)
            self._bases[snippets] = KnowledgeBase(snippets)
        self._bases.move_to_end(snippets)
        return self._bases[snippets]


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RequestError(400, "the body must be a JSON object.")
    return body


def _found(documents: list[dict[str, Any]], base: KnowledgeBase, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one search: hits grouped by source (`group_by`), or in one list."""
    query = str(parameters.get("q", ""))
    allowed = _filter(str(parameters.get("filter_by", "")))
    hits = [
        _hit(documents[position], score)
        for position, score in _ranked(base, query)
        if allowed(str(documents[position]["source"]))
    ]
    answer: dict[str, Any] = {
        "found": len(hits),
        "out_of": len(documents),
        "page": 1,
        "search_time_ms": 0,
        "search_cutoff": False,
        "request_params": {"collection_name": parameters.get("collection"), "q": query},
    }
    per_page = _number(parameters, "per_page", PER_PAGE)
    if "group_by" not in parameters:
        return {**answer, "hits": hits[:per_page]}
    if parameters["group_by"] != "source":
        raise RequestError(400, f"this stand-in groups by `source` only, not by `{parameters['group_by']}`.")
    groups: dict[str, list[dict[str, Any]]] = {}
    for hit in hits:
        groups.setdefault(hit["document"]["source"], []).append(hit)
    limit = _number(parameters, "group_limit", GROUP_LIMIT)
    grouped = [
        {"group_key": [source], "found": len(of_source), "hits": of_source[:limit]}
        for source, of_source in groups.items()
    ]
    return {**answer, "found": len(grouped), "found_docs": len(hits), "grouped_hits": grouped[:per_page]}


def _ranked(base: KnowledgeBase, query: str) -> list[tuple[int, float]]:
    """Every snippet's index and score: hits first, then the others in their order. Empty for an empty query."""
    if not query.strip():
        return []
    hits = base.ranking(query)
    hit = {position for position, _ in hits}
    return hits + [(position, 0.0) for position in range(len(base.snippets)) if position not in hit]


def _hit(document: dict[str, Any], score: float) -> dict[str, Any]:
    # Rounded, so that the library's last digits never show in text that an agent reads.
    return {
        "document": document,
        "highlights": [],
        "text_match": round(score * 1_000_000),
        "vector_distance": round(1 / (1 + score), 6),
    }


def _filter(expression: str) -> Callable[[str], bool]:
    """A predicate for `source:=a || source:=b`, the only form that the servers send; an empty one accepts all."""
    if not expression.strip():
        return lambda source: True
    terms = [re.fullmatch(r"source:=\s*(.*)", term.strip(), re.DOTALL) for term in expression.split("||")]
    if not all(terms):
        raise RequestError(400, f"this stand-in filters by `source:=name || ...` only, not by `{expression}`.")
    names = {term[1].strip().strip("`") for term in terms if term}
    return lambda source: source in names


def _number(parameters: Mapping[str, Any], name: str, default: int) -> int:
    value = str(parameters.get(name, default))
    if not value.isdecimal():
        raise RequestError(400, f"`{name}` must be a whole number, not '{value}'.")
    return int(value)
