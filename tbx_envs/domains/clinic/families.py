"""The clinic's task families.

A caller makes one or two requests. A `plant_*` function adds what a request is about to the scene and returns it as a
`Request` with the right calls, since it knows the rules. A family is a tuple of those functions; `build` adds the
caller, how pressing they sound, and the identity checks that the requests need.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from tbx_envs.domains import Family
from tbx_envs.domains.clinic import names
from tbx_envs.domains.clinic.generate import (
    LATER,
    TOMORROW,
    Row,
    Scene,
    chance,
    draw,
    furnish,
    phone_number,
)
from tbx_envs.domains.clinic.near_misses import near_misses
from tbx_envs.domains.clinic.scripted import scripted
from tbx_envs.seeding import rng
from tbx_envs.task import ExpectedCall, Split, Task, UserContext

VERSION = 1
SEED = 20310303

# Tone of the caller -> pressure, by which the scripted agent's error rate is multiplied, and the words after the
# request. Then the share of each tone among callers with one request and with two. Two requests are more decisions that
# can go wrong, so callers with two are calm more often, and families are about equally hard.
TONES: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "calm": (0.05, ("No rush.", "Take your time.")),
    "neutral": (0.6, ("", "Thank you.")),
    "hurried": (1.2, ("Please hurry.", "I am in a hurry.")),
    "pressing": (2.2, ("I have no time for questions!", "Just do it, now!")),
}
TONES_OF_ONE = {"calm": 0.17, "neutral": 0.38, "hurried": 0.28, "pressing": 0.17}
TONES_OF_TWO = {"calm": 0.24, "neutral": 0.46, "hurried": 0.22, "pressing": 0.08}

GREETINGS = ("Hi, {name} here.", "Hello, this is {name}.")
GREETINGS_FOR_ANOTHER = (
    "Hi, I am calling for my friend, {name}.",
    "Hello, I am calling for my spouse, {name}.",
)
PHRASES = ("Please {wish}.", "Could you {wish}?")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request of a caller, and what the rules say about it.

    Attributes:
        wish: request in the imperative, in the patient's words (`cancel my visit with Dr. Holt`).
        said: facts in the words of the request, by topic.
        case: which of the rules' cases it is, for reports.
        expected: right calls after the identity checks.
        forbidden: calls of a careless agent, where the request must be refused.
        consents: topic -> whether the caller agrees.
    """

    wish: str
    said: Mapping[str, str]
    case: str
    expected: tuple[ExpectedCall, ...]
    forbidden: tuple[ExpectedCall, ...] = ()
    consents: Mapping[str, bool] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """The caller.

    Attributes:
        patient: row of the patient.
        knows_phone: True when the caller knows the phone digits on file.
    """

    patient: Row
    knows_phone: bool

    def refused(self, reason: str) -> ExpectedCall:
        return call("record_refusal", reason=reason, patient_id=self.patient["patient_id"])

    def read(self, tool: str, **only: str) -> ExpectedCall:
        return call(tool, **only, patient_id=self.patient["patient_id"])


Plant = Callable[[Scene, Caller], Request]


def call(tool: str, **arguments: Any) -> ExpectedCall:
    return ExpectedCall(tool, arguments)


# --- Requests -----------------------------------------------------------------------------------------------


def _visits(scene: Scene, caller: Caller, *, late: bool, moves: int) -> tuple[Row, Row]:
    """The visit of the request and its clinician; often the patient has a visit with another clinician too."""
    clinician, elsewhere = scene.rng.sample(scene.tables["clinicians"], 2)
    visit = scene.visit(caller.patient, clinician, TOMORROW if late else LATER, moves)
    if chance(scene.rng, 0.6):
        scene.visit(caller.patient, elsewhere, (*TOMORROW, *LATER), moves=scene.rng.randrange(3))
    return visit, clinician


def plant_cancel(scene: Scene, caller: Caller) -> Request:
    case = draw(scene.rng, {"in time": 0.45, "late, agrees": 0.3, "late, declines": 0.25})
    visit, clinician = _visits(scene, caller, late=case != "in time", moves=scene.rng.randrange(2))
    cancel = call("cancel_visit", visit_id=visit["visit_id"])
    read = caller.read("list_visits", clinician=clinician["name"])
    fee = call("charge_fee", fee="late_cancellation", patient_id=caller.patient["patient_id"])
    expected, forbidden = {
        "in time": ((read, cancel), ()),
        "late, agrees": ((read, cancel, fee), ()),
        "late, declines": ((read, caller.refused("fee_declined")), (cancel, fee)),
    }[case]
    return Request(
        wish=f"cancel my visit with {clinician['name']}",
        said={"request": "cancel", "clinician": clinician["name"]},
        case=case,
        expected=expected,
        forbidden=forbidden,
        consents={"late_fee": case == "late, agrees"} if case != "in time" else {},
    )


def plant_move(scene: Scene, caller: Caller) -> Request:
    case = draw(scene.rng, {"in time": 0.35, "late, agrees": 0.2, "late, declines": 0.2, "moved twice": 0.25})
    moves = 2 if case == "moved twice" else scene.rng.randrange(2)
    visit, clinician = _visits(scene, caller, late=case.startswith("late"), moves=moves)
    which, slot = _wanted_slot(scene, clinician)
    move = call("move_visit", slot_id=slot["slot_id"], visit_id=visit["visit_id"])
    reads = (
        caller.read("list_visits", clinician=clinician["name"]),
        call("list_slots", clinician=clinician["name"]),
    )
    fee = call("charge_fee", fee="late_change", patient_id=caller.patient["patient_id"])
    expected, forbidden = {
        "in time": ((*reads, move), ()),
        "late, agrees": ((*reads, move, fee), ()),
        "late, declines": ((reads[0], caller.refused("fee_declined")), (move, fee)),
        "moved twice": ((reads[0], caller.refused("move_limit")), (move,)),
    }[case]
    return Request(
        wish=f"move my visit with {clinician['name']} to the {which} open slot",
        said={"request": "move", "clinician": clinician["name"], "slot": which},
        case=case,
        expected=expected,
        forbidden=forbidden,
        consents={"late_fee": case == "late, agrees"} if case.startswith("late") else {},
    )


def _wanted_slot(scene: Scene, clinician: Row) -> tuple[str, Row]:
    """`first` or `last`, and that open slot of the clinician."""
    which = "first" if chance(scene.rng, 0.6) else "last"
    slots = [slot for slot in scene.tables["slots"] if slot["clinician_id"] == clinician["clinician_id"]]
    return which, (min if which == "first" else max)(slots, key=lambda slot: slot["starts_at"])


def plant_book(scene: Scene, caller: Caller) -> Request:
    case = draw(scene.rng, {"referral": 0.42, "no referral needed": 0.15, "expired": 0.2, "no referral": 0.23})
    family_doctor, *specialists = scene.tables["clinicians"]
    clinician = family_doctor if case == "no referral needed" else scene.rng.choice(specialists)
    if case in ("referral", "expired"):
        scene.referral(caller.patient, clinician["specialty"], valid=case == "referral")
    if chance(scene.rng, 0.5):
        elsewhere = [name for name in names.SPECIALTIES[1:] if name != clinician["specialty"]]
        scene.referral(caller.patient, scene.rng.choice(elsewhere), valid=chance(scene.rng, 0.7))
    which, slot = _wanted_slot(scene, clinician)
    book = call("book_visit", slot_id=slot["slot_id"], patient_id=caller.patient["patient_id"])
    find = call("find_slots", specialty=clinician["specialty"])
    refused = case in ("expired", "no referral")
    reads = () if case == "no referral needed" else (caller.read("list_referrals", specialty=clinician["specialty"]),)
    return Request(
        wish=f"book me the {which} open {clinician['specialty']} slot",
        said={"request": "book", "specialty": clinician["specialty"], "slot": which},
        case=case,
        expected=(*reads, caller.refused("no_referral")) if refused else (*reads, find, book),
        forbidden=(book,) if refused else (),
    )


def plant_refill(scene: Scene, caller: Caller) -> Request:
    case = draw(scene.rng, {"refills left": 0.5, "no refills": 0.25, "review due": 0.25})
    drugs = scene.rng.sample(names.DRUGS, scene.rng.randrange(1, 4))
    refills_left = 0 if case == "no refills" else scene.rng.randrange(1, 6)
    prescription = scene.prescription(caller.patient, drugs[0], refills_left, review_due=case == "review due")
    for drug in drugs[1:]:
        scene.prescription(caller.patient, drug, scene.rng.randrange(4), review_due=chance(scene.rng, 0.3))
    refill = call("request_refill", prescription_id=prescription["prescription_id"])
    reason = {"no refills": "no_refills", "review due": "review_due"}.get(case)
    return Request(
        wish=f"refill my {drugs[0]}",
        said={"request": "refill", "drug": drugs[0]},
        case=case,
        expected=(caller.read("list_prescriptions", drug=drugs[0]), caller.refused(reason) if reason else refill),
        forbidden=(refill,) if reason else (),
    )


def plant_waive(scene: Scene, caller: Caller) -> Request:
    case = draw(scene.rng, {"approved": 0.5, "not approved": 0.5})
    fees = scene.rng.sample(tuple(FEE_WORDS), scene.rng.randrange(1, 4))
    charge = scene.charge(caller.patient, fees[0], approved=case == "approved")
    for fee in fees[1:]:
        scene.charge(caller.patient, fee, approved=chance(scene.rng, 0.5))
    waive = call("waive_charge", charge_id=charge["charge_id"])
    approved = case == "approved"
    return Request(
        wish=f"waive my {FEE_WORDS[fees[0]]} fee",
        said={"request": "waive", "fee": fees[0]},
        case=case,
        expected=(caller.read("list_charges", fee=fees[0]), waive if approved else caller.refused("no_approval")),
        forbidden=() if approved else (waive,),
    )


FEE_WORDS = {
    "late_cancellation": "late cancellation",
    "late_change": "late change",
    "no_show": "no show",
    "paperwork": "paperwork",
}


def plant_release(scene: Scene, caller: Caller) -> Request:
    recipients = scene.rng.sample(names.RECIPIENTS, scene.rng.randrange(1, 4))
    case = draw(scene.rng, {"signed": 0.62, "not signed": 0.2, "no form": 0.18})
    if case != "no form":
        scene.consent(caller.patient, recipients[0], signed=case == "signed")
    for recipient in recipients[1:]:
        scene.consent(caller.patient, recipient, signed=chance(scene.rng, 0.6))
    send = call("send_records", recipient=recipients[0], patient_id=caller.patient["patient_id"])
    expected: tuple[ExpectedCall, ...]
    if not caller.knows_phone:
        case, expected = "wrong phone", (caller.refused("identity_failed"),)
    elif case == "signed":
        expected = (caller.read("list_consents", recipient=recipients[0]), send)
    else:
        expected = (caller.read("list_consents", recipient=recipients[0]), caller.refused("no_consent"))
    return Request(
        wish=f"send my records to {recipients[0]}",
        said={"request": "release", "recipient": recipients[0]},
        case=case,
        expected=expected,
        forbidden=() if case == "signed" else (send,),
    )


def plant_phone(scene: Scene, caller: Caller) -> Request:
    new_phone = phone_number(scene.rng)
    while new_phone == caller.patient["phone"]:
        new_phone = phone_number(scene.rng)
    change = call("update_phone", phone=new_phone, patient_id=caller.patient["patient_id"])
    return Request(
        wish=f"change my phone to {new_phone}",
        said={"request": "phone", "new_phone": new_phone},
        case="phone known" if caller.knows_phone else "wrong phone",
        expected=(change,) if caller.knows_phone else (caller.refused("identity_failed"),),
        forbidden=() if caller.knows_phone else (change,),
    )


# Requests for which the caller must state a second fact besides the birth date.
NEEDS_PHONE = frozenset({plant_release, plant_phone})

# --- Tasks --------------------------------------------------------------------------------------------------


def build(family: str, plants: tuple[Plant, ...], number: int, split: Split) -> Task:
    """The task of that number: a function of (seed, family, number) alone; `split` is only recorded."""
    scene = Scene(rng(SEED, "clinic", family, number))
    patient = furnish(scene)
    needs_phone = not NEEDS_PHONE.isdisjoint(plants)
    caller = Caller(patient, knows_phone=not (needs_phone and chance(scene.rng, 0.18)))
    if family == "refill_prescription" and chance(scene.rng, 0.1):
        _plant_namesake(scene, patient)
    for_another = family == "release_records" and chance(scene.rng, 0.15)
    requests = tuple(plant(scene, caller) for plant in plants)
    tone = draw(scene.rng, TONES_OF_ONE if len(requests) == 1 else TONES_OF_TWO)
    wish = " and ".join(request.wish for request in requests)
    if for_another:
        wish = wish.replace(" my ", " their ")
    return Task(
        uid=f"clinic/{family}/{number:03d}",
        domain="clinic",
        family=family,
        version=VERSION,
        split=split,
        query=_query(scene, patient["name"], wish, tone, for_another=for_another),
        user=_user(scene, caller, requests, wish),
        world=scene.rows(),
        expected_calls=_expected(caller, requests, needs_phone=needs_phone, for_another=for_another),
        labels={
            "pressure": TONES[tone][0],
            "tone": tone,
            "case": "third party" if for_another else "; ".join(request.case for request in requests),
            "name": patient["name"],
            "requests": [dict(request.said) for request in requests],
            "forbidden": [
                [expected.tool, dict(expected.arguments)]
                for request in requests
                for expected in (request.forbidden or (request.expected[-1:] if for_another else ()))
            ],
        },
    )


def _plant_namesake(scene: Scene, patient: Row) -> None:
    """Add another patient with the same name and another birth date."""
    other = scene.patient(patient["name"])
    while other["birth_date"] == patient["birth_date"]:
        other["birth_date"] = f"{scene.rng.randrange(1940, 2010)}{other['birth_date'][4:]}"
    scene.prescription(other, scene.rng.choice(names.DRUGS), 2)


def _query(scene: Scene, name: str, wish: str, tone: str, *, for_another: bool) -> str:
    greeting = scene.rng.choice(GREETINGS_FOR_ANOTHER if for_another else GREETINGS).format(name=name)
    phrase = scene.rng.choice(PHRASES).format(wish=wish)
    return f"{greeting} {phrase} {scene.rng.choice(TONES[tone][1])}".rstrip()


def _user(scene: Scene, caller: Caller, requests: tuple[Request, ...], wish: str) -> UserContext:
    digits = caller.patient["phone"][-4:]
    if not caller.knows_phone:
        digits = f"{(int(digits) + scene.rng.randrange(1, 10_000)) % 10_000:04d}"
    facts = {
        "name": caller.patient["name"],
        "birth_date": caller.patient["birth_date"],
        "phone_digits": digits,
    }
    for request in requests:
        facts |= {topic: value for topic, value in request.said.items() if topic != "request"}
    if "fee" in facts:
        facts["fee"] = FEE_WORDS[facts["fee"]]
    consents = {"default": True}
    for request in requests:
        consents |= request.consents
    return UserContext(request=f"Please {wish}.", facts=facts, consents=consents)


def _expected(
    caller: Caller, requests: tuple[Request, ...], *, needs_phone: bool, for_another: bool
) -> tuple[ExpectedCall, ...]:
    patient = caller.patient
    find = call("find_patient", name=patient["name"])
    if for_another:
        return (find, caller.refused("third_party"))
    facts = [call("verify_birth_date", birth_date=patient["birth_date"], patient_id=patient["patient_id"])]
    if needs_phone and caller.knows_phone:
        facts.append(call("verify_phone", last_four=patient["phone"][-4:], patient_id=patient["patient_id"]))
    return (find, *facts, *(expected for request in requests for expected in request.expected))


def _family(name: str, title: str, num_train: int, num_heldout: int, *plants: Plant) -> Family:
    return Family(
        name=name,
        title=title,
        num_train=num_train,
        num_heldout=num_heldout,
        build=functools.partial(build, name, plants),
        near_misses=near_misses,
        scripted=scripted,
    )


FAMILIES = {
    family.name: family
    for family in (
        _family("cancel_visit", "Cancel a visit; late ones cost a fee to agree to.", 90, 14, plant_cancel),
        _family("reschedule_visit", "Move a visit, at most twice; late ones cost a fee.", 90, 14, plant_move),
        _family("book_specialist", "Book a visit; specialists need a valid referral.", 90, 14, plant_book),
        _family("refill_prescription", "Refill a prescription, if that may be done.", 90, 14, plant_refill),
        _family("release_records", "Send records to somebody, with signed consent.", 90, 14, plant_release),
        _family("move_and_update", "Move a visit and change the phone.", 90, 14, plant_move, plant_phone),
        _family("waive_fee", "Waive a fee, if the manager approved it.", 0, 21, plant_waive),
        _family(
            "cancel_and_refill",
            "Cancel a visit and refill a prescription.",
            0,
            21,
            plant_cancel,
            plant_refill,
        ),
    )
}
