"""Worlds of the clinic: small, complete, and a function of a random generator alone.

`Scene` has the rows of a world while it is built. `furnish` adds what every world has (patients, clinicians, open
slots, other people's records); a family then adds what its task is about and calls `Scene.rows`.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from typing import Any, TypeVar

from tbx_envs.domains.clinic import names
from tbx_envs.domains.clinic.tables import METADATA
from tbx_envs.tools.clock import WorldClock

CLOCK = WorldClock(datetime.datetime(2031, 3, 3, 16, 0))  # a Monday

# Hours from now at which a visit can start: 08:00 to 15:00 of the next four days.
TOMORROW = tuple(range(16, 24))
LATER = tuple(24 * day - 8 + hour for day in (2, 3, 4) for hour in range(8))

FEE_CENTS = {"late_cancellation": 2500, "late_change": 1500, "no_show": 4000, "paperwork": 1000}

Row = dict[str, Any]
T = TypeVar("T")


def chance(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


def draw(rng: random.Random, weights: dict[T, float]) -> T:
    """A key with probability proportional to its weight."""
    ticket = rng.random() * sum(weights.values())
    for key, weight in weights.items():
        ticket -= weight
        if ticket < 0:
            return key
    return key


class Scene:
    """The rows of a world while it is built. Ids are drawn at random, so they carry no meaning.

    Attributes:
        rng: source of everything random.
        tables: table name -> rows, in an order that fits the references between tables.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tables: dict[str, list[Row]] = {table: [] for table in METADATA.tables}
        self._numbers: dict[str, list[int]] = {}
        self._times: dict[str, list[int]] = {}

    def rows(self) -> dict[str, tuple[Row, ...]]:
        """The world; the rows of a table are in the order of their ids, so that the order carries no information."""
        return {
            table: tuple(sorted(rows, key=lambda row: tuple(row.values())[:2])) for table, rows in self.tables.items()
        }

    def add(self, table: str, **columns: Any) -> Row:
        self.tables[table].append(columns)
        return columns

    def new_id(self, letter: str) -> str:
        """An unused id: the letter and two digits."""
        if letter not in self._numbers:
            self._numbers[letter] = self.rng.sample(range(10, 100), 60)
        return f"{letter}{self._numbers[letter].pop()}"

    def patient(self, name: str) -> Row:
        rng = self.rng
        birth_date = f"{rng.randrange(1940, 2010)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"
        return self.add(
            "patients", patient_id=self.new_id("P"), name=name, birth_date=birth_date, phone=phone_number(rng)
        )

    def clinician(self, name: str, specialty: str) -> Row:
        clinician_id = self.new_id("D")
        self._times[clinician_id] = [*TOMORROW, *LATER]
        return self.add("clinicians", clinician_id=clinician_id, name=f"Dr. {name}", specialty=specialty)

    def starts_at(self, clinician: Row, hours: Sequence[int]) -> str:
        """One of these times at which the clinician is free, as ISO text."""
        free = self._times[clinician["clinician_id"]]
        hour = self.rng.choice([hour for hour in free if hour in hours])
        free.remove(hour)
        return (CLOCK.now + datetime.timedelta(hours=hour)).isoformat()

    def visit(self, patient: Row, clinician: Row, hours: Sequence[int] = LATER, moves: int = 0) -> Row:
        return self.add(
            "visits",
            visit_id=self.new_id("V"),
            patient_id=patient["patient_id"],
            clinician_id=clinician["clinician_id"],
            starts_at=self.starts_at(clinician, hours),
            moves=moves,
            status="booked",
        )

    def slot(self, clinician: Row) -> Row:
        return self.add(
            "slots",
            slot_id=self.new_id("S"),
            clinician_id=clinician["clinician_id"],
            starts_at=self.starts_at(clinician, LATER),
            status="open",
        )

    def referral(self, patient: Row, specialty: str, *, valid: bool) -> Row:
        days = self.rng.randrange(0, 60) if valid else -self.rng.randrange(1, 60)
        return self.add(
            "referrals",
            referral_id=self.new_id("F"),
            patient_id=patient["patient_id"],
            specialty=specialty,
            valid_until=day(days),
        )

    def prescription(self, patient: Row, drug: str, refills_left: int, *, review_due: bool = False) -> Row:
        return self.add(
            "prescriptions",
            prescription_id=self.new_id("R"),
            patient_id=patient["patient_id"],
            drug=drug,
            refills_left=refills_left,
            review_due=int(review_due),
        )

    def charge(self, patient: Row, fee: str, *, approved: bool) -> Row:
        """An open charge; `approved` is True when the manager has approved waiving it."""
        charge = self.add(
            "charges",
            charge_id=self.new_id("C"),
            patient_id=patient["patient_id"],
            fee=fee,
            amount_cents=FEE_CENTS[fee],
            status="open",
        )
        if approved:
            self.add("approvals", charge_id=charge["charge_id"], approved_on=day(-self.rng.randrange(1, 5)))
        return charge

    def consent(self, patient: Row, recipient: str, *, signed: bool) -> Row:
        return self.add(
            "consents",
            consent_id=self.new_id("N"),
            patient_id=patient["patient_id"],
            recipient=recipient,
            signed=int(signed),
        )


def day(days: int) -> str:
    """The date in that many days, as ISO text."""
    return (CLOCK.today + datetime.timedelta(days=days)).isoformat()


def phone_number(rng: random.Random) -> str:
    return f"555-{rng.randrange(10_000):04d}"


def furnish(scene: Scene) -> Row:
    """Add what every world has; returns the patient of the task, who has no records yet."""
    rng = scene.rng
    for fee, cents in FEE_CENTS.items():
        scene.add("fees", fee=fee, amount_cents=cents)
    for recipient in names.RECIPIENTS:
        scene.add("recipients", recipient=recipient)
    specialties = [names.SPECIALTIES[0], *rng.sample(names.SPECIALTIES[1:], 4)]
    for name, specialty in zip(rng.sample(names.CLINICIANS, 5), specialties, strict=True):
        clinician = scene.clinician(name, specialty)
        for _ in range(rng.randrange(2, 4)):
            scene.slot(clinician)
    first, last = rng.sample(names.FIRST_NAMES, 11), rng.sample(names.LAST_NAMES, 11)
    caller, *others = (scene.patient(f"{a} {b}") for a, b in zip(first, last, strict=True))
    for other in others:
        _records_of_someone(scene, other)
    return caller


def _records_of_someone(scene: Scene, patient: Row) -> None:
    """Add records of a patient who does not call, so that a call with a wrong id always finds some."""
    rng = scene.rng
    scene.visit(patient, rng.choice(scene.tables["clinicians"]), moves=rng.randrange(3))
    scene.prescription(patient, rng.choice(names.DRUGS), rng.randrange(1, 4), review_due=chance(rng, 0.3))
    if chance(rng, 0.5):
        scene.charge(patient, rng.choice(("no_show", "paperwork")), approved=chance(rng, 0.5))
    if chance(rng, 0.5):
        scene.referral(patient, rng.choice(names.SPECIALTIES[1:]), valid=chance(rng, 0.5))
    if chance(rng, 0.5):
        scene.consent(patient, rng.choice(names.RECIPIENTS), signed=chance(rng, 0.7))
