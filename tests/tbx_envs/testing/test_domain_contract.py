"""The contract check must be able to fail: each kind of broken domain is told from a sound one."""

import dataclasses

import pytest

from tbx_envs.domains import load_domain
from tbx_envs.domains.clinic.tables import VISITS
from tbx_envs.domains.lock import lock_text, parse_lock
from tbx_envs.errors import DomainError
from tbx_envs.seeding import rng
from tbx_envs.task import ExpectedCall
from tbx_envs.testing import domain_contract
from tbx_envs.testing.domain_contract import check_domain, find_problems, lock_hashes, relocked

CLINIC = load_domain("clinic")
UID = "clinic/cancel_visit/000"


def with_family(name="cancel_visit", **changes):
    """The clinic with one family changed."""
    family = dataclasses.replace(CLINIC.families[name], **changes)
    return dataclasses.replace(CLINIC, families={**CLINIC.families, name: family})


def with_tasks(**changes):
    """The clinic with a field of each task of a family changed; a callable is given the task."""

    def build(number, split):
        task = CLINIC.families["cancel_visit"].build(number, split)
        return dataclasses.replace(
            task, **{field: value(task) if callable(value) else value for field, value in changes.items()}
        )

    return with_family(build=build)


def with_tool(name, **changes):
    """The clinic with one tool changed."""
    tools = tuple(dataclasses.replace(t, **changes) if t.name == name else t for t in CLINIC.tools)
    return dataclasses.replace(CLINIC, tools=tools)


def small(domain, *, locked=True):
    """The domain with few frozen tasks, so that all of them are looked at quickly."""
    families = {name: dataclasses.replace(f, num_train=4, num_heldout=1) for name, f in domain.families.items()}
    domain = dataclasses.replace(domain, families=families, lock={})
    if locked:
        domain = dataclasses.replace(domain, lock=lock_hashes(domain))
    return domain


def test_the_clinic_keeps_the_contract():
    check_domain("clinic")


def test_a_small_copy_of_the_clinic_keeps_it_too():
    assert find_problems(small(CLINIC)) == []


def last_call_twice(task):
    return (*task.expected_calls, ExpectedCall("cancel_visit", task.expected_calls[-1].arguments))


def peek_and_cancel(context, *, patient_id, clinician=None):
    context.db.execute(VISITS.update().values(moves=VISITS.c.moves + 1))
    return []


def nothing_happens(context, *, visit_id):
    return {"cancelled": True}


def breaks(context, **arguments):
    raise ZeroDivisionError("division by zero")


def build_that_counts():
    calls = []

    def build(number, split):
        calls.append(number)
        task = CLINIC.families["cancel_visit"].build(number, split)
        return dataclasses.replace(task, query=f"{task.query} ({len(calls)})")

    return build


def silent_agent(task, random_, error_rate):
    return
    yield


BROKEN = {
    "expected call that a tool rejects": (with_tasks(expected_calls=last_call_twice), "was answered 'rejected'"),
    "doing nothing passes": (with_tasks(expected_calls=lambda t: t.expected_calls[:1]), "doing nothing passes"),
    "idle_passes where doing nothing fails": (with_tasks(idle_passes="it may"), "idle_passes is 'it may'"),
    "near miss that is none": (
        with_family(near_misses=lambda t: {"the same": t.expected_calls}),
        "near miss 'the same' passes",
    ),
    "near miss with an invalid call": (
        with_family(near_misses=lambda t: {"odd": (ExpectedCall("cancel_visit", {"visit": "V1"}),)}),
        "near miss 'odd' has a call that is invalid",
    ),
    "no near miss": (with_family(near_misses=lambda t: {}), "has no near misses"),
    "agent that breaks the rules": (
        with_family(scripted=lambda t, r, error_rate: CLINIC.families[t.family].scripted(t, r, 1e9)),
        "the scripted agent without errors ended with done, reward 0",
    ),
    "agent that says nothing at all": (with_family(scripted=silent_agent), "returned before it said"),
    "task that changes from one building to the next": (with_family(build=build_that_counts()), "two tasks"),
    "task of another version": (with_tasks(version=99), "version is 99, expected 1"),
    "task of another split": (with_tasks(split="heldout"), "split is 'heldout', expected 'train'"),
    "task without pressure": (with_tasks(labels={}), "no number 'pressure'"),
    "reading tool that writes": (with_tool("list_visits", function=peek_and_cancel), "list_visits changed a row"),
    "mutating tool that does not": (with_tool("cancel_visit", function=nothing_happens), "cancel_visit changed no"),
    "tool that crashes": (with_tool("list_visits", function=breaks), "ZeroDivisionError"),
    "tool without a description": (with_tool("list_visits", description=" "), "it has no description"),
    "argument without a description": (
        with_tool("list_visits", input_schema={"type": "object", "properties": {"patient_id": {"type": "string"}}}),
        "argument patient_id has no description",
    ),
    "two tools of one name": (
        dataclasses.replace(CLINIC, tools=(*CLINIC.tools, CLINIC.tools[0])),
        "there are two of that name",
    ),
    "rules that name today": (
        dataclasses.replace(CLINIC, rules=f"Today is {domain_contract.datetime.date.today().isoformat()}."),
        "the rules: it names today",
    ),
    "tool that names a library's version": (
        with_tool("list_visits", description=f"Made by SQLAlchemy {__import__('sqlalchemy').__version__}."),
        "of SQLAlchemy",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_domain_is_found_out(kind):
    domain, words = BROKEN[kind]
    problems = find_problems(domain, uids=[UID])
    assert any(words in problem for problem in problems), problems


def test_a_mutating_call_left_out_is_noticed_even_where_the_family_does_not_think_of_it():
    unnoticed = with_tool("cancel_visit", function=nothing_happens)
    family = dataclasses.replace(unnoticed.families["cancel_visit"], near_misses=lambda t: {"nothing": ()})
    domain = dataclasses.replace(unnoticed, families={**unnoticed.families, "cancel_visit": family})
    problems = find_problems(domain, uids=[UID])
    assert any("(cancel_visit) left out' passes the check" in problem for problem in problems), problems


def test_all_problems_are_listed_at_once_and_named_by_task():
    with pytest.raises(DomainError) as raised:
        check_domain(with_family(near_misses=lambda t: {"the same": t.expected_calls}), uids=[UID, UID[:-1] + "1"])
    assert "2 problems" in str(raised.value)
    assert UID in str(raised.value)
    assert UID[:-1] + "1" in str(raised.value)


def test_too_many_tasks_that_idling_passes_are_found_even_with_a_reason():
    def build(number, split):
        task = CLINIC.families["cancel_visit"].build(number, split)
        return dataclasses.replace(task, expected_calls=task.expected_calls[:1], idle_passes="only a question")

    problems = find_problems(small(with_family(build=build, near_misses=lambda t: {"none": ()})))
    assert any("doing nothing passes 5 of 40 tasks" in problem for problem in problems)


def test_a_tool_that_no_task_uses_is_found():
    spare = dataclasses.replace(CLINIC.tools[0], name="find_anyone")
    domain = small(dataclasses.replace(CLINIC, tools=(*CLINIC.tools, spare)))
    assert find_problems(domain) == [
        "tool find_anyone: no task expects a call of it, so nothing tests it; use or remove it."
    ]


def test_a_change_of_the_rules_or_of_a_tool_text_does_not_fit_the_lock():
    domain = small(CLINIC)
    for changed in (
        dataclasses.replace(domain, rules=domain.rules + "\n- Be kind."),
        dataclasses.replace(
            with_tool("list_slots", description="List slots."), families=domain.families, lock=domain.lock
        ),
    ):
        (problem,) = find_problems(changed)
        assert "40 tasks are new or changed" in problem
        assert "raise the domain's version" in problem


def test_the_lock_is_rewritten_for_new_tasks_and_for_a_new_version_only():
    domain = small(CLINIC)
    locked = lock_text(domain, domain.lock)
    assert relocked(domain, locked) == locked
    fewer = "".join(locked.splitlines(keepends=True)[:-3])
    assert relocked(domain, fewer) == locked  # three tasks are new, none has changed
    changed = dataclasses.replace(domain, rules=domain.rules + "\n- Be kind.")
    with pytest.raises(DomainError, match="raise it, then lock again"):
        relocked(changed, locked)
    version, hashes = parse_lock(relocked(dataclasses.replace(changed, version=2), locked), where="here")
    assert version == 2
    assert hashes.keys() == domain.lock.keys()
    assert all(hashes[uid] != sha256 for uid, sha256 in domain.lock.items())


def test_a_lock_file_that_cannot_be_read_says_where():
    assert parse_lock("", where="here") == (0, {})
    with pytest.raises(DomainError, match="here line 2"):
        parse_lock("version 1\nclinic/cancel_visit/000\n", where="here")


def test_the_scripted_agent_of_the_contract_is_a_function_of_the_uid():
    family = CLINIC.families["cancel_visit"]
    task = family.build(0, "train")
    first, second = (next(family.scripted(task, rng(0, "contract", UID), 0.0)) for _ in range(2))
    assert first == second


def test_the_command_line_prints_what_it_did(capsys, monkeypatch):
    monkeypatch.setattr(domain_contract, "load_domain", lambda name: small(CLINIC))
    assert domain_contract.main(["check", "clinic"]) == 0
    assert capsys.readouterr().out == "clinic: 40 tasks of version 1 keep the contract.\n"
    monkeypatch.setattr(domain_contract, "load_domain", lambda name: small(CLINIC, locked=False))
    assert domain_contract.main(["check", "clinic"]) == 1
    assert "tasks.lock does not fit" in capsys.readouterr().err
