"""Values read from slow files, kept as JSON between processes.

An entry is named by the hash of the very text it was read from, so it cannot be out of date: another text is another
entry. It carries a checksum, so a damaged one counts as missing. Entries are written beside their place and renamed.
Where nothing can be written, everything works without; the folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Raised when a reader of ours makes another value of the same text.
FORMAT = "1"
# A shorter text is read as fast as its entry.
MIN_CHARACTERS = 1000


def cache_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where entries are kept: `TBX_CACHE`, else `tbx` in the user's cache folder; None with `TBX_CACHE=off`."""
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
    """`read(text)`, a JSON value, from the cache when it has been read before.

    Args:
        kind: which reader it is; part of the entry's name.
        read: depends on nothing but the text. What it raises passes through, and nothing is kept.
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
    """The entry's value in a list; None when there is none that can be believed."""
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
