"""A cache on disk of values read from files that are slow to parse, as JSON.

An entry is named by the hash of the text that it was read from, so it is never out of date: another text has another
entry. It has a checksum, so a damaged entry counts as missing. Entries are written to a temporary file and renamed.
When nothing can be written, everything works without the cache; the folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Increased when one of our readers returns another value for the same text.
FORMAT = "1"
# Parsing a shorter text is as fast as reading its entry.
MIN_CHARACTERS = 1000


def cache_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder of the cache: `TBX_CACHE`, else `tbx` in the user's cache folder; None with `TBX_CACHE=off`."""
    environ = os.environ if environ is None else environ
    given = environ.get("TBX_CACHE")
    if given:
        return None if given == "off" else Path(given).expanduser() / "datasets"
    of_user = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(of_user) if of_user else Path.home() / ".cache") / "tbx" / "datasets"
    except RuntimeError:  # a user without a home
        return None


def cached_json(kind: str, text: str, read: Callable[[str], Any]) -> Any:
    """`read(text)`, a JSON value, from the cache if it has been read before.

    Args:
        kind: name of the reader; part of the entry's name.
        text: text to read.
        read: function of the text alone. Its exceptions propagate, and nothing is stored then.
    """
    folder = cache_folder() if len(text) >= MIN_CHARACTERS else None
    if folder is None:
        return read(text)
    key = hashlib.sha256(f"{FORMAT} {kind}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()
    path = folder / key[:2] / f"{key}.json"
    found = _entry(path)
    if found is not None:
        return found[0]
    value = read(text)
    _write(path, value)
    return value


def _entry(path: Path) -> list[Any] | None:
    """The entry's value in a list; None when there is no valid entry."""
    try:
        checksum, _, payload = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(payload).hexdigest().encode() != checksum:
        return None
    return [json.loads(payload)]


def _write(path: Path, value: Any) -> None:
    payload = json.dumps(value, separators=(",", ":")).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=path.parent, suffix=".part")
    except OSError:
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
        os.replace(beside, path)
    except OSError:  # a full disk, say
        Path(beside).unlink(missing_ok=True)
