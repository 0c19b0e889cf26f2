"""The clock of a server process: set to a moment, standing still or going on from there.

`fork_server` loads this file by its path inside the servers' own interpreter, where tbx is not installed. There
`time-machine` has to be installed, for runs with a clock only: it changes what the interpreter itself answers, so that
whatever asks in Python sees the moment, libraries and references inside compiled objects (a pydantic field with
`default_factory=datetime.utcnow`) as well. `time.monotonic`, `time.perf_counter`, `time.sleep` and with them asyncio
stay real. The local time zone stays.

What is out of reach: clocks that are read in C (SQLite's `CURRENT_TIMESTAMP`, numpy's "now", `time.ctime()` and
`time.asctime()` without an argument), and processes that a server starts. A wait that counts with `time.time` does not
end while the clock stands still.
"""

from __future__ import annotations

# Version 2 stops `time.monotonic` as well: with a clock that stands still, asyncio would wait for ever. Before 3.3,
# subclasses of datetime are made as plain ones.
REQUIREMENT = "time-machine>=3.3"


def reason_not_settable() -> str | None:
    """Why this interpreter cannot set its clock; None if it can."""
    import importlib.metadata

    try:
        version = importlib.metadata.version("time-machine")
    except importlib.metadata.PackageNotFoundError:
        return "it has no time-machine"
    major, minor = version.split(".")[:2]
    return f"it has time-machine {version}" if (int(major), int(minor)) < (3, 3) else None


def set_clock(moment_ns: int, runs: bool) -> None:
    """Let this process see `moment_ns` (nanoseconds since 1970, to the microsecond) from now on."""
    import datetime

    import time_machine

    seconds, rest = divmod(moment_ns, 1_000_000_000)
    # Whole seconds and the rest apart: a float is not exact, and a datetime would move the local time zone as well.
    time_machine.travel(seconds, tick=runs).start().shift(datetime.timedelta(microseconds=rest // 1000))
