"""Which variables of the environment other people's programs get, and how the others are kept from them.

A dataset's servers and tests run as programs of this user. They get an allow-list, since no list of words tells a key
from another variable (`MYMODEL=sk-...`, `DATABASE_URL`): what a Python program needs to start, the variables of tbx
that its servers read, what the dataset declares itself (`env` in servers.yaml), and what `TBX_PASS_VARIABLES` names.

What is held back also leaves this process's environment block, which Linux shows to every process of the user as
`/proc/<pid>/environ`. `os.environ` keeps its values: they move to other memory, and our own processes get them.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path

from tbx_envs.errors import ConfigError

PASS_VARIABLES = "TBX_PASS_VARIABLES"

# Whole names, never prefixes: `TBX_TOKEN` and `PYTHONANYWHERE_API_TOKEN` are secrets, and LC_* travels
# through ssh with anything in it.
ALLOWED = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "FASTMCP_LOG_LEVEL"),
        *("LANG", "LANGUAGE", "LC_ALL", "LC_ADDRESS", "LC_COLLATE", "LC_CTYPE", "LC_IDENTIFICATION", "LC_MEASUREMENT"),
        *("LC_MESSAGES", "LC_MONETARY", "LC_NAME", "LC_NUMERIC", "LC_PAPER", "LC_TELEPHONE", "LC_TIME"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONCOERCECLOCALE"),
        *("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUSERBASE", "PYTHONNOUSERSITE"),
        *("PYTHONSAFEPATH", "PYTHONWARNINGS", "PYTHONFAULTHANDLER", "PYTHONDEVMODE", "PYTHONMALLOC", "PYTHONOPTIMIZE"),
        *("PYTHONTRACEMALLOC", "PYTHONINTMAXSTRDIGITS"),
        *("THINKINGBOX_DATA", "TBX_DATASETS", "TBX_SERVERS_PYTHON", "TBX_CACHE", PASS_VARIABLES),
    )
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SHOWN = 8  # names in a hint


def handed_down(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that a dataset's servers and tests get.

    Args:
        environ: environment to choose from; None is that of this process.

    Raises:
        ConfigError: `TBX_PASS_VARIABLES` is not a list of names.
    """
    environ = os.environ if environ is None else environ
    allowed = ALLOWED | _further(environ)
    return {name: value for name, value in environ.items() if name in allowed}


def _further(environ: Mapping[str, str]) -> set[str]:
    """The names in `TBX_PASS_VARIABLES`, separated by commas or blanks."""
    names = environ.get(PASS_VARIABLES, "").replace(",", " ").split()
    if wrong := [place for place, name in enumerate(names, 1) if not _NAME.fullmatch(name)]:
        raise ConfigError(
            f"{PASS_VARIABLES}: entry {wrong[0]} of {len(names)} is not the name of a variable (it is not repeated "
            f"here, since it may be a value). Write names, separated by commas."
        )
    return set(names)


def missing_hint(words: str, environ: Mapping[str, str] | None = None) -> str:
    """What to do where a program that ended may have wanted a variable that was held back; "" if nothing says so.

    Args:
        words: last words of the program; only names in them are repeated, and no value.
        environ: environment of which it got a part; None is that of this process.
    """
    environ = os.environ if environ is None else environ
    held_back = environ.keys() - handed_down(environ).keys()
    wanted = sorted(held_back & set(_NAME.findall(words)))[:_SHOWN]
    if not wanted:
        return ""
    return (
        f"\nIt names {', '.join(wanted)}, which {'is' if len(wanted) == 1 else 'are'} set here but not handed to a "
        f"dataset's programs. If it needs that, name it in {PASS_VARIABLES} (docs/security.md)."
    )


def hide_environment() -> None:
    """Take what is not handed down out of this process's environment block, where Linux shows it to other processes.

    Called before a program of others starts. Memory that was the block at the start of this process is overwritten;
    `os.environ` and later children of this process are as before. Does nothing on other systems.
    """
    try:
        start, end = _block()
    except (OSError, ValueError, IndexError):
        return
    kept = {os.fsencode(name) for name in handed_down()}
    place = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and value.strip(b"\0") and name not in kept and _NAME.fullmatch(os.fsdecode(name)):
            if name in os.environb:
                os.putenv(name, os.environb[name])  # a copy elsewhere, before the block's is overwritten
            ctypes.memset(place + len(name) + 1, 0, len(value))
        place += len(entry) + 1


def _block() -> tuple[int, int]:
    """Where the initial environment begins and ends: fields 50 and 51 of /proc/self/stat (man 5 proc)."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    fields = stat.rpartition(")")[2].split()  # from the third on; the second may hold blanks
    start, end = int(fields[50 - 3]), int(fields[51 - 3])
    if not 0 < start < end:
        raise ValueError("the kernel does not say")
    return start, end
