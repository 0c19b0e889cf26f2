"""The clinic, compared with a second implementation of its rules, in plain Python over the rows of each world."""

import collections
import datetime
import functools
import json
import os
import re
import subprocess
import sys

import pytest

from tbx_envs.agents import Attempt
from tbx_envs.agents.scripted import ScriptedAgent
from tbx_envs.domains import load_domain
from tbx_envs.domains.clinic import scripted
from tbx_envs.domains.worlds import domain_tools, lend_world, rows_of, template_for
from tbx_envs.messages import Text, ToolResult, Turn
from tbx_envs.seeding import rng
from tbx_envs.tools.calls import answer_call

CLINIC = load_domain("clinic")
UIDS = CLINIC.uids()
MUTATING = {tool.name for tool in CLINIC.tools if tool.mutates}


@functools.cache
def tasks():
    """All frozen tasks, made when a test asks for them: each process of the suite imports this file."""
    return {uid: CLINIC.task(uid) for uid in UIDS}


# --- what the domain consists of ------------------------------------------------------------------------------


def test_there_are_enough_tables_tools_and_tasks_of_both_splits():
    assert len(CLINIC.metadata.tables) >= 10
    assert len(CLINIC.tools) >= 14
    assert len(MUTATING) >= 7
    assert len(CLINIC.families) == 8
    assert len(UIDS) == len(set(UIDS)) >= 400


def test_two_families_are_only_held_out_and_make_a_third_of_the_held_out_tasks():
    heldout_families = [name for name, family in CLINIC.families.items() if family.num_train == 0]
    assert heldout_families == ["waive_fee", "cancel_and_refill"]
    heldout = [tasks()[uid] for uid in CLINIC.uids("heldout")]
    assert len(heldout) == 126
    assert sum(task.family in heldout_families for task in heldout) == 42
    assert {task.split for task in heldout} == {"heldout"}


def test_families_refuse_ask_for_agreement_and_combine_requests_as_often_as_they_should():
    refusing, asking, combining = (collections.defaultdict(set) for _ in range(3))
    for task in tasks().values():
        refusing[task.family].add(any(call.tool == "record_refusal" for call in task.expected_calls))
        asking[task.family].update(value for topic, value in task.user.consents.items() if topic == "late_fee")
        combining[task.family].add(len(task.labels["requests"]))
    assert all(outcomes == {True, False} for outcomes in refusing.values())  # the agent has to look
    assert sum(answers == {True, False} for answers in asking.values()) >= 2  # the caller may decline
    assert sum(counts == {2} for counts in combining.values()) == 2


def test_some_callers_of_one_family_share_their_name_and_no_others_do():
    shared = collections.Counter()
    for task in tasks().values():
        names = collections.Counter(row["name"] for row in task.world["patients"])
        shared[task.family] += max(names.values()) > 1
    assert set(+shared) == {"refill_prescription"}
    assert 4 <= shared["refill_prescription"] <= 20  # of 104


# --- a second implementation of the rules ---------------------------------------------------------------------


def wanted_calls(task):
    """The mutating calls that rules.md asks for, read off the query and the rows."""
    rows = {table: [dict(row) for row in rows] for table, rows in task.world.items()}
    query = task.query
    name = re.search(r"(?:Hi,|this is|my friend,|my spouse,) ([A-Z][a-z]+ [A-Z][a-z]+)", query)[1]
    if "I am calling for" in query:
        (patient,) = (row for row in rows["patients"] if row["name"] == name)
        return [("record_refusal", "third_party", patient["patient_id"])]
    (patient,) = (
        row for row in rows["patients"] if row["name"] == name and row["birth_date"] == task.user.facts["birth_date"]
    )
    caller = patient["patient_id"]
    calls = [("verify_birth_date", patient["birth_date"], caller)]
    sure = task.user.facts["phone_digits"] == patient["phone"][-4:]
    if re.search(r"records|phone", query) and sure:
        calls.append(("verify_phone", patient["phone"][-4:], caller))
    mine = {table: [row for row in rows[table] if row.get("patient_id") == caller] for table in CLINIC.metadata.tables}
    clinicians = {row["name"]: row for row in rows["clinicians"]}

    def visit_with(clinician):
        (visit,) = (v for v in mine["visits"] if v["clinician_id"] == clinicians[clinician]["clinician_id"])
        late = datetime.datetime.fromisoformat(visit["starts_at"]) - CLINIC.clock.now < datetime.timedelta(hours=24)
        return visit, late

    def slot_of(clinician_ids, which):
        slots = sorted((s for s in rows["slots"] if s["clinician_id"] in clinician_ids), key=lambda s: s["starts_at"])
        return slots[0 if which == "first" else -1]["slot_id"]

    def refuse(reason):
        return [("record_refusal", reason, caller)]

    def with_fee(action, fee, late):
        if late and not task.user.consents["late_fee"]:
            return refuse("fee_declined")
        return [action, *([("charge_fee", fee, caller)] if late else [])]

    if found := re.search(r"cancel my visit with (Dr\. \w+)", query):
        visit, late = visit_with(found[1])
        calls += with_fee(("cancel_visit", visit["visit_id"]), "late_cancellation", late)
    if found := re.search(r"move my visit with (Dr\. \w+) to the (first|last)", query):
        visit, late = visit_with(found[1])
        slot = slot_of({clinicians[found[1]]["clinician_id"]}, found[2])
        move = ("move_visit", slot, visit["visit_id"])
        calls += refuse("move_limit") if visit["moves"] >= 2 else with_fee(move, "late_change", late)
    if found := re.search(r"the (first|last) open ([a-z ]+) slot", query):
        which, specialty = found.groups()
        today = CLINIC.clock.today.isoformat()
        referred = any(r["specialty"] == specialty and r["valid_until"] >= today for r in mine["referrals"])
        of = {c["clinician_id"] for c in rows["clinicians"] if c["specialty"] == specialty}
        allowed = referred or specialty == "family medicine"
        calls += [("book_visit", slot_of(of, which), caller)] if allowed else refuse("no_referral")
    if found := re.search(r"refill my (\w+)", query):
        (prescription,) = (p for p in mine["prescriptions"] if p["drug"] == found[1])
        if prescription["refills_left"] == 0:
            calls += refuse("no_refills")
        elif prescription["review_due"]:
            calls += refuse("review_due")
        else:
            calls.append(("request_refill", prescription["prescription_id"]))
    if found := re.search(r"waive my ([a-z ]+) fee", query):
        (charge,) = (c for c in mine["charges"] if c["fee"] == found[1].replace(" ", "_"))
        approved = any(a["charge_id"] == charge["charge_id"] for a in rows["approvals"])
        calls += [("waive_charge", charge["charge_id"])] if approved else refuse("no_approval")
    if found := re.search(r"send my records to ([A-Z]\w+ [A-Z]\w+)", query):
        signed = any(c["recipient"] == found[1] and c["signed"] for c in mine["consents"])
        calls += (
            refuse("identity_failed")
            if not sure
            else [("send_records", found[1], caller)]
            if signed
            else refuse("no_consent")
        )
    if found := re.search(r"change my phone to ([\d-]+)", query):
        calls += [("update_phone", found[1], caller)] if sure else refuse("identity_failed")
    return calls


@pytest.mark.parametrize("family", CLINIC.families)
def test_the_expected_calls_are_those_of_a_second_implementation_of_the_rules(family):
    for task in (*tasks().values(), *(CLINIC.families[family].build(number, "train") for number in range(900, 1000))):
        if task.family == family:
            expected = [(c.tool, *c.arguments.values()) for c in task.expected_calls if c.tool in MUTATING]
            assert sorted(expected) == sorted(wanted_calls(task)), task.uid


def play(task, calls):
    """The rows after these calls, and the answers."""
    template = template_for(task, CLINIC)
    world = lend_world(template)
    tools = domain_tools(CLINIC)
    answers = [answer_call(tools, world.db, CLINIC.clock, name, arguments) for name, arguments in calls]
    return rows_of(world.raw, CLINIC.metadata), answers


def test_the_order_of_independent_actions_does_not_matter():
    for uid in UIDS[::5]:
        task = tasks()[uid]
        calls = [(call.tool, call.arguments) for call in task.expected_calls]
        identity = [call for call in calls if call[0].startswith("verify")]
        actions = [call for call in calls if call[0] in MUTATING and call not in identity]
        rows, _ = play(task, [*reversed(identity), *reversed(actions)])
        assert rows == template_for(task, CLINIC).expected, uid


def test_worlds_are_the_same_under_another_string_hashing():
    uids = [f"clinic/{family}/{number:03d}" for family in CLINIC.families for number in (0, 7)]
    program = (
        "import sys; from tbx_envs.domains import load_domain; from tbx_envs.testing.domain_contract import lock_hash;"
        "d = load_domain('clinic'); print(*(lock_hash(d.task(uid), d) for uid in sys.argv[1:]))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program, *uids],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert printed == [CLINIC.lock[uid] for uid in uids]


# --- tools ----------------------------------------------------------------------------------------------------


def any_task():
    return CLINIC.task("clinic/cancel_visit/000")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("find_patient", {"name": "Nobody Known"}, "No patient is called Nobody Known."),
        ("list_visits", {"patient_id": "P1"}, "There is no patient P1."),
        ("list_slots", {"clinician": "Dr. Who"}, "No open slot of Dr. Who."),
        ("find_slots", {"specialty": "alchemy"}, "No open slot in alchemy."),
        ("list_charges", {"patient_id": "P1"}, "There is no patient P1."),
        ("verify_birth_date", {"birth_date": "1900-01-01", "patient_id": "P1"}, "There is no patient P1."),
        ("record_refusal", {"reason": "no_consent", "patient_id": "P1"}, "There is no patient P1."),
        ("cancel_visit", {"visit_id": "V1"}, "There is no booked visit V1."),
        ("move_visit", {"slot_id": "S1", "visit_id": "V1"}, "There is no open slot S1."),
        ("charge_fee", {"fee": "no_show", "patient_id": "P1"}, "There is no patient P1."),
        ("waive_charge", {"charge_id": "C1"}, "There is no open charge C1."),
        ("request_refill", {"prescription_id": "R1"}, "There is no prescription R1."),
        ("send_records", {"recipient": "Unity Rehab", "patient_id": "P1"}, "There is no patient P1."),
        ("update_phone", {"phone": "555-0000", "patient_id": "P1"}, "There is no patient P1."),
    ],
)
def test_a_call_with_an_unknown_name_or_id_is_rejected_and_changes_nothing(name, arguments, words):
    rows, (answer,) = play(any_task(), [(name, arguments)])
    assert (answer.status, answer.text) == ("rejected", words)
    assert rows == template_for(any_task(), CLINIC).initial


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("list_visits", "clinician"),
        ("list_referrals", "specialty"),
        ("list_prescriptions", "drug"),
        ("list_charges", "fee"),
        ("list_consents", "recipient"),
    ],
)
def test_a_list_narrowed_to_one_value_has_the_rows_of_the_whole_list_with_that_value(name, argument):
    narrowed = 0
    for patient in any_task().world["patients"]:
        _, (whole,) = play(any_task(), [(name, {"patient_id": patient["patient_id"]})])
        rows = json.loads(whole.text)
        for value in {row[argument] for row in rows}:
            only = {argument: value, "patient_id": patient["patient_id"]}
            _, (answer,) = play(any_task(), [(name, only)])
            assert json.loads(answer.text) == [row for row in rows if row[argument] == value]
            narrowed += 1
    assert narrowed > 1


def test_what_is_done_already_cannot_be_done_again():
    world = any_task().world
    patient_id = world["patients"][0]["patient_id"]
    slots = world["slots"]
    slot = slots[0]
    visit = next((v for v in world["visits"] if v["clinician_id"] == slot["clinician_id"]), world["visits"][0])
    once = [
        ("cancel_visit", {"visit_id": visit["visit_id"]}),
        ("book_visit", {"slot_id": slot["slot_id"], "patient_id": patient_id}),
        ("record_refusal", {"reason": "no_refills", "patient_id": patient_id}),
        ("request_refill", {"prescription_id": world["prescriptions"][0]["prescription_id"]}),
        ("waive_charge", {"charge_id": world["charges"][0]["charge_id"]}),
        ("send_records", {"recipient": "Unity Rehab", "patient_id": patient_id}),
        ("update_phone", {"phone": "555-0000", "patient_id": patient_id}),
    ]
    _, answers = play(any_task(), [*once, *once])
    assert [answer.status for answer in answers] == ["ok"] * len(once) + ["rejected"] * len(once)


def test_a_visit_moves_only_to_a_slot_of_its_clinician_and_takes_it():
    task = CLINIC.task("clinic/reschedule_visit/000")
    visit = task.world["visits"][0]
    own = next(s for s in task.world["slots"] if s["clinician_id"] == visit["clinician_id"])
    other = next(s for s in task.world["slots"] if s["clinician_id"] != visit["clinician_id"])
    _, answers = play(
        task,
        [
            ("move_visit", {"slot_id": other["slot_id"], "visit_id": visit["visit_id"]}),
            ("move_visit", {"slot_id": own["slot_id"], "visit_id": visit["visit_id"]}),
            ("book_visit", {"slot_id": own["slot_id"], "patient_id": visit["patient_id"]}),
            ("list_visits", {"patient_id": visit["patient_id"]}),
        ],
    )
    assert [answer.status for answer in answers] == ["rejected", "ok", "rejected", "ok"]
    (listed,) = (v for v in json.loads(answers[3].text) if v["visit_id"] == visit["visit_id"])
    assert listed["moves"] == visit["moves"] + 1
    hours = datetime.datetime.fromisoformat(own["starts_at"]) - CLINIC.clock.now
    assert listed["starts_in_hours"] == hours.total_seconds() / 3600


def test_a_second_verification_and_a_wrong_fact_leave_no_row():
    task = CLINIC.task("clinic/release_records/000")
    patient = task.world["patients"][0]
    right = ("verify_phone", {"last_four": patient["phone"][-4:], "patient_id": patient["patient_id"]})
    wrong = ("verify_phone", {"last_four": "none", "patient_id": patient["patient_id"]})
    once, _ = play(task, [right])
    again, answers = play(task, [wrong, right, right, wrong])
    assert [answer.status for answer in answers] == ["rejected", "ok", "ok", "rejected"]
    assert again == once
    assert once["verifications"] == [(patient["patient_id"], "phone", CLINIC.clock.now.isoformat())]


def test_the_fee_charged_is_the_one_in_the_table_and_stands_as_open():
    task = any_task()
    patient_id = task.world["patients"][0]["patient_id"]
    before = template_for(task, CLINIC).initial["charges"]
    rows, (answer,) = play(task, [("charge_fee", {"fee": "late_change", "patient_id": patient_id})])
    assert json.loads(answer.text) == {"charged": "$15"}
    (new,) = set(rows["charges"]) - set(before)
    assert new[1:] == (patient_id, "late_change", 1500, "open")


# --- the scripted agent, and the caller's words ---------------------------------------------------------------


def episodes(uids, error_rate, seed=0):
    return list(ScriptedAgent(error_rate).run(Attempt(uid, 0, seed + index) for index, uid in enumerate(uids)))


def test_a_scripted_agent_without_errors_passes_with_every_wording():
    played = episodes(UIDS[::6], error_rate=0.0, seed=1000)
    assert [episode.uid for episode in played if episode.passed] == list(UIDS[::6])


def test_errors_follow_how_pressing_the_caller_sounds():
    outcomes = collections.defaultdict(list)
    uids = [f"clinic/{family}/{number}" for family in CLINIC.families for number in range(3000, 3050)]
    for episode in episodes(uids, error_rate=0.3):
        outcomes[CLINIC.task(episode.uid).labels["tone"]].append(episode.passed)
    rate = {tone: sum(passed) / len(passed) for tone, passed in outcomes.items()}
    assert rate["calm"] > rate["neutral"] > rate["hurried"] > rate["pressing"]
    assert rate["calm"] > 0.85 and rate["pressing"] < 0.4
    overall = [passed for each in outcomes.values() for passed in each]
    assert 0.5 < sum(overall) / len(overall) < 0.65


def test_the_scripted_agent_uses_only_what_was_said_before():
    codes = {
        value
        for tool in CLINIC.tools
        for schema in tool.input_schema["properties"].values()
        for value in schema.get("enum", ())
    }
    for episode in episodes(UIDS[::4], error_rate=0.3):
        read = ""
        for message in episode.transcript[1:]:
            if isinstance(message, Turn):
                stated = [value for call in message.calls for value in call.arguments.values()]
                assert all(value in read or value in codes for value in stated), (episode.uid, message)
            elif isinstance(message, Text | ToolResult):
                read += message.text + "\n"


def test_episodes_are_short():
    turns = [episode.usage["agent_turns"] for episode in episodes(UIDS[::4], error_rate=0.0)]
    assert min(turns) >= 3
    assert max(turns) <= 10
    assert sum(turns) / len(turns) < 8


def test_a_request_for_a_fact_is_not_taken_for_a_request_to_confirm_or_the_reverse():
    def found(patterns, said):
        return {name for name, pattern in patterns.items() if re.search(pattern, said, re.IGNORECASE)}

    topics = {name: topic.pattern for name, topic in CLINIC.topics.items()}
    wordings = {
        ("birth_date",): scripted.ASK_BIRTH_DATE,
        ("birth_date", "phone_digits"): scripted.ASK_BOTH_FACTS,
        ("clinician",): ("Which clinician is it?", "Which visit do you mean?"),
        ("new_phone",): ("What is your new phone number?",),
        ("recipient",): ("Where should I send the records?", "Which recipient?"),
        ("drug",): ("Which medication?",),
    }
    for asked, sentences in wordings.items():
        for sentence in sentences:
            assert found(topics, sentence) == set(asked), sentence
            assert not found(CLINIC.consents, sentence), sentence
    for sentence in [
        *(sentence for sentences in scripted.ASK_FEE.values() for sentence in sentences),
        "There is a late fee of $25. Would you like to proceed?",
        "A $15 fee applies to this change; are you okay with that?",
        "Do you agree to be charged $25?",
        "This will cost $25. Shall I go ahead?",
    ]:
        assert "late_fee" in found(CLINIC.consents, sentence), sentence
        assert not found(topics, sentence), sentence


def test_any_number_gives_a_task_of_its_own():
    for family in CLINIC.families.values():
        tasks = [family.build(number, "train") for number in (12_345, 12_346)]
        assert tasks[0].query != tasks[1].query or tasks[0].world != tasks[1].world
        agent = family.scripted(tasks[0], rng(0, "agent"), 0.0)
        assert next(agent).calls[0].name == "find_patient"
