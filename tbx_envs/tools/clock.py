"""The time inside a world. No wall clock is read for anything that an agent sees."""

from __future__ import annotations

import dataclasses
import datetime


@dataclasses.dataclass(frozen=True, slots=True)
class WorldClock:
    """A clock that stands still at the moment when its world was created, so that answers never depend on today.

    Attributes:
        now: moment without a time zone, in local time of the business.
    """

    now: datetime.datetime

    @property
    def today(self) -> datetime.date:
        return self.now.date()

    def hours_until(self, moment: datetime.datetime) -> int:
        """Whole hours from now to `moment`, rounded towards the past."""
        return int((moment - self.now).total_seconds() // 3600)
