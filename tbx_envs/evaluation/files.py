"""The files of an evaluation run (`tbx_envs.evaluation.run`): appended to while it runs, read afterwards.

Every line is written with one call and flushed. An interruption can leave at most one line without its line break,
which is dropped when the evaluation run is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tbx_envs.endpoints.costs import NOTHING_USED, TokenUsage, usage_counts, usage_of_counts
from tbx_envs.episode import Episode
from tbx_envs.errors import ConfigError
from tbx_envs.evaluation.transcripts import episode_record
from tbx_envs.files import (
    append_line,
    parsed_record,
    read_object,
    read_records,
    refuse_record,
    storing,
    write_json,
    write_lines,
)

Row = dict[str, Any]

_TO_DO = "Restore it from a copy, or choose another output_dir."
# What every row has, and what its values are; tbx 0.1 wrote these already.
_ROW_KEYS: Mapping[str, tuple[type, ...]] = {
    "uid": (str,),
    "family": (str,),
    "attempt": (int,),
    "passed": (bool, type(None)),
    "fault": (str, type(None)),
    "retry": (int,),
    "usage": (dict,),
}
_HEADER_KEYS: Mapping[str, tuple[type, ...]] = {"tasks": (dict,), "attempts": (int,), "policy": (dict,)}

HEADER = "evaluation.json"
_SPENDING = "spending.jsonl"
_OLD_HEADER = "campaign.json"  # its name in tbx 0.1


class RunLog:
    """The rows and episodes of an evaluation run: existing ones are read, new ones are appended and flushed.

    Args:
        rows_path: file of rows; the other files are beside it.
        fingerprint: fingerprint of the evaluation run that is started or resumed here.

    Attributes:
        rows: (uid, attempt) -> row.
        void_tries: (uid, attempt) -> row of its last void try that was to be repeated; it has the usage and faults of
            those before it.

    Raises:
        ConfigError: the folder holds another evaluation run, or rows without a fingerprint.
    """

    def __init__(self, rows_path: Path, fingerprint: Mapping[str, Any]) -> None:
        self._rows_path = rows_path
        self._episodes_path = rows_path.with_name("episodes.jsonl")
        self._voids_path = rows_path.with_name("voids.jsonl")
        with storing(rows_path):
            rows_path.parent.mkdir(parents=True, exist_ok=True)
        header = _header_in(rows_path.parent)
        if header is not None:
            _refuse_another(_fingerprint(header), fingerprint, header)
        elif rows_path.is_file():
            raise ConfigError(
                f"{rows_path} has rows but no {HEADER} beside it, so it is unknown what they measure. "
                f"Choose another output_dir, or move the file away."
            )
        else:
            write_json(rows_path.with_name(HEADER), fingerprint)
        self.rows = _rows_in(rows_path)
        self._refuse_rows_alone()
        self.void_tries = _rows_in(self._voids_path)
        for path in (rows_path, self._episodes_path, self._voids_path, rows_path.with_name(_SPENDING)):
            _drop_cut_line(path)

    def _refuse_rows_alone(self) -> None:
        """Checks that every row has its episode: at its end the run writes both files anew, without what is lost."""
        if not self.rows:
            return
        if not self._episodes_path.is_file():
            raise ConfigError(
                f"{self._episodes_path}: the episodes are not there, and {self._rows_path.name} beside it has "
                f"{len(self.rows)} rows of them. {_TO_DO}"
            )
        missing = self.rows.keys() - _last_places(self._episodes_path).keys()
        if missing:
            uid, attempt = min(missing)
            raise ConfigError(
                f"{self._episodes_path}: it lacks the episodes of {len(missing)} of the {len(self.rows)} rows in "
                f"{self._rows_path.name} beside it, such as attempt {attempt} at {uid}. {_TO_DO}"
            )

    def append(self, row: Row, episode: Episode) -> None:
        """Write one attempt; the operating system has it when this returns."""
        # The episode first: every row's transcript must exist.
        append_line(self._episodes_path, json.dumps(episode_record(episode)))
        append_line(self._rows_path, json.dumps(row))
        self.rows[row["uid"], row["attempt"]] = row

    def append_void_try(self, row: Row) -> None:
        """Write a void try that will be repeated: its tokens are paid for, even if the run ends before its attempt."""
        append_line(self._voids_path, json.dumps(row))
        self.void_tries[row["uid"], row["attempt"]] = row

    def last_try(self, uid: str, attempt: int) -> Row | None:
        """The row of the latest try at an attempt, void or not; None before the first has ended."""
        made = (of.get((uid, attempt)) for of in (self.rows, self.void_tries))
        return max((row for row in made if row is not None), key=lambda row: row["retry"], default=None)

    def rewrite_in_order(self, wanted: Sequence[tuple[str, int]]) -> None:
        """Rewrite the files with one row and one episode per attempt, leaving out void tries that were repeated."""
        lines = [json.dumps(self.rows[key]) for key in wanted]
        write_lines(self._rows_path, lines)
        # All episodes may be too large for memory: only their places in the file are kept.
        places = _last_places(self._episodes_path)
        if places:
            with self._episodes_path.open("rb") as file:
                write_lines(self._episodes_path, (_line_at(file, places[key]) for key in wanted if key in places))


class SpendingLog:
    """Appends the tokens of a served model to `spending.jsonl`, one line for each completion as it arrives.

    Rows have the tokens of episodes that ended. A run that was interrupted has paid for others, too, which are in no
    row. Several threads may call it.

    Args:
        folder: folder of the evaluation run.
        role: role of the served model (`tbx_envs.endpoints.costs.ROLES`).
    """

    def __init__(self, folder: Path | str, role: str) -> None:
        self._path, self._role = Path(folder) / _SPENDING, role

    def __call__(self, usage: TokenUsage) -> None:
        append_line(self._path, json.dumps({"role": self._role, **usage_counts(usage)}))


def load_spending(folder: Path | str) -> dict[str, TokenUsage]:
    """Role -> tokens of its completions so far; without a role that had none."""
    spent: dict[str, TokenUsage] = {}
    path, what, to_do = Path(folder) / _SPENDING, "completions that were paid for", "Remove the line."
    if path.is_file():
        for number, line in read_records(path, what, to_do=to_do):
            kinds: dict[str, tuple[type, ...]] = {**dict.fromkeys(line, (int,)), "role": (str,)}
            if (odd := _odd_key(line, kinds)) is not None:
                refuse_record(path, number, what, odd, to_do=to_do)
            spent[line["role"]] = spent.get(line["role"], NOTHING_USED) + usage_of_counts(line)
    return spent


def _refuse_another(there: Mapping[str, Any], wanted: Mapping[str, Any], header: Path) -> None:
    differing = [key for key in {**wanted, **there} if there.get(key) != wanted.get(key)]
    if not differing:
        return
    lines = []
    for key in differing:
        if key == "tasks":
            old, new = there.get("tasks", {}), wanted["tasks"]
            changed = [uid for uid in new if uid in old and old[uid] != new[uid]]
            example = f", such as {changed[0]}" if changed else ""
            lines.append(
                f"  tasks: {len(old.keys() - new.keys())} only there, {len(new.keys() - old.keys())} only "
                f"asked for, {len(changed)} with different content{example}"
            )
        else:
            lines.append(f"  {key}: there {there.get(key)!r}, asked for {wanted.get(key)!r}")
    found = "\n".join(lines)
    raise ConfigError(f"{header} belongs to another evaluation run:\n{found}\nChoose another output_dir.")


def load_rows(folder: Path | str) -> tuple[dict[str, Any], list[Row]]:
    """The fingerprint and the rows of an evaluation run's folder.

    Raises:
        ConfigError: the folder holds no evaluation run.
    """
    folder = Path(folder)
    header = _header_in(folder)
    if header is None:
        raise ConfigError(f"{folder} holds no evaluation run (no {HEADER}). Give the output_dir of `tbx evaluate`.")
    return _fingerprint(header), list(_rows_in(folder / "rows.jsonl").values())


def _header_in(folder: Path) -> Path | None:
    return next((path for name in (HEADER, _OLD_HEADER) if (path := folder / name).is_file()), None)


def _fingerprint(header: Path) -> dict[str, Any]:
    fingerprint = read_object(header, "the header of an evaluation run", to_do=_TO_DO)
    if (odd := _odd_key(fingerprint, _HEADER_KEYS)) is not None:
        raise ConfigError(f"{header}: not the header of an evaluation run: {odd}. {_TO_DO}")
    if (odd := _odd_key(fingerprint["policy"], {"name": (str,)})) is not None:
        raise ConfigError(f"{header}: not the header of an evaluation run: of its policy, {odd}. {_TO_DO}")
    return {**fingerprint, "policy": with_current_keys(fingerprint["policy"])}


def with_current_keys(policy: Mapping[str, Any]) -> dict[str, Any]:
    """A policy's fingerprint as this version writes it; tbx 0.1 called the error rate of `scripted` its lapse."""
    return {"error_rate" if key == "lapse" else key: value for key, value in policy.items()}


def _rows_in(path: Path) -> dict[tuple[str, int], Row]:
    """(uid, attempt) -> row; of several, the last. Empty where there is no such file yet."""
    rows: dict[tuple[str, int], Row] = {}
    if path.is_file():
        to_do = "Remove the line, or choose another output_dir."
        for number, row in read_records(path, "rows of an evaluation run", to_do=to_do):
            if (odd := _odd_key(row, _ROW_KEYS)) is not None:
                refuse_record(path, number, "rows of an evaluation run", odd, to_do=to_do)
            rows[row["uid"], row["attempt"]] = row
    return rows


def _odd_key(record: Mapping[str, Any], keys: Mapping[str, tuple[type, ...]]) -> str | None:
    """What is wrong with the first key that is missing or has a value of another kind; None when none is."""
    for key, kinds in keys.items():
        if key not in record:
            return f"{key!r} is missing"
        if not isinstance(record[key], kinds) or (isinstance(record[key], bool) and bool not in kinds):
            return f"{key!r} is {record[key]!r}"
    return None


def _drop_cut_line(path: Path) -> None:
    """Cut a file after its last line break, so that the next record starts a line."""
    if not path.is_file():
        return
    with storing(path), path.open("r+b") as file:
        whole = sum(len(line) for line in file if line.endswith(b"\n"))
        file.truncate(whole)


def _last_places(path: Path) -> dict[tuple[str, int], int]:
    """(uid, attempt) -> place in the file at which its last episode starts; a last line that was cut off has none."""
    places: dict[tuple[str, int], int] = {}
    what = "episodes of an evaluation run"
    if path.is_file():
        with path.open("rb") as file:
            place = 0
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    record = parsed_record(line, path, number, what, to_do=_TO_DO)
                    if (odd := _odd_key(record, {"uid": (str,), "attempt": (int,)})) is not None:
                        refuse_record(path, number, what, odd, to_do=_TO_DO)
                    places[record["uid"], record["attempt"]] = place
                place += len(line)
    return places


def _line_at(file: BinaryIO, place: int) -> str:
    file.seek(place)
    return file.readline().decode().removesuffix("\n")
