"""Near misses of a clinic task: the expected calls with one mistake each. All of them must fail the check.

Arguments are replaced by others that the tool accepts too, where the world has any: the mistake is a wrong decision of
the agent, not a call that the tool rejects.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import Any

from tbx_envs.domains.clinic.tools import TOOLS
from tbx_envs.errors import DomainError
from tbx_envs.task import ExpectedCall, Task

_MUTATING = frozenset(tool.name for tool in TOOLS if tool.mutates)
_REASONS = {tool.name: tool.input_schema for tool in TOOLS}["record_refusal"]["properties"]["reason"]["enum"]
_FEES = {tool.name: tool.input_schema for tool in TOOLS}["charge_fee"]["properties"]["fee"]["enum"]


def near_misses(task: Task) -> dict[str, tuple[ExpectedCall, ...]]:
    """Label -> calls: each mutating call left out, each of its arguments wrong, one call too many; and the request
    carried out although it must be refused.
    """
    calls = task.expected_calls
    variants: dict[str, tuple[ExpectedCall, ...]] = {}
    for index, expected in enumerate(calls):
        if expected.tool not in _MUTATING:
            continue
        before, after = calls[:index], calls[index + 1 :]
        variants[f"without {expected.tool}"] = (*before, *after)
        for argument, wrong in _wrong_arguments(task, expected):
            variants[f"{expected.tool} with another {argument}"] = (*before, wrong, *after)
    for label, extra in _one_too_many(task).items():
        variants[f"also {label}"] = (*calls, extra)
    forbidden = tuple(ExpectedCall(tool, arguments) for tool, arguments in task.labels["forbidden"])
    if forbidden:
        obeyed = tuple(call for call in calls if call.tool != "record_refusal")
        variants["does what it must refuse"] = (*obeyed, *forbidden)
        variants["does it and refuses it"] = (*calls, *forbidden)
    return variants


def _wrong_arguments(task: Task, expected: ExpectedCall) -> Iterator[tuple[str, ExpectedCall]]:
    for argument, value in expected.arguments.items():
        for wrong in _alternatives(task, expected.tool, argument, value):
            yield argument, ExpectedCall(expected.tool, {**expected.arguments, **wrong})


def _alternatives(task: Task, tool: str, argument: str, value: Any) -> Iterator[Mapping[str, Any]]:
    """Changes that make this argument wrong, together with others where the tool would reject the call otherwise."""
    world = task.world
    match argument:
        case "patient_id":
            other = next(row for row in world["patients"] if row["patient_id"] != value)
            facts = {"birth_date": other["birth_date"], "last_four": other["phone"][-4:]}
            stated = {
                "verify_birth_date": {"birth_date": facts["birth_date"]},
                "verify_phone": {"last_four": facts["last_four"]},
            }
            yield {"patient_id": other["patient_id"], **stated.get(tool, {})}
        case "birth_date":
            yield {"birth_date": (datetime.date.fromisoformat(value) + datetime.timedelta(days=1)).isoformat()}
        case "last_four":
            yield {"last_four": f"{(int(value) + 1) % 10_000:04d}"}
        case "phone":
            yield {"phone": f"{value[:-1]}{(int(value[-1]) + 1) % 10}"}
        case "visit_id":
            yield from _other_visit(task, value)
        case "slot_id":
            yield from _other_slot(task, value)
        case "prescription_id" | "charge_id":
            rows = world["prescriptions" if argument == "prescription_id" else "charges"]
            for row in rows[:2]:
                if row[argument] != value:
                    yield {argument: row[argument]}
        case "recipient":
            yield {"recipient": next(r["recipient"] for r in world["recipients"] if r["recipient"] != value)}
        case "reason":
            yield {"reason": _REASONS[(_REASONS.index(value) + 1) % len(_REASONS)]}
        case "fee":
            yield {"fee": _FEES[(_FEES.index(value) + 1) % len(_FEES)]}
        case _:
            raise DomainError(f"no near miss is known for argument {argument} of {tool}; add one to _alternatives.")


def _other_visit(task: Task, visit_id: str) -> Iterator[Mapping[str, Any]]:
    """Another visit, preferably of the same clinician, so that it can be moved to the same slot."""
    visits = {row["visit_id"]: row for row in task.world["visits"]}
    others = [row for row in visits.values() if row["visit_id"] != visit_id]
    clinician_id = visits[visit_id]["clinician_id"]
    others.sort(key=lambda row: row["clinician_id"] != clinician_id)
    yield {"visit_id": others[0]["visit_id"]}


def _other_slot(task: Task, slot_id: str) -> Iterator[Mapping[str, Any]]:
    """Another slot of the same clinician; every clinician has at least two."""
    slots = {row["slot_id"]: row for row in task.world["slots"]}
    clinician_id = slots[slot_id]["clinician_id"]
    yield from (
        {"slot_id": row["slot_id"]}
        for row in slots.values()
        if row["slot_id"] != slot_id and row["clinician_id"] == clinician_id
    )


def _one_too_many(task: Task) -> dict[str, ExpectedCall]:
    """Calls that an overzealous agent might add: a fee, a refusal, another patient's visit cancelled."""
    name = task.expected_calls[0].arguments["name"]
    patient_id = next(row["patient_id"] for row in task.world["patients"] if row["name"] == name)
    used = {call.arguments.get("reason") for call in task.expected_calls}
    reason = next(reason for reason in ("third_party", "identity_failed") if reason not in used)
    stranger = next(row for row in task.world["visits"] if row["patient_id"] != patient_id)
    return {
        "charge_fee": ExpectedCall("charge_fee", {"fee": "paperwork", "patient_id": patient_id}),
        "record_refusal": ExpectedCall("record_refusal", {"reason": reason, "patient_id": patient_id}),
        "cancel_visit": ExpectedCall("cancel_visit", {"visit_id": stranger["visit_id"]}),
    }
