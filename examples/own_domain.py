"""A domain of your own in one file: a library's desk that renews loans, checked and played.

    python examples/own_domain.py

Tables, three tools, rules, one family of tasks with their near misses, and a scripted agent. `check_domain` proves for
every task that the expected calls pass and that doing nothing, leaving a call out and each near miss fail. One sees
that it finds nothing wrong, and one episode with reward 1.0.
"""

from __future__ import annotations

import datetime
import json
from typing import Annotated

from sqlalchemy import Boolean, Column, ForeignKey, Integer, MetaData, Table, Text, insert, select, update

import tbx_envs
from tbx_envs import ExpectedCall, Family, Task, ToolRejection, Topic, UserContext, WorldClock, tool
from tbx_envs.seeding import rng

NAME, VERSION = "library", 1
RULES = """You work at the desk of a library and renew loans.
- Ask for the number of the reader's card, and find the loan with it. Never guess a number.
- A loan that another reader has reserved is not renewed; record that with `refuse_renewal`.
- When it is done or refused, say so in a last message that ends with <DONE>."""

# --- tables: what the check compares ------------------------------------------------------------------------

METADATA = MetaData()
LOANS = Table(
    "loans",
    METADATA,
    Column("loan_id", Text, primary_key=True),
    Column("card", Text, nullable=False),
    Column("title", Text, nullable=False),
    Column("reserved", Boolean, nullable=False),
    Column("renewals", Integer, nullable=False),
)
REFUSALS = Table("refusals", METADATA, Column("loan_id", Text, ForeignKey("loans.loan_id"), primary_key=True))


# --- tools: their docstrings and annotations are what the model reads ---------------------------------------


@tool(mutates=False)
def find_loans(context, *, card: Annotated[str, "Number of the reader's card, for example C12."]) -> list:
    """List the loans of a card."""
    loans = context.db.execute(select(LOANS).where(LOANS.c.card == card).order_by(LOANS.c.loan_id))
    return [dict(row._mapping) for row in loans]


@tool(mutates=True)
def renew_loan(context, *, loan_id: Annotated[str, "Id of the loan, for example L3."]) -> dict:
    """Renew a loan for three weeks."""
    raised = update(LOANS).where(LOANS.c.loan_id == loan_id).values(renewals=LOANS.c.renewals + 1)
    if context.db.execute(raised).rowcount == 0:
        raise ToolRejection(f"There is no loan '{loan_id}'.")
    return {"renewed": loan_id}


@tool(mutates=True)
def refuse_renewal(context, *, loan_id: Annotated[str, "Id of the loan, for example L3."]) -> dict:
    """Record that a loan was not renewed."""
    if context.db.scalar(select(LOANS.c.loan_id).where(LOANS.c.loan_id == loan_id)) is None:
        raise ToolRejection(f"There is no loan '{loan_id}'.")
    context.db.execute(insert(REFUSALS), {"loan_id": loan_id})
    return {"refused": loan_id}


# --- a family: any number gives a task, and the same number the same task -----------------------------------


def build(number, split):
    random = rng(0, NAME, "renew", number)
    titles = random.sample(["Atlas of Clouds", "Bread", "Chess Endings", "Dunes", "Eels", "Ferns"], 4)
    cards = random.sample(range(10, 99), 2)
    reserved = number % 2 == 1
    loans = [
        {"loan_id": f"L{place}", "card": f"C{cards[place % 2]}", "title": title, "reserved": False, "renewals": 0}
        for place, title in enumerate(titles)
    ]
    wanted = loans[random.randrange(4)]
    for loan in loans:  # the others are the opposite, so that only looking at the right one helps
        loan["reserved"] = reserved if loan is wanted else not reserved
    decision = ExpectedCall("refuse_renewal" if reserved else "renew_loan", {"loan_id": wanted["loan_id"]})
    return Task(
        uid=f"{NAME}/renew/{number:03d}",
        domain=NAME,
        family="renew",
        version=VERSION,
        split=split,
        query=f"Hello, can I keep {wanted['title']} for longer?",
        user=UserContext(f"I would like to renew {wanted['title']}.", {"card": wanted["card"]}, {"default": True}),
        world={"loans": tuple(loans)},
        expected_calls=(ExpectedCall("find_loans", {"card": wanted["card"]}), decision),
        labels={"pressure": 1.0, "title": wanted["title"]},
    )


def near_misses(task):
    """Wrong decisions, with arguments that the tools accept."""
    find, decision = task.expected_calls
    opposite = {"renew_loan": "refuse_renewal", "refuse_renewal": "renew_loan"}[decision.tool]
    other = "L0" if decision.arguments["loan_id"] != "L0" else "L1"
    return {
        "the rule is not kept": (find, ExpectedCall(opposite, decision.arguments)),
        "another loan": (find, ExpectedCall(decision.tool, {"loan_id": other})),
        "a record too many": (find, decision, ExpectedCall(opposite, decision.arguments)),
    }


def scripted(task, random, error_rate):
    """Keeps the rules, except that it overlooks a reservation now and then."""
    answer = yield tbx_envs.Turn("What is the number of your card?")
    card = next(word.strip(".") for word in answer[0].text.split() if word.startswith("C"))
    found = yield call("find_loans", card=card)
    loan = next(loan for loan in json.loads(found[0].text) if loan["title"] == task.labels["title"])
    overlooks = random.random() < error_rate * task.labels["pressure"]
    yield call("refuse_renewal" if loan["reserved"] and not overlooks else "renew_loan", loan_id=loan["loan_id"])
    yield tbx_envs.Turn("That is settled. <DONE>")


def call(name, **arguments):
    return tbx_envs.Turn(calls=(tbx_envs.ToolCall("", name, arguments),))


DOMAIN = tbx_envs.Domain(
    name=NAME,
    version=VERSION,
    metadata=METADATA,
    tools=(find_loans, renew_loan, refuse_renewal),
    rules=RULES,
    clock=WorldClock(datetime.datetime(2031, 3, 3, 10, 0)),
    topics={"card": Topic(r"\bcard\b", ("My card is {value}.", "It is {value}."))},
    consents={"default": r"shall I|is that right"},
    families={"renew": Family("renew", "A reader wants a loan renewed.", 6, 4, build, near_misses, scripted)},
    lock={},
)


def main():
    tbx_envs.register_domain(DOMAIN)
    tbx_envs.check_domain(DOMAIN, uids=DOMAIN.uids())  # named one by one, since no tasks.lock is kept beside this file
    print(f"{len(DOMAIN.uids())} tasks keep the contract")

    env = tbx_envs.ToolEnv("library/renew/001")
    observation, _ = env.reset(seed=0)
    print(f"user: {observation}")
    agent = scripted(env.task, rng(0, "example"), error_rate=0.0)
    turn, ended = next(agent), False
    while not ended:
        start = len(env.transcript) + 1
        observation, reward, terminated, truncated, _ = env.step(turn)
        calls = "; ".join(f"{call.name} {dict(call.arguments)}" for call in turn.calls)
        print(f"agent: {turn.text or calls}\n    {observation}")
        ended = terminated or truncated
        if not ended:
            turn = agent.send(env.transcript[start:])
    print(f"reward {reward}")
    return reward


if __name__ == "__main__":
    main()
