"""A client of the search service that the shop's policy is kept in: a collection for each session."""

from __future__ import annotations

import json
import os
import urllib.request
import uuid
from typing import Any

PORT = int(os.environ.get("BIKESHOP_SEARCH_PORT", "8108"))


class Policy:
    """The chapters of one session."""

    def __init__(self, sources: list[dict[str, Any]]) -> None:
        self.collection = str(uuid.uuid4())
        fields = [{"name": name, "type": "string"} for name in ("id", "source", "content", "text")]
        _request("POST", "/collections", {"name": self.collection, "fields": fields})
        for source in sources:
            for index, snippet in enumerate(source["snippets"]):
                document = {"source": source["name"], "content": snippet, "text": snippet, "chunk_index": index}
                _request("POST", f"/collections/{self.collection}/documents", document)

    def search(self, query: str, max_results: int) -> list[dict[str, Any]]:
        common = f"collection={self.collection}&group_by=source&per_page=10&exclude_fields=embedding"
        found = _request("POST", f"/multi_search?{common}", {"searches": [{"q": query, "query_by": "embedding,text"}]})
        hits = [hit for group in found["results"][0]["grouped_hits"] for hit in group["hits"]]
        hits.sort(key=lambda hit: hit.get("vector_distance", 2.0))
        return [{"source": hit["document"]["source"], "text": hit["document"]["text"]} for hit in hits[:max_results]]

    def delete(self) -> None:
        _request("DELETE", f"/collections/{self.collection}", None)


def _request(method: str, path: str, body: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "X-TYPESENSE-API-KEY": "none"},
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)
