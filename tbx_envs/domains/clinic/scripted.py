"""The scripted agent of the clinic: it follows the rules, except for a given error rate.

At each decision it breaks the rule with probability `error_rate * pressure`, where the pressure says how pressing the
caller sounds (`families.TONES`). With error rate 0 it is the reference agent in conversation. With a higher one its
episodes are the demonstrations of SFT: of an agent that is able, but not reliable.

It uses only what it has read: the caller's words (parsed, in `labels`) and the results of its calls.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from tbx_envs.domains import AgentTurns
from tbx_envs.messages import DONE_MARK, Message, Text, ToolCall, ToolResult, Turn
from tbx_envs.task import Task

ASK_BIRTH_DATE = ("What is your birth date?", "Please tell me your birth date.")
ASK_BOTH_FACTS = (
    "What are your birth date and the last four digits of your phone?",
    "Please tell me your birth date and the last four digits of your phone.",
)
ASK_FEE = {
    "late_cancellation": (
        "The late fee is $25. Do you agree?",
        "That is late and costs $25. Do you agree to the fee?",
    ),
    "late_change": (
        "The late fee is $15. Do you agree?",
        "That is late and costs $15. Do you agree to the fee?",
    ),
}
DONE_WORDS = {
    "cancel": "Your visit is cancelled.",
    "move": "Your visit is moved.",
    "book": "Your visit is booked.",
    "refill": "Your refill is requested.",
    "waive": "Your fee is waived.",
    "release": "Your records are sent.",
    "phone": "Your phone is changed.",
}
REFUSED_WORDS = {
    "third_party": "Sorry, I can only help the patient.",
    "identity_failed": "Sorry, the digits do not match.",
    "fee_declined": "Your visit stays as it is.",
    "move_limit": "Sorry, it was moved twice already.",
    "no_referral": "Sorry, a valid referral is missing.",
    "no_refills": "Sorry, no refills are left.",
    "review_due": "Sorry, a review is due first.",
    "no_approval": "Sorry, the manager did not approve it.",
    "no_consent": "Sorry, a signed consent is missing.",
}

# A part of the conversation, as a generator: it yields turns, is sent the messages that answer each, and returns the
# words to say at the end.
Answers = Sequence[Message]
Words = Generator[Turn, Answers, str]


class Desk:
    """The agent's state during one conversation.

    Attributes:
        rng: random generator of this agent, which decides wording and errors.
        slip_probability: probability of an error at each decision.
        patient_id: patient that the agent acts for; "" until found.
        phone_verified: False when the phone digits were asked for and did not match.
    """

    def __init__(self, rng: random.Random, slip_probability: float) -> None:
        self.rng = rng
        self.slip_probability = slip_probability
        self.patient_id = ""
        self.phone_verified = True
        self._num_calls = 0

    def slips(self) -> bool:
        """Whether to break the rule at this decision."""
        return self.rng.random() < self.slip_probability

    def call(self, *calls: tuple[str, dict[str, Any]]) -> Generator[Turn, Answers, list[ToolResult]]:
        """Make these calls in one turn; returns their results."""
        first, self._num_calls = self._num_calls, self._num_calls + len(calls)
        turn = Turn(
            calls=tuple(ToolCall(f"call_{first + i}", tool, arguments) for i, (tool, arguments) in enumerate(calls))
        )
        answers = yield turn
        return [answer for answer in answers if isinstance(answer, ToolResult)]

    def read(self, tool: str, **arguments: Any) -> Generator[Turn, Answers, list[Mapping[str, Any]]]:
        """The rows that a tool lists; none when it rejects the call."""
        (result,) = yield from self.call((tool, arguments))
        return json.loads(result.text) if result.status == "ok" else []

    def ask(self, wordings: Sequence[str]) -> Generator[Turn, Answers, str]:
        """Say one of these wordings to the caller; returns the answer."""
        answers = yield Turn(text=self.rng.choice(wordings))
        return " ".join(answer.text for answer in answers if isinstance(answer, Text))

    def refuse(self, reason: str) -> Generator[Turn, Answers, str | None]:
        """Record the refusal; returns the words to say. An error is not to record it, or not to refuse: then None."""
        if not self.slips():
            yield from self.call(("record_refusal", {"reason": reason, "patient_id": self.patient_id}))
        elif self.rng.random() < 0.5:
            return None
        return REFUSED_WORDS[reason]


def scripted(task: Task, rng: random.Random, error_rate: float) -> AgentTurns:
    """The agent of the task (`tbx_envs.domains.Family.scripted`)."""
    desk = Desk(rng, min(1.0, error_rate * task.labels["pressure"]))
    requests: list[Mapping[str, str]] = task.labels["requests"]
    found = yield from desk.read("find_patient", name=task.labels["name"])
    desk.patient_id = found[0]["patient_id"]
    refused = (yield from desk.refuse("third_party")) if task.labels["case"] == "third party" else None
    words = [refused] if refused else (yield from _serve(desk, found, requests))
    yield Turn(text=f"{' '.join(words)} {DONE_MARK}")


def _serve(
    desk: Desk, found: Sequence[Mapping[str, Any]], requests: Sequence[Mapping[str, str]]
) -> Generator[Turn, Answers, list[str]]:
    """Identify the caller and handle each request; returns the words to say."""
    if not desk.slips():
        needs_phone = any(said["request"] in ("release", "phone") for said in requests)
        yield from _identify(desk, [row["patient_id"] for row in found], needs_phone=needs_phone)
    words: list[str] = []
    for said in requests:
        if words and desk.slips():
            break  # error: forgets the second request
        words.append((yield from HANDLERS[said["request"]](desk, said)))
    return words


def _identify(desk: Desk, patient_ids: Sequence[str], *, needs_phone: bool) -> Generator[Turn, Answers, None]:
    """Ask for the facts and check them; among patients of the same name, find the one with that birth date."""
    asks_phone = needs_phone and not desk.slips()
    answer = yield from desk.ask(ASK_BOTH_FACTS if asks_phone else ASK_BIRTH_DATE)
    birth_date = _stated(r"\d{4}-\d{2}-\d{2}", answer)
    digits = _stated(r"(?<![\d-])\d{4}(?![\d-])", answer)
    for patient_id in patient_ids:
        calls = [("verify_birth_date", {"birth_date": birth_date, "patient_id": patient_id})]
        if asks_phone:
            calls.append(("verify_phone", {"last_four": digits, "patient_id": patient_id}))
        results = yield from desk.call(*calls)
        if results[0].status == "ok":
            desk.patient_id = patient_id
            desk.phone_verified = all(result.status == "ok" for result in results)
            break


def _stated(pattern: str, answer: str) -> str:
    match = re.search(pattern, answer)
    return match[0] if match else "unknown"


# --- One function per request: carry it out or refuse it, and return the words to say -----------------------


def _cancel(desk: Desk, said: Mapping[str, str]) -> Words:
    visit = yield from _visit(desk, said)
    cancel = ("cancel_visit", {"visit_id": visit["visit_id"]})
    return (yield from _do_for_fee(desk, visit, "late_cancellation", cancel, DONE_WORDS["cancel"]))


def _move(desk: Desk, said: Mapping[str, str]) -> Words:
    visit = yield from _visit(desk, said)
    refused = (yield from desk.refuse("move_limit")) if visit["moves"] >= 2 else None
    if refused:
        return refused
    slots = yield from desk.read("list_slots", clinician=said["clinician"])
    slot = slots[0 if said["slot"] == "first" else -1]
    move = ("move_visit", {"slot_id": slot["slot_id"], "visit_id": visit["visit_id"]})
    return (yield from _do_for_fee(desk, visit, "late_change", move, DONE_WORDS["move"]))


def _visit(desk: Desk, said: Mapping[str, str]) -> Generator[Turn, Answers, Mapping[str, Any]]:
    (visit,) = yield from desk.read("list_visits", clinician=said["clinician"], patient_id=desk.patient_id)
    return visit


def _do_for_fee(desk: Desk, visit: Mapping[str, Any], fee: str, action: tuple[str, dict[str, Any]], done: str) -> Words:
    """Cancel or move a visit; a late one only if the caller agrees to the fee."""
    charge = ("charge_fee", {"fee": fee, "patient_id": desk.patient_id})
    if visit["starts_in_hours"] >= 24:
        yield from desk.call(action)
        return done
    if desk.slips():  # error: forgets the fee, or charges it without asking
        yield from desk.call(*((action,) if desk.rng.random() < 0.6 else (action, charge)))
        return done
    answer = yield from desk.ask(ASK_FEE[fee])
    if not re.search(r"\b(no|not|don't|decline)\b", answer.lower()):
        yield from desk.call(action, charge)
        return done
    refused = yield from desk.refuse("fee_declined")
    if refused is None:  # error: does it without the fee
        yield from desk.call(action)
    return refused or done


def _book(desk: Desk, said: Mapping[str, str]) -> Words:
    if said["specialty"] != "family medicine":
        referrals = yield from desk.read("list_referrals", specialty=said["specialty"], patient_id=desk.patient_id)
        referred = any(row["valid"] for row in referrals)
        refused = None if referred else (yield from desk.refuse("no_referral"))
        if refused:
            return refused
    slots = yield from desk.read("find_slots", specialty=said["specialty"])
    slot = slots[0 if said["slot"] == "first" else -1]
    yield from desk.call(("book_visit", {"slot_id": slot["slot_id"], "patient_id": desk.patient_id}))
    return DONE_WORDS["book"]


def _refill(desk: Desk, said: Mapping[str, str]) -> Words:
    rows = yield from desk.read("list_prescriptions", drug=said["drug"], patient_id=desk.patient_id)
    # Without the identity check the agent may act for a namesake, who has no such prescription.
    row, *_ = rows or (yield from desk.read("list_prescriptions", patient_id=desk.patient_id))
    reason = "no_refills" if row["refills_left"] == 0 else "review_due" if row["review_due"] else None
    refused = (yield from desk.refuse(reason)) if reason else None
    if refused:
        return refused
    yield from desk.call(("request_refill", {"prescription_id": row["prescription_id"]}))
    return DONE_WORDS["refill"]


def _waive(desk: Desk, said: Mapping[str, str]) -> Words:
    (charge,) = yield from desk.read("list_charges", fee=said["fee"], patient_id=desk.patient_id)
    refused = None if charge["approved"] else (yield from desk.refuse("no_approval"))
    if refused:
        return refused
    yield from desk.call(("waive_charge", {"charge_id": charge["charge_id"]}))
    return DONE_WORDS["waive"]


def _release(desk: Desk, said: Mapping[str, str]) -> Words:
    refused = None if desk.phone_verified else (yield from desk.refuse("identity_failed"))
    if refused:
        return refused
    consents = yield from desk.read("list_consents", recipient=said["recipient"], patient_id=desk.patient_id)
    signed = any(row["signed"] for row in consents)
    refused = None if signed else (yield from desk.refuse("no_consent"))
    if refused:
        return refused
    yield from desk.call(("send_records", {"recipient": said["recipient"], "patient_id": desk.patient_id}))
    return DONE_WORDS["release"]


def _phone(desk: Desk, said: Mapping[str, str]) -> Words:
    refused = None if desk.phone_verified else (yield from desk.refuse("identity_failed"))
    if refused:
        return refused
    yield from desk.call(("update_phone", {"phone": said["new_phone"], "patient_id": desk.patient_id}))
    return DONE_WORDS["phone"]


HANDLERS: Mapping[str, Callable[[Desk, Mapping[str, str]], Words]] = {
    "cancel": _cancel,
    "move": _move,
    "book": _book,
    "refill": _refill,
    "waive": _waive,
    "release": _release,
    "phone": _phone,
}
