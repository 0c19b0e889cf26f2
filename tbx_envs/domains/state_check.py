"""The state check: the world at the end holds exactly the rows of the expected world.

Nothing of it is reachable by the agent: the expected rows live outside the database that its tools see.
"""

from __future__ import annotations

from tbx_envs.domains.worlds import World, WorldTemplate, differences, rows_of
from tbx_envs.episode import CheckReport


def check_state(world: World, template: WorldTemplate) -> CheckReport:
    """Compare all rows, columns marked unstable left out; every difference is named.

    The world is rolled back first: what no successful call committed does not count.
    """
    world.db.rollback()
    metadata = template.domain.metadata
    lines = differences(rows_of(world.raw, metadata), template.expected, metadata)
    return CheckReport(passed=not lines, check="state", differences=lines)
