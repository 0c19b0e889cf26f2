"""An agent of your own, measured: rules written in Python cancel visits at the clinic's front desk.

    python examples/own_agent.py

An agent is a generator: it yields turns and is sent the messages that answer each one. Two of them attempt the same 14
held-out tasks. Both talk alike; one skips the check of who is calling. One sees a pass rate of 100% for the careful
agent and of 0% for the hasty one, and the rows that the check misses in the hasty one's database.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import tbx_envs


def front_desk(attempt, opening, *, checks_identity):
    """Cancels the caller's visit; a late one costs a fee that the caller has to agree to."""
    said = opening.messages[-1].text
    name = re.search(r"(?:Hi, |this is )(\w+ \w+)", said)[1]
    clinician = re.search(r"Dr\. \w+", said)[0]

    patients = yield call("find_patient", name=name)
    patient_id = rows(patients)[0]["patient_id"]
    if checks_identity:
        answer = yield tbx_envs.Turn("What is your birth date?")
        birth_date = re.search(r"\d{4}-\d\d-\d\d", answer[0].text)[0]
        yield call("verify_birth_date", patient_id=patient_id, birth_date=birth_date)

    visits = yield call("list_visits", patient_id=patient_id, clinician=clinician)
    visit = rows(visits)[0]
    late = visit["starts_in_hours"] < 24
    if late:
        answer = yield tbx_envs.Turn("That is late and costs $25. Do you agree to the fee?")
    if late and not answer[0].text.startswith("Yes"):
        yield call("record_refusal", patient_id=patient_id, reason="fee_declined")
        yield tbx_envs.Turn("Then your visit stays as it is. <DONE>")
        return
    yield call("cancel_visit", visit_id=visit["visit_id"])
    if late:
        yield call("charge_fee", patient_id=patient_id, fee="late_cancellation")
    yield tbx_envs.Turn("Your visit is cancelled. <DONE>")


def call(tool, **arguments):
    """A turn that makes one call."""
    return tbx_envs.Turn(calls=(tbx_envs.ToolCall("", tool, arguments),))


def rows(answer):
    """What the one call of a turn listed."""
    return json.loads(answer[0].text)


class FrontDesk:
    """The agent as an evaluation takes it: `run` gives back one episode for each attempt."""

    def __init__(self, *, checks_identity):
        self.checks_identity = checks_identity
        self.episodes = []

    def run(self, attempts):
        def make_agent(attempt, opening):
            return front_desk(attempt, opening, checks_identity=self.checks_identity)

        for episode in tbx_envs.play_turns(attempts, make_agent):
            self.episodes.append(episode)
            yield episode


def main():
    tasks = [uid for uid in tbx_envs.select_tasks("heldout") if "/cancel_visit/" in uid]
    agents = {"careful": FrontDesk(checks_identity=True), "hasty": FrontDesk(checks_identity=False)}
    for name, agent in agents.items():
        with tempfile.TemporaryDirectory() as folder:  # or a folder to keep, for `tbx report` and `tbx show`
            path = Path(folder) / "rows.jsonl"
            found = tbx_envs.run(agent, tasks, attempts=2, seed=0, rows_path=path, max_void_retries=1)
        measured = tbx_envs.summarize(found, attempts=2)
        print(f"{name}: pass@1 {measured['pass_at_1']:.0%}, {measured['observed_2_of_2']} of {len(tasks)} tasks 2/2")
    failed = next(episode for episode in agents["hasty"].episodes if episode.reward == 0.0)
    print(f"hasty at {failed.uid}: {'; '.join(failed.report.differences)}")


if __name__ == "__main__":
    main()
