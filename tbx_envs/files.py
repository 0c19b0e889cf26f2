"""Files: read with words for what is wrong with them, written completely or not at all, and their checksums.

Everything that tbx keeps on disk (JSON, JSON lines) and the YAML of datasets is read through this module, so that a
file that was cut, emptied, edited or made by something else is told apart in one place. A message says which file was
read and as what, what is wrong, and what to do.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from tbx_envs.errors import ConfigError, StorageError, TbxError

# File of a folder's checksums, in the folder.
CHECKSUMS = "tbx_checksums.json"
# Values of a YAML text with every alias written out: one for each character is more than any text without aliases has.
_FEWEST_YAML_VALUES = 100_000
_PIECE_BYTES = 4096


# --- reading ------------------------------------------------------------------------------------------------


def read_text(path: Path, what: str, *, to_do: str, error: type[TbxError] = ConfigError) -> str:
    """The text of a file in UTF-8.

    Args:
        path: path of the file.
        what: kind of file, for the message: `the header of an evaluation run`.
        to_do: sentence that says what to do when it cannot be read.
        error: type of exception to raise.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as reason:
        raise error(f"{path}: {what} is not there. {to_do}") from reason
    except OSError as reason:
        raise error(f"{path}: {what} cannot be read: {reason.strerror or reason}. {to_do}") from reason
    except UnicodeDecodeError as reason:
        raise error(f"{path}: {what} has bytes that are not UTF-8 (at {reason.start}). {to_do}") from reason


def read_json(path: Path, what: str, *, to_do: str, error: type[TbxError] = ConfigError) -> Any:
    """The value of a JSON file. A key that is there twice is an error, and so is a number that is not finite.

    Args:
        path, what, to_do, error: as in `read_text`.
    """
    text = read_text(path, what, to_do=to_do, error=error)
    try:
        return parsed_json(text)
    except (ValueError, RecursionError) as reason:
        found = "is empty" if not text.strip() else f"is not JSON: {_in_words(reason)}"
        raise error(f"{path}: {what} {found}. {to_do}") from reason


def read_object(path: Path, what: str, *, to_do: str, error: type[TbxError] = ConfigError) -> dict[str, Any]:
    """The object of a JSON file; arguments as in `read_json`."""
    value = read_json(path, what, to_do=to_do, error=error)
    if not isinstance(value, dict):
        raise error(f"{path}: {what} is a JSON {_kind(value)}, wanted an object. {to_do}")
    return value


def read_records(path: Path, what: str, *, to_do: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line of a file of JSON lines; a last line that was cut off is skipped.

    Raises:
        ConfigError: there is no such file, or a line in it is no object.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n"):
                    yield number, parsed_record(line, path, number, what, to_do=to_do)
    except FileNotFoundError as reason:
        raise ConfigError(f"{path}: {what} are not there. {to_do}") from reason
    except OSError as reason:
        raise ConfigError(f"{path}: {what} cannot be read: {reason.strerror or reason}. {to_do}") from reason


def refuse_record(path: Path, number: int, what: str, reason: Exception | str, *, to_do: str) -> NoReturn:
    """Raise ConfigError for a line that is an object but not one of these records."""
    said = reason if isinstance(reason, str) else _in_words(reason)
    cause = reason if isinstance(reason, Exception) else None
    raise ConfigError(f"{path} line {number}: not one of {what}: {said}. {to_do}") from cause


def parsed_record(line: bytes, path: Path, number: int, what: str, *, to_do: str) -> dict[str, Any]:
    """The object of one line of a file of JSON lines.

    Raises:
        ConfigError: it is not JSON, or no object.
    """
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as reason:  # UnicodeDecodeError is a ValueError
        shown = line[:40].decode("utf-8", "replace")
        raise ConfigError(
            f"{path} line {number} is not JSON ({shown!r}), wanted one of {what}: {_in_words(reason)}. {to_do}"
        ) from reason
    if not isinstance(value, dict):
        refuse_record(path, number, what, f"a JSON {_kind(value)}, wanted an object", to_do=to_do)
    return value


def parsed_json(text: str | bytes) -> Any:
    """The value of a JSON text, read strictly.

    Raises:
        ValueError: not JSON, a key twice in an object, or a number that is not finite.
        RecursionError: nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant, parse_float=_finite)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {twice!r} is there twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{digits} is too large for a number")
    return number


def _in_words(reason: Exception) -> str:
    if isinstance(reason, RecursionError):
        return "nested too deeply"
    return f"{reason.args[0]!r} is missing" if isinstance(reason, KeyError) else str(reason) or type(reason).__name__


def _kind(value: Any) -> str:
    kinds = {list: "list", str: "text", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return kinds.get(type(value), "object")


def parsed_yaml(text: str) -> Any:
    """The value of a YAML text in which aliases repeat only so much.

    Aliases and merge keys share what they name, so a few hundred bytes can stand for billions of values as soon as
    they are written out: the size is computed before any value is made.

    Raises:
        yaml.YAMLError: not YAML, or aliases that stand for too much.
        ValueError: an invalid date.
        RecursionError: nested too deeply.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        limit = max(_FEWEST_YAML_VALUES, len(text))
        if _written_out(node, {}) > limit:
            raise yaml.constructor.ConstructorError(
                None, None, f"aliases in it stand for more than {limit:,} values; write out what they name", None
            )
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _written_out(node: Any, known: dict[int, int]) -> int:
    """The number of values of a YAML node with its aliases written out; one for an alias of what it is in."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = 1
    parts = node.value if isinstance(node.value, list) else []
    parts = [part for pair in parts for part in pair] if node.id == "mapping" else parts
    known[id(node)] = 1 + sum(_written_out(part, known) for part in parts)
    return known[id(node)]


# --- writing ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def storing(path: Path, kept: str = "what was there before is unchanged") -> Iterator[None]:
    """Turns what the operating system raises in this block into one sentence.

    Args:
        path: file or folder that is written.
        kept: state of things after the failure.

    Raises:
        StorageError: a full disk, a missing permission and the like.
    """
    try:
        yield
    except OSError as reason:
        raise StorageError(
            f"{path} cannot be written: {reason.strerror or reason}; {kept}. Make room (or give another output_dir), "
            f"then give the same command again."
        ) from reason


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON, completely or not at all."""
    write_lines(path, [json.dumps(value, indent=2, ensure_ascii=False)])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines, completely or not at all; raises as `write_bytes`."""
    _write(path, (_encoded(line) for line in lines))


def _encoded(line: str) -> bytes:
    """A line of a file; half a surrogate pair becomes its escape, which JSON reads back."""
    return line.encode("utf-8", "backslashreplace") + b"\n"


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, completely or not at all: into one beside it, which then takes its place.

    Raises:
        StorageError: the file cannot be written; the one that was there is as it was.
    """
    _write(path, [content])


def _write(path: Path, parts: Iterable[bytes]) -> None:
    new = path.with_name(path.name + ".new")
    with storing(path):
        try:
            with new.open("wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def append_line(path: Path, line: str) -> None:
    """Append a line; the operating system has it when this returns. A last line that was cut off goes first.

    Raises:
        StorageError: the line cannot be written; the file ends as before.
    """
    # Without a buffer: what could not be written must not be tried again when the file is closed.
    with storing(path), path.open("ab+", buffering=0) as file:
        before, rest = _end_of_lines(file), memoryview(_encoded(line))
        if before < file.seek(0, os.SEEK_END):
            file.truncate(before)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, before)
            raise


def _end_of_lines(file: BinaryIO) -> int:
    """Where the last whole line of a file ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _PIECE_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


# --- checksums ----------------------------------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    """SHA-256 (hex) of a file's content, which is read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files in a folder into it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS)
    with storing(folder / CHECKSUMS):
        checksums = {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}
    write_json(folder / CHECKSUMS, checksums)


def damage(folder: Path, concerns: Callable[[str], bool] = lambda name: True) -> list[str] | None:
    """What is wrong with the files of a folder, in words; empty when nothing is, None for a folder without checksums.

    Args:
        folder: folder that `write_checksums` was called on.
        concerns: function that says by its path in the folder whether a file is looked at.
    """
    path = folder / CHECKSUMS
    if not os.path.lexists(path):
        return None
    try:
        checksums = read_object(path, "checksums", to_do=f"Remove {CHECKSUMS} to do without.")
    except ConfigError as error:
        return [str(error).removesuffix(".")]
    if not checksums:  # a folder that was saved has files
        return [f"{CHECKSUMS} lists no file"]
    found = []
    for name, checksum in checksums.items():
        if not concerns(name):
            continue
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:  # by its name: the Hub's files are links to elsewhere
            found.append(f"{name} is no file of the folder")
            continue
        try:
            if sha256_of(path) != checksum:
                size = path.stat().st_size
                found.append(
                    f"{name} has other content than was saved ({size:,} bytes)" if size else f"{name} is empty"
                )
        except FileNotFoundError:
            found.append(f"{name} is missing")
        except OSError as reason:
            found.append(f"{name} cannot be read: {reason.strerror or reason}")
    return found
