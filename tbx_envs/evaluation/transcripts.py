"""Episodes as JSON and as text for people. JSON loses nothing: the episode read equals the one written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tbx_envs.episode import CheckReport, Episode, Fault, FinishReason
from tbx_envs.files import read_records, refuse_record
from tbx_envs.messages import BadCall, Message, Text, ToolCall, ToolResult, Turn
from tbx_envs.rendering import transcript_text, visible

# Statuses of a call as tbx 0.1 wrote them.
_RENAMED = {"refused": "rejected"}


def episode_record(episode: Episode) -> dict[str, Any]:
    """The episode as JSON values, new objects each time."""
    record = {
        field.name: getattr(episode, field.name)
        for field in dataclasses.fields(episode)
        if field.name not in ("transcript", "report", "fault")
    }
    report = episode.report
    return {
        **record,
        "finish_reason": None if episode.finish_reason is None else str(episode.finish_reason),
        "report": None if report is None else _report_record(report),
        "fault": None if episode.fault is None else _fields(episode.fault),
        "seconds": {part: float(number) for part, number in episode.seconds.items()},
        "usage": {name: int(number) for name, number in episode.usage.items()},
        "transcript": [_message_record(message) for message in episode.transcript],
    }


def episode_from_record(record: Mapping[str, Any]) -> Episode:
    """The episode of a record that `episode_record` made, or that tbx 0.1 wrote."""
    report, fault, reason = record["report"], record["fault"], record["finish_reason"]
    return Episode(
        uid=record["uid"],
        attempt=record["attempt"],
        seed=record["seed"],
        transcript=tuple(_message(message) for message in record["transcript"]),
        finish_reason=None if reason is None else FinishReason(reason),
        report=None if report is None else _report(report),
        reward=record["reward"],
        fault=None if fault is None else Fault(**fault),
        seconds=record["seconds"],
        usage=record["usage"],
        evidence=record.get("evidence"),
    )


def _report_record(report: CheckReport) -> dict[str, Any]:
    return {**_fields(report), "differences": list(report.differences), "notes": list(report.notes)}


def _report(record: Mapping[str, Any]) -> CheckReport:
    lines = {name: tuple(record.get(name, ())) for name in ("differences", "notes")}
    return CheckReport(**{**record, **lines})


def _fields(record: Any) -> dict[str, Any]:
    """The fields in which equal records agree: a turn's others are counted in the episode's usage."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.compare}


def _message_record(message: Message) -> dict[str, Any]:
    match message:
        case Text():
            return {"kind": "text", **_fields(message)}
        case ToolResult():
            return {"kind": "result", **_fields(message)}
        case Turn():
            calls = [
                {"kind": "call" if isinstance(call, ToolCall) else "bad_call", **_fields(call)}
                for call in message.calls
            ]
            return {"kind": "turn", **_fields(message), "calls": calls}


def _message(record: Mapping[str, Any]) -> Message:
    values = {key: value for key, value in record.items() if key != "kind"}
    match record["kind"]:
        case "text":
            return Text(**values)
        case "result":
            return ToolResult(**{**values, "status": _RENAMED.get(values["status"], values["status"])})
        case _:
            return Turn(**{**values, "calls": tuple(_call(call) for call in record["calls"])})


def _call(record: Mapping[str, Any]) -> ToolCall | BadCall:
    values = {key: value for key, value in record.items() if key != "kind"}
    return ToolCall(**values) if record["kind"] == "call" else BadCall(**values)


def load_episodes(path: Path) -> Iterator[Episode]:
    """The episodes of a file of JSON lines; a last line that was cut off is skipped.

    Raises:
        ConfigError: no such file, or a line in it that is no episode.
    """
    what, to_do = "episodes of an evaluation run", "Give the output_dir of a finished or running `tbx evaluate`."
    for number, record in read_records(path, what, to_do=to_do):
        try:
            episode = episode_from_record(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            refuse_record(path, number, what, error, to_do="Restore the file from a copy, or remove the line.")
        yield episode


def episode_text(episode: Episode, *, system: bool = False) -> str:
    """The whole episode for people: heading, transcript and outcome.

    Args:
        episode: record of the episode.
        system: True includes the system's messages, which are long and the same in all episodes of a domain.
    """
    heading = visible(f"{episode.uid}, attempt {episode.attempt}, seed {episode.seed}")
    said = [m for m in episode.transcript if system or not (isinstance(m, Text) and m.role == "system")]
    return "\n".join([heading, "-" * len(heading), transcript_text(said), "", *map(visible, _outcome_lines(episode))])


def _outcome_lines(episode: Episode) -> list[str]:
    if episode.fault is not None:
        return [f"void ({episode.fault.kind} fault): {episode.fault.message}"]
    verdict = "passed" if episode.passed else "failed"
    differences = episode.report.differences if episode.report else ()
    notes = episode.report.notes if episode.report else ()
    return [f"{verdict}, ended by {episode.finish_reason}", *(f"  {line}" for line in (*differences, *notes))]
