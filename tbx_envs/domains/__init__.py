"""Built-in domains: what one consists of, and finding one by name.

A domain is a folder with the same files in each (`docs/tasks.md`): `tables`, `generate`, `tools`, `server`,
`rules.md`, `families`, `scripted`, `tasks.lock`. Its `__init__` exposes `DOMAIN`. Domains never import each other.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from sqlalchemy import MetaData

from tbx_envs.errors import DomainError, did_you_mean
from tbx_envs.messages import Message, Turn
from tbx_envs.task import ExpectedCall, Task
from tbx_envs.tools.clock import WorldClock
from tbx_envs.tools.tool import Tool

NAMES = ("clinic",)


@dataclasses.dataclass(frozen=True, slots=True)
class Topic:
    """Something a simulated user can be asked for.

    Attributes:
        pattern: regular expression (case ignored) that finds the topic in the agent's words.
        phrasings: wordings of an answer, each with `{value}`.
    """

    pattern: str
    phrasings: tuple[str, ...]


# A scripted agent: yields turns, is sent the messages that answer each (results of its calls, in order, or the
# user's words), and returns after its last turn.
AgentTurns = Generator[Turn, Sequence[Message], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A kind of assignment with parameters.

    Attributes:
        name: `[a-z_]+`, unique within the domain.
        title: one sentence for people.
        num_train, num_heldout: how many frozen tasks of each split; `train` has the numbers from 0,
            `heldout` those right after. A family with num_train 0 is never trained on.
        build: (number, split) -> the task. Any number gives a task; only the frozen ones are registered.
        near_misses: task -> label -> expected calls with one fault each (a wrong argument, one call missing, one
            call too many); every one must fail the check.
        scripted: (task, rng, error_rate) -> an agent that follows the rules, except that at each decision it breaks
            the stated one with probability `error_rate * task.labels["pressure"]`.
    """

    name: str
    title: str
    num_train: int
    num_heldout: int
    build: Callable[[int, str], Task]
    near_misses: Callable[[Task], Mapping[str, tuple[ExpectedCall, ...]]]
    scripted: Callable[[Task, random.Random, float], AgentTurns]


@dataclasses.dataclass(frozen=True, slots=True)
class Domain:
    """Everything that is known of a domain.

    Attributes:
        name: also the folder's.
        version: of its tasks; must be raised with any change of text or grading (`tasks.lock` notices).
        metadata: its tables. A column with `info={"unstable": True}` is left out of checks.
        tools: in canonical order.
        rules: the rules the agent must follow, as it reads them.
        clock: the time inside every world of the domain.
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

    def uids(self, split: str | None = None) -> tuple[str, ...]:
        """Uids of the frozen tasks, families in order, of one split or of both; builds no task."""
        uids = []
        for family in self.families.values():
            for number in range(family.num_train + family.num_heldout):
                of = "train" if number < family.num_train else "heldout"
                if split in (None, of):
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
    heldout = family.num_train <= number < family.num_train + family.num_heldout
    return family.build(number, "heldout" if heldout else "train")


_registered: dict[str, Domain] = {}


def register_domain(domain: Domain) -> None:
    """Make a domain that is not built in known in this process, for example a shipped fake in a test.

    Raises:
        DomainError: another domain has that name already.
    """
    if domain.name in NAMES or _registered.get(domain.name, domain) is not domain:
        raise DomainError(f"a domain '{domain.name}' is there already; give this one another name.")
    _registered[domain.name] = domain


def load_domain(name: str) -> Domain:
    """The domain of that name; a built-in one's module is imported on first use.

    Raises:
        DomainError: unknown name.
    """
    if name in _registered:
        return _registered[name]
    if name not in NAMES:
        known = [*NAMES, *_registered]
        raise DomainError(f"unknown domain '{name}'.{did_you_mean(name, known)} Known: {', '.join(known)}.")
    module: Any = importlib.import_module(f"tbx_envs.domains.{name}")
    return module.DOMAIN
