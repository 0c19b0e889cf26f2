"""Domains: their parts as records, and finding one by name.

Every built-in domain is a folder with the same files (`docs/tasks.md`): `tables`, `generate`, `tools`, `server`,
`rules.md`, `families`, `scripted`, `tasks.lock`. Its `__init__` exposes `DOMAIN`. Domains never import each other.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pickle
import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from sqlalchemy import MetaData

from tbx_envs.errors import DomainError, did_you_mean
from tbx_envs.messages import Message, Turn
from tbx_envs.task import ExpectedCall, Split, Task
from tbx_envs.tools.clock import WorldClock
from tbx_envs.tools.tool import Tool

NAMES = ("clinic",)


@dataclasses.dataclass(frozen=True, slots=True)
class Topic:
    """A fact that a simulated user can be asked for.

    Attributes:
        pattern: regular expression (case ignored) that finds the topic in the agent's words.
        phrasings: wordings of the answer, each with `{value}`.
    """

    pattern: str
    phrasings: tuple[str, ...]


# An agent as a generator: it yields turns, is sent the messages that answer each (results of its calls, in order, or
# the user's words), and returns after its last turn.
AgentTurns = Generator[Turn, Sequence[Message], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A kind of assignment with parameters.

    Attributes:
        name: `[a-z_]+`, unique within the domain.
        title: sentence for people.
        num_train: number of frozen tasks of the `train` split, numbered from 0. A family with 0 is held out.
        num_heldout: number of frozen tasks of the `heldout` split, numbered right after those.
        build: (number, split) -> task. Any number gives a task; only the frozen ones are registered.
        near_misses: task -> label -> expected calls with one mistake (a wrong argument, one call missing, one call too
            many); all of them must fail the check.
        scripted: (task, rng, error_rate) -> agent that follows the rules, except that at each decision it breaks the
            rule with probability `error_rate * task.labels["pressure"]`. The pressure says how pressing the caller is.
    """

    name: str
    title: str
    num_train: int
    num_heldout: int
    build: Callable[[int, Split], Task]
    near_misses: Callable[[Task], Mapping[str, tuple[ExpectedCall, ...]]]
    scripted: Callable[[Task, random.Random, float], AgentTurns]

    def split_of(self, number: int) -> Split:
        """The split of the task with that number; numbers beyond the frozen ones are in `train`."""
        return "heldout" if self.num_train <= number < self.num_train + self.num_heldout else "train"


@dataclasses.dataclass(frozen=True, slots=True)
class Domain:
    """A domain: tables, tools, rules, and the families of its tasks.

    Attributes:
        name: name of the domain and of its folder.
        version: version of its tasks, which must be raised with any change of text or grading (`tasks.lock` detects
            one).
        metadata: tables of its database. A column with `info={"unstable": True}` is left out of checks.
        tools: tools in canonical order.
        rules: rules the agent must follow, as it reads them.
        clock: time inside every world of the domain.
        topics: topic -> how a user is asked for it, and answers.
        consents: topic -> pattern that finds a request to confirm it in the agent's words.
        families: name -> family.
        lock: uid -> content hash, from `tasks.lock`.
    """

    name: str
    version: int
    metadata: MetaData
    tools: tuple[Tool, ...]
    rules: str
    clock: WorldClock
    topics: Mapping[str, Topic]
    consents: Mapping[str, str]
    families: Mapping[str, Family]
    lock: Mapping[str, str]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its name: tables and tools are code, which another process imports or registers itself."""
        if self.name not in (*NAMES, *_registered) or load_domain(self.name) is not self:
            raise pickle.PicklingError(
                f"domain '{self.name}' is pickled by its name, and no such domain is registered. Call "
                f"tbx_envs.domains.register_domain first, here and where it is read."
            )
        return load_domain, (self.name,)

    def uids(self, split: str | None = None) -> tuple[str, ...]:
        """Uids of the frozen tasks, families in order, of one split or (None) of both; builds no task."""
        uids = []
        for family in self.families.values():
            for number in range(family.num_train + family.num_heldout):
                if split in (None, family.split_of(number)):
                    uids.append(f"{self.name}/{family.name}/{number:03d}")
        return tuple(uids)

    def task(self, uid: str) -> Task:
        """The task of that uid, cached. Numbers beyond the frozen ones give fresh tasks of the `train` split.

        Raises:
            DomainError: no such family, or the uid is not `<domain>/<family>/<number>`.
        """
        return _task(self.name, uid)


@functools.lru_cache(maxsize=4096)
def _task(domain_name: str, uid: str) -> Task:
    domain = load_domain(domain_name)
    match = re.fullmatch(rf"{re.escape(domain.name)}/([a-z_]+)/(\d{{3,}})", uid)
    if not match or match[1] not in domain.families:
        near = did_you_mean(uid, domain.uids())
        raise DomainError(
            f"unknown task '{uid}' in domain '{domain.name}'.{near} Families: {', '.join(domain.families)}; "
            f"a uid is {domain.name}/<family>/<three digits or more>."
        )
    family, number = domain.families[match[1]], int(match[2])
    return family.build(number, family.split_of(number))


_registered: dict[str, Domain] = {}


def register_domain(domain: Domain) -> None:
    """Make a domain that is not built in known to this process.

    Raises:
        DomainError: another domain has that name already.
    """
    if domain.name in NAMES or _registered.get(domain.name, domain) is not domain:
        raise DomainError(f"a domain '{domain.name}' exists already; give this one another name.")
    _registered[domain.name] = domain


def load_domain(name: str) -> Domain:
    """The domain of that name; the module of a built-in one is imported on first use.

    Raises:
        DomainError: no domain has that name.
    """
    if name in _registered:
        return _registered[name]
    if name not in NAMES:
        known = [*NAMES, *_registered]
        raise DomainError(f"unknown domain '{name}'.{did_you_mean(name, known)} Known: {', '.join(known)}.")
    module: Any = importlib.import_module(f"tbx_envs.domains.{name}")
    return module.DOMAIN
