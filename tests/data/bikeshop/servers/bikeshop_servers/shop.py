"""The shop: tables of plain dictionaries, and what can be done with them. Knows no protocol.

What a shop says no to is raised as `Refused`.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
from typing import Any

DAY_PRICES = {"city": 12.0, "cargo": 25.0, "kids": 8.0}
UNSTABLE = {"rentals": ("created_at",)}  # fields that tell two equal days apart

ROWS: dict[str, list[dict[str, Any]]] = {
    "customers": [
        {"id": "C1", "name": "Ada Bell", "email": "ada@example.org", "phone": "555-0101", "verified": True},
        {"id": "C2", "name": "Ben Roth", "email": "ben@example.org", "phone": "555-0102", "verified": False},
        {"id": "C3", "name": "Cleo Fey", "email": "cleo@example.org", "phone": "555-0103", "verified": True},
    ],
    "bikes": [
        {"id": "B1", "kind": "city", "station": "north", "status": "free"},
        {"id": "B2", "kind": "city", "station": "south", "status": "out"},
        {"id": "B3", "kind": "cargo", "station": "north", "status": "free"},
        {"id": "B4", "kind": "kids", "station": "south", "status": "repair"},
    ],
    "rentals": [
        {
            "id": "R1",
            "customer_id": "C1",
            "bike_id": "B2",
            "days": 3,
            "status": "open",
            "refunded": 0.0,
            "created_at": "2026-03-01T09:00:00+00:00",
        },
    ],
    "notes": [],
}


class Refused(Exception):
    """The shop says no."""


class Shop:
    """One shop; its tables are id -> row."""

    def __init__(self) -> None:
        self.tables = {name: {row["id"]: dict(row) for row in rows} for name, rows in ROWS.items()}

    def patch(self, rows: dict[str, list[dict[str, Any]]]) -> None:
        """Change or add rows, by id."""
        for table, changed in rows.items():
            if table not in self.tables:
                raise ValueError(f"no table {table!r}; there are {', '.join(self.tables)}")
            for row in changed:
                self.tables[table][row["id"]] = {**self.tables[table].get(row["id"], {}), **row}

    def find_customer(self, email: str) -> dict[str, Any]:
        for row in self.tables["customers"].values():
            if row["email"] == email.strip().lower():
                return dict(row)
        raise Refused(f"no customer with email {email!r}")

    def list_bikes(self, kind: str | None = None, station: str | None = None) -> list[dict[str, Any]]:
        rows = self.tables["bikes"].values()
        return [dict(row) for row in rows if kind in (None, row["kind"]) and station in (None, row["station"])]

    def get_rental(self, rental_id: str) -> dict[str, Any]:
        return dict(self._row("rentals", rental_id))

    def start_rental(self, customer_id: str, bike_id: str, days: int) -> dict[str, Any]:
        if not self._row("customers", customer_id)["verified"]:
            raise Refused(f"customer {customer_id} is not verified")
        bike = self._row("bikes", bike_id)
        if bike["status"] != "free":
            raise Refused(f"bike {bike_id} is not free: {bike['status']}")
        if not 1 <= days <= 14:
            raise Refused("a rental takes 1 to 14 days")
        bike["status"] = "out"
        rental = {
            "id": f"R{len(self.tables['rentals']) + 1}",
            "customer_id": customer_id,
            "bike_id": bike_id,
            "days": days,
            "status": "open",
            "refunded": 0.0,
            "created_at": datetime.datetime.now(datetime.UTC).isoformat(),
        }
        self.tables["rentals"][rental["id"]] = rental
        return dict(rental)

    def end_rental(self, rental_id: str, damage: bool = False) -> dict[str, Any]:
        rental = self._row("rentals", rental_id)
        if rental["status"] != "open":
            raise Refused(f"rental {rental_id} is {rental['status']}")
        rental["status"] = "closed"
        self._row("bikes", rental["bike_id"])["status"] = "repair" if damage else "free"
        return dict(rental)

    def refund(self, rental_id: str, amount: float) -> dict[str, Any]:
        rental, amount = self._row("rentals", rental_id), float(amount)  # expected calls may have "25.00"
        price = DAY_PRICES[self._row("bikes", rental["bike_id"])["kind"]] * rental["days"]
        if not 0 < amount <= price - rental["refunded"]:
            raise Refused(f"at most {price - rental['refunded']:.2f} can be refunded for {rental_id}")
        rental["refunded"] = round(rental["refunded"] + amount, 2)
        return dict(rental)

    def update_customer(self, customer_id: str, phone: str) -> dict[str, Any]:
        customer = self._row("customers", customer_id)
        customer["phone"] = phone
        return dict(customer)

    def add_note(self, customer_id: str, text: str) -> dict[str, Any]:
        self._row("customers", customer_id)
        note = {"id": f"N{len(self.tables['notes']) + 1}", "customer_id": customer_id, "text": text}
        self.tables["notes"][note["id"]] = note
        return dict(note)

    def stable_rows(self) -> dict[str, list[dict[str, Any]]]:
        """All rows in the order of their ids, without what differs between equal runs."""
        return {
            table: [
                {key: value for key, value in rows[key_of].items() if key not in UNSTABLE.get(table, ())}
                for key_of in sorted(rows)
            ]
            for table, rows in sorted(self.tables.items())
        }

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.stable_rows(), sort_keys=True).encode()).hexdigest()

    def differences(self, other: Shop) -> list[str]:
        """Readable lines, one for each row that is not as in `other`."""
        lines = []
        mine, theirs = self.stable_rows(), other.stable_rows()
        for table in mine:
            left = {row["id"]: row for row in mine[table]}
            right = {row["id"]: row for row in theirs[table]}
            lines += [
                f"{table} {key}: {left.get(key)} instead of {right.get(key)}"
                for key in sorted(left.keys() | right.keys())
                if left.get(key) != right.get(key)
            ]
        return lines

    def replay(self, interactions: list[dict[str, Any]]) -> None:
        """Make the expected calls. One that fails is left out, as the benchmark's servers do."""
        for interaction in interactions:
            method = getattr(self, interaction["tool"], None)
            if method is None:  # a tool that changes nothing and is not the shop's
                continue
            try:
                method(**copy.deepcopy(interaction["parameters"]))
            except Refused:
                continue

    def _row(self, table: str, key: str) -> dict[str, Any]:
        try:
            return self.tables[table][key]
        except KeyError:
            raise Refused(f"no {table[:-1]} {key!r}") from None
