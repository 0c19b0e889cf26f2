"""The clinic's tables. Ids are a letter and a number (P12, V31); money is integer cents; times are ISO text.

A second identical verification, refusal, refill or release has no row of its own, so these tables need no running
number, and the order of independent actions never shows in the rows. Visits and charges that the desk creates get the
next number of their table; no task needs two.
"""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Integer, MetaData, Table, Text

METADATA = MetaData()


def _id(name: str) -> Column:
    return Column(name, Text, primary_key=True)


def _of(target: str, *, primary_key: bool = False) -> Column:
    """A reference named like the column that it refers to."""
    return Column(target.split(".")[1], Text, ForeignKey(target), nullable=False, primary_key=primary_key)


PATIENTS = Table(
    "patients",
    METADATA,
    _id("patient_id"),
    Column("name", Text, nullable=False),
    Column("birth_date", Text, nullable=False),
    Column("phone", Text, nullable=False),
)

CLINICIANS = Table(
    "clinicians",
    METADATA,
    _id("clinician_id"),
    Column("name", Text, nullable=False),
    Column("specialty", Text, nullable=False),
)

VISITS = Table(
    "visits",
    METADATA,
    _id("visit_id"),
    _of("patients.patient_id"),
    _of("clinicians.clinician_id"),
    Column("starts_at", Text, nullable=False),
    Column("moves", Integer, nullable=False),  # number of times it was moved
    Column("status", Text, nullable=False),  # booked, cancelled
)

SLOTS = Table(
    "slots",
    METADATA,
    _id("slot_id"),
    _of("clinicians.clinician_id"),
    Column("starts_at", Text, nullable=False),
    Column("status", Text, nullable=False),  # open, taken
)

REFERRALS = Table(
    "referrals",
    METADATA,
    _id("referral_id"),
    _of("patients.patient_id"),
    Column("specialty", Text, nullable=False),
    Column("valid_until", Text, nullable=False),  # last day
)

PRESCRIPTIONS = Table(
    "prescriptions",
    METADATA,
    _id("prescription_id"),
    _of("patients.patient_id"),
    Column("drug", Text, nullable=False),
    Column("refills_left", Integer, nullable=False),
    Column("review_due", Integer, nullable=False),  # 1: the prescriber must see the patient first
)

REFILLS = Table(
    "refills",
    METADATA,
    _of("prescriptions.prescription_id", primary_key=True),
    Column("requested_at", Text, nullable=False),
)

FEES = Table(
    "fees",
    METADATA,
    _id("fee"),
    Column("amount_cents", Integer, nullable=False),
)

CHARGES = Table(
    "charges",
    METADATA,
    _id("charge_id"),
    _of("patients.patient_id"),
    _of("fees.fee"),
    Column("amount_cents", Integer, nullable=False),
    Column("status", Text, nullable=False),  # open, waived
)

# The practice manager's approvals of waivers, which the desk can read but not write.
APPROVALS = Table(
    "approvals",
    METADATA,
    _of("charges.charge_id", primary_key=True),
    Column("approved_on", Text, nullable=False),
)

RECIPIENTS = Table(
    "recipients",
    METADATA,
    _id("recipient"),
)

# Consent forms for the release of records; `signed` 0 is a form that was handed out but not returned.
CONSENTS = Table(
    "consents",
    METADATA,
    _id("consent_id"),
    _of("patients.patient_id"),
    _of("recipients.recipient"),
    Column("signed", Integer, nullable=False),
)

RELEASES = Table(
    "releases",
    METADATA,
    _of("patients.patient_id", primary_key=True),
    _of("recipients.recipient", primary_key=True),
    Column("sent_at", Text, nullable=False),
)

VERIFICATIONS = Table(
    "verifications",
    METADATA,
    _of("patients.patient_id", primary_key=True),
    Column("fact", Text, primary_key=True),  # birth_date, phone
    Column("verified_at", Text, nullable=False),
)

REFUSALS = Table(
    "refusals",
    METADATA,
    _of("patients.patient_id", primary_key=True),
    Column("reason", Text, primary_key=True),
    Column("recorded_at", Text, nullable=False),
)
