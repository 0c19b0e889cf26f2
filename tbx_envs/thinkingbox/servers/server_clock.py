"""The clock of a server process: set to a moment, standing still or going on from there.

Standard library only, any Python from 3.10: `fork_server` loads it inside the servers' own interpreter, where tbx is
not installed.

How: in the server's own modules (never in the standard library nor in other libraries), what stands for
`datetime.datetime`, `datetime.date`, the modules `datetime` and `time`, and the functions of `time` that read the wall
clock is replaced. `find_places` looks for them once, before any session; `set_clock` replaces them in a session's
process. Imports that happen later in those modules get the replacements as well. `time.monotonic`,
`time.perf_counter` and with them asyncio are never touched.

The replaced classes make no objects of their own: `datetime(...)`, `datetime.now()`, `fromisoformat` and the others
give ordinary datetimes, so comparing, arithmetic, pickling, and models that were built before go on as they did.

What is out of reach: a reference held inside a compiled object, such as a pydantic field with
`default_factory=datetime.now`; and clocks read by libraries.
"""

from __future__ import annotations

import builtins
import copyreg
import datetime as real_datetime
import os
import pkgutil
import sys
import sysconfig
import time as real_time
import types
from collections.abc import Callable
from typing import Any

_DateTime = real_datetime.datetime
_Date = real_datetime.date
_UTC = real_datetime.timezone.utc  # noqa: UP017  # Python 3.10 has no datetime.UTC
_NS = 1_000_000_000

Owns = Callable[[dict[str, Any]], bool]


class Clock:
    """The moment that a process shows.

    Attributes:
        moment_ns: nanoseconds since 1970 (UTC).
        began_ns: monotonic time when it was set; None: it stands still.
    """

    def __init__(self, moment_ns: int, runs: bool) -> None:
        self.moment_ns = moment_ns
        self.began_ns: int | None = real_time.monotonic_ns() if runs else None

    def now_ns(self) -> int:
        if self.began_ns is None:
            return self.moment_ns
        return self.moment_ns + real_time.monotonic_ns() - self.began_ns


_clock = Clock(0, False)  # replaced by `set_clock` before anything reads it


# --- datetime -----------------------------------------------------------------------------------------------


class _Stand(type):
    """Type of the two classes that stand for `date` and `datetime`: equal to them in every question about types."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls._real) if _is_stand(cls) else type.__instancecheck__(cls, value)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls._real) if _is_stand(cls) else type.__subclasscheck__(cls, other)

    def __eq__(cls, other: object) -> bool:
        return other is cls or (_is_stand(cls) and other is cls._real)

    def __hash__(cls) -> int:
        return hash(cls._real) if _is_stand(cls) else type.__hash__(cls)


def _is_stand(cls: type) -> bool:
    return cls.__dict__.get("_real") is not None


def _at(cls: Any, ns: int, tz: Any) -> Any:
    """The moment as an instance of `cls` (or the class it stands for), to the microsecond."""
    seconds, rest = divmod(ns, _NS)
    return cls.fromtimestamp(seconds, tz).replace(microsecond=rest // 1000)


class _DateTimeStand(_DateTime, metaclass=_Stand):
    _real = _DateTime

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _DateTime.__new__(_DateTime if _is_stand(cls) else cls, *args, **kwargs)

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return _at(cls, _clock.now_ns(), tz)

    @classmethod
    def today(cls) -> Any:
        return _at(cls, _clock.now_ns(), None)

    @classmethod
    def utcnow(cls) -> Any:
        return _at(cls, _clock.now_ns(), _UTC).replace(tzinfo=None)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return handler(_DateTime)


class _DateStand(_Date, metaclass=_Stand):
    _real = _Date

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _Date.__new__(_Date if _is_stand(cls) else cls, *args, **kwargs)

    @classmethod
    def today(cls) -> Any:
        return cls.fromtimestamp(_clock.now_ns() // _NS)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return handler(_Date)


def _pickle_stand(cls: type) -> tuple[Any, ...]:
    """Pickled by the name of what it stands for."""
    if _is_stand(cls):
        return pkgutil.resolve_name, ("datetime:" + cls.__name__,)
    return pkgutil.resolve_name, (cls.__module__ + ":" + cls.__qualname__,)


for _stand, _real in ((_DateTimeStand, _DateTime), (_DateStand, _Date)):
    _stand.__name__ = _stand.__qualname__ = _real.__name__
    _stand.__module__ = "datetime"
    _stand.__doc__ = _real.__doc__
del _stand, _real

# --- time ---------------------------------------------------------------------------------------------------


def _seconds(secs: float | None = None) -> float:
    return _clock.now_ns() / _NS if secs is None else secs


def _time() -> float:
    return _clock.now_ns() / _NS


def _time_ns() -> int:
    return _clock.now_ns()


def _localtime(secs: float | None = None) -> Any:
    return real_time.localtime(_seconds(secs))


def _gmtime(secs: float | None = None) -> Any:
    return real_time.gmtime(_seconds(secs))


def _ctime(secs: float | None = None) -> str:
    return real_time.ctime(_seconds(secs))


def _asctime(t: Any = None) -> str:
    return real_time.asctime(_localtime() if t is None else t)


def _strftime(format: str, t: Any = None) -> str:
    return real_time.strftime(format, _localtime() if t is None else t)


def _clock_gettime(clk_id: int) -> float:
    return _time() if clk_id == real_time.CLOCK_REALTIME else real_time.clock_gettime(clk_id)


def _clock_gettime_ns(clk_id: int) -> int:
    return _time_ns() if clk_id == real_time.CLOCK_REALTIME else real_time.clock_gettime_ns(clk_id)


_TIME_FUNCTIONS: dict[str, Any] = {
    "time": _time,
    "time_ns": _time_ns,
    "localtime": _localtime,
    "gmtime": _gmtime,
    "ctime": _ctime,
    "asctime": _asctime,
    "strftime": _strftime,
}
if hasattr(real_time, "clock_gettime"):  # not on every system
    _TIME_FUNCTIONS.update(clock_gettime=_clock_gettime, clock_gettime_ns=_clock_gettime_ns)


class _ModuleStand(types.ModuleType):
    """A module with some names replaced; all others are the module's own, at the time they are asked for."""

    def __init__(self, module: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(replaced)
        self.__dict__["_module"] = module
        for name in ("__file__", "__spec__", "__loader__", "__package__", "__all__"):
            if hasattr(module, name):
                self.__dict__[name] = getattr(module, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_module"])


_DATETIME_MODULE = _ModuleStand(real_datetime, {"datetime": _DateTimeStand, "date": _DateStand})
_TIME_MODULE = _ModuleStand(real_time, _TIME_FUNCTIONS)
_MODULES = {"datetime": _DATETIME_MODULE, "time": _TIME_MODULE}

# id of what is replaced -> its replacement. All of them live as long as the interpreter, so ids are safe keys.
_REPLACEMENTS: dict[int, Any] = {
    id(_DateTime): _DateTimeStand,
    id(_Date): _DateStand,
    id(real_datetime): _DATETIME_MODULE,
    id(real_time): _TIME_MODULE,
    **{id(getattr(real_time, name)): function for name, function in _TIME_FUNCTIONS.items()},
}


def _replacement(value: Any) -> Any:
    """What `value` becomes under a set clock, or None."""
    found = _REPLACEMENTS.get(id(value))
    if found is None and isinstance(value, types.BuiltinMethodType):  # `now = datetime.now`
        owner = value.__self__
        if owner is _DateTime and value.__name__ in ("now", "today", "utcnow"):
            return getattr(_DateTimeStand, value.__name__)
        if owner is _Date and value.__name__ == "today":
            return _DateStand.today
    return found


# --- where ----------------------------------------------------------------------------------------------------


class Places:
    """Where the clock is read in a server's own modules: found before the sessions, replaced in each.

    Attributes:
        owns: dictionary of a module -> whether it is the server's own.
        names: (dictionary of a module, name, replacement).
        attributes: (class, name, replacement), in class bodies.
        defaults: (function, its defaults, its keyword defaults) with replacements in them.
        subclasses: classes that derive from datetime or date and inherit the methods that read the clock.
    """

    def __init__(self, owns: Owns) -> None:
        self.owns = owns
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self.attributes: list[tuple[type, str, Any]] = []
        self.defaults: list[tuple[types.FunctionType, tuple[Any, ...] | None, dict[str, Any]]] = []
        self.subclasses: list[type] = []


def owner_test(main_module: str, package: str) -> Owns:
    """A test whether a module (by its dictionary) is the server's own: of its top-level package, or no library's."""
    top = package.partition(".")[0]
    paths = sysconfig.get_paths()
    libraries = {os.path.realpath(paths[key]) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    here = os.path.dirname(os.path.realpath(__file__))
    known: dict[str, bool] = {}

    def is_own(names: dict[str, Any]) -> bool:
        name = names.get("__name__")
        if not isinstance(name, str):
            return False
        if name not in known:
            known[name] = name == main_module or (bool(top) and name.partition(".")[0] == top) or is_local(names)
        return known[name]

    def is_local(names: dict[str, Any]) -> bool:
        file = names.get("__file__")
        if not isinstance(file, str):
            return False
        path = os.path.realpath(file)
        inside = any(path.startswith(folder) for folder in libraries)
        installed = f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
        return not inside and not installed and os.path.dirname(path) != here

    return is_own


def find_places(owns: Owns) -> Places:
    """All places in the modules imported so far."""
    places = Places(owns)
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and isinstance(module, types.ModuleType) and owns(names):
            for name, value in list(names.items()):
                if (found := _replacement(value)) is not None:
                    places.names.append((names, name, found))
                elif isinstance(value, (type, types.FunctionType)):
                    _look_into(places, value, names["__name__"], seen)
    for base in (_DateTime, _Date):
        _find_subclasses(places, base)
    return places


def _look_into(places: Places, value: Any, module_name: str, seen: set[int]) -> None:
    """Default arguments of a function, and a class's body, if they are the module's own."""
    if getattr(value, "__module__", None) != module_name or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        _note_defaults(places, value)
        return
    for name, member in list(vars(value).items()):
        function = getattr(member, "__func__", member)  # of a class or static method
        if (found := _replacement(member)) is not None:
            places.attributes.append((value, name, found))
        elif isinstance(function, (type, types.FunctionType)):
            _look_into(places, function, module_name, seen)


def _note_defaults(places: Places, function: types.FunctionType) -> None:
    defaults = function.__defaults__ or ()
    keyword = function.__kwdefaults__ or {}
    if any(_replacement(value) is not None for value in (*defaults, *keyword.values())):
        replaced = tuple(_replacement(value) or value for value in defaults)
        places.defaults.append(
            (function, replaced or None, {name: _replacement(value) or value for name, value in keyword.items()})
        )


def _find_subclasses(places: Places, base: type) -> None:
    for cls in type.__subclasses__(base):
        module = sys.modules.get(cls.__module__)
        if isinstance(cls, _Stand) or cls is _DateTime:
            continue
        if module is not None and places.owns(vars(module)) and cls not in places.subclasses:
            places.subclasses.append(cls)
        _find_subclasses(places, cls)


# --- setting ------------------------------------------------------------------------------------------------


def set_clock(moment_ns: int, runs: bool, places: Places) -> None:
    """Let this process's own modules see `moment_ns` (nanoseconds since 1970) from now on."""
    global _clock
    _clock = Clock(moment_ns, runs)
    for names, name, replacement in places.names:
        names[name] = replacement
    for cls, name, replacement in places.attributes:
        if isinstance(replacement, types.FunctionType):  # the function it replaces does not bind to instances
            replacement = staticmethod(replacement)
        setattr(cls, name, replacement)
    for function, defaults, keyword_defaults in places.defaults:
        function.__defaults__, function.__kwdefaults__ = defaults, keyword_defaults or None
    for cls in places.subclasses:
        stand = _DateTimeStand if issubclass(cls, _DateTime) else _DateStand
        for name in ("now", "today", "utcnow"):
            inherits = getattr(cls, name, None) is not None and not any(name in vars(base) for base in _above(cls))
            if inherits and name in vars(stand):
                setattr(cls, name, vars(stand)[name])
    copyreg.pickle(_Stand, _pickle_stand)
    _watch_imports(places.owns)


def _above(cls: type) -> list[type]:
    """The class and its bases below datetime and date."""
    return [base for base in cls.__mro__ if base not in (_DateTime, _Date, object)]


def _watch_imports(owns: Owns) -> None:
    """Let imports of `datetime` and `time` that the server's own code does from now on give the replacements."""
    original = builtins.__import__

    def import_watched(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        module = original(name, globals, locals, fromlist, level)
        if name in _MODULES and level == 0 and globals is not None and owns(globals):
            return _MODULES[name]
        return module

    builtins.__import__ = import_watched
