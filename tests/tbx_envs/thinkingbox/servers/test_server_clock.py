"""The clock of a server's process, tried in a module of its own, in a fresh interpreter for each case."""

import json
import subprocess
import sys

import pytest

from tbx_envs.thinkingbox.servers import server_clock

SERVER_MODULE = """
import datetime, time
import datetime as dt
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from time import time as seconds, strftime
import helper_beside

now = datetime.now
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

def by_default(clock=time.time, *, day=date.today):
    return clock(), day()

class Shop:
    moment = datetime.utcnow
    clock = time.time
    def read(self, clock=seconds):
        return clock()
    @staticmethod
    def today(clock=date.today):
        return clock()

class Stamp(datetime):
    pass

class Fixed(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2000, 1, 1)

class Day(date):
    pass

def later():
    import datetime, time as t
    from datetime import datetime as d, date
    from time import time_ns
    return str(d.now(timezone.utc)), str(date.today()), t.time(), time_ns(), str(datetime.date.today())
"""

PROGRAM = """
import calendar, copy, datetime as real, json, pickle, sys, time as real_time, typing
sys.path[:0] = {path!r}
from tbx_envs.thinkingbox.servers import server_clock
try:
    import pydantic
except ImportError:
    pydantic = None
import shop_server as shop
places = server_clock.find_places(server_clock.owner_test("shop_server", "shop_server"))
MOMENT = 1759307400_123456_000  # 2025-10-01 08:30:00.123456 UTC
server_clock.set_clock(MOMENT, {runs}, places)
UTC = real.timezone.utc
moment = real.datetime(2025, 10, 1, 8, 30, 0, 123456, tzinfo=UTC)
{body}
print("passed")
"""

CASES = {
    "every way to ask for the time answers the moment": """
assert shop.datetime.now(UTC) == shop.dt.datetime.now(tz=UTC) == moment
assert shop.now(UTC) == moment
naive = moment.astimezone().replace(tzinfo=None)
assert shop.dt.datetime.now() == shop.dt.datetime.today() == shop.now() == naive
assert shop.dt.datetime.utcnow() == moment.replace(tzinfo=None)
berlin = real.timezone(real.timedelta(hours=2))
assert str(shop.now(berlin)) == "2025-10-01 10:30:00.123456+02:00"
assert shop.date.today() == shop.dt.date.today() == naive.date()
assert shop.time.time() == shop.seconds() == MOMENT / 1e9 and shop.time.time_ns() == MOMENT
assert calendar.timegm(shop.time.gmtime()) == calendar.timegm(shop.time.gmtime(None)) == MOMENT // 10**9
assert shop.time.localtime() == real_time.localtime(MOMENT / 1e9)
assert shop.time.strftime("%Y-%m-%d") == shop.strftime("%F") == str(naive.date())
assert shop.time.ctime() == shop.time.asctime() == real_time.ctime(MOMENT / 1e9)
assert shop.time.clock_gettime(shop.time.CLOCK_REALTIME) == MOMENT / 1e9
assert shop.time.clock_gettime_ns(shop.time.CLOCK_REALTIME) == MOMENT
""",
    "what is given is used": """
assert shop.time.gmtime(0)[:3] == (1970, 1, 1) and shop.time.localtime(0) == real_time.localtime(0)
assert shop.time.ctime(0) == real_time.ctime(0)
assert shop.time.strftime("%Y", real_time.gmtime(0)) == "1970"
assert shop.time.asctime(real_time.gmtime(0)) == real_time.asctime(real_time.gmtime(0))
""",
    "clocks that measure are never touched": """
before = real_time.monotonic()
assert shop.time.monotonic is real_time.monotonic and shop.time.perf_counter is real_time.perf_counter
assert shop.time.sleep is real_time.sleep and shop.time.struct_time is real_time.struct_time
assert before <= shop.time.clock_gettime(shop.time.CLOCK_MONOTONIC)
assert before * 1e9 <= shop.time.clock_gettime_ns(shop.time.CLOCK_MONOTONIC)
""",
    "libraries and the standard library see the real time": """
assert real.datetime.now(UTC).year > 2025 and abs(real_time.time() - MOMENT / 1e9) > 1e6
import logging
assert logging.makeLogRecord({{}}).created > MOMENT / 1e9 + 1e6
""",
    "other modules of the same place see the moment": """
assert shop.helper_beside.ask() == str(moment)
""",
    "imports inside functions, and modules imported later, see the moment": """
today = str(moment.astimezone().date())
assert shop.later() == (str(moment), today, MOMENT / 1e9, MOMENT, today)
import imported_later
assert imported_later.read() == moment
""",
    "default arguments and class bodies are replaced": """
assert shop.by_default() == (MOMENT / 1e9, shop.date.today())
assert shop.Shop().read() == MOMENT / 1e9 and shop.Shop.today() == shop.date.today()
assert shop.Shop.moment() == shop.Shop().moment() == moment.replace(tzinfo=None)
assert shop.Shop.clock() == shop.Shop().clock() == MOMENT / 1e9
""",
    "subclasses inherit the moment unless they have one of their own": """
assert shop.Stamp.now(UTC) == moment and type(shop.Stamp.now()) is shop.Stamp
assert type(shop.Stamp.utcnow()) is shop.Stamp and type(shop.Day.today()) is shop.Day
assert shop.Fixed.now() == shop.Fixed(2000, 1, 1)
class Late(shop.dt.datetime):
    pass
assert Late.now(UTC) == moment and type(Late.now(UTC)) is Late and isinstance(Late(2025, 1, 1), real.datetime)
assert isinstance(Late(2025, 1, 1), Late) and not isinstance(moment, Late) and issubclass(Late, shop.dt.datetime)
assert Late != shop.dt.datetime and pickle.loads(pickle.dumps(shop.Stamp(2025, 1, 1))) == shop.Stamp(2025, 1, 1)
""",
    "objects are ordinary datetimes": """
D, d = shop.dt.datetime, shop.dt.date
made = [D(2025, 1, 2), D.now(), D.now(UTC), D.fromisoformat("2025-01-02T03:04:05+00:00"), D.strptime("2025", "%Y"),
        D.fromtimestamp(0, UTC), D.combine(d(2025, 1, 2), real.time(3)), D.fromordinal(1), D.min, shop.EPOCH,
        D.now() + shop.timedelta(days=1), D(2025, 1, 2).replace(year=2024), D.fromisocalendar(2025, 1, 1)]
assert all(type(value) is real.datetime for value in made)
days = [d(2025, 1, 2), d.today(), d.fromisoformat("2025-01-02"), d.fromtimestamp(0), d.max, d.min + shop.timedelta(1)]
assert all(type(value) is real.date for value in days)
assert D.now(UTC) - shop.EPOCH == moment - shop.EPOCH and D(2025, 1, 1) < D.now() <= D.now()
for value in (*made, *days):
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == copy.copy(value) == value
""",
    "questions about types are answered as before": """
D, d = shop.dt.datetime, shop.dt.date
assert isinstance(moment, D) and isinstance(moment, d) and isinstance(D.now(), real.datetime)
assert isinstance(real.date.today(), d) and not isinstance(real.date.today(), D) and not isinstance("x", D)
assert issubclass(D, real.datetime) and issubclass(real.datetime, D) and issubclass(D, d) and issubclass(shop.Stamp, D)
assert type(D.now()) == D and D == real.datetime and d == real.date and D != d and hash(D) == hash(real.datetime)
assert {{real.datetime: 1}}[D] == 1 and D in (real.datetime,) and type(moment) in {{D}}
assert repr(D) == repr(real.datetime) and D.__name__ == "datetime" and typing.Optional[D] and (D | None)
assert pickle.loads(pickle.dumps(D)) is real.datetime and pickle.loads(pickle.dumps(d)) is real.date
assert copy.deepcopy({{"kind": D}})["kind"] is D
match moment:
    case D(year=2025):
        pass
    case _:
        raise AssertionError
assert shop.dt.timedelta is real.timedelta and shop.dt.timezone is real.timezone and dir(shop.dt) == dir(real)
""",
    "pydantic models that were built before go on, and new ones can be built": """
if pydantic is not None:
    assert shop.helper_beside.Model(at=shop.now(), on="2025-01-02").on == real.date(2025, 1, 2)
    class New(pydantic.BaseModel):
        at: shop.dt.datetime
        on: shop.dt.date | None = None
    made = New(at="2025-01-02T00:00:00Z", on=shop.date.today())
    assert New.model_validate_json(made.model_dump_json()) == made and type(made.at) is real.datetime
    assert New.model_json_schema()["properties"]["at"]["format"] == "date-time"
""",
}

HELPER = """
from datetime import datetime, date, timezone
def ask():
    return str(datetime.now(timezone.utc))
try:
    import pydantic
    class Model(pydantic.BaseModel):
        at: datetime
        on: date
except ImportError:
    pass
"""


def run(tmp_path, body, *, runs=False):
    (tmp_path / "shop_server.py").write_text(SERVER_MODULE)
    (tmp_path / "helper_beside.py").write_text(HELPER)
    (tmp_path / "imported_later.py").write_text(
        "from datetime import datetime, timezone\ndef read():\n    return datetime.now(timezone.utc)\n"
    )
    program = PROGRAM.format(
        path=[str(tmp_path), *sys.path], runs=runs, body=body.replace("{{", "{").replace("}}", "}")
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("passed\n", ""), done.stderr


@pytest.mark.parametrize("claim", CASES)
def test_a_set_clock(tmp_path, claim):
    run(tmp_path, CASES[claim])


def test_a_running_clock_goes_on_at_the_pace_of_the_real_one(tmp_path):
    run(
        tmp_path,
        """
began = real_time.monotonic_ns()
first = shop.time.time_ns()
real_time.sleep(0.02)
second, passed = shop.time.time_ns(), real_time.monotonic_ns() - began
assert MOMENT <= first and 20_000_000 <= second - first <= passed
assert moment < shop.now(UTC) < moment + real.timedelta(minutes=1)
""",
        runs=True,
    )


def test_which_modules_are_the_servers_own():
    is_own = server_clock.owner_test("pkg.sub.server", "pkg.sub.server")
    assert is_own({"__name__": "pkg.sub.server"}) and is_own({"__name__": "pkg"}) and is_own({"__name__": "pkg.other"})
    assert is_own({"__name__": "local", "__file__": "/srv/local.py"})
    assert not is_own({"__name__": "json", "__file__": json.__file__})
    assert not is_own({"__name__": "pytest", "__file__": pytest.__file__})
    assert not is_own({"__name__": "pkgs", "__file__": None}) and not is_own({}) and not is_own({"__name__": "builtin"})
    assert not is_own({"__name__": "clock", "__file__": server_clock.__file__})
    script = server_clock.owner_test("__mp_main__", "")
    assert script({"__name__": "__mp_main__"}) and not script({"__name__": "requests.api", "__file__": json.__file__})
