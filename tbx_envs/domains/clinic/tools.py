"""The tools of the front desk. Docstrings and annotations of tools are read by the model: changing them changes the
benchmark.

A tool rejects what cannot be done (an unknown id, a taken slot). It does not enforce the rules: following them is the
agent's task, and every rule leaves a trace in the tables. Statements are built once, at import; a call executes one to
four of them.
"""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Any, Literal

from sqlalchemy import String, and_, bindparam, func, insert, literal, select, update

from tbx_envs.domains.clinic.tables import (
    APPROVALS,
    CHARGES,
    CLINICIANS,
    CONSENTS,
    FEES,
    PATIENTS,
    PRESCRIPTIONS,
    RECIPIENTS,
    REFERRALS,
    REFILLS,
    REFUSALS,
    RELEASES,
    SLOTS,
    VERIFICATIONS,
    VISITS,
)
from tbx_envs.tools.tool import ToolContext, ToolRejection, tool

PatientId = Annotated[str, "Id of the patient, for example P12."]
VisitId = Annotated[str, "Id of a booked visit, for example V31."]
SlotId = Annotated[str, "Id of an open slot, for example S27."]
Fee = Literal["late_cancellation", "late_change", "no_show", "paperwork"]

# --- Reading ------------------------------------------------------------------------------------------------

_PATIENT = PATIENTS.c.patient_id == bindparam("patient_id")
_PATIENT_EXISTS = select(PATIENTS.c.patient_id).where(_PATIENT)
_PATIENTS_OF_NAME = (
    select(PATIENTS.c.name, PATIENTS.c.patient_id)
    .where(func.lower(PATIENTS.c.name) == bindparam("name"))
    .order_by(PATIENTS.c.patient_id)
)
_VISITS_OF_PATIENT = (
    select(CLINICIANS.c.name, VISITS.c.starts_at, VISITS.c.moves, VISITS.c.visit_id)
    .join_from(VISITS, CLINICIANS, VISITS.c.clinician_id == CLINICIANS.c.clinician_id)
    .where(VISITS.c.patient_id == bindparam("patient_id"), VISITS.c.status == "booked")
    .order_by(VISITS.c.starts_at, VISITS.c.visit_id)
)
_OPEN_SLOTS = (
    select(CLINICIANS.c.name, SLOTS.c.starts_at, SLOTS.c.slot_id)
    .join_from(CLINICIANS, SLOTS, and_(SLOTS.c.clinician_id == CLINICIANS.c.clinician_id, SLOTS.c.status == "open"))
    .order_by(SLOTS.c.starts_at, SLOTS.c.slot_id)
)
_SLOTS_OF_CLINICIAN = _OPEN_SLOTS.where(func.lower(CLINICIANS.c.name) == bindparam("clinician"))
_SLOTS_OF_SPECIALTY = _OPEN_SLOTS.where(func.lower(CLINICIANS.c.specialty) == bindparam("specialty"))
_REFERRALS_OF_PATIENT = (
    select(REFERRALS.c.specialty, REFERRALS.c.valid_until)
    .where(REFERRALS.c.patient_id == bindparam("patient_id"))
    .order_by(REFERRALS.c.specialty, REFERRALS.c.valid_until)
)
_PRESCRIPTIONS_OF_PATIENT = (
    select(
        PRESCRIPTIONS.c.drug,
        PRESCRIPTIONS.c.refills_left,
        PRESCRIPTIONS.c.review_due,
        PRESCRIPTIONS.c.prescription_id,
    )
    .where(PRESCRIPTIONS.c.patient_id == bindparam("patient_id"))
    .order_by(PRESCRIPTIONS.c.drug, PRESCRIPTIONS.c.prescription_id)
)
_CHARGES_OF_PATIENT = (
    select(CHARGES.c.fee, APPROVALS.c.charge_id, CHARGES.c.charge_id)
    .join_from(CHARGES, APPROVALS, APPROVALS.c.charge_id == CHARGES.c.charge_id, isouter=True)
    .where(CHARGES.c.patient_id == bindparam("patient_id"), CHARGES.c.status == "open")
    .order_by(CHARGES.c.fee, CHARGES.c.charge_id)
)
_CONSENTS_OF_PATIENT = (
    select(CONSENTS.c.recipient, CONSENTS.c.signed)
    .where(CONSENTS.c.patient_id == bindparam("patient_id"))
    .order_by(CONSENTS.c.recipient, CONSENTS.c.consent_id)
)


def _known_patient(context: ToolContext, patient_id: str) -> None:
    if context.db.execute(_PATIENT_EXISTS, {"patient_id": patient_id}).first() is None:
        raise ToolRejection(f"There is no patient {patient_id}.")


def _rows_of_patient(context: ToolContext, statement: Any, patient_id: str, *, only: str | None) -> list[Any]:
    """The patient's rows; with `only`, those whose first column equals it, ignoring case."""
    rows = context.db.execute(statement, {"patient_id": patient_id}).all()
    if not rows:
        _known_patient(context, patient_id)
    return [row for row in rows if only is None or row[0].lower() == only.strip().lower()]


def _hours_until(context: ToolContext, starts_at: str) -> int:
    return context.clock.hours_until(datetime.datetime.fromisoformat(starts_at))


@tool(mutates=False)
def find_patient(
    context: ToolContext, *, name: Annotated[str, "First and last name, for example Mei Park."]
) -> list[dict[str, Any]]:
    """Find patients by their full name. Two patients may have the same name."""
    rows = context.db.execute(_PATIENTS_OF_NAME, {"name": name.strip().lower()}).all()
    if not rows:
        raise ToolRejection(f"No patient is called {name}.")
    return [{"name": name, "patient_id": patient_id} for name, patient_id in rows]


@tool(mutates=False)
def list_visits(
    context: ToolContext,
    *,
    clinician: Annotated[str | None, "Only visits with this clinician, for example Dr. Holt."] = None,
    patient_id: PatientId,
) -> list[dict[str, Any]]:
    """List a patient's booked visits, next one first: hours until it starts, and how often it was moved."""
    return [
        {
            "clinician": name,
            "starts_in_hours": _hours_until(context, starts_at),
            "moves": moves,
            "visit_id": visit_id,
        }
        for name, starts_at, moves, visit_id in _rows_of_patient(
            context, _VISITS_OF_PATIENT, patient_id, only=clinician
        )
    ]


@tool(mutates=False)
def list_slots(
    context: ToolContext, *, clinician: Annotated[str, "Name of the clinician, for example Dr. Holt."]
) -> list[dict[str, Any]]:
    """List the open slots of a clinician, the next one first."""
    rows = context.db.execute(_SLOTS_OF_CLINICIAN, {"clinician": clinician.strip().lower()}).all()
    if not rows:
        raise ToolRejection(f"No open slot of {clinician}.")
    return [{"starts_in_hours": _hours_until(context, starts_at), "slot_id": slot_id} for _, starts_at, slot_id in rows]


@tool(mutates=False)
def find_slots(
    context: ToolContext,
    *,
    specialty: Annotated[str, "Specialty, for example cardiology or family medicine."],
) -> list[dict[str, Any]]:
    """Find the open slots of a specialty, the next one first."""
    rows = context.db.execute(_SLOTS_OF_SPECIALTY, {"specialty": specialty.strip().lower()}).all()
    if not rows:
        raise ToolRejection(f"No open slot in {specialty}.")
    return [
        {"clinician": clinician, "starts_in_hours": _hours_until(context, starts_at), "slot_id": slot_id}
        for clinician, starts_at, slot_id in rows
    ]


@tool(mutates=False)
def list_referrals(
    context: ToolContext,
    *,
    specialty: Annotated[str | None, "Only referrals to this specialty, for example cardiology."] = None,
    patient_id: PatientId,
) -> list[dict[str, Any]]:
    """List a patient's referrals to specialties and whether each is valid today."""
    today = context.clock.today.isoformat()
    return [
        {"specialty": referred_to, "valid": valid_until >= today}
        for referred_to, valid_until in _rows_of_patient(context, _REFERRALS_OF_PATIENT, patient_id, only=specialty)
    ]


@tool(mutates=False)
def list_prescriptions(
    context: ToolContext,
    *,
    drug: Annotated[str | None, "Only prescriptions of this drug, for example Corvane."] = None,
    patient_id: PatientId,
) -> list[dict[str, Any]]:
    """List a patient's prescriptions: the refills left, and whether the prescriber's review is due."""
    return [
        {
            "drug": prescribed,
            "refills_left": refills,
            "review_due": bool(review),
            "prescription_id": prescription_id,
        }
        for prescribed, refills, review, prescription_id in _rows_of_patient(
            context, _PRESCRIPTIONS_OF_PATIENT, patient_id, only=drug
        )
    ]


@tool(mutates=False)
def list_charges(
    context: ToolContext,
    *,
    fee: Annotated[Fee | None, "Only charges of this fee."] = None,
    patient_id: PatientId,
) -> list[dict[str, Any]]:
    """List a patient's open charges and whether the manager approved to waive each."""
    return [
        {"fee": charged, "approved": approval is not None, "charge_id": charge_id}
        for charged, approval, charge_id in _rows_of_patient(context, _CHARGES_OF_PATIENT, patient_id, only=fee)
    ]


@tool(mutates=False)
def list_consents(
    context: ToolContext,
    *,
    recipient: Annotated[str | None, "Only forms for this recipient, for example Summit Insurance."] = None,
    patient_id: PatientId,
) -> list[dict[str, Any]]:
    """List a patient's consent forms for the release of records and whether each is signed."""
    return [
        {"recipient": named, "signed": bool(signed)}
        for named, signed in _rows_of_patient(context, _CONSENTS_OF_PATIENT, patient_id, only=recipient)
    ]


# --- Identity and refusals ----------------------------------------------------------------------------------

_FACTS_OF_PATIENT = (
    select(PATIENTS.c.birth_date, PATIENTS.c.phone, VERIFICATIONS.c.fact)
    .join_from(
        PATIENTS,
        VERIFICATIONS,
        and_(
            VERIFICATIONS.c.patient_id == PATIENTS.c.patient_id,
            VERIFICATIONS.c.fact == bindparam("fact"),
        ),
        isouter=True,
    )
    .where(_PATIENT)
)
_VERIFY = insert(VERIFICATIONS)
_REFUSALS_OF_PATIENT = (
    select(PATIENTS.c.patient_id, REFUSALS.c.reason)
    .join_from(
        PATIENTS,
        REFUSALS,
        and_(REFUSALS.c.patient_id == PATIENTS.c.patient_id, REFUSALS.c.reason == bindparam("reason")),
        isouter=True,
    )
    .where(_PATIENT)
)
_REFUSE = insert(REFUSALS)


def _verify(context: ToolContext, patient_id: str, fact: Literal["birth_date", "phone"], given: str) -> dict[str, Any]:
    row = context.db.execute(_FACTS_OF_PATIENT, {"patient_id": patient_id, "fact": fact}).first()
    if row is None:
        raise ToolRejection(f"There is no patient {patient_id}.")
    birth_date, phone, verified = row
    on_file = birth_date if fact == "birth_date" else phone[-4:]
    if given.strip() != on_file:
        raise ToolRejection("It does not match.")
    if verified is None:
        context.db.execute(
            _VERIFY, {"patient_id": patient_id, "fact": fact, "verified_at": context.clock.now.isoformat()}
        )
    return {"verified": True}


@tool(mutates=True)
def verify_birth_date(
    context: ToolContext,
    *,
    birth_date: Annotated[str, "The birth date that the caller stated, as YYYY-MM-DD."],
    patient_id: PatientId,
) -> dict[str, Any]:
    """Compare the birth date that the caller stated with the record, and note that it matched."""
    return _verify(context, patient_id, "birth_date", birth_date)


@tool(mutates=True)
def verify_phone(
    context: ToolContext,
    *,
    last_four: Annotated[str, "The last four digits that the caller stated."],
    patient_id: PatientId,
) -> dict[str, Any]:
    """Compare the phone digits that the caller stated with the record, and note that they matched."""
    return _verify(context, patient_id, "phone", last_four)


@tool(mutates=True)
def record_refusal(
    context: ToolContext,
    *,
    reason: Annotated[
        Literal[
            "third_party",
            "identity_failed",
            "fee_declined",
            "move_limit",
            "no_referral",
            "no_refills",
            "review_due",
            "no_approval",
            "no_consent",
        ],
        "Why the request cannot be met.",
    ],
    patient_id: PatientId,
) -> dict[str, Any]:
    """Record that a patient's request was not carried out, and why."""
    row = context.db.execute(_REFUSALS_OF_PATIENT, {"patient_id": patient_id, "reason": reason}).first()
    if row is None:
        raise ToolRejection(f"There is no patient {patient_id}.")
    if row[1] is not None:
        raise ToolRejection("That refusal is recorded already.")
    context.db.execute(
        _REFUSE, {"patient_id": patient_id, "reason": reason, "recorded_at": context.clock.now.isoformat()}
    )
    return {"recorded": True}


# --- Visits and fees ----------------------------------------------------------------------------------------

_CANCEL = (
    update(VISITS)
    .where(VISITS.c.visit_id == bindparam("visit"), VISITS.c.status == "booked")
    .values(status="cancelled")
)
_SLOT = select(SLOTS.c.clinician_id, SLOTS.c.starts_at).where(
    SLOTS.c.slot_id == bindparam("slot_id"), SLOTS.c.status == "open"
)
_VISIT = select(VISITS.c.clinician_id).where(VISITS.c.visit_id == bindparam("visit_id"), VISITS.c.status == "booked")
_MOVE = (
    update(VISITS)
    .where(VISITS.c.visit_id == bindparam("visit"))
    .values(starts_at=bindparam("new_start"), moves=VISITS.c.moves + 1)
)
_TAKE = update(SLOTS).where(SLOTS.c.slot_id == bindparam("slot")).values(status="taken")
_NEXT_VISIT = select(literal("V").concat((func.count() + 100).cast(String))).select_from(VISITS)
_BOOK = insert(VISITS)
_FEE = select(FEES.c.amount_cents).where(FEES.c.fee == bindparam("fee"))
_NEXT_CHARGE = select(literal("C").concat((func.count() + 100).cast(String))).select_from(CHARGES)
_CHARGE = insert(CHARGES)
_WAIVE = (
    update(CHARGES)
    .where(CHARGES.c.charge_id == bindparam("charge"), CHARGES.c.status == "open")
    .values(status="waived")
)


def _open_slot(context: ToolContext, slot_id: str) -> tuple[str, str]:
    """Clinician and start of an open slot."""
    slot = context.db.execute(_SLOT, {"slot_id": slot_id}).first()
    if slot is None:
        raise ToolRejection(f"There is no open slot {slot_id}.")
    return slot[0], slot[1]


@tool(mutates=True)
def cancel_visit(context: ToolContext, *, visit_id: VisitId) -> dict[str, Any]:
    """Cancel a booked visit. Charges nothing."""
    if context.db.execute(_CANCEL, {"visit": visit_id}).rowcount == 0:
        raise ToolRejection(f"There is no booked visit {visit_id}.")
    return {"cancelled": True}


@tool(mutates=True)
def move_visit(context: ToolContext, *, slot_id: SlotId, visit_id: VisitId) -> dict[str, Any]:
    """Move a booked visit to an open slot of the same clinician. Charges nothing."""
    clinician_id, starts_at = _open_slot(context, slot_id)
    visit = context.db.execute(_VISIT, {"visit_id": visit_id}).first()
    if visit is None:
        raise ToolRejection(f"There is no booked visit {visit_id}.")
    if visit[0] != clinician_id:
        raise ToolRejection(f"Slot {slot_id} is of another clinician.")
    context.db.execute(_MOVE, {"visit": visit_id, "new_start": starts_at})
    context.db.execute(_TAKE, {"slot": slot_id})
    return {"moved": True}


@tool(mutates=True)
def book_visit(context: ToolContext, *, slot_id: SlotId, patient_id: PatientId) -> dict[str, Any]:
    """Book an open slot for a patient."""
    _known_patient(context, patient_id)
    clinician_id, starts_at = _open_slot(context, slot_id)
    visit_id = context.db.execute(_NEXT_VISIT).scalar_one()
    context.db.execute(
        _BOOK,
        {
            "visit_id": visit_id,
            "patient_id": patient_id,
            "clinician_id": clinician_id,
            "starts_at": starts_at,
            "moves": 0,
            "status": "booked",
        },
    )
    context.db.execute(_TAKE, {"slot": slot_id})
    return {"booked": True}


@tool(mutates=True)
def charge_fee(
    context: ToolContext,
    *,
    fee: Annotated[Fee, "Which fee."],
    patient_id: PatientId,
) -> dict[str, Any]:
    """Charge a patient one of the clinic's fees."""
    _known_patient(context, patient_id)
    amount_cents = context.db.execute(_FEE, {"fee": fee}).scalar_one()
    charge_id = context.db.execute(_NEXT_CHARGE).scalar_one()
    context.db.execute(
        _CHARGE,
        {
            "charge_id": charge_id,
            "patient_id": patient_id,
            "fee": fee,
            "amount_cents": amount_cents,
            "status": "open",
        },
    )
    return {"charged": f"${amount_cents // 100}"}


@tool(mutates=True)
def waive_charge(
    context: ToolContext, *, charge_id: Annotated[str, "Id of an open charge, for example C18."]
) -> dict[str, Any]:
    """Waive an open charge."""
    if context.db.execute(_WAIVE, {"charge": charge_id}).rowcount == 0:
        raise ToolRejection(f"There is no open charge {charge_id}.")
    return {"waived": True}


# --- Prescriptions, records, contact ------------------------------------------------------------------------

_REFILL_STATE = (
    select(PRESCRIPTIONS.c.prescription_id, REFILLS.c.requested_at)
    .join_from(PRESCRIPTIONS, REFILLS, REFILLS.c.prescription_id == PRESCRIPTIONS.c.prescription_id, isouter=True)
    .where(PRESCRIPTIONS.c.prescription_id == bindparam("prescription_id"))
)
_REFILL = insert(REFILLS)
_RELEASE_STATE = (
    select(RECIPIENTS.c.recipient, RELEASES.c.sent_at)
    .join_from(
        RECIPIENTS,
        RELEASES,
        and_(RELEASES.c.recipient == RECIPIENTS.c.recipient, RELEASES.c.patient_id == bindparam("patient_id")),
        isouter=True,
    )
    .where(RECIPIENTS.c.recipient == bindparam("recipient"))
)
_RELEASE = insert(RELEASES)
_SET_PHONE = (
    update(PATIENTS)
    .where(PATIENTS.c.patient_id == bindparam("patient"), PATIENTS.c.phone != bindparam("new_phone"))
    .values(phone=bindparam("new_phone"))
)


@tool(mutates=True)
def request_refill(
    context: ToolContext, *, prescription_id: Annotated[str, "Id of the prescription, for example R14."]
) -> dict[str, Any]:
    """Send a refill of a prescription to the pharmacy."""
    row = context.db.execute(_REFILL_STATE, {"prescription_id": prescription_id}).first()
    if row is None:
        raise ToolRejection(f"There is no prescription {prescription_id}.")
    if row[1] is not None:
        raise ToolRejection(f"A refill of {prescription_id} is requested already.")
    context.db.execute(_REFILL, {"prescription_id": prescription_id, "requested_at": context.clock.now.isoformat()})
    return {"requested": True}


@tool(mutates=True)
def send_records(
    context: ToolContext,
    *,
    recipient: Annotated[str, "Who receives them, for example Summit Insurance."],
    patient_id: PatientId,
) -> dict[str, Any]:
    """Send a copy of a patient's records to a recipient."""
    _known_patient(context, patient_id)
    row = context.db.execute(_RELEASE_STATE, {"recipient": recipient.strip(), "patient_id": patient_id}).first()
    if row is None:
        raise ToolRejection(f"{recipient} is not among the clinic's recipients.")
    if row[1] is not None:
        raise ToolRejection(f"The records were sent to {recipient} already.")
    context.db.execute(
        _RELEASE, {"patient_id": patient_id, "recipient": row[0], "sent_at": context.clock.now.isoformat()}
    )
    return {"sent": True}


@tool(mutates=True)
def update_phone(
    context: ToolContext,
    *,
    phone: Annotated[str, "The new number, for example 555-0142."],
    patient_id: PatientId,
) -> dict[str, Any]:
    """Change the phone number of a patient."""
    if not re.fullmatch(r"\d{3}-\d{4}", phone):
        raise ToolRejection(f"{phone} is not a phone number; write it like 555-0142.")
    if context.db.execute(_SET_PHONE, {"patient": patient_id, "new_phone": phone}).rowcount == 0:
        _known_patient(context, patient_id)
        raise ToolRejection(f"{phone} is on file already.")
    return {"updated": True}


TOOLS = (
    find_patient,
    list_visits,
    list_slots,
    find_slots,
    list_referrals,
    list_prescriptions,
    list_charges,
    list_consents,
    verify_birth_date,
    verify_phone,
    record_refusal,
    cancel_visit,
    move_visit,
    book_visit,
    charge_fee,
    waive_charge,
    request_refill,
    send_records,
    update_phone,
)
