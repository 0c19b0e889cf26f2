"""The contract of a domain, checked task by task, and its lock file.

    check_domain("clinic")                                       raises DomainError with all problems
    python -m tbx_envs.testing.domain_contract check clinic      the same, printed
    python -m tbx_envs.testing.domain_contract lock clinic       rewrites tasks.lock

For every task: the expected calls pass the check through the real tools, alone and with further reads; doing nothing
does not pass, nor does leaving out a mutating call, nor any near miss of the family; the scripted agent without errors
reaches reward 1 in conversation with the scripted user. For the domain: the same number gives the same task, texts
contain neither today's date nor a library's version, a mutating tool changes a row and a reading one does not, and
nothing has changed since the version was set.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import importlib.metadata
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

from tbx_envs.domains import NAMES, Domain, Family, load_domain
from tbx_envs.domains.lock import FILE_NAME, lock_text, parse_lock
from tbx_envs.domains.runtime import DomainSource
from tbx_envs.domains.state_check import check_state
from tbx_envs.domains.worlds import (
    WorldTemplate,
    digest,
    domain_tools,
    lend_world,
    return_world,
    rows_of,
    template_for,
)
from tbx_envs.doors import words_of
from tbx_envs.env import ToolEnv
from tbx_envs.episode import FinishReason
from tbx_envs.errors import DomainError, EnvironmentFault, ToolFault
from tbx_envs.messages import DONE_MARK, ToolCall, Transcript, Turn
from tbx_envs.rendering import transcript_text
from tbx_envs.seeding import rng
from tbx_envs.task import ExpectedCall, Task, content_hash
from tbx_envs.tools.calls import answer_call
from tbx_envs.tools.session import Answer
from tbx_envs.tools.tool import Tool

MAX_IDLE_SHARE = 0.02
_MAX_SHOWN = 40
_LIBRARIES = ("SQLAlchemy", "mcp", "pydantic", "jsonschema", "gymnasium")


def check_domain(domain: str | Domain, *, uids: Sequence[str] | None = None) -> None:
    """Check a domain's contract and report all problems at once.

    Args:
        domain: name of a domain, or the record itself.
        uids: tasks to check; the domain as a whole is then not checked. None checks all.

    Raises:
        DomainError: there are problems; the message lists them.
    """
    domain = load_domain(domain) if isinstance(domain, str) else domain
    problems = find_problems(domain, uids=uids)
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:_MAX_SHOWN])
        more = f"\n  ... and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise DomainError(f"domain '{domain.name}' breaks its contract, {len(problems)} problems:\n{shown}{more}")


def find_problems(domain: Domain, *, uids: Sequence[str] | None = None) -> list[str]:
    """The problems that `check_domain` would list, in the order found."""
    problems = [*_problems_of_tools(domain.tools), *_problems_of_text("the rules", domain.rules)]
    tasks: list[Task] = []
    for uid in domain.uids() if uids is None else uids:
        try:
            tasks.append(_build(domain, uid))
        except DomainError as error:
            problems.append(str(error))
    reads = _one_read_of_each_tool(tasks, domain_tools(domain))
    hashes: dict[str, str] = {}
    for task in tasks:
        of_record = list(_problems_of_record(task, domain))
        problems += of_record
        if of_record:
            continue  # agents and near misses may depend on the wrong field
        try:
            problems += _problems_of_play(template_for(task, domain), reads)
            hashes[task.uid] = lock_hash(task, domain)
        except DomainError as error:  # an expected call is rejected or fails: no other check of the task makes sense
            problems.append(str(error))
    if uids is None:
        problems += [*_problems_of_all(tasks, domain), *_problems_of_lock(hashes, domain)]
    return problems


def _family_and_number(domain: Domain, uid: str) -> tuple[Family, int]:
    """The parts of a uid."""
    match = re.fullmatch(rf"{re.escape(domain.name)}/([a-z_]+)/(\d+)", uid)
    if match is None or match[1] not in domain.families:
        raise DomainError(f"task {uid}: not <domain>/<family>/<number> of '{domain.name}'; correct the uid.")
    return domain.families[match[1]], int(match[2])


def _build(domain: Domain, uid: str) -> Task:
    """A new build of the task by the record's own families, not from the cache of registered domains."""
    family, number = _family_and_number(domain, uid)
    return family.build(number, family.split_of(number))


# --- texts and records --------------------------------------------------------------------------------------


def _problems_of_tools(tools: Iterable[Tool]) -> Iterator[str]:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            yield f"tool {tool.name}: there are two of that name; rename one."
        seen.add(tool.name)
        if not tool.description.strip():
            yield f"tool {tool.name}: it has no description; the model reads it, so write one."
        yield from _problems_of_text(f"the description of tool {tool.name}", tool.description)
        for name, schema in tool.input_schema.get("properties", {}).items():
            description = schema.get("description", "")
            if not description.strip():
                yield f"tool {tool.name}: argument {name} has no description; write one."
            yield from _problems_of_text(f"argument {name} of tool {tool.name}", description)


def _problems_of_text(where: str, text: str) -> Iterator[str]:
    """A text that a model reads must be the same tomorrow, and after an upgrade."""
    for pattern, name in _unstable_texts().items():
        if re.search(pattern, text):
            yield f"{where}: it names {name}; take times from the world's clock and leave versions out."


@functools.cache
def _unstable_texts() -> dict[str, str]:
    """What no text may contain: pattern -> description."""
    today = datetime.datetime.now(datetime.UTC).date()
    patterns: dict[str, str] = {}
    for days in (-1, 0, 1):  # texts may use the local time of any time zone
        day = today + datetime.timedelta(days=days)
        for written in (day.isoformat(), day.strftime("%d %B %Y"), day.strftime("%B %d, %Y")):
            patterns[re.escape(written)] = f"today ({written})"
    for library in _LIBRARIES:
        version = importlib.metadata.version(library)
        patterns[rf"(?<![\d.]){re.escape(version)}(?!\.?\d)"] = f"the version {version} of {library}"
    return patterns


def _problems_of_record(task: Task, domain: Domain) -> Iterator[str]:
    """Whether the task's fields fit its uid, and the same number gives the same task."""
    family, number = _family_and_number(domain, task.uid)
    split = family.split_of(number)
    wanted = {
        "uid": f"{domain.name}/{family.name}/{number:03d}",
        "domain": domain.name,
        "family": family.name,
        "version": domain.version,
        "split": split,
    }
    for field, value in wanted.items():
        if getattr(task, field) != value:
            yield f"task {task.uid}: {field} is {getattr(task, field)!r}, expected {value!r}; fix its builder."
    if not isinstance(task.labels.get("pressure"), int | float):
        yield f"task {task.uid}: labels have no number 'pressure'; scripted agents need it."
    if task != family.build(number, split):
        yield f"task {task.uid}: building it twice gives two tasks; draw everything from seeding.rng."


# --- episodes -----------------------------------------------------------------------------------------------


def _problems_of_play(template: WorldTemplate, reads: Sequence[ExpectedCall]) -> list[str]:
    """All checks that need the task's world."""
    return [
        *_problems_of_expected_calls(template, reads),
        *_problems_of_idling(template),
        *_problems_of_near_misses(template),
        *_problems_of_conversation(template.task, template.domain),
    ]


def _run(
    template: WorldTemplate, calls: Iterable[ExpectedCall], *, watch: bool = False
) -> tuple[bool, list[Answer], list[bool]]:
    """Make the calls on a fresh world.

    Args:
        template: template of the task.
        calls: calls to make.
        watch: True records for each call whether it changed a row.

    Returns:
        Whether the check passes; the answers; with `watch`, for each call whether it changed a row.

    Raises:
        ToolFault: a tool raised an undocumented exception.
    """
    domain = template.domain
    tools = domain_tools(domain)
    world = lend_world(template)
    rows = template.initial
    answers: list[Answer] = []
    changed: list[bool] = []
    for call in calls:
        answers.append(answer_call(tools, world.db, domain.clock, call.tool, call.arguments))
        if watch:
            before, rows = rows, rows_of(world.raw, domain.metadata)
            changed.append(rows != before)
    passed = check_state(world, template).passed
    return_world(world)
    return passed, answers, changed


def _problems_of_expected_calls(template: WorldTemplate, reads: Sequence[ExpectedCall]) -> Iterator[str]:
    task = template.task
    tools = domain_tools(template.domain)
    passed, answers, changed = _run(template, task.expected_calls, watch=True)
    if not passed:
        yield f"task {task.uid}: its expected calls leave other rows the second time; a tool is not deterministic."
    for call, answer, has_changed in zip(task.expected_calls, answers, changed, strict=True):
        if has_changed != tools[call.tool].mutates:
            did = "changed a row" if has_changed else "changed no row"
            says = f"mutates={tools[call.tool].mutates}"
            yield f"task {task.uid}: {call.tool} {did}, and is declared with {says}; correct one of the two."
        yield from _problems_of_text(f"task {task.uid}: the answer of {call.tool}", answer.text)
    own_reads = tuple(call for call in task.expected_calls if not tools[call.tool].mutates)
    try:
        passed, _, _ = _run(template, (*task.expected_calls, *own_reads, *reads))
    except ToolFault as fault:
        yield f"task {task.uid}: a further read raised: {fault}"
    else:
        if not passed:
            yield f"task {task.uid}: reads after the expected calls fail the check; a read must change nothing."


def _one_read_of_each_tool(tasks: Iterable[Task], tools: dict[str, Tool]) -> list[ExpectedCall]:
    """One call of each reading tool, taken from the expected calls of all tasks."""
    reads: dict[str, ExpectedCall] = {}
    for call in itertools.chain.from_iterable(task.expected_calls for task in tasks):
        if call.tool in tools and not tools[call.tool].mutates:
            reads.setdefault(call.tool, call)
    return list(reads.values())


def _problems_of_idling(template: WorldTemplate) -> Iterator[str]:
    task, passes = template.task, template.initial == template.expected
    if passes and not task.idle_passes:
        yield f"task {task.uid}: doing nothing passes; let it leave a record, or say why in idle_passes."
    if not passes and task.idle_passes:
        yield f"task {task.uid}: idle_passes is {task.idle_passes!r}, but doing nothing fails; set it to None."


def _problems_of_near_misses(template: WorldTemplate) -> Iterator[str]:
    """The family's near misses, and each mutating call left out, even if the family does not list it."""
    task, calls = template.task, template.task.expected_calls
    tools = domain_tools(template.domain)
    variants = dict(template.domain.families[task.family].near_misses(task))
    if not variants:
        yield f"task {task.uid}: its family has no near misses for it; add some."
    for index, call in enumerate(calls):
        without = (*calls[:index], *calls[index + 1 :])
        if tools[call.tool].mutates and without not in variants.values():
            variants[f"call {index + 1} ({call.tool}) left out"] = without
    reading = {tool.name for tool in tools.values() if not tool.mutates}
    for label, variant in variants.items():
        try:  # reads change nothing and only take time, so they are left out
            passed, answers, _ = _run(template, [call for call in variant if call.tool not in reading])
        except ToolFault as fault:
            yield f"task {task.uid}: near miss '{label}' raised: {fault}"
            continue
        if passed:
            yield f"task {task.uid}: near miss '{label}' passes the check; the check does not detect that mistake."
        invalid = [answer.text for answer in answers if answer.status == "invalid"]
        if invalid:
            yield f"task {task.uid}: near miss '{label}' has a call that is invalid: {invalid[0]}"


def _problems_of_conversation(task: Task, domain: Domain) -> Iterator[str]:
    """The expected calls, and the scripted agent without errors, through the environment itself."""
    env = ToolEnv(task.uid)
    env.source, env.task = DomainSource(domain), task  # the record that is checked may differ from the registered one
    oracle = (Turn(calls=(ToolCall("", call.tool, call.arguments),)) for call in task.expected_calls)
    try:
        env.reset(seed=0)
        for turn in (*oracle, Turn(text=DONE_MARK)):
            env.step(turn)
        if env.episode(0).reward != 1.0:
            yield f"task {task.uid}: the expected calls do not get reward 1 from the environment."
        yield from _problems_of_scripted(env, domain, task)
    except EnvironmentFault as fault:
        yield f"task {task.uid}: a fault in the environment: {fault}"
    finally:
        env.close()


def _problems_of_scripted(env: ToolEnv, domain: Domain, task: Task) -> Iterator[str]:
    agent = domain.families[task.family].scripted(task, rng(0, "contract", task.uid), 0.0)
    env.reset(seed=0)
    next_turn = functools.partial(next, agent)
    ended = False
    while not ended:
        try:
            turn = next_turn()
        except StopIteration:
            yield f"task {task.uid}: the scripted agent returned before it said {DONE_MARK}."
            return
        except Exception as error:  # the episode boundary: any error of the agent is a problem of its domain
            yield f"task {task.uid}: the scripted agent raised {words_of(error)}."
            return
        num_before = len(env.transcript) + 1
        _, _, terminated, truncated, _ = env.step(turn)
        next_turn = functools.partial(agent.send, env.transcript[num_before:])
        ended = terminated or truncated
    episode = env.episode(0)
    assert episode.report is not None
    if episode.reward != 1.0 or episode.finish_reason is not FinishReason.DONE:
        yield (
            f"task {task.uid}: the scripted agent without errors ended with {episode.finish_reason}, reward "
            f"{episode.reward:g}: {'; '.join(episode.report.differences)}\n{_indented(episode.transcript[1:])}"
        )


def _indented(transcript: Transcript) -> str:
    return "\n".join(f"    {line}" for line in transcript_text(transcript).splitlines())


# --- the domain as a whole ----------------------------------------------------------------------------------


def _problems_of_all(tasks: Sequence[Task], domain: Domain) -> Iterator[str]:
    idle = [task.uid for task in tasks if task.idle_passes]
    if len(idle) > MAX_IDLE_SHARE * len(tasks):
        yield (
            f"doing nothing passes {len(idle)} of {len(tasks)} tasks, more than {MAX_IDLE_SHARE:.0%}: "
            f"{', '.join(idle[:5])}; let a refusal leave a record."
        )
    used = {call.tool for task in tasks for call in task.expected_calls}
    for tool in domain.tools:
        if tool.name not in used:
            yield f"tool {tool.name}: no task expects a call of it, so nothing tests it; use or remove it."


def _problems_of_lock(hashes: Mapping[str, str], domain: Domain) -> Iterator[str]:
    changed = [uid for uid, sha256 in hashes.items() if domain.lock.get(uid) != sha256]
    gone = [uid for uid in domain.lock if uid not in hashes]
    if changed or gone:
        yield (
            f"{FILE_NAME} does not fit: {len(changed)} tasks are new or changed ({', '.join(changed[:3])}), "
            f"{len(gone)} are gone ({', '.join(gone[:3])}). A change of text or grading is a change of the "
            f"benchmark: raise the domain's version, then run `python -m tbx_envs.testing.domain_contract "
            f"lock {domain.name}`."
        )


def lock_hash(task: Task, domain: Domain) -> str:
    """SHA-256 (hex) over the task, the domain's texts for agents and users, and the effect of the expected calls.

    Raises:
        DomainError: an expected call is rejected or fails.
    """
    template = template_for(task, domain)
    _, answers, _ = _run(template, task.expected_calls)
    parts = [content_hash(task), _texts(domain), [answer.text for answer in answers], digest(template.expected)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _texts(domain: Domain) -> str:
    tools = [[tool.name, tool.description, tool.input_schema] for tool in domain.tools]
    topics = {name: [topic.pattern, *topic.phrasings] for name, topic in domain.topics.items()}
    return json.dumps([domain.rules, tools, topics, dict(domain.consents)], sort_keys=True)


def lock_hashes(domain: Domain) -> dict[str, str]:
    """uid -> hash of every frozen task.

    Raises:
        DomainError: an expected call of a task is rejected or fails.
    """
    return {uid: lock_hash(_build(domain, uid), domain) for uid in domain.uids()}


def relocked(domain: Domain, old_text: str) -> str:
    """The new text of the lock file.

    Raises:
        DomainError: a task in `old_text` has changed or is gone, and the version was not raised.
    """
    old_version, old = parse_lock(old_text, where=f"{domain.name}/{FILE_NAME}")
    hashes = lock_hashes(domain)
    changed = [uid for uid, sha256 in old.items() if hashes.get(uid) != sha256]
    if changed and domain.version <= old_version:
        raise DomainError(
            f"{len(changed)} tasks of '{domain.name}' changed since version {old_version} was locked "
            f"({', '.join(changed[:3])}), but the version is {domain.version}; raise it, then lock again."
        )
    return lock_text(domain, hashes)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tbx_envs.testing.domain_contract", description=__doc__)
    parser.add_argument("action", choices=("check", "lock"))
    parser.add_argument("domain", choices=NAMES)
    options = parser.parse_args(arguments)
    domain = load_domain(options.domain)
    try:
        if options.action == "check":
            check_domain(domain)
            print(f"{domain.name}: {len(domain.uids())} tasks of version {domain.version} keep the contract.")
        else:
            file = Path(str(resources.files(f"tbx_envs.domains.{domain.name}"))) / FILE_NAME
            old_text = file.read_text(encoding="utf-8") if file.exists() else ""
            file.write_text(relocked(domain, old_text), encoding="utf-8")
            print(f"{file}: {len(domain.uids())} tasks of version {domain.version}.")
    except DomainError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
