"""The clock of a server's process, tried in a module of its own, in a fresh interpreter for each case."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

from tbx_envs.thinkingbox.servers import fork_server, server_clock

SERVER_MODULE = """
import datetime, time
import datetime as dt
from datetime import date, datetime, timedelta, timezone
from time import time as seconds, strftime
import pydantic

now = datetime.now

def by_default(clock=time.time, *, day=date.today):
    return clock(), day()

class Shop:
    moment = datetime.utcnow
    def read(self, clock=seconds):
        return clock()

class Stamp(datetime):
    pass

class Fixed(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2000, 1, 1)

class Rental(pydantic.BaseModel):
    at: datetime = pydantic.Field(default_factory=datetime.utcnow)
    day: date = pydantic.Field(default_factory=date.today)
    seconds: float = pydantic.Field(default_factory=time.time)
"""

PROGRAM = """
import asyncio, calendar, datetime, logging, os, pickle, sys, threading, time, uuid
sys.path[:0] = {path!r}
import shop_server as shop
from tbx_envs.thinkingbox.servers import server_clock
before = time.time(), time.monotonic(), time.perf_counter(), time.get_clock_info("monotonic")
MOMENT = 1759307400_123456_000  # 2025-10-01 08:30:00.123456 UTC, 04:30 in New York
server_clock.set_clock(MOMENT, {runs})
UTC = datetime.timezone.utc
moment = datetime.datetime(2025, 10, 1, 8, 30, 0, 123456, tzinfo=UTC)
naive = datetime.datetime(2025, 10, 1, 4, 30, 0, 123456)
{body}
print("passed")
"""

CASES = {
    "is the answer to every way of asking for the time": """
assert shop.datetime.now(UTC) == shop.dt.datetime.now(tz=UTC) == shop.now(UTC) == moment
assert shop.dt.datetime.now() == shop.dt.datetime.today() == shop.now() == naive
assert shop.dt.datetime.utcnow() == moment.replace(tzinfo=None)
berlin = datetime.timezone(datetime.timedelta(hours=2))
assert str(shop.now(berlin)) == "2025-10-01 10:30:00.123456+02:00"
assert shop.date.today() == shop.dt.date.today() == naive.date()
assert shop.time.time() == shop.seconds() == MOMENT / 1e9 and shop.time.time_ns() == MOMENT
assert calendar.timegm(shop.time.gmtime()) == MOMENT // 10**9
assert time.strftime("%F %T", shop.time.localtime()) == "2025-10-01 04:30:00"
assert shop.time.strftime("%F %T") == shop.strftime("%F %T") == "2025-10-01 04:30:00"
assert shop.time.clock_gettime(shop.time.CLOCK_REALTIME) == MOMENT / 1e9
assert shop.time.clock_gettime_ns(shop.time.CLOCK_REALTIME) == MOMENT
""",
    "leaves what is given, and the local time zone, alone": """
assert time.gmtime(0)[:6] == (1970, 1, 1, 0, 0, 0) and time.localtime(0)[:4] == (1969, 12, 31, 19)
assert time.strftime("%Y", time.gmtime(0)) == "1970" and time.ctime(0) == "Wed Dec 31 19:00:00 1969"
assert datetime.datetime.fromtimestamp(0, UTC).year == 1970 and os.environ["TZ"] == "America/New_York"
""",
    "leaves the clocks that measure alone": """
asked = time.monotonic(), time.perf_counter(), time.clock_gettime(time.CLOCK_MONOTONIC), time.monotonic_ns() / 1e9
assert before[1] < asked[0] < asked[2] < asked[3] < before[1] + 60 and before[2] < asked[1] < before[2] + 60
assert time.get_clock_info("monotonic") == before[3]
""",
    "hangs nothing that waits": """
async def waited():
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.sleep(0.02)
    try:
        await asyncio.wait_for(asyncio.sleep(60), 0.02)
    except TimeoutError:
        return loop.time() - began
assert 0.04 <= asyncio.run(waited()) < 30
began = time.monotonic()
time.sleep(0.02)
assert not threading.Event().wait(0.02) and time.monotonic() - began >= 0.04
""",
    "is seen through references that were made before, inside compiled objects too": """
assert shop.by_default() == (MOMENT / 1e9, naive.date()) and shop.Shop().read() == MOMENT / 1e9
assert shop.Shop.moment() == moment.replace(tzinfo=None)
rental = shop.Rental()
assert (rental.at, rental.day, rental.seconds) == (moment.replace(tzinfo=None), naive.date(), MOMENT / 1e9)
""",
    "is seen by libraries and the standard library as well": """
assert logging.makeLogRecord({{}}).created == MOMENT / 1e9
since_1582 = datetime.timedelta(microseconds=uuid.uuid1().time // 10)
assert datetime.datetime(1582, 10, 15, tzinfo=UTC) + since_1582 == moment
""",
    "is seen by threads and by forks": """
seen = []
thread = threading.Thread(target=lambda: seen.append(datetime.datetime.now(UTC)))
thread.start()
thread.join()
assert seen == [moment]
child = os.fork()
if child == 0:
    os._exit(0 if datetime.datetime.now(UTC) == moment else 1)
assert os.waitpid(child, 0)[1] == 0
""",
    "makes ordinary datetimes, and subclasses keep their own ways": """
assert type(shop.dt.datetime.now()) is datetime.datetime is shop.datetime and type(shop.date.today()) is datetime.date
assert shop.Stamp.now(UTC) == moment and type(shop.Stamp.utcnow()) is shop.Stamp
assert shop.Fixed.now() == shop.Fixed(2000, 1, 1)
assert pickle.loads(pickle.dumps(shop.now(UTC))) == moment
""",
}


def run(tmp_path, body, *, runs=False):
    (tmp_path / "shop_server.py").write_text(SERVER_MODULE)
    program = PROGRAM.format(
        path=[str(tmp_path), *sys.path], runs=runs, body=body.replace("{{", "{").replace("}}", "}")
    )
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    env = {"TZ": "America/New_York", "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=env)
    assert (done.stdout, done.stderr) == ("passed\n", ""), done.stderr


@pytest.mark.parametrize("claim", CASES)
def test_a_set_clock(tmp_path, claim):
    run(tmp_path, CASES[claim])


def test_a_running_clock_goes_on_at_the_pace_of_the_real_one(tmp_path):
    run(
        tmp_path,
        """
began = time.monotonic_ns()
first = shop.time.time_ns()
time.sleep(0.02)
second, passed = shop.time.time_ns(), time.monotonic_ns() - began
assert MOMENT <= first and 15_000_000 <= second - first <= passed + 5_000_000
assert moment < shop.now(UTC) < moment + datetime.timedelta(minutes=1)
""",
        runs=True,
    )


@pytest.mark.parametrize(
    ("installed", "why"), [("3.3.0", None), ("10.0", None), ("3.2.0", "it has time-machine 3.2.0")]
)
def test_a_time_machine_that_changes_more_than_the_moment_is_not_used(monkeypatch, installed, why):
    monkeypatch.setattr(importlib.metadata, "version", {"time-machine": installed}.__getitem__)
    assert server_clock.reason_not_settable() == why


def test_which_modules_are_the_servers_own(monkeypatch):
    monkeypatch.setattr(
        fork_server, "_locate", lambda config: ("tbx_envs.thinkingbox.servers.launcher", "", "launcher.py")
    )
    monkeypatch.setattr(fork_server, "_main_block", lambda source, file: None)
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    program = fork_server.Program({})  # as if a module of tbx were the server's
    assert program.is_own("tbx_envs") and program.is_own("tbx_envs.thinkingbox") and not program.is_own("tbx_envs_too")
    local = type(sys)("local")
    local.__file__ = "/srv/local.py"
    monkeypatch.setitem(sys.modules, "local", local)
    assert program.is_own("local")
    assert json.__file__ and not program.is_own("json") and not program.is_own("json.decoder")
    assert pytest.__file__ and not program.is_own("pytest")
    assert not program.is_own("sys") and not program.is_own("never_imported")
