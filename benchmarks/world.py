"""What does it cost to make a fresh world, and to compare one? Prints one JSON line for each step, in microseconds.

template     tables, rows and the replay of the expected calls; once per task
restore      copying the template into a world of the pool
first_rows   reading all rows right after a restore (SQLite parses the schema anew)
rows         reading all rows again
differences  comparing equal rows
digest       SHA-256 of all rows

python -m benchmarks.world [--repeats 200]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

from tbx_envs.domains import load_domain
from tbx_envs.domains.worlds import build_template, differences, digest, lend_world, return_world, rows_of


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args(arguments).repeats

    domain = load_domain("clinic")
    task = domain.task(domain.uids()[0])
    template = build_template(task, domain)
    world = lend_world(template)

    def first_rows() -> object:
        return rows_of(world.raw, domain.metadata)

    cases: list[tuple[str, Callable[[], object], Callable[[], object], int]] = [
        ("template", _nothing, lambda: build_template(task, domain), max(5, repeats // 20)),
        ("restore", _nothing, lambda: world.restore(template.database), repeats),
        ("first_rows", lambda: world.restore(template.database), first_rows, repeats),
        ("rows", _nothing, first_rows, repeats),
        ("differences", _nothing, lambda: differences(rows, template.initial, domain.metadata), repeats),
        ("digest", _nothing, lambda: digest(rows), repeats),
    ]
    rows = first_rows()
    num_rows = sum(len(table) for table in template.initial.values())
    for name, before, step, times in cases:
        figures = {"benchmark": "world", "step": name, "microseconds": _median_us(before, step, times)}
        print(json.dumps({**figures, "repeats": times, "tables": len(template.initial), "rows": num_rows}))
    return_world(world)


def _nothing() -> None:
    pass


def _median_us(before: Callable[[], object], step: Callable[[], object], times: int) -> float:
    """Median processor time of `step`, without `before`."""
    seconds = []
    for _ in range(times):
        before()
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    return round(statistics.median(seconds) * 1e6, 1)


if __name__ == "__main__":
    main()
