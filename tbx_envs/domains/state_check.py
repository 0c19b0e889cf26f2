"""The state check: the final world has exactly the rows of the expected world.

The agent cannot reach any of it: the expected rows are kept outside the database that its tools use.
"""

from __future__ import annotations

from tbx_envs.domains.worlds import World, WorldTemplate, differences, rows_of
from tbx_envs.episode import CheckReport


def check_state(world: World, template: WorldTemplate) -> CheckReport:
    """Compare all rows, except columns marked unstable; the report lists every difference.

    The world is rolled back first: only what a successful call committed counts.
    """
    world.db.rollback()
    metadata = template.domain.metadata
    lines = differences(rows_of(world.raw, metadata), template.expected, metadata)
    return CheckReport(passed=not lines, check="state", differences=lines)
